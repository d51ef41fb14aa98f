"""Models of many small blocks: all host time, no compute to speak of.

    tiny_blocks, tall_blocks               equal parameters
    llama_blocks, moe_blocks, lora_blocks  the parameters of real blocks, of width 64 by default

Every model is a module with a `blocks` list (each block becomes one unit) and a
`reset_parameters()` that fills parameters in place. So a model can be built on the meta device,
sharded, given memory with `to_empty` and only then filled: no rank ever holds it whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.core.layout.mesh import local_of

local = local_of


@torch.no_grad()
def fill_normal(tensor: Tensor, std: float) -> None:
    """Fill in place, this rank's part only: DTensor's own random ops synchronise seeds first."""
    local(tensor).normal_(0.0, std)


class TinyBlock(nn.Module):
    """`n` linear layers without bias, one after another: each parameter is [dim, dim]."""

    def __init__(self, n: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TallLayer(nn.Module):
    """One [rows, cols] parameter, applied as cols -> rows, or transposed as rows -> cols."""

    def __init__(self, rows: int, cols: int, transposed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, cols))
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.transposed else F.linear(x, self.weight)


class TallBlock(nn.Module):
    """`n` parameters of [rows, cols], which widen the first `cols` features to rows, and back."""

    def __init__(self, n: int, rows: int, cols: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TallLayer(rows, cols, bool(i % 2)) for i in range(n))
        self.cols = cols

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., : self.cols]
        for layer in self.layers:
            x = layer(x)
        return x


class Norm(nn.Module):
    """A root-mean-square norm with a weight of [width], without a kernel of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Projections(nn.Module):
    """q, k, v and o of [width, width] of an attention that only adds up what they compute."""

    q: nn.Module
    v: nn.Module

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(self.q(x) + self.k(x) + self.v(x))
        return out


class LlamaBlock(nn.Module):
    """The nine parameters of a Llama block: two norms, attention, and an MLP of three matrices."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(width), Norm(width)
        self.attention = Projections(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        out: Tensor = x + self.down(self.gate(y) * self.up(y))
        return out


class MoeBlock(nn.Module):
    """The nine parameters of a block with a router, and two tensors of experts, which see all."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(width), Norm(width)
        self.attention = Projections(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        shares = self.router(y)
        each = y.expand(self.up.shape[0], *y.shape) @ self.up @ self.down
        return x + (each * shares.t().unsqueeze(-1)).sum(0)


class LoraLinear(nn.Module):
    """A linear layer, frozen, and its adapters, of [rank, in] and [out, rank]."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


class LoraBlock(nn.Module):
    """A frozen Llama block with adapters at q and v: 13 parameters, of which four are trained."""

    def __init__(self, width: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.block = LlamaBlock(width, hidden).requires_grad_(False)
        for name in ("q", "v"):
            base: nn.Linear = getattr(self.block.attention, name)
            setattr(self.block.attention, name, LoraLinear(base, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


class BlockStack(nn.Module):
    """`blocks`, one after another, on inputs of `width` features. The root owns no parameters."""

    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def reset_parameters(self) -> None:
        """Fill this rank's part of every parameter: outputs are about as large as inputs."""
        for layer in self.modules():
            for weight in layer.parameters(recurse=False):
                fan_in = weight.shape[0 if getattr(layer, "transposed", False) else -1]
                fill_normal(weight, fan_in**-0.5)


def tiny_blocks(
    n_blocks: int = 32, params_per_block: int | Sequence[int] = 9, dim: int = 16
) -> BlockStack:
    """Blocks of [dim, dim] linear layers, which take the numbers of parameters in turn."""
    numbers = [params_per_block] if isinstance(params_per_block, int) else params_per_block
    return BlockStack([TinyBlock(numbers[i % len(numbers)], dim) for i in range(n_blocks)], dim)


def tall_blocks(
    n_blocks: int = 32, params_per_block: int = 9, rows: int = 1024, cols: int = 8
) -> BlockStack:
    """Blocks of [rows, cols] parameters: one model for all world sizes up to `rows`."""
    return BlockStack([TallBlock(params_per_block, rows, cols) for _ in range(n_blocks)], cols)


def llama_blocks(n_blocks: int = 32, width: int = 64) -> BlockStack:
    """Blocks with the parameters of a Llama block."""
    return BlockStack([LlamaBlock(width, 4 * width) for _ in range(n_blocks)], width)


def moe_blocks(n_blocks: int = 32, width: int = 64, experts: int = 8) -> BlockStack:
    """Blocks with a router and experts."""
    return BlockStack([MoeBlock(width, 2 * width, experts) for _ in range(n_blocks)], width)


def lora_blocks(n_blocks: int = 32, width: int = 64, rank: int = 8) -> BlockStack:
    """Frozen Llama blocks with adapters."""
    return BlockStack([LoraBlock(width, 4 * width, rank) for _ in range(n_blocks)], width)
