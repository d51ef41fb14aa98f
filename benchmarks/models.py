"""The models that the benchmarks run: stacks of tiny blocks, and a Llama-like decoder.

Every model is a module with a `blocks` list (each block becomes one communication group) and a
`reset_parameters()` that fills parameters and buffers in place. So a model can be built on the meta
device, sharded, given storage with `to_empty` and only then filled: no rank ever holds it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


# ---------------------------------------------------------------------------------------------
# Tiny blocks: all host time, no compute to speak of


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
        for block in self.blocks:
            for layer in block.layers:
                fan_in = layer.weight.shape[0 if getattr(layer, "transposed", False) else 1]
                fill_normal(layer.weight, fan_in**-0.5)  # outputs about as large as inputs


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


# ---------------------------------------------------------------------------------------------
# A Llama-like decoder


@dataclass(frozen=True)
class LlamaConfig:
    """Shapes of a Llama-like decoder; `batch` and `seq` are the benchmark's own input."""

    dim: int
    layers: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    batch: int = 1
    seq: int = 2048

    @property
    def parameters(self) -> int:
        """Number of parameters: embedding and output projection are not tied."""
        kv_dim = self.dim // self.heads * self.kv_heads
        attention = 2 * self.dim * self.dim + 2 * self.dim * kv_dim
        block = attention + 3 * self.dim * self.ffn + 2 * self.dim
        return self.layers * block + 2 * self.vocab * self.dim + self.dim


PRESETS = {
    # 1.10 B parameters: Llama 3's block shapes at 1 B scale
    "1.1b": LlamaConfig(dim=2048, layers=16, ffn=8192, vocab=32000, heads=16, kv_heads=4),
    # 2.83 B parameters: Llama 3 8 B's block, 12 of them
    "2.8b": LlamaConfig(
        dim=4096, layers=12, ffn=14336, vocab=32000, heads=32, kv_heads=4, seq=8192
    ),
    # For trying the benchmark out on a CPU. Every shard at world size 8 is a multiple of 16 bytes.
    "tiny": LlamaConfig(dim=64, layers=3, ffn=128, vocab=256, heads=4, kv_heads=2, seq=16),
}


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        kv_dim = self.head_dim * config.kv_heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        # [batch, heads, seq, head_dim]
        q, k, v = (
            w(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, dim))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: turn each pair (x[i], x[i + head_dim / 2]) by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class LlamaBlock(nn.Module):
    """Pre-norm attention and SwiGLU feed-forward: nine parameters."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim)
        self.w1 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    """Embedding, `blocks`, norm, output projection: tokens [batch, seq] to logits in fp32."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        half = config.dim // config.heads // 2
        self.register_buffer("cos", torch.empty(config.seq, half), persistent=False)
        self.register_buffer("sin", torch.empty(config.seq, half), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.output(self.norm(x)).float()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for name, param in self.named_parameters():
            if name.endswith("norm.weight"):
                local(param).fill_(1.0)
            else:
                fill_normal(param, 0.02)
        seq, half = self.cos.shape
        device = self.cos.device
        frequency = 500_000.0 ** (-torch.arange(half, device=device) / half)
        angle = torch.outer(torch.arange(seq, device=device), frequency)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())


def llama(
    dim: int,
    layers: int,
    ffn: int,
    vocab: int,
    heads: int,
    kv_heads: int,
    *,
    batch: int = 1,
    seq: int = 2048,
) -> Llama:
    """A Llama-like decoder on the current default device."""
    return Llama(LlamaConfig(dim, layers, ffn, vocab, heads, kv_heads, batch, seq))
