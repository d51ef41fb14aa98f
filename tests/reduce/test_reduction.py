"""Reductions: where they divide, and what every rank of every copy ends up with."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp2.core.device.buffers import TransientBuffer
from fsdp2.core.device.kernels import FusedKernels
from fsdp2.core.reduce.spec import plan_division
from fsdp2.testing.counting import operators
from tests.common import thread_ranks
from tests.common.thread_ranks import ThreadCollectives, ThreadReplicas
from tests.reduce import reductions
from tests.reduce.reductions import BF16, F16, F32, F64, Setup

pytestmark = pytest.mark.alone

# ---- where to divide

WIDE, NARROW = (F32, BF16), (F16, F64)
EITHER = (True, False)


def _division(dtype: torch.dtype, *arguments: Any) -> tuple[float | None, str, str, float | None]:
    size, copies, factor, premultiplies, sum_only = arguments
    division = plan_division(dtype, size, factor, premultiplies, copies, sum_only)
    kinds = []
    for kind in (division.kind, division.replicas):
        name = "avg" if kind.average else "sum"
        kinds.append(name if kind.factor is None else f"premul {kind.factor:g}")
    return division.before, kinds[0], kinds[1], division.after


@pytest.mark.parametrize(
    ("dtypes", "size", "copies", "factor", "premultiplies", "expected"),
    [
        (WIDE, 4, 1, None, EITHER, (None, "avg", "avg", None)),
        (WIDE, 4, 1, 4, EITHER, (None, "avg", "sum", None)),
        (WIDE, 4, 1, 4.0, EITHER, (None, "avg", "sum", None)),
        (WIDE, 4, 1, 3.0, [True], (None, "premul 3", "sum", None)),
        (WIDE, 4, 1, 3.0, [False], (None, "sum", "sum", 3.0)),
        (WIDE, 4, 1, 1.0, [False], (None, "sum", "sum", 1.0)),
        (WIDE, 4, 2, None, EITHER, (None, "avg", "avg", None)),
        (WIDE, 1, 2, None, EITHER, (None, "avg", "avg", None)),
        (WIDE, 4, 2, 4.0, EITHER, (None, "avg", "sum", None)),
        (WIDE, 4, 2, 8.0, [True], (None, "premul 8", "sum", None)),
        (WIDE, 4, 2, 8.0, [False], (None, "sum", "sum", 8.0)),
        (WIDE, 1, 2, 3.0, EITHER, (None, "sum", "sum", 3.0)),  # no collective of the shard axis
        (NARROW, 1, 1, None, EITHER, (None, "sum", "sum", None)),
        (NARROW, 2, 1, None, EITHER, (2.0, "sum", "sum", None)),
        (NARROW, 3, 1, None, EITHER, (2.0, "sum", "sum", 1.5)),
        (NARROW, 4, 1, None, EITHER, (2.0, "sum", "sum", 2.0)),
        (NARROW, 8, 1, None, EITHER, (4.0, "sum", "sum", 2.0)),
        (NARROW, 64, 1, None, EITHER, (8.0, "sum", "sum", 8.0)),
        (NARROW, 4, 1, 4.0, EITHER, (2.0, "sum", "sum", 2.0)),
        (NARROW, 4, 1, 1.0, EITHER, (None, "sum", "sum", None)),
        (NARROW, 4, 1, 0.5, EITHER, (None, "sum", "sum", 0.5)),
        (NARROW, 4, 1, 6.0, EITHER, (4.0, "sum", "sum", 1.5)),
        (NARROW, 4, 4, None, EITHER, (4.0, "sum", "sum", 4.0)),
        (NARROW, 4, 2, None, EITHER, (4.0, "sum", "sum", 2.0)),
        (NARROW, 1, 2, None, EITHER, (2.0, "sum", "sum", None)),
        (NARROW, 4, 2, 6.0, EITHER, (4.0, "sum", "sum", 1.5)),
    ],
)
def test_where_a_reduction_divides(
    dtypes: Sequence[torch.dtype],
    size: int,
    copies: int,
    factor: float | None,
    premultiplies: Sequence[bool],
    expected: tuple[float | None, str, str, float | None],
) -> None:
    for dtype, multiplies in itertools.product(dtypes, premultiplies):
        assert _division(dtype, size, copies, factor, multiplies, False) == expected


@pytest.mark.parametrize("premultiplies", EITHER)
@pytest.mark.parametrize(
    ("dtype", "copies", "factor", "before", "after"),
    [
        (F32, 1, None, None, 4.0),
        (BF16, 2, None, None, 8.0),
        (F32, 2, 3.0, None, 3.0),
        (F32, 2, 1.0, None, None),
        (F16, 2, None, 4.0, 2.0),
    ],
)
def test_collectives_that_only_sum(
    dtype: torch.dtype,
    copies: int,
    factor: float | None,
    before: float | None,
    after: float | None,
    premultiplies: bool,
) -> None:
    division = _division(dtype, 4, copies, factor, premultiplies, True)
    assert division == (before, "sum", "sum", after)


def test_every_division_is_by_the_whole_factor() -> None:
    for dtype, size, copies, factor, premultiplies, sum_only in itertools.product(
        (*WIDE, *NARROW), (1, 2, 3, 8), (1, 2, 5), (None, 0.5, 1.0, 2.0, 7.0), EITHER, EITHER
    ):
        division = plan_division(dtype, size, factor, premultiplies, copies, sum_only)
        value = 1.0 / (division.before or 1.0) / (division.kind.factor or 1.0)
        value *= 1 if division.kind.average else size
        value *= 1 if division.replicas.average else copies
        value /= division.after or 1.0
        wanted = size * copies / (size * copies if factor is None else factor)
        assert value == pytest.approx(wanted, rel=1e-12)
        assert not sum_only or not (division.kind.average or division.kind.factor)


# ---- what comes out

DIRECT = Setup(direct=True)
JOINED = Setup(direct=True, shapes=reductions.LARGE_AND_SMALL, pack_below=64)
PACKED = Setup(shapes=reductions.ODD)
CODED = Setup(shapes=reductions.ODD, codec="fp32")  # which loses nothing
EMPTY = Setup(shapes=reductions.EMPTY)
BANDED = Setup(direct=True, shapes=reductions.BANDS)
ODDLY_BANDED = Setup(shapes=reductions.ODD_BANDS)

SETUPS = [
    DIRECT,
    replace(DIRECT, sum_only=True),
    replace(DIRECT, factor=8.0),
    replace(DIRECT, factor=8.0, premultiplies=True),
    replace(DIRECT, factor=4.0, premultiplies=True),
    replace(DIRECT, grad=BF16),
    replace(DIRECT, grad=BF16, reduce=BF16),
    replace(DIRECT, reduce=BF16),
    replace(DIRECT, grad=F16, reduce=F16),
    replace(DIRECT, grad=F16, reduce=F16, shard=F16),
    replace(DIRECT, grad=F64, reduce=F64, shard=F64),
    replace(DIRECT, grad=BF16, reduce=F64, shard=BF16, result=F64),
    JOINED,
    replace(JOINED, factor=8.0, premultiplies=True),
    replace(JOINED, grad=BF16),
    replace(JOINED, grad=BF16, reduce=BF16),
    replace(JOINED, grad=F16, reduce=F16, shard=F16),
    replace(JOINED, shapes=reductions.ODD),
    Setup(),
    PACKED,
    replace(PACKED, factor=8.0),
    replace(PACKED, factor=8.0, premultiplies=True),
    replace(PACKED, factor=2.0, sum_only=True),
    replace(PACKED, grad=BF16),
    replace(PACKED, grad=BF16, reduce=BF16),
    replace(PACKED, reduce=BF16),
    replace(PACKED, grad=F16, reduce=F16),
    replace(PACKED, grad=F16, reduce=F16, factor=2.0),
    replace(PACKED, grad=BF16, reduce=BF16, shard=BF16),
    replace(PACKED, reduce=F64, result=F64),
    replace(PACKED, grad=BF16, result=BF16),
    replace(PACKED, to_host=True),
    replace(PACKED, to_host=True, grad=BF16, reduce=BF16),
    replace(PACKED, to_host=True, grad=BF16, reduce=F64, shard=BF16, result=F64),
    CODED,
    replace(CODED, direct=True),
    replace(CODED, factor=8.0),
    replace(CODED, grad=BF16),
    replace(CODED, grad=F16, reduce=F16),
    replace(CODED, to_host=True),
    replace(CODED, hook=lambda flat: flat.mul_(1)),
    EMPTY,
    replace(EMPTY, grad=BF16, factor=2.0),
    replace(EMPTY, to_host=True),
    BANDED,
    replace(BANDED, grad=BF16),
    replace(BANDED, direct=False),
    ODDLY_BANDED,
    replace(ODDLY_BANDED, grad=BF16),
    replace(ODDLY_BANDED, factor=8.0),
]
setups = pytest.mark.parametrize("setup", SETUPS, ids=str)

Mesh = tuple[int, int]
MESHES: Sequence[Mesh] = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 2))


def meshes_of(setup: Setup) -> Sequence[Mesh]:
    """Copies, and ranks of the shard axis: bands are of four."""
    return ((1, 4),) if setup.shapes in (BANDED.shapes, ODDLY_BANDED.shapes) else MESHES


def _gradients(setup: Setup, position: int, size: int, batch: int = 0) -> list[torch.Tensor]:
    """Whole numbers, small enough that every sum below is exact in bf16 and fp16."""
    generator = torch.Generator().manual_seed(batch * 100 + position)
    return [
        (torch.randint(-2, 3, slot.shape, generator=generator) * 8).to(setup.grad)
        for slot in setup.slots(size)
    ]


def _wanted(
    setup: Setup, mesh: Mesh, rank: int, batches: Sequence[int] = (0,)
) -> list[torch.Tensor]:
    """One rank's rows of the reduced gradients, in fp64."""
    copies, size = mesh
    ranks = range(copies * size)
    factor = len(ranks) if setup.factor is None else setup.factor
    given = [_gradients(setup, at, size, batch) for batch in batches for at in ranks]
    return [
        slot.part(torch.stack([grads[i].double() for grads in given]).sum(0), rank) / factor
        for i, slot in enumerate(setup.slots(size))
    ]


def _leave(reduction: Any, grads: Sequence[torch.Tensor | None]) -> None:
    for member, grad in zip(reduction.members, grads, strict=True):
        member.full_grad = grad


def _ones(reduction: Any, dtype: torch.dtype = F32) -> None:
    _leave(reduction, [torch.ones(member.shape, dtype=dtype) for member in reduction.members])


@setups
@pytest.mark.parametrize("keep", [False, True])
def test_every_rank_of_every_copy_gets_its_rows(setup: Setup, keep: bool) -> None:
    def body(collectives: ThreadCollectives, replicas: ThreadReplicas) -> None:
        reduction = replace(setup, keep=keep).bind(collectives, replicas)
        mesh = replicas.size, collectives.size
        position = replicas.rank * mesh[1] + collectives.rank
        for repetition in (1, 2):  # the second adds to what is there
            _leave(reduction, _gradients(setup, position, mesh[1]))
            reductions.run(reduction)
            wanted = _wanted(setup, mesh, collectives.rank)
            slots = reduction.context.slots
            for member, slot, rows in zip(reduction.members, slots, wanted, strict=True):
                assert member.gradient.shape == slot.local_shape(collectives.rank)
                assert member.gradient.dtype == (setup.result or setup.shard)
                assert torch.equal(member.gradient.double(), rows * repetition)
                assert member.hooks_run == repetition
        sends = setup.shapes is not reductions.EMPTY
        assert len(replicas.calls) == 2 * (mesh[0] > 1 and sends)
        messages = 2 if setup.codec else 1  # marks have a collective of their own
        assert len(collectives.calls) == 2 * messages * (mesh[1] > 1 and sends)

    for copies, size in meshes_of(setup):
        thread_ranks.run_mesh(copies, size, body, premultiplies=setup.premultiplies)


@pytest.mark.parametrize("grad", [F32, BF16])
@pytest.mark.parametrize("reduce", [F32, BF16])
@pytest.mark.parametrize("codec", [None, "bf16"])
def test_one_rank_reduces_in_the_dtype_of_the_shard(
    reduce: torch.dtype, grad: torch.dtype, codec: str | None
) -> None:
    def body(collectives: ThreadCollectives) -> None:
        reduction = Setup(grad=grad, reduce=reduce, codec=codec).bind(collectives)
        # What gradients without sync accumulate in
        assert reduction.context.spec.reduce_dtype is F32
        (member, _) = reduction.members
        member.full_grad = torch.full(member.shape, 1 + 1 / 256)  # not a bf16 number
        reductions.run(reduction)
        assert member.gradient.dtype is F32
        assert member.gradient.eq(1 + 1 / 256).all()

    thread_ranks.run_ranks(1, body)


def test_a_reduction_that_is_replaced_is_freed_at_once() -> None:
    """No part of it refers to another that refers back: no memory waits for the collector."""

    def body(collectives: ThreadCollectives) -> None:
        for setup in SETUPS:
            if (1, collectives.size) not in meshes_of(setup):
                continue
            for kept in (setup, replace(setup, keep=True), replace(setup, to_host=True, keep=True)):
                reduction = kept.bind(collectives)
                _leave(reduction, _gradients(setup, 0, collectives.size))
                reductions.run(reduction)
                memory = [member.gradient for member in reduction.members]
                programs = (reduction.full, reduction.partial, reduction.full.seeking)
                steps = [step for program in programs if program for step in program.inline]
                owners = [getattr(step, "__self__", step) for step in steps]  # of methods
                left = [*map(weakref.ref, (reduction, *owners, *memory))]
                del reduction, memory, programs, steps, owners
                assert [each() for each in left] == [None] * len(left)

    for size in (1, 4):
        thread_ranks.run_ranks(size, body)


def test_a_transposed_gradient_is_copied_apart_from_the_others() -> None:
    """On an accelerator: torch fuses the copies of those whose strides agree."""
    kernels = FusedKernels(torch.device("cpu"))
    sources = [torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(3)]
    for given in (sources, sources[1:2], sources[::2], []):
        targets = [torch.zeros(source.shape, dtype=F64) for source in given]
        counts = operators(lambda to=targets, given=given: kernels.copy_strided(to, given))
        strided = sum(not source.is_contiguous() for source in given)
        assert counts["aten.copy_.default"] == strided
        assert counts["aten._foreach_copy_.default"] == (len(given) > strided)
        for target, source in zip(targets, given, strict=True):
            assert torch.equal(target, source.double())


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("mesh", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("take_missing", [True, False])
def test_absent_gradients(take_missing: bool, mesh: Mesh, direct: bool) -> None:
    """Zeros if asked for; on all copies, of which only the first uses anything."""

    def body(collectives: ThreadCollectives, replicas: ThreadReplicas) -> None:
        reduction = Setup(direct=direct).bind(collectives, replicas)
        present, absent = reduction.members
        if replicas.rank == 0 or not take_missing:
            present.full_grad = torch.ones(present.shape)
        reductions.run(reduction, take_missing)
        assert present.gradient.eq(1 / replicas.size if take_missing else 1).all()
        assert (present.hooks_run, absent.hooks_run) == (1, int(take_missing))
        if take_missing:
            assert absent.gradient.eq(0).all()
        else:
            assert absent.gradient is None

    thread_ranks.run_mesh(*mesh, body)


def test_no_gradient_at_all() -> None:
    def body(collectives: ThreadCollectives) -> None:
        reduction = Setup().bind(collectives)
        assert reduction.collect(take_missing=False) is None
        job = reduction.collect(take_missing=True)
        assert job is not None
        assert job.present == [True, True]
        assert all(grad.eq(0).all() for grad in job.grads)

    thread_ranks.run_ranks(2, body)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("missing", [True, False])
def test_accumulated_gradients_have_another_dtype(missing: bool, direct: bool) -> None:
    def body(collectives: ThreadCollectives) -> None:
        reduction = Setup(direct=direct, grad=BF16, reduce=F32).bind(collectives)
        first, second = reduction.members
        first.full_grad = torch.full(first.shape, 1 / 3)  # in fp32, where it was summed up
        if not missing:
            second.full_grad = torch.ones(second.shape, dtype=BF16)
        reductions.run(reduction)
        assert first.gradient.eq(torch.tensor(1 / 3)).all()  # not rounded to bf16 on the way
        assert (second.gradient is None) == missing

    thread_ranks.run_ranks(2, body)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_are_not_contiguous(size: int, direct: bool) -> None:
    def body(collectives: ThreadCollectives) -> None:
        reduction = Setup(direct=direct, shapes=(((8, 4), 0),)).bind(collectives)
        (member,), (slot,) = reduction.members, reduction.context.slots
        member.full_grad = whole = torch.arange(32.0).view(4, 8).t()
        reductions.run(reduction)
        start = collectives.rank * slot.chunk
        assert torch.equal(member.gradient, whole[start : start + slot.rows(collectives.rank)])

    thread_ranks.run_ranks(size, body)


def test_large_halves_do_not_overflow_over_two_axes() -> None:
    def body(collectives: ThreadCollectives, replicas: ThreadReplicas) -> None:
        reduction = Setup(grad=F16, reduce=F16, shard=F16).bind(collectives, replicas)
        _leave(reduction, [torch.full(m.shape, 16000.0, dtype=F16) for m in reduction.members])
        reductions.run(reduction)
        assert all(member.gradient.eq(16000.0).all() for member in reduction.members)

    thread_ranks.run_mesh(4, 4, body)


# ---- memory


@pytest.mark.parametrize("setup", [PACKED, CODED], ids=str)
def test_memory_of_the_collective_is_there_only_while_it_is_needed(setup: Setup) -> None:
    def body(collectives: ThreadCollectives) -> None:
        reduction = setup.bind(collectives)
        staging = reduction.context.staging
        assert staging is not None
        assert not staging.allocated
        job = reduction.collect(take_missing=True)
        assert job is not None
        for step in reduction.full.compute:
            step(job)
        assert staging.allocated
        assert job.grads == []  # copied: autograd's gradients may go
        for step in reduction.full.reduce:
            step(job)
        assert staging.allocated  # until COMPUTE is behind the collective
        reduction.release()
        assert not staging.allocated
        reduction.release()  # once is enough, twice does no harm

    thread_ranks.run_ranks(2, body)


@pytest.mark.parametrize("shapes", [reductions.ALIGNED, reductions.ODD])
def test_gradients_that_are_cast_are_gone_before_staging_comes(
    shapes: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no kernel fuses casts, they are packed in their dtype first: memory of theirs, twice.

    Staging takes as much as both where it is twice as wide, and comes when they are one again.
    """
    setup = Setup(grad=BF16, shapes=shapes)
    looks: dict[TransientBuffer, Callable[[], None]] = {}
    acquire = TransientBuffer.acquire

    def watched_acquire(buffer: TransientBuffer) -> None:
        looks.get(buffer, lambda: None)()
        acquire(buffer)

    monkeypatch.setattr(TransientBuffer, "acquire", watched_acquire)

    def body(collectives: ThreadCollectives) -> list[bool]:
        reduction = setup.bind(collectives)
        _leave(reduction, _gradients(setup, collectives.rank, 2))
        watched = [weakref.ref(member.full_grad) for member in reduction.members]
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
    def body(collectives: ThreadCollectives) -> None:
        reduction = Setup().bind(collectives)
        first, second = reduction.members
        shape = reduction.context.slots[0].local_shape(collectives.rank)
        first.gradient = there = torch.ones(shape)

        def drop() -> None:
            first.gradient = None

        first.run_hooks = drop
        _ones(reduction)
        job = reduction.collect(take_missing=False)
        assert job is not None
        for step in (*reduction.full.compute, *reduction.full.reduce):
            step(job)
        assert first.gradient is None
        assert [id(tensor) for tensor in job.sums] == [id(there)]  # the addition may still run
        assert there.eq(2).all()
        assert second.gradient.eq(1).all()

    thread_ranks.run_ranks(2, body)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("reduce", [F32, BF16])
def test_gradients_on_the_host_are_copies(size: int, reduce: torch.dtype) -> None:
    """The device's flat gradient may be freed before the host delivers."""

    def body(collectives: ThreadCollectives) -> None:
        reduction = Setup(to_host=True, reduce=reduce).bind(collectives)
        _ones(reduction)
        job = reduction.collect(take_missing=False)
        assert job is not None
        for step in (*reduction.full.compute, *reduction.full.reduce):
            step(job)
        assert all(member.gradient is None for member in reduction.members)
        for flat in (job.flat, job.result):
            if flat is not None:
                flat.fill_(-1)
        job.grads = []
        job.flat = job.result = None
        for step in reduction.full.host:
            step(job)
        assert all(member.gradient.eq(1).all() for member in reduction.members)
        storages = {m.gradient.untyped_storage().data_ptr() for m in reduction.members}
        assert len(storages) == 1

    thread_ranks.run_ranks(size, body)


# ---- partial sums, and the user's hook


@pytest.mark.parametrize(
    "setup", [s for s in SETUPS if len(meshes_of(s)) > 1 and s.shapes is not EMPTY.shapes], ids=str
)
def test_partial_sums_of_several_micro_batches(setup: Setup) -> None:
    batches = range(3)

    def body(collectives: ThreadCollectives, replicas: ThreadReplicas) -> None:
        reduction = setup.bind(collectives, replicas)
        mesh = replicas.size, collectives.size
        position = replicas.rank * mesh[1] + collectives.rank
        for step in (1, 2):
            for batch in batches:
                _leave(reduction, _gradients(setup, position, mesh[1], batch))
                last = batch == batches[-1]
                reductions.run(reduction, all_reduce=last)
                assert (reduction.partial_sums.flat is None) == last
                assert len(replicas.calls) == step - (not last)
            wanted = _wanted(setup, mesh, collectives.rank, batches)
            for member, rows in zip(reduction.members, wanted, strict=True):
                assert torch.equal(member.gradient.double(), rows)
                assert member.hooks_run == 1
                member.gradient, member.hooks_run = None, 0

    for size in (1, 2):
        thread_ranks.run_mesh(2, size, body, premultiplies=setup.premultiplies)


def test_partial_sums_reach_members_that_later_backwards_leave_out() -> None:
    """Whoever had a gradient in any of the backwards is delivered; who had none, is not."""
    for seed in range(20):
        rng = random.Random(seed)
        setup = rng.choice((PACKED, DIRECT, JOINED, replace(DIRECT, grad=BF16)))
        count = len(setup.slots(2))
        present = [[rng.random() < 0.4 for _ in range(count)] for _ in range(3)]

        def body(
            collectives: ThreadCollectives,
            replicas: ThreadReplicas,
            setup: Setup = setup,
            present: list[list[bool]] = present,
        ) -> None:
            reduction = setup.bind(collectives, replicas)
            for batch, there in enumerate(present):
                for member, has in zip(reduction.members, there, strict=True):
                    member.full_grad = torch.ones(member.shape, dtype=setup.grad) if has else None
                last = batch == len(present) - 1
                needed = any(there) or (last and reduction.partial_sums.flat is not None)
                if needed:
                    reductions.run(reduction, all_reduce=last)
                else:
                    assert reduction.collect(False, all_reduce=last) is None
            for i, member in enumerate(reduction.members):
                times = sum(there[i] for there in present)
                assert (member.gradient is not None) == (times > 0)
                if times:
                    assert member.gradient.eq(times).all()

        thread_ranks.run_mesh(2, 2, body)


def test_discarded_partial_sums_do_not_come_back() -> None:
    def body(collectives: ThreadCollectives, replicas: ThreadReplicas) -> None:
        reduction = Setup().bind(collectives, replicas)
        for all_reduce in (False, True):
            _ones(reduction)
            reductions.run(reduction, all_reduce=all_reduce)
            reduction.discard()
        assert all(member.gradient.eq(1).all() for member in reduction.members)

    thread_ranks.run_mesh(2, 2, body)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("to_host", [True, False])
def test_hook_sees_the_sum_once_and_before_delivery(copies: int, size: int, to_host: bool) -> None:
    def body(collectives: ThreadCollectives, replicas: ThreadReplicas) -> None:
        seen: list[torch.Tensor] = []

        def hook(flat: torch.Tensor) -> None:
            seen.append(flat.clone())
            flat.add_(1)

        setup = Setup(hook=hook, reduce=F64, factor=1.0, to_host=to_host)
        reduction = setup.bind(collectives, replicas)
        payload = sum(slot.shard_numel for slot in reduction.context.slots)
        for all_reduce in (False, True):
            _ones(reduction)
            reductions.run(reduction, all_reduce=all_reduce)
        # Without copies nothing waits for an all-reduce: each backward delivers.
        assert len(seen) == (1 if copies > 1 else 2)
        sums = 2 * copies * size if copies > 1 else size
        assert all(flat.ndim == 1 and flat.dtype == F64 for flat in seen)
        assert all(flat[:payload].eq(sums).all() for flat in seen)
        for member in reduction.members:
            assert member.gradient.dtype == F32
            assert member.gradient.eq(sum(sums + 1 for _ in seen)).all()

    thread_ranks.run_mesh(copies, size, body)
