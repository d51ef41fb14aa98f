"""A transport that somebody adds: a function here, entries in tables, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.core.codecs.codec import REDUCED, Rounded
from fsdp2.core.config import Wire
from fsdp2.core.modules.registry import record_of
from fsdp2.core.reduce import binding
from fsdp2.core.reduce.program import Job, Op
from fsdp2.core.reduce.reduction import ReduceContext, operations, unify
from fsdp2.core.reduce.transport import packing
from fsdp2.testing.null_group import CallLog, init_null_group
from tests.common import scenarios, thread_ranks
from tests.reduce import reductions

pytestmark = pytest.mark.alone


def reduce_rounded(context: ReduceContext) -> list[Op]:
    """Gradients travel in bf16, whatever the reduce dtype; the sums come back in that."""
    spec, kernels, collectives = context.spec, context.kernels, context.collectives
    width, pack = packing(context)
    shape = (collectives.size, width)
    context.staging = staging = kernels.transient(2 * math.prod(shape), "rounded gradients")
    rows = staging.view(reductions.BF16, 0, shape)
    sent = staging.view(reductions.BF16, 0, (math.prod(shape),))
    staging.release()
    new_sums = kernels.bind_empty((width,), reductions.BF16, "rounded sums")
    scatter = collectives.bind_reduce_scatter(context.division.kind)

    def stage(job: Job) -> None:
        staging.acquire()
        pack(job, rows, unify(job, spec))
        job.scattered = new_sums()

    def reduce(job: Job) -> None:
        assert job.scattered is not None
        work = scatter(job.scattered, sent)
        if work is not None:
            work.wait()

    def unstage(job: Job) -> None:
        assert job.flat is not None
        assert job.scattered is not None
        kernels.copy(job.flat.narrow(0, 0, width), job.scattered)

    return operations(context, "rounded", stage, reduce, unstage, [sent])


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    others = binding.reduce_coded

    def chosen(context: ReduceContext) -> list[Op]:
        return (reduce_rounded if context.spec.codec == "rounded" else others)(context)

    monkeypatch.setitem(REDUCED, "rounded", Rounded())  # its name
    monkeypatch.setattr(binding, "reduce_coded", chosen)


ROUNDED = reductions.Setup(codec="rounded", shapes=reductions.ODD)
FINE = 1 + 1 / 256  # no bf16 number; it becomes 1


@pytest.mark.parametrize(
    "setup",
    [
        ROUNDED,
        replace(ROUNDED, direct=True),
        replace(ROUNDED, factor=8.0),
        replace(ROUNDED, grad=reductions.BF16),
        replace(ROUNDED, grad=reductions.F16, reduce=reductions.F16),
        replace(ROUNDED, to_host=True),
        replace(ROUNDED, keep=True),
        replace(ROUNDED, hook=lambda flat: flat.mul_(1)),
    ],
)
@pytest.mark.parametrize("copies", [1, 2])
def test_what_it_reduces_is_rounded_and_all_else_as_ever(
    setup: reductions.Setup, copies: int
) -> None:
    def body(
        collectives: thread_ranks.ThreadCollectives, replicas: thread_ranks.ThreadReplicas
    ) -> None:
        reduction = setup.bind(collectives, replicas)
        factor = 1.0 if setup.factor is None else 2 * copies / setup.factor
        for repetition in (1, 2):  # the second adds to what is there
            for member in reduction.members:
                member.full_grad = torch.full(member.shape, FINE, dtype=setup.grad)
            reductions.run(reduction)
            for member in reduction.members:
                assert member.gradient.dtype is reductions.F32
                assert member.gradient.eq(factor * repetition).all()
        assert collectives.calls == ["reduce_scatter"] * 4  # gradients and marks
        staging = reduction.context.staging
        assert staging is not None
        assert not staging.allocated

    thread_ranks.run_mesh(copies, 2, body)


def test_one_rank_does_not_round() -> None:
    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        reduction = ROUNDED.bind(collectives)
        for member in reduction.members:
            member.full_grad = torch.full(member.shape, FINE)
        reductions.run(reduction)
        assert all(member.gradient.eq(FINE).all() for member in reduction.members)

    thread_ranks.run_ranks(1, body)


@pytest.mark.parametrize("scenario", ["steady", "accumulation", "replicated", "changing"])
def test_its_memory_is_used_in_order(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scenarios.staged_in_order(
        scenario, "rounded gradients", monkeypatch, wire=Wire(reduce="rounded")
    )


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("scenario", ["steady", "accumulation", "replicated", "changing"])
def test_formats_use_their_memory_in_order(
    scenario: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(reduce=name)
    assert scenarios.staged_in_order(scenario, "coded gradients", monkeypatch, wire=wire)


def test_a_sharded_model_uses_it() -> None:
    """Of a unit's options, as a setter would change them."""
    log = CallLog()
    init_null_group(8, observer=log)
    try:
        model = nn.Linear(64, 64)
        fsdp2.fully_shard(model)
        record = record_of(model)
        assert record is not None
        (group,) = record.unit.groups
        group.set_options(replace(group.options, wire=Wire(reduce="rounded")))
        model(torch.ones(2, 64)).sum().backward()
        staging = group.bound.reductions[0].context.staging
        assert staging is not None
        assert staging.name == "rounded gradients"
        assert log.counts()["reduce_scatter_single"] == 2
        assert model.weight.grad is not None
    finally:
        dist.destroy_process_group()
