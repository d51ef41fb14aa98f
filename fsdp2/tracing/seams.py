"""The reporters to a tracer, while a trace is on: observers of groups, watchers, and functions.

    unit.groups                    `TRACER`       for which unit fsdp2 works, and for how long
    unit.phase                     a watcher      whose forward or backward computes
    optimizers                     torch's hooks  their steps
    streams, kernels, collectives  `_reporting`   events, waits, copies, what is sent

Functions of classes report what they run, and are the plain ones again afterwards. Groups bind them
once, so that they bind again when a trace begins and when it ends (`ParamGroup.bind_launches`). A
step without a trace makes no check and no call. Operations that were bound during a trace, such as
the copies of a running all-gather, may outlive it, and then report nothing.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import cast

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2.core.facts import (
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
    Unit,
    all_units,
    put_around,
    watching,
)
from fsdp2.tracing.record.notes import HOST, Place, replaced
from fsdp2.tracing.recording import Clock, Tracer
from fsdp2.tracing.timeline import COLLECTIVES

Tensor = torch.Tensor

GATHER, SCATTER, SUM, EXCHANGE = COLLECTIVES


# ---- streams, kernels and collectives

Function = Callable[..., object]
Report = Callable[..., object]
"""Called instead of a function: with that function, bound to its object, and with the arguments."""


def _on_streams(run: Function) -> Tracer | None:
    """The tracer, if its lanes are those of which ``run`` is a function."""
    here = Tracer.current
    return here if here is not None and cast(MethodType, run).__self__ is here.streams else None


def _recorded(run: Function, lane: Lane, label: str, event: Event = None) -> Event:
    found = cast(Event, run(lane, label, event))
    here = _on_streams(run)
    if here is not None:
        here.recorded(found, lane)
    return found


def _waited(run: Function, *given: object) -> None:
    """A lane waits for an event, or the host does, which is not among the arguments."""
    lane, event, label = cast(tuple[Place, Event, str], (HOST, *given)[-3:])
    here = _on_streams(run)
    with contextlib.nullcontext() if here is None else here.waiting(lane, event, label):
        run(*given)


@contextlib.contextmanager
def _on(run: Function, lane: Lane) -> Iterator[None]:
    here = _on_streams(run)
    inside = cast(AbstractContextManager[object], run(lane))
    with contextlib.nullcontext() if here is None else here.on(lane), inside:
        yield


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


def _sends(name: str, moved: int) -> Report:
    """For a function that runs a collective of the tensors in the argument ``moved``."""

    def sent(run: Function, *args: object) -> object:
        return _collective(name, args[moved], run, functools.partial(run, *args))

    return sent


def _binds(name: str, moved: int) -> Report:
    """For a function that binds tensors, or the kind of a reduction, whose tensors come later."""

    def bind(make: Function, *args: object) -> Function:
        launch = cast(Function, make(*args))
        return lambda *more: _collective(
            name, (*args, *more)[moved], make, functools.partial(launch, *more)
        )

    return bind


def _collective(name: str, moved: object, method: Function, launch: Function) -> object:
    here = Tracer.current
    if here is None or not here.word:  # it outlives the trace in which it was bound
        return launch()
    group = cast(GroupCollectives, cast(MethodType, method).__self__).group
    return here.collective(name, _listed(moved), group, cast(Launch, launch))


def _of_graphs(
    run: Function, unit: str, kind: object, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> object:
    """A graph launches a collective of a unit."""
    launch = cast(Launch, functools.partial(run, unit, kind, outputs, inputs))
    name, moved = (GATHER, outputs) if kind is None else (SCATTER, inputs)
    group = cast(GroupCollectives, cast(MethodType, run).__self__).group
    with _tracer().of_graph(unit):
        return _tracer().collective(name, moved, group, launch, behind=True)


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

REPORTS: dict[type, dict[str, Report]] = {
    DeviceStreams: {"record": _recorded, "wait": _waited, "synchronize": _waited, "on": _on},
    GroupCollectives: {
        "all_gather": _sends(GATHER, 0),
        "bind_all_gather": _binds(GATHER, 0),
        "bind_all_gather_many": _binds(GATHER, 0),
        "custom_all_gather": _sends(GATHER, 1),
        "bind_reduce_scatter": _binds(SCATTER, 2),
        "bind_reduce_scatter_many": _binds(SCATTER, 2),
        "custom_reduce_scatter": _sends(SCATTER, 2),
        "launch_behind": _of_graphs,
        "bind_all_to_all": _binds(EXCHANGE, 1),
        "all_reduce": _sends(SUM, 0),
    },
    **dict.fromkeys((Kernels, *Kernels.__subclasses__()), KERNELS),
}
"""The reports of the functions of each class."""


@contextlib.contextmanager
def _reporting() -> Iterator[None]:
    """Let functions report what they run, also to groups that have bound the plain ones."""
    with contextlib.ExitStack() as exits:
        exits.callback(_bind_launches)
        for kind, reports in REPORTS.items():
            plain = {name: vars(kind)[name] for name in reports if name in vars(kind)}
            told = {name: _told(reports[name], function) for name, function in plain.items()}
            exits.enter_context(replaced(kind, **told))
        _bind_launches()
        yield


def _told(report: Report, function: Function) -> Function:
    def tell(owner: object, *args: object, **given: object) -> object:
        return report(function.__get__(owner), *args, **given)

    return tell


def _bind_launches() -> None:
    for group in _groups():
        group.bind_launches()


# ---- groups


def _tracer() -> Tracer:
    """The one that is on."""
    found = Tracer.current
    assert found is not None
    return found


def _hosting(operation: str, word: str, lane: Lane) -> Callable[..., object]:
    """The host works for a group: for how long, and what copies are called meanwhile."""

    def host(group: ParamGroup, run: Function, *args: object) -> object:
        with _tracer().hosting(operation, group.name, word, lane):
            return run(*args)

    return host


def _reduce(group: ParamGroup, run: Function, jobs: Jobs, all_reduce: bool) -> object:
    here = _tracer()
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
    return [u for u in all_units() if not any(g.device.type == "meta" for g in u.own_groups)]


def _groups() -> list[ParamGroup]:
    return [group for unit in _units() for group in unit.own_groups]


def _stamps(streams: DeviceStreams, device: torch.device) -> Callable[[Lane], torch.Event]:
    """For events on a lane's stream that know their time."""
    record = streams.record  # which reports nothing

    def stamp(lane: Lane) -> torch.Event:
        return record(lane, "", torch.Event(device, enable_timing=True))

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
        here = Tracer.current = Tracer(Clock(stamp), device, streams)
        exits.enter_context(_reporting())
        put_around(known, TRACER, True)
        exits.enter_context(watching(moved))
        exits.callback(register_optimizer_step_pre_hook(here.before_step).remove)
        exits.callback(register_optimizer_step_post_hook(here.after_step).remove)
        here.count_all()
        yield here


def _let_go() -> None:
    Tracer.current = None
    put_around(_units(), TRACER, False)
