"""torch.distributed.checkpoint: save, load, continue; into torch's FSDP2 and back; 2 ranks to 4."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from tests.common import models, parity, workers

pytestmark = pytest.mark.ranks

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
