"""Collectives of the user's own, and collectives in memory of the process group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2.core.device.comm_memory import OwnReduceScatter
from fsdp2.core.modules.registry import record_of
from tests.common import meshes, models, parity, tensors
from tests.common.looped import coalescing
from tests.common.workers import ranks

ODD = (7, 3, 5, 1)
MIXED = [pytest.param(False, id="fp32"), pytest.param(True, id="mixed")]


class Allocates:
    """Remembers what it was asked for. ``keeps``: one buffer for each size and dtype, for good."""

    asynchronous = True

    def __init__(self, keeps: bool = False) -> None:
        self.keeps = keeps
        self.asked: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.ran: list[tuple[int, int]] = []
        self.ops: list[Any] = []
        self._kept: dict[Any, torch.Tensor] = {}

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        assert device == torch.device("cpu")
        self.asked.append((tuple(size), dtype))
        buffer = torch.empty(*size, dtype=dtype, device=device)
        return self._kept.setdefault((*size, dtype), buffer) if self.keeps else buffer


class Gather(Allocates, fsdp2.AllGather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False):
        self.ran.append((output_tensor.numel(), input_tensor.numel()))
        start = output_tensor.data_ptr() + dist.get_rank(group) * input_tensor.nbytes
        assert input_tensor.data_ptr() == start  # in place
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group, async_op=self.asynchronous
        )


class Scatter(Allocates, fsdp2.ReduceScatter):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ):
        self.ran.append((output_tensor.numel(), input_tensor.numel()))
        self.ops.append(op)
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op, group, async_op=self.asynchronous
        )


def _torchs(kind: type) -> Any:
    """The same class for torch, which does not wait for the work of a reduce-scatter."""
    base = parity.TORCH._fully_shard._fsdp_api  # type: ignore[attr-defined]
    parent = base.AllGather if issubclass(kind, fsdp2.AllGather) else base.ReduceScatter
    return type(
        kind.__name__, (Allocates, parent), {"__call__": kind.__call__, "asynchronous": False}
    )


def _train(model: nn.Module, outputs: int) -> Any:
    batches = parity.regression_batches(models.DIM, outputs, steps=4)
    return parity.train_sharded(
        model, partial(torch.optim.SGD, lr=0.05), parity.regression_loss, batches
    )


def _use(model: nn.Module, gather: Any, scatter: Any) -> nn.Module:
    for unit in [*parity.units(model), model]:
        if gather is not None:
            unit.set_custom_all_gather(gather)
        if scatter is not None:
            unit.set_custom_reduce_scatter(scatter)
    return model


@pytest.mark.parametrize("mixed", MIXED)
@ranks(2, extended=(4,))
def test_trains_like_torch(mixed: bool) -> None:
    build = partial(models.seeded, partial(models.OddMLP, ODD))
    expected = _train(parity.shard(parity.OURS, build(), mixed=mixed), ODD[-1])
    gather, scatter = Gather(), Scatter()
    ours = _train(_use(parity.shard(parity.OURS, build(), mixed=mixed), gather, scatter), ODD[-1])
    parity.assert_equal(ours, expected, "built-in")
    theirs = _torchs(Gather)(), _torchs(Scatter)()
    torchs = _train(_use(parity.shard(parity.TORCH, build(), mixed=mixed), *theirs), ODD[-1])
    parity.assert_like_torch(ours, torchs, mixed=mixed)
    assert len(gather.ran) == len(theirs[0].ran)
    assert len(scatter.ran) == len(theirs[1].ran)
    assert scatter.ops == theirs[1].ops
    dtype = torch.bfloat16 if mixed else torch.float32
    size = dist.get_world_size()
    assert {dtype} == {dtype for _, dtype in gather.asked}
    assert {torch.float32} == {dtype for _, dtype in scatter.asked}
    assert gather.asked == [((full,), dtype) for full, _ in gather.ran]
    assert all(full == size * own for full, own in gather.ran)
    assert all(full == size * own for own, full in scatter.ran)


@ranks(2)
def test_buffers_that_are_kept() -> None:
    """By an object a unit; gradients survive the next reduction, accumulated ones too."""
    build = partial(models.seeded, partial(models.MLP, depth=3))
    runs = []
    for keeps in (False, True):
        model = parity.shard(parity.OURS, build())
        comms = [(Gather(keeps), Scatter(keeps)) for _ in parity.units(model)]
        for unit, (gather, scatter) in zip(parity.units(model), comms, strict=True):
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(scatter)
        for batch in parity.regression_batches(models.DIM, 4, steps=2):
            parity.regression_loss(model, parity.my_part(batch)).backward()
        runs.append([parity.full_grads(model), _train(model, 4)])
        assert all(len(g.ran) > len(g._kept) for g, _ in comms)
        assert all(len(s.ran) > len(s._kept) / 2 for _, s in comms)
    parity.assert_equal(runs[0], runs[1])


@pytest.mark.parametrize("dim", [0, 1])
@ranks(2)
def test_gathered_parameters_stay_the_same_objects(dim: int) -> None:
    """Coalesced, then packed by the user's collective: the same slots, also in between."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 30))
    with coalescing():
        fsdp2.fully_shard(model, shard_placement_fn=lambda param: Shard(min(dim, param.ndim - 1)))
    x = torch.randn(2, 32, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)
    model.unshard()
    before = list(model.parameters())
    values = [param.detach().clone() for param in before]
    model.reshard()
    gather = Gather()
    model.unshard()
    output = model(x)  # autograd holds gathered parameters
    model.set_custom_all_gather(gather)
    model.reshard()
    parity.assert_equal(torch.autograd.grad(output.sum(), x), expected)
    assert gather.ran
    model.reshard()
    model.unshard()
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    parity.assert_equal([param.detach() for param in model.parameters()], values)


class TwoDtypes(nn.Module):
    """Norms stay in fp32 while linear layers compute in bf16; odd sizes between even ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(models.DIM, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.odd = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.up(x).float())
        return self.odd(x.to(self.odd.weight.dtype))


@ranks(2, extended=(4,))
def test_one_collective_a_unit_whatever_it_holds() -> None:
    """Segments of two dtypes and two transports: bytes in one collective, into the same slots."""

    def build() -> nn.Module:
        def choose(param: nn.Parameter) -> torch.dtype | None:
            return torch.float32 if param.shape == (32,) else None

        policy = fsdp2.MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, param_dtype_override_fn=choose
        )
        model = models.seeded(TwoDtypes)
        with coalescing():
            return fsdp2.fully_shard(model, mp_policy=policy, reshard_after_forward=True)

    (report,) = fsdp2.report(build()).groups
    assert report.transport == "coalesced+packed"
    expected = _train(build(), 5)
    gather = Gather()
    parity.assert_equal(_train(_use(build(), gather, None), 5), expected)
    assert {dtype for _, dtype in gather.asked} == {torch.uint8}
    assert len(gather.ran) == 4 * 2  # steps, and both ways


@ranks(4)
def test_replicas_and_smaller_groups() -> None:
    build = partial(models.seeded, partial(models.MLP, depth=2, out=8))
    mesh = meshes.mesh("outer", "inner", shape=(2, 2))
    for arguments in ({"mesh": mesh}, {"reshard_after_forward": 2}):
        expected = _train(parity.shard(parity.OURS, build(), **arguments), 8)
        gather, scatter = Gather(), Scatter()
        ours = _train(_use(parity.shard(parity.OURS, build(), **arguments), gather, scatter), 8)
        parity.assert_equal(ours, expected)
        assert gather.ran
        assert scatter.ran


@ranks(2)
def test_extended_parameters_travel_through_it_too() -> None:
    def build() -> nn.Module:
        return tensors.extend(models.seeded(partial(models.MLP, depth=2)), tensors.Scaled)

    def losses(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        found = []
        for batch in parity.regression_batches(models.DIM, 4, steps=3):
            loss = parity.regression_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    gather = Gather()
    parity.assert_equal(
        losses(_use(parity.shard(parity.OURS, build()), gather, None)),
        losses(parity.shard(parity.OURS, build())),
    )
    assert {dtype for _, dtype in gather.asked} == {torch.uint8, torch.float32}


# ---- memory


def _memory_model() -> nn.Module:
    return parity.shard(parity.OURS, models.seeded(partial(models.MLP, depth=2)))


@ranks(2, extended=(4,))
def test_memory_of_the_process_group() -> None:
    """gloo has no allocator: plain memory, the same results; off again, the same way as before."""
    expected = _train(_memory_model(), 4)
    model = _memory_model()
    for unit in [*parity.units(model), model]:
        unit.set_allocate_memory_from_process_group_for_comm(True)
    (group,) = record_of(model).unit.own_groups  # type: ignore[union-attr]  # it is sharded
    assert group.options.all_gather is not None
    with parity.CountCollectives() as counted:
        parity.assert_equal(_train(model, 4), expected)
    model = _memory_model()
    for enable in (True, True, False, False):
        for unit in [*parity.units(model), model]:
            unit.set_allocate_memory_from_process_group_for_comm(enable)
    assert record_of(model).unit.own_groups[0].options.all_gather is None  # type: ignore[union-attr]
    with parity.CountCollectives() as usual:
        parity.assert_equal(_train(model, 4), expected)
    assert counted.counts == usual.counts


@ranks(2)
def test_conflicts_are_named() -> None:
    model = _memory_model()
    model.set_custom_reduce_scatter(Scatter())
    with pytest.raises(ValueError, match=r"set_allocate_memory_.* Scatter runs the collectives"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(ValueError, match=r"set_symm_mem_for_comm .* Scatter runs"):
        model.set_symm_mem_for_comm()
    model.set_allocate_memory_from_process_group_for_comm(False)  # nothing to turn off
    assert isinstance(record_of(model).unit.own_groups[0].options.reduce_scatter, Scatter)  # type: ignore[union-attr]
    model = _memory_model()
    model.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(ValueError, match=r"set_symm_mem_for_comm .* OwnAllGather runs"):
        model.set_symm_mem_for_comm()


@ranks(2)
def test_a_custom_collective_that_is_set_later_counts() -> None:
    """As with torch; what was not replaced stays in the process group's memory, until it is off."""
    model = _memory_model()
    group = record_of(model).unit.own_groups[0]  # type: ignore[union-attr]  # it is sharded
    model.set_allocate_memory_from_process_group_for_comm(True)
    gather = Gather()
    model.set_custom_all_gather(gather)
    assert group.options.all_gather is gather
    assert isinstance(group.options.reduce_scatter, OwnReduceScatter)
    model.set_allocate_memory_from_process_group_for_comm(False)
    assert group.options.all_gather is gather
    assert group.options.reduce_scatter is None
