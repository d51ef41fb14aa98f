"""The byte-level decoders of `train_lm`: models of `fsdp2.planning.presets`, filled part by part.

A model may be built on the meta device and filled block by block (`reset_parameters`): a
parameter's initial values depend only on the seed and its full name, not on the order of filling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp2.planning.presets import PRESETS as PUBLISHED
from fsdp2.planning.presets import Model, Shape

BYTES = 256  # the vocabulary

PRESETS: dict[str, Shape] = {
    "tiny": Shape(64, 2, 192, 4, 2, BYTES, theta=10_000.0),
    "small": Shape(128, 4, 384, 4, 2, BYTES, theta=10_000.0),
    "medium": Shape(512, 8, 1408, 8, 4, BYTES, theta=10_000.0),
    "llama-1b": replace(PUBLISHED["llama-1b"], vocab=BYTES),
    "llama-8b": replace(PUBLISHED["llama-8b"], vocab=BYTES),
}


def parts(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of what holds the parameters, in order of use; each block is one part."""
    for name, child in model.named_children():
        if child is model.blocks:
            yield from ((f"{name}.{index}", block) for index, block in enumerate(model.blocks))
        else:
            yield name, child


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
def reset_parameters(module: nn.Module, shape: Shape, seed: int, prefix: str = "") -> None:
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
        std = 0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02
        param.normal_(0.0, std, generator=generator)
