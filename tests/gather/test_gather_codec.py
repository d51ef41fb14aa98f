"""A format of parameters that somebody adds: a codec, and an entry in the table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.core.codecs.codec import GATHERED, Rounded
from fsdp2.core.config import Wire
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.gather import coded
from fsdp2.core.gather.make import make_gathers
from fsdp2.core.gather.program import combined
from fsdp2.core.layout.layout import ROWS, Cut, ParamShape, build_layout
from fsdp2.core.modules.registry import record_of
from fsdp2.testing.null_group import CallLog, init_null_group
from tests.common import scenarios, thread_ranks

pytestmark = pytest.mark.alone

CPU, BF16, F32 = torch.device("cpu"), torch.bfloat16, torch.float32
KERNELS = Kernels(CPU)
FINE = 1 + 1 / 256  # no bf16 number; it becomes 1


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GATHERED, "rounded", Rounded())


@pytest.mark.parametrize("coalesces", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_it_gathers_is_rounded(size: int, coalesces: bool) -> None:
    cuts = (((8, 4), ROWS), ((5, 3), ROWS), ((3, 4), Cut(1)))
    params = [ParamShape("p", shape, cut, F32, F32, coded=True) for shape, cut in cuts]
    layout = build_layout(params, size, coalesces, 0)

    def body(collectives: thread_ranks.ThreadCollectives) -> None:
        shard = KERNELS.flat(layout.shard_bytes, on_meta=False)
        shard.view(F32, 0, (layout.shard_bytes // 4,)).fill_(FINE)
        full = KERNELS.transient(layout.full_bytes, "gathered")
        parts = make_gathers(
            layout.segments, shard, full, collectives, KERNELS, None, CPU, "rounded"
        )
        gather = combined(parts)
        for run in (*gather.acquire, *gather.copy_in, *gather.collectives, *gather.finish):
            run()
        for _, parameter in gather.parameters:
            assert parameter.eq(1 if size > 1 else FINE).all()

    thread_ranks.run_ranks(size, body, coalesces=coalesces)


@pytest.mark.parametrize("scenario", ["steady", "changing", "offloaded"])
def test_its_memory_is_used_in_order(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scenarios.staged_in_order(
        scenario, coded.MESSAGES, monkeypatch, wire=Wire(gather="rounded")
    )


@pytest.mark.parametrize("scenario", ["steady", "changing", "offloaded"])
def test_eight_bits_use_their_memory_in_order(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(gather="int8")
    assert scenarios.staged_in_order(scenario, coded.MESSAGES, monkeypatch, wire=wire)


def test_a_sharded_model_uses_it_from_its_next_gather_on() -> None:
    log = CallLog()
    init_null_group(8, observer=log)
    try:
        model = nn.Linear(64, 64)
        fsdp2.fully_shard(model)
        record = record_of(model)
        assert record is not None
        (group,) = record.unit.groups
        with torch.no_grad():
            model(torch.ones(2, 64))
        group.set_options(replace(group.options, wire=Wire(gather="rounded")))
        with torch.no_grad():
            model(torch.ones(2, 64))
        exact, rounded = (c.nbytes for c in log if c.name == "all_gather_single")
        assert rounded * 2 == exact
        assert log.counts() == {"all_gather_single": 2, "allreduce": 1}
    finally:
        dist.destroy_process_group()
