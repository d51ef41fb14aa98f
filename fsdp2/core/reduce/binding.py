"""A reduction bound: its transport chosen, its parts made, its programs written down.

    members of a group ── equal specs ──> make_reductions ──> bind_reduction, for each spec
    bind_reduction     dtypes and division ──> layout of the flat result ──> transport, other parts
    Parts.program      the steps of all parts in their order, lane by lane

The order of steps is decided here and nowhere else (decision 6).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from fsdp2.core.device.collectives import Collectives, Replicas, collectives_of, replicas_of
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.layout.layout import Slot
from fsdp2.core.params.gradients import Gradients
from fsdp2.core.reduce.average import Average
from fsdp2.core.reduce.division import Division, plan_division
from fsdp2.core.reduce.kept_gradients import KeptGradients
from fsdp2.core.reduce.kinds import transport_of
from fsdp2.core.reduce.levels import BetweenNodes, Pieces, PiecesReduce, pieces_reduce
from fsdp2.core.reduce.partial_sums import AllReduce, PartialSums
from fsdp2.core.reduce.presence_marks import PresenceMarks
from fsdp2.core.reduce.program import Program, Step
from fsdp2.core.reduce.reduction import Delivery, ReduceContext, ReduceTransport, Reduction
from fsdp2.core.reduce.result import DivisionAfter, Hook, Result
from fsdp2.core.reduce.rows import FlatPlan, plan_flat
from fsdp2.core.reduce.spec import ReductionSpec

P = TypeVar("P")
T = TypeVar("T")

Family = tuple[list[tuple[P, Slot]], list[tuple[P, Slot]]]
"""Members that are reduced alike, with their slots: directly, and packed."""


class Once(Protocol):
    """Facts that alike groups share: made by the first of them."""

    def __call__(self, key: Hashable, make: Callable[[], T], /) -> T:
        """As `GroupLayout.once`."""


def anew(_: Hashable, make: Callable[[], T], /) -> T:
    """For a reduction by itself, which shares nothing."""
    return make()


def make_reductions(
    members: Sequence[tuple[ReductionSpec, P, Slot, bool]],
    gradients_of: Callable[[Sequence[P]], Gradients],
    collectives: Collectives,
    replicas: Replicas | None,
    kernels: Kernels,
    once: Once,
    pieces: Pieces | None = None,
) -> list[Reduction]:
    """A reduction for all parameters of equal specs, in the order of their first.

    Args:
        members: of each parameter what sets its steps, itself, its place in the layout, and
            whether it is reduced directly (`is_direct`).
        gradients_of: the gradients of parameters that are reduced alike.
        collectives: of the shard axis.
        replicas: of the replicate axis, if there is one.
        kernels: memory and copies.
        once: objects that the group shares with equal groups (`GroupLayout.once`).
        pieces: what of the rows this rank keeps, with masters sharded over two levels. Default:
            all.
    """
    families: dict[ReductionSpec, Family[P]] = {}
    known: dict[int, Family[P]] = {}  # most have one and the same: it need not be hashed
    for spec, param, slot, direct in members:
        family = known.get(id(spec))
        if family is None:
            family = known[id(spec)] = families.setdefault(spec, ([], []))
        family[0 if direct else 1].append((param, slot))
    return [
        bind_reduction(
            gradients_of([param for param, _ in (*direct_ones, *packed_ones)]),
            [slot for _, slot in (*direct_ones, *packed_ones)],
            len(direct_ones),
            spec,
            collectives,
            replicas,
            kernels,
            once,
            pieces,
        )
        for spec, (direct_ones, packed_ones) in families.items()
    ]


def bind_reduction(
    gradients: Gradients,
    slots: Sequence[Slot],
    direct: int,
    spec: ReductionSpec,
    collectives: Collectives,
    replicas: Replicas | None,
    kernels: Kernels,
    once: Once = anew,
    pieces: Pieces | None = None,
) -> Reduction:
    """The reduction of members that are reduced alike.

    Args:
        gradients: of the members.
        slots: the members' slots in the group's layout.
        direct: how many of the first members are reduced from where their gradients are, or from
            where they are cast to; the others are packed.
        spec: what sets the steps.
        collectives: of the shard axis.
        replicas: of the replicate axis, if there is one.
        kernels: memory and copies.
        once: objects shared with equal groups; none by default.
        pieces: as for `make_reductions`.
    """
    collectives = collectives_of(spec.reduce_dtype, collectives)
    rank, between = collectives.rank, pieces
    if between is not None and not any(slot.shard_numel for slot in slots):
        slots, rank, between = between.of(slots), between.collectives.rank, None
    if replicas is not None:
        empty = not any(slot.shard_numel for slot in slots)
        alike = replicas.size == 1 or empty
        replicas = None if alike else replicas_of(spec.reduce_dtype, replicas)
    whole = (replicas, spec.hook, spec.average, between)  # they take the result as one tensor
    needs_flat = any(part is not None for part in whole)
    alone = collectives.size == 1 and not needs_flat and not spec.to_host
    if alone:  # nothing travels: a gradient of the result's dtype becomes ``.grad`` as it is
        gradients.keep_apart()  # autograd's, of memory of their own
        spec = replace(spec, reduce_dtype=spec.result_dtype, keep=False)
    if spec.codec is not None or spec.between_codec is not None:  # each rank sums by itself
        spec = replace(spec, sum_only=True)
    chosen = transport_of(spec, slots, direct, collectives.size, alone)
    where = (rank, collectives.size, spec.reduce_dtype, needs_flat)
    ways = (direct == len(slots), not chosen.carries_marks)
    flat = once(
        ("flat result", tuple(slot.index for slot in slots), where, ways),
        lambda: plan_flat(slots, *where, *ways),
    )
    copies = _copies(replicas, between)
    division = once(
        _facts(spec, collectives, copies, flat, alone),
        lambda: _division(spec, collectives, copies, flat, alone),
    )
    marks = _marks(flat, spec, collectives, kernels)
    if marks is not None and not chosen.carries_marks:
        marks.scatter = collectives.bind_reduce_scatter(division.kind)
    context = ReduceContext(slots, direct, spec, division, flat, marks, collectives, kernels)
    crossing = None
    if between is not None:
        crossing = pieces_reduce(
            between.of(slots),
            between.collectives,
            spec,
            division.replicas,
            kernels,
            _coded_pieces() if spec.between_codec is not None else None,
        )
    parts = _parts(gradients, context, chosen(context), replicas, crossing, alone)
    full, partial = parts.programs()
    return Reduction(gradients, parts.transport, parts.partial_sums, parts.kept, full, partial)


def _marks(
    flat: FlatPlan, spec: ReductionSpec, collectives: Collectives, kernels: Kernels
) -> PresenceMarks | None:
    if flat.marks is None:
        return None
    apart = flat.marks.start is None  # they are not staged with gradients then
    dtypes = (spec.reduce_dtype, spec.reduce_dtype if apart else spec.grad_dtype)
    small = spec.hook is not None
    return PresenceMarks(collectives.size, flat.marks, dtypes, small, kernels)


def _coded_pieces() -> type[PiecesReduce]:
    """The module, loaded on first use."""
    from fsdp2.core.reduce.coded_levels import CodedPieces

    return CodedPieces


def _copies(replicas: Replicas | None, pieces: Pieces | None) -> int:
    """Ranks that the sums of a node, or of a shard axis, are summed over."""
    if pieces is not None:
        return pieces.collectives.size
    return 1 if replicas is None else replicas.size


def hand_over(former: Sequence[Reduction], made: Sequence[Reduction]) -> None:
    """Give residuals of error feedback to the reductions that are bound in place of others.

    Args:
        former: the earlier reductions.
        made: the reductions that replace them.
    """
    fed = [(r.members, feedback) for r in former if (feedback := r.transport.feedback) is not None]
    if fed:
        for reduction in made:
            new = reduction.transport.feedback
            if new is not None:
                new.take_over(reduction.members, fed)


def _facts(
    spec: ReductionSpec,
    collectives: Collectives,
    copies: int,
    flat: FlatPlan,
    alone: bool,
) -> Hashable:
    """The facts on which `_division` depends."""
    own = (spec.reduce_dtype, spec.factor, spec.sum_only, bool(flat.payload), alone)
    return ("division", *own, collectives.size, collectives.premultiplies, copies)


def _division(
    spec: ReductionSpec,
    collectives: Collectives,
    copies: int,
    flat: FlatPlan,
    alone: bool,
) -> Division:
    factor, ranks = spec.factor, collectives.size * copies
    if factor is None and ranks == 1:
        factor = 1.0
    division = plan_division(
        spec.reduce_dtype,
        collectives.size,
        factor,
        collectives.premultiplies,
        copies,
        spec.sum_only,
    )
    if alone:
        return replace(division, before=None, after=factor if factor != 1 else None)
    return division if flat.payload else replace(division, before=None, after=None)


@dataclass(frozen=True)
class Parts:
    """The parts of a reduction, to which its steps belong.

    Attributes:
        spec: the settings of the steps.
        transport: how gradients are reduced.
        marks: which ranks had a gradient; ``None`` on a single rank.
        partial_sums: the results of reductions without all-reduce.
        all_reduce: the sum over replicas, if there are any.
        between: the reduce-scatter between nodes, if masters are sharded over two levels.
        hook: the user's, if there is one.
        after: the division after the sums, if there is one.
        average: over copies of the model, if there are any.
        result: the destination of a cast, or of a copy to the host.
        kept: the memory of gradients, if it is kept.
        delivery: the way to ``.grad``.
        alone: whether gradients are only divided: all on COMPUTE.
    """

    spec: ReductionSpec
    transport: ReduceTransport
    marks: PresenceMarks | None
    partial_sums: PartialSums
    all_reduce: AllReduce | None
    between: BetweenNodes | None
    hook: Hook | None
    after: DivisionAfter | None
    average: Average | None
    result: Result
    kept: KeptGradients | None
    delivery: Delivery
    alone: bool

    @property
    def sums_later(self) -> bool:
        """Whether several reductions may share what follows the reduce-scatter."""
        return any(part is not None for part in (self.all_reduce, self.between, self.average))

    def programs(self) -> tuple[Program, Program]:
        """The full program, and the partial one; the same where there are no replicas."""
        full = self.full()
        partial = self.partial() if self.sums_later else full
        if self.marks is not None:
            full.seeking = self.full(self.marks)
            partial.seeking = full.seeking if partial is full else self.partial(self.marks)
        return full, partial

    def full(self, seeks: PresenceMarks | None = None) -> Program:
        """All steps, up to ``.grad``.

        Args:
            seeks: marks, where the job lacks a gradient which another rank may have.
        """
        to_host, kept = self.spec.to_host, self.kept
        compute: list[Step] = []
        reduce: list[Step] = []
        all_reduce: list[Step] = []
        host: list[Step] = []

        # COMPUTE
        on_device = None if to_host else kept
        if on_device is not None and not self.spec.casts and self.between is None:
            self._stage(compute, seeks, on_device.hold_flat)
        else:
            self._stage(compute, seeks, self.transport.allocate)
        if self.between is not None:
            compute.append(self.between.allocate_pieces)
        if self.spec.casts:
            compute.append(
                self.result.allocate_result if on_device is None else on_device.hold_result
            )

        # REDUCE
        self._reduce(reduce)

        # ALL_REDUCE
        self._sum_copies(all_reduce)
        if self.hook is not None:
            if seeks is not None:  # before a hook that may lose marks
                all_reduce.append(seeks.fetch)
            all_reduce.append(self.hook.run_hook)

        # The last lane that has anything to do; the host, once it is behind that one
        last = all_reduce or (compute if self.alone else reduce)
        if self.after is not None:
            last.append(self.after.divide_rows if self.alone else self.after.divide)
        if self.average is not None:  # of what is divided, which cannot overflow
            last.append(self.average.average)
        if self.spec.casts:
            last.append(self.result.cast)
        if not to_host:
            last.append(self.delivery.deliver)
        else:
            last.append(self.result.to_host if kept is None else kept.hold_on_host)
            host.append(self.delivery.deliver)
        if seeks is not None:
            last.append(seeks.fetch)
            host.append(self.delivery.deliver_missed)

        # Where all lanes are one; elsewhere `PendingReduction` does it
        behind = self._frees()
        if kept is not None:
            (host or behind).append(kept.give_back)
        return Program(compute, reduce, all_reduce, host, behind)

    def partial(self, seeks: PresenceMarks | None = None) -> Program:
        """The steps up to partial sums; as for `full`."""
        compute: list[Step] = []
        reduce: list[Step] = []
        self._stage(compute, seeks, self.transport.allocate)  # never in memory that is kept
        self._reduce(reduce)
        reduce.append(self.partial_sums.keep)
        return Program(compute, reduce, behind=self._frees())

    def _stage(self, compute: list[Step], seeks: PresenceMarks | None, allocate: Step) -> None:
        compute.append(allocate)
        if seeks is not None:
            compute.append(seeks.mark)
        if self.transport.stages:
            compute.append(self.transport.stage)

    def _reduce(self, reduce: list[Step]) -> None:
        transport, marks = self.transport, self.marks
        if transport.before is not None:
            reduce.append(transport.divide)
        if transport.communicates:
            reduce.append(transport.reduce)
        if transport.unstages:
            reduce.append(transport.unstage)
        if marks is not None and marks.scatter is not None:
            reduce.append(marks.reduce)

    def _sum_copies(self, all_reduce: list[Step]) -> None:
        """The steps after the partial sums, which end here."""
        if self.sums_later:
            all_reduce.append(self.partial_sums.add)
        if self.all_reduce is not None:
            all_reduce.append(self.all_reduce.all_reduce)
        if self.between is not None:
            all_reduce.append(self.between.scatter_between)

    def _frees(self) -> list[Step]:
        return [self.transport.release_behind] if self.transport.frees else []


def _parts(
    gradients: Gradients,
    context: ReduceContext,
    transport: ReduceTransport,
    replicas: Replicas | None,
    crossing: PiecesReduce | None,
    alone: bool,
) -> Parts:
    spec, marks, kernels, division = context.spec, context.marks, context.kernels, context.division
    last = transport if crossing is None else crossing  # leaves the sums
    views, shape = last.views, last.shape
    result = Result(shape, spec.result_dtype, spec.pin, views, kernels)
    kept = None
    make: Callable[[], torch.Tensor]
    if spec.keep and spec.to_host:
        make = functools.partial(kernels.host_empty, shape, spec.result_dtype, spec.pin)
        kept = KeptGradients(gradients, make, views, result.to_host, kernels)
    elif spec.keep:
        make = kernels.bind_empty(shape, spec.result_dtype, "kept gradient")
        otherwise = result.allocate_result if spec.casts else last.allocate
        kept = KeptGradients(gradients, make, views, otherwise, kernels)
    between = None
    if crossing is not None and marks is not None:
        in_place = kept is not None and not (spec.to_host or spec.casts)
        between = BetweenNodes(crossing, marks, kept if in_place else None)
    return Parts(
        spec,
        transport,
        marks,
        PartialSums(kernels),
        None if replicas is None else AllReduce(replicas, division.replicas),
        between,
        None if spec.hook is None else Hook(spec.hook),
        None if division.after is None else DivisionAfter(division.after, kernels),
        None if spec.average is None or marks is None else Average(spec.average, last),
        result,
        kept,
        Delivery(gradients, marks, kernels),
        alone,
    )
