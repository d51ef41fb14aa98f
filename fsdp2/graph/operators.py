"""`fsdp2::unshard` and `fsdp2::reduce`: a group's collectives as functions of tensors.

    local shards ── fsdp2::unshard ──> unsharded parameters          all-gather
    gradients of these ── fsdp2::reduce ──> gradients of shards      reduce-scatter, all-reduce

Either is the other's derivative. The loss is the mean over ranks: the derivative of ``unshard`` is
the average that training takes; the derivative of that average is ``unshard``, without a division,
because the next derivative averages again.

Each is also there in two halves, for graphs that compute in between (`fsdp2.graph.placement`):

    unshard = end_unshard(start_unshard(shards))          the first launches, the second waits
    reduce  = end_reduce(start_reduce(gradients))

A graph cannot hold a group: it holds the group's key, under which `Exchange` has it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import (
    Division,
    ParamGroup,
    ReductionSpec,
    Segment,
    Slot,
    Unit,
    Work,
    communication_error,
    plan_division,
    reduction_spec,
    run_all_gather,
    run_reduce_scatter,
)

_numbers = itertools.count()
_exchanges: weakref.WeakValueDictionary[str, Exchange] = weakref.WeakValueDictionary()
_running: dict[int, tuple[Work, str, str]] = {}
"""Collectives that were launched and not waited for, by the address of their output."""


@dataclass(frozen=True)
class _Reduced:
    """Parameters that are reduced in one collective.

    Attributes:
        spec: dtypes and factor.
        members: positions in the group, and where each one's rows begin in a rank's row.
        width: elements of a rank's row.
        division: where it divides.
    """

    spec: ReductionSpec
    members: Sequence[tuple[Slot, int]]
    width: int
    division: Division


class Exchange:
    """A group as its operators see it.

    Args:
        unit: the unit that the group belongs to.
        group: the group.
    """

    def __init__(self, unit: Unit, group: ParamGroup) -> None:
        self.unit, self.group = unit, group
        self.key = f"{unit.title}#{next(_numbers)}"
        if not all(slot.even for slot, _ in self.slots()):
            # torch's caches of compiled graphs know a DTensor's global shape alone: ranks with
            # other rows would take each other's graphs.
            self.key = f"{self.key}, rank {group.collectives.rank}"
        self._planned: dict[tuple[int, ...], tuple[object, list[_Reduced]]] = {}
        _exchanges[self.key] = self

    @property
    def segments(self) -> Sequence[Segment]:
        """Those of the group's layout."""
        assert self.group.layout is not None
        return self.group.layout.segments

    def slots(self) -> list[tuple[Slot, torch.dtype]]:
        """Every parameter's place, and its dtype once gathered, in the group's order."""
        found = [(slot, s.full_dtype) for s in self.segments for slot in s.slots]
        return sorted(found, key=lambda pair: pair[0].index)

    # ---- from shards to parameters

    def start_unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Launch the all-gather of each segment; returns all ranks' rows, [ranks * n] each."""
        collectives = self.group.collectives
        size, rank = collectives.size, collectives.rank
        rows = []
        for segment in self.segments:
            width = segment.shard_numel
            every = shards[0].new_empty(size * width, dtype=segment.full_dtype)
            own = every.narrow(0, rank * width, width)
            for slot in segment.slots:
                shard = shards[slot.index]
                own.narrow(0, slot.shard_offset, shard.numel()).copy_(shard.reshape(-1))
            if size > 1 and width:
                self._launch("all-gather", every, run_all_gather, _real(every), _real(own))
            rows.append(every)
        return rows

    def end_unshard(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Wait for the rows, and put the pieces of all ranks in place."""
        full: dict[int, Tensor] = {}
        for segment, every in zip(self.segments, rows, strict=True):
            _wait_for(every)
            width = segment.shard_numel
            for slot in segment.slots:
                whole = full[slot.index] = every.new_empty(slot.shape)
                for block in slot.blocks():
                    _block_of(whole, slot, block).copy_(_pieces_in(every, slot, block, width))
        return [full[index] for index in range(len(full))]

    # ---- from gradients to gradients of shards

    def start_reduce(self, gradients: Sequence[Tensor], trained: Sequence[int]) -> list[Tensor]:
        """Launch the reduce-scatters; returns this rank's rows, [n] each."""
        if not (self.unit.sync and self.unit.all_reduce):
            raise coded(
                ShardingStateError,
                "graph-mode-no-sync",
                f"unit '{self.unit.title}' accumulates gradients without communication, which "
                f"graph mode cannot; call set_requires_gradient_sync(True), or add up .grad of "
                f"several backwards",
            )
        collectives = self.group.collectives
        size, found = collectives.size, []
        by_index = dict(zip(trained, gradients, strict=True))
        for reduced in self._reductions(trained):
            dtype, width = reduced.spec.reduce_dtype, reduced.width
            rows = gradients[0].new_zeros(size * width, dtype=dtype)
            for slot, start in reduced.members:
                gradient, placed = by_index[slot.index], replace(slot, shard_offset=start)
                for block in slot.blocks():
                    pieces = _pieces_in(rows, placed, block, width)
                    pieces.copy_(_block_of(gradient.contiguous(), slot, block))
            if reduced.division.before is not None:
                rows.div_(reduced.division.before)
            if size == 1 or not width:
                found.append(rows)
                continue
            own, op = rows.new_empty(width), reduced.division.kind.op
            given = _real(own), _real(rows), op
            self._launch("reduce-scatter", own, run_reduce_scatter, *given)
            found.append(own)
        return found

    def end_reduce(self, rows: Sequence[Tensor], trained: Sequence[int]) -> list[Tensor]:
        """Wait for the sums, add those of replicas, and return each shard's gradient."""
        shards: dict[int, Tensor] = {}
        for own, reduced in zip(rows, self._reductions(trained), strict=True):
            _wait_for(own)
            division, replicas = reduced.division, self.group.replicas
            sums = own
            if replicas is not None and replicas.size > 1 and own.numel():
                sums = own.clone()  # an operator leaves its inputs as they are
                work = replicas.all_reduce(_real(sums), division.replicas)
                if work is not None:
                    work.wait()
            if division.after is not None:
                sums = sums.div(division.after)
            for slot, start in reduced.members:
                shape = slot.local_shape(self.group.collectives.rank)
                row = sums.narrow(0, start, torch.Size(shape).numel()).view(shape)
                shards[slot.index] = row.to(reduced.spec.result_dtype, copy=True)
        return [shards[index] for index in trained]

    def _reductions(self, trained: Sequence[int]) -> list[_Reduced]:
        """As the engine reduces: one collective for parameters of equal specs."""
        group, key = self.group, tuple(trained)
        known = self._planned.get(key)
        if known is not None and known[0] is group.options:
            return known[1]
        alike: dict[ReductionSpec, list[tuple[Slot, int]]] = {}
        for segment in self.segments:
            for slot in segment.slots:
                if slot.index in trained:
                    param = group.params[slot.index]
                    spec = reduction_spec(group.options, param, group.offload, group.device)
                    members = alike.setdefault(spec, [])
                    last = members[-1] if members else None
                    members.append((slot, last[1] + last[0].shard_numel if last else 0))
        made, collectives = [], group.collectives
        for spec, members in alike.items():
            width = members[-1][1] + members[-1][0].shard_numel
            copies = 1 if group.replicas is None else group.replicas.size
            division = plan_division(
                spec.reduce_dtype,
                collectives.size,
                spec.factor,
                collectives.premultiplies,
                copies,
                spec.sum_only,
                collectives.size == 1 and copies == 1,
                not width,
            )
            made.append(_Reduced(spec, members, width, division))
        self._planned[key] = group.options, made
        return made

    def _launch(
        self, name: str, output: Tensor, collective: Callable[..., Work | None], *given: object
    ) -> None:
        title = self.unit.title
        try:
            work = collective(self.group.collectives.group, *given, behind=True)
        except RuntimeError as error:
            raise communication_error(name, title, error) from error
        if work is not None:
            _running[output.data_ptr()] = work, name, title


def _wait_for(output: Tensor) -> None:
    started = _running.pop(output.data_ptr(), None)
    if started is not None:
        work, name, title = started
        try:
            work.wait()
        except RuntimeError as error:
            raise communication_error(name, title, error) from error


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _block_of(whole: Tensor, slot: Slot, block: tuple[int, int, int]) -> Tensor:
    """A view of the elements that some ranks hold: [bands, ranks, outer, length, inner]."""
    ranks, first, length = block
    inner, row = slot.inner, slot.shape[slot.dim] * slot.inner
    piece = slot.chunk * inner
    shape = (slot.cut.bands, ranks, slot.outer, length, inner)
    strides = (slot.outer * row, piece, row, inner, 1)
    return whole.as_strided(shape, strides, whole.storage_offset() + first * piece)


def _pieces_in(rows: Tensor, slot: Slot, block: tuple[int, int, int], width: int) -> Tensor:
    """The same elements in the rows of all ranks, [ranks * width]."""
    ranks, first, length = block
    shape = (slot.cut.bands, ranks, slot.outer, length, slot.inner)
    strides = (slot.per_band * width, width, length * slot.inner, slot.inner, 1)
    return rows.as_strided(shape, strides, first * width + slot.shard_offset)


def exchange(key: str) -> Exchange:
    """The group of a key.

    Raises:
        ShardingStateError: its model is gone, or of another process.
    """
    found = _exchanges.get(key)
    if found is None:
        raise coded(
            ShardingStateError,
            "graph-of-another-model",
            f"a compiled graph uses group {key} of a model that no longer exists; call "
            f"torch._dynamo.reset() and compile the model that you have",
        )
    return found


# ---- the operators


@torch.library.custom_op("fsdp2::unshard", mutates_args=())
def unshard(shards: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    """Gather a group: from its local shards to its unsharded parameters."""
    found = exchange(key)
    return found.end_unshard(found.start_unshard(shards))


@torch.library.custom_op("fsdp2::start_unshard", mutates_args=())
def start_unshard(shards: list[Tensor], key: str) -> list[Tensor]:
    """The first half of `unshard`."""
    return exchange(key).start_unshard(shards)


@torch.library.custom_op("fsdp2::end_unshard", mutates_args=())
def end_unshard(rows: list[Tensor], key: str) -> list[Tensor]:
    """The second half of `unshard`."""
    return exchange(key).end_unshard(rows)


@torch.library.custom_op("fsdp2::reduce", mutates_args=())
def reduce(gradients: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    """Reduce gradients of a group's trained parameters to those of their shards."""
    found = exchange(key)
    return found.end_reduce(found.start_reduce(gradients, trained), trained)


@torch.library.custom_op("fsdp2::start_reduce", mutates_args=())
def start_reduce(gradients: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    """The first half of `reduce`."""
    return exchange(key).start_reduce(gradients, trained)


@torch.library.custom_op("fsdp2::end_reduce", mutates_args=())
def end_reduce(rows: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    """The second half of `reduce`."""
    return exchange(key).end_reduce(rows, trained)


@unshard.register_fake
def _(shards: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    found = exchange(key).slots()
    return [shards[0].new_empty(slot.shape, dtype=dtype) for slot, dtype in found]


@start_unshard.register_fake
def _(shards: list[Tensor], key: str) -> list[Tensor]:
    found, size = exchange(key), exchange(key).group.collectives.size
    segments = found.segments
    return [shards[0].new_empty(size * s.shard_numel, dtype=s.full_dtype) for s in segments]


@end_unshard.register_fake
def _(rows: list[Tensor], key: str) -> list[Tensor]:
    found = exchange(key).slots()
    return [rows[0].new_empty(slot.shape, dtype=dtype) for slot, dtype in found]


def _fake_shards(some: Tensor, key: str, trained: Sequence[int]) -> list[Tensor]:
    group, slots = exchange(key).group, exchange(key).slots()
    shapes = {slot.index: slot.local_shape(group.collectives.rank) for slot, _ in slots}
    dtypes = {index: group.params[index].grad_dtype for index in trained}
    return [some.new_empty(shapes[index], dtype=dtypes[index]) for index in trained]


@reduce.register_fake
def _(gradients: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    return _fake_shards(gradients[0], key, trained)


@start_reduce.register_fake
def _(gradients: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    found = exchange(key)._reductions(trained)
    return [gradients[0].new_empty(r.width, dtype=r.spec.reduce_dtype) for r in found]


@end_reduce.register_fake
def _(rows: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    return _fake_shards(rows[0], key, trained)


# ---- their derivatives


def _keep(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    _, ctx.key, ctx.trained = inputs
    ctx.count = len(inputs[0])


def _reduced(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[object, ...]:
    """The derivative of `unshard`: an unused parameter of a used group has a gradient of zeros."""
    slots, trained = exchange(ctx.key).slots(), ctx.trained
    some = next(gradient for gradient in gradients if gradient is not None)
    found: list[Tensor] = []
    for index in trained:
        gradient, (slot, dtype) = gradients[index], slots[index]
        found.append(some.new_zeros(slot.shape, dtype=dtype) if gradient is None else gradient)
    shards: list[Tensor | None] = [None] * ctx.count
    for index, shard in zip(trained, reduce(found, ctx.key, trained), strict=True):
        shards[index] = shard
    return shards, None, None


def _unsharded(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[object, ...]:
    """The derivative of `reduce`."""
    found = exchange(ctx.key)
    some = next(gradient for gradient in gradients if gradient is not None)
    given = dict(zip(ctx.trained, gradients, strict=True))
    shards: list[Tensor] = []
    for slot, dtype in found.slots():
        shard = given.get(slot.index)
        shape = slot.local_shape(found.group.collectives.rank)
        shards.append(some.new_zeros(shape, dtype=dtype) if shard is None else shard)
    full = unshard(shards, ctx.key, ctx.trained)
    return [full[index] for index in ctx.trained], None, None


unshard.register_autograd(_reduced, setup_context=_keep)
reduce.register_autograd(_unsharded, setup_context=_keep)
