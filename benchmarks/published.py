"""Published throughputs and memory beside plans of the same configurations. No GPU, no processes.

    python benchmarks/published.py

The published figures are of other implementations, versions and machines. A plan of the right order
shows that no part is forgotten, not that it is exact: each row says what differs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

import fsdp2
from fsdp2.paper.recording import GATHERED, GRADIENTS, OPTIMIZER, SHARDS, Operation
from fsdp2.planning.memory import Ledger
from fsdp2.planning.presets import PRESETS, Block, Model, Shape, loss, make_batch

TITAN = "torchtitan, docs/performance.md"
MOSAIC = "llm-foundry, scripts/train/benchmarking/README.md"
MIXED = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Published:
    """A configuration.

    Attributes:
        name: of the model.
        shape: of the model, or of one with as many FLOPs.
        hardware: of the plan.
        ranks: GPUs.
        batch: sequences of a micro-batch.
        accumulate: micro-batches.
        checkpointing: every n-th block.
        tokens: a second and GPU, as published.
        source: where.
        differs: what is not the same.
        memory: GiB, as published; 0: not published.
    """

    name: str
    shape: Shape
    hardware: str
    ranks: int
    batch: int
    accumulate: int
    checkpointing: int
    tokens: float
    source: str
    differs: str
    memory: float = 0.0


def _mpt(dim: int, layers: int) -> Shape:
    """MPT has two matrices of 4 x dim in a feed-forward; three of 8 / 3 have as many FLOPs."""
    return Shape(dim, layers, -(-dim * 8 // 3 // 64) * 64, dim // 128, dim // 128, 50368, 2048)


_SELECTIVE = "recomputes by operator, the plan every second block"
_TABLE = (
    Published("Llama 3 8B", PRESETS["llama-8b"], "a100", 64, 1, 1, 2, 2904, TITAN, "-"),
    Published("Llama 3 70B", PRESETS["llama-70b"], "a100", 64, 1, 1, 1, 331, TITAN, "-"),
    Published(
        *("Llama 3.1 8B", PRESETS["llama-8b"], "h100", 8, 2, 1, 2, 5762, TITAN),
        f"500 W, 2.4 TB/s HBM2e; {_SELECTIVE}",
        82.4,
    ),
    Published("MPT 7B", _mpt(4096, 32), "h100", 8, 6, 1, 0, 10643, MOSAIC, "other layers"),
    Published("MPT 13B", _mpt(5120, 40), "h100", 64, 2, 1, 0, 4800, MOSAIC, "other layers"),
    Published("MPT 70B", _mpt(8192, 80), "h100", 64, 8, 4, 1, 1039, MOSAIC, "other layers"),
)


def row(found: Published) -> str:
    """A row of the table."""
    made = fsdp2.plan(
        lambda: Model(found.shape),
        lambda count: make_batch(found.shape, count),
        units={Block},
        loss=loss,
        mesh=found.ranks,
        hardware=found.hardware,
        batch=found.batch,
        accumulate=found.accumulate,
        reduce_each=True,
        checkpointing=True if found.checkpointing == 1 else found.checkpointing,
        precision=MIXED,
    )
    planned = made.tokens_per_second / found.ranks
    memory = f"{made.memory.peak.rounded / 2**30:.1f}"
    return (
        f"| {found.name} | {found.ranks} x {found.hardware} | {planned:,.0f} | {found.tokens:,.0f} "
        f"| {planned / found.tokens - 1:+.0%} | {memory} | {found.memory or '-'} "
        f"| {found.source} | {found.differs} |"
    )


# ---- the stage table of ZeRO

ZERO = Shape(4096, 36, 11008, 32, 32, 25216, 128)
"""7.5 billion parameters."""
STAGES = (
    ("0", (64, 1), True, 120.0, "-"),
    ("2", (64,), False, 16.6, "ours keeps fp32 shards and reduces in fp32, beside bf16 parameters"),
    ("3", (64,), True, 1.9, "-"),
)


def zero_row(stage: str, mesh: tuple[int, ...], frees: bool, published: float, differs: str) -> str:
    """States of the model when the optimizer steps, in GB of 10^9, of figure 1's 7.5 B column."""
    made = fsdp2.plan(
        lambda: Model(ZERO),
        lambda count: make_batch(ZERO, count),
        units={Block},
        loss=loss,
        mesh=mesh,
        precision=MIXED,
        reshard_after_backward=frees,
    )
    recording = made.rehearsal.recording
    ledger = Ledger(recording, 1)
    for note in recording.notes:
        if isinstance(note, Operation) and note.phase == "optimizer":
            break
        ledger.take(note)
    found = sum(ledger.totals[name] for name in (SHARDS, GATHERED, GRADIENTS, OPTIMIZER)) / 1e9
    return (
        f"| {stage} | {made.rehearsal.parameters / 1e9:.2f} B | {found:.1f} | {published} "
        f"| {found / published - 1:+.0%} | {differs} |"
    )


def main() -> None:
    print(
        "| model | GPUs | planned, tokens/s/GPU | published | plan is off | planned, GiB "
        "| published | source | what differs |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for found in _TABLE:
        print(row(found), flush=True)
    print("\n| stage | parameters | planned, GB | published | plan is off | what differs |")
    print("|---|---|---|---|---|---|")
    for stage in STAGES:
        print(zero_row(*stage), flush=True)


if __name__ == "__main__":
    main()
