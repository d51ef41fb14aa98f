"""A vision transformer of ten billion parameters, sharded while ``fsdp2.wrap.deferred`` makes it.

    fsdp2 plan vit-10b --ranks 128                              # the memory of each rank, on paper
    python -m fsdp2.examples.vit_10b --size 0.5b --nproc 2      # for real, on this machine's CPUs
    torchrun --nnodes 16 --nproc-per-node 8 … -m fsdp2.examples.vit_10b --precision bf16

The model is the one that `fsdp2 plan` knows. No process ever holds the whole of it: a block is
made, filled, sharded and freed before the next one is made, and a block is the unit that training
gathers. Images are random numbers, a pure function of (seed, step), so printed losses do not depend
on the number of ranks.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp2 import MixedPrecisionPolicy, xla
from fsdp2.planning.presets import PRESETS, Block, Model, Shape
from fsdp2.wrap import deferred

from . import launch, reporting
from .flags import Common, GivenRanks, check, count, flag, parsed, rate
from .reporting import amount, say

MODULE = "fsdp2.examples.vit_10b"

SIZES: dict[str, Shape] = {
    "tiny": Shape(64, 4, 256, 4, 4, vocab=10, seq=4, patch=14),
    "0.5b": Shape(1536, 18, 6144, 16, 16, vocab=1000, seq=256, patch=14),
    "1b": Shape(2048, 20, 8192, 16, 16, vocab=1000, seq=256, patch=14),
    "10b": PRESETS["vit-10b"],
}
"""Shapes by name: an image is ``seq`` patches of 14 x 14 pixels, of ``vocab`` classes."""


@dataclass(frozen=True)
class Options(Common):
    """A run, complete."""

    size: str = flag("parameters (10b)", choices=list(SIZES), default="10b")
    image: int = flag("pixels per side of an image (the size's)", count, metavar="PIXELS")
    steps: int = flag("optimizer steps", count, 2)
    batch_size: int = flag("images per step, over all ranks (4 or more)", count)
    precision: str = flag("dtype of compute (fp32)", choices=["fp32", "bf16"], default="fp32")
    lr: float = flag("learning rate", rate, 1e-4)

    @property
    def shape(self) -> Shape:
        shape = SIZES[self.size]
        return replace(shape, seq=(self.image // shape.patch) ** 2) if self.image else shape

    @property
    def policy(self) -> MixedPrecisionPolicy:
        if self.precision == "fp32":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def parse(argv: Sequence[str], ranks: GivenRanks | None) -> Options:
    """The checked options of this run; `UsageError` says what is wrong with them."""
    options = parsed(Options, "vit_10b", __doc__.partition("\n")[0], argv, ranks)
    size = options.world_size
    batch_size = options.batch_size or math.ceil(4 / size) * size
    patch = options.shape.patch
    check(
        (
            options.image and options.image % patch,
            f"--image {options.image} is no multiple of a patch's {patch} pixels",
        ),
        (
            batch_size % size,
            f"--batch-size {batch_size} does not divide over {size} ranks",
        ),
    )
    return replace(options, batch_size=batch_size)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a worker failed, 2 wrong usage, 128 + n ended by signal n."""
    return launch.main(MODULE, argv, parse, train)


def build_model(options: Options, device: torch.device) -> Model:
    """The sharded model, made block by block, with the weights of one that is made whole."""
    torch.manual_seed(options.seed)
    with device, deferred(None, {Block}, mp_policy=options.policy):
        model = Model(options.shape)
    for block in model.blocks:
        xla.checkpoint_module(block)  # a block keeps its input alone
    return model


def construction(options: Options) -> tuple[int, int, int]:
    """The most bytes of a rank while the model is made: of its shards, one block, the root."""
    with torch.device("meta"):
        model = Model(options.shape)
    block = sum(param.nbytes for param in model.blocks[0].parameters())
    whole = sum(param.nbytes for param in model.parameters())
    return whole // options.world_size, block, whole - block * len(model.blocks)


def images_and_labels(shape: Shape, seed: int, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """The whole batch of one step: patches fp32 [B, T, 3 * patch * patch] and labels int64 [B]."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    patches = torch.randn(batch_size, shape.seq, 3 * shape.patch**2, generator=generator)
    return patches, torch.randint(shape.vocab, (batch_size,), generator=generator)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> Tensor:
    """One optimizer step; this rank's mean loss, fp64 [] on the device."""
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(images).float(), labels)
    loss.backward()
    optimizer.step()
    return loss.detach().double()


def train(options: Options) -> int:
    """A rank's work; its exit code."""
    with launch.process_group(options) as device:
        before, begin = reporting.peak_memory(device), time.perf_counter()
        model = build_model(options, device)
        seconds = time.perf_counter() - begin
        grown = _of_all_ranks(reporting.peak_memory(device) - before, device)
        parts = construction(options)
        shards, block, root = map(amount, parts)
        numel = sum(param.numel() for param in model.parameters())
        say(
            f"{options.size}: {numel:,} parameters, {options.precision}, {options.world_size} "
            f"rank(s) on {device.type}, threads per rank: {options.threads}; made in "
            f"{seconds:.1f} s\n"
            f"A rank may hold {amount(sum(parts))} while the model is made: shards {shards}, "
            f"one block {block}, the root's own {root}; memory has grown by "
            f"{', '.join(map(amount, grown))}",
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
        share = options.batch_size // options.world_size
        mine = slice(options.rank * share, (options.rank + 1) * share)
        for step in range(options.steps):
            begin = time.perf_counter()
            batch = images_and_labels(options.shape, options.seed, step, options.batch_size)
            images, labels = (part[mine].to(device) for part in batch)
            loss = train_step(model, optimizer, images, labels)
            dist.all_reduce(loss)
            mean = loss.item() / options.world_size
            seconds = time.perf_counter() - begin
            say(f"step {step + 1}/{options.steps}  loss {mean:.4f}  {seconds:.2f} s")
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss of step {step + 1} is {mean}: lower --lr")
        held = _of_all_ranks(reporting.state_bytes(model.parameters(), optimizer)[0], device)
        say(
            f"Parameters, gradients, optimizer: each rank holds "
            f"{', '.join(map(amount, held))}; 4 x shards are {amount(4 * parts[0])}",
        )
    return 0


def _of_all_ranks(value: int, device: torch.device) -> list[int]:
    each = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    each[dist.get_rank()] = value
    dist.all_reduce(each)
    return cast("list[int]", each.tolist())


if __name__ == "__main__":
    sys.exit(main())
