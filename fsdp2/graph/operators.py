"""`fsdp2::unshard` and `fsdp2::reduce`: a group's collectives as functions of tensors.

    local shards ── fsdp2::unshard ──> unsharded parameters          all-gather
    gradients of these ── fsdp2::reduce ──> gradients of shards      reduce-scatter, all-reduce

Either is the other's derivative. The loss is the mean over ranks: the derivative of ``unshard`` is
the average that training takes; the derivative of that average is ``unshard``, without a division,
because the next derivative averages again.

Each is also there in two halves, for graphs that compute in between (`fsdp2.graph.placement`):

    unshard = end_unshard(start_unshard(shards))          the first launches, the second waits
    reduce  = end_reduce(start_reduce(gradients))

A graph cannot hold a group: it holds the group's key, under which `Exchange` has it. A half that
communicates returns a token besides, and takes the one of the collective before it: a compiler
orders operators by what they read, and ranks with shards of other sizes could get another order.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import (
    Kernels,
    ParamGroup,
    Slot,
    Unit,
    Work,
    communication_error,
    plan_division,
    plan_flat,
    reduction_spec,
    run_all_gather,
    run_reduce_scatter,
)

_numbers = itertools.count()
_exchanges: weakref.WeakValueDictionary[str, Exchange] = weakref.WeakValueDictionary()
_running: dict[int, tuple[Work, str, str]] = {}
"""Collectives that were launched and not waited for, by the address of their output."""


class _Rows:
    """Parameters side by side in rows of one rank each, [ranks, width].

    Args:
        slots: the parameters, in the order of a row.
        ranks: how many rows there are.
        width: elements of a row, padding at its end included.
    """

    def __init__(self, slots: Sequence[Slot], ranks: int, width: int) -> None:
        self.slots, self.ranks, self.width = slots, ranks, width
        self.sizes = [slot.shard_numel for slot in slots]
        *self.starts, end = itertools.accumulate(self.sizes, initial=0)
        self._tail = width - end
        self._in_order = list(itertools.takewhile(lambda slot: slot.in_order, slots))
        self._columns = sum(slot.shard_numel for slot in self._in_order)

    def lie_in(self, flat: Tensor, shards: Sequence[Tensor]) -> bool:
        """Whether shards are the pieces of one row in memory."""
        begin, size = flat.data_ptr(), flat.element_size()
        for slot, start in zip(self.slots, self.starts, strict=True):
            shard = shards[slot.index]
            if shard.numel() and (
                shard.data_ptr() != begin + start * size
                or shard.dtype is not flat.dtype
                or not shard.is_contiguous()
            ):
                return False
        return True

    def fill(self, row: Tensor, shards: Sequence[Tensor]) -> None:
        """Copy shards into a row."""
        pieces = row.split_with_sizes([*self.sizes, self._tail])
        for slot, piece in zip(self.slots, pieces, strict=False):
            shard = shards[slot.index]
            piece.narrow(0, 0, shard.numel()).copy_(shard.reshape(-1))

    def joined(self, given: dict[int, Tensor], dtype: torch.dtype, kernels: Kernels) -> Tensor:
        """Rows of whole tensors, [ranks * width], padded with zeros, in one copy."""
        some = next(iter(given.values()))
        rows = some.new_empty(self.ranks * self.width, dtype=dtype)
        parts = []
        for slot in self.slots:
            part = given[slot.index]
            if not slot.shard_numel:
                continue
            if slot.dim != 0 or slot.cut.bands > 1:
                # Blocks of memory: an operator's gradient may have any strides.
                source, width = part.contiguous(), slot.shard_numel
                part = part.new_zeros(self.ranks, width)
                for block in slot.blocks():
                    pieces = _pieces_in(part, slot, block, 0, width)
                    pieces.copy_(_block_of(source, slot, block))
            parts.append(part.to(dtype))
        if self._tail:
            parts.append(some.new_zeros(self.ranks, self._tail, dtype=dtype))
        if parts:
            kernels.chunk_cat(parts, 0, self.ranks, out=rows.view(self.ranks, self.width))
        return rows

    def whole(self, rows: Tensor) -> dict[int, Tensor]:
        """The parameters of all ranks' rows, each in memory of its own, by its index."""
        table = rows.view(self.ranks, self.width)
        sizes = self.sizes[: len(self._in_order)]
        ordered = table.narrow(1, 0, self._columns)
        pieces = _copies_of(ordered, sizes, 1) if sizes else ()
        found = {}
        for slot, piece in zip(self._in_order, pieces, strict=True):
            if not slot.even:
                piece = piece.view(-1).narrow(0, 0, slot.numel)
            found[slot.index] = piece.view(slot.shape)
        rest = len(self._in_order)
        for slot, start in zip(self.slots[rest:], self.starts[rest:], strict=True):
            whole = found[slot.index] = rows.new_empty(slot.shape)
            for block in slot.blocks():
                _block_of(whole, slot, block).copy_(
                    _pieces_in(rows, slot, block, start, self.width)
                )
        return found

    def parts(self, row: Tensor, rank: int) -> dict[int, Tensor]:
        """A rank's parts of a row, each in memory of its own, by its index."""
        found = {}
        pieces = _copies_of(row.narrow(0, 0, self.width - self._tail), self.sizes, 0)
        for slot, piece in zip(self.slots, pieces, strict=True):
            shape = slot.local_shape(rank)
            if not slot.even:
                piece = piece.narrow(0, 0, math.prod(shape))
            found[slot.index] = piece.view(shape)
        return found


class _Reduction:
    """Parameters that are reduced in one collective: their dtypes, rows, and where it divides."""

    def __init__(self, group: ParamGroup, slots: Sequence[Slot]) -> None:
        param, collectives = group.params[slots[0].index], group.collectives
        self.spec = reduction_spec(group.options, param, group.offload, group.device)
        dtype, size = self.spec.reduce_dtype, collectives.size
        # Marks are not sent, but have room as in the engine's rows: where an element lies decides
        # in which order gloo and NCCL add up more than two ranks.
        facts = collectives.rank, dtype, size > 1, group.replicas is not None, False, True
        width = plan_flat(slots, *facts).width
        copies = 1 if group.replicas is None else group.replicas.size
        alone, where = size * copies == 1, (self.spec.factor, collectives.premultiplies, copies)
        self.division = plan_division(dtype, size, *where, self.spec.sum_only, alone, not width)
        self.rows = _Rows(slots, size, width)


class Exchange:
    """A group as its operators see it.

    Args:
        unit: the unit that the group belongs to.
        group: the group.
    """

    def __init__(self, unit: Unit, group: ParamGroup) -> None:
        self.unit, self.group = unit, group
        self._number = next(_numbers)
        self._planned: dict[object, list[_Reduction]] = {}
        self._planned_for: tuple[object, object] = (None, None)
        self._plan()

    def follow(self) -> None:
        """Notice what `.to()`, `to_empty()` and setters have changed."""
        if not all(param.is_in_place for param in self.group.params):
            self.group.follow_params()
        self._plan()

    def _plan(self) -> None:
        """Note what follows from the group's layout and options, which may be replaced."""
        group, layout = self.group, self.group.layout
        assert layout is not None
        known, options = self._planned_for
        if known is layout and options is group.options:
            return
        self._planned_for = layout, group.options
        self._planned.clear()
        size, rank = group.collectives.size, group.collectives.rank
        self.gathers = [(s, _Rows(s.slots, size, s.shard_numel)) for s in layout.segments]
        found = [(slot, s.full_dtype) for s in layout.segments for slot in s.slots]
        self.slots = sorted(found, key=lambda pair: pair[0].index)
        """Every parameter's place, and its dtype once gathered, in the group's order."""
        # torch's caches of compiled graphs, also on disk, know the inputs and this key, and trust
        # what the operators returned when the graph was traced: all of that is in the key.
        dtypes = [param.dtype for param in group.params]
        floating = [
            i for i, dtype in enumerate(dtypes) if dtype.is_floating_point or dtype.is_complex
        ]
        facts = [
            *((str(s.shard_dtype), str(s.full_dtype), rows.width) for s, rows in self.gathers),
            *((slot.index, slot.shape, slot.local_shape(rank)) for slot, _ in self.slots),
            *(
                (r.spec.reduce_dtype, r.rows.width, [slot.index for slot in r.rows.slots])
                for r in self.reductions(floating)
            ),
            *(group.params[index].grad_dtype for index in floating),
        ]
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
        self.key = f"{self.unit.title}#{self._number} {digest}"
        _exchanges[self.key] = self

    # ---- from shards to parameters

    def start_unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Launch the all-gather of each segment; returns all ranks' rows, [ranks * n] each."""
        group, collectives, found = self.group, self.group.collectives, []
        self.follow()
        size, rank, shard = collectives.size, collectives.rank, group.shard
        assert shard is not None
        for segment, rows in self.gathers:
            width, dtype = rows.width, segment.full_dtype
            every = shards[0].new_empty(size * width, dtype=dtype)
            found.append(every)
            if not width:
                continue
            own = flat = shard.view(segment.shard_dtype, segment.shard_byte_offset, (width,))
            in_place = rows.lie_in(flat, shards)
            if not in_place or segment.shard_dtype is not dtype or size == 1:
                own = every.narrow(0, rank * width, width)
                if in_place:
                    own.copy_(flat)
                else:
                    rows.fill(own, shards)
            if size > 1:
                self._launch("all-gather", every, run_all_gather, _real(every), _real(own))
        return found

    def end_unshard(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Wait for the rows, and put the pieces of all ranks in place."""
        full: dict[int, Tensor] = {}
        for every, (_, places) in zip(rows, self.gathers, strict=True):
            _wait_for(every)
            full |= places.whole(every)
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
        group, found = self.group, []
        given = dict(zip(trained, gradients, strict=True))
        for reduction in self.reductions(trained):
            division = reduction.division
            dtype, width = reduction.spec.reduce_dtype, reduction.rows.width
            rows = reduction.rows.joined(given, dtype, group.runtime.kernels)
            if division.before is not None:
                rows.div_(division.before)
            if group.collectives.size == 1 or not width:
                found.append(rows)
                continue
            own = rows.new_empty(width)
            sent = _real(own), _real(rows), division.kind.op
            self._launch("reduce-scatter", own, run_reduce_scatter, *sent)
            found.append(own)
        return found

    def end_reduce(self, rows: Sequence[Tensor], trained: Sequence[int]) -> list[Tensor]:
        """Wait for the sums, add those of replicas, and return each shard's gradient."""
        shards: dict[int, Tensor] = {}
        replicas, rank = self.group.replicas, self.group.collectives.rank
        for own, reduction in zip(rows, self.reductions(trained), strict=True):
            _wait_for(own)
            sums = own
            if replicas is not None and replicas.size > 1 and own.numel():
                sums = own.clone()  # an operator leaves its inputs as they are
                work = replicas.all_reduce(_real(sums), reduction.division.replicas)
                if work is not None:
                    work.wait()
            if reduction.division.after is not None:
                sums = sums.div(reduction.division.after)
            shards |= reduction.rows.parts(sums.to(reduction.spec.result_dtype), rank)
        return [shards[index] for index in trained]

    def reductions(self, trained: Sequence[int]) -> list[_Reduction]:
        """As the engine reduces: one collective for parameters of equal specs."""
        group, key = self.group, tuple(trained)
        if key in self._planned:
            return self._planned[key]
        alike: dict[object, list[Slot]] = {}
        for _, rows in self.gathers:
            for slot in rows.slots:
                if slot.index in trained:
                    param = group.params[slot.index]
                    spec = reduction_spec(group.options, param, group.offload, group.device)
                    alike.setdefault(spec, []).append(slot)
        made = [_Reduction(group, slots) for slots in alike.values()]
        self._planned[key] = made
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


def _copies_of(source: Tensor, sizes: list[int], dim: int) -> Sequence[Tensor]:
    """All of it, in tensors of their own; one kernel on an accelerator."""
    split: Callable[..., Sequence[Tensor]] = torch.ops.aten.split_with_sizes_copy.default
    return split(source, sizes, dim)


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


def _pieces_in(
    rows: Tensor, slot: Slot, block: tuple[int, int, int], start: int, width: int
) -> Tensor:
    """The same elements in the rows of all ranks, [ranks * width], each from ``start`` on."""
    ranks, first, length = block
    shape = (slot.cut.bands, ranks, slot.outer, length, slot.inner)
    strides = (slot.per_band * width, width, length * slot.inner, slot.inner, 1)
    return rows.as_strided(shape, strides, first * width + start)


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
    found._plan()
    if found.key != key:
        raise coded(
            ShardingStateError,
            "graph-mode-changed",
            f"dtypes or the layout of unit '{found.unit.title}' have changed since its graph was "
            f"compiled; call graph_mode(model) again, and the model compiles anew",
        )
    return found


# ---- the operators


def _unshard(shards: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    found = exchange(key)
    return found.end_unshard(found.start_unshard(shards))


def _reduce(gradients: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    found = exchange(key)
    return found.end_reduce(found.start_reduce(gradients, trained), trained)


def _like_parameters(given: list[Tensor], key: str, _: object = None) -> list[Tensor]:
    return [given[0].new_empty(slot.shape, dtype=dtype) for slot, dtype in exchange(key).slots]


def _like_unsharded(shards: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    found = exchange(key)
    for segment, rows in found.gathers:
        for slot in rows.slots:
            if shards[slot.index].dtype is not segment.shard_dtype:
                raise coded(
                    ShardingStateError,
                    "graph-mode-dtype",
                    f"parameter '{found.group.params[slot.index].name}' of unit "
                    f"'{found.unit.title}' was {segment.shard_dtype} when graph_mode was called "
                    f"and is {shards[slot.index].dtype} now; call graph_mode again before you "
                    f"compile",
                )
    return _like_parameters(shards, key)


def _like_gathered_rows(shards: list[Tensor], key: str) -> list[Tensor]:
    gathers = exchange(key).gathers
    return [shards[0].new_empty(r.ranks * r.width, dtype=s.full_dtype) for s, r in gathers]


def _like_sums(gradients: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    found = exchange(key).reductions(trained)
    return [gradients[0].new_empty(r.rows.width, dtype=r.spec.reduce_dtype) for r in found]


def _like_shards(given: list[Tensor], key: str, trained: list[int]) -> list[Tensor]:
    found = exchange(key)
    rank, params = found.group.collectives.rank, found.group.params
    shapes = {slot.index: slot.local_shape(rank) for slot, _ in found.slots}
    return [given[0].new_empty(shapes[i], dtype=params[i].grad_dtype) for i in trained]


def _and_token(run: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """With a token as the last output, which the next collective takes as ``after``."""

    def with_token(given: list[Tensor], key: str, *facts: object) -> list[Tensor]:
        return [*run(given, key, *facts[:-1]), given[0].new_empty(1)]

    return with_token


def _half(name: str) -> Callable[..., list[Tensor]]:
    return lambda given, key, *facts: getattr(exchange(key), name)(given, *facts)


_KEYED, _TRAINED = "(Tensor[] given, str key", "(Tensor[] given, str key, int[] trained"
_AFTER = ", Tensor? after)"
_OPERATORS: dict[str, tuple[str, Callable[..., object], Callable[..., object]]] = {
    "unshard": (_TRAINED + ")", _unshard, _like_unsharded),
    "start_unshard": (
        _KEYED + _AFTER,
        _and_token(_half("start_unshard")),
        _and_token(_like_gathered_rows),
    ),
    "end_unshard": (_KEYED + ")", _half("end_unshard"), _like_parameters),
    "reduce": (_TRAINED + ")", _reduce, _like_shards),
    "start_reduce": (_TRAINED + _AFTER, _and_token(_half("start_reduce")), _and_token(_like_sums)),
    "end_reduce": (_TRAINED + _AFTER, _and_token(_half("end_reduce")), _and_token(_like_shards)),
}
"""Signature, implementation, and what only allocates. `torch.library.custom_op` would do the same
with checks of every call, which take half of a small step."""

_library = torch.library.Library("fsdp2", "DEF")
for _name, (_signature, _run, _fake) in _OPERATORS.items():
    _library.define(f"{_name}{_signature} -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdp2::{_name}", _fake, lib=_library)

unshard: Callable[[list[Tensor], str, list[int]], list[Tensor]]
unshard = torch.ops.fsdp2.unshard.default
reduce: Callable[[list[Tensor], str, list[int]], list[Tensor]]
reduce = torch.ops.fsdp2.reduce.default


# ---- their derivatives


def _keep(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    _, ctx.key, ctx.trained = inputs
    ctx.count = len(inputs[0])


def _reduced(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[object, ...]:
    """The derivative of `unshard`: an unused parameter of a used group has a gradient of zeros."""
    slots, trained = exchange(ctx.key).slots, ctx.trained
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
    for slot, dtype in found.slots:
        shard = given.get(slot.index)
        shape = slot.local_shape(found.group.collectives.rank)
        shards.append(some.new_zeros(shape, dtype=dtype) if shard is None else shard)
    full = unshard(shards, ctx.key, ctx.trained)
    return [full[index] for index in ctx.trained], None, None


_autograd = torch.library.register_autograd
_autograd("fsdp2::unshard", _reduced, setup_context=_keep, lib=_library)
_autograd("fsdp2::reduce", _unsharded, setup_context=_keep, lib=_library)
