"""Llama-like decoders of known sizes: those of `fsdp2.planning.presets`, filled in place.

A model is built on the meta device, sharded, given memory with `to_empty` and only then filled, so
that no rank holds it whole. Each of its ``blocks`` becomes one unit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2.planning.presets import Model, Shape
from fsdp2.testing.blocks import fill_normal, local

PRESETS = {
    # 1.10 B parameters: Llama 3's block shapes at 1 B scale
    "1.1b": Shape(2048, 16, 8192, 16, 4, 32000, 2048),
    # 2.83 B parameters: Llama 3 8 B's block, 12 of them
    "2.8b": Shape(4096, 12, 14336, 32, 4, 32000, 8192),
    # 1.92 B parameters, of which a token meets 0.47 B
    "1.9b-moe": Shape(2048, 12, 1408, 16, 4, 32000, 4096, 16, 2),
    # Every shard at world size 8 is a multiple of 16 bytes; bound by the host, and by kernels.
    "tiny": Shape(64, 3, 128, 4, 2, 256, 16),
    "tiny-moe": Shape(64, 2, 32, 4, 2, 256, 16, 8, 2),
    "tiny-wide": Shape(256, 8, 128, 4, 2, 256, 64),
}


class Decoder(Model):
    """A preset's model, with `reset_parameters`."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for name, param in self.named_parameters():
            if name.endswith("norm.weight"):
                local(param).fill_(1.0)
            else:
                fill_normal(param, 0.02)


def tokens_of(shape: Shape, batch: int, device: torch.device | str = "cpu") -> Tensor:
    """Inputs and targets: [2, batch, seq]."""
    return torch.randint(shape.vocab, (2, batch, shape.seq)).to(device)


def recompute_blocks(model: nn.Module) -> None:
    """Activation checkpointing of each block; before it is sharded."""

    def recomputed(block: nn.Module) -> None:
        run = block.forward
        block.forward = lambda *args: checkpoint(run, *args, use_reentrant=False)

    for block in model.blocks:
        recomputed(block)
