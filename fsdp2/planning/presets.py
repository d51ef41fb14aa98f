"""Models of known sizes, to plan and to train: decoders, dense and of experts, and a ViT.

They have the shapes of the published models, and standard layers: rotary grouped-query attention,
RMSNorm, SwiGLU. Experts take equally many tokens each (expert choice, Zhou et al. 2022), so that
shapes are known without values: as many as routers give them on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """A model's shape.

    Attributes:
        dim: of the residual stream.
        layers: number of blocks.
        ffn: width of a feed-forward, or of an expert.
        heads: of queries.
        kv_heads: of keys and values.
        vocab: size of the vocabulary, or classes of an image.
        seq: tokens of a sequence.
        experts: per block; 0: dense.
        active: experts per token.
        head_dim: channels of a head; 0: ``dim / heads``.
        patch: of an image, in pixels; 0: tokens.
        source: the source of the shape.
        theta: base of the rotary frequencies.
    """

    dim: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int = 8192
    experts: int = 0
    active: int = 0
    head_dim: int = 0
    patch: int = 0
    source: str = ""
    theta: float = 500_000.0


_LLAMA = "The Llama 3 Herd of Models (arXiv 2407.21783), table 3"

PRESETS = {
    "llama-1b": Shape(2048, 16, 8192, 32, 8, 128256, source="Llama 3.2 model card"),
    "llama-8b": Shape(4096, 32, 14336, 32, 8, 128256, source=_LLAMA),
    "llama-70b": Shape(8192, 80, 28672, 64, 8, 128256, source=_LLAMA),
    "llama-405b": Shape(16384, 126, 53248, 128, 8, 128256, source=_LLAMA),
    "gpt-oss-20b": Shape(
        *(2880, 24, 2880, 64, 8, 201088, 4096, 32, 4, 64),
        source="gpt-oss-120b & gpt-oss-20b Model Card (arXiv 2508.10925), table 1",
    ),
    "vit-10b": Shape(
        *(5120, 32, 20480, 32, 32, 1000, 256, 0, 0, 0, 14),
        source="fsdp2.examples.vit_10b; Scaling Vision Transformers (arXiv 2106.04560)",
    ),
    "tiny": Shape(64, 4, 192, 4, 2, 256, 32, source="for trying out"),
    "tiny-moe": Shape(64, 2, 64, 4, 2, 256, 32, 8, 2, source="for trying out"),
}

NORM_EPS = 1e-5


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim or shape.dim // shape.heads
        self.causal = not shape.patch
        self.wq = nn.Linear(shape.dim, shape.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(shape.heads * self.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, D]; cos, sin: [T, C / 2]."""
        batch, seq, _ = x.shape
        q, k, v = (
            w(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        grouped = q.shape[1] != k.shape[1]
        if grouped and x.dtype == torch.float32:
            # On a GPU, no fused kernel of this dtype takes heads that are shared.
            k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for y in (k, v))
            grouped = False
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        joined: Tensor = self.wo(out.transpose(1, 2).reshape(batch, seq, -1))
        return joined


def rotary_tables(seq: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position x frequency, fp32 [T, C / 2], on the device of ``like``."""
    channels = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32)
    positions = torch.arange(seq, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, theta ** (-channels / head_dim))
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (c, c + C / 2) of x [B, heads, T, C] by the angle of their position."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class SwiGLU(nn.Module):
    """A feed-forward of three matrices."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]."""
        done: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return done


class MLP(nn.Module):
    """A feed-forward of two matrices, with GELU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.dim, shape.ffn)
        self.down = nn.Linear(shape.ffn, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]."""
        done: Tensor = self.down(F.gelu(self.up(x)))
        return done


class Experts(nn.Module):
    """SwiGLU feed-forwards, each of which takes the tokens that its router scores highest."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.share = shape.active / shape.experts
        self.router = nn.Linear(shape.dim, shape.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(shape.experts, shape.dim, shape.ffn))
        self.up = nn.Parameter(torch.empty(shape.experts, shape.dim, shape.ffn))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.ffn, shape.dim))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]."""
        tokens = x.flatten(0, -2)
        taken = max(1, round(len(tokens) * self.share))
        weight, index = self.router(tokens).softmax(-1).topk(taken, dim=0)
        chosen = tokens[index.T]  # [experts, taken, D]
        inner = F.silu(torch.bmm(chosen, self.gate)) * torch.bmm(chosen, self.up)
        done = (torch.bmm(inner, self.down) * weight.T.unsqueeze(-1)).flatten(0, 1)
        return torch.zeros_like(tokens).index_add(0, index.T.flatten(), done).view_as(x)


class Block(nn.Module):
    """Attention and a feed-forward; sharded as one unit."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = nn.LayerNorm if shape.patch else nn.RMSNorm
        self.attention_norm = norm(shape.dim, NORM_EPS)
        self.attention = Attention(shape)
        self.mlp_norm = norm(shape.dim, NORM_EPS)
        kind = MLP if shape.patch else Experts if shape.experts else SwiGLU
        self.mlp = kind(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, D]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        done: Tensor = x + self.mlp(self.mlp_norm(x))
        return done


class Model(nn.Module):
    """Blocks between an embedding of tokens or patches, and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        if shape.patch:
            self.embed: nn.Module = nn.Linear(3 * shape.patch**2, shape.dim)
        else:
            self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        norm = nn.LayerNorm if shape.patch else nn.RMSNorm
        self.norm = norm(shape.dim, NORM_EPS)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T], or patches [B, T, 3 * patch * patch]; to logits."""
        head_dim = self.shape.head_dim or self.shape.dim // self.shape.heads
        cos, sin = rotary_tables(x.shape[1], head_dim, self.shape.theta, x)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        logits: Tensor = self.head(x.mean(1) if self.shape.patch else x)
        return logits


Batch = tuple[Tensor, Tensor]


def make_batch(shape: Shape, count: int, seq: int | None = None) -> Batch:
    """Inputs and targets of ``count`` sequences or images."""
    seq = seq or shape.seq
    if shape.patch:
        patches = torch.zeros(count, seq, 3 * shape.patch**2)
        return patches, torch.zeros(count, dtype=torch.int64)
    tokens = torch.zeros(count, seq, dtype=torch.int64)
    return tokens, torch.zeros(count, seq, dtype=torch.int64)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, in fp32."""
    inputs, targets = batch
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
