"""The recorder of a real step, fed by the objects that are bound while a trace is on.

    seams ── moved, hosting ─────>  which unit computes, and for how long the host is in fsdp2
          ── copy, collective ───>  slices of lanes, each between two stamps
          ── recorded, waiting ──>  events of lanes, and waits for them
          ── hold, count ────────>  memory by category
    Tracer.timeline ──> the times of all stamps

A stamp is a moment. If lanes are streams, it is an event on the lane's stream, whose time is read
at the end. On the CPU, and for the host, it is the host's clock.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import ClassVar, TypeVar, cast

import torch
from torch.utils._pytree import tree_leaves

from fsdp2.core.facts import (
    BACKWARD,
    FORWARD,
    Event,
    Lane,
    ParamGroup,
    Phase,
    ProcessGroup,
    Unit,
    Work,
    all_buffers,
    all_groups,
    local_of,
    ranks_of,
)
from fsdp2.tracing.record.categories import category_of
from fsdp2.tracing.record.notes import HOST, Place, replaced
from fsdp2.tracing.record.replay import (
    LANE_OF,
    LANE_OF_COLLECTIVE,
    ranks_told,
    wait_behind,
)
from fsdp2.tracing.timeline import BETWEEN, Memory, Slice, Timeline, Value, Wait

Stamp = float | torch.Event

S = TypeVar("S", Slice, Wait)

Position = tuple[str, int]
"""A lane, and the index of its last slice; -1: it has none."""


class Clock:
    """Moments of lanes and of the host, in µs from its making."""

    def __init__(self, events: Callable[[Lane], torch.Event] | None) -> None:
        self._began = time.perf_counter_ns()
        self.events = events
        if events is not None:
            torch.accelerator.synchronize()
            zero = events(Lane.COMPUTE)
            torch.accelerator.synchronize()
            self._zero = self.host(), zero

    def host(self) -> float:
        """The host's moment."""
        return (time.perf_counter_ns() - self._began) / 1e3

    def stamp(self, lane: Place) -> Stamp:
        """A moment of a lane, or of the host."""
        if self.events is None or not isinstance(lane, Lane):
            return self.host()
        return self.events(lane)

    def read(self, stamp: Stamp) -> float:
        """When it was; of a lane's once all is over."""
        if isinstance(stamp, float):
            return round(stamp, 3)
        host, zero = self._zero
        return round(host + zero.elapsed_time(stamp) * 1e3, 3)


class Tracer:
    """The recording so far, and the running operations."""

    current: ClassVar[Tracer | None] = None

    def __init__(self, clock: Clock, device: str, streams: object) -> None:
        self.clock, self.streams = clock, streams
        self.unit = self.word = ""
        self.lane: Place = Lane.COMPUTE
        self.entering = False
        self.iteration = 0
        self._slices: list[Slice] = []  # their times are read at the end
        self._waits: list[Wait] = []
        self._of_slices: list[list[Stamp]] = []
        self._of_waits: list[list[Stamp]] = []
        self._last: dict[str, int] = {}  # the last slice of each lane
        self._ranks: dict[ProcessGroup, str] = {}
        self._events: dict[int, Position] = {}  # by the id of each event
        self._memory: list[tuple[Stamp, dict[str, int]]] = []
        self._held: dict[tuple[int, str], int] = {}  # bytes by owner and category
        self._totals: dict[str, int] = {}
        self._active: list[tuple[Unit, str]] = []  # units under way, the innermost last
        self._hosts = 0  # calls of fsdp2 that the host is in
        self._stepping: list[torch.optim.Optimizer] = []  # those in their step, outermost first
        self._stepped = False  # since the last forward
        self._device = device
        self._optimizers = set(_optimizers())
        self._count_states()
        self._mark: Stamp = 0.0

    def finish(self) -> None:
        """The last slice of compute ends."""
        self.close()
        self.count_all()

    def timeline(self, metadata: dict[str, Value]) -> Timeline:
        """All that was seen, once it is over."""
        if self.clock.events is not None:
            torch.accelerator.synchronize()
        memory = [Memory(self.clock.read(at), found) for at, found in self._memory]
        slices = map(self._timed, self._slices, self._of_slices)
        waits = map(self._timed, self._waits, self._of_waits)
        return Timeline([*slices], [*waits], memory, metadata).sorted()

    def _timed(self, span: S, stamps: Sequence[Stamp]) -> S:
        start, end = map(self.clock.read, stamps)
        return replace(span, start=start, end=max(start, end))

    # ---- what lanes run

    def on(self, lane: Place) -> AbstractContextManager[None]:
        """Calls in this context run on ``lane``."""
        return replaced(self, lane=lane)

    def ran(
        self,
        lane: Place,
        name: str,
        start: Stamp,
        end: Stamp,
        moved: Sequence[torch.Tensor] = (),
        group: ProcessGroup | None = None,
        unit: str | None = None,
    ) -> None:
        """An operation ran on a lane, which moved tensors."""
        nbytes = sum(tensor.nbytes for tensor in moved)
        dtype = str(moved[0].dtype).removeprefix("torch.") if nbytes else ""
        if group is not None and group not in self._ranks:
            self._ranks[group] = ranks_told(ranks_of(group))
        ranks = "" if group is None else self._ranks[group]
        unit = self.unit if unit is None else unit
        about = (unit, nbytes, dtype, ranks, self.iteration)
        self._last[LANE_OF[lane]] = len(self._slices)
        self._slices.append(Slice(LANE_OF[lane], name, 0.0, 0.0, *about))
        self._of_slices.append([start, end])

    def position(self, lane: Place) -> Position:
        """How far a lane is."""
        return LANE_OF[lane], self._last.get(LANE_OF[lane], -1)

    def _waited(self, lane: Place, on: Position, label: str, start: Stamp, end: Stamp) -> None:
        wait = Wait(LANE_OF[lane], on[0], label, 0.0, 0.0, iteration=self.iteration)
        self._waits.append(wait if on[1] < 0 else wait_behind(wait, self._slices[on[1]], on[1]))
        self._of_waits.append([start, end])

    def copy(self, name: str, written: Sequence[torch.Tensor], run: Callable[[], object]) -> object:
        """Run what copies: one slice of the lane that is current. Copies inside are part of it."""
        word, self.word = self.word, ""
        start = self.clock.stamp(self.lane)
        if word == "copy-out":  # beside what is copied from
            self.sample(start)
        try:
            found = run()
        finally:
            self.word = word
        self.ran(self.lane, name or word, start, self.clock.stamp(self.lane), written)
        return found

    def collective(
        self,
        name: str,
        moved: Sequence[torch.Tensor],
        group: ProcessGroup,
        launch: Callable[[], Work | None],
        behind: bool = False,
    ) -> Work | None:
        """Run a collective: over when its lane comes to its end, or when somebody has waited.

        ``behind``: on a stream of the backend's; it runs from here until compute has waited.
        """
        lane = LANE_OF_COLLECTIVE[name]
        clocked = Lane.COMPUTE if behind else lane
        start = self.clock.stamp(clocked)
        work = launch()
        self.ran(lane, name, start, self.clock.stamp(clocked), moved, group)
        times = self._of_slices[-1]
        at_once = not behind and lane is not Lane.ALL_GATHER
        return None if work is None else Awaited(self, work, lane, name, times, at_once)

    def of_graph(self, unit: str) -> AbstractContextManager[None]:
        """A graph launches a collective of a unit inside. Its units have no phases."""
        if self._stepped:
            self.iteration += 1
            self._stepped = False
        return replaced(self, unit=unit)

    @contextlib.contextmanager
    def hosting(self, operation: str, unit: str, word: str, lane: Lane) -> Iterator[None]:
        """The host's work inside is one slice of its lane, and does not count as compute."""
        outer = self.unit, self.word, self.lane
        self.unit, self.word = unit, word
        if self.clock.events is None:
            self.lane = lane
        start = self.clock.stamp(HOST)
        if not self.entering:  # on the way into a unit compute was not in the user's code
            self.close()
        self._hosts += 1
        try:
            yield
        finally:
            self._hosts -= 1
            self.ran(HOST, operation, start, self.clock.stamp(HOST))
            self.unit, self.word, self.lane = outer
            self._mark = self.clock.stamp(Lane.COMPUTE)
            self.sample(self._mark)

    # ---- compute

    def close(self, operation: str | None = None) -> None:
        """End the slice of compute that runs, and begin another."""
        now = self.clock.stamp(Lane.COMPUTE)
        unit, name = "", operation or BETWEEN
        if self._active and operation is None:
            innermost, name = self._active[-1]
            unit = innermost.title
        self.ran(Lane.COMPUTE, name, self._mark, now, unit=unit)
        self._mark = now

    def moved(self, unit: Unit, phase: Phase) -> None:
        """A unit's phase changes: fsdp2 was called."""
        self.close()
        self._active = [each for each in self._active if each[0] is not unit]
        self.entering = phase in (FORWARD, BACKWARD)
        if not self.entering:
            self.sample(self._mark)
            return
        if not self._active:  # gradients may have been dropped since
            self.count_all()
            self._stepping.clear()
            if self._stepped and phase is FORWARD:
                self.iteration += 1
                self._stepped = False
        self._active.append((unit, "forward" if phase is FORWARD else "backward"))
        for group in unit.own_groups:
            self.count(group)
        self.sample(self._mark)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """An optimizer's step begins."""
        if not self._stepping:
            self.close()
        self._stepping.append(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """An optimizer's step is over."""
        if optimizer in self._stepping[1:]:  # inside of the step of one that has its states, too
            self._stepping.remove(optimizer)
            return
        self._stepping.clear()
        self._stepped = True
        self.close("optimizer")
        self._optimizers.add(optimizer)
        self._count_states()
        self.sample(self._mark)

    # ---- waits

    def recorded(self, event: Event, lane: Lane) -> None:
        """An event stands for what the lane has run by now."""
        self._events[id(event)] = self.position(lane)

    @contextlib.contextmanager
    def waiting(self, lane: Place, event: Event, label: str) -> Iterator[None]:
        """A lane, or the host, waits inside for an event; one of before the trace is not known."""
        if lane is Lane.COMPUTE and not self.entering:
            self.close()
        start = self.clock.stamp(lane)
        yield
        position = self._events.get(id(event))
        if position is not None:
            end = self.clock.stamp(lane)
            self._waited(lane, position, label, start, end)
            if lane is Lane.COMPUTE:
                self._mark = end

    def awaited(
        self, on: Position, label: str, wait: Callable[[], object], since: Stamp | None
    ) -> Stamp:
        """The host waits for a collective, and compute is idle; returns when it continued."""
        if not self._hosts:  # else compute's slice has ended
            self.close()
        start = self.clock.stamp(Lane.COMPUTE) if since is None else since
        wait()
        end = self.clock.stamp(Lane.COMPUTE)
        self._waited(Lane.COMPUTE, on, label, start, end)
        if not self._hosts:
            self._mark = end
        return end

    # ---- memory

    def hold(self, owner: object, category: str, nbytes: int) -> None:
        """``owner`` has so many bytes of a category now."""
        key = (id(owner), category)
        change = nbytes - self._held.get(key, 0)
        if change:
            self._held[key] = nbytes
            self._totals[category] = self._totals.get(category, 0) + change

    def count(self, group: ParamGroup, full_gradients: int = 0) -> None:
        """Count a group's memory besides its buffers."""
        held = self._bytes_of(param.sharded.grad for param in group.params)
        shards = 0 if group.offload is not None else group.shard.nbytes
        self.hold(group, "shards", shards)
        self.hold(group, "gradients", held + full_gradients)

    def _count_states(self) -> None:
        """Count the states of all optimizers; memory that several refer to is there once."""
        # A copy of states that an optimizer makes lives as long as this refers to it.
        found = tree_leaves([list(each.state.values()) for each in self._optimizers])
        tensors = [local_of(each) for each in found if isinstance(each, torch.Tensor)]
        storages = [t.untyped_storage() for t in tensors if t.device.type == self._device]
        sizes = {storage._cdata: int(storage.nbytes()) for storage in storages}
        self.hold(self, "optimizer", sum(sizes.values()))

    def count_all(self) -> None:
        """Count the memory of all groups now; the time for this does not count as compute."""
        for group in all_groups():
            self.count(group)
        self._mark = self.clock.stamp(Lane.COMPUTE)
        self.sample(self._mark)

    def _bytes_of(self, values: Iterable[object]) -> int:
        """Bytes of those that are tensors on the device; others may be offloaded."""
        tensors = [local_of(value) for value in values if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors if tensor.device.type == self._device)

    def sample(self, at: Stamp) -> None:
        """The memory at a moment."""
        found = dict(self._totals)
        for buffer in all_buffers():
            if buffer.allocated:
                category = category_of(buffer.name)
                found[category] = found.get(category, 0) + buffer.nbytes
        if self.clock.events is not None:
            with contextlib.suppress(RuntimeError, AttributeError):  # a device may not count
                known = sum(found.values())
                found["activations"] = max(torch.accelerator.memory_allocated() - known, 0)
        if not self._memory or self._memory[-1][1] != found:
            self._memory.append((at, found))


def _optimizers() -> Iterator[torch.optim.Optimizer]:
    """Those of managed parameters, of which torch has no list: one may have states from before."""
    managed = {id(param.sharded) for group in all_groups() for param in group.params}
    for each in gc.get_objects():
        # The class is asked, as a proxy's own `__class__` may load what it stands for.
        if issubclass(type(each), torch.optim.Optimizer):
            groups = vars(each).get("param_groups", ())  # one that is half made has none
            if any(id(param) in managed for group in groups for param in group["params"]):
                yield each


class Awaited:
    """A collective for whose end the host waits, as on the CPU; its slice has these ``times``.

    For a reduction of hooks it waits ``at_once``, and the launch is part of that: a backend may
    block in either.
    """

    def __init__(
        self,
        tracer: Tracer,
        work: Work,
        lane: Lane,
        name: str,
        times: list[Stamp],
        at_once: bool,
    ) -> None:
        self._tracer, self._work, self._lane, self._times = tracer, work, lane, times
        self._at_once = at_once
        self._label = f"the host waits for the {name}"
        self._position = tracer.position(lane)
        self._over: float | None = None
        future = getattr(work, "get_future", None)
        if future is not None and tracer.clock.events is None:
            with contextlib.suppress(RuntimeError):  # a backend may have none
                future().add_done_callback(self._done)

    def _done(self, _: object) -> None:
        self._over = self._tracer.clock.host()

    def wait(self) -> None:
        """Wait; compute stands still meanwhile, and what follows at once is on its lane."""
        if self._tracer is not Tracer.current:
            self._work.wait()
            return
        since = self._times[0] if self._at_once else None
        end = self._tracer.awaited(self._position, self._label, self._work.wait, since)
        self._times[1] = end if self._over is None else min(self._over, cast(float, end))
        if self._at_once:
            self._tracer.lane = self._lane
