"""The edge of a compiled graph: it takes local shards, and gradients become ``.grad`` behind it.

    DTensors ── local shards ──> graph ──> gradients of shards ── delivered ──> .grad of DTensors

A graph that took DTensors would take each apart and put each gradient together anew, and autograd
would copy each: 40 us per parameter and step. Here a group's gradients are delivered together, by
what delivers them after hooks. If autograd is asked for gradients (``torch.autograd.grad``), or
calls somebody's hooks with them, it gets DTensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from fsdp2.core.facts import Gradients, with_dtype, wrap_local
from fsdp2.graph.operators import Exchange, exchanges

Compiled = Callable[..., Any]


def take_local_shards(graph: fx.GraphModule, inputs: list[object]) -> list[int]:
    """Let a graph take local shards where it only calls ``to_local()`` of a DTensor.

    Returns:
        The positions of these inputs, which are replaced in the list.
    """
    found = []
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for place, (node, value) in enumerate(zip(nodes, inputs, strict=True)):
        if not isinstance(value, DTensor) or any(p.is_partial() for p in value.placements):
            continue
        users = [*node.users]
        if any(u.target != "to_local" or len(u.args) > 1 or u.kwargs for u in users):
            continue
        for user in users:
            user.replace_all_uses_with(node)
            graph.graph.erase_node(user)
        local = value._local_tensor.detach().requires_grad_(value.requires_grad)
        node.meta["example_value"], node.type = local, None
        inputs[place] = local
        found.append(place)
    graph.recompile()
    return found


def with_local_shards(compiled: Compiled, places: Sequence[int]) -> Compiled:
    """A graph that takes local shards at these places, as a function of DTensors."""
    edge = _Edge()

    def run(*args: object) -> object:
        given = [*args]
        shards = _LocalShards.apply(edge, *(given[place] for place in places))
        for place, shard in zip(places, shards, strict=True):
            given[place] = shard
        return compiled(*given)

    return run if places else compiled


Part = tuple[Exchange, Gradients, list[int]]
"""A group, its parameters that require grad, and their positions among a graph's shards."""


class _Edge:
    """Which of a graph's shards are of which group. It keeps none of them: graphs live on."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[DTensor]] = []
        self._parts: list[tuple[weakref.ref[Exchange], tuple[int, ...], list[int]]] = []

    def parts_of(self, given: Sequence[DTensor]) -> list[Part]:
        """The groups whose parameters these are; others are none's."""
        known = self._known
        if len(known) != len(given) or any(
            ref() is not value for ref, value in zip(known, given, strict=True)
        ):
            self._known = [weakref.ref(value) for value in given]
            self._parts = _parts_of(given)
        parts = [(ref(), indices, positions) for ref, indices, positions in self._parts]
        return [(part, part.gradients(i), positions) for part, i, positions in parts if part]


def _parts_of(
    given: Sequence[DTensor],
) -> list[tuple[weakref.ref[Exchange], tuple[int, ...], list[int]]]:
    places = {id(value): position for position, value in enumerate(given)}
    parts = []
    for part in exchanges():
        found = {
            index: places[id(param.sharded)]
            for index, param in enumerate(part.group.params)
            if id(param.sharded) in places and param.sharded.requires_grad
        }
        if found:
            parts.append((weakref.ref(part), tuple(found), [*found.values()]))
    return parts


class _LocalShards(torch.autograd.Function):
    """The local shards of DTensors, whose gradients are DTensors sharded alike."""

    @staticmethod
    def forward(ctx: Any, edge: _Edge, *given: DTensor) -> tuple[Tensor, ...]:
        ctx.specs = [value._spec for value in given]
        ctx.parts = edge.parts_of(given)
        return tuple(value._local_tensor.detach() for value in given)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = [*gradients]
        nodes = [node for node, _ in ctx.next_functions]
        for part, members, positions in ctx.parts:
            if _accumulates([nodes[position] for position in positions]):
                _deliver(part, members, positions, found)
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


def _deliver(
    part: Exchange, members: Gradients, positions: Sequence[int], gradients: list[Tensor | None]
) -> None:
    """Give a group's gradients to its parameters, and leave none of them for autograd."""
    if members.may_call_hooks():
        return
    rows = [gradients[position] for position in positions]
    present = [row is not None for row in rows]
    waiting = members.deliver(cast(list[Tensor], rows), present)  # it looks at those only
    if waiting:
        _, sums, addends = zip(*waiting, strict=True)
        part.group.runtime.kernels.add_many(sums, addends)
    for position in positions:
        gradients[position] = None
