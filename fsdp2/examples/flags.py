"""Flags of the examples: a field of a frozen dataclass is a flag, with its default and its help.

`parsed` makes the parser from the fields, and checks what all examples share. Every mistake is a
`UsageError` of one sentence, found before a process is started. Flags may be written with hyphens
or, as in the scripts of PyTorch/XLA, with underscores.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn, TypeVar

import torch

MAX_LOCAL_RANKS_PER_CPU = 16


class UsageError(ValueError):
    """Something the person who started the run got wrong; the message is one sentence."""


@dataclass(frozen=True)
class GivenRanks:
    """The ranks that torchrun, or a launcher with the same variables, gave to this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @staticmethod
    def from_environment() -> GivenRanks | None:
        """None where no launcher set RANK and WORLD_SIZE: then the example calls torchrun."""
        env = os.environ
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return None
        try:
            rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
            local_rank = int(env.get("LOCAL_RANK", rank))
            local_world_size = int(env.get("LOCAL_WORLD_SIZE", world_size))
        except ValueError as error:
            raise UsageError("RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers") from error
        if not 0 <= rank < world_size:
            raise UsageError(f"RANK={rank} must lie between 0 and WORLD_SIZE={world_size}")
        if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
            raise UsageError(
                "RANK and WORLD_SIZE are set but MASTER_ADDR and MASTER_PORT are not: use "
                "torchrun, or unset RANK to have the ranks started for you"
            )
        return GivenRanks(rank, world_size, local_rank, local_world_size)


# --- flags ---------------------------------------------------------------------------------------


def number(
    kind: type[int] | type[float], low: float, high: float, wanted: str
) -> Callable[[str], float]:
    """A type for argparse: a number from `low` to `high`, or an error naming what is `wanted`."""

    def parse_number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse_number


count = number(int, 1, 2**31 - 1, "a whole number of at least 1")
not_negative = number(int, 0, 2**63 - 1, f"a whole number between 0 and {2**63 - 1}")
rate = number(float, 1e-12, 1e3, "a positive number")
share = number(float, 0, 1, "a number from 0 to 1")
seconds = number(float, 1.0, 1e6, "a number of seconds, at least 1")


def flag(
    help: str, kind: Callable[[str], object] | None = None, default: Any = None, **more: object
) -> Any:
    """A field that is a flag; without a `kind` or ``choices`` it is ``False`` unless given."""
    if kind is not None:
        more["type"] = kind
    elif "choices" not in more:
        default, more["action"] = False, "store_true"
    shown = f" ({default})" if default and "choices" not in more else ""
    return field(default=default, metadata={**more, "help": help + shown})


@dataclass(frozen=True)
class Common:
    """The flags of all examples, and what `parsed` knows of the ranks."""

    nproc: int | None = flag("processes to start (2, or one per GPU)", count)
    device: str = flag("where tensors are", choices=["auto", "cpu", "cuda"], default="auto")
    threads: int = flag("CPU threads per rank (CPUs / ranks)", count, default=0)
    seed: int = flag("fixes weights and the order of data", not_negative, default=0)
    rank: int = 0
    local_rank: int = 0
    world_size: int = 0
    local_world_size: int = 0
    restarts: int = 0  # after failures
    preempted: int | None = None  # the exit code of ranks that save after a signal

    @property
    def groups(self) -> int:
        """How often as many ranks are on this machine."""
        return 1

    @property
    def backend(self) -> str:
        """gloo where ranks share a GPU, which NCCL refuses."""
        enough = torch.cuda.device_count() >= self.local_world_size
        return "nccl" if self.device == "cuda" and enough else "gloo"


Given = TypeVar("Given", bound=Common)


class Parser(argparse.ArgumentParser):
    """argparse that raises its complaint instead of printing the usage above it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parsed(
    kind: type[Given],
    name: str,
    about: str,
    argv: Sequence[str],
    ranks: GivenRanks | None,
    default_ranks: Callable[[Given], int] = lambda options: (
        max(2, torch.cuda.device_count()) if options.device == "cuda" else 2
    ),
) -> Given:
    """The options of a command line, with device, ranks and threads; exits only for ``--help``."""
    parser = Parser(prog=name, description=about, allow_abbrev=False)
    for each in fields(kind):
        if each.metadata:
            keywords = {"default": each.default, **each.metadata}
            parser.add_argument(f"--{each.name.replace('_', '-')}", **keywords)
    options = kind(**vars(parser.parse_args([_with_hyphens(word) for word in argv])))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no GPU that torch can use")
    if options.device == "auto":
        options = replace(options, device="cuda" if torch.cuda.is_available() else "cpu")
    world_size = world_size_of(options.nproc, ranks, default_ranks(options))
    ranks = ranks or GivenRanks(0, world_size, 0, world_size)
    threads = options.threads or max(1, cpu_count() // (ranks.local_world_size * options.groups))
    return replace(options, threads=threads, **vars(ranks))


def _with_hyphens(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def world_size_of(nproc: int | None, ranks: GivenRanks | None, default: int) -> int:
    """The launcher's number of ranks, or the number to start: ``--nproc`` where it was given."""
    if ranks is not None:
        if nproc is not None and nproc != ranks.world_size:
            raise UsageError(
                f"--nproc {nproc} contradicts the {ranks.world_size} ranks that the launcher gave; "
                "leave --nproc out"
            )
        return ranks.world_size
    limit = MAX_LOCAL_RANKS_PER_CPU * cpu_count()
    if (nproc or default) > limit:
        raise UsageError(
            f"{nproc or default} ranks are too many for this machine: with {cpu_count()} CPUs it "
            f"can start at most {limit} ranks"
        )
    return nproc or default


def cpu_count() -> int:
    """CPUs this process may run on, which a container may have made fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check(*rules: tuple[object, str]) -> None:
    """Raise the sentence of the first rule that is broken: whose first item is true."""
    for broken, sentence in rules:
        if broken:
            raise UsageError(sentence)
