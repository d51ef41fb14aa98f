"""What a trace of real steps records, and that it leaves nothing behind. One process of 8 ranks."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.core.device.buffers import all_buffers
from fsdp2.core.device.collectives import GroupCollectives
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.modules.registry import record_of
from fsdp2.core.schedule import unit
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import Observed
from fsdp2.core.schedule.unit import Unit
from fsdp2.optim import FlatOptimizer
from fsdp2.testing.counting import called
from fsdp2.testing.null_group import init_null_group, null_mesh
from fsdp2.tracing import Slice, Timeline
from tests.common.errors import raises
from tests.tracing.perfetto import problems_of

pytestmark = pytest.mark.alone

BLOCKS = 3


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a process that has no other models: those of other tests may not be freed yet."""
    monkeypatch.setattr(unit, "_enlisted", weakref.WeakSet())
    init_null_group(8)
    yield
    dist.destroy_process_group()


class Moody(nn.Linear):
    """Fails where it is told to."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(64, 64)
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("not today")
        return super().forward(x)


def build(**options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(*[Moody() for _ in range(BLOCKS)])
    for module in (*model, model):
        fsdp2.fully_shard(module, **{"mesh": null_mesh(8), **options})
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def traced(path: Path, steps: int = 2, **options: Any) -> Timeline:
    model, optimizer = build(**options)
    with fsdp2.trace(path, title="a run") as trace:
        for _ in range(steps):
            step(model, optimizer)
    return trace.timeline


def names(slices: list[Slice], *operations: str) -> list[str]:
    return [s.name for s in slices if s.operation in operations]


def units(timeline: Timeline, lane: str, operation: str) -> list[str]:
    return [s.unit for s in timeline.on(lane) if s.operation == operation]


def compute_is_apart_from_waits(timeline: Timeline) -> bool:
    busy = [(s.start, s.end) for s in timeline.on("compute")]
    waits = [(w.start, w.end) for w in timeline.waits if w.lane == "compute"]
    return not any(a < end and start < b for a, b in busy for start, end in waits)


# ---- what is recorded


def test_gathers_and_reductions_are_those_of_the_steps(tmp_path: Path) -> None:
    found = traced(tmp_path / "step.json")
    assert units(found, "all-gather", "all-gather") == [*"012", *"210"] * 2
    assert units(found, "reduce", "reduce-scatter") == [*"210"] * 2
    gather = found.on("all-gather")[0]
    assert (gather.dtype, gather.group) == ("float32", "ranks 0-7")
    assert gather.bytes == (64 * 64 + 64) * 4
    assert [s.iteration for s in found.on("all-gather")] == [0] * 6 + [1] * 6
    assert names(found.on("compute"), "optimizer") == ["optimizer"] * 2


def test_compute_is_by_unit_and_direction(tmp_path: Path) -> None:
    found = traced(tmp_path / "step.json", steps=1)
    seen = dict.fromkeys(s.name for s in found.on("compute") if s.unit in [*"012"])
    order = [name for name in seen if name.split()[0] in ("forward", "backward")]
    assert order == [*(f"forward {n}" for n in "012"), *(f"backward {n}" for n in "210")]


def test_slices_and_waits_of_a_lane_do_not_overlap(tmp_path: Path) -> None:
    found = traced(tmp_path / "step.json")
    for lane in ("compute", "all-gather", "reduce", "copy-in"):
        slices = found.on(lane)
        ends = [s.end for s in slices][:-1]
        assert all(a <= b.start for a, b in zip(ends, slices[1:], strict=True)), lane
    assert compute_is_apart_from_waits(found)


def test_each_collective_was_waited_for(tmp_path: Path) -> None:
    """A reduction from its launch on: backends may block there, and compute stands still anyway."""
    found = traced(tmp_path / "step.json")
    collectives = [s for s in found.slices if s.operation in ("all-gather", "reduce-scatter")]
    behind = [found.slices[w.behind] for w in found.waits]
    assert sorted(map(id, behind)) == sorted(map(id, collectives))
    assert {w.lane for w in found.waits} == {"compute"}
    assert all(w.unit == s.unit for w, s in zip(found.waits, behind, strict=True))
    waits = [w for w in found.waits if w.operation == "reduce-scatter"]
    assert len(waits) == 2 * BLOCKS
    assert [w.start for w in waits] == [found.slices[w.behind].start for w in waits]


def test_copies_have_bytes(tmp_path: Path) -> None:
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    found = traced(tmp_path / "step.json", mp_policy=policy)
    assert units(found, "copy-in", "copy-in") == [*"012", *"210"] * 2
    assert found.on("all-gather")[0].dtype == "bfloat16"
    assert {s.dtype for s in found.on("reduce") if s.operation == "reduce-scatter"} == {"float32"}
    staged = [s for s in found.on("compute") if s.operation == "stage"]
    assert len(staged) >= BLOCKS * 2
    assert all(s.bytes for s in staged)


def test_memory_is_that_of_the_buffers(tmp_path: Path) -> None:
    """Of two units at a time: the next one's arrives packed; its copy-out finds both of its own."""
    gc.collect()  # models of earlier tests count for as long as they live
    found = traced(tmp_path / "step.json")
    others = found.memory[0].bytes.get("gathered", 0)
    size = (64 * 64 + 64) * 4
    assert {sample.bytes["shards"] for sample in found.memory} == {BLOCKS * size // 8}
    gathered = {sample.bytes.get("gathered", 0) - others for sample in found.memory}
    assert gathered == {0, size, 2 * size}
    assert found.memory[-1].bytes["optimizer"] >= 2 * BLOCKS * size // 8
    assert max(sample.bytes.get("gradients", 0) for sample in found.memory) > size


def test_the_file_is_valid_and_says_what_it_is_of(tmp_path: Path) -> None:
    found = traced(tmp_path / "step-{rank}.json")
    path = tmp_path / "step-0.json"
    assert Timeline.read(path).slices == found.slices
    assert problems_of(json.loads(path.read_text())) == []
    head = found.metadata
    assert (head["source"], head["clock"], head["world_size"]) == ("run", "host", 8)
    assert (head["title"], head["device"]) == ("a run", "cpu")
    assert found.metadata.get("incomplete") is None


def test_a_trace_may_begin_before_the_first_step_or_between_others(tmp_path: Path) -> None:
    model, optimizer = build()
    for _ in range(2):
        step(model, optimizer)
    with fsdp2.trace(tmp_path / "later.json") as trace:
        step(model, optimizer)
    assert units(trace.timeline, "all-gather", "all-gather") == [*"012", *"210"]
    assert {s.iteration for s in trace.timeline.on("all-gather")} == {0}


def test_it_may_begin_and_end_while_a_gather_is_under_way(tmp_path: Path) -> None:
    model, optimizer = build()
    step(model, optimizer)
    block: Any = model[0]
    handle = block.unshard(async_op=True)
    with fsdp2.trace(tmp_path / "one.json"):
        handle.wait()
        later: Any = model[1]
        other = later.unshard(async_op=True)
    other.wait()
    block.reshard()
    later.reshard()
    step(model, optimizer)


# ---- what users do besides a plain step


def test_optimizers_of_one_step_share_its_number(tmp_path: Path) -> None:
    model, _ = build()
    params = list(model.parameters())
    optimizers = [torch.optim.SGD(params[:2], 0.1), torch.optim.AdamW(params[2:])]
    with fsdp2.trace(tmp_path / "step.json") as trace:
        for _ in range(2):
            model(torch.ones(4, 64)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    stepped = [s.iteration for s in trace.timeline.on("compute") if s.operation == "optimizer"]
    assert stepped == [0, 0, 1, 1]
    assert [s.iteration for s in trace.timeline.on("all-gather")] == [0] * 6 + [1] * 6


def test_an_optimizer_around_another_is_one(tmp_path: Path) -> None:
    """Its states are counted once, also if they are there before the trace."""
    model, _ = build()
    optimizer = FlatOptimizer(model, torch.optim.AdamW)
    with fsdp2.trace(tmp_path / "step.json") as trace:
        step(model, optimizer)
    assert names(trace.timeline.on("compute"), "optimizer") == ["optimizer"]
    with fsdp2.trace(tmp_path / "forward.json") as later:
        model(torch.ones(4, 64))
    moments = 2 * BLOCKS * (64 * 64 + 64) * 4 // 8
    for sample in (trace.timeline.memory[-1], *later.timeline.memory):
        assert moments <= sample.bytes["optimizer"] < moments + 99  # step counts


def bytes_of_states(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(getattr(value, "_local_tensor", value).nbytes for value in values)


def test_states_from_before_the_trace_are_counted(tmp_path: Path) -> None:
    """Of optimizers that step later, or not at all; once, also where two refer to them."""
    model, optimizer = build()
    step(model, optimizer)
    model(torch.ones(4, 64)).sum().backward()
    with fsdp2.trace(tmp_path / "backward.json") as trace:
        model(torch.ones(4, 64)).sum().backward()
    there = bytes_of_states(optimizer)
    assert there > 2 * BLOCKS * (64 * 64 + 64) * 4 // 8
    assert {sample.bytes["optimizer"] for sample in trace.timeline.memory} == {there}
    with fsdp2.trace(tmp_path / "step.json") as trace:
        step(model, optimizer)
    assert {sample.bytes["optimizer"] for sample in trace.timeline.memory} == {there}


@pytest.mark.parametrize("zero", ["before", "behind"])
def test_gradients_that_were_dropped_are_not_counted(tmp_path: Path, zero: str) -> None:
    model, optimizer = build()
    step(model, optimizer)
    with fsdp2.trace(tmp_path / "step.json") as trace:
        for _ in range(2):
            if zero == "before":
                optimizer.zero_grad()
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            if zero == "behind":
                optimizer.zero_grad()
    found = trace.timeline
    backward = next(s for s in found.slices if (s.operation, s.iteration) == ("backward", 1))
    later = next(s for s in found.slices if (s.operation, s.iteration) == ("forward", 1))
    forward = [m for m in found.memory if later.start <= m.time < backward.start]
    assert {m.bytes["gradients"] for m in forward} == {0}
    left = 0 if zero == "behind" else BLOCKS * (64 * 64 + 64) * 4 // 8
    assert found.memory[-1].bytes["gradients"] == left


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside of a unit"])
def test_a_forward_that_failed_does_not_hide_what_waits_behind_it(
    tmp_path: Path, inside: bool
) -> None:
    model, optimizer = build()
    for _ in range(2):
        step(model, optimizer)
    fails: Any = model[1] if inside else Moody()
    with fsdp2.trace(tmp_path / "step.json") as trace:
        fails.fails = True
        with pytest.raises(RuntimeError, match="not today"):
            (model if inside else nn.Sequential(model[0], fails))(torch.ones(4, 64))
        fails.fails = False
        step(model, optimizer)
    assert compute_is_apart_from_waits(trace.timeline)
    assert units(trace.timeline, "reduce", "reduce-scatter") == [*"210"]
    assert problems_of(json.loads((tmp_path / "step.json").read_text())) == []


# ---- what is left behind: nothing


def _classes(model: nn.Module) -> list[type]:
    records = [record_of(module) for module in model.modules()]
    unbound: list[type] = []
    for record in records:
        if record is not None:
            unbound += [type(record.unit), *map(type, record.unit.groups)]
    return unbound


def seams(model: nn.Module) -> object:
    """Classes of what groups run on, and of their buffers; and the functions of these."""
    groups = list(unit.all_groups())
    assert groups
    found: list[object] = [*all_buffers()]
    for group in groups:
        found += [group.streams, group.kernels, group.collectives, group.reducers, group.replicas]
    return set(map(type, found)), dict(vars(GroupCollectives)), dict(vars(Kernels))


def test_a_step_behind_it_is_the_step_before_it(tmp_path: Path) -> None:
    """The same Python calls, the same classes, the same attributes."""
    model, optimizer = build()
    for _ in range(3):
        step(model, optimizer)

    def counted() -> tuple[object, object]:
        """Without the optimizer, in which torch 2.11 fills caches at odd times."""
        return called(lambda: (model(torch.ones(4, 64)).sum().backward(), model.zero_grad()))

    counted()
    before, plain = counted(), seams(model)
    with fsdp2.trace(tmp_path / "step.json"):
        step(model, optimizer)
        assert set(_classes(model)) == {Unit, Observed}
        told: Any = seams(model)
        assert all(one != other for one, other in zip(told[1:], plain[1:], strict=True))
    assert set(_classes(model)) == {Unit, ParamGroup}
    assert seams(model) == plain
    counted()
    assert counted() == before


def test_what_is_chosen_inside_stays_behind_it_and_is_plain(tmp_path: Path) -> None:
    """Process groups of gradients, and smaller groups."""
    model, optimizer = build(reshard_after_forward=4)
    sharded: Any = model
    step(model, optimizer)
    with fsdp2.trace(tmp_path / "step.json") as trace:
        sharded.set_separate_reduce_scatter_group()
        step(model, optimizer)
    assert units(trace.timeline, "all-gather", "all-gather") == [*"012", *"210"]
    assert units(trace.timeline, "reduce", "reduce-scatter") == [*"210"]
    for group in unit.all_groups():
        assert group.reducers is not group.collectives
        assert group.reducers.group is not group.collectives.group
        assert group.smaller_group is not None
        assert type(group.smaller_group.collectives) is GroupCollectives
    step(model, optimizer)


@pytest.mark.parametrize("begins", [0, 1, 2])
def test_it_may_begin_and_end_among_partial_sums(tmp_path: Path, begins: int) -> None:
    """They belong to the launches that made them; those of the next reduction are told again."""
    model, optimizer = build(mesh=null_mesh((2, 4), mesh_dim_names=("replicate", "shard")))
    sharded: Any = model

    def micro(last: bool) -> None:
        sharded.set_requires_all_reduce(last)
        model(torch.ones(4, 64)).sum().backward()

    for number in range(begins):
        micro(last=number == 2)
    with fsdp2.trace(tmp_path / "step.json") as trace:
        micro(last=begins == 2)
    for number in range(begins + 1, 3):
        micro(last=number == 2)
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer)
    assert units(trace.timeline, "all-gather", "all-gather") == [*"012", *"210"]
    with fsdp2.trace(tmp_path / "later.json") as trace:
        step(model, optimizer)
    assert units(trace.timeline, "reduce", "reduce-scatter") == [*"210"]
    assert units(trace.timeline, "all-reduce", "all-reduce") == [*"210"]


def test_an_exception_inside_is_passed_on_and_the_file_written(tmp_path: Path) -> None:
    model, optimizer = build()
    step(model, optimizer)
    head = Moody(fails=True)
    with pytest.raises(RuntimeError, match="not today"), fsdp2.trace(tmp_path / "step.json"):
        head(model(torch.ones(4, 64)))
    found = Timeline.read(tmp_path / "step.json")
    assert found.metadata["incomplete"] == "RuntimeError: not today"
    assert units(found, "all-gather", "all-gather") == [*"012"]
    assert set(_classes(model)) == {Unit, ParamGroup}
    step(model, optimizer)


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def traced_until(path: Path, raised: BaseException) -> nn.Module:
    """A trace that an exception ends, behind which the file's folder is no more there."""
    model, optimizer = build()
    path.parent.mkdir()

    def run() -> None:
        with fsdp2.trace(path):
            step(model, optimizer)
            path.parent.rmdir()
            raise raised

    with pytest.raises(type(raised)) as found:
        run()
    assert found.value is raised
    return model


@pytest.mark.parametrize("raised", [RuntimeError("theirs"), KeyboardInterrupt(), MuteError()])
@pytest.mark.parametrize("quiet", ["always", "error"])
def test_a_file_that_cannot_be_written_hides_no_exception(
    tmp_path: Path, raised: BaseException, quiet: Any
) -> None:
    """Written or not, it is the user's that goes on, also where warnings are errors."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter(quiet)
        model = traced_until(tmp_path / "there" / "step.json", raised)
    if quiet == "always":
        assert "step.json' for the steps that an exception ended" in str(told[0].message)
        assert told[0].filename == __file__
    assert set(_classes(model)) == {Unit, ParamGroup}


def test_a_file_that_can_no_more_be_written_leaves_the_timeline(tmp_path: Path) -> None:
    model, optimizer = build()
    folder = tmp_path / "there"
    folder.mkdir()
    trace = fsdp2.trace(folder / "step.json")
    with raises("trace-not-written"), trace:
        step(model, optimizer)
        folder.rmdir()
    trace.timeline.write(tmp_path / "elsewhere.json")
    assert units(trace.timeline, "all-gather", "all-gather") == [*"012", *"210"]


def test_a_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    """That it can be written is found before the steps."""
    kept = build()
    dangling = tmp_path / "link.json"
    dangling.symlink_to(tmp_path / "nowhere" / "step.json")
    for entry, path in (
        ("trace-cannot-write", tmp_path),
        ("trace-cannot-write", dangling),
        ("trace-no-folder", tmp_path / "nowhere" / "step.json"),
    ):
        with raises(entry), fsdp2.trace(path):
            pytest.fail("it began")
    old = tmp_path / "old.json"
    old.write_text("old")
    with fsdp2.trace(tmp_path / "new.json"):
        assert not (tmp_path / "new.json").exists()
    with fsdp2.trace(old):
        assert old.read_text() == "old"
        step(*kept)
    assert old.read_text() != "old"


def test_refused(tmp_path: Path) -> None:
    gc.collect()  # models of other tests
    with raises("trace-not-sharded"), fsdp2.trace(tmp_path / "step.json"):
        pass
    model, optimizer = build()
    with fsdp2.trace(tmp_path / "step.json"):
        with raises("trace-nested"), fsdp2.trace(tmp_path / "other.json"):
            pass
        step(model, optimizer)
    assert not (tmp_path / "other.json").exists()
    assert Timeline.read(tmp_path / "step.json").on("all-gather")
