"""From full gradients to sharded ``.grad``: the steps, bound once per group.

    collect      take the gradients that autograd left on the unsharded parameters    COMPUTE
    stage        put them where the collective reads them; only where they must move  COMPUTE
    divide       before the sum, for dtypes that could overflow                       REDUCE
    reduce       reduce-scatter over the shard axis                                   REDUCE
    keep         instead of all that follows: add to the partial sums                 REDUCE
    all-reduce   over the replicate axis, partial sums included                       ALL_REDUCE
    hook         the user's                                                           ALL_REDUCE
    divide       after the sum                                                        (last lane)
    cast         to the gradient's dtype                                              (last lane)
    to host      copy to CPU memory                                                   (last lane)
    deliver      become, or add to, the sharded parameter's ``.grad``                 (last lane)

The last lane is ALL_REDUCE where anything runs there, else REDUCE; what was copied to the host is
delivered by the host, once the copy has arrived. A step that a configuration does not need is not
in the program. Where gradients' memory is kept (`fsdp2.core.kept`) the result is written there, if
it is free. Three ways to stage:

    direct    autograd's gradients are the collective's inputs as they are: no copy
    cast      one fused copy casts them into a parameter-major buffer
    packed    one fused copy pads, casts and interleaves them rank-major: [ranks, n]

The user's own collective reduces packed gradients between buffers that it allocates; a copy of this
rank's rows leaves its output at once, so that it may use the same buffers for the next reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp2.core.collectives import Collectives, Replicas, collectives_of, replicas_of
from fsdp2.core.division import plan_division
from fsdp2.core.kept import KeptGradients
from fsdp2.core.kernels import Kernels, runs, whole_run
from fsdp2.core.layout import COLLECTIVE_ALIGN_BYTES, Slot
from fsdp2.core.program import Job, Program, ReductionSpec, Step
from fsdp2.core.spares import FEWEST, Spares
from fsdp2.core.transport import allocated, shard_blocks


class SegmentReduction:
    """The bound steps of the members of a group that are reduced alike.

    Args:
        members: the parameters (`ShardedParam`, or simulated ones).
        slots: their slots in the group's layout.
        spec: what sets the steps.
        collectives: of the shard axis.
        replicas: of the replicate axis, if there is one.
        kernels: memory and copies.

    Attributes:
        full: the program that ends in ``.grad``.
        partial: the program that ends in partial sums, without all-reduce; ``full`` where there
            are no replicas.
        partial_sums: what reductions without all-reduce left, flat, in the reduce dtype.
    """

    __slots__ = (
        "__weakref__",
        "_input",
        "_kept",
        "_kind",
        "_pads",
        "_param_class",
        "_partial_present",
        "_payload",
        "_pieces",
        "_replica_kind",
        "_rows",
        "_rows_of",
        "_shape",
        "_spares",
        "_staging",
        "_targets",
        "_width",
        "collectives",
        "full",
        "grad_dtype",
        "kernels",
        "members",
        "partial",
        "partial_sums",
        "reduce_dtype",
        "replicas",
        "slots",
        "spec",
    )

    def __init__(
        self,
        members: Sequence[Any],
        slots: Sequence[Slot],
        spec: ReductionSpec,
        collectives: Collectives,
        replicas: Replicas | None,
        kernels: Kernels,
    ) -> None:
        self.members = members
        self._param_class: Any = type(members[0])  # what is done for all members in one call
        self.slots = slots
        self.spec = spec
        self.kernels = kernels
        self.collectives = collectives_of(spec.reduce_dtype, collectives)
        self.replicas = None
        if replicas is not None and replicas.size > 1:
            self.replicas = replicas_of(spec.reduce_dtype, replicas)
        self.grad_dtype = spec.grad_dtype
        self.reduce_dtype = spec.reduce_dtype
        self.partial_sums: Any = None
        self._partial_present: list[bool] = []
        width, starts = 0, []
        for slot in slots:
            starts.append(width)
            width += slot.shard_numel
        shapes = [slot.local_shape(collectives.rank) for slot in slots]
        self._rows_of = runs(shapes, starts)
        self._payload = width
        if not width:
            self.replicas = None  # nothing but empty parameters
        multiple = max(COLLECTIVE_ALIGN_BYTES // self.reduce_dtype.itemsize, 1)
        self._width = width if collectives.size == 1 else -(-width // multiple) * multiple
        self._shape: tuple[int, ...] = (self._width,)  # of the result
        together = whole_run(shapes) if spec.direct and spec.hook is None else None
        if together is not None and width == self._width:  # nobody needs it flat
            self._shape, self._rows_of = together.shape, [together]
        self._staging: Any = None
        self._input: Any = None
        self._targets: list[Any] = []
        self._pads: dict[torch.dtype, list[Any]] = {}
        self._kept = KeptGradients(members)
        self._spares = Spares() if len(members) >= FEWEST else None
        self.full, self.partial = self._bind()

    # ---- binding

    def _bind(self) -> tuple[Program, Program]:
        spec = self.spec
        compute: list[Step] = []
        reduce: list[Step] = []
        communicates = self.replicas is not None or spec.hook is not None
        if self.collectives.size == 1 and not communicates and not spec.to_host:
            self._bind_local(compute)
            program = Program(compute)
            return program, program
        copies = 1 if self.replicas is None else self.replicas.size
        size = self.collectives.size
        division = plan_division(
            self.reduce_dtype,
            size,
            spec.factor if size * copies > 1 or spec.factor is not None else 1.0,
            self.collectives.premultiplies,
            copies,
            spec.sum_only,
        )
        self._kind, self._replica_kind = division.kind, division.replicas
        if size == 1:
            compute.append(SegmentReduction._copy_local)
            if division.before is not None:
                reduce.append(_divide_flat(division.before))
        elif self._payload:
            self._bind_collective(division.before, compute, reduce)
        return self._programs(division.after if self._payload else None, compute, reduce)

    def _programs(
        self, after: float | None, compute: list[Step], reduce: list[Step]
    ) -> tuple[Program, Program]:
        spec = self.spec
        middle: list[Step] = []
        if self.replicas is not None:
            middle += [SegmentReduction._add_partial, SegmentReduction._all_reduce]
        if spec.hook is not None:
            middle.append(SegmentReduction._run_hook)
        finish: list[Step] = [] if after is None else [_divide_flat(after)]
        casts = self.reduce_dtype != spec.result_dtype
        keep = spec.keep and not spec.to_host  # that is, on the device
        started = [SegmentReduction._allocate, *compute]
        if keep and not casts:
            started[0] = SegmentReduction._allocate_kept
        if casts:
            allocate = SegmentReduction._allocate_kept_result
            started.append(allocate if keep else SegmentReduction._allocate_result)
            finish.append(SegmentReduction._cast)
        host: tuple[Step, ...] = ()
        if spec.to_host:
            finish.append(
                SegmentReduction._to_kept_host if spec.keep else SegmentReduction._to_host
            )
            host = (SegmentReduction._deliver,)
        else:
            finish.append(SegmentReduction._deliver)
        if middle:
            full = Program(started, reduce, (*middle, *finish), host)
        else:
            full = Program(started, (*reduce, *finish), host=host)
        if self.replicas is None:
            return full, full
        compute.insert(0, SegmentReduction._allocate)
        partial = Program(compute, (*reduce, SegmentReduction._keep_partial))
        return full, partial

    def _bind_local(self, compute: list[Step]) -> None:
        """One rank: a gradient of the result's dtype becomes ``.grad`` as it is."""
        self._spares = None  # of memory of its own, which must not wait for others to go
        factor = self.spec.factor
        self.reduce_dtype = self.spec.result_dtype
        if self.grad_dtype == self.reduce_dtype:
            compute.append(SegmentReduction._adopt)
        else:
            compute += [SegmentReduction._allocate, SegmentReduction._copy_local]
        if factor is not None and factor != 1:
            compute.append(lambda self, job: self._divide_each(job.outputs, factor))
        compute.append(SegmentReduction._deliver)

    def _bind_collective(
        self, before: float | None, compute: list[Step], reduce: list[Step]
    ) -> None:
        if self.spec.comm is not None or not self.spec.direct:
            self._bind_packed()
            compute.append(SegmentReduction._stage_packed)
            if before is not None:
                reduce.append(lambda self, job: self.kernels.divide(self._input, before))
            if self.spec.comm is None:
                reduce.append(SegmentReduction._reduce_packed)
            else:
                reduce += [SegmentReduction._reduce_custom, SegmentReduction._copy_custom]
            return
        if self.grad_dtype != self.reduce_dtype:
            self._bind_cast()
            compute.append(SegmentReduction._stage_cast)
        else:
            compute.append(SegmentReduction._stage_direct)
        if any(slot.dim for slot in self.slots):
            size = self.collectives.size
            self._pieces = [(size * slot.piece[0], *slot.piece[1:]) for slot in self.slots]
            compute.append(SegmentReduction._as_pieces)
        if before is not None:
            reduce.append(lambda self, job: self._divide_each(job.grads, before))
        reduce.append(SegmentReduction._reduce_direct)

    def _bind_cast(self) -> None:
        itemsize = self.reduce_dtype.itemsize
        numel = sum(slot.numel for slot in self.slots)
        self._staging = self.kernels.transient(numel * itemsize, "reduce-scatter input")
        start = 0
        for slot in self.slots:
            self._targets.append(self._staging.view(self.reduce_dtype, start, slot.shape))
            start += slot.numel * itemsize
        self._staging.release()

    def _bind_packed(self) -> None:
        size = self.collectives.size
        if self.spec.comm is None:
            nbytes = size * self._width * self.reduce_dtype.itemsize
            self._staging = self.kernels.transient(nbytes, "reduce-scatter input")
            self._input = self._staging.view(self.reduce_dtype, 0, (size * self._width,))
            self._rows = self._staging.view(self.reduce_dtype, 0, (size, self._width))
            self._staging.release()
        if self._width > self._payload:
            shape = (size, self._width - self._payload)
            for dtype in {self.grad_dtype, self.reduce_dtype}:
                self._pads[dtype] = [self.kernels.zeros(shape, dtype, "padding")]

    # ---- steps on the COMPUTE lane

    def _allocate(self, job: Job) -> None:
        kernels = self.kernels
        job.flat = kernels.empty(self._shape, self.reduce_dtype, "reduce-scatter output")
        job.outputs = kernels.views(job.flat, self._rows_of)

    def _allocate_kept(self, job: Job) -> None:
        if self._take_kept(job):
            job.flat, job.outputs = self._kept.flat, self._kept.rows
        else:
            self._allocate(job)

    def _adopt(self, job: Job) -> None:
        self._stage_direct(job)
        # With create_graph=True autograd's have a graph, which no reduced gradient has.
        job.outputs = [grad.detach() if grad.requires_grad else grad for grad in job.grads]

    def _allocate_result(self, job: Job) -> None:
        job.result = self.kernels.empty(self._shape, self.spec.result_dtype, "sharded gradient")

    def _allocate_kept_result(self, job: Job) -> None:
        if self._take_kept(job):
            job.result = self._kept.flat
        else:
            self._allocate_result(job)

    def _take_kept(self, job: Job) -> bool:
        """Let the result go to the memory that is kept, unless that still is a gradient."""
        kept, spec = self._kept, self.spec
        if not kept.is_free():
            return False
        if kept.flat is None:
            if spec.to_host:
                flat = self.kernels.host_empty(self._shape, spec.result_dtype, spec.pin)
            else:
                flat = self.kernels.empty(self._shape, spec.result_dtype, "kept gradient")
            kept.allocate(flat, self.views(flat))
        kept.taken = True
        job.kept = kept
        return True

    def _unify(self, job: Job) -> torch.dtype:
        """Give all gradients one dtype: autograd's, or the reduction's where any differs."""
        for grad in job.grads:
            if grad.dtype != self.grad_dtype:
                job.grads = [grad.to(self.reduce_dtype) for grad in job.grads]
                return self.reduce_dtype
        return self.grad_dtype

    def _stage_direct(self, job: Job) -> None:
        dtype = self.grad_dtype
        for grad in job.grads:
            if grad.dtype is not dtype or not grad.is_contiguous():
                self._unify(job)
                job.grads = [grad.contiguous() for grad in job.grads]
                return

    def _stage_cast(self, job: Job) -> None:
        self._staging.acquire()
        self.kernels.copy_many(self._targets, job.grads)
        job.grads = self._targets

    def _as_pieces(self, job: Job) -> None:
        """Gradients as one piece behind the other, as some backends compare numbers of rows."""
        job.grads = [grad.view(shape) for shape, grad in zip(self._pieces, job.grads, strict=True)]

    def _stage_packed(self, job: Job) -> None:
        dtype = self._unify(job)
        if self._staging is not None:
            self._staging.acquire()
        else:
            self._allocate_custom(job)
        rows = [
            grad if slot.dim == 0 else self._rank_major(slot, grad)
            for slot, grad in zip(self.slots, job.grads, strict=True)
            if slot.shard_numel
        ]
        rows += self._pads.get(dtype, ())
        self.kernels.chunk_cat(rows, self.collectives.size, self._rows)
        job.grads = []

    def _allocate_custom(self, job: Job) -> None:
        assert self.spec.comm is not None
        size, width = self.collectives.size, self._width
        comm, dtype, device = self.spec.comm, self.reduce_dtype, self.spec.device
        self._input = allocated(comm, size * width, dtype, device)
        self._rows = self._input.view(size, width)
        job.scattered = allocated(comm, width, dtype, device)

    def _rank_major(self, slot: Slot, grad: Any) -> Any:
        """A gradient sharded on a later dim, as rows of one rank's piece each: [ranks, n]."""
        size, bands, outer, inner = self.collectives.size, slot.cut.bands, slot.outer, slot.inner
        if slot.in_order:
            return grad.reshape(size, slot.shard_numel)
        rows = self.kernels.zeros((size, slot.shard_numel), grad.dtype, "rank-major gradient")
        pieces = rows.view(bands, slot.per_band, slot.shard_numel)
        for ranks, first, length in shard_blocks(slot):
            source = grad.narrow(slot.dim, first * slot.chunk, ranks * length)
            source = source.reshape(bands, outer, ranks, length, inner).transpose(1, 2)
            part = pieces.narrow(1, first, ranks).narrow(2, 0, outer * length * inner)
            self.kernels.copy(part.view(bands, ranks, outer, length, inner), source)
        return rows

    # ---- steps on the REDUCE lane

    def _divide_each(self, tensors: Sequence[Any], factor: float) -> None:
        for tensor in tensors:
            self.kernels.divide(tensor, factor)

    def _reduce_direct(self, job: Job) -> None:
        work = self.collectives.reduce_scatter_many(job.outputs, job.grads, self._kind)
        if work is not None:
            work.wait()

    def _reduce_packed(self, job: Job) -> None:
        work = self.collectives.reduce_scatter(job.flat, self._input, self._kind)
        if work is not None:
            work.wait()

    def _reduce_custom(self, job: Job) -> None:
        assert self.spec.comm is not None
        work = self.collectives.custom_reduce_scatter(
            self.spec.comm, job.scattered, self._input, self._kind
        )
        if work is not None:
            work.wait()

    def _copy_custom(self, job: Job) -> None:
        self.kernels.copy(job.flat, job.scattered)

    def _copy_local(self, job: Job) -> None:
        self.kernels.copy_many(job.outputs, job.grads)

    def _keep_partial(self, job: Job) -> None:
        """Add to the sums that wait for an all-reduce."""
        if self.partial_sums is None:
            self.partial_sums, self._partial_present = job.flat, job.present
            return
        job.partial = self.partial_sums  # alive until this is over, whoever drops them (I9)
        self.kernels.add_many([job.partial], [job.flat])
        present = zip(self._partial_present, job.present, strict=True)
        self._partial_present = [before or now for before, now in present]

    def _add_partial(self, job: Job) -> None:
        if self.partial_sums is not None:
            job.partial, self.partial_sums = self.partial_sums, None
            self.kernels.add_many([job.flat], [job.partial])

    def _all_reduce(self, job: Job) -> None:
        assert self.replicas is not None
        work = self.replicas.all_reduce(job.flat, self._replica_kind)
        if work is not None:
            work.wait()

    def _run_hook(self, job: Job) -> None:
        assert self.spec.hook is not None
        self.spec.hook(job.flat)

    def _to_host(self, job: Job) -> None:
        """Copy out; the host delivers what arrives."""
        source = job.flat if job.result is None else job.result
        target = self.kernels.host_empty(self._shape, source.dtype, self.spec.pin)
        self.kernels.to_host(target, source)
        job.outputs = self.views(target)

    def _to_kept_host(self, job: Job) -> None:
        if self._take_kept(job):
            source = job.flat if job.result is None else job.result
            self.kernels.to_host(self._kept.flat, source)
        else:
            self._to_host(job)

    def _cast(self, job: Job) -> None:
        self.kernels.copy(job.result, job.flat)
        job.outputs = self.views(job.result) if job.kept is None else job.kept.rows

    def _deliver(self, job: Job) -> None:
        """Set ``.grad``, or add to it where there is one; then run the users' hooks."""
        members, kept = self.members, job.kept
        outputs = job.outputs if kept is None else kept.objects
        if False in job.present:
            members = [m for m, present in zip(members, job.present, strict=True) if present]
            outputs = [r for r, present in zip(outputs, job.present, strict=True) if present]
        if kept is not None:
            kept.taken = False
            self._param_class.place(members, outputs)
            return
        spares = self._spares if members is self.members else None
        waiting = self._param_class.deliver(members, outputs, spares)
        if waiting:
            added, sums, addends = zip(*waiting, strict=True)
            job.sums += sums
            self.kernels.add_many(sums, addends)
            for member in added:
                member.run_hooks()

    # ---- running

    def views(self, flat: Any) -> list[Any]:
        """This rank's rows of each member, in a flat tensor of them."""
        views: list[Any] = self.kernels.views(flat, self._rows_of)
        return views

    @property
    def has_work(self) -> bool:
        """Whether there is anything to collect."""
        return self.partial_sums is not None or self._param_class.have_gradients(self.members)

    def collect(
        self, take_missing: bool, all_reduce: bool = True, summed: bool = False
    ) -> Job | None:
        """Take the members' gradients; ``None`` where there is nothing to reduce.

        Args:
            take_missing: reduce (as zeros, delivered too) members without a gradient.
            all_reduce: whether partial sums are reduced, too, so that they alone are enough.
            summed: whether gradients of earlier backwards are among them.
        """
        grads: list[Any] = self._param_class.take_gradients(self.members, summed)
        missing = 0
        for grad in grads:
            if grad is None:
                missing += 1
        if not missing:
            return Job(grads, [True] * len(grads))
        waits = self.partial_sums is not None
        if missing == len(grads) and not take_missing and not (waits and all_reduce):
            return None
        # Zeros are for members that are trained; those with sums of earlier backwards are
        # delivered, whatever this one brings.
        waiting = [take_missing and member.requires_grad for member in self.members]
        if waits:
            both = zip(waiting, self._partial_present, strict=True)
            waiting = [wanted or before for wanted, before in both]
        present = [wanted or grad is not None for wanted, grad in zip(waiting, grads, strict=True)]
        return Job([self._zeros(m, g) for m, g in zip(self.members, grads, strict=True)], present)

    def absent(self) -> Job:
        """Zeros for all members, which get no gradient by them."""
        grads = [self._zeros(member, None) for member in self.members]
        return Job(grads, [False] * len(grads))

    def _zeros(self, member: Any, grad: Any) -> Any:
        if grad is not None:
            return grad
        return self.kernels.zeros(member.shape, self.grad_dtype, "absent gradient")

    def discard(self) -> None:
        """Drop partial sums."""
        self.partial_sums = None

    def abandon(self) -> None:
        """Let go of everything that an exception left half way."""
        self.release()
        self._kept.taken = False

    def release(self) -> None:
        """Free what the reduce-scatter read, once COMPUTE is behind it."""
        if self._staging is None:
            self._input = self._rows = None
        elif self._staging.allocated:
            self._staging.release()


COLLECTIVES: dict[Step | None, str] = {
    SegmentReduction._reduce_direct: "reduce-scatter",
    SegmentReduction._reduce_packed: "reduce-scatter",
    SegmentReduction._reduce_custom: "reduce-scatter",
    SegmentReduction._all_reduce: "all-reduce",
}
"""The steps that communicate, and what they do."""


def _divide_flat(factor: float) -> Step:
    return lambda self, job: self.kernels.divide(job.flat, factor)


def with_zeros(
    jobs: list[tuple[SegmentReduction, Job | None]],
) -> list[tuple[SegmentReduction, Job]]:
    """A group's jobs, with one of zeros for each that is missing; none where all are.

    Ranks that use parameters of different dtypes run the same collectives then (decision 3).
    """
    if all(job is None for _, job in jobs):
        return []
    return [(reduction, job or reduction.absent()) for reduction, job in jobs]
