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

from tests.common import compiling, meshes, parity
from tests.common.combinations import each_once
from tests.common.models import seeded
from tests.common.workers import ranks

# Inductor's kernels keep fp32 where eager rounds between operators, and sum a norm's row in another
# order: a few roundings of fp32, or in bf16 one rounding (2**-9 of the value) an operator that was
# fused away, of the four between two matmuls. AdamW divides gradients by their own size, so that a
# parameter may be off by a share of the learning rate, 1e-2, where a gradient is near zero.
INDUCTOR = parity.Tolerance(rtol=1e-4, atol=1e-4)
INDUCTOR_MIXED = parity.Tolerance(rtol=2**-5, atol=2**-6)

SIZES = (8, 8, 12, 12)  # rows of the batches: the third is another size, compiled once more
Batch = tuple[Tensor, Tensor]


def _batches(steps: int = len(SIZES)) -> list[Batch]:
    return [
        parity.regression_batches(compiling.DIM, compiling.OUT, rows=rows, steps=i + 1)[i]
        for i, rows in enumerate(SIZES[:steps])
    ]


def _train(
    api: Any,
    way: str,
    compiler: compiling.Compiler,
    *,
    micro: int = 1,
    mixed: bool = False,
    checkpoints: str | None = None,
    **arguments: Any,
) -> list[Any]:
    """Loss, gradients and parameters of each step, under the names of the plain model."""
    arguments.setdefault("mesh", parity.world_mesh())
    if mixed:
        arguments["mp_policy"] = parity.mixed_policy(api)
    model: Any = seeded(partial(compiling.Stack, checkpoints=checkpoints == compiling.IN_FORWARD))
    run = compiling.sharded(api, model, way, compiler, checkpoints=checkpoints, **arguments)
    optimizer = parity.adamw(model.parameters())
    done, graphs = [], []
    for batch in _batches():
        for number in range(micro):
            model.set_requires_gradient_sync(number == micro - 1)
            loss = parity.regression_loss(run, parity.my_part(batch))
            loss.backward()
        grads = parity.full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        step = (parity.over_ranks(loss), grads, parity.full_params(model))
        done.append([_plain(part) for part in step])
        graphs.append(compiler.graphs)
    assert graphs[1] == graphs[0], "compiled again for the same shapes"
    # Around the unit, forward's input is a view and recomputation's is not: a graph for each, once
    # sizes are dynamic.
    most = 3 if checkpoints == compiling.OUTSIDE_FSDP else 2
    assert graphs[3] == graphs[2] <= most * graphs[0], "compiled more than once for other sizes"
    return done


def _plain(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part
    return {compiling.plain_name(name): value for name, value in part.items()}


def _check(way: str, backend: str, *, torch_too: bool = True, **options: Any) -> None:
    """Compiled, ours is as it is in eager mode, and as torch's, compiled the same way."""
    exact = backend in ("eager", "aot_eager")
    tolerance = INDUCTOR_MIXED if options.get("mixed") else INDUCTOR
    fullgraph = way not in compiling.ROOT_WAYS
    with compiling.fresh_dynamo():
        compiler = compiling.Compiler(backend, fullgraph)
        ours = _train(parity.OURS, way, compiler, **options)
        # torch runs a checkpointed function whose trace breaks, as at our hooks, in eager mode.
        falls_back = (
            way in compiling.ROOT_WAYS and options.get("checkpoints") == compiling.OUTSIDE_FSDP
        )
        assert bool(compiler.graphs) != falls_back
        assert not (fullgraph and compiling.graph_breaks())
        eager = _train(parity.OURS, way, compiling.Compiler("none"), **options)
        if exact:
            parity.assert_equal(ours, eager, "eager")
        else:
            parity.assert_close(ours, eager, tolerance, "eager")
        if torch_too:
            torch._dynamo.reset()
            torchs = _train(parity.TORCH, way, compiling.Compiler(backend, fullgraph), **options)
            if dist.get_world_size() == 2:
                parity.assert_equal(ours, torchs, "torch")
            else:
                parity.assert_close(
                    ours, torchs, parity.REORDERED_FP32 if exact else tolerance, "torch"
                )


# -- in every run ---------------------------------------------------------------------------------


@ranks(2, timeout=240)
@pytest.mark.parametrize("way", ["in place, then sharded", "root wrapped"])
def test_compiled_training_is_exact(way: str) -> None:
    _check(way, "aot_eager")


@ranks(2, timeout=240)
def test_mixed_precision_checkpointing_and_accumulation_together() -> None:
    _check(
        "sharded, then in place",
        "aot_eager",
        mixed=True,
        checkpoints=compiling.INSIDE_FSDP,
        micro=2,
    )


# -- the rest -------------------------------------------------------------------------------------


@ranks(2, timeout=240)
@pytest.mark.extended
@each_once(way=[*compiling.BLOCK_WAYS, *compiling.ROOT_WAYS], backend=["eager", "aot_eager"])
def test_every_way(way: str, backend: str) -> None:
    _check(way, backend)


@ranks(2, timeout=300)
@pytest.mark.extended
@each_once(
    way=[compiling.BLOCK_WAYS[0], compiling.BLOCK_WAYS[2], compiling.ROOT_WAYS[0]],
    mixed={"fp32": False, "mixed": True},
)
def test_inductor(way: str, mixed: bool) -> None:
    _check(way, "inductor", mixed=mixed)


@ranks(2, timeout=240)
@pytest.mark.extended
@each_once(
    way=[compiling.BLOCK_WAYS[2], compiling.BLOCK_WAYS[3], compiling.ROOT_WAYS[0]],
    checkpoints=compiling.CHECKPOINTS,
    mixed={"fp32": False, "mixed": True},
)
def test_activation_checkpointing(way: str, checkpoints: str, mixed: bool) -> None:
    _check(way, "aot_eager", checkpoints=checkpoints, mixed=mixed)


@ranks(2, timeout=300)
@pytest.mark.extended
@pytest.mark.parametrize("checkpoints", [compiling.INSIDE_FSDP, compiling.OUTSIDE_FSDP])
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
@pytest.mark.parametrize("way", [compiling.BLOCK_WAYS[2], compiling.ROOT_WAYS[0]])
def test_hsdp(way: str) -> None:
    _check(way, "aot_eager", mesh=meshes.hsdp_mesh(2, 2), micro=2)


@ranks(4, timeout=300)
@pytest.mark.extended
def test_hsdp_with_inductor() -> None:
    _check("in place, then sharded", "inductor", mesh=meshes.hsdp_mesh(2, 2))


@ranks(4, timeout=300)
@pytest.mark.extended
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tensor_parallel(backend: str) -> None:
    """The gathered parameters of a block are DTensors on the tensor-parallel mesh, in its graph."""
    both = meshes.mesh("dp", "tp", shape=(2, 2))

    def train(compiler: compiling.Compiler) -> list[Any]:
        model: Any = meshes.parallelize(seeded(meshes.ParallelModel), both["tp"], "linears")
        for block in model.blocks:
            if compiler.backend != "none":
                compiler.in_place(block)
            parity.OURS.fully_shard(block, mesh=both["dp"])
        parity.OURS.fully_shard(model, mesh=both["dp"])
        optimizer = parity.adamw(model.parameters())
        done, graphs = [], []
        for batch in parity.language_batches(16, steps=4):
            loss = meshes.parallel_loss(
                model, parity.my_part(batch, both["dp"].get_local_rank(), 2)
            )
            loss.backward()
            grads = parity.full_grads(model)
            optimizer.step()
            optimizer.zero_grad()
            done.append([grads, parity.full_params(model)])
            graphs.append(compiler.graphs)
        assert graphs == [graphs[0]] * 4, "compiled again for the same shapes"
        return done

    with compiling.fresh_dynamo():
        compiler = compiling.Compiler(backend)
        compiled = train(compiler)
        assert compiler.graphs
        assert not compiling.graph_breaks()
        parity.assert_close(
            compiled, train(compiling.Compiler("none")), parity.REORDERED_FP32, "eager"
        )


@ranks(2, timeout=240)
@pytest.mark.extended
def test_without_gradients_and_in_evaluation() -> None:
    """Grad mode and `training` are in dynamo's guards: one more graph each, and right results."""
    with compiling.fresh_dynamo():
        compiler = compiling.Compiler("aot_eager")
        model: Any = seeded(compiling.Stack)
        compiling.sharded(
            parity.OURS, model, "in place, then sharded", compiler, mesh=parity.world_mesh()
        )
        plain: nn.Module = seeded(compiling.Stack)
        x = torch.randn(4, compiling.DIM)
        graphs = []
        for _ in range(3):
            with torch.no_grad():
                parity.assert_close(model.eval()(x), plain(x), parity.REORDERED_FP32)
            model.train()(x).sum().backward()
            model.zero_grad()
            graphs.append(compiler.graphs)
        assert graphs == [graphs[0]] * 3
