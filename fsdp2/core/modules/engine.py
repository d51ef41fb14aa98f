"""The entry of Python into a backward: calls before and after it, and explanations of its errors.

    loss.backward(), torch.autograd.grad
      Variable._execution_engine.run_backward      both call it
        before   side doors into units are given hooks, while their calls are noted
                 shards among ``inputs`` become what the graph has: gathered parameters
                 compiled autograd, which would trace our hooks, is off for sharded modules
        raises   functions of `backward_raised` may explain the error
        after    gradients that arrived through no hook are reduced

A hook on an output sees a gradient that arrives at that output, and no hook sees an exception: it
goes from C++ to the user. torch has no hook here. fsdp2 therefore replaces the attribute that holds
autograd's engine by an engine of a subclass (decision 19). This costs one Python call per whole
backward, and none per unit.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.modules.dynamo import uncompiled
from fsdp2.core.modules.hooks import UnitHooks
from fsdp2.core.modules.registry import noting, record_of_unit, scheduler_of
from fsdp2.core.notices import Notice
from fsdp2.core.params.param import OWNER, ShardedParam, form_of, gathered_name
from fsdp2.core.progress import Counts
from fsdp2.core.schedule.calls import Call, Calls
from fsdp2.core.schedule.iteration import GRAPHS, Graph
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import Unit, all_groups, all_units

if TYPE_CHECKING:
    _Engine = Any
else:
    _Engine = type(Variable._execution_engine)

_OUTSIDE = -1

backward_raised: Notice[[RuntimeError, Iterable[Node], Iterable[Unit]]] = Notice()
"""Called with the exception of a backward, the nodes that it would run, and all units."""

functions_of_shards: weakref.WeakSet[ShardedParam] = weakref.WeakSet()
"""Parameters whose unsharded form is a differentiable function of their shards: of graph mode."""

_MARKS = ("AliasBackward0", "_ExitBackwardBackward")
"""Nodes that `fsdp2.core.modules.hooks` adds after a unit's inputs; they read no parameter."""

Ends = Iterable[torch.Tensor | GradientEdge]
"""The edges at which a backward begins."""


def after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the running backward is over; never if it raises."""
    Variable._execution_engine.queue_callback(function)


class _WatchedEngine(_Engine):
    """Autograd's engine, for backwards that reach sharded modules."""

    @uncompiled
    def run_backward(
        self,
        ends: Ends,
        grads: object,
        keep_graph: bool,
        create_graph: bool,
        inputs: Ends,
        *args: object,
        **kw: object,
    ) -> object:
        if inputs:
            inputs = _in_graph(inputs, bool(kw.get("accumulate_grad")))
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and compiled.compiled_autograd_enabled and _reaches_units(ends):
            with compiled._disable():
                return self.run_backward(ends, grads, keep_graph, create_graph, inputs, *args, **kw)
        inside = torch._C._current_graph_task_id() != _OUTSIDE  # a reentrant checkpoint's
        if noting and not inside:
            _hook_side_doors(ends)
        if Graph.alive and not inside:
            Graph.ending = frozenset() if keep_graph else _graphs_behind(ends)
        ended = Counts.backwards  # hooks that see this backward count its end
        try:
            result = super().run_backward(
                ends, grads, keep_graph, create_graph, inputs, *args, **kw
            )
        except RuntimeError as error:
            backward_raised(error, nodes_behind(ends), all_units())
            raise
        if inside:  # the backward around it is not over: what comes below is for its end
            return result
        if Graph.ending:
            Graph.alive -= Graph.ending
            Graph.ending = frozenset()
        if Counts.backwards == ended:
            _finish_unseen(ends)
        if noting:
            _stop_noting_unused()
        return result


@functools.cache
def watch_backwards() -> None:
    """From the first call on, all backwards of this process come through here."""
    Variable._execution_engine = _WatchedEngine()


def nodes_behind(ends: Ends) -> dict[Node, None]:
    """The nodes of the graph that a backward from ``ends`` would run."""
    found = dict.fromkeys(_first(ends))
    waiting = list(found)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found[node] = None
                waiting.append(node)
    return found


def _graphs_behind(ends: Ends) -> frozenset[Graph]:
    """The graphs, recorded by backwards, that a backward from ``ends`` reads."""
    marked: list[Any] = [node.metadata for node in nodes_behind(ends)]  # dicts
    return frozenset(graph for notes in marked for graph in notes.get(GRAPHS, ()))


def _in_graph(inputs: Ends, accumulates: bool) -> Ends:
    """``inputs`` with gathered parameters for shards; raises if their gradients are returned."""
    found: list[torch.Tensor | GradientEdge] = []
    for each in inputs:
        tensor = _tensor_of(each)
        param = _param_of(tensor)
        if param is None or param.unsharded is tensor or param in functions_of_shards:
            found.append(each)
        elif accumulates:
            found.append(each if param.unsharded is None else param.unsharded)
        else:
            raise coded(
                ShardingStateError,
                "grad-of-shard",
                f"torch.autograd.grad was asked for the gradient of parameter '{param.name}', of "
                f"which the graph has only the gathered form; call fsdp2.graph_mode(model) before "
                f"the forward, or loss.backward(inputs=[...]) with it and read its reduced .grad",
            )
    return tuple(found)


def _tensor_of(end: torch.Tensor | GradientEdge) -> torch.Tensor | GradientEdge:
    """The parameter that an edge leads to; anything else as it is."""
    tensor: torch.Tensor | GradientEdge = end
    if isinstance(end, GradientEdge):
        tensor = getattr(end.node, "variable", end)
    return tensor


def _param_of(tensor: torch.Tensor | GradientEdge) -> ShardedParam | None:
    """The parameter of which ``tensor`` is a form, or was before `fully_shard`."""
    form = form_of(tensor)
    if form is not None:
        return form.param()
    if OWNER not in getattr(tensor, "__dict__", ()):
        return None
    params = (param for group in all_groups() for param in group.params)
    return next((param for param in params if param.sharded is tensor), None)


def _reaches_units(ends: Ends) -> bool:
    """Whether a backward from ``ends`` may run hooks of units, or read gathered parameters."""
    if any(scheduler.has_calls_to_come for scheduler in schedulers()):
        return True
    leaves = (getattr(node, "variable", None) for node in nodes_behind(ends))
    return any(gathered_name(leaf) is not None for leaf in leaves)


def _hook_side_doors(ends: Ends) -> None:
    """Let units be entered where outside edges, except at outputs, lead to nodes of theirs."""
    noted = [calls for each in noting if (s := each()) is not None and (calls := s.calls)]
    if not noted:
        return
    nodes = nodes_behind(ends)
    numbers = [node._sequence_nr() for node in nodes]
    for calls in noted:
        inside = dict(zip(nodes, calls.owners(numbers), strict=True))
        calls.looked = calls.looked or any(inside.values())
        doors = {node: inside[node] for node in _first(ends)}
        for node, owner in inside.items():
            for following, _ in node.next_functions:
                if following is None or inside[following] is owner:
                    continue
                if not (following.name() in _MARKS and _ends_call(following, inside)):
                    doors[following] = inside[following]
        for node, call in doors.items():
            if call is not None:
                _hook(node, call.unit, calls)


def _stop_noting_unused() -> None:
    """After a backward: stop noting calls of units entered by no side door, on all ranks (I1)."""
    kept = []
    for reference in noting:
        scheduler = reference()
        if scheduler is None or (calls := scheduler.calls) is None:
            continue  # it is gone
        if calls.looked and calls.whole and not (calls.used or scheduler.has_calls_to_come):
            scheduler.calls = None
        else:
            kept.append(reference)
    noting[:] = kept


def _ends_call(node: Node, inside: Mapping[Node, Call | None]) -> bool:
    """Whether a mark is that at which its call's backward ends: nothing inside comes after."""
    # The hook that leaves the unit runs before those of the node: to enter is to enter again.
    return all(
        following is None or inside[following] is not inside[node]
        for following, _ in node.next_functions
    )


def _first(ends: Ends) -> list[Node]:
    first = (end.node if isinstance(end, GradientEdge) else end.grad_fn for end in ends)
    return [node for node in first if node is not None]


def _hook(node: Node, unit: Unit, calls: Calls) -> None:
    record = record_of_unit(unit)
    notes: Any = node.metadata  # a dict, though torch declares a method
    if not isinstance(record, UnitHooks) or notes.get(_HOOKED) is unit:
        return
    notes[_HOOKED] = unit

    @uncompiled
    def enter(_: object) -> None:
        if record.enter_backward_aside():
            calls.used = True

    node.register_prehook(enter)


_HOOKED = "fsdp2: backward may enter here"


def schedulers() -> list[Scheduler]:
    """Those that serve units, each once."""
    found = map(scheduler_of, all_units())
    return list({scheduler: None for scheduler in found if scheduler is not None})


def _finish_unseen(ends: Ends) -> None:
    """No hook ran in this backward, but a value was used that a unit kept: reduce its gradients."""
    left = [s for s in schedulers() if s.has_calls_to_come and s.has_unseen_gradients]
    if not left:
        return
    reached = {id(getattr(node, "variable", None)) for node in nodes_behind(ends)}
    for scheduler in left:
        params = [param for group in scheduler.groups for param in group.params]
        if any(id(param.unsharded) in reached for param in params):
            scheduler.end_unseen_backward()
