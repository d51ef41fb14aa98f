"""Graph mode against hooks, on ranks: the same bits, eagerly and compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.tracing.timeline import COLLECTIVES
from tests.common import compiling, models, parity
from tests.common.combinations import often
from tests.common.looped import coalescing
from tests.common.workers import ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

BF16 = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
HALVES = fsdp2.MixedPrecisionPolicy(torch.float32, torch.float16)  # divides before and after
STEPS = 3
EAGERLY = {"options": {"compiler": "aot_eager"}}


class _Checkpointed(models.Transformer):
    """Each block is computed again in backward."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class _EvenStack(compiling.Stack):
    """Blocks that tensor parallelism cuts evenly, as it must."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = nn.Linear(models.DIM, 6), nn.Linear(6, models.DIM, bias=False)


def _shard(model: nn.Module, **arguments: Any) -> nn.Module:
    for unit in models.units(model):
        fsdp2.fully_shard(unit, **arguments)
    return fsdp2.fully_shard(model, **arguments)


def _of_blocks(build: Callable[[], nn.Module], **arguments: Any) -> nn.Module:
    return _shard(models.seeded(build), **arguments)


def _with_frozen_blocks() -> nn.Module:
    model = models.seeded(models.Transformer)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].qkv.weight.requires_grad_(False)
    return _shard(model)


def _with_a_list() -> nn.Module:
    model = models.seeded(models.Transformer)
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard([model.norm, model.head])
    return fsdp2.fully_shard(model)


def _coalesced(pack_below: int, **arguments: Any) -> nn.Module:
    """As over NCCL: what is aligned is gathered into place, and reduced from where it is."""
    with coalescing(pack_below):
        model = _of_blocks(models.Transformer, **arguments)
    kinds = {kind for r in fsdp2.report(model).groups for kind in r.transport.split("+")}
    assert kinds == {"coalesced", "packed"}
    return model


def _channels_last() -> nn.Module:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.Conv2d(4, 4, 1))

    model = models.seeded(build).to(memory_format=torch.channels_last)
    for layer in model[1:]:
        fsdp2.fully_shard(layer)
    return fsdp2.fully_shard(model)


def _hybrid() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    return _of_blocks(compiling.Stack, mesh=mesh)


def _tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = models.seeded(_EvenStack)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)  # type: ignore[arg-type]
        fsdp2.fully_shard(block, mesh=mesh["dp"])
    return fsdp2.fully_shard(model, mesh=mesh["dp"])


def _placed(param: nn.Parameter) -> Any:
    if param.ndim == 1:
        return Replicate()
    return Shard(1) if param.shape[1] > param.shape[0] else None


CASES: dict[str, Callable[[], nn.Module]] = {
    "coalesced and packed": lambda: _coalesced(64, mp_policy=BF16),
    "blocks": lambda: _of_blocks(models.Transformer),
    "mixed precision": lambda: _of_blocks(models.Transformer, mp_policy=BF16),
    "kept until backward": lambda: _of_blocks(models.Transformer, reshard_after_forward=False),
    "tied in the root": lambda: _of_blocks(lambda: models.Transformer(tied=True)),
    "frozen": _with_frozen_blocks,
    "a list as a unit": _with_a_list,
    "checkpointed": lambda: _of_blocks(_Checkpointed),
    "placements": lambda: _of_blocks(models.Transformer, shard_placement_fn=_placed),
    "hybrid": _hybrid,
    "tensor parallel": _tensor_parallel,
    "empty shards": lambda: _of_blocks(models.OddMLP),
    "halves": lambda: _of_blocks(models.OddMLP, mp_policy=HALVES),
    "channels last": _channels_last,
    "coalesced": lambda: _coalesced(0),
}
NEEDS_FOUR = ("hybrid", "tensor parallel")


def _inputs(model: nn.Module) -> Iterator[Tensor]:
    # Ranks of one tensor-parallel group, or of none, see the same.
    generator = torch.Generator().manual_seed(dist.get_rank() * 2 // dist.get_world_size())
    while True:
        if isinstance(model, models.Transformer):
            yield torch.randint(0, 13, (2, 5), generator=generator)
        else:
            yield torch.randn(3, models.DIM, generator=generator)


def _loss(output: Tensor) -> Tensor:
    output = output.full_tensor() if isinstance(output, DTensor) else output
    return F.softplus(output.float()).mean()


def _trained(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Losses and the final parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    inputs, found = _inputs(model), []
    for _ in range(STEPS):
        loss = _loss(run(next(inputs)))
        loss.backward()
        fsdp2.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *parity.full_params(model).values()]


def _assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@ranks(2)
@pytest.mark.parametrize("case", often([case for case in CASES if case not in NEEDS_FOUR]))
def test_bits_on_two_ranks(case: str) -> None:
    _compare(case)


@ranks(4)
@pytest.mark.parametrize("case", NEEDS_FOUR)
def test_bits_on_four_ranks(case: str) -> None:
    _compare(case)


def _compare(case: str) -> None:
    make = CASES[case]
    model = make()
    expected = _trained(model, model)
    eager = make()
    fsdp2.graph_mode(eager)
    _assert_equal(_trained(eager, eager), expected)
    compiled = make()
    fsdp2.graph_mode(compiled, compile=EAGERLY)
    config = torch._dynamo.config
    with compiling.fresh_dynamo(), config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        _assert_equal(_trained(compiled, compiled), expected)


@ranks(3)
@pytest.mark.extended
def test_inductor() -> None:
    """It fuses, and rounds a sum of a few products in another order; ranks' shards differ."""
    model = _of_blocks(models.Transformer)
    expected = _trained(model, model)
    compiled = _of_blocks(models.Transformer)
    fsdp2.graph_mode(compiled, compile=True)
    with compiling.fresh_dynamo():
        found = _trained(compiled, compiled)
    for one, other in zip(found, expected, strict=True):
        # AdamW divides by the gradient's size: a rounding of a small one is 0.01 of a step.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@ranks(2)
@pytest.mark.parametrize("compile", [False, EAGERLY], ids=["eager", "compiled"])
def test_a_trace_shows_the_collectives(tmp_path: Path, compile: Any) -> None:
    """Each runs until compute has waited, in the order of hooks, with the bytes of hooks."""
    found = []
    for mode in (False, True):
        model = _of_blocks(compiling.Stack)
        fsdp2.graph_mode(model, mode, compile=compile)
        optimizer = torch.optim.SGD(model.parameters())
        with compiling.fresh_dynamo(), fsdp2.trace(tmp_path / "{rank}.json") as trace:
            for inputs in islice(_inputs(model), 2):
                model(inputs).sum().backward()
                optimizer.step()
        assert trace.timeline is not None
        sent = [each for each in trace.timeline.slices if each.operation in COLLECTIVES]
        for kind in COLLECTIVES[:2]:
            ends = [(each.start, each.end) for each in sent if each.operation == kind]
            assert all(one[1] <= other[0] for one, other in pairwise(ends))
            waits = [each for each in trace.timeline.waits if each.operation == kind]
            assert len(waits) == len(ends)
        found.append(
            Counter((s.operation, s.unit, s.bytes, s.dtype, s.group, s.iteration) for s in sent)
        )
    assert found[0] == found[1]


@ranks(2)
def test_inside_of_a_larger_graph() -> None:
    """Somebody compiles what calls the model, with any backend: the graph takes DTensors.

    Training compiles once, and evaluation once more.
    """
    model = _of_blocks(compiling.Stack)
    expected = _trained(model, model)
    larger = _of_blocks(compiling.Stack)
    fsdp2.graph_mode(larger)
    with compiling.fresh_dynamo():
        compiler = compiling.Compiler()
        run = compiler.wrap(larger)
        _assert_equal(_trained(larger, run), expected)
        assert compiler.graphs == 1
        inputs = next(_inputs(model))
        for _ in range(2):
            with torch.no_grad():
                _assert_equal([run(inputs)], [model(inputs)])
        assert compiler.graphs == 2


@ranks(2)
def test_gradients_of_a_compiled_model() -> None:
    """Asked for, of other parameters, added up, seen by hooks, and of fewer: as of an eager one."""
    found = []
    with compiling.fresh_dynamo():
        for compile in (False, EAGERLY):
            model = _of_blocks(compiling.Stack)
            fsdp2.graph_mode(model, compile=compile)  # type: ignore[arg-type]  # one of both
            found.append(_gradients(model))
    assert all(type(one) is type(other) for one, other in zip(*found, strict=True))
    _assert_equal(*(parity.full_all(each) for each in found))


def _gradients(model: nn.Module) -> list[Tensor]:
    params = dict(model.named_parameters())
    inputs = next(_inputs(model))
    found = [*torch.autograd.grad(_loss(model(inputs)), [*params.values()])]
    doubled = {name: (2 * param.detach()).requires_grad_() for name, param in params.items()}
    output = torch.func.functional_call(model, doubled, (inputs,))
    found += torch.autograd.grad(_loss(output), [*doubled.values()])
    for _ in range(2):
        _loss(model(inputs)).backward()
    hook = model.outlet.weight.register_hook(lambda gradient: 3 * gradient)
    _loss(model(inputs)).backward()
    hook.remove()
    found += [cast(Tensor, param.grad) for param in params.values()]
    model.blocks[0].requires_grad_(False)
    model.zero_grad()
    _loss(model(inputs)).backward()
    assert all(param.grad is None for param in model.blocks[0].parameters())
    return found + [param.grad for param in params.values() if param.grad is not None]
