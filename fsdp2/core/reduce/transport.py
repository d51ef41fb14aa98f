"""How full gradients come to the reduce-scatter, and their sums to the flat result.

    Direct   gradients ══ one launch, a reduce-scatter each ══> rows                   no copy
    Cast     gradients ── cast ──> parameter-major buffer ══ the same ══> rows
    Packed   gradients ── pad, cast, interleave ──> [ranks, n] ══ one reduce-scatter ══> flat result
    Joined   the first members direct or cast, the others packed, in one launch:
             grad A | grad B | [ranks, C D marks]  ══>  [ A's rows | B's | C D marks ]
    Custom   as packed, by a collective of the user's, between buffers that it allocates; a copy
             leaves its output at once, so that it may use them for the next reduction
    Local    one rank: gradients are copied into the flat result
    Adopted  one rank, nothing to do: autograd's gradients are the result
    Empty    no member has any element

Each owns what its collective reads: staging, the views of it, padding. The verbs, with their lanes,
are those of `ReduceTransport`. `kinds` has them by name, and says which is used where.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from fsdp2.core.custom_collectives import checked_buffer
from fsdp2.core.device.buffers import TransientBuffer, row_major
from fsdp2.core.layout.layout import Slot
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import ReduceContext, ReduceTransport

STAGING = "reduce-scatter input"
RANK_MAJOR = "rank-major gradient"


class DirectReduce(ReduceTransport):
    """The collective reads autograd's gradients in place."""

    def _bind(self, context: ReduceContext) -> None:
        self.scatter = self.collectives.bind_reduce_scatter_many(context.division.kind)
        slots, size = context.slots[: context.direct], self.collectives.size
        if any(slot.dim for slot in slots):  # some backends compare numbers of rows
            self._pieces = [(size * slot.piece[0], *slot.piece[1:]) for slot in slots]


class CastReduce(DirectReduce):
    """One fused copy casts gradients into a parameter-major buffer."""

    frees = True
    staging: TransientBuffer

    def _bind(self, context: ReduceContext) -> None:
        super()._bind(context)
        nbytes = sum(slot.numel for slot in self.slots) * self.reduce_dtype.itemsize
        self.staging = self.kernels.transient(nbytes, STAGING)
        self._targets = _cast_targets(self.staging, self.slots, self.reduce_dtype)
        self.staging.release()

    def stage(self, job: Job) -> None:
        self.staging.acquire()
        self.kernels.copy_strided(self._targets, job.grads)
        job.grads = self._targets
        if self._pieces:
            self._as_pieces(job)


def _cast_targets(
    staging: TransientBuffer, slots: Sequence[Slot], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Buffers for unsharded gradients, one after another."""
    places, start = [], 0
    for slot in slots:
        places.append(row_major(slot.shape, start))
        start += slot.numel
    return staging.views(dtype, 0, places)


class PackingReduce(ReduceTransport):
    """The common part of transports that pack all members or the last ones: as one row per rank.

    Attributes:
        width: elements of each row: those of the packed members, and marks or padding after them.
    """

    frees = True

    def _bind(self, context: ReduceContext) -> None:
        flat, size, first = context.flat, self.collectives.size, context.direct
        self._first = first
        self._packed = self.slots[first:]
        self._in_rows = all(slot.dim == 0 and slot.shard_numel for slot in self._packed)
        self._start = [*flat.starts, flat.payload][first]  # of what is packed, in the flat result
        end = flat.width if self.carries_marks else flat.rows_width
        self.width = end - self._start
        self._pads: dict[torch.dtype, torch.Tensor] = {}
        if self.carries_marks:
            assert self.marks is not None
            self._pads.update(self.marks.sent)
        elif end > flat.payload:
            shape = (size, end - flat.payload)
            for dtype in {self.grad_dtype, self.reduce_dtype}:
                self._pads[dtype] = self.kernels.zeros(shape, dtype, "padding")

    def pack(self, job: Job, rows: torch.Tensor) -> None:
        """Pad, cast and interleave gradients, and the marks after them, into ``rows``.

        Those of members that are not packed stay in the job.

        Args:
            job: the job.
            rows: [ranks, width], in any dtype.
        """
        self._pack(job, rows, self.unify(job))

    def _pack(self, job: Job, rows: torch.Tensor, dtype: torch.dtype) -> None:
        """As `pack`, of gradients of one dtype."""
        first = self._first
        parts = job.grads[first:]
        if not self._in_rows:
            parts = [
                grad if slot.dim == 0 else self._rank_major(slot, grad)
                for slot, grad in zip(self._packed, parts, strict=True)
                if slot.shard_numel
            ]
        if self.carries_marks and job.marks is not None:
            sent = job.marks[0]
            parts.append(sent if sent.dtype is dtype else sent.to(dtype))
        elif dtype in self._pads:
            parts.append(self._pads[dtype])
        self.kernels.chunk_cat(parts, 0, self.collectives.size, out=rows)
        job.grads = job.grads[:first]

    def _rank_major(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
        """A gradient sharded on a later dim, as rows of one rank's piece each: [ranks, n]."""
        size = self.collectives.size
        if slot.in_order:
            return grad.reshape(size, slot.shard_numel)
        rows = self.kernels.zeros((size, slot.shard_numel), grad.dtype, RANK_MAJOR)
        return self._fill(slot, grad, rows)

    def _fill(self, slot: Slot, grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        bands, outer, inner = slot.cut.bands, slot.outer, slot.inner
        pieces = rows.view(bands, slot.per_band, slot.shard_numel)
        for ranks, first, length in slot.blocks():
            source = grad.narrow(slot.dim, first * slot.chunk, ranks * length)
            source = source.reshape(bands, outer, ranks, length, inner).transpose(1, 2)
            part = pieces.narrow(1, first, ranks).narrow(2, 0, outer * length * inner)
            self.kernels.copy(part.view(bands, ranks, outer, length, inner), source)
        return rows


class PackedReduce(PackingReduce):
    """Everything in one tensor: [ranks, n], of which each rank receives its row's sum.

    If kernels are not fused, casting each gradient into its columns takes one kernel each, three
    times as long as this (torch 2.11 to 2.15, CPU):

        gradients ── one copy ──> [ranks, n] of their dtype ── one cast ──> staging

    The gradients are freed before staging is allocated, so that it takes no more memory.
    """

    staging: TransientBuffer

    def _bind(self, context: ReduceContext) -> None:
        super()._bind(context)
        size, dtype = self.collectives.size, self.reduce_dtype
        self._new_packed: Callable[[], torch.Tensor] | None = None
        if self.grad_dtype != dtype and not self.kernels.fuses:
            shape = (size, self.width)
            self._new_packed = self.kernels.bind_empty(shape, self.grad_dtype, "packed gradients")
        self.staging = self.kernels.transient(size * self.width * dtype.itemsize, STAGING)
        self._input = self.staging.view(dtype, 0, (size * self.width,))
        self._rows = self.staging.view(dtype, 0, (size, self.width))
        self.staging.release()
        self.scatter = self.collectives.bind_reduce_scatter(context.division.kind)

    def stage(self, job: Job) -> None:
        dtype = self.unify(job)
        if self._new_packed is None or dtype is self.reduce_dtype:
            self.staging.acquire()
            self._pack(job, self._rows, dtype)
            return
        packed = self._new_packed()
        self._pack(job, packed, dtype)
        self.staging.acquire()
        self.kernels.copy(self._rows, packed)

    def divide(self, job: Job) -> None:
        assert self.before is not None
        self.kernels.divide(self._input, self.before)

    def reduce(self, job: Job) -> None:
        work = self.scatter(job.flat, self._input)
        if work is not None:
            work.wait()


class JoinedReduce(PackingReduce, DirectReduce):
    """The first members direct or cast, the others packed: one launch, one buffer.

    staging   [ casts of A | of B | [ranks, C D marks] ]     without casts, where dtypes agree
    """

    staging: TransientBuffer

    def _bind(self, context: ReduceContext) -> None:
        PackingReduce._bind(self, context)
        DirectReduce._bind(self, context)
        size, dtype = self.collectives.size, self.reduce_dtype
        slots = self.slots[: context.direct] if self.grad_dtype != dtype else ()
        start = sum(slot.numel for slot in slots) * dtype.itemsize
        nbytes = start + size * self.width * dtype.itemsize
        self.staging = self.kernels.transient(nbytes, STAGING)
        self._input = self.staging.view(dtype, start, (size * self.width,))
        self._rows = self.staging.view(dtype, start, (size, self.width))
        self._targets = _cast_targets(self.staging, slots, dtype)
        self.staging.release()

    def stage(self, job: Job) -> None:
        self.staging.acquire()
        self.pack(job, self._rows)
        if not self._targets:
            super().stage(job)
            return
        self.kernels.copy_strided(self._targets, job.grads)
        job.grads = self._targets
        if self._pieces:
            self._as_pieces(job)

    def divide(self, job: Job) -> None:
        assert self.before is not None
        self.kernels.divide(self._input, self.before)
        super().divide(job)

    def reduce(self, job: Job) -> None:
        assert job.flat is not None
        packed = job.flat.narrow(0, self._start, self.width)
        outputs = job.outputs[: self._first]
        work = self.scatter([*outputs, packed], [*job.grads, self._input])
        if work is not None:
            work.wait()


class CustomReduce(PackingReduce):
    """Packed, with the user's collective, which may do anything: marks have a separate one."""

    carries_marks = False
    unstages = True

    def _bind(self, context: ReduceContext) -> None:
        super()._bind(context)
        spec = context.spec
        assert spec.comm is not None
        assert spec.device is not None
        self._comm, self._device = spec.comm, spec.device
        self._input: torch.Tensor | None = None
        self.scatter = functools.partial(
            self.collectives.custom_reduce_scatter, spec.comm, kind=context.division.kind
        )

    def stage(self, job: Job) -> None:
        size, width = self.collectives.size, self.width
        comm, dtype, device = self._comm, self.reduce_dtype, self._device
        self._input = checked_buffer(comm, size * width, dtype, device)
        job.scattered = checked_buffer(comm, width, dtype, device)
        self.pack(job, self._input.view(size, width))

    def divide(self, job: Job) -> None:
        assert self.before is not None
        assert self._input is not None
        self.kernels.divide(self._input, self.before)

    def reduce(self, job: Job) -> None:
        work = self.scatter(job.scattered, self._input)
        if work is not None:
            work.wait()

    def unstage(self, job: Job) -> None:
        assert job.flat is not None
        assert job.scattered is not None
        self.kernels.copy(job.flat.narrow(0, 0, self.width), job.scattered)

    def release(self) -> None:
        self._input = None


class OwnMemoryReduce(CustomReduce):
    """With fsdp2's collectives in memory that suits the backend: sums, as usual."""

    carries_marks = True


class LocalReduce(ReduceTransport):
    """One rank: gradients are copied to where the rows are used on."""

    communicates = False

    def stage(self, job: Job) -> None:
        if self.marks is None:
            self.kernels.copy_strided(job.outputs, job.grads)
            return
        sent, found = self.marks.of(job)
        self.kernels.copy_strided([*job.outputs, found], [*job.grads, sent])

    def divide(self, job: Job) -> None:
        assert self.before is not None
        assert job.flat is not None
        self.kernels.divide(job.flat, self.before)


class AdoptedReduce(ReduceTransport):
    """One rank without other steps: autograd's gradient becomes ``.grad``."""

    communicates = stages = False

    def allocate(self, job: Job) -> None:
        self.stage(job)
        # With create_graph=True autograd's have a graph, which no reduced gradient has.
        job.outputs = [grad.detach() if grad.requires_grad else grad for grad in job.grads]


class EmptyReduce(ReduceTransport):
    """No rank has any element of any member."""

    communicates = stages = False
