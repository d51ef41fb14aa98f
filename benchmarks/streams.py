"""fsdp2's schedule, stream by stream, as a timeline on paper. No processes.

    python -m benchmarks.streams --to streams.json      # and streams.html, to look at

Four equal blocks in mixed precision over 8 ranks, and 2 copies (HSDP), in a steady step.
Durations are made up, and in the proportion of a block of 200 M parameters on eight GPUs: the page
is about what waits for what (docs/streams.md), not about speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from fsdp2.core.config import MixedPrecisionPolicy
from fsdp2.record.notes import Allocation, Operation
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.timeline import timeline_of
from fsdp2.testing.virtual import VirtualDevice
from fsdp2.tracing import Timeline, show

BLOCKS = 4
PARAMS = 200e6

MICROSECONDS = {
    "forward": 2200.0,
    "backward": 4400.0,
    "all_gather": 1400.0,
    "reduce_scatter": 2000.0,
    "all_reduce": 900.0,
    "copy": 150.0,
    "step": 120.0,
}
"""What an operation of a block takes; all others take nothing."""

GATHERED, REDUCED = round(2 * PARAMS), round(4 * PARAMS)
BYTES = {
    "gathered": ("gathered", GATHERED),
    "gradient": ("gradients", GATHERED),
    "reduce-scatter input": ("reduction buffers", REDUCED),
    "reduce-scatter output": ("reduction buffers", REDUCED // 8),
    "activation": ("activations", 256 << 20),
}
"""Category and bytes of a block's buffers, by how their names begin."""


def took(op: Operation) -> float:
    """What an operation takes, in µs."""
    kind, _, unit = op.kind.partition(" ")
    return 0.0 if unit == "root" else MICROSECONDS.get(kind, 0.0)


def size(buffer: Allocation) -> tuple[str, int]:
    """Category and bytes of a buffer."""
    for name, found in BYTES.items():
        if buffer.name.startswith(name):
            return found
    return "temporary", 0


def schedule(copies: int = 2) -> Timeline:
    """A steady step of the blocks, over so many replicas."""
    names = [f"blocks.{number}" for number in range(BLOCKS)]
    leaves = [Node(name, shapes=((8, 8),)) for name in names]
    device = VirtualDevice()
    root = Node("root", leaves, list(range(BLOCKS)), shapes=())
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    simulation = Simulation(root, device, 8, precision=precision, copies=copies)
    simulation.iteration()
    start = len(device.trace)
    simulation.iteration()
    return timeline_of(
        device.trace[start:],
        took,
        size=size,
        one_at_a_time=("all_gather", "reduce_scatter"),
        metadata={"title": "a step of four blocks, on paper", "world_size": 8 * copies},
    )


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
