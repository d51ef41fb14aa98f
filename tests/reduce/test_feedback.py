"""Error feedback: what messages leave out of gradients arrives with the next ones."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.core.modules.registry import record_of
from fsdp2.core.reduce.binding import hand_over
from fsdp2.core.reduce.feedback import Feedback, keep_finite
from fsdp2.core.reduce.reduction import Reduction
from fsdp2.testing.null_group import init_null_group
from tests.common import thread_ranks
from tests.common.errors import raises
from tests.reduce import reductions

pytestmark = pytest.mark.alone

SHAPES = (((16, 24), 0), ((7, 3), 0), ((5, 40), 1))
FED = reductions.Setup(codec="int4", shapes=SHAPES, feedback=True)
STEPS = 12


def gradient(shape: tuple[int, ...], rank: int, step: int, which: int) -> torch.Tensor:
    """Small numbers beside a few large ones: these take the codes of 4 bits for themselves."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * which + rank)
    found = torch.randn(shape, generator=generator)
    found.flatten()[::61] = 30.0
    return found + 0.5


def give(reduction: Reduction, rank: int, step: int, scale: float = 1.0) -> None:
    for which, member in enumerate(reduction.members):
        full = gradient(tuple(member.shape), rank, step, which) * scale
        member.full_grad = full.to(reduction.context.spec.grad_dtype)


def delivered(setup: reductions.Setup, ranks: int = 2, copies: int = 1) -> list[torch.Tensor]:
    """What the gradients of `STEPS` reductions come to on the first rank, and the exact sums."""

    def body(collectives: Any, replicas: Any) -> list[torch.Tensor]:
        reduction = setup.bind(collectives, replicas)
        rank = collectives.rank + ranks * replicas.rank
        for step in range(STEPS):
            give(reduction, rank, step)
            reductions.run(reduction)  # the next are added to the first
        return [member.gradient.clone() for member in reduction.members]

    return thread_ranks.run_mesh(copies, ranks, body)[0]


def off(setup: reductions.Setup, **arguments: int) -> float:
    """How far the sums of all steps are from exact ones."""
    exact = replace(setup, codec=None, feedback=False, rotate=False)
    pairs = zip(delivered(setup, **arguments), delivered(exact, **arguments), strict=True)
    return max(float((found - right).abs().max()) for found, right in pairs)


@pytest.mark.parametrize(
    "setup",
    [
        FED,
        replace(FED, codec="int8"),
        replace(FED, codec="bf16"),
        replace(FED, rotate=True),
        replace(FED, grad=reductions.BF16),
        replace(FED, factor=1.0),
        replace(FED, to_host=True),
        replace(FED, keep=True),
    ],
    ids=["int4", "int8", "bf16", "rotated", "mixed", "divided", "offloaded", "kept"],
)
def test_over_steps_nothing_is_left_out(setup: reductions.Setup) -> None:
    """What is left out is that of the last step alone; without feedback it is that of each."""
    plain = off(replace(setup, feedback=False))
    fed = off(setup)
    assert fed < plain / (2 if setup.codec == "bf16" else 3)  # whose errors are as random as sums
    step = {"int4": 1 / 14, "int8": 1 / 254, "bf16": 1 / 256}[setup.codec or ""]
    largest = 34.0 * (1 + step)  # of a number that is sent, and of what was left out before
    summed = 2 / 2 if setup.factor is None else 2
    spread = math.sqrt(128) if setup.rotate else 1
    inputs = STEPS * summed * 34 / 256 if setup.grad is reductions.BF16 else 0
    lost = STEPS * largest * step * summed * spread / 512  # a residual is kept in bf16
    assert fed <= largest * step * summed * spread * 1.02 + inputs + lost + 1e-4


@pytest.mark.parametrize("rotate", [False, True])
def test_residuals_are_inside_the_shard_axis(rotate: bool) -> None:
    setup = replace(FED, rotate=rotate)
    assert off(setup, copies=2) < off(replace(setup, feedback=False), copies=2) / 3


@pytest.mark.parametrize("dtype", [reductions.BF16, reductions.F16])
def test_residuals_are_what_one_message_leaves_out(dtype: torch.dtype) -> None:
    """Gradients of fp16 are divided before the sum: residuals are of what was divided."""

    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = replace(FED, grad=dtype, reduce=dtype).bind(collectives)
        feedback = reduction.context.feedback
        assert feedback is not None
        assert feedback.is_zero
        for step in range(STEPS):
            give(reduction, collectives.rank, step)
            reductions.run(reduction)
        assert not feedback.is_zero
        columns = feedback.columns()
        assert {column.dtype for column in columns} == {torch.bfloat16}
        # Half a step of 4 bits; in bf16 a difference is rounded, too
        before = feedback.units[1] or 1.0
        assert all(0 < column.abs().max() <= 38 / 14 * 1.1 / before for column in columns)

    thread_ranks.run_ranks(4, body)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rotate", [False, True])
def test_what_is_not_finite_is_seen_once(bad: float, rotate: bool) -> None:
    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = replace(FED, rotate=rotate).bind(collectives)
        give(reduction, collectives.rank, 0)
        reductions.run(reduction)
        give(reduction, collectives.rank, 1)
        if collectives.rank == 0:
            full = reduction.members[0].full_grad
            assert full is not None
            full[3, 5] = bad  # of rank 0's rows
        for member in reduction.members:
            member.gradient = None
        reductions.run(reduction)
        found = reduction.members[0].gradient
        assert bool(found.isfinite().all()) == (collectives.rank == 1)
        feedback = reduction.context.feedback
        assert feedback is not None
        columns = feedback.columns()[0]
        assert columns.isfinite().all()
        around = columns[0].view(8, 24)[3, :24]
        assert around.eq(0).all() == (collectives.rank == 0)
        for member in reduction.members:
            member.gradient = None
        give(reduction, collectives.rank, 2)
        reductions.run(reduction)
        assert all(member.gradient.isfinite().all() for member in reduction.members)

    thread_ranks.run_ranks(2, body)


# ---- bound anew


def both(
    first: reductions.Setup, second: reductions.Setup, strangers: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Residuals that one reduction leaves, and those of the next, by the second one's members.

    These are the first one's of the same shapes, but for the last ``strangers``.
    """

    def body(collectives: thread_ranks.ThreadCollectives) -> Any:
        former, made = first.bind(collectives), second.bind(collectives)
        give(former, collectives.rank, 0)
        reductions.run(former)
        by_shape = {member.shape: member for member in former.members}
        own = list(made.members)
        known = len(own) - strangers
        made.members = [by_shape[member.shape] for member in own[:known]] + own[known:]
        old, new = former.context.feedback, made.context.feedback
        assert old is not None
        left = {m.shape: c.clone() for m, c in zip(former.members, old.columns(), strict=True)}
        hand_over([former], [made])
        if new is None:
            return []
        pairs = zip(made.members, new.columns(), strict=True)
        return [(left[member.shape], column.clone()) for member, column in pairs]

    found: list[tuple[torch.Tensor, torch.Tensor]] = thread_ranks.run_ranks(2, body)[0]
    return found


@pytest.mark.parametrize(
    ("second", "kept"),
    [
        (FED, True),
        (replace(FED, codec="int8", rotate=True), True),
        (replace(FED, shapes=SHAPES[::-1]), True),
        (replace(FED, grad=reductions.F16, reduce=reductions.F16), False),
    ],
    ids=["the same", "another codec", "another order", "divided otherwise"],
)
def test_members_keep_theirs_or_begin_at_zero(second: reductions.Setup, kept: bool) -> None:
    for left, now in both(FED, second):
        assert left.any()
        assert torch.equal(left, now) if kept else not now.any()


def test_members_that_nobody_had_begin_at_zero_and_without_feedback_all_are_gone() -> None:
    kept, other = both(FED, replace(FED, shapes=SHAPES[:2]), strangers=1)
    assert torch.equal(*kept)
    assert not other[1].any()
    assert both(FED, replace(FED, feedback=False)) == []


def test_what_an_exception_has_torn_begins_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = set[int]()  # threads whose reductions are not interrupted any more

    def interrupted(residual: torch.Tensor, rest: torch.Tensor) -> None:
        keep_finite(residual, rest)
        if threading.get_ident() not in whole:
            raise KeyboardInterrupt

    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = FED.bind(collectives)
        feedback = reduction.context.feedback
        assert feedback is not None
        give(reduction, collectives.rank, 0)
        with pytest.raises(KeyboardInterrupt):
            reductions.run(reduction)
        reduction.abandon()
        assert feedback.is_zero
        assert not any(column.any() for column in feedback.columns())
        whole.add(threading.get_ident())
        give(reduction, collectives.rank, 1)
        reductions.run(reduction)
        assert not feedback.is_zero
        assert all(column.any() for column in feedback.columns())

    monkeypatch.setattr("fsdp2.core.reduce.feedback.keep_finite", interrupted)
    thread_ranks.run_ranks(2, body)


# ---- through the setter


def test_options_of_gradients_need_their_format() -> None:
    init_null_group(2)
    try:
        model = nn.Linear(8, 8)
        fsdp2.fully_shard(model)
        for name in ("rotate", "feedback"):
            with raises("wire-format-alone"):
                model.set_wire_format(gather="int8", exact_below=0, **{name: True})
    finally:
        dist.destroy_process_group()


def test_residuals_outlive_what_binds_reductions_anew() -> None:
    """Settings, a trace, a parameter that is frozen beside; not the format's end."""
    init_null_group(4)
    try:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8, bias=False))
        fsdp2.fully_shard(model)
        model.set_wire_format(reduce="int4", feedback=True, exact_below=100)

        record = record_of(model)
        assert record is not None
        (group,) = record.unit.own_groups

        def feedbacks() -> list[Feedback]:
            found = [reduction.context.feedback for reduction in group.bound.reductions]
            return [feedback for feedback in found if feedback is not None]

        def residuals() -> list[torch.Tensor]:
            return [column.clone() for each in feedbacks() for column in each.columns()]

        def step() -> None:
            model(torch.randn(2, 64)).square().sum().backward()

        step()
        feedbacks()[0].hold().normal_()  # nothing has travelled
        left = residuals()
        assert len(left) == 2
        model.set_tuning(keep_gradients=True)
        assert all(map(torch.equal, residuals(), left))
        model.set_wire_format(reduce="int8", feedback=True, exact_below=100)
        model.unshard()
        model.reshard()
        assert all(map(torch.equal, residuals(), left))
        model[1].weight.requires_grad_(False)
        model(torch.randn(2, 64)).square().sum()
        assert torch.equal(residuals()[0], left[0])
        model.reset_iter_state()
        model.set_wire_format(reduce="int8", exact_below=100)
        step()
        assert residuals() == []
    finally:
        dist.destroy_process_group()
