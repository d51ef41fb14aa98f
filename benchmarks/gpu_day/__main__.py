"""For the day a GPU is there: tests, then measurements in the order of their worth, and a page.

    python -m benchmarks.gpu_day --minutes 30
    python -m benchmarks.gpu_day --list                     # what it would run, and what it cannot
    python -m benchmarks.gpu_day --only collectives,step-1.1b
    python -m benchmarks.gpu_day --device cpu --minutes 5   # a rehearsal; --device stand-in, too

It goes on where it was cut off: a stage that is done is kept as long as its sources, torch, device
and arguments are the same; one that failed or was out of time runs again. To begin anew, remove the
folder. Another torch has a folder of its own. No stage needs a network.

It ends with 1 if a stage failed, and with 0 if not, whatever did not fit into the time.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from benchmarks.gpu_day import machine, page, runner
from benchmarks.gpu_day.stages import stages_for
from benchmarks.workers import ROOT

RESERVE = 15.0  # seconds, for the page; of a short run a tenth
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""As an interrupt from the keyboard does, these end the stage that runs, too."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_day", description="Tests and measurements, and a page."
    )
    parser.add_argument("--minutes", type=float, default=30, help="at most (default 30)")
    parser.add_argument("--device", choices=("auto", *machine.KINDS), default="auto")
    parser.add_argument("--only", help="comma list of stages: see --list")
    parser.add_argument("--out", type=Path, help="default: results/gpu_day/DEVICE-TORCH")
    parser.add_argument("--list", action="store_true", help="print stages, and run none")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    began = time.monotonic()
    here = machine.found(options.device)
    stages = stages_for(here)
    only = options.only and options.only.split(",")
    if unknown := set(only or ()) - {stage.name for stage in stages}:
        names = ", ".join(stage.name for stage in stages)
        print(f"gpu_day: no stage {', '.join(sorted(unknown))}; there are {names}")
        return 2
    if options.list:
        for stage in stages:
            why = f"  (not here: {stage.absent})" if stage.absent else ""
            print(f"{stage.name:22} {stage.seconds:4} s  {stage.line}{why}")
        return 0
    out = options.out or ROOT / "results" / "gpu_day" / f"{here.kind}-{here.torch}"
    day = runner.start(here, out.resolve(), stages, only)
    seconds = options.minutes * 60
    left = seconds - min(RESERVE, seconds / 10) - (time.monotonic() - began)
    before = {number: signal.signal(number, _leave) for number in ENDING}
    try:
        runner.run(day, left, page.write)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        runner.write_index(day)
        page.write(day)
        print(day.out / page.NAME)
    return int(any(each.status == runner.FAILED for each in day.outcomes.values()))


def _leave(number: int, frame: FrameType | None) -> None:
    """So that what runs is ended, and what is known is written."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
