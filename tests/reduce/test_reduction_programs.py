"""Reductions over two axes, partial sums, hooks, gradients on the host: steps, calls and bits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fsdp2.core.reduce.spec import plan_division
from tests.common import thread_ranks
from tests.common.combinations import each_once
from tests.reduce import reductions

pytestmark = pytest.mark.alone

MIXED = reductions.Setup(direct=True, shapes=reductions.LARGE_AND_SMALL, pack_below=64)
"""Large members are reduced directly, small ones packed."""

# ---- where to divide


def _division(
    dtype: torch.dtype,
    size: int,
    copies: int,
    factor: float | None = None,
    premultiplies: bool = False,
    sum_only: bool = False,
) -> tuple[float | None, str, str, float | None]:
    division = plan_division(dtype, size, factor, premultiplies, copies, sum_only)
    kinds = []
    for kind in (division.kind, division.replicas):
        name = "avg" if kind.average else "sum"
        kinds.append(name if kind.factor is None else f"premul {kind.factor:g}")
    return division.before, kinds[0], kinds[1], division.after


@pytest.mark.parametrize("dtype", [reductions.F32, reductions.BF16])
@pytest.mark.parametrize("premultiplies", [True, False])
def test_wide_dtypes_divide_inside_both_collectives(
    dtype: torch.dtype, premultiplies: bool
) -> None:
    def division(size: int, copies: int, factor: float | None = None) -> object:
        return _division(dtype, size, copies, factor, premultiplies)

    assert division(4, 2) == (None, "avg", "avg", None)
    assert division(1, 2) == (None, "avg", "avg", None)
    assert division(4, 2, 4.0) == (None, "avg", "sum", None)
    if premultiplies:
        assert division(4, 2, 8.0) == (None, "premul 8", "sum", None)
    else:
        assert division(4, 2, 8.0) == (None, "sum", "sum", 8.0)
    assert division(1, 2, 3.0) == (None, "sum", "sum", 3.0)  # the shard axis has no collective


@pytest.mark.parametrize("premultiplies", [True, False])
def test_collectives_that_only_sum(premultiplies: bool) -> None:
    for dtype, copies, factor, after in [
        (reductions.F32, 1, None, 4.0),
        (reductions.BF16, 2, None, 8.0),
        (reductions.F32, 2, 3.0, 3.0),
        (reductions.F32, 2, 1.0, None),
    ]:
        division = _division(dtype, 4, copies, factor, premultiplies, sum_only=True)
        assert division == (None, "sum", "sum", after)
    assert _division(reductions.F16, 4, 2, None, premultiplies, sum_only=True) == (
        4.0,
        "sum",
        "sum",
        2.0,
    )


def test_narrow_dtypes_divide_over_both_axes_before_and_after() -> None:
    assert _division(reductions.F16, 4, 4) == (4.0, "sum", "sum", 4.0)
    assert _division(reductions.F16, 4, 2) == (4.0, "sum", "sum", 2.0)
    assert _division(reductions.F64, 1, 2) == (2.0, "sum", "sum", None)
    assert _division(reductions.F16, 4, 2, 6.0) == (4.0, "sum", "sum", 1.5)


def test_every_division_is_by_the_whole_factor() -> None:
    for dtype, size, copies, factor, premultiplies, sum_only in itertools.product(
        (reductions.F32, reductions.BF16, reductions.F16, reductions.F64),
        (1, 2, 3, 8),
        (1, 2, 5),
        (None, 0.5, 1.0, 2.0, 7.0),
        *[(True, False)] * 2,
    ):
        division = plan_division(dtype, size, factor, premultiplies, copies, sum_only)
        value = 1.0 / (division.before or 1.0) / (division.kind.factor or 1.0)
        value *= 1 if division.kind.average else size
        value *= 1 if division.replicas.average else copies
        value /= division.after or 1.0
        wanted = size * copies / (size * copies if factor is None else factor)
        assert value == pytest.approx(wanted, rel=1e-12)
        assert not sum_only or not (division.kind.average or division.kind.factor)


# ---- which steps


# ---- what comes out


def _gradients(
    setup: reductions.Setup, position: int, size: int, batch: int = 0
) -> list[torch.Tensor]:
    """Whole numbers, small enough that every sum below is exact in bf16 and fp16."""
    generator = torch.Generator().manual_seed(batch * 100 + position)
    return [
        (torch.randint(-2, 3, slot.shape, generator=generator) * 8).to(setup.grad)
        for slot in setup.slots(size)
    ]


def _wanted(
    setup: reductions.Setup, copies: int, size: int, rank: int, batches: Sequence[int] = (0,)
) -> list[torch.Tensor]:
    """One rank's rows of the reduced gradients, in fp64."""
    ranks = range(copies * size)
    factor = len(ranks) if setup.factor is None else setup.factor
    rows = []
    for i, slot in enumerate(setup.slots(size)):
        total = torch.zeros(slot.shape, dtype=reductions.F64)
        for batch in batches:
            for position in ranks:
                total += _gradients(setup, position, size, batch)[i].double()
        rows.append(slot.part(total, rank) / factor)
    return rows


SETUPS = [
    reductions.Setup(direct=True),
    MIXED,
    replace(MIXED, grad=reductions.BF16),
    reductions.Setup(direct=True, sum_only=True),
    reductions.Setup(direct=True, factor=8.0),
    reductions.Setup(direct=True, factor=4.0, premultiplies=True),
    reductions.Setup(direct=True, grad=reductions.BF16),
    reductions.Setup(direct=True, grad=reductions.F16, reduce=reductions.F16, shard=reductions.F16),
    reductions.Setup(shapes=reductions.ODD),
    reductions.Setup(shapes=reductions.ODD, factor=2.0, sum_only=True),
    reductions.Setup(shapes=reductions.ODD, grad=reductions.BF16, reduce=reductions.BF16),
    reductions.Setup(shapes=reductions.ODD, grad=reductions.F16, reduce=reductions.F16),
    reductions.Setup(shapes=reductions.ODD, grad=reductions.F16, reduce=reductions.F16, factor=2.0),
    reductions.Setup(shapes=reductions.ODD, reduce=reductions.F64, result=reductions.F64),
    reductions.Setup(shapes=reductions.ODD, grad=reductions.BF16, result=reductions.BF16),
    reductions.Setup(shapes=reductions.ODD, to_host=True),
    reductions.Setup(
        shapes=reductions.ODD, to_host=True, grad=reductions.BF16, reduce=reductions.BF16
    ),
    reductions.Setup(shapes=reductions.EMPTY),
    reductions.Setup(shapes=reductions.EMPTY, to_host=True),
]
KEPT_OR_NOT = (*SETUPS, *(replace(s, keep=True) for s in SETUPS))


@each_once(
    setup={str(at): setup for at, setup in enumerate(KEPT_OR_NOT)},
    mesh={"2x1": (2, 1), "2x2": (2, 2), "4x2": (4, 2), "1x2": (1, 2)},
)
def test_every_rank_of_every_copy_gets_its_rows(
    setup: reductions.Setup, mesh: tuple[int, int]
) -> None:
    copies, size = mesh

    def body(
        collectives: thread_ranks.ThreadCollectives, replicas: thread_ranks.ThreadReplicas
    ) -> None:
        reduction = setup.bind(collectives, replicas)
        position = replicas.rank * size + collectives.rank
        for repetition in (1, 2):  # the second adds to what is there
            grads = _gradients(setup, position, size)
            for member, grad in zip(reduction.members, grads, strict=True):
                member.full_grad = grad
            reductions.run(reduction)
            wanted = _wanted(setup, copies, size, collectives.rank)
            for member, rows in zip(reduction.members, wanted, strict=True):
                assert member.gradient.dtype == (setup.result or setup.shard)
                assert torch.equal(member.gradient.double(), rows * repetition)
                assert member.hooks_run == repetition
        communicates = copies > 1 and setup.shapes is not reductions.EMPTY
        assert len(replicas.calls) == (2 if communicates else 0)
        assert len(collectives.calls) == (
            2 if size > 1 and setup.shapes is not reductions.EMPTY else 0
        )

    thread_ranks.run_mesh(copies, size, body, premultiplies=setup.premultiplies)


@pytest.mark.parametrize(
    "setup",
    [
        MIXED,
        reductions.Setup(direct=True),
        reductions.Setup(shapes=reductions.ODD, grad=reductions.BF16, reduce=reductions.F32),
        reductions.Setup(shapes=reductions.ODD, grad=reductions.F16, reduce=reductions.F16),
        reductions.Setup(
            shapes=reductions.ODD, grad=reductions.BF16, reduce=reductions.BF16, to_host=True
        ),
        reductions.Setup(shapes=reductions.ODD, factor=4.0),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_partial_sums_of_several_micro_batches(setup: reductions.Setup, size: int) -> None:
    copies, batches = 2, 3

    def body(
        collectives: thread_ranks.ThreadCollectives, replicas: thread_ranks.ThreadReplicas
    ) -> None:
        reduction = setup.bind(collectives, replicas)
        position = replicas.rank * size + collectives.rank
        for step in (1, 2):
            for batch in range(batches):
                grads = _gradients(setup, position, size, batch)
                for member, grad in zip(reduction.members, grads, strict=True):
                    member.full_grad = grad
                last = batch == batches - 1
                reductions.run(reduction, all_reduce=last)
                assert (reduction.partial_sums.flat is None) == last
                assert len(replicas.calls) == step - (not last)
            wanted = _wanted(setup, copies, size, collectives.rank, range(batches))
            for member, rows in zip(reduction.members, wanted, strict=True):
                assert torch.equal(member.gradient.double(), rows)
                assert member.hooks_run == 1
                member.gradient, member.hooks_run = None, 0

    thread_ranks.run_mesh(copies, size, body)


def test_partial_sums_reach_members_that_later_backwards_leave_out() -> None:
    """Whoever had a gradient in any of the backwards is delivered; who had none, is not."""
    for seed in range(20):
        rng = random.Random(seed)
        setup = rng.choice(
            (
                reductions.Setup(shapes=reductions.ODD),
                reductions.Setup(direct=True),
                MIXED,
                reductions.Setup(direct=True, grad=reductions.BF16),
            )
        )
        count = len(setup.slots(2))
        present = [[rng.random() < 0.4 for _ in range(count)] for _ in range(3)]

        def body(
            collectives: thread_ranks.ThreadCollectives,
            replicas: thread_ranks.ThreadReplicas,
            setup: reductions.Setup = setup,
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


def test_absent_gradients_that_are_asked_for_are_zeros_on_all_copies() -> None:
    def body(
        collectives: thread_ranks.ThreadCollectives, replicas: thread_ranks.ThreadReplicas
    ) -> None:
        reduction = reductions.Setup().bind(collectives, replicas)
        first, second = reduction.members
        if replicas.rank == 0:  # only the first copy uses anything
            first.full_grad = torch.ones(first.shape)
        reductions.run(reduction, take_missing=True)
        assert first.gradient.eq(0.5).all()
        assert second.gradient.eq(0).all()

    thread_ranks.run_mesh(2, 2, body)


def test_large_halves_do_not_overflow_over_two_axes() -> None:
    def body(
        collectives: thread_ranks.ThreadCollectives, replicas: thread_ranks.ThreadReplicas
    ) -> None:
        reduction = reductions.Setup(
            grad=reductions.F16, reduce=reductions.F16, shard=reductions.F16
        ).bind(collectives, replicas)
        for member in reduction.members:
            member.full_grad = torch.full(member.shape, 16000.0, dtype=reductions.F16)
        reductions.run(reduction)
        for member in reduction.members:
            assert member.gradient.eq(16000.0).all()

    thread_ranks.run_mesh(4, 4, body)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("to_host", [True, False])
def test_hook_sees_the_sum_once_and_before_delivery(copies: int, size: int, to_host: bool) -> None:
    def body(
        collectives: thread_ranks.ThreadCollectives, replicas: thread_ranks.ThreadReplicas
    ) -> None:
        seen: list[torch.Tensor] = []

        def hook(flat: torch.Tensor) -> None:
            seen.append(flat.clone())
            flat.add_(1)

        setup = reductions.Setup(hook=hook, reduce=reductions.F64, factor=1.0, to_host=to_host)
        reduction = setup.bind(collectives, replicas)
        payload = sum(slot.shard_numel for slot in reduction.context.slots)
        for all_reduce in (False, True):
            for member in reduction.members:
                member.full_grad = torch.ones(member.shape)
            reductions.run(reduction, all_reduce=all_reduce)
        # Without copies nothing waits for an all-reduce: each backward delivers.
        assert len(seen) == (1 if copies > 1 else 2)
        sums = 2 * copies * size if copies > 1 else size
        assert all(flat.ndim == 1 and flat.dtype == reductions.F64 for flat in seen)
        assert all(flat[:payload].eq(sums).all() for flat in seen)
        for member in reduction.members:
            assert member.gradient.dtype == reductions.F32
            assert member.gradient.eq(sum(sums + 1 for _ in seen)).all()

    thread_ranks.run_mesh(copies, size, body)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("reduce", [reductions.F32, reductions.BF16])
def test_gradients_on_the_host_are_copies(size: int, reduce: torch.dtype) -> None:
    """The device's flat gradient may be freed before the host delivers."""

    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = reductions.Setup(to_host=True, reduce=reduce).bind(collectives)
        for member in reduction.members:
            member.full_grad = torch.ones(member.shape)
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


def test_discarded_partial_sums_do_not_come_back() -> None:
    def body(
        collectives: thread_ranks.ThreadCollectives, replicas: thread_ranks.ThreadReplicas
    ) -> None:
        reduction = reductions.Setup().bind(collectives, replicas)
        for all_reduce in (False, True):
            for member in reduction.members:
                member.full_grad = torch.ones(member.shape)
            reductions.run(reduction, all_reduce=all_reduce)
            reduction.discard()
        assert all(member.gradient.eq(1).all() for member in reduction.members)

    thread_ranks.run_mesh(2, 2, body)


@pytest.mark.parametrize("shard", [reductions.BF16, reductions.F32])
def test_gradient_of_another_dtype_than_the_parameter(shard: torch.dtype) -> None:
    def body(
        collectives: thread_ranks.ThreadCollectives, replicas: thread_ranks.ThreadReplicas
    ) -> None:
        setup = reductions.Setup(
            shard=shard, grad=shard, reduce=reductions.F64, result=reductions.F64, factor=3.0
        )
        for wanted in (setup, replace(setup, direct=True), replace(setup, to_host=True)):
            reduction = wanted.bind(collectives, replicas)
            for member in reduction.members:
                member.full_grad = torch.ones(member.shape, dtype=shard)
            reductions.run(reduction)
            for member in reduction.members:
                assert member.gradient.dtype == reductions.F64
                assert member.gradient.eq(collectives.size * replicas.size / 3).all()

    for size in (1, 2):
        thread_ranks.run_mesh(2, size, body)
