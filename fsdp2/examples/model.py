"""A byte-level Llama-style transformer: RMSNorm, rotary grouped-query attention, SwiGLU.

Shapes: B sequences, T positions, D = ``dim``, H query heads, K key/value heads (H a multiple of K),
C = D / H channels per head, F = ``hidden_dim``, V = ``vocab_size``.

    tokens [B, T] --embed--> [B, T, D] --L x Block--> [B, T, D] --norm, head--> logits [B, T, V]

    Block:  x = x + attention(norm(x));  x = x + mlp(norm(x))

A model may be built on the meta device and filled block by block (`reset_parameters`): a
parameter's initial values depend only on the seed and its full name, not on the order of filling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix every parameter's shape, and the two constants of rotary and norm."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    vocab_size: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def largest_dim(self) -> int:
        """The largest first dim of any parameter: with more ranks, some would hold only padding."""
        return max(self.vocab_size, self.hidden_dim, self.dim)


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=192),
    "small": ModelConfig(dim=128, num_layers=4, num_heads=4, num_kv_heads=2, hidden_dim=384),
    "medium": ModelConfig(dim=512, num_layers=8, num_heads=8, num_kv_heads=4, hidden_dim=1408),
    "llama-1b": ModelConfig(2048, 16, 32, 8, hidden_dim=8192, rope_theta=500_000.0),
    "llama-8b": ModelConfig(4096, 32, 32, 8, hidden_dim=14336, rope_theta=500_000.0),
}


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_tables(
    seq_len: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position x frequency, each fp32 [seq_len, head_dim / 2]."""
    channels = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    frequencies = theta ** (-channels / head_dim)
    positions = torch.arange(seq_len, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (c, c + C/2) of x [B, heads, T, C] by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which H / K query heads share one key/value head.

    The number of heads is read from the projections' outputs: a tensor-parallel rank has its own
    H / T and K / T of them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.share = config.num_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = apply_rotary(self._heads(self.wq(x)), cos, sin)  # [B, H, T, C]
        k = apply_rotary(self._heads(self.wk(x)), cos, sin)  # [B, K, T, C]
        v = self._heads(self.wv(x))
        # Repeated: `enable_gqa=True` would leave the fast kernels on the CPU and in fp32.
        k, v = k.repeat_interleave(self.share, dim=1), v.repeat_interleave(self.share, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, heads * C] -> [B, heads, T, C]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), D -> F -> D."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One transformer layer, and what is sharded as one group."""

    def __init__(self, config: ModelConfig, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            # Inside the module's hooks: the parameters are gathered once for recomputation and
            # backward together. There is no dropout, hence no RNG state to keep.
            return checkpoint(
                self._layers, x, cos, sin, use_reentrant=False, preserve_rng_state=False
            )
        return self._layers(x, cos, sin)

    def _layers(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """tokens, int64 [B, T] -> logits [B, T, V] in the dtype of the parameters."""

    def __init__(self, config: ModelConfig, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(
            Block(config, activation_checkpointing) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        config = self.config
        cos, sin = rotary_tables(tokens.shape[1], config.head_dim, config.rope_theta, tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of what holds the parameters, in order of use; each block is one part."""
        yield "embed", self.embed
        for index, block in enumerate(self.blocks):
            yield f"blocks.{index}", block
        yield "norm", self.norm
        yield "head", self.head


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each position in nats, fp32 [B * T].

    logits [B, T, V] in any dtype, targets int64 [B, T].
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")


def generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    """The random numbers of one parameter: a function of `seed` and its full name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "big"))


@torch.no_grad()
def reset_parameters(module: nn.Module, config: ModelConfig, seed: int, prefix: str = "") -> None:
    """Fill `module`'s parameters: norms with 1, weights with N(0, 0.02) or narrower.

    Each parameter has a generator of its own, seeded by (seed, `prefix` + name), so a model filled
    part by part equals one filled whole. The values are the same on every CPU, and on every GPU.
    """
    for name, param in module.named_parameters():
        if param.dim() == 1:
            param.fill_(1.0)
            continue
        full_name = f"{prefix}.{name}" if prefix else name
        generator = generator_of(full_name, seed, param.device)
        # Two residual additions a layer: narrower, so that depth does not widen their sum.
        residual = full_name.endswith(("attention.wo.weight", "mlp.down.weight"))
        std = 0.02 / (2 * config.num_layers) ** 0.5 if residual else 0.02
        param.normal_(0.0, std, generator=generator)
