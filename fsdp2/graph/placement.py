"""The places at which a compiled graph launches collectives and waits: the engine's rule.

    unit            0        1        2           traced    unshard k, compute k
    launched   0    1        2                    placed    wait for k, launch k + 1, compute k
    waited     0    1        2

    gather k + 1 is launched when gather k has ended, before unit k computes (decision 23)
    reduction k is waited for before reduction k + 1 is launched, the last one at the graph's end

At most two units are gathered then: the one that computes, and the next. A launch moves with what
it reads: views and casts of inputs. One operator waits and launches, as far as both are in one
place: a call of an operator takes 5 us.

The backend "fsdp2" of ``torch.compile`` does this, and then what Inductor does;
``options={"compiler": "aot_eager"}`` runs the graphs as they are.
"""

from __future__ import annotations

import functools
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
    first = [node for node in graph.nodes if node.op == "placeholder"][-1]
    wait: fx.Node | None = None
    for node in gathers:
        given, key, _, flat = node.args
        group = exchange(key)
        read = [*given[: len(group.gathers)]] if flat else [*given]
        sent = inline(node, group.sent if flat else group.packed, read)
        outputs = inline(node, group.outputs, sent)
        start = _insert(node, ops.all_gather.default, ([], [], outputs, sent, key, None))
        _launch_early(start, first, wait)
        wait = _insert(node, ops.wait.default, (outputs, sent, None))
        _replace(graph, node, inline(node, group.whole, outputs))
    wait = None
    for node in reductions:
        gradients, key, trained, flat = node.args
        group = exchange(key)
        joined = inline(node, partial(group.joined, trained=trained), gradients)
        sums = inline(node, partial(group.sums, trained=trained), joined)
        given = [], [], sums, joined, key, trained, None
        start = _insert(node, ops.reduce_scatter.default, given)
        _wait_late(wait, start)
        wait = _insert(node, ops.wait.default, (sums, joined, None))
        left = group.divided if flat else group.divided_parts
        _replace(graph, node, inline(node, partial(left, trained=trained), sums))
    _wait_late(wait, graph.output_node())
    _chain(graph)
    graph.lint()


def _launch_early(start: fx.Node, first: fx.Node, wait: fx.Node | None) -> None:
    """Move a launch, with what it reads, to the wait for the collective before it.

    Args:
        start: the launch.
        first: what it stands behind if there is none.
        wait: that wait.
    """
    place = wait or first
    needed = _needed(start, place)
    ended = set(cast(Sequence[fx.Node], wait.args[0]) if wait else ())
    if wait is None or any(ended.intersection(node.all_input_nodes) for node in needed):
        for node in reversed(needed):
            place.append(node)
    else:
        for node in needed:
            wait.prepend(node)
        _join(wait, start)


def _wait_late(wait: fx.Node | None, place: fx.Node) -> None:
    """Let the next launch wait for a reduction, or the graph's end.

    The wait stays if a collective in between reads the sums: a derivative of a derivative.
    """
    if wait is None:
        return
    sums = cast(Sequence[fx.Node], wait.args[0])
    readers, node = dict.fromkeys(sums), wait.next
    while node is not place:
        if any(read in readers for read in node.all_input_nodes):
            if node.target in _COLLECTIVES:
                return
            readers[node] = None
        node = node.next
    moved = [*readers][len(sums) :]
    if place.op == "output":
        for node in (wait, *moved):
            place.prepend(node)
    elif not any(read in readers for read in place.all_input_nodes):
        for node in reversed(moved):
            place.append(node)
        _join(wait, place)


def _join(wait: fx.Node, start: fx.Node) -> None:
    """Let one operator wait and launch."""
    start.args = (*wait.args[:2], *start.args[2:])
    wait.graph.erase_node(wait)


def _chain(graph: fx.Graph) -> None:
    """Let each collective read what the one before it writes."""
    before: fx.Node | None = None
    for node in graph.nodes:
        if node.target in _COLLECTIVES:
            node.args = (*node.args[:-1], before)
            before = node.args[0 if node.target is torch.ops.fsdp2.wait.default else 2][0]


def _insert(at: fx.Node, target: OpOverload, args: tuple[Any, ...]) -> fx.Node:
    """A call of an operator that returns nothing, in front of a node."""
    with at.graph.inserting_before(at):
        node = at.graph.call_function(target, args)
    node.meta.update(val=None, stack_trace=at.meta.get("stack_trace"))
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


def _needed(node: fx.Node, place: fx.Node) -> list[fx.Node]:
    """A node, and what it reads that comes behind another, in the order of the graph."""
    order = {found: number for number, found in enumerate(node.graph.nodes)}
    needed: set[fx.Node] = set()

    def need(found: fx.Node) -> None:
        if found not in needed and order[found] > order[place]:
            needed.add(found)
            for read in found.all_input_nodes:
                need(read)

    need(node)
    return sorted(needed, key=order.__getitem__)


_COLLECTIVES = {
    getattr(torch.ops.fsdp2, name).default for name in ("all_gather", "reduce_scatter", "wait")
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
