"""`fsdp2::unshard` and `fsdp2::reduce`: a group's collectives as functions of tensors.

    local shards ── fsdp2::unshard ──> unsharded parameters          all-gather
    gradients of these ── fsdp2::reduce ──> gradients of shards      reduce-scatter, all-reduce

``flat``, shards are rows: a group's memory, and handles, whose gradients are flat as well
(`fsdp2.graph.edge`).

Either is the other's derivative. The loss is the mean over ranks: the derivative of ``unshard`` is
the average that training takes; the derivative of that average is ``unshard``, without a division,
because the next derivative averages again.

Graphs that compute in between (`fsdp2.graph.placement`) launch a collective in one place and wait
for it in another, mostly where the next one is launched: one operator does both. Functions of torch
stand around the collectives (`fsdp2.graph.rows`), which a compiler fuses:

    unshard    sent ── all_gather ····· all_gather of the next unit ── whole
    reduce     joined ── reduce_scatter ····· reduce_scatter of the next unit ── divided

A graph cannot hold a group: it holds the group's key, under which `Exchange` has it. A compiler
orders operators by what they read and write, and uses memory again that none reads any more. A
collective takes an output of the one before it: ranks with shards of other sizes could get another
order. The operator that waits for it takes what it reads, which nobody may write until then.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import (
    Gradients,
    ParamGroup,
    ReduceKind,
    ReductionSpec,
    Slot,
    Transport,
    Unit,
    Work,
    communication_error,
    gradients_of,
    reduction_spec,
)
from fsdp2.graph.rows import GatheredRows, ReducedRows

_numbers = itertools.count()
_exchanges: weakref.WeakValueDictionary[str, Exchange] = weakref.WeakValueDictionary()
_running: dict[int, list[Callable[[], None]]] = {}
"""How to wait for collectives that were launched, by the address of an output."""

_PLACED = 4
"""Raise it when `fsdp2.graph.placement` or `rows` writes other graphs: torch keeps them on disk."""


class Exchange:
    """A group as its operators see it.

    Args:
        unit: the unit that the group belongs to.
        group: the group.
    """

    def __init__(self, unit: Unit, group: ParamGroup) -> None:
        self.unit, self.group = unit, group
        self._number = next(_numbers)
        self._planned: dict[object, list[ReducedRows]] = {}
        self._planned_for: tuple[object, object] = (None, None)
        self._gradients: dict[tuple[int, ...], Gradients] = {}
        self._shard: object = None
        self.permuted = any(param.order is not None for param in group.params)
        self._plan()

    def gradients(self, indices: tuple[int, ...]) -> Gradients:
        """The one that delivers the gradients of these parameters."""
        found = self._gradients.get(indices)
        if found is None:
            params = [self.group.params[index] for index in indices]
            found = self._gradients[indices] = gradients_of(params)
        return found

    def follow(self) -> None:
        """Notice what `.to()`, `to_empty()` and setters have changed."""
        if not all(param.is_in_place for param in self.group.params):
            self.group.follow_params()
        self._plan()

    def _plan(self) -> None:
        """Note what follows from the group's layout and options, which may be replaced."""
        group, layout = self.group, self.group.layout
        known, options = self._planned_for
        if known is layout and options is group.options:
            return
        self._planned_for, self._shard = (layout, group.options), None
        self.own_rows: list[Tensor] = []
        """The group's memory, when shards were seen in it."""
        self._planned.clear()
        collectives = group.collectives
        self.gathers = [GatheredRows(segment, collectives.size) for segment in layout.segments]
        self._held: list[tuple[int, Sequence[Tensor]]] = [(-1, []) for _ in self.gathers]
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
            (_PLACED, collectives.rank, *((slot.shape, slot.cut) for slot, _ in self.slots)),
            *(rows.facts for rows in self.gathers),
            *(rows.facts for rows in self.reductions(floating)),
        ]
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
        self.key = f"{self.unit.title}#{self._number} {digest}"
        _exchanges[self.key] = self

    # ---- from shards to parameters

    def rows(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Local shards as they lie in the group's memory, flat: that memory, or a copy."""
        self._plan()
        if not self._lie_in_place(shards):
            self.follow()
            if not self._lie_in_place(shards):
                return [rows.packed(shards) for rows in self.gathers]
        return self.own_rows

    def sent(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of all-gathers, of each segment."""
        return [rows.sent(row) for rows, row in zip(self.gathers, given, strict=True)]

    def packed(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The same of shards that lie anywhere."""
        return self.sent([rows.packed(shards) for rows in self.gathers])

    def outputs(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Memory for the output of each segment's all-gather, flat."""
        pairs = zip(self.gathers, sent, strict=True)
        return [row.new_empty(rows.numel) for rows, row in pairs]

    def all_gather(self, sent: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Launch the all-gathers."""
        launches: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for number, (rows, row, output) in enumerate(zip(self.gathers, sent, outputs, strict=True)):
            address, held = self._held[number]
            written = rows.pieces(output)
            read = held if row.data_ptr() == address else rows.shards(row)
            if rows.ranks == 1:
                for piece, shard in zip(written, read, strict=True):
                    piece.copy_(shard)
            elif rows.numel:
                # As in the engine: what is coalesced takes along what is packed in its dtype.
                launch = output.dtype if self.group.collectives.coalesces else number
                pairs = launches.setdefault(launch, ([], []))
                pairs[0].extend(written)
                pairs[1].extend(read)
        for written, read in launches.values():
            _running[written[0].data_ptr()] = []
            self._launch(None, written, read)

    def _lie_in_place(self, shards: Sequence[Tensor]) -> bool:
        """Whether shards are those of the group, in its memory."""
        memory = self.group.shard
        assert memory is not None
        if self._shard is not memory:
            self._shard = memory
            self.own_rows = [rows.row_in(memory) for rows in self.gathers]
            self._held = [
                (row.data_ptr(), rows.shards(row))
                for rows, row in zip(self.gathers, self.own_rows, strict=True)
            ]
            begin = memory.storage.data_ptr()
            self._addresses = [(-1, torch.uint8)] * len(self.slots)
            for rows in self.gathers:
                for index, offset in rows.shard_bytes:
                    self._addresses[index] = begin + offset, rows.segment.shard_dtype
        for shard, (address, dtype) in zip(shards, self._addresses, strict=True):
            if (
                (shard.data_ptr() != address and shard.numel())
                or shard.dtype is not dtype
                or not shard.is_contiguous()
                or (dtype.is_complex and shard.is_conj())
            ):
                return False
        return True

    def whole(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The parameters in what all-gathers have written."""
        full: dict[int, Tensor] = {}
        for output, rows in zip(outputs, self.gathers, strict=True):
            full |= rows.whole(output)
        return [full[index] for index in range(len(full))]

    def check_versions(self, shards: Sequence[Tensor], versions: Sequence[int]) -> None:
        """Raise if shards were written since a forward gathered them: backward gathers again."""
        if [shard._version for shard in shards] != versions:
            raise coded(
                ShardingStateError,
                "graph-mode-written",
                f"the shards of unit '{self.unit.title}' were written between its "
                f"forward and its backward, which gathers them again; step the optimizer after "
                f"backward, or call set_reshard_after_forward(False)",
            )

    # ---- from gradients to gradients of shards

    def joined(self, gradients: Sequence[Tensor], trained: Sequence[int]) -> list[Tensor]:
        """The inputs of reduce-scatters."""
        given = dict(zip(trained, gradients, strict=True))
        return [found for rows in self.reductions(trained) for found in rows.joined(given)]

    def sums(self, joined: Sequence[Tensor], trained: Sequence[int]) -> list[Tensor]:
        """Memory for this rank's sums of each reduction, flat."""
        planned = self.reductions(trained)
        return [joined[0].new_empty(rows.width, dtype=rows.spec.reduce_dtype) for rows in planned]

    def reduce_scatter(
        self, joined: Sequence[Tensor], sums: Sequence[Tensor], trained: Sequence[int]
    ) -> None:
        """Launch the reduce-scatters; who waits for them adds the sums of replicas."""
        if not (self.unit.sync and self.unit.all_reduce):
            raise coded(
                ShardingStateError,
                "graph-mode-no-sync",
                f"unit '{self.unit.title}' accumulates gradients without communication, which "
                f"graph mode cannot; call set_requires_gradient_sync(True), or add up .grad of "
                f"several backwards",
            )
        replicas, begin = self.group.replicas, 0
        for own, rows in zip(sums, self.reductions(trained), strict=True):
            read = [*joined[begin : begin + len(rows.outputs)]]
            begin += len(rows.outputs)
            if not rows.width:
                continue
            written = [*own.split_with_sizes(rows.outputs)]
            _running[own.data_ptr()] = waits = []
            if rows.ranks == 1:
                for piece, gradient in zip(written, read, strict=True):
                    piece.copy_(gradient)
            else:
                self._launch(rows.division.kind, written, read)
            if replicas is not None and replicas.size > 1:
                waits.append(partial(self._add_replicas, own, rows))

    def _add_replicas(self, own: Tensor, rows: ReducedRows) -> None:
        replicas = self.group.replicas
        assert replicas is not None
        work = replicas.all_reduce(_real(own), rows.division.replicas)
        if work is not None:
            work.wait()

    def divided(self, sums: Sequence[Tensor], trained: Sequence[int]) -> list[Tensor]:
        """The gradients of shards in what reductions have left, flat."""
        pairs = zip(sums, self.reductions(trained), strict=True)
        return [rows.divided(own) for own, rows in pairs]

    def parts(self, flat: Sequence[Tensor], trained: Sequence[int]) -> list[Tensor]:
        """The same of each shard."""
        found, order = [], []
        for own, rows in zip(flat, self.reductions(trained), strict=True):
            found += rows.parts(own)
            order += rows.indices
        if order == [*trained]:
            return found
        shards = dict(zip(order, found, strict=True))
        return [shards[index] for index in trained]

    def divided_parts(self, sums: Sequence[Tensor], trained: Sequence[int]) -> list[Tensor]:
        """Each shard's gradient in what reductions have left."""
        return self.parts(self.divided(sums, trained), trained)

    def handles(self, shard: Tensor, trained: Sequence[int]) -> list[Tensor]:
        """Tensors without memory, whose gradients are what `divided` returns."""
        return [
            shard.new_empty(1, dtype=rows.spec.result_dtype).expand(rows.width)
            for rows in self.reductions(trained)
        ]

    def reductions(self, trained: Sequence[int]) -> list[ReducedRows]:
        """As the engine reduces: one launch for parameters of equal specs."""
        group, key = self.group, tuple(trained)
        if key in self._planned:
            return self._planned[key]
        alike: dict[ReductionSpec, list[tuple[Slot, Transport]]] = {}
        for rows in self.gathers:
            for slot in rows.slots:
                if slot.index in trained:
                    param = group.params[slot.index]
                    spec = reduction_spec(group.options, param, group.offload, group.device)
                    alike.setdefault(spec, []).append((slot, rows.segment.transport))
        made = [ReducedRows(group, spec, members) for spec, members in alike.items()]
        self._planned[key] = made
        return made

    def _launch(self, kind: ReduceKind | None, written: list[Tensor], read: list[Tensor]) -> None:
        """All-gathers, or reduce-scatters as ``kind`` says."""
        address, name = written[0].data_ptr(), "all-gather" if kind is None else "reduce-scatter"
        if written[0].is_complex():
            written, read = [*map(_real, written)], [*map(_real, read)]
        try:
            work = self.group.collectives.launch_behind(self.unit.title, kind, written, read)
        except RuntimeError as error:
            raise communication_error(name, self.unit.title, error) from error
        if work is not None:
            _running[address].append(partial(self._wait, work, name))

    def _wait(self, work: Work, name: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise communication_error(name, self.unit.title, error) from error


def wait_for(outputs: Sequence[Tensor]) -> None:
    """Wait for the collectives that write these outputs."""
    for output in outputs:
        for wait in _running.pop(output.data_ptr(), ()):
            wait()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


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
    _check_key(found, key)
    return found


def _check_key(found: Exchange, key: str) -> None:
    if found.key != key:
        raise coded(
            ShardingStateError,
            "graph-mode-changed",
            f"dtypes or the layout of unit '{found.unit.title}' have changed since its graph was "
            f"compiled; call graph_mode(model) again, and the model compiles anew",
        )


# ---- the operators


def _unshard(given: list[Tensor], key: str, trained: list[int], flat: bool) -> list[Tensor]:
    found = exchange(key)
    rows = given[: len(found.gathers)] if flat else found.rows(given)
    _check_key(found, key)  # before anything is launched
    sent = found.sent(rows)
    outputs = found.outputs(sent)
    found.all_gather(sent, outputs)
    wait_for(outputs)
    return found.whole(outputs)


def _reduce(gradients: list[Tensor], key: str, trained: list[int], flat: bool) -> list[Tensor]:
    found = exchange(key)
    joined = found.joined(gradients, trained)
    sums = found.sums(joined, trained)
    found.reduce_scatter(joined, sums, trained)
    wait_for(sums)
    return found.divided(sums, trained) if flat else found.divided_parts(sums, trained)


def _all_gather(
    ended: list[Tensor], _: object, outputs: list[Tensor], sent: list[Tensor], key: str, __: object
) -> None:
    wait_for(ended)
    exchange(key).all_gather(sent, outputs)


def _reduce_scatter(
    ended: list[Tensor],
    _: object,
    sums: list[Tensor],
    joined: list[Tensor],
    key: str,
    trained: list[int],
    __: object,
) -> None:
    wait_for(ended)
    exchange(key).reduce_scatter(joined, sums, trained)


def _like_parameters(given: list[Tensor], key: str, trained: list[int], flat: bool) -> list[Tensor]:
    found = exchange(key)
    for rows in () if flat else found.gathers:
        dtype = rows.segment.shard_dtype
        for slot in rows.slots:
            if given[slot.index].dtype is not dtype:
                raise coded(
                    ShardingStateError,
                    "graph-mode-dtype",
                    f"parameter '{found.group.params[slot.index].name}' of unit "
                    f"'{found.unit.title}' was {dtype} when graph_mode was called and is "
                    f"{given[slot.index].dtype} now; call graph_mode again before you compile",
                )
    return [given[0].new_empty(slot.shape, dtype=dtype) for slot, dtype in found.slots]


def _like_gradients(
    gradients: list[Tensor], key: str, trained: list[int], flat: bool
) -> list[Tensor]:
    found, some = exchange(key), gradients[0]
    if flat:
        planned = found.reductions(trained)
        return [some.new_empty(rows.width, dtype=rows.spec.result_dtype) for rows in planned]
    rank, params = found.group.collectives.rank, found.group.params
    shapes = {slot.index: slot.local_shape(rank) for slot, _ in found.slots}
    return [some.new_empty(shapes[i], dtype=params[i].grad_dtype) for i in trained]


_OPERATORS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "unshard(Tensor[] given, str key, int[] trained, bool flat) -> Tensor[]": (
        _unshard,
        _like_parameters,
    ),
    "reduce(Tensor[] given, str key, int[] trained, bool flat) -> Tensor[]": (
        _reduce,
        _like_gradients,
    ),
    "all_gather(Tensor(a!)[] ended, Tensor[] held, Tensor(b!)[] outputs, Tensor[] sent, "
    "str key, Tensor? after) -> ()": (_all_gather, lambda *_: None),
    "reduce_scatter(Tensor(a!)[] ended, Tensor[] held, Tensor(b!)[] sums, Tensor[] joined, "
    "str key, int[] trained, Tensor? after) -> ()": (_reduce_scatter, lambda *_: None),
    "wait(Tensor(a!)[] ended, Tensor[] held, Tensor? after) -> ()": (
        lambda ended, *_: wait_for(ended),
        lambda *_: None,
    ),
}
"""By signature: the implementation, and what only allocates. `torch.library.custom_op` would do the
same with checks of every call, which take half of a small step."""

_library = torch.library.Library("fsdp2", "DEF")
for _signature, (_run, _fake) in _OPERATORS.items():
    _name = _library.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdp2::{_name}", _fake, lib=_library)

unshard: Callable[[list[Tensor], str, list[int], bool], list[Tensor]]
unshard = torch.ops.fsdp2.unshard.default
reduce: Callable[[list[Tensor], str, list[int], bool], list[Tensor]]
reduce = torch.ops.fsdp2.reduce.default


# ---- their derivatives


def _keep(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    _, ctx.key, ctx.trained, ctx.flat = inputs
    ctx.count = len(inputs[0])


def _reduced(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[object, ...]:
    """The derivative of `unshard`: an unused parameter of a used group has a gradient of zeros."""
    slots, trained = exchange(ctx.key).slots, ctx.trained
    some = next(gradient for gradient in gradients if gradient is not None)
    found: list[Tensor] = []
    for index in trained:
        gradient, (slot, dtype) = gradients[index], slots[index]
        found.append(some.new_zeros(slot.shape, dtype=dtype) if gradient is None else gradient)
    reduced = reduce(found, ctx.key, trained, ctx.flat)
    if ctx.flat:  # handles are the last
        return [None] * (ctx.count - len(reduced)) + reduced, None, None, None
    shards: list[Tensor | None] = [None] * ctx.count
    for index, shard in zip(trained, reduced, strict=True):
        shards[index] = shard
    return shards, None, None, None


def _unsharded(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[object, ...]:
    """The derivative of `reduce`, of which only compiled graphs ask for flat results."""
    found = exchange(ctx.key)
    some = next(gradient for gradient in gradients if gradient is not None)
    given = dict(zip(ctx.trained, gradients, strict=True))
    shards: list[Tensor] = []
    for slot, dtype in found.slots:
        shard = given.get(slot.index)
        shape = slot.local_shape(found.group.collectives.rank)
        shards.append(some.new_zeros(shape, dtype=dtype) if shard is None else shard)
    full = unshard(shards, ctx.key, ctx.trained, False)
    return [full[index] for index in ctx.trained], None, None, None


_autograd = torch.library.register_autograd
_autograd("fsdp2::unshard", _reduced, setup_context=_keep, lib=_library)
_autograd("fsdp2::reduce", _unsharded, setup_context=_keep, lib=_library)
