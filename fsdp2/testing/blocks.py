"""Models of many small blocks: all host time, no compute to speak of.

Every model is a module with a `blocks` list (each block becomes one unit) and a
`reset_parameters()` that fills parameters in place. So a model can be built on the meta device,
sharded, given memory with `to_empty` and only then filled: no rank ever holds it whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor as it is. Shares the storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill_normal(tensor: Tensor, std: float) -> None:
    """Fill in place, this rank's part only: DTensor's own random ops synchronise seeds first."""
    local(tensor).normal_(0.0, std)


class TinyBlock(nn.Module):
    """`n` linear layers without bias, one after another: each parameter is [dim, dim].

    With dim 16 a parameter's shard is 2 rows at world size 8: 128 bytes in fp32, 64 in bf16, both
    multiples of 16.
    """

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
    """`n` parameters of [rows, cols] each, alternately widening x to rows and narrowing it back.

    Of its input it uses the first `cols` features: after an odd number of layers there are `rows`.

    With 1024 rows of 8 the same model shards evenly at every world size up to 1024, where a shard
    is one row: 32 bytes in fp32, 16 in bf16.
    """

    def __init__(self, n: int, rows: int, cols: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TallLayer(rows, cols, bool(i % 2)) for i in range(n))
        self.cols = cols

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., : self.cols]
        for layer in self.layers:
            x = layer(x)
        return x


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
            if isinstance(weight := getattr(layer, "weight", None), Tensor):
                fan_in = weight.shape[0 if getattr(layer, "transposed", False) else 1]
                fill_normal(weight, fan_in**-0.5)


def tiny_blocks(
    n_blocks: int = 32, params_per_block: int | Sequence[int] = 9, dim: int = 16
) -> BlockStack:
    """Blocks of [dim, dim] linear layers; dim must be a multiple of 8 for world size 8.

    Of several numbers of parameters the blocks take each in turn.
    """
    numbers = [params_per_block] if isinstance(params_per_block, int) else params_per_block
    return BlockStack([TinyBlock(numbers[i % len(numbers)], dim) for i in range(n_blocks)], dim)


def tall_blocks(
    n_blocks: int = 32, params_per_block: int = 9, rows: int = 1024, cols: int = 8
) -> BlockStack:
    """Blocks of [rows, cols] parameters: one model for all world sizes up to `rows`."""
    return BlockStack([TallBlock(params_per_block, rows, cols) for _ in range(n_blocks)], cols)
