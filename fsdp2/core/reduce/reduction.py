"""From full gradients to sharded ``.grad``, from top to bottom as it happens.

    bind         choose the steps, once
    collect      take the gradients that autograd left on the unsharded parameters    COMPUTE
    launch       run the steps, each on its lane:
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
      found        deliver what other ranks had and this one had not                    the host
    PendingReduction: the jobs, and events behind reduce-scatter and all, until COMPUTE has waited

The last lane is ALL_REDUCE where anything runs there, else REDUCE; what was copied to the host is
delivered by the host, once the copy has arrived. A step that a configuration does not need is not
in the program. Where gradients' memory is kept (`storage`) the result is written there, if it is
free. Where all lanes are one, as on a CPU, all is over when the launch returns: nothing is pending.
Three ways to stage:

    direct    autograd's gradients are the collective's inputs as they are: no copy
    cast      one fused copy casts them into a parameter-major buffer
    packed    one fused copy pads, casts and interleaves them rank-major: [ranks, n]

Where some are staged directly or cast, and others packed, they are reduced in one launch:

    inputs    grad A | grad B | [ranks, C D marks]     flat result   [ A's rows | B's | C D marks ]

The user's own collective reduces packed gradients between buffers that it allocates; a copy of this
rank's rows leaves its output at once, so that it may use the same buffers for the next reduction.

With the gradients travel marks (`marks`): of whom each is. A rank that lacks a gradient runs a
program of more steps: it sends marks of its own, and looks at what comes back before it delivers
rows of what others had. Where lanes are streams, the host looks at the end of backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from fsdp2.core.custom_collectives import checked_buffer
from fsdp2.core.device.buffers import TransientBuffer
from fsdp2.core.device.collectives import Collectives, Replicas, Work, collectives_of, replicas_of
from fsdp2.core.device.comm_memory import OwnMemory
from fsdp2.core.device.kernels import Kernels, Tensors
from fsdp2.core.device.streams import ALL_REDUCE, COMPUTE, REDUCE, Event, Streams
from fsdp2.core.layout.layout import COLLECTIVE_ALIGN_BYTES, Slot
from fsdp2.core.params.gradients import Gradients, Sum
from fsdp2.core.params.param import ShardedParam
from fsdp2.core.progress import communication_error
from fsdp2.core.reduce.marks import Marks
from fsdp2.core.reduce.program import (
    Division,
    Program,
    ReductionSpec,
    plan_division,
    runs,
    whole_run,
)
from fsdp2.core.reduce.storage import KeptGradients

P = TypeVar("P")

_UNSET: Any = None
"""Of what some step sets before another reads it; the program has both or neither."""


class Job:
    """One reduction on its way: what each step leaves for the next.

    Attributes:
        grads: full gradients, a tensor for every member.
        present: which members had one, or are to be delivered anyway; the others are reduced as
            zeros, and delivered if another rank had one.
        seeks: whether that is to be found out.
        sent: this rank's marks then.
        found: the sums of all ranks' marks then.
        arrived: the same in CPU memory; from before and behind the user's hook, which may sum them
            up over more ranks, or lose them.
        outputs: this rank's reduced rows, a tensor for every member.
        flat: the flat tensor that they are views of, in the reduce dtype.
        scattered: what a user's reduce-scatter writes; ``flat`` gets a copy.
        result: the same in the gradient's dtype.
        partial: partial sums that were added, alive until the reduction is over.
        kept: the memory that the result is in, if that is kept.
        sums: gradients that the outputs were added to; a hook may have dropped them meanwhile.
    """

    # Of the class until a step sets them, which most do not.
    flat: torch.Tensor = _UNSET
    scattered: torch.Tensor = _UNSET
    result: torch.Tensor = _UNSET
    partial: torch.Tensor = _UNSET
    kept: KeptGradients | None = None
    seeks = False
    sent: torch.Tensor = _UNSET
    found: torch.Tensor = _UNSET
    arrived: tuple[torch.Tensor, ...] = ()
    outputs: Tensors = ()
    sums: tuple[torch.Tensor, ...] = ()

    def __init__(self, grads: list[torch.Tensor], present: list[bool]) -> None:
        self.grads = grads
        self.present = present


Step = Callable[["Reduction", Job], object]
"""A method of `Reduction`, not bound to it: one that is replaced is freed at once."""


class Reduction:
    """The bound steps of the members of a group that are reduced alike.

    Args:
        gradients: of the members.
        slots: the members' slots in the group's layout.
        direct: how many of the first members are reduced from where their gradients are, or from
            where they are cast to; the others are packed.
        spec: what sets the steps.
        collectives: of the shard axis.
        replicas: of the replicate axis, if there is one.
        kernels: memory and copies.

    Attributes:
        members: the parameters.
        full: the program that ends in ``.grad``.
        partial: the program that ends in partial sums, without all-reduce; ``full`` where there
            are no replicas.
        partial_sums: what reductions without all-reduce left, flat, in the reduce dtype.
    """

    __slots__ = (
        "__weakref__",
        "_direct",
        "_input",
        "_kept",
        "_marks",
        "_new_flat",
        "_new_result",
        "_packed_from",
        "_pads",
        "_partial_present",
        "_payload",
        "_pieces",
        "_replica_kind",
        "_rows",
        "_rows_of",
        "_rows_width",
        "_scatter",
        "_scatter_marks",
        "_sent_width",
        "_shape",
        "_staging",
        "_targets",
        "_unread",
        "_width",
        "collectives",
        "full",
        "grad_dtype",
        "gradients",
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
        gradients: Gradients,
        slots: Sequence[Slot],
        direct: int,
        spec: ReductionSpec,
        collectives: Collectives,
        replicas: Replicas | None,
        kernels: Kernels,
    ) -> None:
        self.gradients = gradients
        self.members = gradients.params
        self.slots = slots
        self.spec = spec
        self.kernels = kernels
        self.collectives = collectives_of(spec.reduce_dtype, collectives)
        self.replicas: Replicas | None = None
        if replicas is not None and replicas.size > 1:
            self.replicas = replicas_of(spec.reduce_dtype, replicas)
        self.grad_dtype = spec.grad_dtype
        self.reduce_dtype = spec.reduce_dtype
        self.partial_sums: torch.Tensor | None = None
        self._partial_present: list[bool] = []
        width, starts = 0, []
        for slot in slots:
            starts.append(width)
            width += slot.shard_numel
        shapes = [slot.local_shape(collectives.rank) for slot in slots]
        self._rows_of = runs(shapes, starts)
        self._payload = width
        self._direct = direct
        self._packed_from = [*starts, width][direct]  # in the flat result
        if not width:
            self.replicas = None  # nothing but empty parameters
        self._marks = self._make_marks()
        self._shape: tuple[int, ...] = (self._width,)  # of the result
        apart = self._all_direct and self._needs_no_flat
        together = whole_run(shapes) if apart else None
        if together is not None and width == self._width:
            self._shape, self._rows_of = together.shape, [together]
        self._staging: TransientBuffer | None = None
        self._input: torch.Tensor = _UNSET
        self._scatter: Callable[..., Work | None] = _UNSET
        self._scatter_marks: Callable[..., Work | None] = _UNSET
        self._targets: list[torch.Tensor] = []
        self._pads: dict[torch.dtype, list[torch.Tensor]] = {}
        self._kept = KeptGradients(gradients)
        self.full, self.partial = self._bind()
        self._new_flat = kernels.bind_empty(self._shape, self.reduce_dtype, "reduce-scatter output")
        self._new_result = kernels.bind_empty(self._shape, spec.result_dtype, "sharded gradient")

    # ---- binding

    @property
    def _all_direct(self) -> bool:
        """Whether nothing is packed."""
        return self._direct == len(self.slots)

    @property
    def _needs_no_flat(self) -> bool:
        """Whether the result is used in no other form than the members' rows."""
        return self.replicas is None and self.spec.hook is None

    @property
    def _is_users(self) -> bool:
        """Whether a collective of the user's reduces, which may not do to marks what sums do."""
        comm = self.spec.comm
        return comm is not None and not isinstance(comm, OwnMemory)

    def _make_marks(self) -> Marks | None:
        """Who had a gradient, and how wide the result is; no marks where one rank knows all."""
        spec, size, payload = self.spec, self.collectives.size, self._payload
        multiple = max(COLLECTIVE_ALIGN_BYTES // self.reduce_dtype.itemsize, 1)
        self._rows_width = self._width = (
            payload if size == 1 else -(-payload // multiple) * multiple
        )
        if not payload or (size == 1 and self._needs_no_flat):
            return None
        count, kernels = len(self.members), self.kernels
        if self._all_direct and size > 1 and self._needs_no_flat:
            width = -(-count // multiple) * multiple
            return Marks(size, None, width, (self.reduce_dtype,), False, kernels)
        start = self._width if self._is_users else payload
        self._width = -(-(start + count) // multiple) * multiple
        dtypes = dict.fromkeys((self.reduce_dtype, self.grad_dtype))
        small = spec.hook is not None
        return Marks(size, start, self._width - start, tuple(dtypes), small, kernels)

    def _bind(self) -> tuple[Program[Step], Program[Step]]:
        spec = self.spec
        compute: list[Step] = []
        reduce: list[Step] = []
        communicates = self.replicas is not None or spec.hook is not None
        if self.collectives.size == 1 and not communicates and not spec.to_host:
            self._bind_local(compute)
            program: Program[Step] = Program(compute)
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
        self._replica_kind = division.replicas
        if size == 1:
            marked = self._marks is not None
            compute.append(Reduction._copy_local_marked if marked else Reduction._copy_local)
            if division.before is not None:
                reduce.append(_divide_flat(division.before))
        elif self._payload:
            self._bind_collective(division, compute, reduce)
        return self._programs(division.after if self._payload else None, compute, reduce)

    def _programs(
        self, after: float | None, compute: list[Step], reduce: list[Step]
    ) -> tuple[Program[Step], Program[Step]]:
        spec = self.spec
        middle: list[Step] = []
        if self.replicas is not None:
            middle += [Reduction._add_partial, Reduction._all_reduce]
        if spec.hook is not None:
            middle.append(Reduction._run_hook)
        finish: list[Step] = [] if after is None else [_divide_flat(after)]
        casts = self.reduce_dtype != spec.result_dtype
        keep = spec.keep and not spec.to_host  # that is, on the device
        started = [Reduction._allocate, *compute]
        if keep and not casts:
            started[0] = Reduction._allocate_kept
        if casts:
            allocate = Reduction._allocate_kept_result
            started.append(allocate if keep else Reduction._allocate_result)
            finish.append(Reduction._cast)
        host: tuple[Step, ...] = ()
        if spec.to_host:
            finish.append(Reduction._to_kept_host if spec.keep else Reduction._to_host)
            host = (Reduction._deliver, *((Reduction.give_back,) if spec.keep else ()))
        else:
            finish.append(Reduction._deliver)
        behind: list[Step] = [Reduction._release] if self._stages else []
        if keep:
            behind.append(Reduction.give_back)
        full = _program(started, reduce, middle, finish, host, behind)
        if self._marks is not None:
            first, *others = started
            keeps = [Reduction.give_back] if spec.keep else []
            if spec.hook is not None:
                middle.insert(-1, Reduction._fetch_marks)
            full.seeking = _program(
                [first, Reduction._mark, *others],
                reduce,
                middle,
                [*finish, Reduction._fetch_marks],
                [*host[:1], Reduction._deliver_found, *keeps],
                behind,
            )
        if self.replicas is None:
            return full, full
        partial = Program(
            [Reduction._allocate, *compute], [*reduce, Reduction._keep_partial], behind=behind
        )
        if self._marks is not None:
            partial.seeking = Program(
                [Reduction._allocate, Reduction._mark, *compute],
                [*reduce, Reduction._keep_partial],
                behind=behind,
            )
        return full, partial

    def _bind_local(self, compute: list[Step]) -> None:
        """One rank: a gradient of the result's dtype becomes ``.grad`` as it is."""
        self.gradients.keep_apart()  # autograd's, of memory of their own
        factor = self.spec.factor
        self.reduce_dtype = self.spec.result_dtype
        if self.grad_dtype == self.reduce_dtype:
            compute.append(Reduction._adopt)
        else:
            compute += [Reduction._allocate, Reduction._copy_local]
        if factor is not None and factor != 1:
            compute.append(lambda self, job: self._divide_each(job.outputs, factor))
        compute.append(Reduction._deliver)

    def _bind_collective(self, division: Division, compute: list[Step], reduce: list[Step]) -> None:
        before, kind = division.before, division.kind
        if not self._direct:
            self._bind_packed()
            compute.append(Reduction._stage_packed)
            if before is not None:
                reduce.append(lambda self, job: self.kernels.divide(self._input, before))
            if self.spec.comm is None:
                self._scatter = self.collectives.bind_reduce_scatter(kind)
                reduce.append(Reduction._reduce_packed)
            else:
                self._scatter = functools.partial(
                    self.collectives.custom_reduce_scatter, self.spec.comm, kind=kind
                )
                reduce += [Reduction._reduce_custom, Reduction._copy_custom]
            if self._is_users:
                self._scatter_marks = self.collectives.bind_reduce_scatter(kind)
                reduce.append(Reduction._reduce_marks)
            return
        self._bind_direct(before, compute, reduce)
        self._scatter = self.collectives.bind_reduce_scatter_many(kind)
        assert self._marks is not None
        if not self._all_direct:
            reduce.append(Reduction._reduce_joined)
        elif self._marks.start is None:
            self._unread = (self._marks.sent[self.reduce_dtype], self._marks.ignored)
            reduce.append(Reduction._reduce_direct)
        else:
            reduce.append(Reduction._reduce_direct_flat)

    def _bind_direct(self, before: float | None, compute: list[Step], reduce: list[Step]) -> None:
        """The steps up to a launch of many; what is packed goes first, and leaves the others."""
        slots, size = self.slots[: self._direct], self.collectives.size
        casts = self.grad_dtype != self.reduce_dtype
        if not self._all_direct:
            self._bind_packed(sum(slot.numel for slot in slots) if casts else 0)
            compute.append(Reduction._stage_joined)
            if before is not None:
                reduce.append(lambda self, job: self.kernels.divide(self._input, before))
        if casts:
            self._bind_cast()
            compute.append(Reduction._stage_cast)
        else:
            compute.append(Reduction._stage_direct)
        if any(slot.dim for slot in slots):
            self._pieces = [(size * slot.piece[0], *slot.piece[1:]) for slot in slots]
            compute.append(Reduction._as_pieces)
        if before is not None:
            reduce.append(lambda self, job: self._divide_each(job.grads, before))

    def _bind_cast(self) -> None:
        itemsize = self.reduce_dtype.itemsize
        slots = self.slots[: self._direct]
        if self._staging is None:
            numel = sum(slot.numel for slot in slots)
            self._staging = self.kernels.transient(numel * itemsize, "reduce-scatter input")
        self._staging.acquire()
        start = 0
        for slot in slots:
            self._targets.append(self._staging.view(self.reduce_dtype, start, slot.shape))
            start += slot.numel * itemsize
        self._staging.release()

    def _bind_packed(self, behind: int = 0) -> None:
        """Where rows are packed: ``behind`` so many elements that are cast."""
        size = self.collectives.size
        self._sent_width = self._rows_width if self._is_users else self._width
        width = self._sent_width - self._packed_from
        if self.spec.comm is None:
            itemsize = self.reduce_dtype.itemsize
            nbytes = (behind + size * width) * itemsize
            self._staging = self.kernels.transient(nbytes, "reduce-scatter input")
            start = behind * itemsize
            self._input = self._staging.view(self.reduce_dtype, start, (size * width,))
            self._rows = self._staging.view(self.reduce_dtype, start, (size, width))
            self._staging.release()
        assert self._marks is not None
        if not self._is_users:
            self._pads = {dtype: [sent] for dtype, sent in self._marks.sent.items()}
        elif self._sent_width > self._payload:
            shape = (size, self._sent_width - self._payload)
            for dtype in {self.grad_dtype, self.reduce_dtype}:
                self._pads[dtype] = [self.kernels.zeros(shape, dtype, "padding")]

    # ---- collecting

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """This rank's rows of each member, in a flat tensor of them.

        Two calls for a run, one for a single view; one less where it is all of ``flat``.
        """
        views: list[torch.Tensor] = []
        for _, place, sizes in self._rows_of:
            view = flat if place is None else flat.as_strided(*place)
            if sizes is None:
                views.append(view)
            else:
                views += view.split_with_sizes(sizes)
        return views

    @property
    def _stages(self) -> bool:
        """Whether the reduce-scatter reads anything but gradients."""
        return self._staging is not None or self.spec.comm is not None

    @property
    def has_work(self) -> bool:
        """Whether there is anything to collect."""
        return self.partial_sums is not None or self.gradients.waiting()

    def collect(
        self, take_missing: bool, all_reduce: bool = True, summed: bool = False
    ) -> Job | None:
        """Take the members' gradients; ``None`` where there is nothing to reduce.

        Args:
            take_missing: reduce (as zeros, delivered too) members without a gradient.
            all_reduce: whether partial sums are reduced, too, so that they alone are enough.
            summed: whether gradients of earlier backwards are among them.
        """
        grads = self.gradients.take(summed)
        missing = 0
        for grad in grads:
            if grad is None:
                missing += 1
        if not missing:
            return Job(cast(list[torch.Tensor], grads), [True] * len(grads))
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
        return self._incomplete(grads, present)

    def absent(self) -> Job:
        """Zeros for all members, which get a gradient only if another rank has one."""
        none = [None] * len(self.members)
        return self._incomplete(none, [False] * len(none))

    def _incomplete(self, grads: Sequence[torch.Tensor | None], present: list[bool]) -> Job:
        job = Job([self._zeros(m, g) for m, g in zip(self.members, grads, strict=True)], present)
        job.seeks = False in present
        return job

    def _zeros(self, member: ShardedParam, grad: torch.Tensor | None) -> torch.Tensor:
        if grad is not None:
            return grad
        return self.kernels.zeros(member.shape, self.grad_dtype, "absent gradient")

    # ---- steps on the COMPUTE lane

    def _allocate(self, job: Job) -> None:
        job.flat = flat = self._new_flat()
        job.outputs = self.views(flat)

    def _mark(self, job: Job) -> None:
        """Of a job that seeks: what this rank sends, and where it finds what others sent."""
        assert self._marks is not None
        job.sent = self._marks.of(job.present)
        job.found = self._marks.place(job.flat)

    def _allocate_kept(self, job: Job) -> None:
        if self._take_kept(job):
            job.flat, job.outputs = cast(torch.Tensor, self._kept.flat), self._kept.rows
        else:
            self._allocate(job)

    def _adopt(self, job: Job) -> None:
        self._stage_direct(job)
        # With create_graph=True autograd's have a graph, which no reduced gradient has.
        job.outputs = [grad.detach() if grad.requires_grad else grad for grad in job.grads]

    def _allocate_result(self, job: Job) -> None:
        job.result = self._new_result()

    def _allocate_kept_result(self, job: Job) -> None:
        if self._take_kept(job):
            job.result = cast(torch.Tensor, self._kept.flat)
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
                flat = self.kernels.bind_empty(self._shape, spec.result_dtype, "kept gradient")()
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
        assert self._staging is not None
        self._staging.acquire()
        self.kernels.copy_strided(self._targets, job.grads)
        job.grads = self._targets

    def _as_pieces(self, job: Job) -> None:
        """Gradients as one piece behind the other, as some backends compare numbers of rows."""
        job.grads = [grad.view(shape) for shape, grad in zip(self._pieces, job.grads, strict=True)]

    def _stage_joined(self, job: Job) -> None:
        """Pack what is packed; the others are left to the next step."""
        dtype = self._unify(job)
        first = self._direct
        self._pack(job, self.slots[first:], job.grads[first:], dtype)
        job.grads = job.grads[:first]

    def _stage_packed(self, job: Job) -> None:
        dtype = self._unify(job)
        if self._staging is None:
            self._allocate_custom(job)
        self._pack(job, self.slots, job.grads, dtype)
        job.grads = []

    def _pack(
        self, job: Job, slots: Sequence[Slot], grads: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> None:
        """Gradients of one dtype, and behind them the marks, as rows of a rank each."""
        if self._staging is not None:
            self._staging.acquire()
        rows = [
            grad if slot.dim == 0 else self._rank_major(slot, grad)
            for slot, grad in zip(slots, grads, strict=True)
            if slot.shard_numel
        ]
        if job.seeks and not self._is_users:
            rows.append(job.sent.to(dtype))
        else:
            rows += self._pads.get(dtype, ())
        self.kernels.chunk_cat(rows, 0, self.collectives.size, out=self._rows)

    def _allocate_custom(self, job: Job) -> None:
        assert self.spec.comm is not None
        assert self.spec.device is not None
        size, width = self.collectives.size, self._sent_width
        comm, dtype, device = self.spec.comm, self.reduce_dtype, self.spec.device
        self._input = checked_buffer(comm, size * width, dtype, device)
        self._rows = self._input.view(size, width)
        job.scattered = checked_buffer(comm, width, dtype, device)

    def _rank_major(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
        """A gradient sharded on a later dim, as rows of one rank's piece each: [ranks, n]."""
        size, bands, outer, inner = self.collectives.size, slot.cut.bands, slot.outer, slot.inner
        if slot.in_order:
            return grad.reshape(size, slot.shard_numel)
        rows = self.kernels.zeros((size, slot.shard_numel), grad.dtype, "rank-major gradient")
        pieces = rows.view(bands, slot.per_band, slot.shard_numel)
        for ranks, first, length in slot.blocks():
            source = grad.narrow(slot.dim, first * slot.chunk, ranks * length)
            source = source.reshape(bands, outer, ranks, length, inner).transpose(1, 2)
            part = pieces.narrow(1, first, ranks).narrow(2, 0, outer * length * inner)
            self.kernels.copy(part.view(bands, ranks, outer, length, inner), source)
        return rows

    # ---- steps on the REDUCE lane

    def _divide_each(self, tensors: Sequence[torch.Tensor], factor: float) -> None:
        for tensor in tensors:
            self.kernels.divide(tensor, factor)

    def _reduce_direct(self, job: Job) -> None:
        sent, found = (job.sent, job.found) if job.seeks else self._unread
        work = self._scatter([*job.outputs, found], [*job.grads, sent])
        if work is not None:
            work.wait()

    def _reduce_direct_flat(self, job: Job) -> None:
        """As `_reduce_direct`, with the marks' sums in the flat result, which is used on."""
        sent, found = self._marks_of(job)
        work = self._scatter([*job.outputs, found], [*job.grads, sent])
        if work is not None:
            work.wait()

    def _reduce_joined(self, job: Job) -> None:
        """As `_reduce_direct`, with what is packed, and the marks, as one pair more."""
        start = self._packed_from
        packed = job.flat.narrow(0, start, self._width - start)
        outputs = job.outputs[: self._direct]
        work = self._scatter([*outputs, packed], [*job.grads, self._input])
        if work is not None:
            work.wait()

    def _reduce_packed(self, job: Job) -> None:
        work = self._scatter(job.flat, self._input)
        if work is not None:
            work.wait()

    def _reduce_custom(self, job: Job) -> None:
        work = self._scatter(job.scattered, self._input)
        if work is not None:
            work.wait()

    def _copy_custom(self, job: Job) -> None:
        self.kernels.copy(job.flat.narrow(0, 0, self._sent_width), job.scattered)

    def _reduce_marks(self, job: Job) -> None:
        sent, found = self._marks_of(job)
        work = self._scatter_marks(found, sent)
        if work is not None:
            work.wait()

    def _copy_local(self, job: Job) -> None:
        self.kernels.copy_strided(job.outputs, job.grads)

    def _copy_local_marked(self, job: Job) -> None:
        sent, found = self._marks_of(job)
        self.kernels.copy_strided([*job.outputs, found], [*job.grads, sent])

    def _marks_of(self, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank sends, and where in the flat result the sums go."""
        marks = self._marks
        assert marks is not None
        sent = job.sent if job.seeks else marks.sent[self.reduce_dtype]
        return sent, marks.within(job.flat)

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
            self.kernels.to_host(cast(torch.Tensor, self._kept.flat), source)
        else:
            self._to_host(job)

    def _cast(self, job: Job) -> None:
        self.kernels.copy(job.result, job.flat)
        job.outputs = self.views(job.result) if job.kept is None else job.kept.rows

    def _deliver(self, job: Job) -> None:
        """Set ``.grad``, or add to it where there is one; then run the users' hooks."""
        kept = job.kept
        if kept is not None:
            self.gradients.place(kept.objects, job.present)
            return
        waiting = self.gradients.deliver(job.outputs, job.present)
        if waiting:
            self._add(job, waiting)

    def _fetch_marks(self, job: Job) -> None:
        """Let the host see what others had, once it is behind this lane."""
        job.arrived += (self.kernels.fetched(job.found),)

    def _deliver_found(self, job: Job) -> None:
        """Deliver to members that had no gradient here, but had one on another rank."""
        assert self._marks is not None
        found = zip(job.present, self._marks.found(job.arrived), strict=False)
        present = [there and not here for here, there in found]
        if True not in present:
            return
        kept = job.kept
        if kept is None:
            waiting = self.gradients.deliver(job.outputs, present)
        else:
            waiting = self.gradients.deliver(kept.rows, present, kept.objects)
        if waiting:
            self._add(job, waiting)

    def _add(self, job: Job, waiting: Sequence[Sum]) -> None:
        """Add rows to gradients that are there; then run the users' hooks."""
        added, sums, addends = zip(*waiting, strict=True)
        job.sums += sums
        self.kernels.add_many(sums, addends)
        for member in added:
            member.run_hooks()

    def give_back(self, job: Job) -> None:
        """The kept memory that the result is in may be filled again, once it is nobody's.

        Not when it is delivered: on its lane, the all-reduce may still write it (invariant I13).
        """
        if job.kept is not None:
            job.kept.taken = False

    def _release(self, job: Job) -> None:
        """Free what the reduce-scatter read, where one lane is behind it as soon as it has run."""
        self.release()

    # ---- what is left

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
            self._input = self._rows = _UNSET  # of a user's collective, which allocates them
        elif self._staging.allocated:
            self._staging.release()


COLLECTIVES: dict[Step | None, str] = {
    Reduction._reduce_direct: "reduce-scatter",
    Reduction._reduce_direct_flat: "reduce-scatter",
    Reduction._reduce_joined: "reduce-scatter",
    Reduction._reduce_marks: "reduce-scatter",
    Reduction._reduce_packed: "reduce-scatter",
    Reduction._reduce_custom: "reduce-scatter",
    Reduction._all_reduce: "all-reduce",
}
"""The steps that communicate, and what they do."""


def _divide_flat(factor: float) -> Step:
    return lambda self, job: self.kernels.divide(job.flat, factor)


def _program(
    compute: Sequence[Step],
    reduce: Sequence[Step],
    middle: Sequence[Step],
    finish: Sequence[Step],
    host: Sequence[Step],
    behind: Sequence[Step],
) -> Program[Step]:
    """``finish`` is on the last lane: on ALL_REDUCE, if ``middle`` has anything to do there."""
    if middle:
        return Program(compute, reduce, (*middle, *finish), host, behind)
    return Program(compute, (*reduce, *finish), (), host, behind)


# ---- a group's reductions


def make_reductions(
    members: Sequence[tuple[ReductionSpec, P, Slot, bool]],
    gradients_of: Callable[[Sequence[P]], Gradients],
    collectives: Collectives,
    replicas: Replicas | None,
    kernels: Kernels,
) -> list[Reduction]:
    """A reduction for all parameters of equal specs, in the order of their first.

    Args:
        members: of each parameter what sets its steps, itself, its place in the layout, and
            whether it is reduced directly (`is_direct`).
        gradients_of: the gradients of parameters that are reduced alike.
        collectives: of the shard axis.
        replicas: of the replicate axis, if there is one.
        kernels: memory and copies.
    """
    families: dict[ReductionSpec, tuple[list[tuple[P, Slot]], list[tuple[P, Slot]]]] = {}
    for spec, param, slot, direct in members:
        direct_ones, packed_ones = families.setdefault(spec, ([], []))
        (direct_ones if direct else packed_ones).append((param, slot))
    return [
        Reduction(
            gradients_of([param for param, _ in (*direct_ones, *packed_ones)]),
            [slot for _, slot in (*direct_ones, *packed_ones)],
            len(direct_ones),
            spec,
            collectives,
            replicas,
            kernels,
        )
        for spec, (direct_ones, packed_ones) in families.items()
    ]


def with_zeros(
    jobs: list[tuple[Reduction, Job | None]],
) -> list[tuple[Reduction, Job]]:
    """A group's jobs, with one of zeros for each that is missing; none where all are.

    Ranks that use parameters of different dtypes run the same collectives then (decision 3).
    """
    if all(job is None for _, job in jobs):
        return []
    return [(reduction, job or reduction.absent()) for reduction, job in jobs]


class ReducedGroup(Protocol):
    """The group of parameters whose reductions are launched."""

    name: str
    streams: Streams

    @property
    def has_grad_hooks(self) -> bool:
        """Whether users' hooks run when gradients are delivered."""


@dataclass(slots=True)
class PendingReduction:
    """A group's reduction on its way.

    Attributes:
        group: whose gradients it reduces.
        jobs: what it works on: alive until COMPUTE is behind it (invariant I7).
        scattered: event behind the reduce-scatter: what it read may be freed.
        done: event behind everything; the same one where nothing follows the reduce-scatter.
        host: the steps by which the host delivers what was copied to it.
    """

    group: ReducedGroup
    jobs: list[tuple[Reduction, Job]]
    scattered: Event
    done: Event
    host: list[tuple[Step, Reduction, Job]]

    def release_inputs(self) -> None:
        """Free what the reduce-scatters read, once COMPUTE is behind ``scattered``."""
        for reduction, job in self.jobs:
            reduction.release()
            job.grads = []
            job.sent = _UNSET

    def release_rest(self) -> None:
        """Free what else is not delivered, once COMPUTE is behind ``done``."""
        for reduction, job in self.jobs:
            job.flat = job.scattered = job.result = job.partial = job.found = _UNSET
            if not (self.host and self._waits(job)):
                reduction.give_back(job)
        self.jobs = []

    def _waits(self, job: Job) -> bool:
        """Whether the host is still to deliver anything of it."""
        return any(job is waiting for _, _, waiting in self.host)

    def deliver(self) -> None:
        """Deliver what was copied to the host, once the host is behind ``done``."""
        with torch.no_grad():
            for step, reduction, job in self.host:
                step(reduction, job)


def launch_on_lanes(
    group: ReducedGroup, jobs: list[tuple[Reduction, Job]], all_reduce: bool
) -> PendingReduction | None:
    """Run the jobs' programs, each step on its lane.

    Args:
        group: whose gradients they reduce, on its lanes.
        jobs: what `Reduction.collect` took.
        all_reduce: whether copies are summed too, not kept as partial sums for later.

    Returns:
        What is on its way, or ``None`` if nothing is: one rank has nothing to communicate.
    """
    streams = group.streams
    work: list[tuple[Program[Step], Reduction, Job]] = []
    reduces = all_reduces = False
    for reduction, job in jobs:
        program = reduction.full if all_reduce else reduction.partial
        if job.seeks:
            program = program.seeking
        work.append((program, reduction, job))
        reduces = reduces or bool(program.reduce)
        all_reduces = all_reduces or bool(program.all_reduce)
        _run(program.compute, reduction, job, group.name)
    if not (reduces or all_reduces):
        return None
    event = streams.record(COMPUTE, "gradients staged")
    streams.wait(REDUCE, event, "reduction after compute")
    with streams.on(REDUCE):
        for program, reduction, job in work:
            _run(program.reduce, reduction, job, group.name)
    scattered = done = streams.record(REDUCE, "reduction done")
    if all_reduces:
        streams.wait(ALL_REDUCE, scattered, "all-reduce after reduce-scatter")
        with streams.on(ALL_REDUCE):
            for program, reduction, job in work:
                _run(program.all_reduce, reduction, job, group.name)
        done = streams.record(ALL_REDUCE, "all-reduce done")
    return PendingReduction(group, jobs, scattered, done, _host_steps(work))


def launch_inline(group: ReducedGroup, jobs: list[tuple[Reduction, Job]], all_reduce: bool) -> None:
    """As `launch_on_lanes` where all lanes are one, as on a CPU: on return, all is delivered."""
    for reduction, job in jobs:
        program = reduction.full if all_reduce else reduction.partial
        if job.seeks:
            program = program.seeking
        _run(program.inline, reduction, job, group.name)


def _run(steps: Sequence[Step], reduction: Reduction, job: Job, name: str) -> None:
    """Run a lane's steps; an exception names the group, or a sparse gradient."""
    running: Step | None = None
    try:
        for running in steps:
            running(reduction, job)
    except RuntimeError as error:
        _refuse_sparse(reduction, job, error)
        operation = COLLECTIVES.get(running)
        if operation is None or isinstance(error, torch.OutOfMemoryError):
            raise
        raise communication_error(operation, name, error) from error


def _refuse_sparse(reduction: Reduction, job: Job, error: RuntimeError) -> None:
    """Looked for where staging has raised: before, it would be a look at each gradient."""
    for member, grad in zip(reduction.members, job.grads, strict=False):  # none once staged
        if isinstance(grad, torch.Tensor) and grad.layout != torch.strided:
            raise ValueError(
                f"the gradient of parameter '{member.name}' is sparse, and only dense ones are "
                f"reduced; make its module with sparse=False, or pass it in ignored_params"
            ) from error


def _host_steps(
    work: list[tuple[Program[Step], Reduction, Job]],
) -> list[tuple[Step, Reduction, Job]]:
    return [(step, reduction, job) for program, reduction, job in work for step in program.host]
