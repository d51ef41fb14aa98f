"""fsdp2's schedule, stream by stream, as a planned step (`fsdp2.plan`). No processes.

    python benchmarks/streams.py --to streams.json      # and streams.html, to look at

Four equal blocks of 200 M parameters in mixed precision over 8 ranks, and 2 copies (HSDP), on
H100s. The page is about what waits for what (docs/streams.md), not about speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.tracing import Timeline, show

BLOCKS, WIDTH, TOKENS = 4, 10_240, 8192
GATHERED = 2 * 2 * WIDTH**2
"""Bytes of an unsharded block, in bf16."""


class Block(nn.Module):
    """Two square matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Stack(nn.Module):
    """The blocks, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


def schedule(copies: int = 2) -> Timeline:
    """A steady step of the blocks, on this number of replicas."""
    made = fsdp2.plan(
        Stack,
        lambda: torch.zeros(TOKENS, WIDTH),
        units={Block},
        mesh=(copies, 8) if copies > 1 else 8,
        precision=fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    return made.timeline()


def orders(timeline: Timeline) -> list[tuple[str, str, str, int]]:
    """(lane that waits, lane it waits for, order, how often), the most frequent first."""
    found: dict[tuple[str, str, str], int] = {}
    for wait in timeline.waits:
        key = (wait.lane, wait.on, wait.label)
        found[key] = found.get(key, 0) + 1
    return sorted(((*key, count) for key, count in found.items()), key=lambda each: -each[3])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print which lane waits for which; write the timeline and its page, if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", metavar="FILE", help="a timeline's file; its page goes beside it")
    options = parser.parse_args(arguments)
    timeline = schedule()
    print("| lane | waits for | order | times |\n|---|---|---|---|")
    for lane, on, label, count in orders(timeline):
        print(f"| {lane} | {on} | {label} | {count} |")
    if options.to:
        timeline.write(options.to)
        print(show(options.to))
    return 0


if __name__ == "__main__":
    sys.exit(main())
