"""One communication unit: a group of parameters that are gathered and reduced together.

    state    GroupState          see `fsdp2.core.schedule.states`
    shard    FlatBuffer       [segment | segment …]   this rank's rows, for good
    _mirror  TransientBuffer  the same, on the device, where the shards are offloaded to the CPU
    _full    TransientBuffer  [segment | segment …]   the gathered rows, between acquire and release
    _smaller SmallerRows      rows of a smaller group, while RESHARDED
    _extension                memory of gathered parameters with all-gather hooks

The group owns this state and nothing else does; the scheduler decides when to move it.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast
from weakref import WeakMethod

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.tensor import DTensor

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions, ShardingStateError
from fsdp2.core.device.buffers import FlatBuffer, TransientBuffer
from fsdp2.core.device.collectives import Collectives, Replicas, Work
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.device.presence import meet
from fsdp2.core.device.rehearsal import META
from fsdp2.core.device.streams import COMPUTE, Event, Streams
from fsdp2.core.gather.extension import ExtensionContext, ExtensionTransport, make_extension
from fsdp2.core.gather.kinds import make_transports
from fsdp2.core.gather.launch import Launched, gather_inline, gather_on_lanes
from fsdp2.core.gather.smaller_group import SmallerGroup, SmallerRows
from fsdp2.core.gather.transport import GatherTransport, Load, Route
from fsdp2.core.layout.layout import GroupLayout, ParamShape, Slot, Transport, build_layout
from fsdp2.core.layout.logs import BIND, BindReason
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.params.gradients import COUNTS_ARE_TRUE, Gradients, gradients_of
from fsdp2.core.params.param import (
    GATHERED,
    ShardedParam,
    Swap,
    follow_requires_grad,
    refuse_written,
    shapes_of,
)
from fsdp2.core.progress import OptimizerSteps, ShardReaders, communication_error
from fsdp2.core.reduce.binding import make_reductions
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import (
    PendingReduction,
    Reduction,
    reduce_inline,
    reduce_on_lanes,
    with_zeros,
)
from fsdp2.core.reduce.spec import ReductionSpec, is_direct, reduction_spec
from fsdp2.core.schedule.states import (
    GATHERING,
    HIDDEN,
    RESHARDED,
    SHARDED,
    UNSHARDED,
    refused,
)

_requires_grad = operator.attrgetter("requires_grad")
_version = operator.attrgetter("_version")

_UNSET: Any = None
"""Of what binding sets before anything else reads it."""


@dataclass(frozen=True)
class Runtime:
    """What a group runs on.

    Attributes:
        collectives: of the shard axis.
        streams: lanes of the device.
        kernels: memory and copies of the device.
        device: where the group computes.
        replicas: collectives of the replicate axis, if there is one.
        offload: where shards and gradients live in CPU memory apart from the device.
        gradients_of: the gradients of parameters that are reduced alike.
    """

    collectives: Collectives
    streams: Streams
    kernels: Kernels
    device: torch.device
    replicas: Replicas | None = None
    offload: CPUOffloadPolicy | None = None
    gradients_of: Callable[[Sequence[ShardedParam]], Gradients] = gradients_of


class ParamGroup:
    """Parameters that share collectives.

    Args:
        name: name of the unit, for messages.
        params: the parameters.
        runtime: what it runs on.
        options: what the user chose.

    Attributes:
        collectives: of the shard axis.
        reducers: collectives of the gradients; ``collectives`` unless they got a process group of
            their own.
        smaller_group: the group to reshard to after forward, if not this one or none.
        shard: this rank's rows of all parameters but extended ones, as ``layout`` says.
        is_alias: whether it only stands for a group of another unit (`fsdp2.core.schedule.ties`).
    """

    is_alias: ClassVar[bool] = False

    # More attributes than Python keeps compact: 1.6 KB for each of hundreds of groups, read all
    # over in every gather.
    __slots__ = (
        "__weakref__",
        "_accumulated",
        "_extension",
        "_full",
        "_gathered_at",
        "_gathered_event",
        "_keeps_mirror",
        "_keeps_storage",
        "_launch_gather",
        "_launch_reduction",
        "_load",
        "_loaded_event",
        "_locals",
        "_mirror",
        "_rebinds",
        "_reduces_frozen",
        "_reductions",
        "_references",
        "_route",
        "_runtime",
        "_sharded",
        "_sharded_flags",
        "_smaller",
        "_taken",
        "_to_sharded",
        "_to_unsharded",
        "_transports",
        "_unsharded",
        "_unsharded_flags",
        "_versions",
        "_watched",
        "_works",
        "bound",
        "collectives",
        "device",
        "kernels",
        "layout",
        "name",
        "offload",
        "options",
        "params",
        "reducers",
        "replicas",
        "reroute",
        "shard",
        "smaller_group",
        "state",
        "streams",
    )

    def __init__(
        self, name: str, params: Sequence[ShardedParam], runtime: Runtime, options: GroupOptions
    ) -> None:
        self.name = name
        self.params = list(params)
        self.options = options
        self._keeps_storage = options.keep_storage
        self._run_on(runtime)
        self.state = SHARDED
        self._gathered_at = -1
        self._accumulated = False
        self.layout: GroupLayout | None = None
        self.shard: FlatBuffer = _UNSET
        self._bind_nothing()

    def _run_on(self, runtime: Runtime) -> None:
        """What a step uses at hand, so that it looks nothing up."""
        self._runtime = runtime
        self.collectives = self.reducers = runtime.collectives
        self.replicas = runtime.replicas
        self.offload = runtime.offload
        self.streams = streams = runtime.streams
        self.kernels = runtime.kernels
        self.device = runtime.device
        self._launch_gather: Callable[..., Launched] = gather_inline
        if streams.asynchronous:
            self._launch_gather = functools.partial(gather_on_lanes, event=streams.make_event())
        self._launch_reduction = reduce_on_lanes if streams.asynchronous else reduce_inline

    def _bind_nothing(self) -> None:
        """Before the first use there are no transports, gathered parameters and reductions."""
        self.bound = False
        self.reroute = False  # transports are out of date; parameters and buffers are not
        self.smaller_group: SmallerGroup | None = None
        self._full: TransientBuffer = _UNSET
        self._mirror: TransientBuffer | None = None
        self._load: Load | None = None
        self._smaller: SmallerRows | None = None
        self._extension: ExtensionTransport | None = None
        self._transports: list[GatherTransport] = []
        self._reductions: list[Reduction] = []
        self._reduces_frozen = False
        self._rebinds = False  # some reductions are out of date, but have partial sums
        self._gathered_event: Event = None
        self._loaded_event: Event = None
        self._works: list[Work] = []
        self._locals: list[tuple[DTensor, torch.Tensor]] = []  # sharded, and their rows
        self._to_sharded: list[Swap] = []
        self._to_unsharded: list[Swap] = []
        self._references: list[int] = []  # to what is gathered, while nobody uses it
        self._sharded: list[nn.Parameter] = []  # both forms, and whether they required grad …
        self._sharded_flags: list[bool] = []  # … when that was compared last
        self._unsharded: list[nn.Parameter] = []
        self._unsharded_flags: list[bool] = []
        self._watched: list[nn.Parameter] = []  # the gathered ones that a write would be lost of …
        self._versions: list[int] = []  # … and as often as we have written them

    @property
    def is_unsharded(self) -> bool:
        """Whether the gathered parameters are registered."""
        return self.state is UNSHARDED

    @property
    def accumulates(self) -> bool:
        """Whether gradients of backwards without sync, or partial sums, are waiting."""
        return self._accumulated or self._has_partial_sums

    @property
    def _has_partial_sums(self) -> bool:
        for reduction in self._reductions:  # noqa: SIM110  # asked in every zero_grad()
            if reduction.partial_sums.flat is not None:
                return True
        return False

    @property
    def is_over(self) -> bool:
        """Whether it is sharded, and nothing is there to reduce."""
        if self.state is not SHARDED:
            return False
        for reduction in self._reductions:  # noqa: SIM110  # asked at the end of every backward
            if reduction.has_work:
                return False
        return True

    @property
    def has_gradients(self) -> bool:
        """Whether gathered parameters have gradients that no reduction has taken."""
        return any(reduction.gradients.waiting() for reduction in self._reductions)

    @property
    def has_grad_hooks(self) -> bool:
        """Whether users' hooks run when gradients are delivered: they may write the shards."""
        return any(param.has_grad_hooks for param in self.params)

    @property
    def is_owed(self) -> bool:
        """Whether a backward that its own unit took no part in has left gradients."""
        return False

    # ---- layout and binding

    def adopt(self) -> None:
        """Lay the group out and move every parameter's rows into one flat shard.

        Called when the group is made, and again when `.to()`, `load_state_dict(assign=True)` or
        the like gave a parameter other memory or another dtype (invariant I5).
        """
        self._require_sharded("adopt")
        self.layout = None  # until all have moved: where this is interrupted, all move again
        layout = self._plan(shapes_of(self.params, self.options))
        on_meta = any(param.is_meta for param in self.params)
        if self.offload is None:
            shard = self.kernels.flat(layout.shard_bytes, on_meta)
        else:
            shard = self.kernels.host_flat(layout.shard_bytes, on_meta, self.offload.pin_memory)
        for segment in layout.segments:
            for slot in segment.slots:
                param = self.params[slot.index]
                if segment.transport is Transport.EXTENSION:
                    param.adopt_extended(slot, self.offload)
                    continue
                start = segment.shard_byte_offset + slot.shard_offset * param.dtype.itemsize
                shape = slot.local_shape(self.collectives.rank)
                param.adopt(slot, shard.piece(param.dtype, start, shape))
        self.layout = layout
        self.shard = shard
        self.bound = False

    def _plan(self, shapes: Sequence[ParamShape]) -> GroupLayout:
        shared = self.collectives
        return build_layout(shapes, shared.size, shared.coalesces, self.options.pack_below)

    def drop(self, params: Sequence[ShardedParam]) -> None:
        """Manage these no longer; the others move to a flat shard without them."""
        self._require_sharded("drop parameters of")
        self.params = [param for param in self.params if param not in params]
        if self.params:
            self.adopt()

    def rebind(self) -> None:
        """Notice changed parameters at the next gather."""
        self.bound = False

    def set_options(self, options: GroupOptions) -> None:
        """Take new options: reductions follow now, transports at the next gather."""
        self.reroute = self.reroute or options.all_gather is not self.options.all_gather
        self.reroute = self.reroute or options.gather_codec != self.options.gather_codec
        repacked = options.pack_below != self.options.pack_below
        self.options = options
        self._keeps_storage = options.keep_storage
        if repacked and self.state is SHARDED:
            self.adopt()
        elif repacked:
            self.rebind()
        elif self.bound:
            self.bind_reductions()

    def set_reducers(self, reducers: Collectives) -> None:
        """Reduce gradients over another process group of the same ranks."""
        self.reducers = reducers
        if self.bound:
            self.bind_reductions()

    def set_replicas(self, replicas: Replicas) -> None:
        """Sum over the same copies in another way."""
        self.replicas = replicas
        if self.bound:
            self.bind_reductions()

    def relaunch(self) -> None:
        """Bind collectives anew: theirs are other functions now, such as those of a trace."""
        if self.bound:
            self.reroute = True
            self.bind_reductions()

    def set_smaller_group(self, smaller: SmallerGroup | None) -> None:
        """Choose the ranks to reshard to after forward; ``None`` for all or none."""
        self.reroute = self.reroute or smaller is not self.smaller_group
        self.smaller_group = smaller

    def reregister(self, module: nn.Module | None = None) -> None:
        """After a state dict was loaded: manage the parameters that are registered now.

        Args:
            module: whose parameters were loaded; ``None`` (default): all of the group's modules.
        """
        self.rebind()  # whatever is raised
        for param in self.params:
            if module is None or any(holder is module for holder, _ in param.entries):
                param.follow_registered()

    def bind(self) -> None:
        """Build transports, gathered parameters and reduction steps, if anything changed.

        Where only the way to gather changed, the gathered parameters stay the objects they are:
        autograd may hold them for a backward to come.
        """
        if self.state is RESHARDED:
            return
        for sharded, local in self._locals:  # still backed as they were (`swap_tensors` …)?
            if sharded._local_tensor is not local:
                self.bound = False
                break
        if self.bound and not self.reroute:
            return
        self._require_sharded("bind")
        meet(self.collectives.group, self.device, self.name)
        if self.replicas is not None:
            meet(self.replicas.group, self.device, self.name)
        if self.bound:
            BIND.debug("'%s' binds: another way to gather was chosen", self.name)
            self._full.acquire()
        else:
            self._bind_buffers()
        self._bind_transports()
        if not self.bound:
            self._bind_params()
            self.bind_reductions()
        backed = [p for p in self.params if hasattr(p.sharded, "_local_tensor")]
        self._locals = [(cast(DTensor, p.sharded), p.local) for p in backed]
        self._sharded = [param.sharded for param in self.params]
        self._sharded_flags = list(map(_requires_grad, self._sharded))
        self._bind_smaller()
        if self._mirror is not None:
            self._mirror.release()
        if not (self.bound and self._keeps_storage):  # memory that is kept stays in place
            self._full.release()
        self.bound, self.reroute = True, False
        self._references = self._count_references()

    def _bind_buffers(self) -> None:
        offloads = self.offload is not None and self.device != META
        home = torch.device("cpu") if offloads else self.device
        for param in self.params:
            param.check_usable(home, self.offload is not None)
        follow_requires_grad(self.params)
        shapes = shapes_of(self.params, self.options)
        layout = self._plan(shapes)
        moved = [param.name for param in self.params if not param.is_in_place]
        before = None if self._full is None else self.layout
        BIND.debug("'%s' binds: %s", self.name, BindReason(before, shapes, moved))
        if layout != self.layout or moved:
            self.adopt()
        self._full = self.kernels.transient(layout.full_bytes, f"gathered {self.name}")
        if self.offload is not None:
            self._bind_mirror(layout.shard_bytes)

    def _bind_transports(self) -> None:
        assert self.layout is not None
        source = self.shard if self._mirror is None else self._mirror
        if self._mirror is not None:
            self._mirror.acquire()
        if not self.bound:
            made: WeakMethod[Callable[[ShardedParam], None]] = WeakMethod(self._bind_swaps)
            context = ExtensionContext(self.options, self.device, self.offload, made)
            self._extension = make_extension(
                self.layout, self.params, self.collectives, self.kernels, context
            )
        self._transports = make_transports(
            [s for s in self.layout.segments if s.transport is not Transport.EXTENSION],
            source,
            self._full,
            self.collectives,
            self.kernels,
            self.options.all_gather,
            self.device,
            self.options.gather_codec,
        )
        if self._extension is not None:
            self._extension.comm = self.options.all_gather
            self._transports.append(self._extension)
        self._route = Route(self._transports, self._load)
        self._keeps_mirror = any(transport.aliases for transport in self._transports)

    def _bind_params(self) -> None:
        """Make the gathered parameters, and the stores that register either form.

        Extended ones follow in their first gather.
        """
        self._to_sharded, self._to_unsharded = [], []
        self._unsharded, self._unsharded_flags = [], []
        self._watched, self._versions = [], []
        for transport in self._transports:
            for slot, gathered in transport.parameters():
                param = self.params[slot.index]
                param.materialize(gathered)
                assert param.unsharded is not None
                self._full.keep_valid(local_of(param.unsharded))
                self._bind_swaps(param)

    def _bind_swaps(self, param: ShardedParam) -> None:
        assert param.unsharded is not None
        self._to_sharded += param.swaps(param.sharded)
        self._to_unsharded += param.swaps(param.unsharded)
        self._unsharded.append(param.unsharded)
        self._unsharded_flags.append(param.unsharded.requires_grad)
        if not (param.is_extended or param.is_its_shard):  # whose gathers write it themselves
            self._watched.append(param.unsharded)
            self._versions.append(param.unsharded._version)

    def _bind_smaller(self) -> None:
        self._smaller = None
        if self.smaller_group is not None and self.layout is not None:
            self._smaller = SmallerRows(
                self.smaller_group,
                self.layout,
                self._full,
                self.params,
                self.kernels,
                self.options.all_gather,
                self.device,
                self.options.pack_below,
            )

    def _bind_mirror(self, nbytes: int) -> None:
        """The device's copy of offloaded shards, from a gather's start to its end (decision 8)."""
        self._mirror = self.kernels.transient(nbytes, f"shards of {self.name}")
        self._load = Load(self._mirror, self.shard, nbytes, self.kernels) if nbytes else None

    def bind_reductions(self) -> None:
        """Build the reduction steps of the parameters that require grad now.

        Partial sums that wait for an all-reduce belong to the steps that made them, which stay
        bound until then; parameters that they do not know get steps besides (invariant I9). Those
        that were frozen while gradients of earlier backwards are waiting still belong to it.
        """
        assert self.layout is not None
        kept = [r for r in self._reductions if r.partial_sums.flat is not None]
        self._rebinds = bool(kept)
        known = {id(param) for reduction in kept for param in reduction.members}
        waiting = {id(m) for r in self._reductions for m in r.members} if self._accumulated else ()
        self._reduces_frozen = False
        members: list[tuple[ReductionSpec, ShardedParam, Slot, bool]] = []
        for segment in self.layout.segments:
            for slot in segment.slots:
                param = self.params[slot.index]
                frozen = not param.sharded.requires_grad
                if id(param) not in known and (not frozen or id(param) in waiting):
                    self._reduces_frozen = self._reduces_frozen or frozen
                    spec = reduction_spec(self.options, param, self.offload, self.device)
                    direct = is_direct(spec, slot, segment.transport)
                    members.append((spec, param, slot, direct))
        with torch.inference_mode(False):  # tensors that a later backward writes to
            self._reductions = kept + make_reductions(
                members, self._runtime.gradients_of, self.reducers, self.replicas, self.kernels
            )

    # ---- gather and free

    def start_unshard(self) -> None:
        """Issue the all-gather; returns while it may still run.

        The side lanes wait for COMPUTE as it is now: whatever used the memory that the gathered
        buffer is given was issued there before (invariant I2).
        """
        if self.state is SHARDED:
            route = self._route
            self._gathered_at = OptimizerSteps.count
        elif self.state is RESHARDED:
            assert self._smaller is not None
            route = self._smaller.route
            self._follow_smaller()
        else:
            raise refused("start_unshard", self.name, self.state)
        self.state, self._taken = GATHERING, route
        if route.early:
            self._full.acquire()
        if route.launches:
            for transport in route.acquiring:
                transport.acquire()
            launched = self._launch_gather(self.streams, route, self.name, self._works)
            if route.loads:
                self._loaded_event = launched.copied
            self._gathered_event = launched.gathered

    def finish_unshard(self) -> None:
        """Make COMPUTE wait for the all-gather and register the gathered parameters."""
        if self.state is not GATHERING:
            raise refused("finish_unshard", self.name, self.state)
        self._await_gather()
        if self._taken.finishes:
            self._finish_copies(self._taken)
        if self._smaller is not None:
            self._smaller.release()
        for store, name, param in self._to_unsharded:
            store[name] = param
        self.state = UNSHARDED

    def _finish_copies(self, route: Route) -> None:
        if not route.early:
            self._full.acquire()
        for transport in route.finishing:
            transport.copy_out()
            transport.release()
        if self._mirror is not None and route.loads and not self._keeps_mirror:
            self._mirror.release()

    def shard_smaller(self) -> None:
        """After forward: keep a smaller group's rows, free the rest; no-op if not gathered."""
        if self.state is not UNSHARDED:
            return
        if list(map(_requires_grad, self._unsharded)) != self._unsharded_flags:
            self._carry_flags()  # its own forward has changed them
        if self._smaller is None:
            self.reshard()
            return
        self._smaller.keep()
        for store, name, param in self._smaller.swaps:
            store[name] = param
        self._release_full()
        self.state = RESHARDED

    def reshard(self) -> None:
        """Free the gathered parameters and register the sharded ones; no-op if sharded."""
        state = self.state
        if state is SHARDED:
            return
        if state is GATHERING:  # a prefetch that nobody used: over before its memory goes
            self._await_gather()
            for transport in self._taken.finishing:
                transport.release()
        for store, name, param in self._to_sharded:
            store[name] = param
        if self._smaller is not None:
            self._smaller.release()
        if state is not RESHARDED:
            self._release_full()
        else:
            self._follow_smaller()
        self.state = SHARDED

    def reshard_unless_hidden(self) -> None:
        """Let the sharded parameters be registered; what is hidden stays for who may read it."""
        if self.state is not HIDDEN:
            self.reshard()

    def hide(self) -> None:
        """Register the sharded parameters, with their gradients; what is gathered stays in memory.

        No-op if nothing is gathered.
        """
        if self.state is UNSHARDED:
            for store, name, param in self._to_sharded:
                store[name] = param
            self.state = HIDDEN

    def show(self) -> None:
        """Register what is gathered and was hidden."""
        if self.state is not HIDDEN:
            raise refused("show", self.name, self.state)
        for store, name, param in self._to_unsharded:
            store[name] = param
        self.state = UNSHARDED

    @property
    def tells_references(self) -> bool:
        """Whether it can be told who else may read what is gathered."""
        return COUNTS_ARE_TRUE and self._extension is None

    @property
    def is_referred_to(self) -> bool:
        """Whether anybody else may read what is gathered: a graph, or who has kept a parameter."""
        if not self.tells_references:
            return True
        return any(map(operator.gt, self._count_references(), self._references))

    def _count_references(self) -> list[int]:
        """To the gathered memory and to each gathered parameter (see `core.params.gradients`)."""
        gathered = [param.unsharded for param in self.params]
        return [self._full.references(), *map(sys.getrefcount, gathered)]

    def _follow_smaller(self) -> None:
        for param in self.params:
            param.follow_smaller()

    def abandon(self) -> None:
        """Free what an exception left half way; COMPUTE is behind the other lanes."""
        self.reshard()
        if self._full is not None:
            self._release_full()
        for reduction in self._reductions:
            reduction.abandon()

    def settle(self) -> None:
        """Block the host until no copy reads shards that it may write then (I8)."""
        if ShardReaders.waiting:
            ShardReaders.finish()
        if self._loaded_event is not None:
            self.streams.synchronize(self._loaded_event, "host after copy-in")
            self._loaded_event = None

    def _release_full(self) -> None:
        if not self._keeps_storage:
            self._full.release()
            if self._extension is not None:
                self._extension.free()
        if self._mirror is not None:
            self._mirror.release()

    def free_if_outdated(self) -> None:
        """Free parameters that were gathered before an optimizer step: they have changed since."""
        if self.state is not SHARDED and self._gathered_at != OptimizerSteps.count:
            if self.state is HIDDEN:  # a graph that reads them raises, as it would without sharding
                self.forbid_reading()
            self.reshard()

    def forbid_reading(self) -> None:
        """Let a backward raise that reads parameters while they are freed."""
        for param in self.params:
            param.forbid_reading()
        self._versions = list(map(_version, self._watched))

    def _await_gather(self) -> None:
        try:
            while self._works:  # one whose wait is interrupted is not over
                self._works[-1].wait()
                self._works.pop()
        except RuntimeError as error:
            self._works.pop()  # it has failed, and is not waited for again
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise communication_error("all-gather", self.name, error) from error
        if self._gathered_event is not None and self._taken.launches:
            self.streams.wait(COMPUTE, self._gathered_event, "compute after all-gather")

    def refresh_requires_grad(self) -> None:
        """Carry ``requires_grad`` from one form of a parameter to the other, if it changed.

        What users had at hand is compared: shards here, what is gathered where they had that.
        """
        with DisableTorchFunctionSubclass():  # see `fsdp2.core.params.param`
            changed = list(map(_requires_grad, self._sharded)) != self._sharded_flags
        if changed:
            self._carry_flags()
        thawed = self._reduces_frozen and not self._accumulated
        if thawed or (self._rebinds and not self._has_partial_sums):
            self._bind_changed_reductions()

    def _carry_flags(self) -> None:
        if follow_requires_grad(self.params):
            self._bind_changed_reductions()
        self._sharded_flags = list(map(_requires_grad, self._sharded))
        self._unsharded_flags = list(map(_requires_grad, self._unsharded))

    def _bind_changed_reductions(self) -> None:
        BIND.debug("'%s' binds its reductions: others take gradients now", self.name)
        self.bind_reductions()

    # ---- what users write by hand

    def take_back(self, stays: bool = True) -> None:
        """Look at what the user had at hand while it stayed gathered.

        Args:
            stays: whether it is used once more, and not freed now.

        Raises:
            ShardingStateError: a gathered parameter was written, which is lost where it is freed.
        """
        if self.state is not UNSHARDED:
            return
        if list(map(_requires_grad, self._unsharded)) != self._unsharded_flags:
            self._carry_flags()
        if written := self.written:
            refuse_written(written)

    @property
    def written(self) -> str | None:
        """Name of a gathered parameter that an operator has written in place since the last look.

        `None` if there is none; so it is of those that are their shards, on one rank.
        """
        before = self._versions
        if list(map(_version, self._watched)) == before:
            return None
        self._versions = list(map(_version, self._watched))
        pairs = zip(self._watched, before, self._versions, strict=True)
        return next(getattr(full, GATHERED) for full, old, now in pairs if old != now)

    # ---- gradients

    def accumulate(self) -> None:
        """Keep this backward's gradients, unreduced, in the reduce dtype."""
        self._accumulated = True
        for reduction in self._reductions:
            for member in reduction.members:
                member.accumulate(reduction.reduce_dtype)

    def collect(
        self, all_reduce: bool, fill: bool, again: bool = False
    ) -> list[tuple[Reduction, Job]]:
        """Take the gradients that are there; empty where there is nothing to reduce, else of all.

        Args:
            all_reduce: whether the reduction takes partial sums, too.
            fill: whether absent gradients are taken as zeros, if the user asked that of the group.
            again: whether it is the second time in a backward: hardly anything is there.
        """
        summed, self._accumulated = self._accumulated, False
        zeros = fill and self.options.reduce_unused
        if zeros and not self.bound:
            self.bind()  # of a unit that no forward has called yet
        jobs: list[tuple[Reduction, Job | None]] = []
        idle = False
        for reduction in self._reductions:
            job = None
            if not again or fill or reduction.has_work:
                job = reduction.collect(zeros, all_reduce, summed)
            idle = idle or job is None
            jobs.append((reduction, job))
        if idle:
            return with_zeros(jobs)
        return cast(list[tuple[Reduction, Job]], jobs)

    def reduce(
        self, jobs: list[tuple[Reduction, Job]], all_reduce: bool
    ) -> PendingReduction | None:
        """Reduce collected gradients into the sharded parameters' ``.grad``.

        Args:
            jobs: what `collect` returned.
            all_reduce: whether copies are summed too, not kept as partial sums for later.

        Returns:
            What is on its way, or ``None`` if nothing is: one rank has nothing to communicate.
        """
        if torch.is_grad_enabled():  # not in a backward, but for one with create_graph=True
            with torch.no_grad():
                pending = self._launch_reduction(self, jobs, all_reduce)
        else:
            pending = self._launch_reduction(self, jobs, all_reduce)
        return pending

    def discard_gradients(self) -> None:
        """Drop gradients that are not reduced yet."""
        self._accumulated = False
        for param in self.params:
            param.drop_gradient()
        for reduction in self._reductions:
            reduction.discard()
        if self._rebinds:
            self.bind_reductions()

    # ---- state

    def _require_sharded(self, action: str) -> None:
        if self.state is not SHARDED:
            raise ShardingStateError(
                f"cannot {action} '{self.name}' while its parameters are {self.state.value}; "
                f"call reshard() on it first"
            )
