"""What of the package a reader passes on the way from `fully_shard` to a steady step, counted.

    python -m benchmarks.visits                  # fsdp2 and torch's FSDP2
    python -m benchmarks.visits --walk           # and where one parameter goes, visit by visit
    python -m benchmarks.visits --functions 20   # and the functions that are called most often

Four blocks of nine parameters on rank 0 of 8, whose process group sends nothing. A profile hook
counts Python functions of the package that are entered (calls), how many there are (functions), and
in how many files they are:

    fully_shard(block)   of the second block; the first one also makes what all share
    the first step       forward and backward of the model
    a steady step        the third one after it

What the null process group runs is left out. A generator counts at each item, and up to Python
3.11 a comprehension counts as a function.

The walk is that of one parameter, a module of its own, through `fully_shard` and its first step. A
*stay* is a run of calls in one room; *rooms* are the different ones; a *climb* is a move from a
room to one above it, in the order of docs/design.md. The first 400 calls are counted apart. Counts
are the same on every machine, for one version of Python and torch:
`benchmarks/tests/test_visits.py` has bounds of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.distributed
from torch import nn

import fsdp2
from benchmarks import harness, variants
from fsdp2.testing.blocks import llama_blocks
from fsdp2.testing.counting import profile
from fsdp2.testing.null_group import null_mesh, null_world

BLOCKS, WIDTH, WORLD_SIZE = 4, 64, 8
FIRST = 400  # calls of a walk

PARTS = ("fully_shard(block)", "the first step", "a steady step")

_OURS = Path(fsdp2.__file__).parent
_TORCHS = Path(torch.distributed.__file__).parent
PACKAGES = {
    "fsdp2": (_OURS,),
    "torch": (_TORCHS / "fsdp" / "_fully_shard", _TORCHS / "_composable"),
}
"""Where functions count, by variant."""

NOT_COUNTED = (_OURS / "testing", _OURS / "tracing")  # the null process group

ORDER = (
    *("custom_collectives", "config", "errors", "progress", "names", "pieces", "notices"),
    *("codecs", "device", "layout", "params", "gather", "reduce", "schedule", "modules"),
    *("checks", "interop", "sharding"),
)
"""Rooms that `fully_shard` and a step enter, the lowest first."""


@dataclass(frozen=True)
class Visits:
    """What one run entered: calls, different functions, their files, and how often each was."""

    calls: int
    functions: int
    files: int
    entered: Counter[CodeType]


@dataclass(frozen=True)
class Walk:
    """The rooms of a run's calls, one after another."""

    calls: tuple[str, ...]

    @property
    def stays(self) -> list[str]:
        """A room for each run of calls in it."""
        return [room for room, _ in itertools.groupby(self.calls)]

    @property
    def rooms(self) -> int:
        """How many different ones."""
        return len(set(self.stays))

    @property
    def climbs(self) -> int:
        """How many moves lead from a room to one above it."""
        levels = [ORDER.index(room) for room in self.stays]
        return sum(after > before for before, after in itertools.pairwise(levels))


def entered(run: Callable[[], object], within: Sequence[Path]) -> list[CodeType]:
    """The codes of the Python functions in these files and folders that ``run`` enters, in turn."""
    found: list[CodeType] = []
    counts: dict[str, bool] = {}  # by the file of a code

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        known = counts.get(code.co_filename)
        if known is None:
            path = Path(code.co_filename)
            known = any(path.is_relative_to(each) for each in within)
            known = known and not any(path.is_relative_to(each) for each in NOT_COUNTED)
            counts[code.co_filename] = known
        if known:
            found.append(code)

    profile(run, note)
    return found


def visits(run: Callable[[], object], within: Sequence[Path]) -> Visits:
    """Count what ``run`` enters."""
    codes = Counter(entered(run, within))
    files = {code.co_filename for code in codes}
    return Visits(codes.total(), len(codes), len(files), codes)


def room_of(code: CodeType) -> str:
    """The room of fsdp2 that a function is in: a package, or a module that is in none."""
    parts = Path(code.co_filename).relative_to(_OURS).with_suffix("").parts
    return parts[1] if parts[0] == "core" else parts[0]


def counted(variant: str) -> dict[str, Visits]:
    """The visits of each of `PARTS`, by "fsdp2" or by "torch"."""
    within = PACKAGES[variant]
    with null_world(WORLD_SIZE):
        _shard_and_step(variant, lambda run: run())  # what is imported or made once
        found = _shard_and_step(variant, lambda run: visits(run, within))
    return dict(zip(PARTS, found, strict=True))


def _shard_and_step(
    variant: str, watch: Callable[[Callable[[], object]], Visits | object]
) -> list[Visits]:
    """Shard a model and step it, and have `PARTS` watched."""
    fully_shard, _ = variants.fsdp2_api(variant)
    mesh = null_mesh(WORLD_SIZE)
    model = llama_blocks(BLOCKS, WIDTH)
    first, second, *others = model.blocks
    x = torch.rand(2, WIDTH, requires_grad=True)
    step = variants.step_of(model, x)
    fully_shard(first, mesh=mesh)
    found = [watch(lambda: fully_shard(second, mesh=mesh))]
    for block in others:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found.append(watch(step))
    step()
    step()
    found.append(watch(step))
    return [each for each in found if isinstance(each, Visits)]


def walked() -> Walk:
    """The rooms that one parameter enters, from `fully_shard` on."""
    with null_world(WORLD_SIZE):
        for watched in (False, True):  # first what is imported or made once
            module = nn.Linear(WIDTH, WIDTH, bias=False)
            x = torch.rand(2, WIDTH, requires_grad=True)
            step = variants.step_of(module, x)
            mesh = null_mesh(WORLD_SIZE)

            def run() -> None:
                fsdp2.fully_shard(module, mesh=mesh)  # noqa: B023  # called in this turn
                step()  # noqa: B023

            codes = entered(run, PACKAGES["fsdp2"] if watched else ())
    return Walk(tuple(map(room_of, codes)))


def _in_line(found: Visits) -> str:
    return f"{found.calls:,} / {found.functions} / {found.files}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the counts, and what was asked for besides."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--walk", action="store_true", help="list the stays of one parameter")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="list the N busiest")
    options = parser.parse_args(arguments)
    found = {variant: counted(variant) for variant in PACKAGES}
    rows = [[part, *(_in_line(parts[part]) for parts in found.values())] for part in PARTS]
    print("calls / functions / files\n")
    print(harness.table(["", *found], rows))
    walk = walked()
    print("\none parameter\n")
    for each in (walk, Walk(walk.calls[:FIRST])):
        print(
            f"{len(each.calls):,} calls: {len(each.stays)} stays, {each.rooms} rooms, "
            f"{each.climbs} climbs"
        )
    results: dict[str, dict[str, int]] = {
        part: {"calls": seen.calls, "functions": seen.functions, "files": seen.files}
        for part, seen in found["fsdp2"].items()
    }
    results["walk"] = {"stays": len(walk.stays), "rooms": walk.rooms, "climbs": walk.climbs}
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if options.walk:
        print(" ".join(walk.stays))
    for part in PARTS if options.functions else ():
        busiest = found["fsdp2"][part].entered.most_common(options.functions)
        names = [[f"{room_of(code)}: {code.co_name}", calls] for code, calls in busiest]
        print(f"\n{harness.table([part, 'calls'], names)}")


if __name__ == "__main__":
    main()
