"""Published throughputs and memory beside plans of the same configurations. No GPU, no processes.

    python -m benchmarks.published              # tables: the errors of plans
    python -m benchmarks.published --fit h100   # figures of a preset from the calibrating half

Presets of GPUs are calibrated with every second row of a published table of MPT models, and with
nothing else. The other half is held back, and so are rows of another implementation (torchtitan).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp2
from fsdp2.planning.hardware import Attained, Hardware, load
from fsdp2.planning.planner import Plan
from fsdp2.planning.presets import PRESETS, Block, Model, Shape, loss, make_batch

FOLDER = Path(__file__).parent / "results" / "plan"
MIXED = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALVES = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

# ---- MPT: fused attention, GELU, layer norms, no biases, tied embeddings

SIZES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Width, blocks and heads: scripts/train/yamls/pretrain of llm-foundry."""
VOCABULARY = 50368


class MptBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(dim, bias=False)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm_2 = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]."""
        batch, seq, dim = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.heads, dim // self.heads)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, dim))
        done: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return done


class Mpt(nn.Module):
    def __init__(self, size: str, seq: int) -> None:
        super().__init__()
        dim, blocks, heads = SIZES[size]
        self.embed, self.positions = nn.Embedding(VOCABULARY, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(MptBlock(dim, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [B, T]; returns logits [B, T, V]."""
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


@dataclass(frozen=True)
class Row:
    """A configuration that somebody measured: tokens per second and GPU, memory in GiB."""

    name: str
    hardware: str
    ranks: int
    tokens: float
    plan: Callable[[], Plan]
    calibrates: bool = False
    memory: float = 0.0
    differs: str = "-"

    def error(self, made: Plan) -> float:
        """How much faster the plan is than what was measured, a part of it."""
        return made.tokens_per_second / self.ranks / self.tokens - 1


def _mpt_row(place: int, found: Sequence[Any]) -> Row:
    size, seq, ranks, machine, batch, accumulate, recomputes, reduced, tokens = found

    def make() -> Plan:
        return fsdp2.plan(
            lambda: Mpt(size, seq),
            lambda count: torch.zeros(count, seq, dtype=torch.int64),
            units={MptBlock},
            loss=lambda model, x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()),
            mesh=ranks,
            hardware=machine.split()[0],
            batch=batch,
            accumulate=min(accumulate, 2),  # more of them change a token's time by little
            reduce_each=True,
            checkpointing=recomputes,
            precision=MIXED if reduced == "fp32" else HALVES,
            clip=1.0,
        )

    name = f"MPT {size}, {seq} tokens, batch {batch}"
    return Row(name, machine.split()[0], ranks, tokens, make, calibrates=place % 2 == 0)


def mpt_rows(machine: str) -> list[Row]:
    """Those of a preset, the calibrating ones and the others in turn."""
    rows = json.loads((FOLDER / "published_mpt.json").read_text(encoding="utf-8"))["rows"]
    own = [row for row in rows if row[3].split()[0] == machine]
    return [_mpt_row(place, row) for place, row in enumerate(own)]


# ---- torchtitan: docs/performance.md, and benchmarks/llama3_h100_202412_torchtitan.md

_LLAMA2 = {
    "13B": Shape(5120, 40, 13824, 40, 40, 32000, 4096),
    "70B": Shape(8192, 80, 28672, 64, 8, 32000, 4096),
}
_POWER = "500 W, 2.4 TB/s and 96 GB; recomputes by operator, the plan every second block"


def _titan(
    name: str,
    shape: Shape,
    machine: str,
    ranks: int,
    batch: int,
    every: int,
    tokens: float,
    **more: Any,
) -> Row:
    def make() -> Plan:
        return fsdp2.plan(
            lambda: Model(shape),
            lambda count: make_batch(shape, count),
            units={Block},
            loss=loss,
            mesh=ranks,
            hardware=machine,
            batch=batch,
            checkpointing=True if every == 1 else every,
            precision=MIXED,
            clip=1.0,
        )

    return Row(name, machine, ranks, tokens, make, **more)


def titan_rows() -> list[Row]:
    """All held back."""
    small, large = PRESETS["llama-8b"], PRESETS["llama-70b"]
    return [
        _titan("Llama 3 8B", small, "a100", 64, 1, 2, 2904),
        _titan("Llama 3 70B", large, "a100", 64, 1, 1, 331),
        _titan("Llama 2 13B, nothing recomputed", _LLAMA2["13B"], "a100", 64, 2, 0, 2162),
        _titan("Llama 2 13B", _LLAMA2["13B"], "a100", 64, 2, 2, 1914),
        _titan("Llama 2 70B", _LLAMA2["70B"], "a100", 64, 2, 1, 353),
        _titan("Llama 3.1 8B", small, "h100", 8, 2, 2, 5762, memory=82.4, differs=_POWER),
        _titan("Llama 3.1 8B", small, "h100", 128, 2, 2, 5605, memory=67.0, differs=_POWER),
    ]


# ---- how far plans are off


def told(errors: Sequence[float]) -> str:
    """Errors in a line."""
    within = sum(abs(each) <= 0.1 for each in errors)
    worst = max(errors, key=abs)
    return (
        f"{len(errors)} rows, mean {statistics.mean(errors):+.1%}, mean of absolute errors "
        f"{statistics.mean(map(abs, errors)):.1%}, {within} within 10 %, the worst {worst:+.0%}"
    )


def print_rows(rows: Sequence[Row]) -> None:
    """A line for each, then the error of each part."""
    print(
        "| model | GPUs | planned, tokens/s/GPU | published | error | planned, GiB "
        "| published | fits | differences in setup |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        made = row.plan()
        errors[row.calibrates].append(row.error(made))
        print(
            f"| {row.name} | {row.ranks} x {row.hardware} "
            f"| {made.tokens_per_second / row.ranks:,.0f} | {row.tokens:,.0f} "
            f"| {row.error(made):+.0%} | {made.memory.peak.rounded / 2**30:.1f} "
            f"| {row.memory or '-'} | {'yes' if made.fits else 'no'} "
            f"| {'calibrates' if row.calibrates else row.differs} |",
            flush=True,
        )
    for calibrates, found in errors.items():
        if found:
            print(f"\n{'calibrating' if calibrates else 'held back'}: {told(found)}")


# ---- a preset's figures

FITTED = ("flops", "forward", "backward", "unfused", "straggling")


def _with(machine: Hardware, figures: dict[str, float]) -> Hardware:
    scaled = figures["flops"] / machine.flops["bfloat16"]
    halves = {name: machine.flops[name] * scaled for name in ("bfloat16", "float16")}
    return replace(
        machine,
        flops={**machine.flops, **halves},
        attained=Attained(
            attention={name: figures[name] for name in ("forward", "backward")},
            unfused=figures["unfused"],
            straggling=figures["straggling"],
        ),
    )


def fit(name: str) -> None:
    """The figures that make the mean of absolute errors least, by steps of ever smaller size."""
    machine = load(name)
    rate = machine.flops["bfloat16"]
    now = {"flops": rate, "forward": rate, "backward": rate / 2, "unfused": 0.4, "straggling": 0.02}
    rows = [(row, row.plan()) for row in mpt_rows(name) if row.calibrates]

    def error(figures: dict[str, float]) -> float:
        other = _with(machine, figures)
        return statistics.mean(abs(row.error(made.with_(hardware=other))) for row, made in rows)

    least, step = error(now), 1.3
    while step > 1.01:
        moved = False
        for figure in FITTED:
            for factor in (step, 1 / step):
                tried = {**now, figure: now[figure] * factor}
                found = error(tried)
                if found < least:
                    least, now, moved = found, tried, True
        if not moved:
            step **= 0.5
        print(f"{least:.2%} { ({key: f'{value:.3g}' for key, value in now.items()}) }", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--fit", metavar="PRESET", help="calibrate h100 or a100")
    given = parser.parse_args()
    if given.fit:
        fit(given.fit)
        return
    for rows in (mpt_rows("h100"), mpt_rows("a100"), titan_rows()):
        print_rows(rows)
        print()


if __name__ == "__main__":
    main()
