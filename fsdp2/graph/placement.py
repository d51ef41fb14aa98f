"""The places at which a compiled graph launches collectives and waits: the engine's rule.

    unit            0        1        2             traced       unshard_k | compute_k
    launched   0    1        2                      placed       start_k+1 behind end_k
    waited     0    1        2                                   end_k where unshard_k was

    gather k + 1 is launched when gather k has ended, before unit k computes (decision 23)
    reduction k is waited for before reduction k + 1 is launched, the last one at the graph's end

At most two units are gathered then: the one that computes, and the next. A start moves
with what it reads: views of inputs, which compute nothing.

The backend "fsdp2" of ``torch.compile`` does this, and then what Inductor does;
``options={"compiler": "aot_eager"}`` runs the graphs as they are.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp2.core.errors import coded
from fsdp2.graph.operators import exchange

Compiled = Callable[..., Any]
Decompositions = Mapping[OpOverload, Callable[..., object]]


@functools.cache
def register() -> None:
    """Let ``torch.compile`` know the backend "fsdp2"."""
    torch._dynamo.register_backend(compile_graphs, name="fsdp2")


def place(graph: fx.Graph, decompositions: Decompositions | None = None) -> None:
    """Take each collective of a graph apart, and move the parts.

    Args:
        graph: of ATen operators, forward or backward; changed in place.
        decompositions: of operators that the compiler does not take.
    """
    inline = partial(_inline, graph, decompositions=decompositions or _DECOMPOSED)
    ops = torch.ops.fsdp2
    gathers = [node for node in graph.nodes if node.target is ops.unshard.default]
    reductions = [node for node in graph.nodes if node.target is ops.reduce.default]
    previous = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in gathers:
        given, key, _, flat = node.args
        group = exchange(key)
        read = [*given[: len(group.gathers)]] if flat else [*given]
        sent = inline(node, group.sent if flat else group.packed, read)
        start = _insert(graph, node, ops.start_unshard.default, (sent, key, None))
        outputs = _items(graph, start)
        end = _insert(graph, node, ops.end_unshard.default, (outputs, key))
        _replace(graph, node, inline(node, group.whole, outputs))
        _move_behind(previous, start)
        for output in reversed(outputs):
            start.append(output)
        previous = end
    sums: list[fx.Node] = []
    for node in reductions:
        gradients, key, trained, flat = node.args
        group = exchange(key)
        joined = inline(node, partial(group.joined, trained=trained), gradients)
        start = _insert(graph, node, ops.start_reduce.default, (joined, key, trained, None))
        _move_readers(start, sums)
        sums = _items(graph, start)
        _insert(graph, node, ops.end_reduce.default, (sums, key, trained, None))
        left = group.divided if flat else group.divided_parts
        _replace(graph, node, inline(node, partial(left, trained=trained), sums))
    _move_readers(graph.output_node(), sums)
    _chain(graph)
    graph.lint()


def _chain(graph: fx.Graph) -> None:
    """Let each collective read what the one before it writes."""
    before: fx.Node | None = None
    for node in [node for node in graph.nodes if node.target in _CHAINED]:
        node.args = (*node.args[:-1], before)
        before = node.args[0][0] if node.target is _END_REDUCE else _items(graph, node)[0]


def _insert(graph: fx.Graph, at: fx.Node, target: OpOverload, args: tuple[Any, ...]) -> fx.Node:
    """A call of an operator in front of a node, with what it would return as its value."""
    with graph.inserting_before(at):
        node = graph.call_function(target, args)
    values = fx.map_arg(args, lambda arg: arg.meta["val"])
    node.meta["stack_trace"] = at.meta.get("stack_trace")
    with _mode_of(values[0]):
        node.meta["val"] = target(*values)
    return node


def _inline(
    graph: fx.Graph,
    at: fx.Node,
    function: Callable[..., list[Tensor]],
    given: Sequence[fx.Node],
    decompositions: Decompositions,
) -> list[fx.Node]:
    """The operators that a function of a list calls, in front of a node; returns its results."""
    values = [node.meta["val"] for node in given]
    with _mode_of(values):  # which makes what the function makes
        traced = make_fx(lambda *tensors: function(tensors), decompositions)(*values).graph
    inputs = [node for node in traced.nodes if node.op == "placeholder"]
    known = dict(zip(inputs, given, strict=True))
    with graph.inserting_before(at):
        return cast(list[fx.Node], graph.graph_copy(traced, known))


def _replace(graph: fx.Graph, node: fx.Node, results: Sequence[fx.Node]) -> None:
    """Let what reads the items of a node read these."""
    for item in [*node.users]:
        item.replace_all_uses_with(results[cast(int, item.args[1])])
        graph.erase_node(item)
    graph.erase_node(node)


def _mode_of(values: Sequence[object]) -> FakeTensorMode:
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


def _items(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The tensors that an operator returns."""
    found = [user for user in node.users if user.target is operator.getitem]
    if not found:
        with graph.inserting_after(node):
            for index in reversed(range(len(node.meta["val"]))):
                item = graph.call_function(operator.getitem, (node, index))
                item.meta["val"] = node.meta["val"][index]
                found.insert(0, item)
    return found


def _move_behind(place: fx.Node, node: fx.Node) -> None:
    """Move a node, and what it reads, to the position behind another."""
    order = {found: number for number, found in enumerate(node.graph.nodes)}
    needed: list[fx.Node] = []

    def need(found: fx.Node) -> None:
        if found not in needed and order[found] > order[place]:
            for read in found.all_input_nodes:
                need(read)
            needed.append(found)

    need(node)
    for found in reversed(needed):
        place.append(found)


def _move_readers(place: fx.Node, sums: Sequence[fx.Node]) -> None:
    """Let the end of a reduction come in front of a node, with what becomes of its results.

    It stays if another collective reads them: a derivative of a derivative.
    """
    last = place.graph.output_node()
    found: dict[fx.Node, None] = {}
    for node in place.graph.nodes:
        if node is not last and any(read in found or read in sums for read in node.all_input_nodes):
            if node.target in _COLLECTIVES:
                return
            found[node] = None
    for node in found:
        place.prepend(node)


_START_UNSHARD, _START_REDUCE, _END_REDUCE = (
    getattr(torch.ops.fsdp2, name).default
    for name in ("start_unshard", "start_reduce", "end_reduce")
)
_CHAINED = {_START_UNSHARD, _START_REDUCE, _END_REDUCE}
_COLLECTIVES = {
    torch.ops.fsdp2.unshard.default,
    torch.ops.fsdp2.reduce.default,
    _START_UNSHARD,
    _START_REDUCE,
}
_COPIES = torch.ops.aten.split_with_sizes_copy.default
_DECOMPOSED = {_COPIES: get_decompositions([_COPIES])[_COPIES]}
"""One kernel on an accelerator, if called by itself; a compiler makes better ones of its parts."""


def compile_graphs(
    graph: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Compiled:
    """The backend "fsdp2" of ``torch.compile``.

    Args:
        graph: as dynamo has traced it.
        inputs: examples of its inputs.
        options: ``{"compiler": "aot_eager"}`` to run the graphs without Inductor; otherwise
            options of Inductor.
    """
    settings = dict(options or {})
    compiler = settings.pop("compiler", "inductor")
    if compiler not in ("inductor", "aot_eager"):
        raise coded(
            ValueError,
            "graph-mode-compiler",
            f"the backend 'fsdp2' takes options={{'compiler': 'inductor'}} or 'aot_eager', not "
            f"{compiler!r}",
        )
    if compiler == "aot_eager":
        found: Compiled = aot_autograd(
            fw_compiler=_run_as_it_is, partition_fn=min_cut_rematerialization_partition
        )(graph, inputs)
        return found
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    def inner(gm: fx.GraphModule, examples: Sequence[Any], **arguments: Any) -> Any:
        place(gm.graph, select_decomp_table())
        gm.recompile()
        return compile_fx_inner(gm, examples, **arguments)

    # Inductor would move starts to where memory is least, next to their ends.
    patches = {"reorder_for_peak_memory": False, **settings}
    # It returns other things where it exports, which this does not.
    return cast(Compiled, compile_fx(graph, inputs, inner_compile=inner, config_patches=patches))


def _run_as_it_is(gm: fx.GraphModule, _: object) -> Compiled:
    place(gm.graph)
    gm.recompile()
    compiled: Compiled = make_boxed_func(gm.forward)
    return compiled
