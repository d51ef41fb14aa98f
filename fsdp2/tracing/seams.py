"""The reporters to a tracer: objects on which groups run, and watchers of units.

    group.runtime  `Reporting` streams  events, waits of lanes for them, and which lane is current
                   kernels              copies
                   collectives          of shard and replicate axes
    unit.groups    `TRACER`             for which unit fsdp2 works, and for how long the host does
    unit.phase     a watcher            whose forward or backward computes
    optimizers     torch's hooks        their steps

`Reporting` wraps the plain object, performs its operations, and reports them. Groups run
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

from fsdp2.core.facts import (
    META,
    DeviceStreams,
    Event,
    GroupCollectives,
    Jobs,
    Kernels,
    Lane,
    Launch,
    Observer,
    ParamGroup,
    Phase,
    ProcessGroup,
    Streams,
    Unit,
    UnitRecord,
    all_units,
    put_around,
    record_of_unit,
    watching,
)
from fsdp2.tracing.record.notes import HOST, Place
from fsdp2.tracing.recording import Clock, Tracer
from fsdp2.tracing.timeline import COLLECTIVES

Tensor = torch.Tensor

GATHER, SCATTER, SUM, EXCHANGE = COLLECTIVES


def tracer() -> Tracer:
    """The one that is on."""
    found = Tracer.current
    assert found is not None
    return found


# ---- streams, kernels and collectives

Function = Callable[..., object]
Report = Callable[..., object]
"""Called instead of a function of a plain object: with that function, which it runs, and with the
arguments, as an observer of groups is."""

P = TypeVar("P")


class Reporting:
    """A plain object some of whose functions report what they run."""

    def __init__(self, plain: object, reports: Mapping[str, Report]) -> None:
        self.plain = plain
        self._reports = reports

    def __getattr__(self, name: str) -> object:
        found = getattr(self.plain, name)
        return functools.partial(self._reports[name], found) if name in self._reports else found


def _plainly(found: object) -> object:
    """Without reports."""
    return found.plain if isinstance(found, Reporting) else found


def _recorded(run: Function, lane: Lane, label: str, event: Event = None) -> Event:
    found = cast(Event, run(lane, label, event))
    if Tracer.current is not None:
        Tracer.current.recorded(found, lane, label)
    return found


def _waited(run: Function, *given: object) -> None:
    """A lane waits for an event, or the host does, which is not among the arguments."""
    lane, event, label = cast(tuple[Place, Event, str], (HOST, *given)[-3:])
    here = Tracer.current
    with contextlib.nullcontext() if here is None else here.waiting(lane, event, label):
        run(*given)


@contextlib.contextmanager
def _on(run: Function, lane: Lane) -> Iterator[None]:
    here = Tracer.current
    inside = cast(AbstractContextManager[object], run(lane))
    with contextlib.nullcontext() if here is None else here.on(lane), inside:
        yield


STREAMS: dict[str, Report] = {
    "record": _recorded,
    "wait": _waited,
    "synchronize": _waited,
    "on": _on,
}
"""Events, waits for them between two stamps, and the lane that is current."""


def _copies(label: str, written: int | str) -> Report:
    """A copy, by its label; "": by what fsdp2 does then. It writes the argument ``written``."""

    def copied(run: Function, *args: object, **given: object) -> object:
        here = Tracer.current
        if here is None or not here.word:  # no unit's operation, or inside a copy
            return run(*args, **given)
        targets = args[written] if isinstance(written, int) else given[written]
        return here.copy(label, _listed(targets), functools.partial(run, *args, **given))

    return copied


def _listed(tensors: object) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else cast(Sequence[Tensor], tensors)


def _transforms(run: Function, codec: Function, *args: object) -> object:
    """A copy by a codec's function, whose name it has."""
    return _copies(codec.__name__, 1)(run, codec, *args)


KERNELS: dict[str, Report] = {
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


def _reports_of(group: ProcessGroup) -> dict[str, Report]:
    """Reports of the collectives of a process group."""

    def runs(name: str, moved: int) -> Report:
        """For a function that runs a collective of the tensors in the argument ``moved``."""

        def report(run: Function, *args: object) -> object:
            here, launch = Tracer.current, cast(Launch, functools.partial(run, *args))
            if here is None:  # it was bound during a trace, and outlives it
                return launch()
            return here.collective(name, _listed(args[moved]), group, launch)

        return report

    def binds(name: str, moved: int) -> Report:
        """For a function that binds tensors."""

        def bind(make: Function, *args: object) -> Function:
            launch = cast(Launch, make(*args))
            return functools.partial(runs(name, moved), lambda *_: launch(), *args)

        return bind

    def binds_kind(name: str, moved: int) -> Report:
        """For a function that binds no more than the kind of a reduction."""
        return lambda make, kind: functools.partial(runs(name, moved), make(kind))

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
        "over": lambda make, other: Reporting(make(other), _reports_of(other)),
    }


# ---- groups


def _hosting(operation: str, word: str, lane: Lane) -> Callable[..., object]:
    """The host works for a group: for how long, and what copies are called meanwhile."""

    def host(group: ParamGroup, run: Function, *args: object) -> object:
        with tracer().hosting(operation, group.name, word, lane):
            return run(*args)

    return host


def _reduce(group: ParamGroup, run: Function, jobs: Jobs, all_reduce: bool) -> object:
    here = tracer()
    here.entering = False
    full = sum(grad.nbytes for _, job in jobs for grad in job.grads)
    with here.hosting("launch reduction", group.name, "copy", Lane.COMPUTE):
        here.count(group, full)
        here.sample(here.clock.stamp(Lane.COMPUTE))
        pending = run(jobs, all_reduce)
        here.count(group)
    return pending


TRACER = Observer(
    4,  # around all others: a trace shows what they cost
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


def _reporters(streams: DeviceStreams | None) -> Callable[[object], object]:
    """A function from a plain object to its reporter; there is one per object."""
    made: dict[object, object] = {}

    def choose(plain: object) -> object:
        if isinstance(plain, GroupCollectives):
            reports = _reports_of(plain.group)
        elif isinstance(plain, Kernels):
            reports = KERNELS
        elif isinstance(plain, DeviceStreams) and plain is streams:
            reports = STREAMS
        else:
            return plain
        # Groups compare what they share by identity, such as reducers with collectives.
        return made.setdefault(plain, Reporting(plain, reports))

    return choose


def _run_on(choose: Callable[[object], object]) -> None:
    """Let all groups, and their schedulers, run on what ``choose`` gives for what they run on."""

    def of(plain: P) -> P:
        return cast(P, choose(plain))

    # Schedulers order lanes by the object on which groups record events.
    for record in _records():
        record.run_on(of(record.streams))
    for group in _groups():
        smaller = group.smaller_group
        if smaller is not None:
            group.set_smaller_group(replace(smaller, collectives=of(smaller.collectives)))
        runtime = replace(
            group.runtime,
            collectives=of(group.collectives),
            kernels=of(group.runtime.kernels),
            streams=of(group.streams),
            replicas=of(group.replicas),
            between=of(group.between),
        )
        group.run_on(runtime, of(group.reducers))


def _stamps(streams: Streams, device: torch.device) -> Callable[[Lane], torch.Event]:
    """For events on a lane's stream that know their time."""

    def stamp(lane: Lane) -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        streams.record(lane, "", event)
        return event

    return stamp


@contextlib.contextmanager
def tracing() -> Iterator[Tracer]:
    """Tell a new tracer of every unit and group that there is, while it is on."""
    groups = _groups()
    device = groups[0].device.type if groups else "cpu"
    streams, stamp = None, None  # of the first device: a timeline has one lane of each kind
    for group in reversed(groups):
        if isinstance(group.streams, DeviceStreams):
            streams, stamp = group.streams, _stamps(group.streams, group.device)
    known = weakref.WeakSet(_units())

    def moved(unit: Unit, before: Phase, after: Phase) -> None:
        if after is not before and unit in known:
            here.moved(unit, after)

    with contextlib.ExitStack() as exits:
        exits.callback(_let_go)
        here = Tracer.current = Tracer(Clock(stamp), device)
        _run_on(_reporters(streams))
        put_around(known, TRACER, True)
        exits.enter_context(watching(moved))
        exits.callback(register_optimizer_step_pre_hook(here.before_step).remove)
        exits.callback(register_optimizer_step_post_hook(here.after_step).remove)
        here.count_all()
        yield here


def _let_go() -> None:
    Tracer.current = None
    put_around(_units(), TRACER, False)
    _run_on(_plainly)
