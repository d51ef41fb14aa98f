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
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from fsdp2.core.facts import ModuleEntry, ShardedParam, with_dtype, wrap_local
from fsdp2.graph.operators import Exchange


class Entry:
    """A group that enters a compiled forward, as long as its parameters stay what they are.

    Args:
        exchange: the group.
        places: where its parameters are registered: the first of each, if there is one.

    Attributes:
        rows: its shards, flat; empty if what is registered are not DTensors as the group has them:
            a graph then takes them as they are.
        trained: positions of parameters that require grad.
        values: these parameters.
    """

    def __init__(self, exchange: Exchange, places: Sequence[ModuleEntry | None]) -> None:
        self.exchange, self._places = exchange, places
        self._registered, self._flags = self._look()
        params = exchange.group.params
        own = [
            value is param.sharded for value, param in zip(self._registered, params, strict=True)
        ]
        self._owned = all(own)
        self.rows: list[Tensor] = []
        self._shards: list[Tensor] = []
        if self._owned or all(map(_alike, self._registered, params)):
            self._shards = self._local_shards()
            self.rows = exchange.rows(self._shards)
        self.trained = tuple(index for index, flag in enumerate(self._flags) if flag)
        self.values = [self._registered[index] for index in self.trained]
        self._versions = [shard._version for shard in self._shards]

    def again(self) -> Entry:
        """The same entry for another forward, or a new one."""
        registered, flags = self._look()
        if flags == self._flags and all(map(operator.is_, registered, self._registered)):
            if not self.rows:
                return self
            shards = self._local_shards()
            if self.exchange.rows(shards) is self.rows:
                versions = [shard._version for shard in shards]
                if (
                    versions != self._versions
                ):  # a backward that still needs the former values raises
                    torch.autograd.graph.increment_version(self.rows)
                    self._versions = versions
                return self
        return Entry(self.exchange, self._places)

    def _look(self) -> tuple[list[Any], list[bool]]:
        registered = [
            param.sharded if place is None else place[0]._parameters[place[1]]
            for place, param in zip(self._places, self.exchange.group.params, strict=True)
        ]
        return registered, [value is not None and value.requires_grad for value in registered]

    def _local_shards(self) -> list[Tensor]:
        shards = [value._local_tensor for value in self._registered]
        if self.exchange.permuted:
            pairs = zip(self.exchange.group.params, shards, strict=True)
            shards = [param.laid_out(shard) for param, shard in pairs]
        return shards

    def handles(self) -> list[Tensor]:
        """Tensors without memory, whose gradients are what reductions leave."""
        return self.exchange.handles(self.rows[0], self.trained)

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


def _alike(value: object, param: ShardedParam) -> bool:
    """Whether a value that somebody registered is sharded as a parameter is."""
    sharded: Tensor = param.sharded
    assert isinstance(sharded, DTensor)
    return isinstance(value, DTensor) and value._spec == sharded._spec


def handles_of(entries: Sequence[Entry]) -> list[list[Tensor]]:
    """The handles of each entry, for all forwards that it enters."""
    trained = [entry for entry in entries if entry.rows and entry.trained]
    with torch.inference_mode(False), torch.enable_grad():
        values = [value for entry in trained for value in entry.values]
        made = iter(_Handles.apply(trained, *values) if trained else ())
    return [[*islice(made, len(entry.handles()))] if entry in trained else [] for entry in entries]


class _Handles(torch.autograd.Function):
    """Handles of entries. The gradients of these become gradients of DTensors."""

    @staticmethod
    def forward(ctx: Any, entries: Sequence[Entry], *given: DTensor) -> tuple[Tensor, ...]:
        ctx.entries, ctx.specs = entries, [value._spec for value in given]
        ctx.set_materialize_grads(False)
        return tuple(handle for entry in entries for handle in entry.handles())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *sums: Tensor | None) -> tuple[Tensor | None, ...]:
        for entry in ctx.entries:
            entry.check()
        left: Iterator[Any] = iter(sums)
        found: list[Tensor | None] = []
        leaves = [node for node, _ in ctx.next_functions]
        for entry in ctx.entries:
            count, begin = len(entry.trained), len(found)
            flat = [*islice(left, len(entry.exchange.reductions(entry.trained)))]
            if flat[0] is None:
                found += [None] * count
            else:
                found += entry.leave(flat, leaves[begin : begin + count])
        wrapped = (
            None if gradient is None else wrap_local(gradient, with_dtype(spec, gradient.dtype))
            for gradient, spec in zip(found, ctx.specs, strict=True)
        )
        return None, *wrapped


def _accumulates(leaves: Sequence[Node]) -> bool:
    """Whether the running backward is to leave gradients of all these leaves in ``.grad``."""
    try:
        return all(map(torch._C._will_engine_execute_node, leaves))
    except RuntimeError:  # torch.autograd.grad returns gradients of leaves
        return False
