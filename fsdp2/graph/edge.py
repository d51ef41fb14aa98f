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


class Edge:
    """All groups of a model. Rows enter again as they are while parameters stay; handles are new:
    their graph holds a node per parameter, and `.to()` refuses to swap one that was frozen since.

    Args:
        groups: each group, and the places of its parameters.
    """

    def __init__(self, groups: Sequence[tuple[Exchange, Sequence[Place]]]) -> None:
        self._groups = groups
        self._entries: list[_Entry] = []

    def enter(self) -> list[Given | None]:
        """The tensors that a forward takes in place of each group's parameters; ``None``: it takes
        these as they are, because they are no DTensors as the group has them.
        """
        with DisableTorchFunctionSubclass():  # which every look at a DTensor would ask for
            again = [entry.again() for entry in self._entries]
            self._entries = again or [_Entry(*group) for group in self._groups]
            trained = [entry for entry in self._entries if entry.rows and entry.trained]
            with torch.inference_mode(False), torch.enable_grad():
                values = [value for entry in trained for value in entry.values]
                handles = iter(_Handles.apply(trained, *values) if trained else ())
            found: list[Given | None] = []
            for entry in self._entries:
                count = len(entry.exchange.reductions(entry.trained)) if entry in trained else 0
                entered = " ".join(map(str, entry.trained)), [*entry.rows, *islice(handles, count)]
                found.append(entered if entry.rows else None)
        return found


class _Entry:
    """A group that enters, with what is registered as its parameters."""

    def __init__(self, exchange: Exchange, places: Sequence[Place]) -> None:
        self.exchange, self._places = exchange, places
        self._registered, self._flags = self._look()
        self.trained = tuple(index for index, flag in enumerate(self._flags) if flag)
        self.values = [self._registered[index] for index in self.trained]
        own: list[Tensor] = [param.sharded for param in exchange.group.params]
        self._owned = all(map(operator.is_, self._registered, own))
        self.rows: list[Tensor] = []
        self._shards: list[Tensor] = []
        if self._owned or all(map(_alike, self._registered, own)):
            self._shards = self._local_shards()
            self.rows = exchange.rows(self._shards)
        self._versions = [shard._version for shard in self._shards]

    def again(self) -> _Entry:
        """The same for another forward, or a new one."""
        registered, flags = self._look()
        if flags == self._flags and all(map(operator.is_, registered, self._registered)):
            if not self.rows:
                return self
            shards = self._local_shards()
            if self.exchange.rows(shards) is self.rows:
                versions = [shard._version for shard in shards]
                if versions != self._versions:
                    self._versions = versions
                    # A former forward's backward, which would gather the new values, raises.
                    torch.autograd.graph.increment_version(self.rows)
                return self
        return _Entry(self.exchange, self._places)

    def _look(self) -> tuple[list[DTensor], list[bool]]:
        registered = [
            param.sharded if place is None else place[0]._parameters[place[1]]
            for place, param in zip(self._places, self.exchange.group.params, strict=True)
        ]
        found = cast(list[DTensor], registered)
        return found, [value is not None and value.requires_grad for value in found]

    def _local_shards(self) -> list[Tensor]:
        shards = cast(list[Tensor], locals_of(self._registered))
        if self.exchange.permuted:
            pairs = zip(self.exchange.group.params, shards, strict=True)
            shards = [param.laid_out(shard) for param, shard in pairs]
        return shards

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
                self.exchange.group.runtime.kernels.add_many(sums, addends)
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
