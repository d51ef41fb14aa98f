"""Gradients whose memory is kept: filled again while nobody has them, and only then."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp2.core.reduce.reduction import Reduction
from fsdp2.testing.virtual import VirtualDevice
from tests.common import thread_ranks
from tests.common.scenarios import SCENARIOS
from tests.reduce import reductions
from tests.reduce.reductions import BF16, F16, F64, Setup

pytestmark = pytest.mark.alone

KEPT = Setup(keep=True)

SETUPS = [
    KEPT,
    Setup(keep=True, direct=True),
    Setup(keep=True, direct=True, grad=BF16, factor=8.0),
    Setup(
        keep=True,
        direct=True,
        shapes=reductions.LARGE_AND_SMALL,
        pack_below=64,
        grad=BF16,
    ),
    Setup(keep=True, shapes=reductions.ODD, grad=F16, reduce=F16),
    Setup(keep=True, shapes=reductions.ODD, result=F64),
    Setup(keep=True, shapes=reductions.ODD, to_host=True),
    Setup(keep=True, shapes=reductions.ODD, to_host=True, grad=BF16, reduce=BF16),
]
setups = pytest.mark.parametrize("setup", SETUPS, ids=str)


def _reduce(reduction: Reduction, value: float, present: Sequence[bool] | None = None) -> None:
    """One backward that leaves gradients of ``value`` on the members that are ``present``."""
    _leave(reduction, value, present)
    reductions.run(reduction)


def _leave(reduction: Reduction, value: float, present: Sequence[bool] | None = None) -> None:
    for i, member in enumerate(reduction.members):
        if present is None or present[i]:
            dtype = reduction.context.spec.grad_dtype
            member.full_grad = torch.full(member.shape, value, dtype=dtype)


def _drop(reduction: Reduction) -> None:
    for member in reduction.members:
        member.gradient = None


def _gradients(reduction: Reduction) -> list[torch.Tensor]:
    return [member.gradient for member in reduction.members]


def _all_are(gradients: Sequence[Any], value: float) -> bool:
    return all(gradient.eq(value).all() for gradient in gradients)


def _scale(setup: Setup, ranks: int) -> float:
    return 1.0 if setup.factor is None else ranks / setup.factor


@setups
@pytest.mark.parametrize("copies", [1, 2])
def test_the_same_objects_in_every_step(setup: Setup, copies: int) -> None:
    def body(
        collectives: thread_ranks.ThreadCollectives, replicas: thread_ranks.ThreadReplicas
    ) -> None:
        reduction = setup.bind(collectives, replicas)
        scale = _scale(setup, 2 * copies)
        first: list[torch.Tensor] = []
        for value in (1.0, 2.0, 4.0):
            _reduce(reduction, value)
            gradients = _gradients(reduction)
            first = first or gradients
            assert all(now is then for now, then in zip(gradients, first, strict=True))
            assert _all_are(gradients, value * scale)
            _drop(reduction)

    thread_ranks.run_mesh(copies, 2, body, premultiplies=setup.premultiplies)


@setups
def test_gradients_that_are_there_are_added_to(setup: Setup) -> None:
    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = setup.bind(collectives)
        scale = _scale(setup, 2)
        for value, total in ((1.0, 1.0), (2.0, 3.0), (4.0, 7.0)):
            _reduce(reduction, value)
            assert _all_are(_gradients(reduction), total * scale)
        _drop(reduction)
        _reduce(reduction, 2.0)
        assert _all_are(_gradients(reduction), 2.0 * scale)

    thread_ranks.run_ranks(2, body)


@setups
def test_one_gradient_that_stays_is_not_overwritten(setup: Setup) -> None:
    """The others are new; once all are dropped, the kept memory is used again."""

    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = setup.bind(collectives)
        scale = _scale(setup, 2)
        _reduce(reduction, 1.0)
        kept = _gradients(reduction)
        for member in reduction.members[1:]:
            member.gradient = None
        _reduce(reduction, 2.0)
        first, *others = _gradients(reduction)
        assert first is kept[0]
        assert _all_are([first], 3.0 * scale)
        assert _all_are(others, 2.0 * scale)
        assert all(now is not then for now, then in zip(others, kept[1:], strict=True))
        _drop(reduction)
        _reduce(reduction, 4.0)
        assert all(now is then for now, then in zip(_gradients(reduction), kept, strict=True))
        assert _all_are(kept, 4.0 * scale)

    thread_ranks.run_ranks(2, body)


@pytest.mark.parametrize("to_host", [True, False])
def test_members_without_a_gradient_get_none(to_host: bool) -> None:
    setup = replace(KEPT, to_host=to_host)

    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = setup.bind(collectives)
        for present in ((True, False), (False, True), (True, True)):
            _reduce(reduction, 2.0, present)
            for member, there in zip(reduction.members, present, strict=True):
                assert (member.gradient is not None) == there
                assert not there or member.gradient.eq(2).all()
            _drop(reduction)
        assert [member.hooks_run for member in reduction.members] == [2, 2]

    thread_ranks.run_ranks(2, body)


def test_two_reductions_on_their_way_to_the_host_are_summed() -> None:
    """The first has the kept memory; what the second brings is added when both have arrived."""

    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = replace(KEPT, to_host=True).bind(collectives)
        jobs = []
        for value in (1.0, 2.0):
            _leave(reduction, value)
            job = reduction.collect(take_missing=False)
            assert job is not None
            jobs.append(job)
            for step in (*reduction.full.compute, *reduction.full.reduce):
                step(job)
        assert _gradients(reduction) == [None, None]
        for job in jobs:
            for step in reduction.full.host:
                step(job)
        assert _all_are(_gradients(reduction), 3.0)

    thread_ranks.run_ranks(2, body)


@pytest.mark.parametrize(
    ("scenario", "seed"),
    [("several_forwards", 933), ("accumulation", 1590), ("replicated", 874), ("finalized", 284)],
)
def test_nothing_fills_memory_that_an_all_reduce_still_writes(scenario: str, seed: int) -> None:
    """A hook drops the gradient as soon as it is delivered, and the unit reduces once more.

    Seeds of random models that once raced: nobody held the gradient, so its memory was taken again.
    """
    found = SCENARIOS[scenario](random.Random(f"{scenario} {seed}"), VirtualDevice())
    assert found.problems == []
