"""What can be sharded: odd and empty shards, other dims than 0, and what is refused, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPModule, fully_shard
from tests.common import combinations, models, parity, workers
from tests.common.meshes import mesh

pytestmark = pytest.mark.ranks

STEPS = 2


def _rows(rows: int) -> list[int]:
    """How many rows each rank holds: ceil(rows / ranks) from rank 0 on, while any are left."""
    size = dist.get_world_size()
    chunk = -(-rows // size)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(size)]


# -- models ---------------------------------------------------------------------------------------


def _linear(inputs: int = models.DIM, outputs: int = models.DIM) -> nn.Module:
    layer = nn.Linear(inputs, outputs)
    layer.is_unit = True
    return layer


class _WithNothing(nn.Module):
    """Holds parameters without elements: no rows, and rows without columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(models.DIM, models.DIM)
        self.layer.is_unit = True
        self.no_rows = nn.Parameter(torch.empty(0, models.DIM))
        self.no_columns = nn.Parameter(torch.empty(models.DIM, 0))
        self.head = nn.Linear(models.DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        x = torch.cat([x, x @ self.no_rows.T], dim=1)  # nothing is added to the columns
        x = x + (x @ self.no_columns) @ self.no_columns.T  # a sum over nothing
        return self.head(x)


class _Empty(nn.Module):
    """A group of nothing but parameters without elements."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, models.DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.nothing.T) @ self.nothing


def _around_nothing() -> nn.Module:
    return nn.Sequential(nn.Linear(models.DIM, models.DIM), _Empty(), nn.Linear(models.DIM, 2))


def _of_columns(columns: int) -> nn.Module:
    return nn.Sequential(_linear(columns), nn.Tanh(), nn.Linear(models.DIM, 3))


def _convolution() -> nn.Module:
    """Three dims, the middle one uneven; the parameters of one group lie on different dims."""
    layers = nn.Unflatten(1, (3, models.DIM)), nn.Conv1d(3, 5, 3), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(5 * (models.DIM - 2), 2))


class _Experts(nn.Module):
    """One expert too few for two ranks: on dim 0 it would pad more than 1 MiB.

    It uses hidden units of all its parts, but few: sums of 35,000 would round too differently.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(1, models.DIM, 35_000) / models.DIM)
        self.down = nn.Parameter(torch.randn(1, 35_000, models.DIM) / models.DIM)
        self.shift = nn.Parameter(torch.randn(1, 300_001))  # uneven on dim 1, too
        self.scale = nn.Parameter(torch.ones(1, models.DIM))
        self.is_unit = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.up[0, :, ::5000]) @ self.down[0, ::5000]
        return x * self.scale + self.shift[0, 3 :: 300_000 // models.DIM][: models.DIM]


def _with_experts() -> nn.Module:
    return nn.Sequential(nn.Linear(models.DIM, models.DIM), _Experts(), nn.Linear(models.DIM, 2))


def _called_by_two_names() -> nn.Module:
    """A shared module, unlike a tied parameter, may be a unit of its own."""
    layer = _linear()
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(models.DIM, 2))


def _nothing_in_units() -> nn.Module:
    model = nn.Sequential(_linear(), nn.GELU(), nn.Identity(), nn.Linear(models.DIM, 2))
    model[1].is_unit = model[2].is_unit = True
    return model


def _nothing_of_its_own() -> nn.Module:
    return nn.Sequential(_linear(), nn.Tanh(), _linear(outputs=2))


# -- all of them, in one way ----------------------------------------------------------------------


class Case(NamedTuple):
    """A model, the widths of its inputs and outputs, and arguments for `parity.shard`."""

    build: Callable[[], nn.Module]
    inputs: int = models.DIM
    outputs: int = 2
    arguments: dict[str, Any] = {}  # noqa: RUF012  # nobody writes it
    torch_too: bool = True


def _matrices_on_dim_1(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


def _matrices_on_last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(-1) if param.ndim > 1 else None


KEPT, FREED = ({"reshard_after_forward": frees} for frees in (False, True))
DIM_1: dict[str, Any] = {"shard_placement_fn": _matrices_on_dim_1}
MIXED_ON_LAST: dict[str, Any] = {"shard_placement_fn": _matrices_on_last_dim, "mixed": True}

ON_TWO = {
    **{
        f"groups whose every dim 0 is {rows}": Case(
            partial(models.OddMLP, dims=(rows, rows)), outputs=rows, arguments=arguments
        )
        for rows, arguments in ((1, FREED), (3, KEPT), (5, FREED), (7, KEPT))
    },
    # torch's FSDP2 breaks in backward without elements, and refuses uneven shards on other dims.
    "groups without elements": Case(_around_nothing, torch_too=False),
    "a middle dim": Case(_convolution, 3 * models.DIM, arguments=DIM_1, torch_too=False),
    "a module called by two names": Case(_called_by_two_names),
    "units without parameters": Case(_nothing_in_units),
    "a root without parameters": Case(_nothing_of_its_own),
}
ON_FOUR = {
    "odd rows": Case(models.OddMLP, outputs=1),
    # Four numbers, none of them on rank 3.
    "every parameter smaller than the world": Case(partial(nn.Linear, 3, 1), 3, 1),
    "parameters without elements": Case(_WithNothing, arguments=FREED, torch_too=False),
    "parameters without elements, kept": Case(_WithNothing, arguments=KEPT, torch_too=False),
    "dim 1": Case(models.MLP, outputs=4, arguments=DIM_1),
    "the last dim, mixed": Case(models.MLP, outputs=4, arguments=MIXED_ON_LAST),
    **{
        f"{columns} columns on dim 1": Case(
            partial(_of_columns, columns), columns, 3, DIM_1 | arguments, torch_too=False
        )
        for columns, arguments in ((1, FREED), (3, KEPT), (5, FREED), (7, KEPT))
    },
}


@workers.ranks(2, 4)
def test_parts_and_training() -> None:
    cases = ON_TWO if dist.get_world_size() == 2 else ON_FOUR
    for name, case in cases.items():
        print("case:", name)  # in the report of a failure
        build = partial(models.seeded, case.build)
        _check_parts(name, build(), case.arguments)
        parity.check_training(
            build,
            parity.regression_batches(case.inputs, case.outputs, steps=STEPS),
            torch_too=case.torch_too,
            **case.arguments,
        )


def _check_parts(case: str, plain: nn.Module, arguments: dict[str, Any]) -> None:
    """Each rank holds the rows of torch's chunks, on the dim that was asked for."""
    model = parity.shard(parity.OURS, copy.deepcopy(plain), **arguments)
    rank = dist.get_rank()
    for unit in models.units(model):
        assert isinstance(unit, FSDPModule), case
        unit.unshard()
        unit.reshard()
    placement = arguments.get("shard_placement_fn", lambda _: None)
    for (key, whole), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        name = f"{case}: {key}"
        dim = 0 if placement(whole) is None else placement(whole).dim % whole.ndim
        assert isinstance(param, nn.Parameter), name
        assert isinstance(param.data, DTensor), name
        assert param.placements == (Shard(dim),), name
        assert (param.shape, param.stride()) == (whole.shape, whole.stride()), name
        assert param.device_mesh == parity.world_mesh(), name
        rows = _rows(whole.shape[dim])
        part = whole.detach().narrow(dim, sum(rows[:rank]), rows[rank])
        parity.assert_equal(param.to_local().detach(), part, name)
        parity.assert_equal(parity.full(param), whole.detach(), name)


# -- the dim that pads least ----------------------------------------------------------------------


@workers.ranks(2)
def test_a_dim_that_would_pad_too_much_is_not_sharded() -> None:
    model = parity.shard(parity.OURS, models.seeded(_with_experts))
    placements = {name: param.placements for name, param in model.named_parameters()}
    assert placements["1.up"] == placements["1.down"] == placements["1.shift"] == (Shard(1),)
    assert placements["1.scale"] == placements["0.weight"] == (Shard(0),)
    (report,) = (report for report in fsdp2.report(model).groups if report.name == "1")
    assert report.dims == {"1.up": (1,), "1.down": (1,), "1.shift": (1,)}
    assert report.padding_bytes < 1024
    for name in ("down", "shift"):
        whole = getattr(models.seeded(_with_experts)[1], name).detach()
        parity.assert_equal(parity.full(getattr(model[1], name)), whole, name)


def _check_with_experts(**arguments: Any) -> None:
    batches = parity.regression_batches(models.DIM, 2, steps=STEPS)
    parity.check_training(partial(models.seeded, _with_experts), batches, **arguments)


OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


@workers.ranks(2)
@pytest.mark.parametrize("arguments", combinations.often([{"mixed": True}, {}, OFFLOADED]))
def test_training_on_the_dim_that_pads_least(arguments: dict[str, Any]) -> None:
    _check_with_experts(**arguments)


@pytest.mark.extended
@workers.ranks(4)
def test_training_on_the_dim_that_pads_least_with_copies_or_a_smaller_group() -> None:
    _check_with_experts(mesh=mesh("replicate", "shard", shape=(2, 2)))
    _check_with_experts(reshard_after_forward=2)


# -- what is no tie, and no parameter -------------------------------------------------------------


@workers.ranks(2)
def test_equal_parameters_that_are_not_tied_are_fine() -> None:
    """Models made and dropped one after another reuse ids: none of them may be taken for a tie."""
    for _ in range(3):
        model = nn.Sequential(nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM))
        with torch.no_grad():
            model[1].weight.copy_(model[0].weight)
        for layer in model:
            fully_shard(layer, mesh=parity.world_mesh())
        fully_shard(model, mesh=parity.world_mesh())
        model(torch.randn(2, models.DIM)).sum().backward()
        grads = [parity.full(layer.weight.grad) for layer in model]
        assert not torch.equal(*grads)


def _buffered() -> nn.Module:
    return nn.Sequential(models.Buffered(), models.Buffered(), nn.Linear(models.DIM, 2))


@workers.ranks(2)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_buffers_stay_as_they_are(mixed: bool) -> None:
    """Neither sharded nor cast; written in forward as without sharding, by each rank for itself."""

    def run(api: Any) -> Any:
        model = parity.shard(api, models.seeded(_buffered), mixed=mixed)
        batches = parity.regression_batches(models.DIM, 2, steps=STEPS)
        steps = parity.train_sharded(model, parity.adamw, parity.regression_loss, batches)
        return {"steps": steps, "buffers": dict(model.named_buffers())}

    ours = parity.same_as_torch(run)
    before = dict(models.seeded(_buffered).named_buffers())
    buffers = ours["buffers"]
    assert buffers.keys() == before.keys()
    for name, buffer in buffers.items():
        assert type(buffer) is Tensor, name
        assert buffer.dtype == before[name].dtype, name
    assert buffers["0.calls"].item() == STEPS
    assert buffers["0.mean"].abs().sum().item() > 0
    parity.assert_equal(buffers["0.shift"], before["0.shift"], "untouched buffer")
