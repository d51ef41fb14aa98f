"""Graphs, graph breaks, recompilations and memory of compiled, sharded blocks, on one process.

Collectives do nothing, so that values are anything; `tests/compile/test_compiled_ranks.py` compares
values. What is counted here does not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.core.modules.hooks import UnitHooks
from fsdp2.core.modules.registry import require_record
from fsdp2.testing.null_group import null_mesh, null_world
from tests.common import compiling
from tests.common.combinations import each_once

pytestmark = pytest.mark.alone

RANKS = 2


@pytest.fixture(autouse=True)
def _one_of_two_ranks() -> Iterator[None]:
    with compiling.fresh_dynamo(), null_world(RANKS):
        yield


def _operators_of_a_block(checkpoints: bool = False) -> int:
    compiler = compiling.Compiler("eager")
    compiler.wrap(compiling.Block(checkpoints))(torch.ones(2, compiling.DIM, requires_grad=True))
    operators = compiler.operators
    torch._dynamo.reset()
    assert compiler.graphs == 1
    return operators


def _step(model: Any, run: Any, rows: int = 4) -> None:
    run(torch.ones(rows, compiling.DIM)).sum().backward()
    model.zero_grad()


def _graphs_by_iteration(
    way: str, compiler: compiling.Compiler, batches: tuple[int, ...], **arguments: Any
) -> list[int]:
    model = compiling.Stack(checkpoints=arguments.get("checkpoints") == compiling.IN_FORWARD)
    run = compiling.sharded(fsdp2, model, way, compiler, mesh=null_mesh(RANKS), **arguments)
    found = []
    for rows in batches:
        _step(model, run, rows)
        found.append(compiler.graphs)
    return found


@pytest.mark.parametrize("way", compiling.BLOCK_WAYS)
def test_blocks_are_whole_graphs_and_compile_once_and_once_more(way: str) -> None:
    """Once for both blocks; once more, for any size, when the batch size changes."""
    operators = _operators_of_a_block()
    compiler = compiling.Compiler("eager")
    graphs = _graphs_by_iteration(way, compiler, (4, 4, 4, 6, 6, 5))
    assert graphs == [1, 1, 1, 2, 2, 2]
    assert compiler.operators == 2 * operators
    assert not compiling.graph_breaks()


@pytest.mark.parametrize("way", compiling.ROOT_WAYS)
def test_a_compiled_root_leaves_its_blocks_whole(way: str) -> None:
    """Our hooks break the root's graph, which then is no graph; each block still is one."""
    operators = _operators_of_a_block()
    compiler = compiling.Compiler("eager", fullgraph=False)
    graphs = _graphs_by_iteration(way, compiler, (4, 4, 4, 6, 6, 5))
    assert graphs == [1, 1, 1, 2, 2, 2]
    assert compiler.operators == 2 * operators


@pytest.mark.parametrize(
    ("checkpoints", "mixed"),
    [
        (None, True),
        (compiling.IN_FORWARD, False),
        (compiling.OUTSIDE_FSDP, True),
        (compiling.INSIDE_FSDP, False),
    ],
)
def test_features_add_no_graph(checkpoints: str | None, mixed: bool) -> None:
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16 if mixed else None, torch.float32)
    graphs = _graphs_by_iteration(
        "in place, then sharded",
        compiling.Compiler("aot_eager"),
        (4, 4, 4, 6, 6, 5),
        checkpoints=checkpoints,
        mp_policy=policy,
    )
    assert graphs[2] == graphs[0], "compiled again for the same shapes"
    # Around the unit, forward's input is a view and recomputation's is not: a graph for each, once
    # sizes are dynamic (as with torch's FSDP2).
    most = 2 if checkpoints == compiling.OUTSIDE_FSDP else 1
    assert graphs[3] - graphs[2] <= most * graphs[0], "more than once for other batch sizes"
    assert graphs[3:] == graphs[3:4] * 3, "again, for sizes that the last graph knows"
    assert not compiling.graph_breaks()


def test_accumulation_and_kept_parameters_compile_nothing_anew() -> None:
    compiler = compiling.Compiler("aot_eager")
    model: Any = compiling.Stack()
    compiling.sharded(fsdp2, model, "in place, then sharded", compiler, mesh=null_mesh(RANKS))
    _step(model, model)
    assert compiler.graphs == 1
    for flag in (False, True, False, True):
        model.set_requires_gradient_sync(flag)
        model.set_reshard_after_backward(flag)
        model.set_is_last_backward(flag)
        model(torch.ones(4, compiling.DIM)).sum().backward()
    model.zero_grad()
    model.set_reshard_after_forward(False)
    _step(model, model)
    assert compiler.graphs == 1


def test_a_sharded_module_in_a_compiled_one_breaks_its_graph_and_no_more() -> None:
    """What fullgraph=True then says names us; without it each part is compiled."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = compiling.Block()
            self.last = nn.Linear(compiling.DIM, compiling.DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x.sin()).cos())

    def make(fullgraph: bool) -> tuple[Any, compiling.Compiler]:
        torch._dynamo.reset()
        outer, compiler = Outer(), compiling.Compiler("eager", fullgraph)
        for module in (outer.inner, outer):
            fsdp2.fully_shard(module, mesh=null_mesh(RANKS))
        compiler.in_place(outer)
        return outer, compiler

    outer, _ = make(fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="fsdp2 gathers, frees and reduces"):
        outer(torch.ones(2, compiling.DIM))
    outer, compiler = make(fullgraph=False)
    for _ in range(3):
        _step(outer, outer)
        assert compiler.graphs == 3  # before the inner module, the inner one, behind it


def test_a_compiled_function_around_a_sharded_model() -> None:
    """A training function that calls controls and the model; each block is one graph all the same.

    Parts of the function itself are graphs too.
    """
    operators = _operators_of_a_block()
    compiler = compiling.Compiler("eager", fullgraph=False)
    model: Any = compiling.Stack()
    compiling.sharded(fsdp2, model, "-", compiling.Compiler("none"), mesh=null_mesh(RANKS))

    def loss(x: Tensor, sync: bool) -> Tensor:
        model.set_requires_gradient_sync(sync)
        return model(x).square().sum()

    compiled = compiler.wrap(loss)  # type: ignore[arg-type]  # torch.compile takes functions too
    found = []
    for _ in range(4):
        compiled(torch.ones(4, compiling.DIM), True).backward()
        model.zero_grad()
        found.append(compiler.graphs)
    assert found == [found[0]] * 4
    assert compiler.operators >= operators


def test_forward_methods_are_compiled_between_the_hooks() -> None:
    class Twice(compiling.Block):
        def both(self, x: Tensor) -> Tensor:
            return self.forward(self.forward(x))

    operators = _operators_of_a_block()
    block, compiler = Twice(), compiling.Compiler("eager", fullgraph=False)
    fsdp2.fully_shard(block, mesh=null_mesh(RANKS))
    fsdp2.register_fsdp_forward_method(block, "both")
    compiled = compiler.wrap(block.both)  # type: ignore[arg-type]  # a method
    for _ in range(3):
        compiled(torch.ones(2, compiling.DIM, requires_grad=True)).sum().backward()
    assert (compiler.graphs, compiler.operators) == (1, 2 * operators)


class Saved:
    """Bytes of the storages that autograd saved tensors of, as they are when asked."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    @property
    def alive(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


@each_once(
    way=[compiling.BLOCK_WAYS[0], compiling.BLOCK_WAYS[2], compiling.ROOT_WAYS[0]],
    backend=["aot_eager", "eager"],
    mixed={"fp32": False, "mixed": True},
)
def test_compiled_graphs_keep_no_gathered_parameter(backend: str, way: str, mixed: bool) -> None:
    _check_that_graphs_keep_no_gathered_parameter(backend, way, mixed)


@pytest.mark.extended
@each_once(
    way=[compiling.BLOCK_WAYS[0], compiling.BLOCK_WAYS[2], compiling.ROOT_WAYS[0]],
    mixed={"fp32": False, "mixed": True},
)
def test_inductors_graphs_keep_no_gathered_parameter(way: str, mixed: bool) -> None:
    _check_that_graphs_keep_no_gathered_parameter("inductor", way, mixed)


def _check_that_graphs_keep_no_gathered_parameter(backend: str, way: str, mixed: bool) -> None:
    """What AOTAutograd saves for backward are views of parameters, whose memory forward frees."""
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16 if mixed else None, torch.float32)
    arguments: dict[str, Any] = {
        "mesh": null_mesh(RANKS),
        "mp_policy": policy,
        "reshard_after_forward": True,
    }

    def saved(name: str) -> int:
        torch._dynamo.reset()
        compiler = compiling.Compiler(name, fullgraph=way not in compiling.ROOT_WAYS)
        model: Any = compiling.Stack()
        run = compiling.sharded(fsdp2, model, way, compiler, **arguments)
        for _ in range(2):
            found = Saved()
            with torch.autograd.graph.saved_tensors_hooks(found, lambda tensor: tensor):
                loss = run(torch.ones(4, compiling.DIM)).sum()
            alive = found.alive
            loss.backward()
            model.zero_grad()
        assert name == "none" or compiler.graphs
        for module in (*model.blocks, model):
            for group in require_record(module).unit.own_groups:
                storages = [p.unsharded.untyped_storage().nbytes() for p in group.params]  # type: ignore[union-attr]  # gathered before
                assert not any(storages)
        return alive

    plain, compiled = saved("none"), saved(backend)
    parameter = compiling.DIM * compiling.DIM * (2 if mixed else 4)  # the smallest matrix, of three
    assert compiled < plain + parameter


def test_a_unit_makes_as_many_python_calls_as_its_hooks_bodies() -> None:
    """Marks leave no wrapper behind: what a module calls is the method of the class."""
    block = fsdp2.fully_shard(compiling.Block(), mesh=null_mesh(RANKS))
    record = require_record(block)
    (pre,), (post,) = block._forward_pre_hooks.values(), block._forward_hooks.values()
    assert pre.__func__.__code__ is vars(UnitHooks)["pre_forward"].__code__
    assert post.__func__.__code__ is vars(UnitHooks)["post_forward"].__code__
    assert pre.__self__ is post.__self__ is record
