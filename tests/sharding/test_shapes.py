"""What can be sharded: odd and empty shards, other dims than 0, and what is refused, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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

STEPS = 4


def _rows(rows: int) -> list[int]:
    """How many rows each rank holds: ceil(rows / ranks) from rank 0 on, while any are left."""
    size = dist.get_world_size()
    chunk = -(-rows // size)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(size)]


# -- dim 0 ----------------------------------------------------------------------------------------


@workers.ranks(2, 4)
def test_odd_rows_are_chunked_and_come_back_whole() -> None:
    plain = models.seeded(models.OddMLP)
    model = parity.shard(parity.OURS, models.seeded(models.OddMLP))
    rank = dist.get_rank()
    for (name, whole), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert isinstance(param, nn.Parameter), name
        assert isinstance(param.data, DTensor), name
        assert param.placements == (Shard(0),), name
        assert param.shape == whole.shape, name
        assert param.stride() == whole.stride(), name
        assert param.device_mesh == parity.world_mesh(), name
        local = param.to_local()
        rows = _rows(whole.shape[0])
        assert local.shape == (rows[rank], *whole.shape[1:]), name
        start = sum(rows[:rank])
        parity.assert_equal(local.detach(), whole.detach()[start : start + rows[rank]], name)
        parity.assert_equal(parity.full(param), whole.detach(), name)


@workers.ranks(2, extended=(4,))
@combinations.each_once(rows=[1, 3, 5, 7], reshard_after_forward=[True, False])
def test_training_with_odd_rows(rows: int, reshard_after_forward: bool) -> None:
    """Groups whose every dim 0 is `rows`: with 4 ranks, some ranks hold nothing of them."""
    model = partial(models.seeded, partial(models.OddMLP, dims=(rows, rows)))
    batches = parity.regression_batches(models.DIM, rows, steps=STEPS)
    parity.check_training(model, batches, reshard_after_forward=reshard_after_forward)


@workers.ranks(4)
def test_every_parameter_smaller_than_the_world() -> None:
    """The whole model holds four numbers, none of them on rank 3."""
    model = partial(models.seeded, partial(nn.Linear, 3, 1))
    parity.check_training(model, parity.regression_batches(3, 1, steps=STEPS))
    local = [param.to_local().numel() for param in parity.shard(parity.OURS, model()).parameters()]
    assert local == ([3, 1] if dist.get_rank() == 0 else [0, 0])


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


@workers.ranks(4, extended=(2,))
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_zero_element_parameters_train(reshard_after_forward: bool) -> None:
    """torch's FSDP2 breaks in backward here, so the unsharded model is the only judge."""
    batches = parity.regression_batches(models.DIM, 2, steps=STEPS)
    parity.check_training(
        partial(models.seeded, _WithNothing),
        batches,
        torch_too=False,
        reshard_after_forward=reshard_after_forward,
    )


@workers.ranks(2)
def test_a_group_of_nothing_but_zero_element_parameters() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0, models.DIM))
            self.is_unit = True

        def forward(self, x: Tensor) -> Tensor:
            return x + (x @ self.nothing.T) @ self.nothing

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(models.DIM, models.DIM), Empty(), nn.Linear(models.DIM, 2))

    parity.check_training(
        partial(models.seeded, build),
        parity.regression_batches(models.DIM, 2, steps=STEPS),
        torch_too=False,
    )


# -- other dims -----------------------------------------------------------------------------------


def _matrices_on_dim_1(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


def _matrices_on_last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(-1) if param.ndim > 1 else None


@workers.ranks(4, extended=(2,))
@combinations.each_once(
    placement=[_matrices_on_dim_1, _matrices_on_last_dim], mixed={"fp32": False, "mixed": True}
)
def test_shard_dim_1_even(placement: Any, mixed: bool) -> None:
    arguments = {"mixed": mixed, "shard_placement_fn": placement}
    model = parity.shard(parity.OURS, models.seeded(models.MLP), **arguments)
    weight = model.layers[0].weight
    assert weight.placements == (Shard(1),)
    assert weight.to_local().shape == (models.DIM, models.DIM // dist.get_world_size())
    assert model.layers[0].bias.placements == (Shard(0),)
    parity.check_training(
        partial(models.seeded, models.MLP),
        parity.regression_batches(models.DIM, 4, steps=STEPS),
        **arguments,
    )


@workers.ranks(4, extended=(2,))
@combinations.each_once(columns=[1, 3, 5, 7], reshard_after_forward=[True, False])
def test_shard_dim_1_uneven(columns: int, reshard_after_forward: bool) -> None:
    """torch's FSDP2 refuses this, so the unsharded model is the only judge."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(columns, models.DIM), nn.Tanh(), nn.Linear(models.DIM, 3))
        model[0].is_unit = True
        return model

    arguments = {
        "shard_placement_fn": _matrices_on_dim_1,
        "reshard_after_forward": reshard_after_forward,
    }
    model = parity.shard(parity.OURS, models.seeded(build), **arguments)
    weight = model[0].weight
    assert weight.placements == (Shard(1),)
    assert weight.shape == (models.DIM, columns)
    assert weight.to_local().shape == (models.DIM, _rows(columns)[dist.get_rank()])
    parity.assert_equal(
        parity.full(weight), models.seeded(build)[0].weight.detach(), "uneven columns"
    )
    parity.check_training(
        partial(models.seeded, build),
        parity.regression_batches(columns, 3, steps=STEPS),
        torch_too=False,
        **arguments,
    )


@workers.ranks(2)
def test_convolution_sharded_on_a_middle_dim() -> None:
    """Three dims, the middle one uneven; the parameters of one group lie on different dims."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (3, models.DIM)), nn.Conv1d(3, 5, 3), nn.Flatten(), nn.LazyLinear(2)
        )

    def built() -> nn.Module:
        model = build()
        model(torch.zeros(1, 3 * models.DIM))  # gives the lazy layer its shape
        return model

    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 3 else None

    model = parity.shard(parity.OURS, models.seeded(built), shard_placement_fn=placement)
    assert model[1].weight.to_local().shape == (5, _rows(3)[dist.get_rank()], 3)
    parity.check_training(
        partial(models.seeded, built),
        parity.regression_batches(3 * models.DIM, 2, steps=STEPS),
        torch_too=False,
        shard_placement_fn=placement,
    )


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


@workers.ranks(2)
@pytest.mark.parametrize("how", combinations.often(["mixed", "fp32", "offloaded"]))
def test_training_on_the_dim_that_pads_least(how: str) -> None:
    offload = CPUOffloadPolicy(pin_memory=False)
    _check_with_experts(
        **{"fp32": {}, "mixed": {"mixed": True}, "offloaded": {"offload_policy": offload}}[how]
    )


@pytest.mark.extended
@workers.ranks(4)
def test_training_on_the_dim_that_pads_least_with_copies() -> None:
    _check_with_experts(mesh=mesh("replicate", "shard", shape=(2, 2)))


@pytest.mark.extended
@workers.ranks(4)
def test_training_on_the_dim_that_pads_least_from_a_smaller_group() -> None:
    _check_with_experts(reshard_after_forward=2)


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


# -- ties within a group, modules without parameters, buffers, ignored parameters -----------------


def _called_by_two_names() -> nn.Module:
    """A shared module, unlike a tied parameter, may be a unit of its own."""
    layer = nn.Linear(models.DIM, models.DIM)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(models.DIM, 2))


def _nothing_in_units() -> nn.Module:
    first, last = nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, 2)
    return nn.Sequential(first, nn.GELU(), nn.Identity(), last)


def _nothing_of_its_own() -> nn.Module:
    first, last = nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, 2)
    return nn.Sequential(first, nn.Tanh(), last)


@workers.ranks(2)
@pytest.mark.parametrize(
    ("build", "units"),
    [(_called_by_two_names, [0]), (_nothing_in_units, [1, 2]), (_nothing_of_its_own, [0, 2])],
)
def test_units_of_other_modules(build: Callable[[], Any], units: list[int]) -> None:
    def marked() -> nn.Module:
        model = build()
        for unit in units:
            model[unit].is_unit = True
        return model

    model = parity.shard(parity.OURS, models.seeded(marked))
    for unit in units:
        assert isinstance(model[unit], FSDPModule)
        assert isinstance(model[unit], type(build()[unit]))
        model[unit].unshard()
        model[unit].reshard()
    batches = parity.regression_batches(models.DIM, 2, steps=STEPS)
    parity.check_training(partial(models.seeded, marked), batches)


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
