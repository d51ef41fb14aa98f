"""Compiled blocks on real ranks: the losses, gradients and parameters of eager sharded training,
and of torch's FSDP2 with the same compilation.

Backends "eager" and "aot_eager" run the same kernels as eager mode: the same bits are expected.
Inductor writes kernels of its own, which fuse and reorder: see `INDUCTOR`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.common.combinations import each_once
from tests.common.compiling import (
    BLOCK_WAYS,
    CHECKPOINTS,
    DIM,
    IN_FORWARD,
    INSIDE_FSDP,
    OUT,
    OUTSIDE_FSDP,
    ROOT_WAYS,
    Compiler,
    Stack,
    fresh_dynamo,
    graph_breaks,
    plain_name,
    sharded,
)
from tests.common.meshes import ParallelModel, hsdp_mesh, mesh, parallel_loss, parallelize
from tests.common.models import seeded
from tests.common.parity import (
    OURS,
    REORDERED_FP32,
    TORCH,
    Tolerance,
    adamw,
    assert_close,
    assert_equal,
    full_grads,
    full_params,
    language_batches,
    mixed_policy,
    my_part,
    over_ranks,
    regression_batches,
    regression_loss,
    world_mesh,
)
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

# Inductor's kernels keep fp32 where eager rounds between operators, and sum a norm's row in another
# order: a few roundings of fp32, or in bf16 one rounding (2**-9 of the value) an operator that was
# fused away, of the four between two matmuls. AdamW divides gradients by their own size, so that a
# parameter may be off by a share of the learning rate, 1e-2, where a gradient is near zero.
INDUCTOR = Tolerance(rtol=1e-4, atol=1e-4)
INDUCTOR_MIXED = Tolerance(rtol=2**-5, atol=2**-6)

SIZES = (8, 8, 12, 12)  # rows of the batches: the third is another size, compiled once more
Batch = tuple[Tensor, Tensor]


def _batches(steps: int = len(SIZES)) -> list[Batch]:
    return [
        regression_batches(DIM, OUT, rows=rows, steps=i + 1)[i]
        for i, rows in enumerate(SIZES[:steps])
    ]


def _train(
    api: Any,
    way: str,
    compiler: Compiler,
    *,
    micro: int = 1,
    mixed: bool = False,
    checkpoints: str | None = None,
    **arguments: Any,
) -> list[Any]:
    """Loss, gradients and parameters of each step, under the names of the plain model."""
    arguments.setdefault("mesh", world_mesh())
    if mixed:
        arguments["mp_policy"] = mixed_policy(api)
    model: Any = seeded(partial(Stack, checkpoints=checkpoints == IN_FORWARD))
    run = sharded(api, model, way, compiler, checkpoints=checkpoints, **arguments)
    optimizer = adamw(model.parameters())
    done, graphs = [], []
    for batch in _batches():
        for number in range(micro):
            model.set_requires_gradient_sync(number == micro - 1)
            loss = regression_loss(run, my_part(batch))
            loss.backward()
        grads = full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        step = (over_ranks(loss), grads, full_params(model))
        done.append([_plain(part) for part in step])
        graphs.append(compiler.graphs)
    assert graphs[1] == graphs[0], "compiled again for the same shapes"
    # Around the unit, forward's input is a view and recomputation's is not: a graph for each, once
    # sizes are dynamic.
    most = 3 if checkpoints == OUTSIDE_FSDP else 2
    assert graphs[3] == graphs[2] <= most * graphs[0], "compiled more than once for other sizes"
    return done


def _plain(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part
    return {plain_name(name): value for name, value in part.items()}


def _check(way: str, backend: str, *, torch_too: bool = True, **options: Any) -> None:
    """Compiled, ours is as it is in eager mode, and as torch's, compiled the same way."""
    exact = backend in ("eager", "aot_eager")
    tolerance = INDUCTOR_MIXED if options.get("mixed") else INDUCTOR
    fullgraph = way not in ROOT_WAYS
    with fresh_dynamo():
        compiler = Compiler(backend, fullgraph)
        ours = _train(OURS, way, compiler, **options)
        # torch runs a checkpointed function whose trace breaks, as at our hooks, in eager mode.
        falls_back = way in ROOT_WAYS and options.get("checkpoints") == OUTSIDE_FSDP
        assert bool(compiler.graphs) != falls_back
        assert not (fullgraph and graph_breaks())
        eager = _train(OURS, way, Compiler("none"), **options)
        if exact:
            assert_equal(ours, eager, "eager")
        else:
            assert_close(ours, eager, tolerance, "eager")
        if torch_too:
            torch._dynamo.reset()
            torchs = _train(TORCH, way, Compiler(backend, fullgraph), **options)
            if dist.get_world_size() == 2:
                assert_equal(ours, torchs, "torch")
            else:
                assert_close(ours, torchs, REORDERED_FP32 if exact else tolerance, "torch")


# -- in every run ---------------------------------------------------------------------------------


@ranks(2, timeout=240)
@pytest.mark.parametrize("way", ["in place, then sharded", "root wrapped"])
def test_compiled_training_is_exact(way: str) -> None:
    _check(way, "aot_eager")


@ranks(2, timeout=240)
def test_mixed_precision_checkpointing_and_accumulation_together() -> None:
    _check("sharded, then in place", "aot_eager", mixed=True, checkpoints=INSIDE_FSDP, micro=2)


# -- the rest -------------------------------------------------------------------------------------


@ranks(2, timeout=240)
@pytest.mark.extended
@each_once(way=[*BLOCK_WAYS, *ROOT_WAYS], backend=["eager", "aot_eager"])
def test_every_way(way: str, backend: str) -> None:
    _check(way, backend)


@ranks(2, timeout=300)
@pytest.mark.extended
@each_once(way=[BLOCK_WAYS[0], BLOCK_WAYS[2], ROOT_WAYS[0]], mixed={"fp32": False, "mixed": True})
def test_inductor(way: str, mixed: bool) -> None:
    _check(way, "inductor", mixed=mixed)


@ranks(2, timeout=240)
@pytest.mark.extended
@each_once(
    way=[BLOCK_WAYS[2], BLOCK_WAYS[3], ROOT_WAYS[0]],
    checkpoints=CHECKPOINTS,
    mixed={"fp32": False, "mixed": True},
)
def test_activation_checkpointing(way: str, checkpoints: str, mixed: bool) -> None:
    _check(way, "aot_eager", checkpoints=checkpoints, mixed=mixed)


@ranks(2, timeout=300)
@pytest.mark.extended
@pytest.mark.parametrize("checkpoints", [INSIDE_FSDP, OUTSIDE_FSDP])
def test_activation_checkpointing_with_inductor(checkpoints: str) -> None:
    _check("in place, then sharded", "inductor", checkpoints=checkpoints)


@ranks(2, timeout=240)
@pytest.mark.extended
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
@pytest.mark.parametrize("keep", [False, True], ids=["freed", "kept"])
def test_accumulation(keep: bool, mixed: bool) -> None:
    _check("in place, then sharded", "aot_eager", micro=3, mixed=mixed, reshard_after_forward=keep)


@ranks(4, timeout=240)
@pytest.mark.extended
@pytest.mark.parametrize("way", [BLOCK_WAYS[2], ROOT_WAYS[0]])
def test_hsdp(way: str) -> None:
    _check(way, "aot_eager", mesh=hsdp_mesh(2, 2), micro=2)


@ranks(4, timeout=300)
@pytest.mark.extended
def test_hsdp_with_inductor() -> None:
    _check("in place, then sharded", "inductor", mesh=hsdp_mesh(2, 2))


@ranks(4, timeout=300)
@pytest.mark.extended
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tensor_parallel(backend: str) -> None:
    """The gathered parameters of a block are DTensors on the tensor-parallel mesh, in its graph."""
    both = mesh("dp", "tp", shape=(2, 2))

    def train(compiler: Compiler) -> list[Any]:
        model: Any = parallelize(seeded(ParallelModel), both["tp"], "linears")
        for block in model.blocks:
            if compiler.backend != "none":
                compiler.in_place(block)
            OURS.fully_shard(block, mesh=both["dp"])
        OURS.fully_shard(model, mesh=both["dp"])
        optimizer = adamw(model.parameters())
        done, graphs = [], []
        for batch in language_batches(16, steps=4):
            loss = parallel_loss(model, my_part(batch, both["dp"].get_local_rank(), 2))
            loss.backward()
            grads = full_grads(model)
            optimizer.step()
            optimizer.zero_grad()
            done.append([grads, full_params(model)])
            graphs.append(compiler.graphs)
        assert graphs == [graphs[0]] * 4, "compiled again for the same shapes"
        return done

    with fresh_dynamo():
        compiler = Compiler(backend)
        compiled = train(compiler)
        assert compiler.graphs
        assert not graph_breaks()
        assert_close(compiled, train(Compiler("none")), REORDERED_FP32, "eager")


@ranks(2, timeout=240)
@pytest.mark.extended
def test_without_gradients_and_in_evaluation() -> None:
    """Grad mode and `training` are in dynamo's guards: one more graph each, and right results."""
    with fresh_dynamo():
        compiler = Compiler("aot_eager")
        model: Any = seeded(Stack)
        sharded(OURS, model, "in place, then sharded", compiler, mesh=world_mesh())
        plain: nn.Module = seeded(Stack)
        x = torch.randn(4, DIM)
        graphs = []
        for _ in range(3):
            with torch.no_grad():
                assert_close(model.eval()(x), plain(x), REORDERED_FP32)
            model.train()(x).sum().backward()
            model.zero_grad()
            graphs.append(compiler.graphs)
        assert graphs == [graphs[0]] * 3
