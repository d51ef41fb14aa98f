"""What tells a tracer of a step: what devices give to fsdp2, and the units that use it.

    Streams       `TracedStreams`      events, waits of lanes for them, and which lane is current
    Kernels       `TracedKernels`      copies; memory that comes and goes, by its name
    Collectives   `TracedCollectives`  all-gathers and reduce-scatters; `TracedReplicas` all-reduces
    a group       `TracedGroup`        for which unit fsdp2 works, and for how long the host does
    a unit        `TracedUnit`         whose forward or backward computes
    optimizers    torch's hooks        their steps

All of it is by classes that these objects have meanwhile; launches that are bound to collectives
are bound again. A step without a trace asks nothing and calls nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2.core.custom_collectives import AllGather, ReduceScatter
from fsdp2.core.device.buffers import TransientBuffer, all_buffers
from fsdp2.core.device.collectives import (
    GroupCollectives,
    Launch,
    ReduceKind,
    ReplicaCollectives,
    Work,
)
from fsdp2.core.device.kernels import Tensors, TorchKernels
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.device.rehearsal import META
from fsdp2.core.device.streams import DeviceStreams, Event, Lane
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import PendingReduction, Reduction
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.layers import Layer
from fsdp2.core.schedule.unit import Phase, Unit, all_units, put_around
from fsdp2.record.categories import category_of
from fsdp2.record.notes import HOST
from fsdp2.tracing.recording import Clock, Tracer
from fsdp2.tracing.timeline import COLLECTIVES

Tensor = torch.Tensor
T = TypeVar("T")

GATHER, SCATTER, SUM = COLLECTIVES


def tracer() -> Tracer:
    """The one that is on."""
    found = Tracer.current
    assert found is not None
    return found


def _below(thing: T, telling: type[T]) -> T:
    """What an object does that does not tell: by its own class, once the trace has taken that back.

    What was bound while a trace was on, such as the copies of a gather under way, may outlive it.
    """
    return cast(T, super(telling, thing)) if isinstance(thing, telling) else thing


# ---- streams


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
        tracer().recorded(found, lane, label)
        return found

    def wait(self, lane: Lane, event: Event, label: str) -> None:
        """As it is, between two stamps."""
        with tracer().waiting(lane, event, label):
            super().wait(lane, event, label)

    def synchronize(self, event: Event, label: str) -> None:
        """As it is, between two stamps of the host."""
        with tracer().waiting(HOST, event, label):
            super().synchronize(event, label)

    @contextlib.contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """As it is; what is called inside runs on that lane."""
        with tracer().on(lane), super().on(lane):
            yield


# ---- kernels and their memory


def _copied(
    name: str, written: Sequence[Tensor], run: Callable[..., object], *args: object, **given: object
) -> object:
    """Run what copies, and tell of it where fsdp2 works for a unit."""
    here = Tracer.current
    if here is None or not here.word:
        return run(*args, **given)
    return here.copy(name, written, functools.partial(run, *args, **given))


class TracedKernels(TorchKernels):
    """Kernels that tell of copies and of memory."""

    def transient(self, nbytes: int, name: str) -> TransientBuffer:
        made = super().transient(nbytes, name)
        if Tracer.current is not None:
            _let_tell(made, TracedBuffer)
            _hold(made)
        return made

    def copy(self, target: Tensor, source: Tensor) -> None:
        _copied("", [target], _below(self, TracedKernels).copy, target, source)

    def copy_many(self, targets: Tensors, sources: Tensors, /) -> object:
        return _copied("", targets, _below(self, TracedKernels).copy_many, targets, sources)

    def copy_strided(self, targets: Tensors, sources: Tensors, /) -> object:
        return _copied("stage", targets, _below(self, TracedKernels).copy_strided, targets, sources)

    def split_copy(self, source: Tensor, sizes: Sequence[int], targets: Tensors) -> None:
        _copied("", targets, _below(self, TracedKernels).split_copy, source, sizes, targets)

    def chunk_cat(self, tensors: Tensors, dim: int, chunks: int, /, *, out: Tensor) -> object:
        return _copied(
            "stage", [out], _below(self, TracedKernels).chunk_cat, tensors, dim, chunks, out=out
        )

    def divide(self, tensor: Tensor, factor: float, /) -> object:
        return _copied("divide", [tensor], _below(self, TracedKernels).divide, tensor, factor)

    def to_host(self, target: Tensor, source: Tensor) -> None:
        _copied("to-host", [target], _below(self, TracedKernels).to_host, target, source)

    def from_host(self, target: Tensor, source: Tensor) -> None:
        _copied("load from host", [target], _below(self, TracedKernels).from_host, target, source)


class TracedBuffer(TransientBuffer):
    """Memory that tells when it comes and goes."""

    __slots__ = ()

    def acquire(self) -> None:
        _below(self, TracedBuffer).acquire()
        _hold(self)

    def release(self) -> None:
        _below(self, TracedBuffer).release()
        _hold(self)


def _hold(buffer: TransientBuffer) -> None:
    here = Tracer.current
    if here is not None:
        nbytes = buffer.nbytes if buffer.allocated else 0
        here.hold(buffer, category_of(buffer.name), nbytes)


# ---- collectives


def _collective(
    name: str,
    group: ProcessGroup,
    moved: Sequence[Tensor],
    launch: Callable[..., Work | None],
    *args: object,
) -> Work | None:
    """Run a collective, and tell of it, if a trace is on: what is bound may outlive one."""
    here, bound = Tracer.current, functools.partial(launch, *args)
    return bound() if here is None else here.collective(name, moved, group, bound)


class TracedCollectives(GroupCollectives):
    """Collectives of the shard axis that tell when they run."""

    __slots__ = ()

    def all_gather(self, output: Tensor, input_: Tensor) -> Work | None:
        return _collective(
            GATHER, self.group, [output], _below(self, TracedCollectives).all_gather, output, input_
        )

    def bind_all_gather(self, output: Tensor, input_: Tensor) -> Launch:
        launch = super().bind_all_gather(output, input_)
        return functools.partial(_collective, GATHER, self.group, [output], launch)

    def bind_all_gather_many(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Launch:
        launch = super().bind_all_gather_many(outputs, inputs)
        return functools.partial(_collective, GATHER, self.group, outputs, launch)

    def bind_reduce_scatter(self, kind: ReduceKind) -> Callable[[Tensor, Tensor], Work | None]:
        launch, group = super().bind_reduce_scatter(kind), self.group
        return lambda out, given: _collective(SCATTER, group, [given], launch, out, given)

    def bind_reduce_scatter_many(
        self, kind: ReduceKind
    ) -> Callable[[Sequence[Tensor], Sequence[Tensor]], Work | None]:
        launch, group = super().bind_reduce_scatter_many(kind), self.group
        return lambda out, given: _collective(SCATTER, group, given, launch, out, given)

    def custom_all_gather(self, comm: AllGather, output: Tensor, input_: Tensor) -> Work | None:
        launch = _below(self, TracedCollectives).custom_all_gather
        return _collective(GATHER, self.group, [output], launch, comm, output, input_)

    def custom_reduce_scatter(
        self, comm: ReduceScatter, output: Tensor, input_: Tensor, kind: ReduceKind
    ) -> Work | None:
        launch = _below(self, TracedCollectives).custom_reduce_scatter
        return _collective(SCATTER, self.group, [input_], launch, comm, output, input_, kind)


class TracedReplicas(ReplicaCollectives):
    """All-reduces that tell when they run."""

    def all_reduce(self, tensor: Tensor, kind: ReduceKind) -> Work | None:
        return _collective(
            SUM, self.group, [tensor], _below(self, TracedReplicas).all_reduce, tensor, kind
        )


# ---- units and groups


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
            tracer().moved(self, phase)
        _stored.__set__(self, phase)


class TracedGroup(Layer):
    """A layer that tells for which unit the host works, and for how long."""

    __slots__ = ()

    height = 4  # around all others: a trace shows what they cost

    def start_unshard(self) -> None:
        """Launch the all-gather."""
        with tracer().hosting("launch all-gather", self.base.name, "copy-in", Lane.COPY_IN):
            self.below.start_unshard()

    def finish_unshard(self) -> None:
        """Wait for the all-gather, and copy."""
        with tracer().hosting("finish all-gather", self.base.name, "copy-out", Lane.COMPUTE):
            self.below.finish_unshard()

    def reduce(
        self, jobs: list[tuple[Reduction, Job]], all_reduce: bool
    ) -> PendingReduction | None:
        """Reduce."""
        here = tracer()
        here.entering = False
        full = sum(grad.nbytes for _, job in jobs for grad in job.grads)
        with here.hosting("launch reduction", self.base.name, "copy", Lane.COMPUTE):
            here.count(self.base, full)
            here.sample(here.clock.stamp(Lane.COMPUTE))
            pending = self.below.reduce(jobs, all_reduce)
            here.count(self.base)
        return pending


# ---- on and off


_made: dict[tuple[type, type], type] = {}
"""Classes that tell, by who tells and what the object is; the same object for each."""


def _let_tell(thing: Any, telling: type) -> None:
    """Give an object the class that tells, if it is of the kind that this one is derived from."""
    if isinstance(thing, telling.__bases__[0]) and not isinstance(thing, telling):
        bases = (telling, type(thing))
        if bases not in _made:
            _made[bases] = type(f"Traced{bases[1].__name__}", bases, {"__slots__": ()})
        thing.__class__ = _made[bases]


def _hush(thing: Any) -> None:
    thing.__class__ = type(thing).__bases__[1]


def _units() -> list[Unit]:
    """The units of real steps: others are those of plans."""
    return [u for u in all_units() if not any(g.device == META for g in u.own_groups)]


def _groups() -> list[ParamGroup]:
    return [group for unit in _units() for group in unit.own_groups]


def _seams() -> list[tuple[object, type]]:
    """What groups run on, and who tells of it; of one device, whose lanes are the trace's."""
    groups = _groups()
    streams = [group.streams for group in groups if type(group.streams) is DeviceStreams]
    found: list[tuple[object, type]] = [(each, TracedStreams) for each in streams[:1]]
    for group in groups:
        found.append((group.runtime.kernels, TracedKernels))
        found += [(group.collectives, TracedCollectives), (group.reducers, TracedCollectives)]
        found.append((group.replicas, TracedReplicas))
        if group.smaller_group is not None:
            found.append((group.smaller_group.collectives, TracedCollectives))
    return found


@contextlib.contextmanager
def tracing() -> Iterator[Tracer]:
    """Tell a new tracer of every unit and group that there is, while it is on."""
    with contextlib.ExitStack() as exits:
        seams = _seams()
        exits.callback(_let_go, seams)
        for thing, telling in seams:
            _let_tell(thing, telling)
        streams = next((s for s, _ in seams if isinstance(s, TracedStreams)), None)
        device = next((group.device.type for group in _groups()), "cpu")
        here = Tracer.current = Tracer(Clock(streams), device)
        for buffer in all_buffers():
            _let_tell(buffer, TracedBuffer)
            _hold(buffer)
        for group in _groups():
            group.relaunch()
        put_around(_units(), TracedGroup, True)
        for unit in _units():
            if type(unit) is Unit:
                unit.__class__ = TracedUnit
        exits.callback(register_optimizer_step_pre_hook(here.before_step).remove)
        exits.callback(register_optimizer_step_post_hook(here.after_step).remove)
        here.count_all()
        yield here


def _let_go(seams: Sequence[tuple[object, type]]) -> None:
    Tracer.current = None
    put_around(_units(), TracedGroup, False)
    for unit in all_units():
        if type(unit) is TracedUnit:
            cast(Unit, unit).__class__ = Unit
    for thing, telling in seams:
        if isinstance(thing, telling):
            _hush(thing)
    for buffer in all_buffers():
        if isinstance(buffer, TracedBuffer):
            _hush(buffer)
    for group in _groups():
        group.relaunch()
