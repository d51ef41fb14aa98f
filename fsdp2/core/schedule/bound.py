"""The record of all that binding makes of a group, for its gathers, frees and reductions.

    ParamGroup.bind ──> Bound(group)          buffers, all-gathers, gathered parameters, reductions
                   └──> Bound.reroute         all-gathers alone; autograd may hold the parameters
    set_options, … ──> Bound.bind_reductions  reductions alone

A `Bound` is made as a whole. After parameters were moved or changed, the next bind makes another,
which takes over the reductions whose partial sums wait for an all-reduce.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import cast
from weakref import WeakMethod

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions
from fsdp2.core.device.buffers import Buffer, FlatBuffer, SwappedBuffer, TransientBuffer
from fsdp2.core.device.collectives import Collectives
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.device.streams import Streams
from fsdp2.core.gather.extension import Extension, ExtensionContext, make_extension
from fsdp2.core.gather.keeping import Keeping
from fsdp2.core.gather.levels import NodeRows
from fsdp2.core.gather.make import Part, make_gathers
from fsdp2.core.gather.program import Gather, combined
from fsdp2.core.gather.segments import from_host
from fsdp2.core.gather.smaller_group import SmallerGroup, SmallerRows
from fsdp2.core.layout.layout import GroupLayout, Segment, Slot, Transport
from fsdp2.core.layout.levels import node_segments
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.params.gradients import Gradients, gradients_of
from fsdp2.core.params.param import ShardedParam, Swap, compute_dtype
from fsdp2.core.reduce.binding import hand_over, make_reductions
from fsdp2.core.reduce.levels import Pieces
from fsdp2.core.reduce.reduction import Reduction
from fsdp2.core.reduce.spec import ReductionSpec, is_direct, reduction_spec
from fsdp2.core.schedule.states import GRANTED, RETAINED, GroupState

requires_grad = operator.attrgetter("requires_grad")
version = operator.attrgetter("_version")


class LastGather:
    """The shards that a group gathered last, or rows of them, as far as they are known: it has it
    where a later use may find what was gathered (`fsdp2.core.schedule.reuse`).

    It is ``dropped`` if the user has freed it, which other ranks do not know yet. If it
    ``watches``, gathers take fingerprints, by ``reads`` of a flat shard; ``steps`` is
    `OptimizerSteps.count` then.
    """

    __slots__ = ("dropped", "fingerprint", "reads", "recorded", "records", "steps", "watches")

    def __init__(self) -> None:
        self.dropped = self.watches = self.records = self.recorded = False
        self.fingerprint: torch.Tensor | None = None
        self.reads: tuple[FlatBuffer, Callable[[], torch.Tensor]] | None = None
        self.steps = -1


@dataclass
class Claim:
    """The contents that a user was given who has unsharded a group (`fsdp2.core.schedule.claimed`).

    ``before`` is the fingerprint of what was gathered, ``None`` where it was compared since;
    ``lost`` tells whether a write was lost when it was freed.
    """

    before: torch.Tensor | None = None
    lost: torch.Tensor | None = None


@dataclass(frozen=True)
class Runtime:
    """The objects on which a group runs.

    ``replicas`` are collectives of the replicate axis, if any; ``between``, those of the ranks that
    hold pieces of the same rows, with masters sharded over two levels. ``offload`` is set if shards
    and gradients are in CPU memory apart from the device.
    """

    collectives: Collectives
    streams: Streams
    kernels: Kernels
    device: torch.device
    replicas: Collectives | None = None
    offload: CPUOffloadPolicy | None = None
    gradients_of: Callable[[Sequence[ShardedParam]], Gradients] = gradients_of
    between: Collectives | None = None


class GroupFacts:
    """The facts that binding reads of a `fsdp2.core.schedule.group.ParamGroup`, which sets them.

    Attributes:
        name: name of the unit, for messages.
        layout: ``None`` where a move of rows was interrupted.
        shard: this rank's rows of all parameters but extended ones, by ``layout``, or their pieces.
        reducers: collectives of the gradients: ``collectives``, or over a process group of their
            own.
        smaller_group: the group to reshard to after forward, if not this one or none.
        last_gather: knowledge of the shards that were gathered last, where that may be used.
    """

    __slots__ = (
        "between",
        "collectives",
        "device",
        "last_gather",
        "layout",
        "name",
        "offload",
        "options",
        "params",
        "reducers",
        "replicas",
        "runtime",
        "shard",
        "smaller_group",
        "state",
    )

    name: str
    params: list[ShardedParam]
    options: GroupOptions
    layout: GroupLayout | None
    shard: FlatBuffer
    runtime: Runtime
    collectives: Collectives
    reducers: Collectives
    replicas: Collectives | None
    between: Collectives | None
    offload: CPUOffloadPolicy | None
    device: torch.device
    smaller_group: SmallerGroup | None
    state: GroupState
    last_gather: LastGather | None

    @property
    def shard_layout(self) -> GroupLayout | None:
        """The layout of what optimizers step in the flat shard: of rows, or of their pieces."""
        return None if self.layout is None else self.layout.pieces or self.layout

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


class Bound:
    """Everything that binding creates for a group; ``former`` is its previous record, if any.

    Attributes:
        full: the gathered rows, between acquire and release.
        mirror: the device's copy of offloaded shards, while a gather reads them (decision 8).
        nodes: rows that are gathered inside a node, if masters are sharded over two levels.
        keeping: rows of earlier gathers, if they are kept, and the chooser of ``gather``, the next
            one.
        keeps_mirror: whether gathered parameters are views of the mirror.
        to_sharded: stores that register sharded parameters; ``to_unsharded``, gathered ones.
        sharded_flags: whether the sharded parameters required grad at the last comparison.
        watched: the gathered parameters in which a user's write would be lost.
        versions: the number of fsdp2's own writes to each.
        references: the number of references to the gathered tensors while they are unused.
        reduces_frozen: whether reductions include parameters that no longer require grad.
        rebinds: whether some reductions are out of date, but have partial sums.
    """

    __slots__ = (
        "__weakref__",
        "_load",
        "extension",
        "full",
        "gather",
        "keeping",
        "keeps_mirror",
        "locals",
        "mirror",
        "nodes",
        "parts",
        "rebinds",
        "reduces_frozen",
        "reductions",
        "references",
        "sharded",
        "sharded_flags",
        "smaller",
        "to_sharded",
        "to_unsharded",
        "unsharded",
        "unsharded_flags",
        "versions",
        "watched",
    )

    def __init__(self, group: GroupFacts, former: Bound | None, waiting: bool) -> None:
        layout = group.shard_layout
        assert group.layout is not None
        assert layout is not None
        kernels = group.runtime.kernels
        self.full: TransientBuffer = kernels.transient(
            group.layout.full_bytes, f"gathered {group.name}"
        )
        self.mirror: TransientBuffer | None = None
        if group.offload is not None:
            self.mirror = kernels.transient(layout.shard_bytes, f"shards of {group.name}")
            # Views are made over allocated memory only; it is freed at the end, as `full` is.
            self.mirror.acquire()
        # Made again: its parameters may be others. `reroute` keeps it, with its hooks' tensors.
        self.extension = self._extension_of(group)
        self.keeping: Keeping | None = None
        self._bind_gathers(group)
        self.to_sharded: list[Swap] = []
        self.to_unsharded: list[Swap] = []
        self.unsharded: list[nn.Parameter] = []
        self.unsharded_flags: list[bool] = []
        self.watched: list[nn.Parameter] = []
        self.versions: list[int] = []
        self._bind_params(group)
        # Until `bind_reductions` has taken partial sums (I9) and residuals over from them.
        self.reductions: list[Reduction] = [] if former is None else former.reductions
        self.bind_reductions(group, waiting)
        self._bind_shards(group)
        if self.keeping is not None and former is not None and former.keeping is not None:
            # `reroute` calls `follow`; here, shards may be others than those that were gathered.
            self.keeping.inherit(former.keeping)
        if self.mirror is not None:
            self.mirror.release()
        if self.nodes is not None:
            self.nodes.rows.release()
        self.full.release()
        # Counted while no other code has them: `ParamGroup.is_referred_to` looks for more.
        self.references = self.count_references(group.params)

    def reroute(self, group: GroupFacts) -> None:
        """Bind another way to gather; the gathered parameters stay the objects that they are."""
        # New views of the buffer need its memory.
        self.full.acquire()
        if self.mirror is not None:
            self.mirror.acquire()
        self._bind_gathers(group)
        self._bind_shards(group)
        if self.mirror is not None:
            self.mirror.release()
        if self.nodes is not None:
            self.nodes.rows.release()
        if not group.options.keep_storage:  # such memory stays in place
            self.full.release()
        self.references = self.count_references(group.params)

    def _extension_of(self, group: GroupFacts) -> Extension | None:
        assert group.layout is not None
        made: WeakMethod[Callable[[ShardedParam], None]] = WeakMethod(self._bind_swaps)
        context = ExtensionContext(group.options, group.device, group.offload, made)
        return make_extension(
            group.layout, group.params, group.collectives, group.runtime.kernels, context
        )

    def _bind_gathers(self, group: GroupFacts) -> None:
        layout, masters = group.layout, group.shard_layout
        assert layout is not None
        assert masters is not None
        self._load: Gather | None = None
        if self.mirror is not None and masters.shard_bytes:
            kernels = group.runtime.kernels
            self._load = from_host(self.mirror, group.shard, masters.shard_bytes, kernels)
        shard = group.shard if self.mirror is None else self.mirror
        segments: Sequence[Segment] = layout.segments
        self.nodes: NodeRows | None = None
        if group.between is not None:
            kernels = group.runtime.kernels
            own = group.name, masters, shard, group.between, kernels, group.device
            self.nodes = NodeRows(*own, group.options.wire.between_gather)
            shard, segments = self.nodes.rows, node_segments(layout)
            coded = [s for s in segments if s.transport is Transport.CODED]
            self.nodes.fill_gaps(coded, group.collectives.rank)
        self.parts: list[Part] = make_gathers(
            [s for s in segments if s.transport is not Transport.EXTENSION],
            shard,
            self.full,
            group.collectives,
            group.runtime.kernels,
            group.options.all_gather,
            group.device,
            group.options.wire.gather,
            group.options.wire.differences,
            group.keeps_whole_rows,
        )
        if self.extension is not None:
            # Changed in place, because its first gather has made parameters that autograd may hold.
            self.extension.comm = group.options.all_gather
            self.parts.append((self.extension.operations(), None))
        found = combined(gather for gather, _ in self.parts)
        # One rank without a cast: gathered parameters are views of the mirror, which stays with
        # them.
        self.keeps_mirror = found.aliases
        found = found if self.nodes is None else self.nodes.before(found)
        self.gather = found if self._load is None else combined([self._load, found])

    def _keep_rows(self, group: GroupFacts) -> None:
        """Let gathers reuse rows, those that were there before too."""
        # Weak: this record owns the `Keeping` that has `choose`.
        former, bound = self.keeping, weakref.ref(self)
        self.keeping = None
        if not group.keeps_rows:
            return

        def choose(gather: Gather) -> None:
            if (found := bound()) is not None:
                found.gather = gather

        smaller = self.smaller if group.options.keep_rows else None
        self.keeping = Keeping(self.parts, self.gather, self._load, choose, self.nodes, smaller)
        # If rows of a smaller group stay, later gathers read these, not the node's.
        if self.nodes is not None and smaller is None:
            self.nodes.stays = True
        self.gather = self.keeping.fresh
        if former is not None:
            self.keeping.follow(former)

    def _bind_params(self, group: GroupFacts) -> None:
        """Make the gathered parameters (extended ones in their first gather), and stores."""
        with torch.inference_mode(False), torch.no_grad():
            for gather, _ in self.parts:
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

    def _bind_shards(self, group: GroupFacts) -> None:
        """The facts compared before an all-gather, and the rows that a smaller group keeps."""
        backed = [param for param in group.params if hasattr(param.sharded, "_local_tensor")]
        self.locals = [(cast(DTensor, param.sharded), param.local) for param in backed]
        self.sharded = [param.sharded for param in group.params]
        self.sharded_flags = list(map(requires_grad, self.sharded))
        self.smaller: SmallerRows | None = None
        # Rows of all ranks make those of a smaller group superfluous.
        whole = group.keeps_whole_rows
        if group.smaller_group is not None and group.layout is not None and not whole:
            self.smaller = SmallerRows(
                group.smaller_group,
                group.layout,
                self.full,
                group.params,
                group.runtime.kernels,
                group.options.all_gather,
                group.device,
                group.options.pack_below,
            )
        self._keep_rows(group)

    def bind_reductions(self, group: GroupFacts, waiting: bool) -> None:
        """Build the reduction steps of the parameters that require grad now.

        Partial sums belong to the steps that made them, which stay bound until the all-reduce;
        parameters that they do not know get steps besides (invariant I9). Those that were frozen
        while gradients of earlier backwards are waiting still belong to it.
        """
        assert group.layout is not None
        kept = [r for r in self.reductions if r.partial_sums.flat is not None]
        self.rebinds = bool(kept)
        known = {id(param) for reduction in kept for param in reduction.members}
        owed = {id(m) for r in self.reductions for m in r.members} if waiting else ()
        self.reduces_frozen = False
        members: list[tuple[ReductionSpec, ShardedParam, Slot, bool]] = []
        specs: dict[Hashable, ReductionSpec] = {}
        for segment in group.layout.segments:
            for slot in segment.slots:
                param = group.params[slot.index]
                frozen = not param.sharded.requires_grad
                if id(param) not in known and (not frozen or id(param) in owed):
                    self.reduces_frozen = self.reduces_frozen or frozen
                    dtypes = compute_dtype(group.options, param), param.grad_dtype
                    key = (*dtypes, param.exact, param.differs_over)
                    # One object for equal parameters: `make_reductions` compares identities first.
                    spec = specs.get(key)
                    if spec is None:
                        spec = reduction_spec(group.options, param, group.offload, group.device)
                        specs[key] = spec
                    direct = is_direct(spec, slot, segment.transport)
                    members.append((spec, param, slot, direct))
        runtime, pieces = group.runtime, None
        if group.between is not None and group.layout.pieces is not None:
            slots = {slot.index: slot for slot in group.layout.pieces.slots}
            pieces = Pieces(group.between, slots)
        with torch.inference_mode(False):  # tensors that a later backward writes to
            made = make_reductions(
                members,
                runtime.gradients_of,
                group.reducers,
                group.replicas,
                runtime.kernels,
                group.layout,
                pieces,
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
