"""Traces of real ranks: the same bits, and collectives that the host has waited for."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.tracing import Timeline
from tests.common.errors import raises
from tests.common.parity import assert_equal
from tests.common.workers import ranks

DIM, STEPS = 16, 2


def _train(shape: tuple[int, ...], path: Path | None) -> tuple[list[Tensor], Timeline | None]:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(3)])
    for module in (*model, model):
        fsdp2.fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    batches = [torch.randn(4, DIM) for _ in range(STEPS)]
    trace = None if path is None else fsdp2.trace(path)
    if trace is not None:
        trace.__enter__()
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if trace is not None:
        trace.__exit__(None, None, None)
    found = [_local(param) for param in model.parameters()]
    return found, None if trace is None else trace.timeline


def _local(param: Any) -> Tensor:
    rows: Tensor = param.to_local().detach().clone()
    return rows


def _compare(shape: tuple[int, ...]) -> Timeline:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step-{rank}.json")
        expected, _ = _train(shape, None)
        seen, timeline = _train(shape, path)
        assert_equal(seen, expected)
        assert timeline is not None
        assert Timeline.read(str(path).format(rank=dist.get_rank())).metadata == timeline.metadata
        assert timeline.metadata["rank"] == dist.get_rank()
    return timeline


@ranks(2)
def test_a_traced_step_trains_the_same_bits() -> None:
    timeline = _compare((2,))
    gathers, reductions = timeline.on("all-gather"), timeline.on("reduce")
    units = {s.unit for s in gathers}
    assert len(gathers) >= 2 * len(units) * STEPS - STEPS
    scattered = [s for s in reductions if s.operation == "reduce-scatter"]
    assert len(scattered) == len(units) * STEPS
    assert {s.group for s in (*gathers, *scattered)} == {"ranks 0, 1"}
    behind = {w.behind for w in timeline.waits}
    assert behind == {timeline.slices.index(s) for s in (*gathers, *scattered)}
    found = fsdp2.tracing.summary(timeline)
    assert 0 < found.exposed <= found.duration
    assert found.hidden <= found.communication


@pytest.mark.extended
@ranks(4)
def test_replicas_have_a_lane_of_their_own() -> None:
    timeline = _compare((2, 2))
    summed = timeline.on("all-reduce")
    units = {s.unit for s in timeline.on("all-gather")}
    assert len([s for s in summed if s.operation == "all-reduce"]) == len(units) * STEPS
    groups = {s.group for s in summed if s.operation == "all-reduce"}
    rank = dist.get_rank()
    assert groups == {f"ranks {rank % 2}, {rank % 2 + 2}"}


@ranks(2)
def test_a_bad_path_raises_on_all_ranks_of_a_node() -> None:
    """Else those that do not record would wait for rank 0 in their next collective.

    Without a place for the rank in the path the first one records.
    """
    model = fsdp2.fully_shard(nn.Linear(DIM, DIM))
    with tempfile.TemporaryDirectory() as folder:
        dangling = Path(folder, "link.json")
        dangling.symlink_to(Path(folder, "nowhere", "step.json"))
        bad = [Path(folder), dangling, Path(folder, "long" * 99)]
        for path in bad:
            with raises("trace-cannot-write"), fsdp2.trace(path):
                pytest.fail("it began")
        with raises("trace-no-folder"), fsdp2.trace(Path(folder, "nowhere", "step.json")):
            pytest.fail("it began")
        new = Path(folder, "step.json")
        _, timeline = _train((2,), Path(folder, "first.json"))
        assert (timeline is None) is bool(dist.get_rank())
        if dist.get_rank():
            with fsdp2.trace(new):
                assert not new.exists()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "access", lambda *_: False)
                with raises("trace-cannot-write"), fsdp2.trace(new):
                    pytest.fail("it began")
                patch.setenv("LOCAL_WORLD_SIZE", "1")
                with fsdp2.trace(dangling):
                    pass
    model(torch.randn(2, DIM)).sum().backward()
