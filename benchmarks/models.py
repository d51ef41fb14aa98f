"""The large models that the benchmarks run: Llama-like decoders, dense and of experts.

Like the stacks of small blocks in `fsdp2.testing.blocks` it is a module with a `blocks` list (each
block becomes one unit) and a `reset_parameters()` that fills parameters and buffers in place. So it
can be built on the meta device, sharded, given memory with `to_empty` and only then filled: no rank
ever holds it whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2.testing.blocks import fill_normal, local


@dataclass(frozen=True)
class LlamaConfig:
    """Shapes of a Llama-like decoder; `batch` and `seq` are the benchmark's own input.

    Attributes:
        experts: of each block's feed-forward, ``ffn`` wide each; 0: it is dense.
        active: experts that a token meets on average, where there are any.
    """

    dim: int
    layers: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    batch: int = 1
    seq: int = 2048
    experts: int = 0
    active: int = 2

    @property
    def parameters(self) -> int:
        """Number of parameters: embedding and output projection are not tied."""
        kv_dim = self.dim // self.heads * self.kv_heads
        attention = 2 * self.dim * self.dim + 2 * self.dim * kv_dim
        router = self.experts * self.dim
        block = attention + router + 3 * self.dim * self.ffn * (self.experts or 1) + 2 * self.dim
        return self.layers * block + 2 * self.vocab * self.dim + self.dim


PRESETS = {
    # 1.10 B parameters: Llama 3's block shapes at 1 B scale
    "1.1b": LlamaConfig(dim=2048, layers=16, ffn=8192, vocab=32000, heads=16, kv_heads=4),
    # 2.83 B parameters: Llama 3 8 B's block, 12 of them
    "2.8b": LlamaConfig(
        dim=4096, layers=12, ffn=14336, vocab=32000, heads=32, kv_heads=4, seq=8192
    ),
    # 1.92 B parameters, of which a token meets 0.47 B
    "moe": LlamaConfig(
        dim=2048, layers=12, ffn=1408, vocab=32000, heads=16, kv_heads=4, seq=4096, experts=16
    ),
    # For trying the benchmark out on a CPU. Every shard at world size 8 is a multiple of 16 bytes.
    "tiny": LlamaConfig(dim=64, layers=3, ffn=128, vocab=256, heads=4, kv_heads=2, seq=16),
    "tiny-moe": LlamaConfig(
        dim=64, layers=2, ffn=32, vocab=256, heads=4, kv_heads=2, seq=16, experts=8
    ),
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


class Experts(nn.Module):
    """SwiGLU feed-forwards, each of which takes the tokens that its router scores highest.

    Experts choose tokens (Zhou et al. 2022, "Mixture-of-Experts with Expert Choice Routing"): every
    expert gets equally many, so that shapes are known without asking the device.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        shape = (config.experts, config.dim, config.ffn)
        self.share = config.active / config.experts
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(shape))
        self.w2 = nn.Parameter(torch.empty(config.experts, config.ffn, config.dim))
        self.w3 = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        taken = max(1, round(len(tokens) * self.share))
        weight, index = self.router(tokens).softmax(-1).topk(taken, dim=0)  # [taken, experts]
        chosen = tokens[index.T]  # [experts, taken, dim]
        done = torch.bmm(F.silu(torch.bmm(chosen, self.w1)) * torch.bmm(chosen, self.w3), self.w2)
        done = (done * weight.T.unsqueeze(-1)).flatten(0, 1)
        return torch.zeros_like(tokens).index_add(0, index.T.flatten(), done).view_as(x)


class MoEBlock(nn.Module):
    """Pre-norm attention and experts: ten parameters."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim)
        self.experts = Experts(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.experts(self.ffn_norm(x))


def recompute_blocks(model: nn.Module) -> None:
    """Activation checkpointing of each block; before it is sharded."""

    def recomputed(block: nn.Module) -> None:
        run = block.forward
        block.forward = lambda *args: checkpoint(run, *args, use_reentrant=False)

    for block in model.blocks:
        recomputed(block)


class Llama(nn.Module):
    """Embedding, `blocks`, norm, output projection: tokens [batch, seq] to logits in fp32."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        block = MoEBlock if config.experts else LlamaBlock
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
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
