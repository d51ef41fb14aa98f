"""What each strategy of `shard_model` allocates in the course of a step, as planned. No GPU.

    python benchmarks/strategy_memory.py                                   # a table of peaks
    python benchmarks/strategy_memory.py --json benchmarks/results/plan/strategies.json

The model is a Llama of 1.5 billion parameters on 8 ranks of an H100 node, one sequence of 1,024
tokens each: fp32 shards and AdamW, bf16 compute. Bytes are those of tensors; times are planned. Of
each of `SAMPLES` equal parts of the step the fullest moment counts, so that no peak is lost.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from benchmarks import stats
from fsdp2.planning.presets import PRESETS, Block, Model
from fsdp2.record import categories

PRESET, SEQ, RANKS, SAMPLES = "llama-1b", 1024, 8, 160
STRATEGIES = ("replicated", "zero1", "zero2", "zero3")
PARAMETERS, STATES, GRADIENTS = "parameters", "optimizer states", "gradients"
UNSHARDED, ACTIVATIONS, TEMPORARY = "unsharded units", "activations", "temporary results"
SHOWN = {
    categories.SHARDS: PARAMETERS,
    categories.OPTIMIZER: STATES,
    categories.GRADIENTS: GRADIENTS,
    categories.REDUCTIONS: GRADIENTS,
    categories.GATHERED: UNSHARDED,
    categories.KEPT: UNSHARDED,
    categories.ACTIVATIONS: ACTIVATIONS,
    categories.TEMPORARY: TEMPORARY,
    categories.MODEL: TEMPORARY,
}
"""The categories of a plan, by the names that a newcomer knows."""


def planned(strategy: Any) -> fsdp2.planning.Plan:
    """A step with this strategy."""
    shape = replace(PRESETS[PRESET], seq=SEQ)
    precision = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(1, SEQ, dtype=torch.int64)
        return tokens, tokens

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        logits = model(batch[0]).flatten(0, 1)
        return F.cross_entropy(logits.float(), batch[1].flatten())

    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        fsdp2.shard_model(model, {Block}, strategy=strategy, mesh=mesh, mp_policy=precision)

    mesh = (RANKS, 1) if strategy == "replicated" else RANKS
    return fsdp2.plan(
        lambda: Model(shape), make_batch, shard=shard, loss=loss, mesh=mesh, hardware="h100"
    )


def course(plan: fsdp2.planning.Plan) -> dict[str, Any]:
    """Milliseconds and megabytes of a plan: its end, phases, peak, and moments."""
    end = plan.time.step * 1e3
    fullest: list[Counter[str]] = [Counter() for _ in range(SAMPLES)]
    last, reached = Counter[str](), 0
    for moment in plan.timeline().memory:
        part = min(int(moment.time / 1e3 / end * SAMPLES), SAMPLES - 1)
        for between in range(reached, part + 1):
            fullest[between] = max(fullest[between], last, key=Counter.total)
        last, reached = _shown(moment.bytes), part
        fullest[part] = max(fullest[part], last, key=Counter.total)
    fullest[reached + 1 :] = [last] * (SAMPLES - 1 - reached)
    moments = [[round(n * end / SAMPLES, 2), _megabytes(each)] for n, each in enumerate(fullest)]
    begins: dict[str, float] = {}
    for span in plan.timing.spans:
        if span.operation.kind == "compute":
            begins.setdefault(span.operation.phase, span.start * 1e3)
    return {
        "end": round(end, 2),
        "phases": {phase: round(when, 2) for phase, when in begins.items()},
        "peak": _megabytes(_shown(plan.memory.peak.categories)),
        "before": _megabytes(_shown(plan.memory.before.categories)),
        "moments": [
            each for n, each in enumerate(moments) if not n or each[1] != moments[n - 1][1]
        ],
    }


def _shown(found: Mapping[str, int]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for category, nbytes in found.items():
        totals[SHOWN[category]] += nbytes
    return totals


def _megabytes(found: Mapping[str, int]) -> dict[str, int]:
    return {name: round(nbytes / 1e6) for name, nbytes in found.items() if nbytes > 5e5}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="write results here, too")
    options = parser.parse_args(arguments)
    results = {strategy: course(planned(strategy)) for strategy in STRATEGIES}
    kinds = (PARAMETERS, STATES, GRADIENTS, UNSHARDED, ACTIVATIONS, TEMPORARY)
    rows = [
        (name, *(found["peak"].get(kind, 0) for kind in kinds), sum(found["peak"].values()))
        for name, found in results.items()
    ]
    print(stats.table(("at the peak, MB", *kinds, "all"), rows))
    if options.json:
        facts = {"environment": stats.environment("cpu"), "results": results}
        Path(options.json).write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
