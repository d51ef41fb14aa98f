"""Records a timeline of real steps: what is bound while a trace is on, and unbound behind it.

    unit.phase = FORWARD       `TracedUnit`     compute: a slice from one change to the next
    group.start_unshard, …     `TracedGroup`    host: what it launched, and for how long it was held
      launch of a gather         its collectives and copies, each between two stamps
      launch of a reduction      the same
    streams.record, wait, on   `TracedStreams`  waits of lanes for events of other lanes
    optimizer.step             torch's hooks    compute: "optimizer"

All of it is by classes that groups, units and streams have meanwhile, and by attributes that are
put back when the call returns: a step without a trace asks nothing and calls nothing.

A stamp is a moment. Where lanes are streams it is an event on the lane's stream, which tells its
own time when all is over. On the CPU, and for what the host does, it is the host's clock.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2.core.device.collectives import Work
from fsdp2.core.device.process_groups import ranks_of
from fsdp2.core.device.streams import DeviceStreams, Event, Lane, Streams
from fsdp2.core.gather.launch import Launched
from fsdp2.core.gather.transport import Copying, Route
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import PendingReduction, Reduction
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.layers import Layer
from fsdp2.core.schedule.states import RESHARDED
from fsdp2.core.schedule.unit import (
    BACKWARD,
    FORWARD,
    Phase,
    Unit,
    all_groups,
    all_units,
    put_around,
)
from fsdp2.tracing.states import OptimizerStates
from fsdp2.tracing.timeline import (
    ALL_GATHER,
    ALL_REDUCE,
    BETWEEN,
    COMPUTE,
    COPY_IN,
    HOST,
    REDUCE,
    Memory,
    Slice,
    Timeline,
    Wait,
)

Stamp = float | torch.Event

LANE_OF = {
    Lane.COMPUTE: COMPUTE,
    Lane.COPY_IN: COPY_IN,
    Lane.ALL_GATHER: ALL_GATHER,
    Lane.REDUCE: REDUCE,
    Lane.ALL_REDUCE: ALL_REDUCE,
}

_COPIES = ("copy_many", "copy_strided", "copy", "split_copy", "chunk_cat", "to_host", "divide")
_WORDS = {"chunk_cat": "stage", "copy_strided": "stage", "to_host": "to-host", "divide": "divide"}


@dataclass
class _Raw:
    """A slice whose times are stamps; a wait where ``on`` says for whom."""

    lane: str
    operation: str
    unit: str
    start: Stamp
    end: Stamp
    iteration: int
    bytes: int = 0
    dtype: str = ""
    group: str = ""
    on: str | None = None
    label: str = ""
    behind: _Raw | None = None


class Recorder:
    """What was seen so far, and what runs now.

    Attributes:
        current: the recorder that is on in this process, if one is.
        lane: where what is called now runs.
        unit: the unit that it is for.
        iteration: number of the step, from 0; the next begins with the first forward behind an
            optimizer's step.
    """

    current: Recorder | None = None

    def __init__(self) -> None:
        self.lane = Lane.COMPUTE
        self.unit = ""
        self.iteration = 0
        self._slices: list[_Raw] = []
        self._waits: list[_Raw] = []
        self._memory: list[tuple[Stamp, dict[str, int]]] = []
        self._held: dict[tuple[object, str], int] = {}  # bytes by owner and category
        self._totals: dict[str, int] = {}
        self._last: dict[str, _Raw] = {}  # what a lane runs last
        self._recorded: dict[int, tuple[str, _Raw | None]] = {}  # by id of an event
        self._active: list[tuple[Unit, str]] = []  # units under way, the innermost last
        self._entering = False  # fsdp2 is on its way into a unit; the user's compute is to come
        self._streams: TracedStreams | None = None
        self._began = time.perf_counter_ns()
        self._hosts = 0  # calls of fsdp2 that the host is in
        self._stepping: list[torch.optim.Optimizer] = []  # those in their step, outermost first
        self._stepped = False  # since the last forward
        self._device = "cpu"
        self._states: OptimizerStates | None = None  # once it has begun
        self._mark: Stamp = 0.0
        self._zero: tuple[float, torch.Event] | None = None
        self._exits = contextlib.ExitStack()

    # ---- on and off

    def begin(self) -> None:
        """Bind to every unit and group that there is."""
        Recorder.current = self
        with contextlib.ExitStack() as exits:
            exits.callback(self._unbind)
            for group in all_groups():
                streams: Streams = group.streams
                if self._streams is None and type(streams) is DeviceStreams:
                    self._follow(streams)
            put_around(all_units(), TracedGroup, True)
            for unit in all_units():
                if type(unit) is Unit:
                    unit.__class__ = TracedUnit
            exits.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            exits.callback(register_optimizer_step_post_hook(self._after_step).remove)
            self._exits = exits.pop_all()
        self._device = next((group.device.type for group in all_groups()), "cpu")
        self._states = OptimizerStates(all_groups(), self._device)
        self.hold(self._states, "optimizer", self._states.nbytes)
        self._count_all()

    def _follow(self, streams: DeviceStreams) -> None:
        streams.__class__ = TracedStreams
        self._streams = cast(TracedStreams, streams)
        torch.accelerator.synchronize()
        zero = self._streams.stamp(Lane.COMPUTE)
        torch.accelerator.synchronize()
        self._zero = self._host(), zero

    def _unbind(self) -> None:
        Recorder.current = None
        put_around(all_units(), TracedGroup, False)
        for unit in all_units():
            if type(unit) is TracedUnit:
                cast(Unit, unit).__class__ = Unit
        if self._streams is not None:
            streams: DeviceStreams = self._streams
            streams.__class__ = DeviceStreams

    def end(self) -> Timeline:
        """Unbind, wait for what runs, and return all that was seen."""
        try:
            self.close()
            self._count_all()
        finally:
            self._exits.close()
        if self._streams is not None:
            torch.accelerator.synchronize()
        places = {id(raw): index for index, raw in enumerate(self._slices)}
        slices = [self._slice(raw) for raw in self._slices]
        waits = [self._wait(raw, places) for raw in self._waits]
        memory = [Memory(self._time(at), found) for at, found in self._memory]
        return Timeline(slices, waits, memory).sorted()

    # ---- time

    def _host(self) -> float:
        """The host's clock, in µs from the begin."""
        return (time.perf_counter_ns() - self._began) / 1e3

    def stamp(self, lane: Lane | None) -> Stamp:
        """A moment of a lane, or of the host."""
        if lane is None or self._streams is None:
            return self._host()
        return self._streams.stamp(lane)

    def _time(self, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return round(stamp, 3)
        assert self._zero is not None
        host, zero = self._zero
        return round(host + zero.elapsed_time(stamp) * 1e3, 3)

    def _slice(self, raw: _Raw) -> Slice:
        start = self._time(raw.start)
        end = max(start, self._time(raw.end))
        about = (raw.unit, raw.bytes, raw.dtype, raw.group, raw.iteration)
        return Slice(raw.lane, raw.operation, start, end, *about)

    def _wait(self, raw: _Raw, places: dict[int, int]) -> Wait:
        start = self._time(raw.start)
        behind = -1 if raw.behind is None else places[id(raw.behind)]
        about = (raw.unit, raw.operation, behind, raw.iteration)
        assert raw.on is not None
        return Wait(raw.lane, raw.on, raw.label, start, max(start, self._time(raw.end)), *about)

    @property
    def is_hosts(self) -> bool:
        """Whether all times are the host's."""
        return self._streams is None

    # ---- what runs

    def add(
        self,
        lane: str,
        operation: str,
        start: Stamp,
        end: Stamp,
        unit: str | None = None,
        **about: Any,
    ) -> _Raw:
        """A slice."""
        unit = self.unit if unit is None else unit
        raw = _Raw(lane, operation, unit, start, end, self.iteration, **about)
        self._slices.append(raw)
        self._last[lane] = raw
        return raw

    def stood(
        self, lane: str, on: str, label: str, start: Stamp, end: Stamp, by: _Raw | None
    ) -> None:
        """A wait of ``lane`` for what ``on`` ran: ``by``."""
        unit, operation = ("", "") if by is None else (by.unit, by.operation)
        raw = _Raw(lane, operation, unit, start, end, self.iteration, on=on, label=label, behind=by)
        self._waits.append(raw)

    @contextlib.contextmanager
    def running(self, operation: str, moved: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """What is called inside is one slice of the lane that is current."""
        tensors = list(moved)
        start = self.stamp(self.lane)
        yield
        nbytes = sum(tensor.nbytes for tensor in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        end = self.stamp(self.lane)
        self.add(LANE_OF[self.lane], operation, start, end, bytes=nbytes, dtype=dtype)

    def collective(
        self, operation: str, lane: Lane, launch: Callable[[], Work | None], **about: Any
    ) -> _Awaited | None:
        """Run a collective: over when its lane comes to its end, or when the host has waited."""
        start = self.stamp(lane)
        work = launch()
        raw = self.add(LANE_OF[lane], operation, start, self.stamp(lane), **about)
        return None if work is None else _Awaited(self, work, raw)

    @contextlib.contextmanager
    def hosting(self, operation: str) -> Iterator[None]:
        """What the host does inside is one slice of its lane, and none of compute's."""
        start = self.stamp(None)
        self.away()
        self._hosts += 1
        try:
            yield
        finally:
            self._hosts -= 1
            self.add(HOST, operation, start, self.stamp(None))
            self.back()

    def awaited(self, work: Work, raw: _Raw, at_once: bool) -> tuple[object, float]:
        """Wait for a collective, and tell when the host went on; compute stands still meanwhile.

        Where the host waits ``at_once`` the launch is part of that: a backend may block in either.
        """
        if not self._hosts:  # else compute's slice has ended
            self.close()
        start = raw.start if at_once else self.stamp(None)
        result = work.wait()
        end = self._host()
        self.stood(COMPUTE, raw.lane, f"the host waits for the {raw.operation}", start, end, raw)
        if not self._hosts:
            self._mark = end
        return result, end

    # ---- compute

    def away(self) -> None:
        """The compute lane leaves the user's code; on the way into a unit it was not there."""
        if not self._entering:
            self.close()

    def back(self) -> None:
        """It is in the user's code again."""
        self._mark = self.stamp(Lane.COMPUTE)
        self._sample(self._mark)

    def close(self, operation: str | None = None) -> None:
        """End the slice of compute that runs, and begin another."""
        now = self.stamp(Lane.COMPUTE)
        unit, name = "", operation or BETWEEN
        if self._active and operation is None:
            innermost, name = self._active[-1]
            unit = innermost.title
        self.add(COMPUTE, name, self._mark, now, unit)
        self._mark = now

    def moved(self, unit: Unit, phase: Phase) -> None:
        """A unit's phase changes: fsdp2 was called."""
        self.close()
        self._active = [each for each in self._active if each[0] is not unit]
        self._entering = phase in (FORWARD, BACKWARD)
        if not self._entering:
            self._sample(self._mark)
            return
        if not self._active:  # gradients may have been dropped since
            self._count_all()
            self._stepping.clear()
            if self._stepped and phase is FORWARD:
                self.iteration += 1
                self._stepped = False
        self._active.append((unit, "forward" if phase is FORWARD else "backward"))
        for group in unit.own_groups:
            self.count(group)
        self._sample(self._mark)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._stepping:
            self.close()
        self._stepping.append(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer in self._stepping[1:]:  # inside of the step of one that has its states, too
            self._stepping.remove(optimizer)
            return
        self._stepping.clear()
        self._stepped = True
        self.close("optimizer")
        assert self._states is not None
        self._states.add(optimizer)
        self.hold(self._states, "optimizer", self._states.nbytes)
        self._sample(self._mark)

    # ---- events

    def recorded(self, event: Event, lane: Lane) -> None:
        """An event stands for what the lane has run by now."""
        self._recorded[id(event)] = LANE_OF[lane], self._last.get(LANE_OF[lane])

    def waited(self, lane: Lane | None, event: Event, label: str, start: Stamp) -> None:
        """A lane, or the host, has come to a wait for an event, and gone on."""
        found = self._recorded.get(id(event))
        if found is None:
            return  # recorded before the trace
        on, behind = found
        end = self.stamp(lane)
        self.stood(HOST if lane is None else LANE_OF[lane], on, label, start, end, behind)
        if lane is Lane.COMPUTE:
            self._mark = end

    # ---- memory

    def hold(self, owner: object, category: str, nbytes: int) -> None:
        """``owner`` has so many bytes of a category now."""
        key = (id(owner), category)
        change = nbytes - self._held.get(key, 0)
        if change:
            self._held[key] = nbytes
            self._totals[category] = self._totals.get(category, 0) + change

    def count(self, group: ParamGroup, full_gradients: int = 0) -> None:
        """What a group has allocated now.

        Args:
            group: the group.
            full_gradients: bytes of autograd's gradients that it reduces.
        """
        gathered = inputs = 0
        if (bound := group.bound) is not None:
            rows = None if bound.smaller is None else bound.smaller._rows
            buffers = [bound.full, bound.mirror, rows]
            gathered = sum(b.nbytes for b in buffers if b is not None and b.allocated)
            gathered += sum(map(_received, bound.transports))
            staging = [r.transport.staging for r in bound.reductions]
            inputs = sum(b.nbytes for b in staging if b is not None and b.allocated)
        held = self._bytes_of(param.sharded.grad for param in group.params)
        shards = 0 if group.offload is not None else group.shard.nbytes
        self.hold(group, "shards", shards)
        self.hold(group, "gathered", gathered)
        self.hold(group, "reduction buffers", inputs)
        self.hold(group, "gradients", held + full_gradients)

    def _count_all(self) -> None:
        """What all groups have allocated now; that it takes time is none of compute's."""
        for group in all_groups():
            self.count(group)
        self._mark = self.stamp(Lane.COMPUTE)
        self._sample(self._mark)

    def _bytes_of(self, values: Iterable[object]) -> int:
        """Bytes of those that are tensors on the device; others may be offloaded."""
        tensors = [local_of(value) for value in values if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors if tensor.device.type == self._device)

    def _sample(self, at: Stamp) -> None:
        found = dict(self._totals)
        if self._streams is not None:
            with contextlib.suppress(RuntimeError, AttributeError):  # a device may not count
                known = sum(found.values())
                found["activations"] = max(torch.accelerator.memory_allocated() - known, 0)
        if not self._memory or self._memory[-1][1] != found:
            self._memory.append((at, found))


class _Awaited:
    """A collective for whose end the host waits, as on the CPU."""

    def __init__(self, recorder: Recorder, work: Work, raw: _Raw) -> None:
        self._recorder = recorder
        self._work = work
        self._raw = raw
        self._over: float | None = None
        future = getattr(work, "get_future", None)
        if future is not None:
            with contextlib.suppress(RuntimeError):  # a backend may have none
                future().add_done_callback(self._done)

    def _done(self, _: object) -> None:
        self._over = self._recorder.stamp(None)  # type: ignore[assignment]  # the host's is a float

    def wait(self, at_once: bool = False) -> object:
        """Wait; compute stands still meanwhile."""
        if self._recorder is not Recorder.current:
            return self._work.wait()
        result, end = self._recorder.awaited(self._work, self._raw, at_once)
        self._raw.end = end if self._over is None else min(self._over, end)
        return result


def recorder() -> Recorder:
    """The one that is on."""
    found = Recorder.current
    assert found is not None
    return found


# ---- what is bound


_stored = Unit.__dict__["phase"]  # its slot


class TracedUnit(Unit):
    """A unit that tells when it is entered and left."""

    __slots__ = ()

    @property
    def phase(self) -> Phase:
        """Where it is in the iteration."""
        found: Phase = _stored.__get__(self)
        return found

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if phase is not self.phase:
            recorder().moved(self, phase)
        _stored.__set__(self, phase)


class TracedStreams(DeviceStreams):
    """Streams that tell what was recorded, and who has waited for it."""

    def stamp(self, lane: Lane) -> torch.Event:
        """An event on a lane's stream that knows its time."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(self._stream(lane))
        return event

    def record(self, lane: Lane, label: str, event: Event = None) -> torch.Event:
        """As it is, and told."""
        found = super().record(lane, label, event)
        recorder().recorded(found, lane)
        return found

    def wait(self, lane: Lane, event: Event, label: str) -> None:
        """As it is, between two stamps."""
        here = recorder()
        if lane is Lane.COMPUTE:
            here.away()
        start = self.stamp(lane)
        super().wait(lane, event, label)
        here.waited(lane, event, label, start)

    def synchronize(self, event: Event, label: str) -> None:
        """As it is, between two stamps of the host."""
        here = recorder()
        start = here.stamp(None)
        super().synchronize(event, label)
        here.waited(None, event, label, start)

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """As it is; what is called inside runs on that lane."""
        return self._told(lane)

    @contextlib.contextmanager
    def _told(self, lane: Lane) -> Iterator[None]:
        here = recorder()
        outer, here.lane = here.lane, lane
        try:
            with super().on(lane):
                yield
        finally:
            here.lane = outer


class TracedGroup(Layer):
    """A layer that tells what a group launches."""

    __slots__ = ()

    height = 4  # around all others: a trace shows what they cost

    def start_unshard(self) -> None:
        """Launch the all-gather, each part between two stamps."""
        here, group = recorder(), self.base
        launch, outer = group._launch_gather, here.unit
        ranks = _ranks(group, group.state is RESHARDED)
        group._launch_gather = functools.partial(_launch_gather, launch, ranks)
        here.unit = group.name
        try:
            with here.hosting("launch all-gather"):
                self.below.start_unshard()
                here.count(group)
        finally:
            group._launch_gather, here.unit = launch, outer

    def finish_unshard(self) -> None:
        """Wait for the all-gather, and copy."""
        here, group = recorder(), self.base
        route, outer = group._taken, here.unit
        if route is not None and route.finishing:
            told = group._taken = copy.copy(route)
            told.finishing = [cast(Any, _CopyOut(group, route))]
        here.unit = group.name
        try:
            with here.hosting("finish all-gather"):
                self.below.finish_unshard()
                here.count(group)
        finally:
            group._taken, here.unit = route, outer

    def shard_smaller(self) -> None:
        """Free all but a smaller group's rows."""
        self.below.shard_smaller()
        recorder().count(self.base)

    def reshard(self) -> None:
        """Free it."""
        self.below.reshard()
        recorder().count(self.base)

    def abandon(self) -> None:
        """Free it."""
        self.below.abandon()
        recorder().count(self.base)

    def reduce(
        self, jobs: list[tuple[Reduction, Job]], all_reduce: bool
    ) -> PendingReduction | None:
        """Reduce, each part between two stamps."""
        here, group = recorder(), self.base
        outer, here.unit = here.unit, group.name
        here._entering = False
        full = sum(grad.nbytes for _, job in jobs for grad in job.grads)
        try:
            with here.hosting("launch reduction"), contextlib.ExitStack() as exits:
                for reduction, _ in jobs:
                    exits.enter_context(_traced(reduction))
                here.count(group, full)
                here._sample(here.stamp(Lane.COMPUTE))
                pending = self.below.reduce(jobs, all_reduce)
                here.count(group)
        finally:
            here.unit = outer
        return pending


def _received(transport: object) -> int:
    """Bytes that a transport has allocated for what travels packed."""
    packed = getattr(transport, "_packed", None)
    if isinstance(packed, torch.Tensor):
        return packed.nbytes
    return packed.nbytes if packed is not None and packed.allocated else 0


def _ranks(group: ParamGroup, smaller: bool) -> str:
    chosen = group.smaller_group.collectives if smaller and group.smaller_group else None
    shared = (chosen or group.collectives).group
    return "" if shared is None else _written(ranks_of(shared))


def _written(ranks: Sequence[int]) -> str:
    """Ranks as people write them: "ranks 0-7", or "ranks 0, 8, 16"."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


# ---- gathers


class _CopyOut:
    """What copies behind a gather, as one slice."""

    def __init__(self, group: ParamGroup, route: Route) -> None:
        self._group = group
        self._route = route

    def copy_out(self) -> None:
        """As it is, between two stamps, while what is copied from is there beside the rest."""
        here = recorder()
        start = here.stamp(Lane.COMPUTE)
        here.count(self._group)
        here._sample(start)
        for transport in self._route.finishing:
            transport.copy_out()
            transport.release()
        if self._group.layout is not None:
            end, nbytes = here.stamp(Lane.COMPUTE), self._group.layout.copied_bytes
            here.add(COMPUTE, "copy-out", start, end, bytes=nbytes)

    def release(self) -> None:
        """Each is released behind its copy."""


class _Copy:
    """What copies in front of a gather, as a slice."""

    def __init__(self, transport: Copying, operation: str) -> None:
        self._transport = transport
        self._operation = operation

    def acquire(self) -> None:
        """As it is."""
        self._transport.acquire()

    def copy_in(self) -> None:
        """As it is, between two stamps."""
        here = recorder()
        outer = here.lane
        here.lane = Lane.COPY_IN
        try:
            with here.running(self._operation):
                self._transport.copy_in()
        finally:
            here.lane = outer


def _launch_gather(
    launch: Callable[..., Launched],
    ranks: str,
    streams: Streams,
    route: Route,
    name: str,
    works: list[Work],
    **given: Any,
) -> Launched:
    """Launch ``route`` with collectives and copies that tell when they run."""
    told = copy.copy(route)
    told.copying = [_Copy(each, "copy-in") for each in route.copying]
    if route.loads:  # it goes first
        told.copying[0] = _Copy(route.copying[0], "load from host")
    launched = [t for t in route.gathering if not t.carried]
    told.gathers = []
    for transport, gather in zip(launched, route.gathers, strict=True):
        about = {"group": ranks, **_gathered(transport, route)}
        run = functools.partial(
            recorder().collective, "all-gather", Lane.ALL_GATHER, gather, **about
        )
        told.gathers.append(run)
    return launch(streams, told, name, works, **given)


def _gathered(transport: Any, route: Route) -> dict[str, Any]:
    """Bytes and dtype of what a launch gathers, with what it carries."""
    segment = getattr(transport, "segment", None)
    if segment is None:
        return {}  # an extension, which alone knows
    dtype = segment.full_dtype
    others = [t.segment for t in route.gathering if t.carried and hasattr(t, "segment")]
    together = [segment, *(s for s in others if s.full_dtype == dtype)]
    numel = sum(s.shard_numel for s in together) * transport.collectives.size
    return {"bytes": numel * dtype.itemsize, "dtype": str(dtype).removeprefix("torch.")}


# ---- reductions


class _Kernels:
    """A device's kernels, whose copies are slices of the lane that is current."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernels, name)
        if name not in _COPIES:
            return found

        def run(*args: Any, **given: Any) -> object:
            target = given.get("out", args[0])
            written = list(target) if isinstance(target, list | tuple) else [target]
            written = [tensor for tensor in written if isinstance(tensor, torch.Tensor)]
            with recorder().running(_WORDS.get(name, "copy"), written):
                return found(*args, **given)

        return run


class _Replicas:
    """A replicate axis whose all-reduces are slices."""

    def __init__(self, replicas: Any, asynchronous: bool) -> None:
        self._replicas = replicas
        self._asynchronous = asynchronous
        self.size, self.group = replicas.size, replicas.group

    def all_reduce(self, tensor: torch.Tensor, kind: Any) -> Work | None:
        """As it is, between two stamps."""
        here = recorder()
        launch = functools.partial(self._replicas.all_reduce, tensor, kind)
        about = _about([tensor], self.group)
        work = here.collective("all-reduce", Lane.ALL_REDUCE, launch, **about)
        if work is None or self._asynchronous:
            return work
        work.wait(at_once=True)
        here.lane = Lane.ALL_REDUCE  # what follows belongs there
        return None


@contextlib.contextmanager
def _traced(reduction: Reduction) -> Iterator[None]:
    """Let a reduction's collectives and copies be slices, until the call is over."""
    here = recorder()
    asynchronous = here._streams is not None
    lane, group = here.lane, reduction.transport.collectives.group

    def traced(launch: Callable[..., Work | None]) -> Callable[..., Work | None]:
        def run(output: Any, input_: Any) -> Work | None:
            tensors = list(input_) if isinstance(input_, list | tuple) else [input_]
            about = _about(tensors, group)
            bound = functools.partial(launch, output, input_)
            work = here.collective("reduce-scatter", Lane.REDUCE, bound, **about)
            if work is not None and not asynchronous:
                work.wait(at_once=True)
                here.lane = Lane.REDUCE
                return None
            return work

        return run

    before: list[tuple[Any, str, Any]] = []
    for part in _parts(reduction):
        for name, wrap in (
            ("kernels", _Kernels),
            ("scatter", traced),
            ("replicas", functools.partial(_Replicas, asynchronous=asynchronous)),
        ):
            found = getattr(part, name, None)
            if found is not None:
                before.append((part, name, found))
                setattr(part, name, wrap(found))
    try:
        yield
    finally:
        for part, name, found in before:
            setattr(part, name, found)
        here.lane = lane


def _parts(reduction: Reduction) -> list[object]:
    """What the steps of a reduction are methods of."""
    programs = [p for each in (reduction.full, reduction.partial) for p in (each, each.seeking)]
    steps: list[object] = [step for p in programs if p is not None for step in p.inline]
    if reduction.kept is not None:
        steps.append(reduction.kept.otherwise)
    parts = [getattr(step, "__self__", None) for step in steps]
    return list({id(part): part for part in parts if part is not None}.values())


def _about(tensors: Sequence[torch.Tensor], group: Any) -> dict[str, Any]:
    return {
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "dtype": str(tensors[0].dtype).removeprefix("torch."),
        "group": "" if group is None else _written(ranks_of(group)),
    }
