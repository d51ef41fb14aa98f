"""Command-line options that several benchmarks have, and what they print of them first.

add_variants    --variants
add_tiny        --blocks --params-per-block --dim --world-size: a model of blocks of square matrices
add_fill        --fill: what gathers of the null group leave in memory
add_timing      --rounds --steps --device --clock --json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence

from benchmarks import stats


def among(known: Collection[str], separator: str = ",") -> Callable[[str], list[str]]:
    """An argparse type: a list of known words, with commas or another separator between."""

    def parse(text: str) -> list[str]:
        parts = text.split(separator)
        for part in parts:
            if part not in known:
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(known)}")
        return parts

    return parse


def integers(text: str) -> list[int]:
    """An argparse type: a comma list of integers."""
    return [int(part) for part in text.split(",")]


def add_variants(
    parser: argparse.ArgumentParser, known: Sequence[str], default: Sequence[str] | None = None
) -> None:
    """``default``: the ones that run unless told, all known ones if it is left out."""
    parser.add_argument(
        "--variants",
        type=among(known),
        default=",".join(default or known),
        help=f"comma list of {', '.join(known)}",
    )


def add_tiny(parser: argparse.ArgumentParser, blocks: int, params: int) -> None:
    """``blocks`` and ``params`` a block are the defaults."""
    parser.add_argument("--blocks", type=int, default=blocks)
    parser.add_argument("--params-per-block", type=int, default=params)
    parser.add_argument("--dim", type=int, default=16, help="parameters are [dim, dim]")
    parser.add_argument("--world-size", type=int, default=8)


def print_tiny(options: argparse.Namespace) -> None:
    """The model of `add_tiny`, and where it runs."""
    print(
        f"{options.blocks} blocks of {options.params_per_block} parameters of "
        f"[{options.dim}, {options.dim}], world size {options.world_size}, {options.device}\n"
        f"{stats.describe(stats.environment(options.device))}"
    )


def add_fill(parser: argparse.ArgumentParser) -> None:
    """For models whose values matter; see `step.py`."""
    parser.add_argument(
        "--fill", action="store_true", help="fill gathers in timed steps, too: no host times"
    )


def add_timing(
    parser: argparse.ArgumentParser,
    steps: int | None = None,
    *,
    rounds: int = 7,
    device: str | None = "cpu",
    devices: Sequence[str] = ("cpu", "cuda"),
    clock: bool = True,
) -> None:
    """``None``: there is no such option."""
    parser.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}")
    if steps is not None:
        parser.add_argument(
            "--steps", type=int, default=steps, help=f"in a burst (default {steps})"
        )
    if device is not None:
        parser.add_argument("--device", choices=devices, default=device)
    if clock:
        parser.add_argument("--clock", choices=stats.CLOCKS, default="wall")
    parser.add_argument("--json", metavar="FILE")
