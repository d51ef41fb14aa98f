"""Runs stages one by one within the time, and keeps what each one gave.

    OUT/stages/NAME.json   what a stage wrote, and how it ended; a later run keeps what is done
    OUT/stages/NAME.log    what it printed
    OUT/index.json         the machine, and all stages in a few words

A stage is a process group of its own. It ends as a whole: when its time is over, when its first
process has ended, or when this process is interrupted or killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu_day.machine import Machine
from benchmarks.gpu_day.stages import Stage
from benchmarks.workers import ROOT

DONE, FAILED, LATE, SKIPPED, WAITING = "done", "failed", "out of time", "not run", "waiting"
PATIENCE = 3  # times what a stage takes about: its time-out, but
LEAST = 300.0  # seconds at least, on a machine that others use
GRACE = 5.0  # seconds that a process has to end when it is asked to
TAIL = 15  # lines
LINE = 300  # characters of one


@dataclass
class Outcome:
    """How a stage ended.

    Attributes:
        status: `DONE`; `FAILED`: it ended with another exit status than 0; `LATE`: it was ended;
            `SKIPPED`; `WAITING`: its turn has not come.
        seconds: that it took.
        why: what there is to say if it is not done.
        tail: its last lines, if it is not done.
        kept: whether an earlier run did it.
    """

    status: str = WAITING
    seconds: float = 0.0
    why: str = ""
    tail: str = ""
    kept: bool = False


@dataclass
class Day:
    """A run: its machine, its folder, its stages and how they ended."""

    machine: Machine
    out: Path
    stages: Sequence[Stage]
    outcomes: dict[str, Outcome]

    def file(self, stage: Stage) -> Path:
        """What a stage gave."""
        return self.out / "stages" / f"{stage.name}.json"

    def content(self, stage: Stage) -> dict[str, Any] | None:
        """The same as an object; ``None`` where it gave nothing that can be read."""
        try:
            found = json.loads(self.file(stage).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def key_of(stage: Stage, machine: Machine) -> dict[str, Any]:
    """What a stage's figures depend on: where all of it is equal, they need not be taken again.

    The digest of the sources stands for the commit: two commits of the same code are equal, and
    changes that are not committed count.
    """
    return {
        "sources": machine.sources,
        "torch": machine.torch,
        "device": [machine.kind, machine.device, machine.gpus],
        "versions": [machine.python, machine.driver, machine.cuda, machine.nccl],
        "arguments": stage.line,
    }


def start(
    machine: Machine, out: Path, stages: Sequence[Stage], only: Container[str] | None = None
) -> Day:
    """A day on which nothing has run but what an earlier one did; ``only`` names what shall."""
    (out / "stages").mkdir(parents=True, exist_ok=True)
    day = Day(machine, out, stages, {stage.name: Outcome() for stage in stages})
    for stage in stages:
        earlier = (day.content(stage) or {}).get("stage", {})
        if earlier.get("status") == DONE and earlier.get("key") == key_of(stage, machine):
            day.outcomes[stage.name] = Outcome(DONE, earlier["seconds"], kept=True)
        elif stage.absent:
            day.outcomes[stage.name] = Outcome(SKIPPED, why=stage.absent)
        elif only is not None and stage.name not in only:
            day.outcomes[stage.name] = Outcome(SKIPPED, why="it was not asked for")
    return day


def run(day: Day, seconds: float, after: Callable[[Day], None]) -> None:
    """Run what has not been done, for so long at most; ``after`` is called behind each stage."""
    end = time.monotonic() + seconds
    for stage in day.stages:
        if day.outcomes[stage.name].status != WAITING:
            continue
        left = end - time.monotonic()
        if left < stage.seconds:
            why = f"it takes about {stage.seconds} s, and {max(0.0, left):.0f} s were left"
            day.outcomes[stage.name] = Outcome(SKIPPED, why=why)
        else:
            print(f"{stage.name}: {stage.line}", flush=True)
            limit = max(PATIENCE * stage.seconds, LEAST)
            day.outcomes[stage.name] = _run_one(day, stage, min(limit, left))
        print(f"{stage.name}: {said(day.outcomes[stage.name])}", flush=True)
        write_index(day)
        after(day)
    write_index(day)


def said(outcome: Outcome) -> str:
    """A few words."""
    text = outcome.status + (f", {outcome.seconds:.0f} s" if outcome.seconds else "")
    return text + (f": {outcome.why}" if outcome.why else "")


def write_index(day: Day) -> None:
    """Of all stages: how they ended, and where the rest is."""
    rows = [
        {
            "name": stage.name,
            "title": stage.title,
            "command": stage.line,
            "file": str(day.file(stage).relative_to(day.out)),
            **asdict(day.outcomes[stage.name]),
        }
        for stage in day.stages
    ]
    _write(day.out / "index.json", {"machine": asdict(day.machine), "stages": rows})


def _run_one(day: Day, stage: Stage, seconds: float) -> Outcome:
    raw = day.file(stage).with_suffix(".raw")
    log = day.file(stage).with_suffix(".log")
    raw.unlink(missing_ok=True)
    output = [f"--junitxml={raw}"] if stage.is_tests else ["--json", str(raw)]
    began = time.monotonic()
    with log.open("w") as file:
        command = [sys.executable, "-m", *stage.command, *output]
        status = run_whole(command, stage.environment, file, seconds)
    outcome = Outcome(DONE, time.monotonic() - began)
    if status is None:
        outcome.status, outcome.why = LATE, f"it was ended after {seconds:.0f} s"
    elif status != 0:
        outcome.status, outcome.why = FAILED, _ended(status)
    content = _results(raw, stage)
    if outcome.status == DONE and content is None:
        outcome.status, outcome.why = FAILED, "it wrote no results"
    if outcome.status != DONE:
        outcome.tail = printed(log, TAIL)
    about = {**asdict(outcome), "key": key_of(stage, day.machine), "command": stage.line}
    about["commit"] = day.machine.commit
    _write(day.file(stage), {**(content or {}), "stage": about})
    raw.unlink(missing_ok=True)
    return outcome


def _ended(status: int) -> str:
    if status < 0:
        return f"it was ended by signal {-status} ({signal.Signals(-status).name})"
    return f"it ended with exit status {status}"


def _results(raw: Path, stage: Stage) -> dict[str, Any] | None:
    try:
        if stage.is_tests:
            return {"results": counted(ElementTree.parse(raw).getroot())}
        content: dict[str, Any] = json.loads(raw.read_text())
        return content
    except (OSError, ValueError, ElementTree.ParseError):
        return None


def counted(root: ElementTree.Element) -> dict[str, Any]:
    """What pytest saw: how many tests, which failed, and why others were skipped."""
    cases = list(root.iter("testcase"))
    failed = [case for case in cases if {"failure", "error"} & {part.tag for part in case}]
    reasons: dict[str, int] = {}
    for case in cases:
        for part in case.findall("skipped"):
            why = part.get("message", "")
            reasons[why] = reasons.get(why, 0) + 1
    names = sorted({f"{case.get('classname')}::{case.get('name')}" for case in failed})
    passed = len(cases) - len(failed) - sum(reasons.values())
    return {"passed": passed, "failed": names, "skipped": reasons}


def printed(log: Path, last: int = 0) -> str:
    """What a stage printed; ``last``: only so many lines at the end."""
    lines = log.read_text(errors="replace").splitlines()[-last:]  # all for 0
    return "\n".join(line[:LINE] for line in lines)


def _write(path: Path, content: object) -> None:
    """Whole or not at all: a run may be cut off at any time."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=2) + "\n")
    new.replace(path)


# ---------------------------------------------------------------------------------------------
# Processes


_KEEPER = """
import os, signal, sys
group = sys.stdin.readline()
sys.stdin.read()
if group:
    os.killpg(int(group), signal.SIGKILL)
"""
"""Ends a process group when the pipe from us is closed, as it is however we end."""


def run_whole(
    command: Sequence[str], environment: Any, output: IO[str], seconds: float
) -> int | None:
    """Run a command in a process group of its own, of which nothing is left when this returns.

    Nothing is left of it either where this process is killed in between.

    Returns:
        Its exit status, negative for a signal; ``None`` if its time was over.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **environment}
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _KEEPER],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    ended = False
    try:
        print(process.pid, file=keeper.stdin, flush=True)
        ended = _has_ended(process.pid, seconds)
    finally:
        # Until it is waited for, the first process keeps its id, which is the group's, too.
        if not ended:
            _signal(process.pid, signal.SIGTERM)
            _has_ended(process.pid, GRACE)
        _signal(process.pid, signal.SIGKILL)
        keeper.kill()
        keeper.communicate()
        status = process.wait()
    return status if ended else None


def _has_ended(pid: int, seconds: float) -> bool:
    """Whether a child has ended within so many seconds; it is not waited for yet."""
    end = time.monotonic() + seconds
    flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while os.waitid(os.P_PID, pid, flags) is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
