"""The reporters to a tracer: objects on which groups run, and watchers of units.

    group.runtime  `TracedStreams`      events, waits of lanes for them, and which lane is current
                   `TracedKernels`      copies, and buffers whose memory is counted
                   `TracedCollectives`  all-gathers and reduce-scatters
                   `TracedReplicas`     all-reduces
    unit.groups    `TracedGroup`        for which unit fsdp2 works, and for how long the host does
    unit.phase     `core.schedule.moves`  whose forward or backward computes
    optimizers     torch's hooks        their steps

Each of the first four wraps the plain object, performs its operation, and reports it. Groups run on
them while a trace is on, and on the plain ones again afterwards (`ParamGroup.run_on`). A step
without a trace makes no check and no call. Objects that were bound during a trace, such as the
copies of a running all-gather, may outlive it, and then report nothing.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2.core.custom_collectives import AllGather, ReduceScatter
from fsdp2.core.device.buffers import FlatBuffer, TransientBuffer
from fsdp2.core.device.collectives import (
    Collectives,
    GroupCollectives,
    Launch,
    ReduceKind,
    ReplicaCollectives,
    Replicas,
    Work,
)
from fsdp2.core.device.kernels import Kernels, Tensors
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.device.rehearsal import META
from fsdp2.core.device.streams import DeviceStreams, Event, Lane, Streams
from fsdp2.core.modules.registry import UnitRecord, record_of_unit
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import PendingReduction, Reduction
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.layers import Layer
from fsdp2.core.schedule.moves import watching
from fsdp2.core.schedule.unit import Phase, Unit, all_units, put_around
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


# ---- kernels and their memory


def _copied(
    name: str, written: Sequence[Tensor], run: Callable[..., object], *args: object, **given: object
) -> object:
    """Run what copies, and tell of it where fsdp2 works for a unit."""
    here = Tracer.current
    if here is None or not here.word:
        return run(*args, **given)
    return here.copy(name, written, functools.partial(run, *args, **given))


class TracedKernels:
    """Kernels that tell of copies and of memory that comes and goes.

    Args:
        plain: those that do it.
    """

    def __init__(self, plain: Kernels) -> None:
        self.plain = plain
        self.fuses = plain.fuses
        self.flat: Callable[[int, bool], FlatBuffer] = plain.flat
        self.host_flat, self.host_empty = plain.host_flat, plain.host_empty
        self.bind_empty, self.zeros, self.constant = plain.bind_empty, plain.zeros, plain.constant
        self.numbers, self.pieces, self.add_many = plain.numbers, plain.pieces, plain.add_many
        self.bind_fingerprint, self.differ = plain.bind_fingerprint, plain.differ

    def transient(self, nbytes: int, name: str) -> TransientBuffer:
        """Made, and looked at from now on."""
        made = self.plain.transient(nbytes, name)
        if Tracer.current is not None:
            Tracer.current.follow(made)
        return made

    def to_host(self, target: Tensor, source: Tensor) -> None:
        """As it is, and told."""
        _copied("to-host", [target], self.plain.to_host, target, source)

    def from_host(self, target: Tensor, source: Tensor) -> None:
        """As it is, and told."""
        _copied("load from host", [target], self.plain.from_host, target, source)

    def fetched(self, source: Tensor) -> Tensor:
        """As it is, and told."""
        found = _copied("to-host", [source], self.plain.fetched, source)
        assert isinstance(found, Tensor)
        return found

    def copy(self, target: Tensor, source: Tensor) -> None:
        """As it is, and told."""
        _copied("", [target], self.plain.copy, target, source)

    def copy_many(self, targets: Tensors, sources: Tensors, /) -> object:
        """As it is, and told."""
        return _copied("", targets, self.plain.copy_many, targets, sources)

    def copy_strided(self, targets: Tensors, sources: Tensors, /) -> object:
        """As it is, and told."""
        return _copied("stage", targets, self.plain.copy_strided, targets, sources)

    def split_copy(self, source: Tensor, sizes: Sequence[int], targets: Tensors) -> None:
        """As it is, and told."""
        _copied("", targets, self.plain.split_copy, source, sizes, targets)

    def chunk_cat(self, tensors: Tensors, dim: int, chunks: int, /, *, out: Tensor) -> object:
        """As it is, and told."""
        return _copied("stage", [out], self.plain.chunk_cat, tensors, dim, chunks, out=out)

    def transform(
        self, function: Callable[[Tensor, Tensor], None], target: Tensor, source: Tensor
    ) -> None:
        """As it is, and told: by the name of the codec's function."""
        _copied(function.__name__, [target], self.plain.transform, function, target, source)

    def divide(self, tensor: Tensor, factor: float, /) -> object:
        """As it is, and told."""
        return _copied("divide", [tensor], self.plain.divide, tensor, factor)


# ---- collectives


def _collective(
    name: str,
    group: ProcessGroup | None,
    moved: Sequence[Tensor],
    launch: Callable[..., Work | None],
    *args: object,
) -> Work | None:
    """Run a collective, and tell of it, if a trace is on: what is bound may outlive one."""
    here, bound = Tracer.current, functools.partial(launch, *args)
    if here is None or group is None:
        return bound()
    return here.collective(name, moved, group, bound)


class TracedCollectives:
    """Collectives of the shard axis that tell when they run.

    Args:
        plain: those that run.
    """

    def __init__(self, plain: Collectives) -> None:
        self.plain = plain
        self.size, self.rank, self.group = plain.size, plain.rank, plain.group
        self.coalesces, self.premultiplies = plain.coalesces, plain.premultiplies
        self.exchange, self.largest = plain.exchange, plain.largest

    def over(self, group: ProcessGroup) -> Collectives:
        """The same over another process group: told, too."""
        return TracedCollectives(self.plain.over(group))

    def all_gather(self, output: Tensor, input_: Tensor) -> Work | None:
        """As it is, and told."""
        return _collective(GATHER, self.group, [output], self.plain.all_gather, output, input_)

    def bind_all_gather(self, output: Tensor, input_: Tensor) -> Launch:
        """A function that runs and reports it."""
        launch = self.plain.bind_all_gather(output, input_)
        return functools.partial(_collective, GATHER, self.group, [output], launch)

    def bind_all_gather_many(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Launch:
        """A function that runs and reports it."""
        launch = self.plain.bind_all_gather_many(outputs, inputs)
        return functools.partial(_collective, GATHER, self.group, outputs, launch)

    def bind_all_to_all(self, output: Tensor, input_: Tensor) -> Launch:
        """A function that runs and reports it."""
        launch = self.plain.bind_all_to_all(output, input_)
        return functools.partial(_collective, EXCHANGE, self.group, [input_], launch)

    def bind_reduce_scatter(self, kind: ReduceKind) -> Callable[[Tensor, Tensor], Work | None]:
        """A function that runs and reports it."""
        launch, group = self.plain.bind_reduce_scatter(kind), self.group
        return lambda out, given: _collective(SCATTER, group, [given], launch, out, given)

    def bind_reduce_scatter_many(
        self, kind: ReduceKind
    ) -> Callable[[Sequence[Tensor], Sequence[Tensor]], Work | None]:
        """A function that runs and reports it."""
        launch, group = self.plain.bind_reduce_scatter_many(kind), self.group
        return lambda out, given: _collective(SCATTER, group, given, launch, out, given)

    def custom_all_gather(self, comm: AllGather, output: Tensor, input_: Tensor) -> Work | None:
        """As it is, and told."""
        launch = self.plain.custom_all_gather
        return _collective(GATHER, self.group, [output], launch, comm, output, input_)

    def custom_reduce_scatter(
        self, comm: ReduceScatter, output: Tensor, input_: Tensor, kind: ReduceKind
    ) -> Work | None:
        """As it is, and told."""
        launch = self.plain.custom_reduce_scatter
        return _collective(SCATTER, self.group, [input_], launch, comm, output, input_, kind)


class TracedReplicas:
    """All-reduces that tell when they run.

    Args:
        plain: those that run.
    """

    def __init__(self, plain: Replicas) -> None:
        self.plain = plain
        self.size, self.group = plain.size, plain.group

    def all_reduce(self, tensor: Tensor, kind: ReduceKind) -> Work | None:
        """As it is, and told."""
        return _collective(SUM, self.group, [tensor], self.plain.all_reduce, tensor, kind)


# ---- groups


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
        self._made: dict[Collectives, TracedCollectives] = {}

    def take(self) -> None:
        """Let all groups, and their schedulers, run on what tells."""
        for record in _records():
            record.run_on(self._streams(record.streams))
        for group in _groups():
            replicas = group.replicas
            if isinstance(replicas, ReplicaCollectives):
                replicas = TracedReplicas(replicas)
            kernels, streams = TracedKernels(group.runtime.kernels), self._streams(group.streams)
            _run_on(group, self._collectives, kernels, streams, replicas)

    def _streams(self, streams: Streams) -> Streams:
        told = self.streams
        return told if told is not None and streams is told.plain else streams

    def _collectives(self, collectives: Collectives) -> Collectives:
        if not isinstance(collectives, GroupCollectives):
            return collectives
        if collectives not in self._made:
            self._made[collectives] = TracedCollectives(collectives)
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
            lambda found: found.plain if isinstance(found, TracedCollectives) else found,
            kernels.plain if isinstance(kernels, TracedKernels) else kernels,
            streams.plain if isinstance(streams, TracedStreams) else streams,
            replicas.plain if isinstance(replicas, TracedReplicas) else replicas,
        )


def _run_on(
    group: ParamGroup,
    of: Callable[[Collectives], Collectives],
    kernels: Kernels,
    streams: Streams,
    replicas: Replicas | None,
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
        put_around(_units(), TracedGroup, True)
        exits.enter_context(watching(_moves_of(_units(), here)))
        exits.callback(register_optimizer_step_pre_hook(here.before_step).remove)
        exits.callback(register_optimizer_step_post_hook(here.after_step).remove)
        here.count_all()
        yield here


def _let_go() -> None:
    Tracer.current = None
    put_around(_units(), TracedGroup, False)
    _give_back()
