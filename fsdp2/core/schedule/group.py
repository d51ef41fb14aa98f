"""One communication unit: a group of parameters that are gathered and reduced together.

    state    GroupState       see `fsdp2.core.schedule.states`
    shard    FlatBuffer       [segment | segment …]   this rank's rows, permanently
    bound    Bound            buffers, transports, gathered parameters, reductions, once it is used;
                              before, `UNBOUND`, which has none of them

    ParamGroup.bind ──> Bound.of              all of it
                   └──> Bound.reroute         all-gathers alone; autograd may hold the parameters
    set_options, … ──> Bound.bind_reductions  reductions alone

The group owns this state and nothing else does; the scheduler decides when to move it. A `Bound` is
made as a whole. After parameters were moved or changed, the next bind makes another, which takes
over the reductions whose partial sums wait for an all-reduce.
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import cast
from weakref import WeakMethod

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.tensor import DTensor

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions
from fsdp2.core.device.buffers import Buffer, FlatBuffer, SwappedBuffer, TransientBuffer
from fsdp2.core.device.collectives import Collectives, Work
from fsdp2.core.device.kernels import META, Kernels
from fsdp2.core.device.process_groups import meet
from fsdp2.core.device.streams import COMPUTE, Event, Streams
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.gather.extension import Extension, plain_tensors
from fsdp2.core.gather.keeping import (
    Keeping,
    NodeRows,
    SmallerGroup,
    SmallerRows,
    make_gathers,
)
from fsdp2.core.gather.program import Gather, Launched, combined, gather_inline, gather_on_lanes
from fsdp2.core.gather.segments import from_host
from fsdp2.core.layout.layout import GroupLayout, ParamShape, Segment, Slot, Transport, layout_of
from fsdp2.core.layout.levels import node_segments, pieces_layout
from fsdp2.core.layout.logs import BIND, bind_reason
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.params.gradients import COUNTS_ARE_TRUE, Gradients, gradients_of
from fsdp2.core.params.param import (
    ShardedParam,
    Swap,
    compute_dtype,
    follow_requires_grad,
    gathered_name,
    refuse_written,
    shapes_of,
)
from fsdp2.core.progress import Counts, ShardReaders, communication_error
from fsdp2.core.reduce.binding import bind_reduction, hand_over
from fsdp2.core.reduce.reduction import (
    Job,
    Jobs,
    PendingReduction,
    Reduction,
    reduce_inline,
    reduce_on_lanes,
    with_zeros,
)
from fsdp2.core.reduce.spec import ReductionSpec, is_direct, reduction_spec
from fsdp2.core.schedule.states import (
    GATHERING,
    GRANTED,
    HIDDEN,
    RESHARDED,
    RETAINED,
    SHARDED,
    UNSHARDED,
    GroupState,
    refused,
)

is_meta = operator.attrgetter("is_meta")
requires_grad = operator.attrgetter("requires_grad")
version = operator.attrgetter("_version")

BOUND, ROUTE, ALL = range(3)
"""The next gather binds nothing; another way to gather; or everything, because parameters or
buffers are no longer those that were bound."""


def _nobody() -> None:
    """The owner of a group that belongs to no unit yet."""


class LastGather:
    """The shards that a group gathered last, or rows of them, as far as they are known.

    If it ``watches``, because a later use may find what was gathered (`fsdp2.core.schedule.reuse`),
    gathers take fingerprints, by ``reads`` of a flat shard; ``steps`` is `Counts.steps` then. It is
    ``dropped`` if the user has freed it, which other ranks do not know yet.
    """

    dropped = watches = records = recorded = False
    fingerprint: torch.Tensor | None = None
    reads: tuple[FlatBuffer, Callable[[], torch.Tensor]] | None = None
    steps = -1


@dataclass
class Claim:
    """The contents that a user was given who has unsharded a group (see `observers`).

    ``before`` is the fingerprint of what was gathered, ``None`` where it was compared since;
    ``lost`` tells whether a write was lost when it was freed.
    """

    before: torch.Tensor | None = None
    lost: torch.Tensor | None = None


class ParamGroup:
    """Parameters that share collectives; ``options`` are those of the unit that it belongs to.

    Attributes:
        name: name of the unit, for messages.
        replicas: collectives of the replicate axis, if any.
        between: those of the ranks that hold pieces of the same rows, with masters sharded over two
            levels.
        offload: set if shards and gradients are in CPU memory apart from the device.
        layout: without segments where a move of rows was interrupted.
        shard: this rank's rows of all parameters but extended ones, by ``layout``, or their pieces.
        reducers: collectives of the gradients: ``collectives``, or over a process group of their
            own.
        smaller_group: the group to reshard to after forward, if not this one or none.
        last_gather: knowledge of the shards that were gathered last.
        claim: the contents that a user was given, where he has unsharded it.
        fills: whether absent gradients are zeros when it is reduced, later than at its unit's end.
        gathered_at: `Counts.steps` when its shards were gathered last, or rows of them.
        owner: returns the unit to which it belongs; ``None`` once that is gone.
        in_use: whether a unit that uses it is running, if several do; it is not freed then.
        is_whole: whether its parameters are replicated on every rank, so that nothing is gathered.
        stale: what the next gather binds: `BOUND`, `ROUTE` or `ALL`.
    """

    shard: FlatBuffer
    smaller_group: SmallerGroup | None = None
    claim: Claim | None = None
    _loaded_event: Event = None

    def __init__(
        self,
        name: str,
        params: Sequence[ShardedParam],
        options: GroupOptions,
        collectives: Collectives,
        streams: Streams,
        kernels: Kernels,
        device: torch.device,
        *,
        replicas: Collectives | None = None,
        between: Collectives | None = None,
        offload: CPUOffloadPolicy | None = None,
        gradients_of: Callable[[Sequence[ShardedParam]], Gradients] = gradients_of,
    ) -> None:
        self.name = name
        self.params = list(params)
        self.options = options
        self.collectives: Collectives = collectives
        self.reducers: Collectives = collectives
        self.replicas, self.between = replicas, between
        self.streams, self.kernels, self.device = streams, kernels, device
        self.offload = offload
        self.gradients_of = gradients_of
        self._launch_gather: Callable[..., Launched] = gather_inline
        if streams.asynchronous:
            self._launch_gather = functools.partial(gather_on_lanes, event=streams.make_event())
        self._launch_reduction = reduce_on_lanes if streams.asynchronous else reduce_inline
        self.state = SHARDED
        self.bound = UNBOUND
        self.last_gather = LastGather()
        self.stale = ALL
        self.owner: Callable[[], object | None] = _nobody
        self.in_use: Callable[[], bool] | None = None
        self.is_whole = self.fills = False
        self._accumulated = False
        self.gathered_at = -1
        self._taken = UNBOUND.gather  # that was issued last
        self._works: list[Work] = []
        self._gathered_event: Event = None
        self.layout = NOWHERE
        self.adopt()

    @property
    def base(self) -> ParamGroup:
        """Itself: what `Observed` stands around (`fsdp2.core.schedule.observers`)."""
        return self

    @property
    def is_outdated(self) -> bool:
        """Whether it was gathered before an optimizer step: its parameters have changed since."""
        return not self.state.is_sharded and self.gathered_at != Counts.steps

    @property
    def is_unsharded(self) -> bool:
        """Whether the gathered parameters are registered."""
        return self.state is UNSHARDED

    @property
    def reuses_rows(self) -> bool:
        """Whether the next gather communicates nothing of what is kept."""
        return self.has_rows and not self.stale

    def axes_of(self, rows: bool) -> list[Collectives]:
        """Collectives of the ranks that gather it; with ``rows`` only into rows it keeps."""
        near = rows and self.between is not None and not self.keeps_whole_rows
        axes = (self.between,) if near else (self.collectives, self.between)
        return [axis for axis in axes if axis is not None and axis.size > 1]

    @property
    def is_known(self) -> bool:
        """Whether a look at its shards tells if what it gathered is valid: no step has followed."""
        last = self.last_gather
        stepped = last.recorded and last.steps != Counts.steps
        # A step has written the shards, unless all are frozen.
        return last.fingerprint is not None and not (stepped and self.bound.reductions)

    @property
    def has_rows(self) -> bool:
        """Whether rows of an all-gather are kept that later ones are to reuse."""
        keeping = self.bound.keeping
        return keeping is not None and keeping.current

    @property
    def accumulates(self) -> bool:
        """Whether gradients of backwards without sync, or partial sums, are waiting."""
        return self._accumulated or self.bound.has_partial_sums

    @property
    def is_over(self) -> bool:
        """Whether it is sharded, and nothing is there to reduce at its unit's end."""
        if not self.state.is_sharded:
            return False
        if self.fills and self.in_use is not None:  # the units that use it are over now
            return False
        if self.is_whole:
            return True
        for reduction in self.bound.reductions:  # noqa: SIM110  # asked at the end of every backward
            if reduction.has_work:
                return False
        return True

    @property
    def has_gradients(self) -> bool:
        """Whether gathered parameters have gradients that no reduction has taken."""
        return any(reduction.gradients.waiting() for reduction in self.bound.reductions)

    @property
    def has_grad_hooks(self) -> bool:
        """Whether users' hooks run when gradients are delivered: they may write the shards."""
        return any(param.has_grad_hooks for param in self.params)

    @property
    def shard_layout(self) -> GroupLayout:
        """The layout of what optimizers step in the flat shard: of rows, or of their pieces."""
        return self.layout.pieces or self.layout

    @property
    def is_retained(self) -> bool:
        """Whether sharded parameters are registered, and what was gathered is still there."""
        return self.state is RETAINED or self.state is GRANTED

    @property
    def keeps_rows(self) -> bool:
        """Whether rows of a gather stay, so that others reuse them (invariant I17)."""
        if self.between is not None and self.options.keep_rows is not False:
            return True
        kept_near = bool(self.options.keep_rows) and self.smaller_group is not None
        return kept_near or self.keeps_whole_rows

    @property
    def keeps_whole_rows(self) -> bool:
        """Whether these are the rows of all ranks, not a node's or a smaller group's."""
        near = self.between is not None or self.smaller_group is not None
        wanted = self.options.wire.differences or (bool(self.options.keep_rows) and not near)
        return wanted and self.collectives.size > 1

    # ---- layout and binding

    def adopt(self) -> None:
        """Lay the group out and move every parameter's rows into one flat shard.

        Called when the group is made, and again when `.to()`, `load_state_dict(assign=True)` or
        the like gave a parameter other memory or another dtype (invariant I5).
        """
        self._require_sharded("adopt")
        self._move_to(self._plan(shapes_of(self.params, self.options)))

    @torch.inference_mode(False)  # an optimizer writes the shards later
    def _move_to(self, layout: GroupLayout) -> None:
        self.rebind()
        self.layout = NOWHERE  # until all have moved: where this is interrupted, all move again
        pieces = layout.pieces
        kept, cut_by = (layout, self.collectives) if pieces is None else (pieces, self.between)
        assert cut_by is not None
        shard = self._new_shard(kept)
        rows = kept.rows_of(cut_by.rank)
        for segment, places in zip(kept.segments, rows, strict=True):
            if segment.transport is Transport.EXTENSION:
                for slot in segment.slots:
                    self.params[slot.index].adopt_extended(slot, self.offload)
                continue
            start, numel = segment.shard_byte_offset, segment.shard_numel
            targets = shard.pieces(segment.shard_dtype, start, numel, places)
            with torch.no_grad():
                for slot, target in zip(segment.slots, targets, strict=True):
                    self.params[slot.index].adopt(slot, target)
        self.layout = layout
        self.shard = shard

    def _plan(self, shapes: Sequence[ParamShape]) -> GroupLayout:
        shared, between = self.collectives, self.between
        layout = layout_of(shapes, shared.size, shared.coalesces, self.options.pack_below)
        if between is None:
            return layout
        coded: frozenset[int] = frozenset()
        if self.options.wire.between_gather is not None:
            coded = frozenset(i for i, param in enumerate(self.params) if not param.exact)
        facts = shared.rank, between.size, between.coalesces, coded
        pieces = layout.once(("pieces", *facts), lambda: pieces_layout(layout, *facts))
        return replace(layout, pieces=pieces)

    def _new_shard(self, layout: GroupLayout) -> FlatBuffer:
        on_meta, kernels = any(map(is_meta, self.params)), self.kernels
        if self.offload is None:
            return kernels.flat(layout.shard_bytes, on_meta)
        return kernels.host_flat(layout.shard_bytes, on_meta, self.offload.pin_memory)

    def _repack(self) -> None:
        """Others of its parameters may be packed: rows move then, if there are any yet."""
        self.rebind()
        layout = self._plan(shapes_of(self.params, self.options))
        if layout == self.layout:
            return
        if (
            self.layout.shard_bytes == layout.shard_bytes
            and self.between is None
            and all(param.is_meta and not param.is_extended for param in self.params)
        ):
            self.layout = layout
        else:
            self._move_to(layout)

    def drop(self, params: Sequence[ShardedParam]) -> None:
        """Manage these no longer; the others move to a flat shard without them."""
        self._require_sharded("drop parameters of")
        self.params = [param for param in self.params if param not in params]
        if self.params:
            self.adopt()

    def rebind(self) -> None:
        """Notice changed parameters at the next gather."""
        self.stale = ALL

    def set_options(self, options: GroupOptions) -> None:
        """Take new options: reductions follow now, transports at the next gather."""
        if options is self.options:
            return
        before = self.options
        if options.all_gather is not before.all_gather or options.keep_rows is not before.keep_rows:
            self._reroute()
        repacked = options.pack_below != before.pack_below or options.wire is not before.wire
        self.options = options
        if repacked and self.state.is_sharded:
            self._repack()
        elif repacked:
            self.rebind()
        else:
            self._reduce_anew()

    def set_reducers(self, reducers: Collectives) -> None:
        """Reduce gradients over another process group of the same ranks."""
        self.reducers = reducers
        self._reduce_anew()

    def set_replicas(self, replicas: Collectives) -> None:
        """Sum over the same copies in another way."""
        self.replicas = replicas
        self._reduce_anew()

    def bind_launches(self) -> None:
        """Bind collectives and copies again, such as those that a trace has let report."""
        self._reroute()
        self._reduce_anew()

    def set_smaller_group(self, smaller: SmallerGroup | None) -> None:
        """Choose the ranks to reshard to after forward; ``None`` for all or none."""
        if smaller is not self.smaller_group:
            self._reroute()
        self.smaller_group = smaller

    def _reroute(self) -> None:
        self.stale = self.stale or ROUTE

    def reregister(self, module: nn.Module | None = None) -> None:
        """After a state dict was loaded into ``module``, or any: manage what is registered now."""
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
        bound = self.bound
        for sharded, local in bound.locals:  # still backed as they were (`swap_tensors` …)?
            if sharded._local_tensor is not local:
                self.rebind()
                break
        if not self.stale:
            return
        self._require_sharded("bind")
        for param in self.params:
            if hasattr(param.sharded, "_in_backward_optimizers"):
                raise coded(
                    ShardingStateError,
                    "in-backward-optimizers",
                    f"parameter '{param.name}' has optimizers of _apply_optimizer_in_backward, "
                    f"which hooks into a node of autograd that no backward of a sharded parameter "
                    f"runs; pass them to its register_post_accumulate_grad_hook after fully_shard",
                )
        meet(self.collectives.group, self.device, self.name)
        for others in (self.replicas, self.between):
            if others is not None:
                meet(others.group, self.device, self.name)
        if self.stale == ROUTE:
            BIND.debug("'%s' binds: another way to gather was chosen", self.name)
            bound.reroute(self)
        else:
            self.follow_params()
            self.bound = Bound.of(self, bound, self._accumulated)
        self.stale = BOUND

    def follow_params(self) -> None:
        """Lay the group out again, if parameters were changed or moved."""
        offloads = self.offload is not None and self.device != META
        home = torch.device("cpu") if offloads else self.device
        offloaded = self.offload is not None
        for param in self.params:
            param.check_usable(home, offloaded)
        follow_requires_grad(self.params)
        shapes = shapes_of(self.params, self.options)
        moved = [param.name for param in self.params if not param.is_in_place]
        before = None if self.bound is UNBOUND else self.layout
        if BIND.isEnabledFor(logging.DEBUG):
            BIND.debug("'%s' binds: %s", self.name, bind_reason(before, shapes, moved))
        layout = self._plan(shapes)
        if layout != self.layout or moved:
            self._move_to(layout)

    def _reduce_anew(self) -> None:
        """Another way to reduce was chosen: build the steps, unless the next gather does so."""
        if self.stale != ALL:
            self.bound.bind_reductions(self, self._accumulated)

    # ---- gather and free

    def start_unshard(self) -> None:
        """Issue the all-gather; returns while it may still run.

        The side lanes wait for COMPUTE as it is now: whatever used the memory that the gathered
        buffer is given was issued there before (invariant I2).
        """
        bound, state = self.bound, self.state
        if state is SHARDED or state is RETAINED:
            if self.last_gather.watches:
                self._look_at_shards(self.last_gather)
            keeping, gather = bound.keeping, bound.gather
            if keeping is not None and keeping.current:
                gather = keeping.again
            self.gathered_at = Counts.steps
        elif state is RESHARDED:
            assert bound.smaller is not None
            gather = bound.smaller.gather
            self._follow_smaller()
        else:
            raise refused("start_unshard", self.name, state)
        self.state, self._taken = GATHERING, gather
        if gather.early:
            bound.full.acquire()
        if gather.launches:
            for run in gather.acquire:
                run()
            launched = self._launch_gather(self.streams, gather, self.name, self._works)
            copied, self._gathered_event = launched
            if gather.loads:
                self._loaded_event = copied

    def finish_unshard(self) -> None:
        """Make COMPUTE wait for the all-gather and register the gathered parameters."""
        if self.state is not GATHERING:
            raise refused("finish_unshard", self.name, self.state)
        bound, gather = self.bound, self._taken
        self._await_gather(gather)
        if gather.finishes:
            self._finish_copies(bound, gather)
        if bound.smaller is not None:
            bound.smaller.release()
        for store, name, param in bound.to_unsharded:
            store[name] = param
        self.state = UNSHARDED

    def _finish_copies(self, bound: Bound, gather: Gather) -> None:
        if not gather.early:
            bound.full.acquire()
        for run in gather.finish:
            run()
        if bound.mirror is not None and gather.loads and not bound.keeps_mirror:
            bound.mirror.release()

    def shard_smaller(self) -> None:
        """After forward: keep a smaller group's rows, free the rest; no-op if not gathered."""
        if self.state is not UNSHARDED or (self.in_use is not None and self.in_use()):
            return
        bound = self.bound
        if list(map(requires_grad, bound.unsharded)) != bound.unsharded_flags:
            self._carry_flags(bound)  # its own forward has changed them
        if bound.smaller is None:
            self.reshard()
            return
        bound.smaller.keep()
        for store, name, param in bound.smaller.swaps:
            store[name] = param
        self._release_full(bound)
        self.state = RESHARDED

    def reshard(self, forced: bool = False) -> None:
        """Free gathered parameters, if ``forced`` or no other unit that uses them is running."""
        state, bound = self.state, self.bound
        if state.is_sharded or (self.in_use is not None and not forced and self.in_use()):
            return
        if state is GATHERING:  # a prefetch that nobody used: over before its memory goes
            self._await_gather(self._taken)
            for run in self._taken.release:
                run()
        for store, name, param in bound.to_sharded:
            store[name] = param
        if bound.smaller is not None:
            bound.smaller.release()
        if state is not RESHARDED:
            self._release_full(bound)
        else:
            self._follow_smaller()
        self.state = SHARDED

    def hide(self, to: GroupState = HIDDEN) -> None:
        """Register the sharded parameters; what is gathered stays in memory, as ``to``: `HIDDEN`,
        `RETAINED` or `GRANTED`. No-op without it, or if another unit that uses it runs.
        """
        if self.state is UNSHARDED and not (self.in_use is not None and self.in_use()):
            for store, name, param in self.bound.to_sharded:
                store[name] = param
            self.state = to

    def grant(self) -> None:
        """The shards are those that were gathered: the next use needs no all-gather."""
        if self.is_retained:
            self.state, self.gathered_at = GRANTED, Counts.steps

    def watch(self, wanted: bool, records: bool) -> None:
        """Set whether the next gathers take fingerprints of the shards that they read."""
        if wanted:
            self.last_gather.watches, self.last_gather.records = True, records
        elif not self.is_retained:
            self.last_gather = LastGather()

    def fingerprint(self) -> torch.Tensor | None:
        """Sums of the bytes that an all-gather reads; ``None`` if replaced since, or freed."""
        bound, last, shard = self.bound, self.last_gather, self.shard
        if last.dropped or not last.watches or self.stale == ALL:
            return None
        if any(sharded._local_tensor is not local for sharded, local in bound.locals):
            return None
        if last.reads is not None and last.reads[0] is shard and bound.extension is None:
            return last.reads[1]()
        found = [shard.view(torch.uint8, 0, (shard.nbytes,))] if shard.nbytes else []
        for param in self.params if bound.extension is not None else ():
            found += plain_tensors(param.local) if param.is_extended else ()
        last.reads = shard, self.kernels.bind_fingerprint(found)
        return last.reads[1]()

    def _look_at_shards(self, last: LastGather) -> None:
        """Before an all-gather: note which contents it gathers, if a later use may ask."""
        last.dropped = False
        if not self.reuses_rows:
            last.fingerprint = self.fingerprint()
            assert last.fingerprint is not None
            last.steps, last.recorded = Counts.steps, last.records

    def drop_for_user(self) -> None:
        """As `forget_rows`, on one rank perhaps: others ask this one before they use theirs."""
        last = self.last_gather
        seen = last.fingerprint
        self.forget_rows()
        last.fingerprint, last.dropped = seen, seen is not None

    def drop_retained(self) -> None:
        """Free what is retained; what is known of the shards counts no more."""
        if self.is_retained:
            self._release_full(self.bound)
            self.state = SHARDED
        self.last_gather.dropped, self.last_gather.fingerprint = False, None

    def show(self) -> None:
        """Register what is gathered and was hidden, or is retained and granted."""
        if self.state is not HIDDEN and self.state is not GRANTED:
            raise refused("show", self.name, self.state)
        for store, name, param in self.bound.to_unsharded:
            store[name] = param
        self.state = UNSHARDED

    @property
    def is_referred_to(self) -> bool:
        """Whether a graph or a user may read what is gathered; also if counts cannot tell."""
        bound = self.bound
        if not COUNTS_ARE_TRUE or bound is UNBOUND or bound.extension is not None:
            return True
        return any(map(operator.gt, bound.count_references(self.params), bound.references))

    def forget_rows(self) -> None:
        """Make the next all-gather fetch everything again: shards may have changed."""
        self.drop_retained()
        if self.bound.keeping is not None:
            self.bound.keeping.forget()
            if self.state not in (GATHERING, RESHARDED):  # nobody reads them, or will in backward
                self.bound.keeping.free()

    def _follow_smaller(self) -> None:
        for param in self.params:
            param.follow_smaller()

    def abandon(self) -> None:
        """Free the remains of an exception; COMPUTE has waited for the other lanes."""
        bound = self.bound
        if bound.keeping is not None:
            bound.keeping.lose()
        self.drop_retained()
        self.last_gather = LastGather()
        self.reshard(forced=True)
        if bound is not UNBOUND:
            self._release_full(bound)
        for reduction in bound.reductions:
            reduction.abandon()
        if bound.nodes is not None:
            bound.nodes.rows.release()

    def settle(self) -> None:
        """Block the host until no copy reads shards that it may write then (I8)."""
        if ShardReaders.waiting:
            ShardReaders.finish()
        if self._loaded_event is not None:
            self.streams.synchronize(self._loaded_event, "host after copy-in")
            self._loaded_event = None

    def _release_full(self, bound: Bound) -> None:
        if not self.options.keep_storage:
            bound.full.release()
            if bound.extension is not None:
                bound.extension.free()
        if bound.mirror is not None:
            bound.mirror.release()

    def forbid_reading(self) -> None:
        """Let a backward raise that reads parameters while they are freed."""
        for param in self.params:
            param.forbid_reading()
        if self.bound.watched:
            self.bound.versions = list(map(version, self.bound.watched))

    def _await_gather(self, gather: Gather) -> None:
        try:
            while self._works:  # one whose wait is interrupted is not over
                self._works[-1].wait()
                self._works.pop()
        except RuntimeError as error:
            self._works.pop()  # it has failed, and is not waited for again
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise communication_error("all-gather", self.name, error) from error
        if self._gathered_event is not None and gather.launches:
            self.streams.wait(COMPUTE, self._gathered_event, "compute after all-gather")

    def refresh_requires_grad(self) -> None:
        """Copy changed ``requires_grad`` from the form that users had access to, to the other."""
        bound = self.bound
        with DisableTorchFunctionSubclass():  # see `fsdp2.core.params.param`
            changed = list(map(requires_grad, bound.sharded)) != bound.sharded_flags
        if changed:
            self._carry_flags(bound)
        thawed = bound.reduces_frozen and not self._accumulated
        if thawed or (bound.rebinds and not bound.has_partial_sums):
            self._bind_changed_reductions()

    def _carry_flags(self, bound: Bound) -> None:
        if follow_requires_grad(self.params):
            self._bind_changed_reductions()
        bound.sharded_flags = list(map(requires_grad, bound.sharded))
        bound.unsharded_flags = list(map(requires_grad, bound.unsharded))

    def _bind_changed_reductions(self) -> None:
        BIND.debug("'%s' binds its reductions: others take gradients now", self.name)
        self.bound.bind_reductions(self, self._accumulated)

    # ---- what users write by hand

    def take_back(self, stays: bool = True) -> None:
        """Raise if the user wrote a gathered parameter; observers also see if it ``stays``."""
        if self.state is not UNSHARDED:
            return
        bound = self.bound
        if list(map(requires_grad, bound.unsharded)) != bound.unsharded_flags:
            self._carry_flags(bound)
        if written := self.written:
            refuse_written(written)

    @property
    def written(self) -> str | None:
        """Name of a gathered parameter, not its shard, that was written since the last look."""
        bound = self.bound
        before = bound.versions
        if list(map(version, bound.watched)) == before:
            return None
        bound.versions = list(map(version, bound.watched))
        pairs = zip(bound.watched, before, bound.versions, strict=True)
        return next(gathered_name(full) for full, old, now in pairs if old != now)

    # ---- gradients

    def accumulate(self) -> None:
        """Keep this backward's gradients, unreduced, in the reduce dtype."""
        self._accumulated = True
        for reduction in self.bound.reductions:
            for member in reduction.members:
                member.accumulate(reduction.context.spec.reduce_dtype)

    def collect(self, all_reduce: bool, fill: bool, again: bool = False) -> Jobs:
        """Take the gradients that are there; empty where there is nothing to reduce, else of all.

        Args:
            all_reduce: whether the reduction takes partial sums, too.
            fill: whether absent gradients are taken as zeros, if the user asked that of the group.
            again: whether it is the second time in a backward: hardly anything is there.
        """
        summed, self._accumulated = self._accumulated, False
        zeros = fill and self.options.reduce_unused
        if zeros and self.stale == ALL:
            self.bind()  # of a unit that no forward has called yet
        jobs: list[tuple[Reduction, Job | None]] = []
        idle = False
        for reduction in self.bound.reductions:
            job = None
            if not again or fill or reduction.has_work:
                job = reduction.collect(zeros, all_reduce, summed)
            idle = idle or job is None
            jobs.append((reduction, job))
        if idle:
            return with_zeros(jobs)
        return cast(Jobs, jobs)

    def reduce(self, jobs: Jobs, all_reduce: bool) -> PendingReduction | None:
        """Reduce collected gradients to ``.grad`` or partial sums; ``None`` if nothing runs."""
        if torch.is_grad_enabled():  # not in a backward, but for one with create_graph=True
            with torch.no_grad():
                return self.reduce(jobs, all_reduce)
        return self._launch_reduction(self.streams, self.name, self.params, jobs, all_reduce)

    def discard_gradients(self) -> None:
        """Drop gradients that are not reduced yet."""
        self._accumulated = self.fills = False
        for param in self.params:
            param.drop_gradient()
        for reduction in self.bound.reductions:
            reduction.discard()
        if self.bound.rebinds:
            self.bound.bind_reductions(self, self._accumulated)

    # ---- state

    def _require_sharded(self, action: str) -> None:
        self.drop_retained()
        if self.state is not SHARDED:
            raise coded(
                ShardingStateError,
                "not-sharded-state",
                f"cannot {action} '{self.name}' while its parameters are {self.state.value}; "
                f"call reshard() on it first",
            )


NOWHERE = GroupLayout(0, (), 0, 0, 0)
"""The layout of a group whose rows are not laid out."""


class Bound:
    """Everything that binding creates for a group; ``former`` is its previous record. The class has
    what a group has that was never bound (`UNBOUND`).

    Attributes:
        full: the gathered rows, between acquire and release.
        mirror: the device's copy of offloaded shards, while a gather reads them (decision 8).
        nodes: rows that are gathered inside a node, if masters are sharded over two levels.
        keeping: rows of earlier gathers, if they are kept; while they are current, the next gather
            is its own, and otherwise ``gather``.
        keeps_mirror: whether gathered parameters are views of the mirror.
        to_sharded: stores that register sharded parameters; ``to_unsharded``, gathered ones.
        locals: sharded parameters, and their local tensors when it was bound.
        sharded_flags: whether the sharded parameters required grad at the last comparison.
        watched: the gathered parameters in which a user's write would be lost.
        versions: the number of fsdp2's own writes to each.
        references: the number of references to the gathered tensors while they are unused.
        reduces_frozen: whether reductions include parameters that no longer require grad.
        rebinds: whether some reductions are out of date, but have partial sums.
    """

    full: TransientBuffer
    mirror: TransientBuffer | None = None
    extension: Extension | None = None
    nodes: NodeRows | None = None
    smaller: SmallerRows | None = None
    keeping: Keeping | None = None
    gather = Gather()
    locals: Sequence[tuple[DTensor, torch.Tensor]] = ()
    sharded: Sequence[nn.Parameter] = ()
    reductions: Sequence[Reduction] = ()
    rebinds = reduces_frozen = False

    def __init__(self) -> None:
        self.to_sharded: list[Swap] = []
        self.to_unsharded: list[Swap] = []
        self.unsharded: list[nn.Parameter] = []
        self.sharded_flags: list[bool] = []
        self.unsharded_flags: list[bool] = []
        self.watched: list[nn.Parameter] = []
        self.versions: list[int] = []

    @classmethod
    def of(cls, group: ParamGroup, former: Bound, waiting: bool) -> Bound:
        """Bind all of a group."""
        self = cls()
        layout, kernels = group.shard_layout, group.kernels
        self.full = kernels.transient(group.layout.full_bytes, f"gathered {group.name}")
        if group.offload is not None:
            self.mirror = kernels.transient(layout.shard_bytes, f"shards of {group.name}")
            # Views are made over allocated memory only; it is freed at the end, as `full` is.
            self.mirror.acquire()
        # Made again: its parameters may be others. `reroute` keeps it, with its hooks' tensors.
        self.extension = self._extension_of(group)
        self._bind_gathers(group)
        self._bind_params(group)
        # Until `bind_reductions` has taken partial sums (I9) and residuals over from them.
        self.reductions = former.reductions
        self.bind_reductions(group, waiting)
        self._bind_shards(group, stays=False)
        if self.keeping is not None and former.keeping is not None:
            # `reroute` calls `follow`; here, shards may be others than those that were gathered.
            self.keeping.inherit(former.keeping)
        return self

    def reroute(self, group: ParamGroup) -> None:
        """Bind another way to gather; the gathered parameters stay the objects that they are."""
        # New views of the buffer need its memory.
        self.full.acquire()
        if self.mirror is not None:
            self.mirror.acquire()
        self._bind_gathers(group)
        self._bind_shards(group, stays=group.options.keep_storage)

    def _extension_of(self, group: ParamGroup) -> Extension | None:
        """All parameters with all-gather hooks; it outlives changes of how to gather."""
        made: WeakMethod[Callable[[ShardedParam], None]] = WeakMethod(self._bind_swaps)
        where = group.collectives, group.kernels, group.options, group.device, group.offload
        for segment in group.layout.segments:
            if segment.transport is Transport.EXTENSION:
                return Extension(segment, group.params, *where, made)
        return None

    def _bind_gathers(self, group: ParamGroup) -> None:
        layout, masters, kernels = group.layout, group.shard_layout, group.kernels
        self._load: Gather | None = None
        if self.mirror is not None and masters.shard_bytes:
            self._load = from_host(self.mirror, group.shard, masters.shard_bytes, kernels)
        shard = group.shard if self.mirror is None else self.mirror
        segments: Sequence[Segment] = layout.segments
        self.nodes = None
        if group.between is not None:
            own = group.name, masters, shard, group.between, kernels, group.device
            self.nodes = NodeRows(*own, group.options.wire.between_gather)
            shard, segments = self.nodes.rows, node_segments(layout)
            coded = [s for s in segments if s.transport is Transport.CODED]
            self.nodes.fill_gaps(coded, group.collectives.rank)
        self.parts = make_gathers(
            [s for s in segments if s.transport is not Transport.EXTENSION],
            shard,
            self.full,
            group.collectives,
            kernels,
            group.options.all_gather,
            group.device,
            group.options.wire.gather,
            group.options.wire.differences,
            group.keeps_whole_rows,
        )
        if self.extension is not None:
            # Changed in place, because its first gather has made parameters that autograd may hold.
            self.extension.comm = group.options.all_gather
            self.parts.append(self.extension.operations())
        found = combined(self.parts)
        # One rank without a cast: gathered parameters are views of the mirror, which stays with
        # them.
        self.keeps_mirror = found.aliases
        found = found if self.nodes is None else self.nodes.before(found)
        self.gather = found if self._load is None else combined([self._load, found])

    def _bind_params(self, group: ParamGroup) -> None:
        """Make the gathered parameters (extended ones in their first gather), and stores."""
        with torch.inference_mode(False), torch.no_grad():
            for gather in self.parts:
                memory: Buffer = self.full
                if gather.aliases:
                    memory = group.shard if self.mirror is None else self.mirror
                for slot, gathered in gather.parameters:
                    param = group.params[slot.index]
                    param.materialize(gathered)
                    assert param.unsharded is not None
                    if isinstance(memory, SwappedBuffer):
                        memory.keep_valid(local_of(param.unsharded))
                    self._bind_swaps(param, extended=False)

    def _bind_swaps(self, param: ShardedParam, extended: bool = True) -> None:
        assert param.unsharded is not None
        for store, name in param.stores():
            self.to_sharded.append((store, name, param.sharded))
            self.to_unsharded.append((store, name, param.unsharded))
        self.unsharded.append(param.unsharded)
        self.unsharded_flags.append(param.unsharded.requires_grad)
        if not (extended or param.is_its_shard):  # whose gathers write it themselves
            self.watched.append(param.unsharded)
            self.versions.append(param.unsharded._version)

    def _bind_shards(self, group: ParamGroup, stays: bool) -> None:
        """The facts compared before an all-gather, and the rows that are kept. All views are made
        then: free what they are views of, but gathered memory that ``stays``.
        """
        backed = [param for param in group.params if hasattr(param.sharded, "_local_tensor")]
        self.locals = [(cast(DTensor, param.sharded), param.local) for param in backed]
        self.sharded = [param.sharded for param in group.params]
        self.sharded_flags = list(map(requires_grad, self.sharded))
        self.smaller = None
        # Rows of all ranks make those of a smaller group superfluous.
        if group.smaller_group is not None and not group.keeps_whole_rows:
            self.smaller = SmallerRows(
                group.smaller_group,
                group.layout,
                self.full,
                group.params,
                group.kernels,
                group.options.all_gather,
                group.device,
                group.options.pack_below,
            )
        former, self.keeping = self.keeping, None
        if group.keeps_rows:
            smaller = self.smaller if group.options.keep_rows else None
            self.keeping = Keeping(self.parts, self.gather, self._load, self.nodes, smaller)
            # If rows of a smaller group stay, later gathers read these, not the node's.
            if self.nodes is not None and smaller is None:
                self.nodes.stays = True
            self.gather = self.keeping.fresh
            if former is not None:
                self.keeping.follow(former)
        if self.mirror is not None:
            self.mirror.release()
        if self.nodes is not None:
            self.nodes.rows.release()
        if not stays:
            self.full.release()
        # Counted while no other code has them: `ParamGroup.is_referred_to` looks for more.
        self.references = self.count_references(group.params)

    def bind_reductions(self, group: ParamGroup, waiting: bool) -> None:
        """Build the reduction steps of the parameters that require grad now.

        Partial sums belong to the steps that made them, which stay bound until the all-reduce;
        parameters that they do not know get steps besides (invariant I9). Those that were frozen
        while gradients of earlier backwards are waiting still belong to it.
        """
        kept = [r for r in self.reductions if r.partial_sums.flat is not None]
        self.rebinds = bool(kept)
        known = {id(param) for reduction in kept for param in reduction.members}
        owed = {id(m) for r in self.reductions for m in r.members} if waiting else ()
        self.reduces_frozen = False
        # By equal specs, in the order of their first; which are packed, of those.
        alike: dict[ReductionSpec, list[tuple[bool, ShardedParam, Slot]]] = {}
        # Most parameters have equal facts: one spec is made, and hashed, for all of them.
        specs: dict[Hashable, tuple[ReductionSpec, list[tuple[bool, ShardedParam, Slot]]]] = {}
        for segment in group.layout.segments:
            for slot in segment.slots:
                param = group.params[slot.index]
                frozen = not param.sharded.requires_grad
                if id(param) not in known and (not frozen or id(param) in owed):
                    self.reduces_frozen = self.reduces_frozen or frozen
                    dtypes = compute_dtype(group.options, param), param.grad_dtype
                    key = (*dtypes, param.exact, param.differs_over)
                    if key not in specs:
                        spec = reduction_spec(group.options, param, group.offload, group.device)
                        specs[key] = spec, alike.setdefault(spec, [])
                    spec, members = specs[key]
                    members.append((not is_direct(spec, slot, segment.transport), param, slot))
        made = []
        with torch.inference_mode(False):  # tensors that a later backward writes to
            for spec, members in alike.items():
                members.sort(key=operator.itemgetter(0))  # those that are reduced directly first
                made.append(
                    bind_reduction(
                        group.gradients_of([param for _, param, _ in members]),
                        [slot for _, _, slot in members],
                        [packed for packed, _, _ in members].count(False),
                        spec,
                        group.reducers,
                        group.replicas,
                        group.kernels,
                        group.layout,
                        group.between,
                    )
                )
            hand_over(self.reductions, made)
        self.reductions = kept + made

    @property
    def has_partial_sums(self) -> bool:
        for reduction in self.reductions:  # noqa: SIM110  # asked in every zero_grad()
            if reduction.partial_sums.flat is not None:
                return True
        return False

    def count_references(self, params: Sequence[ShardedParam]) -> list[int]:
        """To the gathered memory and to each gathered parameter (see `core.params.gradients`)."""
        gathered = [param.unsharded for param in params]
        return [self.full.references(), *map(sys.getrefcount, gathered)]


UNBOUND = Bound()
"""The record of a group that was not used yet."""
