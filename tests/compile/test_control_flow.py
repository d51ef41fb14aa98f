"""Higher-order operators of torch over a unit's parameters: the values of the unsharded module.

All gathered parameters of a unit share one storage; these operators refuse inputs that share one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from fsdp2.testing.null_group import null_mesh, null_world
from tests.common import compiling, parity
from tests.common.models import seeded
from tests.common.workers import ranks

DIM = 8


class Block(nn.Module):
    def __init__(self, run: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1))  # 4 bytes, so that others begin in between
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    @torch.compiler.nested_compile_region
    def region(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def _cond(self: Block, x: Tensor) -> Tensor:
    return torch.cond(x.mean() > 0, lambda x: self.first(x), lambda x: self.second(x), (x,))


def _map(self: Block, x: Tensor) -> Tensor:
    def each(row: Tensor, *_: object) -> Tensor:
        return self.second(self.first(row))

    return mapped(each, x)


def _scan(self: Block, x: Tensor) -> Tensor:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.tanh(self.first(carry) + row)
        return made, made.clone()

    return scan(step, torch.zeros_like(x[0]), x)[1]


def _associative_scan(self: Block, x: Tensor) -> Tensor:
    def combine(a: Tensor, b: Tensor) -> Tensor:
        return a * self.scale + b * self.second.bias

    return associative_scan(combine, self.first(x), 0, combine_mode="generic")


def _while_loop(self: Block, x: Tensor) -> Tensor:
    def step(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.tanh(self.second(self.first(y)))

    return while_loop(lambda i, y: i < 3, step, (torch.tensor(0), x))[1]


def _flex_attention(self: Block, x: Tensor) -> Tensor:
    query, value = (linear(x).view(1, 1, -1, DIM) for linear in (self.first, self.second))

    def scored(score: Tensor, *_: Tensor) -> Tensor:
        return score * self.scale[0] + self.second.bias[0]

    return flex_attention(query, value, value, score_mod=scored).view_as(x)


def _views(self: Block, x: Tensor) -> Tensor:
    turned, rows, values = self.first.weight.t(), self.second.weight[2:5], self.first.bias.detach()
    torch._dynamo.graph_break()  # views are inputs of the next graph
    y = x @ turned + values
    return torch.cond(y.sum() > 0, lambda y: y @ rows.t(), lambda y: y @ rows.t() * 2, (y,))


RUNS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "cond": _cond,
    "map": _map,
    "scan": _scan,
    "associative scan": _associative_scan,
    "while loop": _while_loop,
    "nested region": lambda self, x: self.region(x),
    "checkpoint": lambda self, x: checkpoint(self.region, x, use_reentrant=False),
    "flex attention": _flex_attention,
    "views": _views,
}
NO_BACKWARD = ("while loop", "flex attention")  # torch has none on the CPU
EAGER = "cond", "associative scan", "while loop"  # torch compiles these where nobody asked for it


def _results(block: nn.Module, backward: bool) -> list[Tensor]:
    found = []
    for step in range(2):
        with nullcontext() if backward else torch.no_grad():
            out = block(torch.full((4, DIM), 0.1 * (step + 1)))
        found.append(out.detach())
        if backward:
            out.square().sum().backward()
            found += parity.full_grads(block).values()
            block.zero_grad()
    return found


FEW = ("cond", "nested region", "cond, eager")
REST = [kind for kind in [*RUNS, *(f"{each}, eager" for each in EAGER)] if kind not in FEW]


@ranks(2, timeout=300)
@pytest.mark.parametrize("kinds", [FEW, pytest.param(REST, marks=pytest.mark.extended)])
def test_values_are_the_unsharded_ones(kinds: Sequence[str]) -> None:
    with compiling.fresh_dynamo():
        for kind in kinds:
            name = kind.removesuffix(", eager")
            found = []
            for shards in (False, True):
                torch._dynamo.reset()
                block: Any = seeded(lambda: Block(RUNS[name]))  # noqa: B023  # called here
                if shards:
                    parity.OURS.fully_shard(block, mesh=parity.world_mesh())
                if name == kind:
                    block.compile(backend="aot_eager")
                try:
                    found.append(_results(block, name not in NO_BACKWARD))
                except Exception:
                    if shards:
                        raise
                    break  # this version of torch compiles it in no module (scan: 2.11)
            else:
                parity.assert_equal(found[1], found[0], kind)


@pytest.mark.alone
def test_storages_in_a_graph_are_apart_and_as_aligned_as_in_memory() -> None:
    with null_world(2):
        block: Any = Block(RUNS["cond"])
        parity.OURS.fully_shard(block, mesh=null_mesh(2))
        block.unshard()
        with torch.no_grad():
            tensors = [*block.parameters(), block.first.weight.t(), block.second.weight[2:5]]
        assert len({t.untyped_storage()._cdata for t in tensors}) == 1
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
        own = {fake.untyped_storage()._cdata for fake in fakes[:5]}
        assert len(own) == 5
        assert {fake.untyped_storage()._cdata for fake in fakes[5:]} <= own
        for real, fake in zip(tensors, fakes, strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (
                real.shape,
                real.stride(),
                real.dtype,
            )
            there, here = (t.storage_offset() * t.itemsize for t in (real, fake))
            assert (there - here) % 64 == 0
            assert here < 64 or real._is_view()
        assert mode.from_tensor(tensors[0]) is fakes[0]
