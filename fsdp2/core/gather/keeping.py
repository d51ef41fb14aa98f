"""The all-gathers of a group's segments, and rows that stay: of all ranks, a node, a smaller group.

`make_gathers` selects the operations of each segment; with rows that stay, a group has two gathers:

    fresh   shards ══ all-gather ══> rows ── copy ──> slots     as its first operation: begin
    again                            rows ── copy ──> slots     as its last one: end

    fresh ── an all-gather has ended ──> again ── forget ──> fresh

`fsdp2.core.schedule.reuse` knows when shards may have changed, and calls `forget`.

    KeptRows      of all ranks (`segments`)
    NodeRows      of a node, if masters are sharded over all ranks of two levels
    SmallerRows   of a smaller group, between forward and backward (`reshard_after_forward` an int)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core.custom_collectives import AllGather
from fsdp2.core.device.buffers import Buffer, TransientBuffer
from fsdp2.core.device.collectives import Collectives, Launch, Work
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.gather.program import Gather, Run, combined
from fsdp2.core.gather.segments import (
    KeptRows,
    Pair,
    SegmentViews,
    coalesced,
    custom,
    local,
    one_slot,
    packed,
)
from fsdp2.core.layout.layout import (
    COLLECTIVE_ALIGN_BYTES,
    Cut,
    GroupLayout,
    Segment,
    Slot,
    Transport,
    repacked,
    straight_into_slots,
)
from fsdp2.core.layout.levels import gaps
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.params.param import ShardedParam, Swap
from fsdp2.core.pieces import round_up

# ---- which operations each segment has


def make_gathers(
    segments: Sequence[Segment],
    shard: Buffer,
    full: TransientBuffer,
    collectives: Collectives,
    kernels: Kernels,
    comm: AllGather | None,
    device: torch.device,
    codec: str | None = None,
    differences: bool = False,
    keeps: bool = False,
) -> list[Gather]:
    """The operations of each segment, in order; with a user's ``comm``, those of all segments
    together. ``shard`` is the flat shard, or the device's
    copy of it; ``full`` is allocated. It ``keeps`` rows of all segments without a codec, as it does
    where messages of the others are ``differences``.
    """
    found: list[Gather] = []
    theirs: list[SegmentViews] = []
    carriers: list[tuple[int, SegmentViews]] = []
    waiting: dict[torch.dtype, list[tuple[Gather, Pair]]] = {}
    straight = straight_into_slots(segments)
    for segment in segments:
        place = SegmentViews(segment, shard, full, collectives, kernels)
        transport = segment.transport
        if transport is Transport.LOCAL:
            gather = local(place)
        elif comm is not None and transport is not Transport.CODED:
            theirs.append(place)
            continue
        elif not segment.shard_numel:  # empty parameters have nothing to say
            gather = Gather(place.parameters())
        elif transport is Transport.CODED:
            gather = _coded(place, codec, differences)
        elif keeps or differences:
            gather = KeptRows(place).fresh()
        elif transport is Transport.COALESCED:
            carriers.append((len(found), place))
            gather = Gather()  # until it is known what its launch takes along
        elif straight:
            gather = one_slot(place)
        else:
            gather, pair = packed(place)
            waiting.setdefault(segment.full_dtype, []).append((gather, pair))
        found.append(gather)
    for at, place in carriers:
        pairs: list[Pair] = []
        if carried := waiting.get(place.segment.full_dtype):
            gather, pair = carried.pop(0)
            # The carrier's launch sends it; the copies out of its rows remain here.
            gather.collectives = ()
            pairs.append(pair)
        found[at] = coalesced(place, pairs)
    if theirs and comm is not None:
        # Together: a user's collective is called once per group, as torch's FSDP2 does.
        found.append(custom(theirs, comm, device))
    return found


def _coded(place: SegmentViews, name: str | None, differences: bool) -> Gather:
    """The modules of codecs are loaded at their first use."""
    from fsdp2.core.codecs.codec import GATHERED
    from fsdp2.core.gather.coded import ReferenceRows, encoded

    assert name is not None
    if differences:
        return ReferenceRows(place, GATHERED[name]).fresh()
    return encoded(place, GATHERED[name])


# ---- of a node


class NodeRows:
    """Fills node rows, before the all-gather inside.

        masters ══ all-gather between nodes ══> node rows ══ all-gather inside a node ══> gathered
         shard    (cast to the compute dtype)    [ rank's rows of each parameter ]

    Both are launched one after the other: on the lane of all-gathers, or, if the host waits for its
    launches, the second when it waits for the first. Between nodes each rank receives only its own
    rows: (N - 1) / N of 1 / L of the parameters, over N nodes of L ranks.

    ``pieces`` says where masters are in the flat ``shard`` (or the device's copy) and in node rows;
    ``between`` are collectives of the ranks that share rows. If it ``stays``, the memory of
    ``rows`` is freed explicitly, not per all-gather.
    """

    def __init__(
        self,
        name: str,
        pieces: GroupLayout,
        shard: Buffer,
        between: Collectives,
        kernels: Kernels,
        device: torch.device,
        codec: str | None = None,
    ) -> None:
        self.rows: TransientBuffer = kernels.transient(pieces.full_bytes, f"node rows of {name}")
        self.stays = False
        self._kernels = kernels
        self._own = combined(
            make_gathers(pieces.segments, shard, self.rows, between, kernels, None, device, codec)
        )
        self._gaps: list[torch.Tensor] = []
        self._zeros: list[torch.Tensor] = []

    def before(self, inside: Gather) -> Gather:
        """An all-gather through both levels, of which ``inside`` is that inside a node."""
        own = self._own
        release = [*own.release, self._leave]
        finish = [*release, *inside.finish]
        found = replace(inside, release=[*release, *inside.release], finish=finish)
        if not (own.collectives or inside.collectives):  # empty parameters have nothing to say
            return replace(found, acquire=[], copy_in=[])
        acquire = [self.rows.acquire, *own.acquire, *inside.acquire]
        # One launch for both levels: the copies between them run on ALL_GATHER, too.
        launch = partial(self._launch, inside)
        return replace(found, acquire=acquire, copy_in=own.copy_in, collectives=[launch])

    def fill_gaps(self, segments: Sequence[Segment], rank: int) -> None:
        """Zero the padding of coded ``segments`` of node rows, because block codecs read it."""
        for segment in segments:
            dtype, start = segment.full_dtype, segment.shard_byte_offset
            for first, length in gaps(segment, rank):
                place = start + first * dtype.itemsize
                self._gaps.append(self.rows.view(dtype, place, (length,)))
                self._zeros.append(self._kernels.zeros((length,), dtype, "padding"))

    def _launch(self, inside: Gather) -> Work | None:
        following = _Following()
        for launch in self._own.collectives:
            following.start(launch)
        rest: list[Run] = [*self._own.copy_out]
        if self._gaps:
            rest.append(partial(self._kernels.copy_many, self._gaps, self._zeros))
        rest += inside.copy_in  # of node rows, which are there then
        rest += [partial(following.start, launch) for launch in inside.collectives]
        if following.steps:
            # On a CPU the rows come later; the host cannot launch the second gather before that.
            following.steps += rest
            return following
        for run in rest:
            run()
        return following if following.steps else None

    def _leave(self) -> None:
        if not self.stays:
            self.rows.release()


class _Following:
    """The rest of an all-gather, for the host: waits, and after those between nodes all else."""

    def __init__(self) -> None:
        self.steps: list[Run] = []

    def start(self, launch: Launch) -> None:
        work = launch()
        if work is not None:
            self.steps.append(work.wait)

    def wait(self) -> None:
        while self.steps:
            self.steps[0]()
            del self.steps[0]  # once it has run: a wait may be interrupted and repeated


# ---- of a smaller group


@dataclass(frozen=True)
class SmallerGroup:
    """The ranks that backward gathers from, and (replicate, shard) of all ranks by such groups."""

    collectives: Collectives
    mesh: DeviceMesh


def smaller_segment(
    segment: Segment,
    world_size: int,
    coalesces: bool,
    shard_byte_offset: int,
    pack_below: int = 0,
) -> Segment:
    """The segment as a smaller group holds it: other pieces, which may be packed; same slots."""
    itemsize = segment.full_dtype.itemsize
    # A smaller group has one shard dim: bands are for all ranks (decision 18).
    cut = [replace(slot, cut=Cut(slot.dim), world_size=world_size) for slot in segment.slots]
    # Pieces are longer than the group's, so those that it does not pack are not packed here either.
    large = segment.transport is Transport.COALESCED or all(
        slot.shard_numel * itemsize >= pack_below for slot in cut
    )
    transport, slots, numel = repacked(cut, itemsize, coalesces and large)
    return replace(
        segment,
        transport=transport,
        # Rows are copied from the gathered buffer, so they are cast already.
        shard_dtype=segment.full_dtype,
        slots=slots,
        shard_numel=numel,
        shard_byte_offset=shard_byte_offset,
    )


class SmallerRows:
    """A smaller group's rows, which ``keeping``, if there is one, keeps for other micro-batches.

    With 4 ranks and smaller groups of 2, a parameter of 8 rows:

        rank               0      1      2      3
        sharded            0-1    2-3    4-5    6-7
        between            0-3    4-7    0-3    4-7      gathered in backward by {0, 1} and {2, 3}

    After forward each rank copies its rows out of the gathered buffer into a separate buffer, in
    the compute dtype. Backward gathers from there, over few ranks that are near each other,
    straight into the same slots: the padding of a smaller group is never longer.
    """

    keeping: Keeping | None = None

    def __init__(
        self,
        group: SmallerGroup,
        layout: GroupLayout,
        full: TransientBuffer,
        params: Sequence[ShardedParam],
        kernels: Kernels,
        comm: AllGather | None,
        device: torch.device,
        pack_below: int = 0,
    ) -> None:
        self._group = group
        self._kernels = kernels
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self.swaps: list[Swap] = []
        segments: list[Segment] = []
        nbytes = 0
        for segment in layout.segments:
            if segment.transport is Transport.EXTENSION:
                raise coded(
                    ShardingStateError,
                    "smaller-group-of-hooks",
                    f"parameter '{params[segment.slots[0].index].name}' has all-gather hooks, "
                    f"which cannot be used with reshard_after_forward=<int>; call "
                    f"set_reshard_after_forward(True)",
                )
            smaller = smaller_segment(
                segment, group.collectives.size, group.collectives.coalesces, nbytes, pack_below
            )
            segments.append(smaller)
            nbytes += smaller.shard_numel * smaller.full_dtype.itemsize
            nbytes = round_up(nbytes, COLLECTIVE_ALIGN_BYTES)
        self._rows = kernels.transient(nbytes, "rows of the smaller group")
        self.gather = combined(
            make_gathers(segments, self._rows, full, group.collectives, kernels, comm, device)
        )
        gathered = {slot.index: tensor for slot, tensor in self.gather.parameters}
        for smaller in segments:
            for slot in smaller.slots:
                self._add(params[slot.index], slot, smaller, gathered[slot.index], full)
        self._rows.release()

    def _add(
        self,
        param: ShardedParam,
        slot: Slot,
        segment: Segment,
        gathered: torch.Tensor,
        full: TransientBuffer,
    ) -> None:
        rank = self._group.collectives.rank
        dtype = segment.full_dtype
        start = segment.shard_byte_offset + slot.shard_offset * dtype.itemsize
        rows = self._rows.view(dtype, start, slot.local_shape(rank))
        self._targets.append(rows)
        self._sources.append(slot.part(gathered, rank))
        between = param.make_smaller(rows, self._group.mesh)
        # Views of views, which a `SwappedBuffer` does not know by itself.
        for buffer, tensor in ((full, self._sources[-1]), (self._rows, local_of(between))):
            buffer.keep_valid(tensor)
        self.swaps += param.swaps(between)

    def keep(self) -> None:
        """Copy this rank's rows out of the gathered buffer."""
        # The rows of an earlier forward are still valid (I17).
        if self.keeping is not None and self.keeping.current:
            return
        # On COMPUTE, after forward: the gathered buffer is freed next (I2).
        self._rows.acquire()
        self._kernels.copy_many(self._targets, self._sources)
        if self.keeping is not None:
            self.keeping.end()

    def release(self) -> None:
        stays = self.keeping is not None and self.keeping.current
        if self._rows.allocated and not stays:
            self._rows.release()


# ---- the next all-gather


class Keeping:
    """The two all-gathers of a group that keeps rows: ``fresh`` with collectives, and ``again``,
    which is the next one while rows are ``current``.

    ``gather`` is that of all segments, through both levels if there are two; ``load`` copies
    offloaded shards from the host first. Rows of a ``smaller`` group stay, or rows of ``nodes``,
    from which others than kept ones are gathered.
    """

    def __init__(
        self,
        parts: Sequence[Gather],
        gather: Gather,
        load: Gather | None,
        nodes: NodeRows | None = None,
        smaller: SmallerRows | None = None,
    ) -> None:
        self._nodes, self._smaller = nodes, smaller
        self.kept = [part.kept for part in parts if isinstance(part.kept, KeptRows)]
        ends = [] if smaller is not None else [self.end]
        self.fresh = replace(
            gather, acquire=[*gather.acquire, self._begin], finish=[*gather.finish, *ends]
        )
        if smaller is not None:
            self.again = smaller.gather
            smaller.keeping = self  # its rows are copied when forward is over
        else:
            others = [part for part in parts if part.kept is None]
            again = [Gather(copy_out=kept.rows.put) for kept in self.kept] + others
            if load is not None and nodes is None and others:  # which read shards once more
                again.insert(0, load)
            self.again = combined(again)
        self.current = self._counts = False

    @property
    def nbytes(self) -> int:
        """Memory of the rows of all ranks, once they are there."""
        return sum(kept.rows.output.nbytes for kept in self.kept)

    def _begin(self) -> None:
        """An all-gather begins: its result counts, unless `forget` is called before it ends."""
        self._counts = True

    def end(self) -> None:
        """Rows are there."""
        self.current = self.current or self._counts

    def forget(self) -> None:
        """Let the next gather communicate."""
        self._counts = self.current = False

    def free(self) -> None:
        """Free memory that the next all-gather fills again, if no operation reads it."""
        if self.current:
            return
        if self._nodes is not None:
            self._nodes.rows.release()
        if self._smaller is not None:
            self._smaller.release()

    def lose(self) -> None:
        """As `forget`, where a gather may have stopped half way."""
        self.forget()
        for kept in self.kept:
            kept.lose()

    def follow(self, former: Keeping) -> None:
        """Take over the rows of the earlier binding to the same segments."""
        if self._smaller is not None:
            return
        known = self._known_to(former)
        for kept, before in known:
            kept.follow(before)
        # All segments, or none: `again` has no collective for one that lacks rows.
        if former.current and self._nodes is None and len(known) == len(self.kept):
            self.current = True

    def inherit(self, former: Keeping) -> None:
        """Take over what remains valid if shards may have other values and memory."""
        for kept, before in self._known_to(former):
            kept.inherit(before)

    def _known_to(self, former: Keeping) -> list[tuple[KeptRows, KeptRows]]:
        before = {kept.place.segment: kept for kept in former.kept}
        return [
            (kept, before[kept.place.segment]) for kept in self.kept if kept.place.segment in before
        ]
