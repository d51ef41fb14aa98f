"""The edge of a compiled forward: groups enter as rows, and their gradients leave to ``.grad``.

    DTensors ── rows, handles ──> graph ──> gradients of handles ── delivered ──> .grad of DTensors

A row is a part of a group's flat shard. A handle holds no memory; its gradient is what a reduction
leaves. A graph that takes DTensors guards a dozen facts of each, takes it apart, saves it for
backward, and makes one of its gradient: 40 us per parameter and step. Here the parameters of a
group enter together, and what delivers gradients after hooks delivers theirs. If autograd is asked
for gradients (``torch.autograd.grad``), or calls somebody's hooks with them, it gets DTensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from fsdp2.core.facts import ModuleEntry, locals_of, with_dtype, wrap_local
from fsdp2.graph.operators import Exchange

Given = tuple[str, list[Tensor]]
"""A group in a graph: positions of parameters that require grad, as one fact to guard; its rows and
handles."""
Place = ModuleEntry | None
"""The first module and name that a parameter is registered under, if there are any."""
Group = tuple[Exchange, Sequence[Place]]
_requires_grad, _version = map(operator.attrgetter, ("requires_grad", "_version"))


class Edge:
    """All groups of a model. Rows enter again as they are while parameters stay; handles are new:
    their graph holds a node per parameter, and `.to()` refuses to swap one that was frozen since.

    Args:
        groups: each group, and the places of its parameters.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._members = [
            (param, place)
            for exchange, places in groups
            for param, place in zip(exchange.group.params, places, strict=True)
        ]
        self._entries: list[_Entry] = []
        self._trained: list[_Entry] = []
        self._values: list[DTensor] = []
        self._objects: list[object] = []
        self._facts: list[object] = []
        """All these depend on these objects and facts; on more if there are none."""

    def enter(self) -> list[tuple[Given | None, Sequence[object]]]:
        """The tensors that a forward takes in place of each group's parameters, and what its graph
        should find; ``None``: it takes parameters as they are, because they are no DTensors as the
        group has them.
        """
        with DisableTorchFunctionSubclass():  # which every look at a DTensor would ask for
            found = [
                param.sharded if place is None else place[0]._parameters[place[1]]
                for param, place in self._members
            ]
            registered = cast(list[DTensor], found)
            if not self._stay(registered):
                self._look(registered)
            for entry in self._entries:
                entry.follow()
            with torch.inference_mode(False), torch.enable_grad():
                handles = iter(_Handles.apply(self._trained, *self._values) if self._values else ())
        return [
            ((entry.text, [*entry.rows, *islice(handles, entry.handles)]), entry.expected)
            if entry.rows
            else (None, entry.expected)
            for entry in self._entries
        ]

    def _look(self, registered: Sequence[DTensor]) -> None:
        """Look at all parameters anew."""
        left = iter(registered)
        self._entries = [
            _Entry(exchange, [*islice(left, len(places))]) for exchange, places in self._groups
        ]
        self._trained = [entry for entry in self._entries if entry.handles]
        self._values = [value for entry in self._trained for value in entry.values]
        found = self._depends_on(registered) if all(e.in_place for e in self._entries) else ([], [])
        self._objects, self._facts = found

    def _stay(self, registered: Sequence[DTensor]) -> bool:
        known = self._objects  # the first are what was registered
        if not known or not all(map(operator.is_, registered, known)):
            return False
        objects, facts = self._depends_on(registered)
        return facts == self._facts and all(map(operator.is_, objects, known))

    def _depends_on(self, registered: Sequence[DTensor]) -> tuple[list[object], list[object]]:
        shards = cast(list[Tensor], locals_of(registered))
        objects: list[object] = [*registered, *shards]
        for exchange, _ in self._groups:
            group = exchange.group
            objects += group.layout, group.options, group.shard
        return objects, [*map(Tensor.data_ptr, shards), *map(_requires_grad, registered)]


class _Entry:
    """A group that enters.

    Args:
        exchange: the group.
        registered: what is registered as its parameters.
    """

    def __init__(self, exchange: Exchange, registered: list[DTensor]) -> None:
        self.exchange = exchange
        flags = [value is not None and value.requires_grad for value in registered]
        self.trained = tuple(index for index, flag in enumerate(flags) if flag)
        self.values = [registered[index] for index in self.trained]
        own: list[Tensor] = [param.sharded for param in exchange.group.params]
        self._owned = all(map(operator.is_, registered, own))
        self.rows: list[Tensor] = []
        self._shards: list[Tensor] = []
        if self._owned or all(map(_alike, registered, own)):
            self._shards = cast(list[Tensor], locals_of(registered))
            if exchange.permuted:
                pairs = zip(exchange.group.params, self._shards, strict=True)
                self._shards = [param.laid_out(shard) for param, shard in pairs]
            self.rows = exchange.rows(self._shards)
        self.in_place = self.rows is exchange.own_rows
        self.handles = len(exchange.reductions(self.trained)) if self.rows and self.trained else 0
        self.text = " ".join(map(str, self.trained))
        self.expected = [*self.rows[:1], *registered] if self.rows else []
        self._versions = [*map(_version, self._shards)]

    def follow(self) -> None:
        """Let a former forward's backward raise, which would gather the values that came since."""
        versions = [*map(_version, self._shards)]
        if versions != self._versions:
            self._versions = versions
            torch.autograd.graph.increment_version(self.rows)

    def check(self) -> None:
        """Raise if a backward would gather other values than the last forward did."""
        if self.exchange.unit.frees_after_forward:
            self.exchange.check_versions(self._shards, self._versions)

    def leave(self, flat: Sequence[Tensor], leaves: Sequence[Node]) -> list[Tensor | None]:
        """The gradients that autograd must have, local; none if they are delivered."""
        members = self.exchange.gradients(self.trained)
        rows = self.exchange.parts(flat, self.trained)
        if self._owned and _accumulates(leaves) and not members.may_call_hooks():
            waiting = members.deliver(rows, [True] * len(rows))
            if waiting:
                _, sums, addends = zip(*waiting, strict=True)
                self.exchange.group.kernels.add_many(sums, addends)
            return [None] * len(rows)
        params = self.exchange.group.params
        return [params[i].as_seen(row) for i, row in zip(self.trained, rows, strict=True)]


def _alike(value: object, sharded: Tensor) -> bool:
    """Whether a value that somebody registered is sharded as a parameter is."""
    assert isinstance(sharded, DTensor)
    return isinstance(value, DTensor) and value._spec == sharded._spec


class _Handles(torch.autograd.Function):
    """Handles of entries. The gradients of these become gradients of DTensors."""

    @staticmethod
    def forward(ctx: Any, entries: Sequence[_Entry], *given: DTensor) -> tuple[Tensor, ...]:
        ctx.entries, ctx.specs = entries, [value._spec for value in given]
        ctx.set_materialize_grads(False)
        return tuple(
            handle
            for entry in entries
            for handle in entry.exchange.handles(entry.rows[0], entry.trained)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *sums: Tensor | None) -> tuple[Tensor | None, ...]:
        for entry in ctx.entries:
            entry.check()
        left = iter(cast(tuple[Tensor, ...], sums))
        found: list[Tensor | None] = []
        leaves = [node for node, _ in ctx.next_functions]
        for entry in ctx.entries:
            count, begin = len(entry.trained), len(found)
            flat = [*islice(left, len(entry.exchange.reductions(entry.trained)))]
            if flat[0] is None:  # its reductions have gradients together, or none
                found += [None] * count
            else:
                found += entry.leave(flat, leaves[begin : begin + count])
        for position, gradient in enumerate(found):
            if gradient is not None:
                spec = with_dtype(ctx.specs[position], gradient.dtype)
                found[position] = wrap_local(gradient, spec)
        return None, *found


def _accumulates(leaves: Sequence[Node]) -> bool:
    """Whether the running backward is to leave gradients of all these leaves in ``.grad``."""
    try:
        return all(map(torch._C._will_engine_execute_node, leaves))
    except RuntimeError:  # torch.autograd.grad returns gradients of leaves
        return False
