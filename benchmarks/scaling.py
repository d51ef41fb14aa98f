"""How the host time that a sharding runtime adds grows with blocks and with parameters.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --cases 300x1-3 --precision mixed
    python benchmarks/scaling.py --shrink 16 --rounds 1 --steps 2      # only to see it run

Models, process group and step are those of `host_cost.py`, which measures these cases too. They are
blocks x parameters a block:

    32x9     what host_cost.py measures
    128x9    four times the blocks; takes turns with 32x9, to be compared with it
    32x100   many parameters in a unit
    300x1-3  many tiny units, of 1, 2, 3, 1, 2, 3 … parameters
    llama    32 blocks with the parameters of a Llama block: two norms, q, k, v, o, gate, up, down
    moe      32 blocks of two norms, q, k, v, o, a router, and experts in two tensors
    lora     32 frozen Llama blocks with adapters at q and v

The figures to watch: fsdp2 / torch of what is added to "none", for each case (so, too, of what is
added a parameter); and, for each runtime, what it adds a block in 128x9 / in 32x9, which is 1 where
its time is linear in blocks. More ranks: `host_cost.py --world-size 8,1024`, and with
`--rows 16384` up to 16384.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import options as common
from benchmarks import stats, variants, workers

DIM = 16
VARIANTS = ("none", "torch", "fsdp2", "packed", "kept")


@dataclass(frozen=True)
class Case:
    """A model: how many blocks, the numbers of parameters that they have in turn, and of what."""

    blocks: int
    params: tuple[int, ...]
    model: str = "tiny"

    @property
    def parameters(self) -> int:
        """Parameters of all blocks."""
        return sum(self.params[i % len(self.params)] for i in range(self.blocks))

    def shrunk(self, divisor: int) -> Case:
        return replace(self, blocks=max(self.blocks // divisor, 1))


CASES = {
    "32x9": Case(32, (9,)),
    "128x9": Case(128, (9,)),
    "32x100": Case(32, (100,)),
    "300x1-3": Case(300, (1, 2, 3)),
    "llama": Case(32, (9,), "llama"),
    "moe": Case(32, (9,), "moe"),
    "lora": Case(32, (13,), "lora"),
}
# take turns within a line
TOGETHER = (("32x9", "128x9"), ("32x100",), ("300x1-3",), ("llama",), ("moe",), ("lora",))
FEW, MANY = "32x9", "128x9"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Host ms of every case and variant: {"rounds": {case: {variant: [a round]}}, …}."""
    cases = {name: CASES[name].shrunk(options.shrink) for name in options.cases}
    rounds: dict[str, dict[str, list[float]]] = {}
    for line in TOGETHER:
        specs = {
            f"{name} {variant}": make_spec(options, cases[name], variant)
            for name in line
            if name in cases
            for variant in options.variants
        }
        if not specs:
            continue
        with workers.pool("host_cost", specs) as pool:
            answers = workers.take_turns(
                pool, options.rounds, steps=options.steps, clock=options.clock
            )
        for label, each in answers.items():
            name, variant = label.split()
            rounds.setdefault(name, {})[variant] = [answer["host"] for answer in each]
    sizes = sizes_of(cases)
    return {
        "precision": options.precision,
        "cases": sizes,
        "rounds": rounds,
        "ratios": ratios(rounds, sizes),
    }


def sizes_of(cases: dict[str, Case]) -> dict[str, dict[str, int]]:
    """Blocks and parameters of each case."""
    return {name: {"blocks": c.blocks, "parameters": c.parameters} for name, c in cases.items()}


def make_spec(options: argparse.Namespace, case: Case, variant: str) -> dict[str, Any]:
    """A spec of `host_cost.make_worker`."""
    return {
        "blocks": case.blocks,
        "params_per_block": case.params,
        "model": case.model,
        "dim": DIM,
        "device": options.device,
        "c10d": False,
        "variant": variant,
        "precision": options.precision,
        "world_size": options.world_size,
    }


def added(by_variant: dict[str, list[float]], variant: str) -> list[float]:
    """Round by round, ms that a variant adds to none."""
    return stats.added(by_variant[variant], by_variant["none"])


def ratios(
    rounds: dict[str, dict[str, list[float]]], sizes: dict[str, dict[str, int]]
) -> dict[str, stats.Summary]:
    found = {}
    for name, by_variant in rounds.items():
        if not {"none", "torch"} <= by_variant.keys():
            continue
        torchs = added(by_variant, "torch")
        for variant in by_variant:
            if variant not in ("none", "torch"):
                label = f"{name}: ({variant} - none) / (torch - none)"
                found[label] = stats.ratio(added(by_variant, variant), torchs)
    if {FEW, MANY} <= rounds.keys():
        blocks = sizes[MANY]["blocks"] / sizes[FEW]["blocks"]
        for variant in rounds[FEW]:
            if variant != "none" and "none" in rounds[FEW]:
                few, many = (added(rounds[name], variant) for name in (FEW, MANY))
                label = f"{variant}: added a block, {MANY} / {FEW}"
                found[label] = stats.ratio(many, [value * blocks for value in few])
    return found


def table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Header and rows: host time of each case and variant, and what that adds."""
    header = ("case", "variant", "ms a step", "added a block, us", "added a parameter, us")
    rows: list[tuple[object, ...]] = []
    for name, by_variant in result["rounds"].items():
        size = result["cases"][name]
        for variant, values in by_variant.items():
            more = ("", "")
            if variant != "none" and "none" in by_variant:
                us = statistics.median(added(by_variant, variant)) * 1e3
                more = (f"{us / size['blocks']:.1f}", f"{us / size['parameters']:.2f}")
            rows.append((name, variant, stats.summarize(values), *more))
    return header, rows


def report(options: argparse.Namespace, result: dict[str, Any]) -> None:
    values = f"({options.clock} clock), median [min .. max] of {options.rounds} rounds"
    print(f"\n{result['precision']} {values}")
    print(stats.table(*table(result)))
    stats.print_ratios(result["ratios"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="How a runtime's host time grows with blocks and parameters."
    )
    add_models(parser)
    common.add_timing(parser, 10)
    return parser.parse_args(arguments)


def add_models(parser: argparse.ArgumentParser) -> None:
    """Options of which models to take, and the runtimes."""
    parser.add_argument(
        "--cases",
        type=common.among(CASES),
        default=",".join(CASES),
        help=f"comma list of {', '.join(CASES)}",
    )
    parser.add_argument("--shrink", type=int, default=1, help="divide the number of blocks by this")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--precision", choices=variants.PRECISIONS, default="fp32")
    common.add_variants(parser, VARIANTS)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(stats.describe(stats.environment(options.device)))
    stats.write_json(options.json, options.device, measure_and_report(options))


def measure_and_report(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return what was measured."""
    result = measure(options)
    report(options, result)
    return result


if __name__ == "__main__":
    main()
