"""The reporters to a tracer: objects on which groups run, and watchers of units.

    group.runtime  `TracedStreams`      events, waits of lanes for them, and which lane is current
                   `Reporting` kernels  copies, and buffers whose memory is counted
                   and collectives      of shard and replicate axes
    unit.groups    `TRACER`             for which unit fsdp2 works, and for how long the host does
    unit.phase     a watcher            whose forward or backward computes
    optimizers     torch's hooks        their steps

Each of the first three wraps the plain object, performs its operation, and reports it. Groups run
on them while a trace is on, and on the plain ones again afterwards (`ParamGroup.run_on`). A step
without a trace makes no check and no call. Objects that were bound during a trace, such as the
copies of a running all-gather, may outlive it, and then report nothing.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2.core.device.buffers import TransientBuffer
from fsdp2.core.device.collectives import (
    Collectives,
    GroupCollectives,
    Launch,
)
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.device.rehearsal import META
from fsdp2.core.device.streams import DeviceStreams, Event, Lane, Streams
from fsdp2.core.modules.registry import UnitRecord, record_of_unit
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import Reduction
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import Observer
from fsdp2.core.schedule.unit import Phase, Unit, all_units, put_around, watching
from fsdp2.record.notes import HOST, Place
from fsdp2.tracing.recording import Clock, Tracer
from fsdp2.tracing.timeline import COLLECTIVES

Tensor = torch.Tensor

GATHER, SCATTER, SUM, EXCHANGE = COLLECTIVES


def tracer() -> Tracer:
    """The one that is on."""
    found = Tracer.current
    assert found is not None
    return found


# ---- streams


class TracedStreams:
    """Streams that tell what was recorded, and who has waited for it.

    Args:
        plain: those that do it.
        device: theirs.
    """

    def __init__(self, plain: Streams, device: torch.device) -> None:
        self.plain = plain
        self.asynchronous, self.captures = plain.asynchronous, plain.captures
        self.make_event = plain.make_event
        self._device = device

    def stamp(self, lane: Lane) -> torch.Event:
        """An event on a lane's stream that knows its time."""
        event = torch.Event(self._device, enable_timing=True)
        self.plain.record(lane, "", event)
        return event

    def record(self, lane: Lane, label: str, event: Event = None) -> Event:
        """As it is, and told."""
        found = self.plain.record(lane, label, event)
        if Tracer.current is not None:
            Tracer.current.recorded(found, lane, label)
        return found

    def wait(self, lane: Lane, event: Event, label: str) -> None:
        """As it is, between two stamps."""
        with _waiting(lane, event, label):
            self.plain.wait(lane, event, label)

    def synchronize(self, event: Event, label: str) -> None:
        """As it is, between two stamps of the host."""
        with _waiting(HOST, event, label):
            self.plain.synchronize(event, label)

    @contextlib.contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """As it is; what is called inside runs on that lane."""
        here = Tracer.current
        with contextlib.nullcontext() if here is None else here.on(lane), self.plain.on(lane):
            yield


def _waiting(lane: Place, event: Event, label: str) -> AbstractContextManager[object]:
    here = Tracer.current
    return contextlib.nullcontext() if here is None else here.waiting(lane, event, label)


# ---- kernels and collectives

Function = Callable[..., object]
Report = Callable[[Function], Function]
"""From a function of a plain object to one that reports what it runs."""

P = TypeVar("P")


class Reporting:
    """A plain object some of whose functions report what they run.

    Args:
        plain: kernels, or collectives of an axis.
        reports: what reports, by the function's name; everything else is as it is.
    """

    def __init__(self, plain: object, reports: Mapping[str, Report]) -> None:
        self.plain = plain
        self._reports = reports

    def __getattr__(self, name: str) -> object:
        found = getattr(self.plain, name)
        return self._reports[name](found) if name in self._reports else found


def reporting(plain: P, reports: Mapping[str, Report]) -> P:
    """``plain``, reporting: it takes and gives the same."""
    return cast(P, Reporting(plain, reports))


def plainly(found: P) -> P:
    """Without reports."""
    return cast(P, found.plain) if isinstance(found, Reporting) else found


def _copies(label: str, written: int | str) -> Report:
    """A copy, by its label; "": by what fsdp2 does then. It writes the argument ``written``."""

    def copied(run: Function, *args: object, **given: object) -> object:
        here = Tracer.current
        if here is None or not here.word:  # fsdp2 works for no unit
            return run(*args, **given)
        targets = args[written] if isinstance(written, int) else given[written]
        return here.copy(label, _listed(targets), functools.partial(run, *args, **given))

    return lambda run: functools.partial(copied, run)


def _listed(tensors: object) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else cast(Sequence[Tensor], tensors)


def _transforms(run: Function) -> Function:
    """A copy by a codec's function, whose name it has."""
    return lambda function, *args: _copies(function.__name__, 1)(run)(function, *args)


def _followed(make: Function) -> Function:
    def transient(nbytes: int, name: str) -> object:
        made = make(nbytes, name)
        if Tracer.current is not None and isinstance(made, TransientBuffer):
            Tracer.current.follow(made)
        return made

    return transient


KERNELS: dict[str, Report] = {
    "transient": _followed,
    "to_host": _copies("to-host", 0),
    "from_host": _copies("load from host", 0),
    "fetched": _copies("to-host", 0),
    "copy": _copies("", 0),
    "copy_many": _copies("", 0),
    "copy_strided": _copies("stage", 0),
    "split_copy": _copies("", 2),
    "chunk_cat": _copies("stage", "out"),
    "divide": _copies("divide", 0),
    "transform": _transforms,
}


def _collective(
    name: str, group: ProcessGroup, moved: int, launch: Function, *args: object
) -> object:
    """Run a collective of the tensors in the argument ``moved``, and report it.

    Functions that were bound during a trace may outlive it.
    """
    here, bound = Tracer.current, functools.partial(cast(Launch, launch), *args)
    return bound() if here is None else here.collective(name, _listed(args[moved]), group, bound)


def _reports_of(group: ProcessGroup) -> dict[str, Report]:
    """Reports of the collectives of a process group."""

    def runs(name: str, moved: int) -> Report:
        return lambda run: functools.partial(_collective, name, group, moved, run)

    def binds(name: str, moved: int) -> Report:
        """For a function that binds tensors."""

        def bind(make: Function, *args: object) -> Function:
            launch = cast(Launch, make(*args))
            return lambda: _collective(name, group, moved, lambda *_: launch(), *args)

        return lambda make: functools.partial(bind, make)

    def binds_kind(name: str, moved: int) -> Report:
        """For a function that binds no more than the kind of a reduction."""
        return lambda make: lambda kind: runs(name, moved)(cast(Function, make(kind)))

    def over(make: Function, other: ProcessGroup) -> object:
        return reporting(make(other), _reports_of(other))

    return {
        "all_gather": runs(GATHER, 0),
        "bind_all_gather": binds(GATHER, 0),
        "bind_all_gather_many": binds(GATHER, 0),
        "custom_all_gather": runs(GATHER, 1),
        "bind_reduce_scatter": binds_kind(SCATTER, 1),
        "bind_reduce_scatter_many": binds_kind(SCATTER, 1),
        "custom_reduce_scatter": runs(SCATTER, 2),
        "bind_all_to_all": binds(EXCHANGE, 1),
        "all_reduce": runs(SUM, 0),
        "over": lambda make: functools.partial(over, make),
    }


# ---- groups


def _hosting(operation: str, word: str, lane: Lane) -> Callable[..., object]:
    """The host works for a group: for how long, and what copies are called meanwhile."""

    def host(group: ParamGroup, run: Function, *args: object) -> object:
        with tracer().hosting(operation, group.name, word, lane):
            return run(*args)

    return host


_launch = _hosting("launch reduction", "copy", Lane.COMPUTE)


def _reduce(
    group: ParamGroup, run: Function, jobs: list[tuple[Reduction, Job]], all_reduce: bool
) -> object:
    def counted() -> object:
        here.count(group, full)
        here.sample(here.clock.stamp(Lane.COMPUTE))
        pending = run(jobs, all_reduce)
        here.count(group)
        return pending

    here = tracer()
    here.entering = False
    full = sum(grad.nbytes for _, job in jobs for grad in job.grads)
    return _launch(group, counted)


TRACER = Observer(
    5,  # around all others: a trace shows what they cost
    {
        "start_unshard": _hosting("launch all-gather", "copy-in", Lane.COPY_IN),
        "finish_unshard": _hosting("finish all-gather", "copy-out", Lane.COMPUTE),
        "reduce": _reduce,
    },
)
"""Tells for which unit the host works, and for how long."""


# ---- on and off


def _units() -> list[Unit]:
    """The units of real steps: others are those of plans."""
    return [u for u in all_units() if not any(g.device == META for g in u.own_groups)]


def _groups() -> list[ParamGroup]:
    return [group for unit in _units() for group in unit.own_groups]


def _records() -> Iterator[UnitRecord]:
    for unit in _units():
        record = record_of_unit(unit)
        if record is not None:
            yield record


class _Seams:
    """The runtimes of groups while a trace is on: one reporter per plain object.

    Attributes:
        streams: of one device, whose lanes are the trace's; ``None`` if there are none.
    """

    def __init__(self) -> None:
        found = [group for group in _groups() if isinstance(group.streams, DeviceStreams)]
        self.streams = TracedStreams(found[0].streams, found[0].device) if found else None
        self._made: dict[Collectives, Collectives] = {}

    def take(self) -> None:
        """Let all groups, and their schedulers, run on what tells."""
        for record in _records():
            record.run_on(self._streams(record.streams))
        for group in _groups():
            replicas = None if group.replicas is None else self._collectives(group.replicas)
            kernels, streams = group.runtime.kernels, self._streams(group.streams)
            _run_on(group, self._collectives, reporting(kernels, KERNELS), streams, replicas)

    def _streams(self, streams: Streams) -> Streams:
        told = self.streams
        return told if told is not None and streams is told.plain else streams

    def _collectives(self, collectives: Collectives) -> Collectives:
        if not isinstance(collectives, GroupCollectives):
            return collectives
        if collectives not in self._made:
            self._made[collectives] = reporting(collectives, _reports_of(collectives.group))
        return self._made[collectives]


def _give_back() -> None:
    """Let all that runs on what tells run on what that holds."""
    for record in _records():
        streams = record.streams
        record.run_on(streams.plain if isinstance(streams, TracedStreams) else streams)
    for group in _groups():
        kernels, streams, replicas = group.runtime.kernels, group.streams, group.replicas
        _run_on(
            group,
            plainly,
            plainly(kernels),
            streams.plain if isinstance(streams, TracedStreams) else streams,
            plainly(replicas),
        )


def _run_on(
    group: ParamGroup,
    of: Callable[[Collectives], Collectives],
    kernels: Kernels,
    streams: Streams,
    replicas: Collectives | None,
) -> None:
    """Let a group run on these, and on what ``of`` gives for its collectives."""
    smaller = group.smaller_group
    if smaller is not None:
        group.set_smaller_group(replace(smaller, collectives=of(smaller.collectives)))
    runtime = replace(
        group.runtime,
        collectives=of(group.collectives),
        kernels=kernels,
        streams=streams,
        replicas=replicas,
        between=None if group.between is None else of(group.between),
    )
    group.run_on(runtime, of(group.reducers))


def _moves_of(units: Sequence[Unit], here: Tracer) -> Callable[[Unit, Phase, Phase], None]:
    """The reporters of these units' phases."""
    known = weakref.WeakSet(units)

    def moved(unit: Unit, before: Phase, after: Phase) -> None:
        if after is not before and unit in known:
            here.moved(unit, after)

    return moved


@contextlib.contextmanager
def tracing() -> Iterator[Tracer]:
    """Tell a new tracer of every unit and group that there is, while it is on."""
    with contextlib.ExitStack() as exits:
        exits.callback(_let_go)
        seams = _Seams()
        device = next((group.device.type for group in _groups()), "cpu")
        events = None if seams.streams is None else seams.streams.stamp
        here = Tracer.current = Tracer(Clock(events), device)
        seams.take()
        put_around(_units(), TRACER, True)
        exits.enter_context(watching(_moves_of(_units(), here)))
        exits.callback(register_optimizer_step_pre_hook(here.before_step).remove)
        exits.callback(register_optimizer_step_post_hook(here.after_step).remove)
        here.count_all()
        yield here


def _let_go() -> None:
    Tracer.current = None
    put_around(_units(), TRACER, False)
    _give_back()
