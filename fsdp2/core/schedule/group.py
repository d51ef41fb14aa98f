"""One communication unit: a group of parameters that are gathered and reduced together.

    state    GroupState       see `fsdp2.core.schedule.states`
    shard    FlatBuffer       [segment | segment …]   this rank's rows, permanently
    bound    Bound            buffers, transports, gathered parameters, reductions, once it is used

The group owns this state and nothing else does; the scheduler decides when to move it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from fsdp2.core.config import GroupOptions
from fsdp2.core.device.buffers import FlatBuffer
from fsdp2.core.device.collectives import Collectives, Work
from fsdp2.core.device.process_groups import meet
from fsdp2.core.device.rehearsal import META
from fsdp2.core.device.streams import COMPUTE, Event
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.gather.extension import plain_tensors
from fsdp2.core.gather.program import Gather, Launched, gather_inline, gather_on_lanes
from fsdp2.core.gather.smaller_group import SmallerGroup
from fsdp2.core.layout.layout import GroupLayout, ParamShape, Transport, layout_of
from fsdp2.core.layout.levels import pieces_layout
from fsdp2.core.layout.logs import BIND, BindReason
from fsdp2.core.params.gradients import COUNTS_ARE_TRUE
from fsdp2.core.params.param import (
    ShardedParam,
    follow_requires_grad,
    gathered_name,
    refuse_written,
    shapes_of,
)
from fsdp2.core.progress import OptimizerSteps, ShardReaders, communication_error
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import (
    Jobs,
    PendingReduction,
    Reduction,
    reduce_inline,
    reduce_on_lanes,
    with_zeros,
)
from fsdp2.core.schedule.bound import (
    Bound,
    Claim,
    GroupFacts,
    LastGather,
    Runtime,
    requires_grad,
    version,
)
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

BOUND, ROUTE, ALL = range(3)
"""The next gather binds nothing; another way to gather; or everything, because parameters or
buffers are no longer those that were bound."""


class ParamGroup(GroupFacts):
    """Parameters that share collectives; ``options`` are those of the unit that it belongs to.

    Attributes:
        claim: the contents that a user was given, where he has unsharded it.
        fills: whether absent gradients are zeros when it is reduced, later than at its unit's end.
        gathered_at: `OptimizerSteps.count` when its shards were gathered last, or rows of them.
        in_use: whether a unit that uses it is running, if several do; it is not freed then.
        is_whole: whether its parameters are replicated on every rank, so that nothing is gathered.
        stale: what the next gather binds: `BOUND`, `ROUTE` or `ALL`.
    """

    __slots__ = (
        "__weakref__",
        "_accumulated",
        "_gathered_event",
        "_launch_gather",
        "_launch_reduction",
        "_loaded_event",
        "_taken",
        "_works",
        "bound",
        "claim",
        "fills",
        "gathered_at",
        "in_use",
        "is_whole",
        "stale",
        "streams",
    )

    def __init__(
        self, name: str, params: Sequence[ShardedParam], runtime: Runtime, options: GroupOptions
    ) -> None:
        self.name = name
        self.params = list(params)
        self.options = options
        self._run_on(runtime)
        self.smaller_group = None
        self.state = SHARDED
        self.bound: Bound | None = None
        self.last_gather: LastGather | None = None
        self.stale = ALL
        self.claim: Claim | None = None
        self.in_use: Callable[[], bool] | None = None
        self.is_whole = self.fills = False
        self._accumulated = False
        self.gathered_at = -1
        self._taken: Gather | None = None  # of the gather that was issued last
        self._works: list[Work] = []
        self._gathered_event: Event = None
        self._loaded_event: Event = None
        self.layout = None
        self.adopt()

    def _run_on(self, runtime: Runtime) -> None:
        """Store the objects that a step uses, so that it needs no lookup."""
        self.runtime = runtime
        self.collectives = self.reducers = runtime.collectives
        self.replicas, self.between = runtime.replicas, runtime.between
        self.offload = runtime.offload
        self.streams = streams = runtime.streams
        self.device = runtime.device
        self._launch_gather: Callable[..., Launched] = gather_inline
        if streams.asynchronous:
            self._launch_gather = functools.partial(gather_on_lanes, event=streams.make_event())
        self._launch_reduction = reduce_on_lanes if streams.asynchronous else reduce_inline

    @property
    def base(self) -> ParamGroup:
        """Itself: what `Observed` stands around (`fsdp2.core.schedule.observers`)."""
        return self

    @property
    def is_outdated(self) -> bool:
        """Whether it was gathered before an optimizer step: its parameters have changed since."""
        return not self.state.is_sharded and self.gathered_at != OptimizerSteps.count

    @property
    def is_unsharded(self) -> bool:
        """Whether the gathered parameters are registered."""
        return self.state is UNSHARDED

    @property
    def reuses_rows(self) -> bool:
        """Whether the next gather communicates nothing of what is kept."""
        keeping = None if self.bound is None or self.stale else self.bound.keeping
        return keeping is not None and keeping.current

    @property
    def is_dropped(self) -> bool:
        """Whether the user has freed what other ranks may still have."""
        return self.last_gather is not None and self.last_gather.dropped

    def axes_of(self, rows: bool) -> list[Collectives]:
        """Collectives of the ranks that gather it; with ``rows`` only into rows it keeps."""
        near = rows and self.between is not None and not self.keeps_whole_rows
        axes = (self.between,) if near else (self.collectives, self.between)
        return [axis for axis in axes if axis is not None and axis.size > 1]

    @property
    def is_known(self) -> bool:
        """Whether a look at its shards tells if what it gathered is valid: no step has followed."""
        last = self.last_gather
        if last is None or last.fingerprint is None:
            return False
        stepped = last.recorded and last.steps != OptimizerSteps.count
        # A step has written the shards, unless all are frozen.
        return not (stepped and self.bound is not None and self.bound.reductions)

    @property
    def has_rows(self) -> bool:
        """Whether rows of an all-gather are kept that later ones are to reuse."""
        keeping = None if self.bound is None else self.bound.keeping
        return keeping is not None and keeping.current

    @property
    def accumulates(self) -> bool:
        """Whether gradients of backwards without sync, or partial sums, are waiting."""
        return self._accumulated or (self.bound is not None and self.bound.has_partial_sums)

    @property
    def is_over(self) -> bool:
        """Whether it is sharded, and nothing is there to reduce at its unit's end."""
        if not self.state.is_sharded:
            return False
        if self.fills and self.in_use is not None:  # the units that use it are over now
            return False
        if self.bound is None or self.is_whole:
            return True
        for reduction in self.bound.reductions:  # noqa: SIM110  # asked at the end of every backward
            if reduction.has_work:
                return False
        return True

    @property
    def has_gradients(self) -> bool:
        """Whether gathered parameters have gradients that no reduction has taken."""
        reductions = () if self.bound is None else self.bound.reductions
        return any(reduction.gradients.waiting() for reduction in reductions)

    @property
    def has_grad_hooks(self) -> bool:
        """Whether users' hooks run when gradients are delivered: they may write the shards."""
        return any(param.has_grad_hooks for param in self.params)

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
        self.layout = None  # until all have moved: where this is interrupted, all move again
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
        return dataclasses.replace(layout, pieces=pieces)

    def _new_shard(self, layout: GroupLayout) -> FlatBuffer:
        on_meta, kernels = any(map(is_meta, self.params)), self.runtime.kernels
        if self.offload is None:
            return kernels.flat(layout.shard_bytes, on_meta)
        return kernels.host_flat(layout.shard_bytes, on_meta, self.offload.pin_memory)

    def _repack(self) -> None:
        """Others of its parameters may be packed: rows move then, if there are any yet."""
        self.rebind()
        layout = self._plan(shapes_of(self.params, self.options))
        before = self.layout
        if layout == before:
            return
        as_large = before is not None and before.shard_bytes == layout.shard_bytes
        if (
            as_large
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
        self.runtime = dataclasses.replace(self.runtime, replicas=replicas)
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
        if bound is not None:
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
        if bound is not None and self.stale == ROUTE:
            BIND.debug("'%s' binds: another way to gather was chosen", self.name)
            bound.reroute(self)
        else:
            self.follow_params()
            self.bound = Bound(self, bound, self._accumulated)
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
        before = None if self.bound is None else self.layout
        BIND.debug("'%s' binds: %s", self.name, BindReason(before, shapes, moved))
        layout = self._plan(shapes)
        if layout != self.layout or moved:
            self._move_to(layout)

    def _reduce_anew(self) -> None:
        """Another way to reduce was chosen: build the steps, unless the next gather does so."""
        if self.bound is not None and self.stale != ALL:
            self.bind_reductions()

    def bind_reductions(self) -> None:
        """Build the reduction steps of the parameters that require grad now."""
        if self.bound is not None:
            self.bound.bind_reductions(self, self._accumulated)

    # ---- gather and free

    def start_unshard(self) -> None:
        """Issue the all-gather; returns while it may still run.

        The side lanes wait for COMPUTE as it is now: whatever used the memory that the gathered
        buffer is given was issued there before (invariant I2).
        """
        bound, state = self.bound, self.state
        if state is SHARDED or state is RETAINED:
            assert bound is not None
            if self.last_gather is not None:
                self._look_at_shards(self.last_gather)
            gather = bound.gather
            self.gathered_at = OptimizerSteps.count
        elif state is RESHARDED:
            assert bound is not None
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
            if gather.loads:
                self._loaded_event = launched.copied
            self._gathered_event = launched.gathered

    def finish_unshard(self) -> None:
        """Make COMPUTE wait for the all-gather and register the gathered parameters."""
        if self.state is not GATHERING:
            raise refused("finish_unshard", self.name, self.state)
        bound, gather = self.bound, self._taken
        assert bound is not None
        assert gather is not None
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
        assert bound is not None
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
        assert bound is not None
        if state is GATHERING:  # a prefetch that nobody used: over before its memory goes
            assert self._taken is not None
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
            assert self.bound is not None
            for store, name, param in self.bound.to_sharded:
                store[name] = param
            self.state = to

    def grant(self) -> None:
        """The shards are those that were gathered: the next use needs no all-gather."""
        if self.is_retained:
            self.state, self.gathered_at = GRANTED, OptimizerSteps.count

    def watch(self, wanted: bool, records: bool) -> None:
        """Set whether the next gathers take fingerprints of the shards that they read."""
        if not wanted:
            if not self.is_retained:
                self.last_gather = None
            return
        if self.last_gather is None:
            self.last_gather = LastGather()
        self.last_gather.watches, self.last_gather.records = True, records

    def fingerprint(self) -> torch.Tensor | None:
        """Sums of the bytes that an all-gather reads; ``None`` if replaced since, or freed."""
        bound, last, shard = self.bound, self.last_gather, self.shard
        if bound is None or last is None or last.dropped or self.stale == ALL:
            return None
        if any(sharded._local_tensor is not local for sharded, local in bound.locals):
            return None
        if last.reads is not None and last.reads[0] is shard and bound.extension is None:
            return last.reads[1]()
        found = [shard.view(torch.uint8, 0, (shard.nbytes,))] if shard.nbytes else []
        for param in self.params if bound.extension is not None else ():
            found += plain_tensors(param.local) if param.is_extended else ()
        last.reads = shard, self.runtime.kernels.bind_fingerprint(found)
        return last.reads[1]()

    def _look_at_shards(self, last: LastGather) -> None:
        """Before an all-gather: note which contents it gathers, if a later use may ask."""
        last.dropped = False
        if last.watches and not self.reuses_rows:
            last.fingerprint = self.fingerprint()
            assert last.fingerprint is not None
            last.steps, last.recorded = OptimizerSteps.count, last.records

    def drop_for_user(self) -> None:
        """As `forget_rows`, on one rank perhaps: others ask this one before they use theirs."""
        last = self.last_gather
        seen = None if last is None else last.fingerprint
        self.forget_rows()
        if last is not None and seen is not None:
            self.last_gather, last.fingerprint, last.dropped = last, seen, True

    def drop_retained(self) -> None:
        """Free what is retained; what is known of the shards counts no more."""
        if self.is_retained:
            if self.bound is not None:
                self._release_full(self.bound)
            self.state = SHARDED
        last = self.last_gather
        if last is not None:
            last.dropped, last.fingerprint = False, None
            if not last.watches:
                self.last_gather = None

    def show(self) -> None:
        """Register what is gathered and was hidden, or is retained and granted."""
        if self.state is not HIDDEN and self.state is not GRANTED:
            raise refused("show", self.name, self.state)
        assert self.bound is not None
        for store, name, param in self.bound.to_unsharded:
            store[name] = param
        self.state = UNSHARDED

    @property
    def is_referred_to(self) -> bool:
        """Whether a graph or a user may read what is gathered; also if counts cannot tell."""
        bound = self.bound
        if not COUNTS_ARE_TRUE or bound is None or bound.extension is not None:
            return True
        return any(map(operator.gt, bound.count_references(self.params), bound.references))

    def forget_rows(self) -> None:
        """Make the next all-gather fetch everything again: shards may have changed."""
        self.drop_retained()
        if self.bound is not None and self.bound.keeping is not None:
            self.bound.keeping.forget()
            if self.state not in (GATHERING, RESHARDED):  # nobody reads them, or will in backward
                self.bound.keeping.free()

    def _follow_smaller(self) -> None:
        for param in self.params:
            param.follow_smaller()

    def abandon(self) -> None:
        """Free the remains of an exception; COMPUTE has waited for the other lanes."""
        if self.bound is not None and self.bound.keeping is not None:
            self.bound.keeping.lose()
        self.drop_retained()
        self.last_gather = None
        self.reshard(forced=True)
        if self.bound is not None:
            self._release_full(self.bound)
            for reduction in self.bound.reductions:
                reduction.abandon()
            if self.bound.nodes is not None:
                self.bound.nodes.free()

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
        if self.bound is not None:
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
        if bound is None:
            return
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
        self.bind_reductions()

    # ---- what users write by hand

    def take_back(self, stays: bool = True) -> None:
        """Raise if the user wrote a gathered parameter; observers also see if it ``stays``."""
        if self.state is not UNSHARDED:
            return
        bound = self.bound
        assert bound is not None
        if list(map(requires_grad, bound.unsharded)) != bound.unsharded_flags:
            self._carry_flags(bound)
        if written := self.written:
            refuse_written(written)

    @property
    def written(self) -> str | None:
        """Name of a gathered parameter, not its shard, that was written since the last look."""
        bound = self.bound
        if bound is None:
            return None
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
        for reduction in () if self.bound is None else self.bound.reductions:
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
        bound = self.bound
        if bound is None:
            return []
        jobs: list[tuple[Reduction, Job | None]] = []
        idle = False
        for reduction in bound.reductions:
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
                pending = self._launch_reduction(self, jobs, all_reduce)
        else:
            pending = self._launch_reduction(self, jobs, all_reduce)
        return pending

    def discard_gradients(self) -> None:
        """Drop gradients that are not reduced yet."""
        self._accumulated = self.fills = False
        for param in self.params:
            param.drop_gradient()
        if self.bound is not None:
            for reduction in self.bound.reductions:
                reduction.discard()
            if self.bound.rebinds:
                self.bind_reductions()

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
