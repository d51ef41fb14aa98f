"""torch.distributed.checkpoint: save, load, continue; into torch's FSDP2 and back; 2 ranks to 4."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.common import models, parity, workers
from tests.common.combinations import each_once

pytestmark = [pytest.mark.ranks, pytest.mark.feature("State dicts, DCP")]

VOCAB = 13
HALF = 3  # steps before the checkpoint, and after it
WIDE = 256  # wide enough for the headers of the files not to count

APIS = {"ours": parity.OURS, "torch": parity.TORCH}


def build(api: ModuleType, seed: int = 0) -> nn.Module:
    """A sharded transformer; another seed where loading must overwrite what it holds."""
    return parity.shard(api, models.seeded(models.Transformer, seed=seed))


def wide() -> nn.Module:
    """Sixteen parameters of one group."""
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(8)))


def batches() -> list[Tensor]:
    return parity.language_batches(VOCAB, steps=2 * HALF)


def train(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> list[parity.Step]:
    """`train_sharded`, with an optimizer that was there before."""
    return parity.train_sharded(model, lambda _: optimizer, parity.language_loss, batches)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every full optimizer tensor, by parameter and name."""
    tensors = {
        f"{name}.{key}": value
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }
    whole = parity.full_all(tensors.values())
    return {key: value for key, value in zip(tensors, whole, strict=True) if value is not None}


def save(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=path)


def load(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )


def uninterrupted(api: ModuleType = parity.OURS) -> list[parity.Step]:
    model = build(api)
    return train(model, parity.adamw(model.parameters()), batches())


@workers.ranks(2, extended=(4,))
@pytest.mark.parametrize(
    ("writer", "reader"), [("ours", "ours"), ("ours", "torch"), ("torch", "ours")]
)
def test_training_continues_from_a_checkpoint(writer: str, reader: str, tmp_path: Path) -> None:
    """Ours to ours, ours to torch's FSDP2 and back: the same steps as without a break."""
    model = build(APIS[writer])
    optimizer = parity.adamw(model.parameters())
    before = train(model, optimizer, batches()[:HALF])
    save(model, optimizer, tmp_path / "checkpoint")
    state = optimizer_state(model, optimizer)

    model = build(APIS[reader], seed=1)
    optimizer = parity.adamw(model.parameters())
    load(model, optimizer, tmp_path / "checkpoint")
    parity.assert_equal(parity.full_params(model), before[-1].params, "what was loaded")
    parity.assert_equal(optimizer_state(model, optimizer), state, "optimizer state")
    after = train(model, optimizer, batches()[HALF:])
    if dist.get_world_size() == 2 or writer == reader:
        parity.assert_equal(before + after, uninterrupted(), "without a break")
    else:
        parity.assert_close(
            before + after, uninterrupted(), parity.REORDERED_FP32, "without a break"
        )


@workers.ranks(2)
@pytest.mark.parametrize("trained_first", [False, True])
def test_loading_into_a_model_that_has_trained(trained_first: bool, tmp_path: Path) -> None:
    """In place, between steps of a live model and optimizer, whatever is gathered at the time."""
    model = build(parity.OURS)
    optimizer = parity.adamw(model.parameters())
    before = train(model, optimizer, batches()[:HALF])
    save(model, optimizer, tmp_path)
    if trained_first:
        train(model, optimizer, batches())
        with torch.no_grad():
            model(parity.my_part(batches()[0]))  # leaves the root whole
    load(model, optimizer, tmp_path)
    after = train(model, optimizer, batches()[HALF:])
    parity.assert_equal(before + after, uninterrupted(), "without a break")


@workers.ranks(2, 4)
def test_files_hold_each_shard_once(tmp_path: Path) -> None:
    """torch.save of a view writes its whole storage: a flat buffer behind the parameters must not
    multiply the files."""
    model = parity.shard(parity.OURS, models.seeded(wide))
    optimizer = parity.adamw(model.parameters())
    model(torch.randn(2, WIDE)).sum().backward()
    optimizer.step()
    save(model, optimizer, tmp_path)
    dist.barrier()
    params = sum(p.numel() * p.element_size() for p in model.parameters())
    state = 3 * params  # the parameters and AdamW's two moments of each
    written = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert state <= written < 1.5 * state


@workers.ranks(2)
def test_files_of_plain_torch_save_too(tmp_path: Path) -> None:
    """A rank's shards by torch.save: the file is no larger than they and their names are."""
    model = parity.shard(parity.OURS, models.seeded(wide))
    local = {name: value.to_local() for name, value in model.state_dict().items()}
    path = tmp_path / f"rank{dist.get_rank()}.pt"
    size = sum(value.numel() * value.element_size() for value in local.values())
    torch.save({name: value.clone() for name, value in local.items()}, path)
    assert size <= path.stat().st_size < 1.5 * size
    loaded = torch.load(path)
    parity.assert_equal(loaded, local, "what was loaded")


# -- another number of ranks ----------------------------------------------------------------------


def _save_part(api_name: str, path: Path) -> list[parity.Step]:
    model = build(APIS[api_name])
    optimizer = parity.adamw(model.parameters())
    steps = train(model, optimizer, batches()[:HALF])
    save(model, optimizer, path)
    return steps


def _load_rest(api_name: str, path: Path) -> list[parity.Step]:
    model = build(APIS[api_name], seed=1)
    optimizer = parity.adamw(model.parameters())
    load(model, optimizer, path)
    return train(model, optimizer, batches()[HALF:])


def _uninterrupted() -> list[parity.Step]:
    return uninterrupted()


@each_once(sizes={"2-4": (2, 4), "4-2": (4, 2)}, writer=[*APIS])
def test_another_number_of_ranks(sizes: tuple[int, int], writer: str, tmp_path: Path) -> None:
    """What some ranks saved, others load: the same training but for the order of sums."""
    first, second = sizes
    before = workers.run_on_ranks(first, _save_part, writer, tmp_path)[0]
    after = workers.run_on_ranks(second, _load_rest, "ours", tmp_path)
    whole = workers.run_on_ranks(first, _uninterrupted)[0]
    parity.assert_close(before, whole[:HALF], parity.REORDERED_FP32, "before the checkpoint")
    for rank, steps in enumerate(after):
        parity.assert_close(steps, whole[HALF:], parity.FP32, f"rank {rank}, after the checkpoint")


# -- full state dicts -----------------------------------------------------------------------------


@workers.ranks(2, 4)
def test_full_state_dict_out_and_in() -> None:
    """The whole model on rank 0 as plain tensors, and from there into shards, odd rows included."""
    plain = models.seeded(models.OddMLP)
    model = parity.shard(parity.OURS, models.seeded(models.OddMLP))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        parity.assert_equal(dict(state), dict(plain.state_dict()), "rank 0 has it all")
    else:
        assert state == {}

    other = parity.shard(parity.OURS, models.seeded(models.OddMLP, seed=1))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(state), options=options)
    assert all(isinstance(param, DTensor) for param in other.parameters())
    parity.assert_equal(parity.full_params(other), dict(plain.named_parameters()), "loaded")
    x = torch.randn(2, models.DIM, generator=torch.Generator().manual_seed(0))
    parity.assert_close(other(x).detach(), plain(x).detach(), parity.FP32, "computes with it")


@workers.ranks(2)
def test_full_optimizer_state_dict() -> None:
    def run(api: Any) -> dict[str, Any]:
        model = build(api)
        optimizer = parity.adamw(model.parameters())
        train(model, optimizer, batches()[:2])
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        return dict(state.get("state", {}))

    ours, torchs = run(parity.OURS), run(parity.TORCH)
    assert bool(ours) == (dist.get_rank() == 0)
    parity.assert_equal(ours, torchs, "torch")


@workers.ranks(2)
def test_plain_tensors_are_refused() -> None:
    """An unsharded state dict does not fit shards; loading it must not go through unnoticed."""
    build = partial(
        models.OddMLP, (7, 3, 5, 2)
    )  # DTensor took one plain element for any, before 2.13
    model = parity.shard(parity.OURS, models.seeded(build))
    before = parity.full_params(model)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        model.load_state_dict(models.seeded(build, seed=1).state_dict())
    parity.assert_equal(parity.full_params(model), before, "what it held")
    model(torch.randn(2, models.DIM)).sum().backward()
    grads = parity.full_grads(model)
    assert all(grad is not None for grad in grads.values())
    assert parity.over_ranks(torch.ones(())).item() == 1.0
    assert parity.full(model.layers[0].weight).shape == (7, models.DIM)
