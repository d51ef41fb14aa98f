"""State dicts: at any time and for free; from one parallelism to another; by torch.save; assigned.

Checkpoints are moved between every two ways to spread a model that `tests.common.parallelisms`
knows, and between ours and torch's FSDP2.
"""

from __future__ import annotations

import copy
import io
import itertools
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

from tests.common import models, parallelisms, parity, workers
from tests.common.errors import raises
from tests.common.meshes import TORCH_VERSION

pytestmark = pytest.mark.ranks

HALF = 2  # steps before the checkpoint, and after it


def world(**arguments: Any) -> tuple[nn.Module, parallelisms.Parallelism]:
    """A ladder of ours over all ranks on a 1-D mesh."""
    parallelism = parallelisms.PARALLELISMS[f"flat{dist.get_world_size()}"]
    return parallelism.shard(parity.OURS, parallelisms.ladder(**arguments)), parallelism


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """The whole tensors of a flat state dict."""
    return dict(zip(state, parallelisms.gather(state.values()), strict=True))


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return tensors(
        {
            f"{name}.{key}": value
            for name, param in model.named_parameters()
            for key, value in optimizer.state[param].items()
        }
    )


# -- at any time, for free ------------------------------------------------------------------------


def _take_state_dicts(name: str) -> None:
    parallelism = parallelisms.PARALLELISMS[name]
    model = parallelism.shard(parity.OURS, parallelisms.ladder())
    (batch,) = parallelisms.ladder_batches(1)
    expected = dict(parallelisms.ladder().state_dict())
    locals_ = {name: p.to_local() for name, p in model.named_parameters()}

    def check(when: str) -> None:
        with parity.CountCollectives() as counter:
            state = model.state_dict()
        assert counter.total == 0, f"{when}: {counter.counts}"
        for name, value in state.items():
            assert isinstance(value, DTensor) == (name in locals_), f"{when}: {name}"
            if name in locals_:
                assert value.to_local().data_ptr() == locals_[name].data_ptr(), f"{when}: {name}"
        parity.assert_equal(tensors(state), expected, when)

    check("new")
    loss = model(parallelism.part(batch)[0]).sum()
    check("after forward")
    loss.backward()
    check("after backward")
    with torch.no_grad():
        model(parallelism.part(batch)[0])
    check("after evaluation")
    for module in model.modules():
        if isinstance(module, parity.OURS.FSDPModule):
            module.unshard()
    check("inside unshard()")
    handle = model.unshard(async_op=True)
    check("while an all-gather may be running")
    handle.wait()
    model(parallelism.part(batch)[0]).sum().backward()
    check("and afterwards")


@pytest.mark.parametrize("name", ["flat2", "flat4", "hsdp", "tp"])
def test_any_time_without_communication(name: str) -> None:
    """Shards, of the parameters' own memory, whatever is gathered."""
    workers.run_on_ranks(parallelisms.PARALLELISMS[name].ranks, _take_state_dicts, name)


@workers.ranks(2)
def test_optimizer_state_dict_alone_after_evaluation() -> None:
    """The root is gathered then; reshard() gives its parameters the names that are looked up."""
    model, parallelism = world()
    optimizer = parity.adamw(model.parameters())
    parallelisms.losses(model, optimizer, parallelism, parallelisms.ladder_batches(1))
    with torch.no_grad():
        model(torch.zeros(2, models.DIM))
    model.reshard()
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == {name for name, _ in model.named_parameters()}


# -- from one parallelism to another --------------------------------------------------------------


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    return {
        "model": tensors(model.state_dict()),
        "optimizer": optimizer_tensors(model, optimizer),
    }


def _save(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=path)


def _load(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )


def _write(api: str, name: str, path: Path) -> Any:
    parallelism = parallelisms.PARALLELISMS[name]
    model = parallelism.shard(parallelisms.APIS[api], parallelisms.ladder())
    optimizer = parity.adamw(model.parameters())
    before = parallelisms.losses(
        model, optimizer, parallelism, parallelisms.ladder_batches(2 * HALF)[:HALF]
    )
    _save(model, optimizer, path)
    return before, _state(model, optimizer)


def _read(api: str, name: str, path: Path) -> Any:
    parallelism = parallelisms.PARALLELISMS[name]
    model = parallelism.shard(parallelisms.APIS[api], parallelisms.ladder(seed=1))
    optimizer = parity.adamw(model.parameters())
    _load(model, optimizer, path)
    loaded = _state(model, optimizer)
    after = parallelisms.losses(
        model, optimizer, parallelism, parallelisms.ladder_batches(2 * HALF)[HALF:]
    )
    return after, loaded


def _moves() -> list[Any]:
    """(writer, parallelism, reader, parallelism), at least one of the two ours.

    By default each parallelism is written and read, by ours and for or from torch's.
    """
    every = ("flat2", "flat4", "hsdp", "tp", "plain")
    moves = [("ours", a, "ours", b) for a, b in itertools.permutations(every, 2)]
    for a, b in itertools.product(every[:-1], repeat=2):
        moves += [("ours", a, "torch", b), ("torch", a, "ours", b)]
    default = {
        ("ours", "flat2", "ours", "flat4"),
        ("ours", "plain", "ours", "tp"),
        ("ours", "hsdp", "torch", "flat4"),
        ("torch", "flat4", "ours", "hsdp"),
        ("torch", "tp", "ours", "tp"),
    }
    assert default <= set(moves)
    return [
        pytest.param(
            *move, id="-".join(move), marks=[] if move in default else [pytest.mark.extended]
        )
        for move in moves
    ]


@pytest.mark.parametrize(("writer", "first", "reader", "second"), _moves())
def test_a_checkpoint_moves(
    writer: str, first: str, reader: str, second: str, tmp_path: Path
) -> None:
    """What one wrote the other holds, to the bit; training goes on as if nothing had happened."""
    plain = parallelisms.PARALLELISMS["plain"]
    model = parallelisms.ladder()
    batches = parallelisms.ladder_batches(2 * HALF)
    expected = parallelisms.losses(model, parity.adamw(model.parameters()), plain, batches)
    path = tmp_path / "checkpoint"
    wrote = workers.run_on_ranks(
        parallelisms.PARALLELISMS[first].ranks, _write, writer, first, path
    )
    read = workers.run_on_ranks(
        parallelisms.PARALLELISMS[second].ranks, _read, reader, second, path
    )
    for before, state in wrote:
        parity.assert_close(before, expected[:HALF], parity.FP32, "losses before")
        parity.assert_equal(state, wrote[0][1], "another rank's state")
    for after, state in read:
        parity.assert_equal(state, wrote[0][1], "what was loaded")
        parity.assert_close(after, expected[HALF:], parity.FP32, "losses after")


@workers.ranks(2)
def test_a_checkpoint_is_loaded_into_a_model_that_has_trained(tmp_path: Path) -> None:
    """In place, between steps of a live model and optimizer, whose root is whole at the time."""
    model, parallelism = world()
    optimizer = parity.adamw(model.parameters())
    batches = parallelisms.ladder_batches(2 * HALF)
    parallelisms.losses(model, optimizer, parallelism, batches[:HALF])
    _save(model, optimizer, tmp_path)
    losses = parallelisms.losses(model, optimizer, parallelism, batches[HALF:])
    expected = _state(model, optimizer)
    with torch.no_grad():
        model(parallelism.part(batches[0])[0])
    _load(model, optimizer, tmp_path)
    again = parallelisms.losses(model, optimizer, parallelism, batches[HALF:])
    parity.assert_equal(again, losses, "the same steps again")
    parity.assert_equal(_state(model, optimizer), expected, "the same end")


# -- torch.save and deepcopy ----------------------------------------------------------------------


class Dtypes(nn.Module):
    """A group with parameters of three dtypes, one without rows on the last ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 64)
        self.narrow = nn.Linear(64, 64).bfloat16()
        self.table = nn.Parameter(torch.arange(64), requires_grad=False)
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).bfloat16()).float() * self.one + self.table


def _bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@workers.ranks(2, 4)
def test_torch_save_writes_each_tensor_once() -> None:
    """The file of a tensor holds that tensor and not its group; sizes are those of torch's."""

    def run(api: ModuleType) -> list[int]:
        torch.manual_seed(0)
        model = Dtypes()
        api.fully_shard(model, mesh=parity.world_mesh())
        state = model.state_dict()
        locals_ = {name: value.to_local() for name, value in state.items()}
        total = sum(local.nbytes for local in locals_.values())
        sizes = [len(_bytes(value)) for value in (dict(state), locals_)]
        assert all(total <= size < total + 8192 for size in sizes), f"{sizes} for {total}"
        for name, local in locals_.items():
            for value in (state[name], local, copy.deepcopy(state[name])):
                size = len(_bytes(value))
                assert local.nbytes <= size < local.nbytes + 4096, f"{name}: {size}"
        return sizes

    ours = run(parity.OURS)
    # Names of classes and padding of records are all that may differ.
    if TORCH_VERSION >= (2, 13):  # torch's takes no integers before
        assert abs(ours[1] - run(parallelisms.APIS["torch"])[1]) < 512


# -- load_state_dict ------------------------------------------------------------------------------


@workers.ranks(2, 4)
def test_assigned_shards_train_on() -> None:
    """With an optimizer made afterwards: tied weights are one parameter, frozen ones stay so."""
    source, parallelism = world(seed=1, tied=True, frozen=True)
    model, _ = world(tied=True, frozen=True)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert model.again.weight is model.inlet.weight
    assert len(list(model.parameters())) == len(list(source.parameters()))
    assert not model.head.bias.requires_grad

    def train(model: nn.Module) -> Any:
        params = [p for p in model.parameters() if p.requires_grad]
        found = parallelisms.losses(
            model, parity.adamw(params), parallelism, parallelisms.ladder_batches(2)
        )
        return found, tensors(model.state_dict())

    parity.assert_equal(train(model), train(source), "trained on")
    assert model.again.weight is model.inlet.weight


@workers.ranks(2)
@pytest.mark.parametrize("name", ["inlet.weight", "again.weight"])
@pytest.mark.parametrize("assign", [False, True])
def test_one_name_of_a_tied_weight(name: str, assign: bool) -> None:
    """A file that has it under one of its names, whichever."""

    def run(api: ModuleType) -> Any:
        parallelism = parallelisms.PARALLELISMS["flat2"]
        model = parallelism.shard(api, parallelisms.ladder(tied=True))
        source = parallelism.shard(api, parallelisms.ladder(seed=1, tied=True))
        state = {name: source.state_dict()[name].clone()}
        model.load_state_dict(state, strict=False, assign=assign)
        if api is parity.OURS:
            assert model.again.weight is model.inlet.weight
        model(torch.ones(2, models.DIM))
        model.reshard()
        if api is parity.OURS or not assign or name == "inlet.weight":
            (loaded,) = parallelisms.gather([model.inlet.weight])
            parity.assert_equal(loaded, parallelisms.gather([source.inlet.weight])[0], name)
        return tensors(model.state_dict())

    if assign and name == "again.weight":
        run(parity.OURS)  # torch's forgets it
    else:
        parity.same_as_torch(run)


@workers.ranks(2)
def test_assigning_a_models_own_shards_under_other_names() -> None:
    model, _ = world()
    state = model.state_dict()
    swapped = {
        **state,
        "inlet.weight": state["again.weight"],
        "again.weight": state["inlet.weight"],
    }
    before = tensors(state)
    model.load_state_dict(swapped, assign=True)
    x = torch.ones(2, models.DIM)
    plain = parallelisms.ladder()
    plain.inlet, plain.again = plain.again, plain.inlet
    parity.assert_close(model(x).detach(), plain(x).detach(), parity.FP32, "computes with them")
    after = tensors(model.state_dict())
    parity.assert_equal(after["inlet.weight"], before["again.weight"], "swapped")
    parity.assert_equal(after["again.weight"], before["inlet.weight"], "swapped")


@workers.ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_plain_tensors_are_refused_and_nothing_is_lost(assign: bool) -> None:
    """By value as by torch; assigned, with the parameter's name and what to do."""
    model, parallelism = world()
    before = tensors(model.state_dict())
    with raises("assigned-does-not-fit" if assign else "plain-state-dict"):
        model.load_state_dict(parallelisms.ladder(seed=1).state_dict(), assign=assign)
    if not assign:
        after = tensors(model.state_dict())
        buffers = {name for name, _ in model.named_buffers()}
        for name in before:
            if name not in buffers:
                parity.assert_equal(after[name], before[name], name)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    parallelisms.losses(
        model, parity.adamw(model.parameters()), parallelism, parallelisms.ladder_batches(1)
    )
    assert set(get_model_state_dict(model)) == set(before)


@workers.ranks(2)
def test_whole_tensors_while_a_unit_is_gathered() -> None:
    """torch's function finds gathered parameters then; the error says what it waits for."""
    model = parity.shard(parity.OURS, models.seeded(models.MLP))
    whole = models.seeded(models.MLP, seed=1).state_dict()
    options = StateDictOptions(full_state_dict=True)
    model(torch.ones(2, models.DIM))
    with raises("plain-state-dict") as error:
        set_model_state_dict(model, dict(whole), options=options)
    assert "reshard()" in str(error.value)
    model.reshard()
    set_model_state_dict(model, dict(whole), options=options)
    loaded = {name: param.full_tensor() for name, param in model.named_parameters()}
    parity.assert_equal(loaded, dict(whole), "loaded")
