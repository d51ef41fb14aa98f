"""Reductions: where they divide, which steps are bound, and what every rank ends up with."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp2.core.device.buffers import TransientBuffer
from fsdp2.core.device.kernels import FusedKernels
from fsdp2.core.layout.layout import Slot
from fsdp2.core.reduce.spec import plan_division
from fsdp2.testing.counting import operators
from tests.common import thread_ranks
from tests.reduce import reductions

pytestmark = pytest.mark.alone

# ---- where to divide


def _summary(
    dtype: torch.dtype, size: int, factor: float | None, premultiplies: bool
) -> tuple[float | None, str, float | None]:
    division = plan_division(dtype, size, factor, premultiplies)
    kind = "avg" if division.kind.average else "sum"
    if division.kind.factor is not None:
        kind = f"premul {division.kind.factor:g}"
    return division.before, kind, division.after


@pytest.mark.parametrize("premultiplies", [True, False])
@pytest.mark.parametrize("dtype", [reductions.F32, reductions.BF16])
@pytest.mark.parametrize("factor", [None, 4, 4.0])
def test_average_inside_the_collective(
    dtype: torch.dtype, factor: float | None, premultiplies: bool
) -> None:
    assert _summary(dtype, 4, factor, premultiplies) == (None, "avg", None)


@pytest.mark.parametrize("dtype", [reductions.F32, reductions.BF16])
def test_other_factor_of_wide_dtypes(dtype: torch.dtype) -> None:
    assert _summary(dtype, 4, 3.0, premultiplies=True) == (None, "premul 3", None)
    assert _summary(dtype, 4, 3.0, premultiplies=False) == (None, "sum", 3.0)
    assert _summary(dtype, 4, 1.0, premultiplies=False) == (None, "sum", 1.0)


@pytest.mark.parametrize("premultiplies", [True, False])
@pytest.mark.parametrize("dtype", [reductions.F16, reductions.F64])
@pytest.mark.parametrize(
    ("size", "factor", "before", "after"),
    [
        (1, None, None, None),
        (2, None, 2.0, None),
        (3, None, 2.0, 1.5),
        (4, None, 2.0, 2.0),
        (8, None, 4.0, 2.0),
        (64, None, 8.0, 8.0),
        (4, 4.0, 2.0, 2.0),
        (4, 1.0, None, None),
        (4, 0.5, None, 0.5),
        (4, 6.0, 4.0, 1.5),
    ],
)
def test_other_dtypes_divide_before_and_after_the_sum(
    dtype: torch.dtype,
    size: int,
    factor: float | None,
    before: float | None,
    after: float | None,
    premultiplies: bool,
) -> None:
    assert _summary(dtype, size, factor, premultiplies) == (before, "sum", after)


# ---- which steps


FOUR_RANKS = [
    (reductions.Setup(direct=True), "allocate stage_direct", "reduce_scatter deliver"),
    (
        reductions.Setup(direct=True, factor=3.0, premultiplies=True),
        "allocate stage_direct",
        "reduce_scatter deliver",
    ),
    (
        reductions.Setup(direct=True, factor=3.0),
        "allocate stage_direct",
        "reduce_scatter divide deliver",
    ),
    (
        reductions.Setup(direct=True, shapes=reductions.ALIGNED, grad=reductions.BF16),
        "allocate stage_cast",
        "reduce_scatter deliver",
    ),
    (
        reductions.Setup(
            direct=True, shapes=reductions.ALIGNED, grad=reductions.BF16, reduce=reductions.BF16
        ),
        "allocate stage_direct allocate_result",
        "reduce_scatter cast deliver",
    ),
    (
        reductions.Setup(
            direct=True,
            shapes=reductions.ALIGNED,
            grad=reductions.F16,
            reduce=reductions.F16,
            shard=reductions.F16,
        ),
        "allocate stage_direct",
        "divide reduce_scatter divide deliver",
    ),
    (
        reductions.Setup(direct=True, shapes=reductions.LARGE_AND_SMALL, pack_below=64),
        "allocate stage_joined",
        "reduce_scatter deliver",
    ),
    (
        reductions.Setup(
            direct=True, shapes=reductions.LARGE_AND_SMALL, pack_below=64, grad=reductions.BF16
        ),
        "allocate stage_joined",
        "reduce_scatter deliver",
    ),
    (
        reductions.Setup(
            direct=True,
            shapes=reductions.LARGE_AND_SMALL,
            pack_below=64,
            grad=reductions.F16,
            reduce=reductions.F16,
            shard=reductions.F16,
        ),
        "allocate stage_joined",
        "divide reduce_scatter divide deliver",
    ),
    (reductions.Setup(), "allocate stage_packed", "reduce_scatter deliver"),
    (reductions.Setup(grad=reductions.BF16), "allocate stage_packed", "reduce_scatter deliver"),
    (
        reductions.Setup(grad=reductions.F16, reduce=reductions.F16, factor=6.0),
        "allocate stage_packed allocate_result",
        "divide reduce_scatter divide cast deliver",
    ),
    (reductions.Setup(shapes=reductions.EMPTY), "allocate", "deliver"),
    (reductions.Setup(shapes=reductions.EMPTY, factor=6.0), "allocate", "deliver"),
    (
        reductions.Setup(shapes=reductions.EMPTY, reduce=reductions.BF16),
        "allocate allocate_result",
        "cast deliver",
    ),
]


@pytest.mark.parametrize("grad", [reductions.F32, reductions.BF16])
@pytest.mark.parametrize("reduce", [reductions.F32, reductions.BF16])
def test_one_rank_reduces_in_the_dtype_of_the_shard(reduce: torch.dtype, grad: torch.dtype) -> None:
    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = reductions.Setup(grad=grad, reduce=reduce).bind(collectives)
        # What gradients without sync accumulate in
        assert reduction.context.spec.reduce_dtype is reductions.F32
        (member, _) = reduction.members
        member.full_grad = torch.full(member.shape, 1 + 1 / 256)  # not a bf16 number
        reductions.run(reduction)
        assert member.gradient.dtype is reductions.F32
        assert member.gradient.eq(1 + 1 / 256).all()

    thread_ranks.run_ranks(1, body)


def test_a_reduction_that_is_replaced_is_freed_at_once() -> None:
    """No part of it refers to another that refers back: no memory waits for the collector."""

    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        for setup, _, _ in FOUR_RANKS:
            for kept in (setup, replace(setup, keep=True), replace(setup, to_host=True, keep=True)):
                reduction = kept.bind(collectives)
                for member in reduction.members:
                    member.full_grad = torch.zeros(member.shape, dtype=setup.grad)
                reductions.run(reduction)
                memory = [member.gradient for member in reduction.members]
                programs = (reduction.full, reduction.partial, reduction.full.seeking)
                steps = [step for program in programs if program for step in program.inline]
                owners = [getattr(step, "__self__", step) for step in steps]  # of methods
                left = [*map(weakref.ref, (reduction, *owners, *memory))]
                del reduction, member, memory, programs, steps, owners
                assert [each() for each in left] == [None] * len(left)

    for size in (1, 4):
        thread_ranks.run_ranks(size, body)


# ---- what comes out


def _gradients(
    setup: reductions.Setup, slots: Sequence[Slot], rank: int, seed: int = 0
) -> list[torch.Tensor]:
    """Whole numbers, small enough that every sum below is exact in bf16 and fp16."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    return [
        (torch.randint(-6, 7, slot.shape, generator=generator) * 4).to(setup.grad) for slot in slots
    ]


def _wanted(
    setup: reductions.Setup, slot: Slot, position: int, size: int, rank: int
) -> torch.Tensor:
    """One rank's rows of the reduced gradient, in fp64."""
    slots = setup.slots(size)
    total = sum(_gradients(setup, slots, other)[position].double() for other in range(size))
    assert isinstance(total, torch.Tensor)
    total = total / (size if setup.factor is None else setup.factor)
    part: torch.Tensor = slot.part(total, rank)
    return part


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "setup",
    [
        reductions.Setup(direct=True),
        reductions.Setup(direct=True, factor=8.0),
        reductions.Setup(direct=True, factor=8.0, premultiplies=True),
        reductions.Setup(direct=True, grad=reductions.BF16),
        reductions.Setup(direct=True, grad=reductions.BF16, reduce=reductions.BF16),
        reductions.Setup(direct=True, reduce=reductions.BF16),
        reductions.Setup(direct=True, grad=reductions.F16, reduce=reductions.F16),
        reductions.Setup(
            direct=True, grad=reductions.F64, reduce=reductions.F64, shard=reductions.F64
        ),
        reductions.Setup(direct=True, shapes=reductions.LARGE_AND_SMALL, pack_below=64),
        reductions.Setup(
            direct=True,
            shapes=reductions.LARGE_AND_SMALL,
            pack_below=64,
            factor=8.0,
            premultiplies=True,
        ),
        reductions.Setup(
            direct=True, shapes=reductions.LARGE_AND_SMALL, pack_below=64, grad=reductions.BF16
        ),
        reductions.Setup(
            direct=True,
            shapes=reductions.LARGE_AND_SMALL,
            pack_below=64,
            grad=reductions.BF16,
            reduce=reductions.BF16,
        ),
        reductions.Setup(
            direct=True,
            shapes=reductions.LARGE_AND_SMALL,
            pack_below=64,
            grad=reductions.F16,
            reduce=reductions.F16,
            shard=reductions.F16,
        ),
        reductions.Setup(direct=True, shapes=reductions.LARGE_AND_SMALL, pack_below=64, keep=True),
        reductions.Setup(direct=True, shapes=reductions.ODD, pack_below=64),
        reductions.Setup(),
        reductions.Setup(shapes=reductions.ODD),
        reductions.Setup(shapes=reductions.ODD, factor=8.0),
        reductions.Setup(shapes=reductions.ODD, factor=8.0, premultiplies=True),
        reductions.Setup(shapes=reductions.ODD, grad=reductions.BF16),
        reductions.Setup(shapes=reductions.ODD, grad=reductions.BF16, reduce=reductions.BF16),
        reductions.Setup(shapes=reductions.ODD, reduce=reductions.BF16),
        reductions.Setup(shapes=reductions.ODD, grad=reductions.F16, reduce=reductions.F16),
        reductions.Setup(
            shapes=reductions.ODD, grad=reductions.F16, reduce=reductions.F16, factor=2.0
        ),
        reductions.Setup(
            shapes=reductions.ODD,
            grad=reductions.BF16,
            reduce=reductions.BF16,
            shard=reductions.BF16,
        ),
        reductions.Setup(shapes=reductions.EMPTY),
        reductions.Setup(shapes=reductions.EMPTY, grad=reductions.BF16, factor=2.0),
    ],
)
def test_every_rank_gets_its_rows(setup: reductions.Setup, size: int) -> None:
    _check_rows(setup, size)


def _check_rows(setup: reductions.Setup, size: int) -> None:
    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = setup.bind(collectives)
        grads = _gradients(setup, reduction.context.slots, collectives.rank)
        for repetition in (1, 2):  # the second adds to what is there
            for member, grad in zip(reduction.members, grads, strict=True):
                member.full_grad = grad.clone()
            reductions.run(reduction)
            for i, (member, slot) in enumerate(
                zip(reduction.members, reduction.context.slots, strict=True)
            ):
                rows = member.gradient
                assert rows.shape == slot.local_shape(collectives.rank)
                assert rows.dtype == setup.shard
                wanted = _wanted(setup, slot, i, size, collectives.rank) * repetition
                assert torch.equal(rows.double(), wanted)
                assert member.hooks_run == repetition

    thread_ranks.run_ranks(size, body, premultiplies=setup.premultiplies)


@pytest.mark.parametrize(
    "setup",
    [
        reductions.Setup(direct=True, shapes=reductions.BANDS),
        reductions.Setup(direct=True, shapes=reductions.BANDS, grad=reductions.BF16),
        reductions.Setup(shapes=reductions.BANDS),
        reductions.Setup(shapes=reductions.ODD_BANDS),
        reductions.Setup(shapes=reductions.ODD_BANDS, grad=reductions.BF16),
        reductions.Setup(shapes=reductions.ODD_BANDS, factor=8.0),
    ],
)
def test_every_rank_gets_its_part_of_a_band(setup: reductions.Setup) -> None:
    _check_rows(setup, 4)


def test_a_transposed_gradient_is_copied_apart_from_the_others() -> None:
    """On an accelerator: torch fuses the copies of those whose strides agree."""
    kernels = FusedKernels(torch.device("cpu"))
    sources = [torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(3)]
    for given in (sources, sources[1:2], sources[::2], []):
        targets = [torch.zeros(source.shape, dtype=reductions.F64) for source in given]
        counts = operators(lambda to=targets, given=given: kernels.copy_strided(to, given))
        strided = sum(not source.is_contiguous() for source in given)
        assert counts["aten.copy_.default"] == strided
        assert counts["aten._foreach_copy_.default"] == (len(given) > strided)
        for target, source in zip(targets, given, strict=True):
            assert torch.equal(target, source.double())


def test_empty_parameters_have_nothing_to_reduce() -> None:
    def body(collectives: thread_ranks.ThreadCollectives) -> list[str]:
        reduction = reductions.Setup(shapes=reductions.EMPTY).bind(collectives)
        for member in reduction.members:
            member.full_grad = torch.zeros(member.shape)
        reductions.run(reduction)
        assert [member.hooks_run for member in reduction.members] == [1, 1, 1]
        return collectives.calls

    assert thread_ranks.run_ranks(2, body) == [[], []]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("take_missing", [True, False])
def test_absent_gradients(take_missing: bool, size: int, direct: bool) -> None:
    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = reductions.Setup(direct=direct).bind(collectives)
        present, absent = reduction.members
        present.full_grad = torch.ones(present.shape)
        reductions.run(reduction, take_missing)
        assert present.gradient.eq(1).all()
        assert (present.hooks_run, absent.hooks_run) == (1, int(take_missing))
        if take_missing:
            assert absent.gradient.eq(0).all()
        else:
            assert absent.gradient is None

    thread_ranks.run_ranks(size, body)


def test_no_gradient_at_all() -> None:
    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = reductions.Setup().bind(collectives)
        assert reduction.collect(take_missing=False) is None
        job = reduction.collect(take_missing=True)
        assert job is not None
        assert job.present == [True, True]
        assert all(grad.eq(0).all() for grad in job.grads)

    thread_ranks.run_ranks(2, body)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("missing", [True, False])
def test_accumulated_gradients_have_another_dtype(missing: bool, direct: bool) -> None:
    setup = reductions.Setup(direct=direct, grad=reductions.BF16, reduce=reductions.F32)

    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = setup.bind(collectives)
        first, second = reduction.members
        first.full_grad = torch.full(first.shape, 1 / 3)  # in fp32, where it was summed up
        if not missing:
            second.full_grad = torch.ones(second.shape, dtype=reductions.BF16)
        reductions.run(reduction)
        assert first.gradient.eq(torch.tensor(1 / 3)).all()  # not rounded to bf16 on the way
        assert (second.gradient is None) == missing

    thread_ranks.run_ranks(2, body)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_are_not_contiguous(size: int, direct: bool) -> None:
    setup = reductions.Setup(direct=direct, shapes=(((8, 4), 0),))

    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = setup.bind(collectives)
        (member,), (slot,) = reduction.members, reduction.context.slots
        whole = torch.arange(32.0).view(4, 8).t()
        member.full_grad = whole
        reductions.run(reduction)
        start = collectives.rank * slot.chunk
        assert torch.equal(member.gradient, whole[start : start + slot.rows(collectives.rank)])

    thread_ranks.run_ranks(size, body)


def test_memory_of_the_collective_is_there_only_while_it_is_needed() -> None:
    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = reductions.Setup(shapes=reductions.ODD).bind(collectives)
        assert not reduction.context.staging.allocated
        job = reduction.collect(take_missing=True)
        assert job is not None
        for step in reduction.full.compute:
            step(job)
        assert reduction.context.staging.allocated
        assert job.grads == []  # copied: autograd's gradients may go
        for step in reduction.full.reduce:
            step(job)
        assert reduction.context.staging.allocated  # until COMPUTE is behind the collective
        reduction.release()
        assert not reduction.context.staging.allocated
        reduction.release()  # once is enough, twice does no harm

    thread_ranks.run_ranks(2, body)


@pytest.mark.parametrize("shapes", [reductions.ALIGNED, reductions.ODD])
def test_gradients_that_are_cast_are_gone_before_staging_comes(
    shapes: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no kernel fuses casts, they are packed in their dtype first: memory of theirs, twice.

    Staging takes as much as both where it is twice as wide, and comes when they are one again.
    """
    setup = reductions.Setup(grad=reductions.BF16, shapes=shapes)

    looks: dict[TransientBuffer, Callable[[], None]] = {}
    acquire = TransientBuffer.acquire

    def watched_acquire(buffer: TransientBuffer) -> None:
        looks.get(buffer, lambda: None)()
        acquire(buffer)

    monkeypatch.setattr(TransientBuffer, "acquire", watched_acquire)

    def body(collectives: thread_ranks.ThreadCollectives) -> list[bool]:
        reduction = setup.bind(collectives)
        slots = reduction.context.slots
        watched = []
        for member, grad in zip(
            reduction.members, _gradients(setup, slots, collectives.rank), strict=True
        ):
            member.full_grad = grad.clone()
            watched.append(weakref.ref(member.full_grad))
        del member, grad
        found: list[bool] = []
        assert reduction.context.staging is not None
        looks[reduction.context.staging] = lambda: found.extend(one() is None for one in watched)
        job = reduction.collect(take_missing=True)
        assert job is not None
        for step in reduction.full.compute:
            step(job)
        return found

    for found in thread_ranks.run_ranks(2, body):
        assert found == [True] * len(shapes)


def test_gradient_that_was_added_to_is_kept_though_a_hook_drops_it() -> None:
    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = reductions.Setup().bind(collectives)
        first, second = reduction.members
        shape = reduction.context.slots[0].local_shape(collectives.rank)
        first.gradient = there = torch.ones(shape)

        def drop() -> None:
            first.gradient = None

        first.run_hooks = drop
        for member in reduction.members:
            member.full_grad = torch.ones(member.shape)
        job = reduction.collect(take_missing=False)
        assert job is not None
        for step in (*reduction.full.compute, *reduction.full.reduce):
            step(job)
        assert first.gradient is None
        assert [id(tensor) for tensor in job.sums] == [id(there)]  # the addition may still run
        assert there.eq(2).all()
        assert second.gradient.eq(1).all()

    thread_ranks.run_ranks(2, body)
