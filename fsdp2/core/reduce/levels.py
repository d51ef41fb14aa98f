"""The reduce-scatter between nodes, where masters are sharded over all ranks of two levels.

    sums inside a node    [ rows of A | rows of B | marks ]          job.flat
      + partial sums ── pad, interleave ──> [nodes, n + marks]       on ALL_REDUCE
      ══ one reduce-scatter ══> [ piece of A | piece of B | marks ]  job.flat from then on

It stands where HSDP all-reduces. Earlier micro-batches leave partial sums inside the node; their
gradients cross nodes once, with those of the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fsdp2.core.device.collectives import Collectives, ReduceKind, collectives_of
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.layout.layout import COLLECTIVE_ALIGN_BYTES, Slot
from fsdp2.core.pieces import round_up
from fsdp2.core.reduce.division import Division
from fsdp2.core.reduce.kept_gradients import KeptGradients
from fsdp2.core.reduce.presence_marks import PresenceMarks
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import ReduceContext
from fsdp2.core.reduce.rows import FlatPlan, MarksPlace, runs
from fsdp2.core.reduce.spec import ReductionSpec
from fsdp2.core.reduce.transport import RANK_MAJOR, PackingReduce

STAGING = "reduce-scatter input between nodes"


@dataclass(frozen=True)
class Pieces:
    """Places of the pieces of a group's rows.

    Attributes:
        collectives: of the ranks that share rows.
        slots: of the group's parameters, by their positions in the group.
    """

    collectives: Collectives
    slots: Mapping[int, Slot]

    def of(self, slots: Sequence[Slot]) -> list[Slot]:
        """The pieces of these parameters."""
        return [self.slots[slot.index] for slot in slots]


@dataclass(eq=False)
class Crossing(Job):
    """The sums of a node while they are sent between nodes.

    Attributes:
        rows: the input of the collective.
        made: for each member ``None``, or the buffer in which its rows are first put in the order
            of nodes.
        messages: the messages of encoded rows, to each node and from each.
    """

    rows: torch.Tensor | None = None
    made: Sequence[torch.Tensor | None] = ()
    messages: Sequence[torch.Tensor] = ()


class PiecesReduce(PackingReduce):
    """Sums of a node are sent packed, in separate memory for each reduction.

    Two reductions of a group may be between nodes at the same time, as two all-reduces may.
    """

    def _bind(self, context: ReduceContext) -> None:
        super()._bind(context)
        shape = (self.collectives.size, self.width)
        self._new_rows = self.kernels.bind_empty(shape, self.reduce_dtype, STAGING)
        self.scatter = self.collectives.bind_reduce_scatter(context.division.kind)

    def prepare(self, job: Crossing, seeks: bool) -> None:
        """Allocate the input of the collective, on COMPUTE.

        Args:
            job: the job.
            seeks: whether to send this node's marks, instead of those of a rank that lacks nothing.
        """
        size, dtype, kernels = self.collectives.size, self.reduce_dtype, self.kernels
        job.rows = self._new_rows()
        job.made = [
            None
            if slot.dim == 0 or slot.in_order or not slot.shard_numel
            else kernels.zeros((size, slot.shard_numel), dtype, RANK_MAJOR)
            for slot in self.slots
        ]
        if seeks:
            assert self.marks is not None
            sent = kernels.zeros((size * self.marks.width,), dtype, "marks of a node")
            job.marks = sent, sent

    def cross(self, job: Crossing, found: torch.Tensor) -> None:
        """Pack, reduce and scatter, on ALL_REDUCE.

        Args:
            job: the job, with the sums of this node as gradients.
            found: the sums of its marks.
        """
        assert job.rows is not None
        assert job.flat is not None
        if job.marks is not None:
            assert self.marks is not None
            sent, width, members = job.marks[0], self.marks.width, found.shape[0]
            places = [sent.narrow(0, n * width, members) for n in range(self.collectives.size)]
            self.kernels.copy_many(places, [found] * len(places))
        job.grads = [
            grad if rows is None else self._fill(slot, grad, rows)
            for slot, grad, rows in zip(self.slots, job.grads, job.made, strict=True)
        ]
        self.pack(job, job.rows)
        self.send(job, job.rows, job.flat)

    def send(self, job: Crossing, rows: torch.Tensor, flat: torch.Tensor) -> None:
        """Reduce and scatter packed rows.

        Args:
            job: the job.
            rows: the rows that are sent to each node.
            flat: where the sums go.
        """
        work = self.scatter(flat, rows.view(-1))
        if work is not None:
            work.wait()

    def _rank_major(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
        """No memory is made on this lane (invariant I2): see `prepare`."""
        return grad.reshape(self.collectives.size, slot.shard_numel)

    def found(self, flat: torch.Tensor) -> torch.Tensor:
        """The sums of marks, after the pieces."""
        assert self.marks is not None
        return self.marks.within(flat)


class BetweenNodes:
    """The step that replaces HSDP's all-reduce.

    Args:
        transport: how sums are sent.
        marks: of the reduction inside; always present, because its flat result is used once more.
        kept: the memory of gradients, if the collective writes to it.
    """

    __slots__ = ("_hold", "_marks", "_transport")

    def __init__(
        self, transport: PiecesReduce, marks: PresenceMarks, kept: KeptGradients | None
    ) -> None:
        self._transport, self._marks = transport, marks
        self._hold = transport.allocate if kept is None else kept.hold_flat

    def allocate_pieces(self, job: Job) -> None:
        """Allocate the collective's input and output, on COMPUTE."""
        job.between = crossing = Crossing([], job.present)
        self._hold(crossing)
        job.kept = crossing.kept
        self._transport.prepare(crossing, job.seeks)

    def scatter_between(self, job: Job) -> None:
        """Reduce and scatter the flat sums, on ALL_REDUCE."""
        crossing, transport = job.between, self._transport
        assert isinstance(crossing, Crossing)
        assert job.flat is not None
        crossing.grads = [*job.outputs]
        transport.cross(crossing, self._marks.within(job.flat).narrow(0, 0, len(job.present)))
        job.partial = (job.partial, job.flat, crossing)  # alive until this is over
        job.flat, job.outputs, job.between = crossing.flat, crossing.outputs, None
        if job.seeks:
            assert job.flat is not None
            job.found = transport.found(job.flat)


def plan_pieces(
    slots: Sequence[Slot], rank: int, dtype: torch.dtype, marks_alone: bool = False
) -> FlatPlan:
    """Lay out the input between nodes: marks after pieces, even if these are empty.

    Args:
        slots: the members' pieces.
        rank: among the ranks that share their rows.
        dtype: of the reduction.
        marks_alone: whether marks have a separate collective.
    """
    payload, starts = 0, []
    for slot in slots:
        starts.append(payload)
        payload += slot.shard_numel
    multiple = max(COLLECTIVE_ALIGN_BYTES // dtype.itemsize, 1)
    rows_width = round_up(payload, multiple)
    start = rows_width if marks_alone else payload
    width = round_up(start + len(slots), multiple)
    planned = runs([slot.local_shape(rank) for slot in slots], starts)
    marks = MarksPlace(start, width - start)
    return FlatPlan(payload, starts, rows_width, width, marks, (width,), planned)


def pieces_reduce(
    slots: Sequence[Slot],
    collectives: Collectives,
    spec: ReductionSpec,
    kind: ReduceKind,
    kernels: Kernels,
    coded: type[PiecesReduce] | None = None,
) -> PiecesReduce:
    """The transport between nodes.

    Args:
        slots: the members' pieces.
        collectives: of the ranks that share their rows.
        spec: the settings of the reduction's steps.
        kind: how it reduces.
        kernels: memory and copies.
        coded: the transport of encoded sums, if they are encoded.
    """
    dtype = spec.reduce_dtype
    collectives = collectives_of(dtype, collectives)
    chosen = coded if coded is not None and any(s.shard_numel for s in slots) else PiecesReduce
    flat = plan_pieces(slots, collectives.rank, dtype, not chosen.carries_marks)
    assert flat.marks is not None
    small = spec.hook is not None
    marks = PresenceMarks(collectives.size, flat.marks, (dtype,), small, kernels)
    division = Division(None, kind, kind, None)
    own = replace(spec, grad_dtype=dtype)
    context = ReduceContext(slots, 0, own, division, flat, marks, collectives, kernels)
    return chosen(context)
