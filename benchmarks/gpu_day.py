"""For the day a GPU is there: tests, then measurements in the order of their worth, and a page.

    python -m benchmarks.gpu_day --minutes 30
    python -m benchmarks.gpu_day --list                     # what it would run, and what it cannot
    python -m benchmarks.gpu_day --only tests,step-1.1b
    python -m benchmarks.gpu_day --device cpu --minutes 5   # a rehearsal; --device stand-in, too

    OUT/NAME.json, OUT/NAME.log   what a stage wrote, and what it printed
    OUT/index.json, OUT/page.md   the machine, and all stages

It goes on where it was cut off: a stage that is done is kept as long as its sources, torch, device
and arguments are the same; one that failed or was out of time runs again. To begin anew, remove the
folder. A stage is a process group of its own, which ends as a whole: when its time is over, when
its first process has ended, or when this process is interrupted or killed.

The exit status is 1 if a stage failed, and 0 if not, whatever did not fit into the time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from benchmarks import harness
from benchmarks.harness import ROOT
from fsdp2.testing.stand_in import device as stand_in

KINDS = ("cpu", "stand-in", "cuda")
RESERVE = 15.0  # seconds, for the page; of a short run a tenth
PATIENCE, LEAST = 3, 300.0  # times what a stage takes about: its time-out, but seconds at least
GRACE = 5.0  # seconds that a process has to end when it is asked to
TAIL, LINE = 15, 300  # lines of a stage that failed; characters of one
DONE, FAILED, LATE, SKIPPED, WAITING = "done", "failed", "out of time", "not run", "waiting"


# ---------------------------------------------------------------------------------------------
# The machine


@dataclass(frozen=True)
class Machine:
    """Where stages run: kind, number of GPUs, and all that their figures depend on."""

    kind: str
    gpus: int
    facts: Mapping[str, str]


_LOOK = "import json; from benchmarks import gpu_day; print(json.dumps(gpu_day.look()))"


def found(kind: str) -> Machine:
    """The machine, looked at by another process: a GPU's memory stays free; may be "auto"."""
    command = [sys.executable, "-c", _LOOK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"gpu_day: cannot tell what there is:\n{done.stdout}{done.stderr}")
    facts = json.loads(done.stdout.splitlines()[-1])
    gpus = int(facts.pop("gpus"))
    if kind == "auto":
        kind = "cuda" if gpus else "cpu"
    if kind == "cuda" and not gpus:
        raise SystemExit("there is no CUDA device that torch can use: --device cpu, or stand-in")
    return Machine(kind, gpus if kind == "cuda" else 0, facts)


def look() -> dict[str, str]:
    """Device, versions and sources, in this process."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = harness.environment("cuda" if gpus else "cpu")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""
    command = ["git", "-C", os.fspath(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = ""
    with suppress(OSError):
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpus": str(gpus),
        "device": str(seen.get("gpu") or f"{seen['cpu']} ({seen['cores']} cores)"),
        "driver": _driver() if gpus else "",
        "CUDA": str(torch.version.cuda) if gpus else "",
        "NCCL": nccl,
        "torch": torch.__version__,
        "Python": seen["python"],
        "commit": commit,
        "sources": digest(ROOT),
    }


def digest(root: Path) -> str:
    """A hash of all sources below ``root``: equal where equal code runs, with git or without."""
    made = hashlib.sha256()
    for folder in ("fsdp2", "benchmarks", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".py", ".cpp", ".h"} and path.is_file():
                made.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return made.hexdigest()[:16]


def _driver() -> str:
    with suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "not known")
    return "not known"


# ---------------------------------------------------------------------------------------------
# Stages, in the order of their worth


@dataclass(frozen=True)
class Stage:
    """One command line that anybody could type.

    Attributes:
        title: what it shows.
        command: words behind ``python -m``: a module and its arguments.
        seconds: that it takes about.
        environment: variables in front of the command.
        absent: why it cannot run here; "" where it can.
    """

    name: str
    title: str
    command: tuple[str, ...]
    seconds: int
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: str = ""

    @property
    def line(self) -> str:
        """What a person would type."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(["python", "-m", *self.command])])

    @property
    def is_tests(self) -> bool:
        """Whether it is a run of pytest, whose last lines are its results."""
        return self.command[0] == "pytest"


def stages_for(machine: Machine) -> list[Stage]:
    """All stages of a machine, those that it cannot run with the reason.

    A GPU gets the models that targets are stated for. A CPU and the stand-in get the smallest, once
    or twice: that shows that all of it runs, and its figures mean nothing.
    """
    tool = stand_in.missing_tool() if machine.kind == "stand-in" else None
    missing = f"the stand-in is compiled and needs {tool}" if tool else ""
    return [
        Stage(
            *(name, title, tuple(words.split())),
            seconds if machine.kind == "cuda" else 30,
            variables,
            absent or missing,
        )
        for name, title, words, seconds, variables, absent in _stages(machine)
    ]


def _stages(machine: Machine) -> Iterator[tuple[str, str, str, int, dict[str, str], str]]:
    on_gpu = machine.kind == "cuda"
    device = stand_in.NAME if machine.kind == "stand-in" else machine.kind
    dense, experts = ("1.1b", "1.9b-moe") if on_gpu else ("tiny", "tiny-moe")
    large = "2.8b" if on_gpu else dense
    often = "--rounds 5 --steps 8" if on_gpu else "--rounds 2 --steps 2"
    on = f"--device {device} {often}"
    peers = "--variants none,torch,fsdp2,packed,fsdp1"
    kernels = " --kernels" if on_gpu else ""
    windows = "window1,window2,window3"
    step = "benchmarks.step --precision mixed --models"
    where = "tests/accelerator/test_alone.py" if machine.kind == "stand-in" else "tests/gpu"
    for_gpu = "" if on_gpu else "for a GPU"
    one = "NCCL gives each rank a GPU of its own, and there is one" if machine.gpus == 1 else ""
    ranks = f"--ranks {max(2, machine.gpus)}"
    blocks = "" if on_gpu else " --shrink 16"

    # First of all: where results are wrong, times mean nothing.
    yield "tests", "Tests", f"pytest {where} -n 0 -rsfE", 150, {}, ""
    extended = f"pytest {where} -n 0 -rsfE -m extended"
    yield "tests-extended", "Extended tests", extended, 100, {}, for_gpu
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for name in dict.fromkeys((dense, large, experts)):
        title = f"The step of the {name} model"
        yield f"step-{name}", title, f"{step} {name} {peers} {on}{kernels}", 120, {}, ""
        line = f"{step} {name} {peers} {on}"
        yield f"step-{name}-expandable", f"{title}, expandable", line, 80, expandable, for_gpu
    line = f"benchmarks.step --models 32x9,llama --precision fp32,mixed {on}{blocks}"
    yield "host", "Host time that sharding adds", line, 200, {}, ""
    compiler = "" if on_gpu else " --compiler aot_eager"
    no_inductor = "torch's compiler does not know it" if machine.kind == "stand-in" else ""
    line = f"{step} {dense} --variants none,torch,fsdp2 --compiled {on}{compiler}"
    yield "compile", "Compiled blocks", line, 150, {}, no_inductor
    line = f"{step} {large} --recompute --variants none,torch,fsdp2 {on}"
    yield "recompute", "Activation checkpointing", line, 110, {}, ""
    line = f"{step} {dense} --variants none,torch,fsdp2,{windows} {on}"
    yield "windows", "Prefetch windows of one, two and three units", line, 110, {}, ""
    for name in (dense, experts):
        sharded = f"torch,fsdp2,packed,fsdp1,{windows}" if on_gpu else "torch,fsdp2"
        line = f"{step} {name} {ranks} --variants {sharded} {on}"
        title = f"The step of the {name} model on real ranks"
        yield f"ranks-{name}", title, line, 150, {}, one
    shrunk = "" if on_gpu else " --shrink 1"
    no_memory = "a CPU's memory is not counted" if machine.kind == "cpu" else ""
    memory_on = device if machine.kind != "cpu" else stand_in.NAME
    line = f"benchmarks.memory --presets {dense} --device {memory_on}{shrunk}"
    yield "memory", "Memory of a step, by setting", line, 150, {}, no_memory
    line = f"benchmarks.planned --presets {dense},{experts} --recomputed {large} {on}"
    yield "plan", "Planned and measured steps", line, 180, {}, ""
    line = f"benchmarks.planned --presets {dense},{experts} {ranks} {on}"
    yield "plan-ranks", "Planned and measured steps on real ranks", line, 150, {}, one


# ---------------------------------------------------------------------------------------------
# A day


@dataclass
class Outcome:
    """How a stage ended; its last lines, if it is not done; whether an earlier run did it."""

    status: str = WAITING
    seconds: float = 0.0
    why: str = ""
    tail: str = ""
    kept: bool = False

    def __str__(self) -> str:
        text = self.status + (f", {self.seconds:.0f} s" if self.seconds else "")
        return text + (f": {self.why}" if self.why else "") + (" (kept)" if self.kept else "")


class Day:
    """A run: its machine, its folder, its stages and how they ended."""

    def __init__(
        self, machine: Machine, out: Path, stages: Sequence[Stage], only: Sequence[str] | None
    ) -> None:
        self.machine, self.out, self.stages = machine, out, stages
        self.outcomes = {stage.name: Outcome() for stage in stages}
        out.mkdir(parents=True, exist_ok=True)
        for stage in stages:
            earlier = (_read(self.file(stage)) or {}).get("stage", {})
            if earlier.get("status") == DONE and earlier.get("key") == self.key(stage):
                self.outcomes[stage.name] = Outcome(DONE, earlier["seconds"], kept=True)
            elif stage.absent:
                self.outcomes[stage.name] = Outcome(SKIPPED, why=stage.absent)
            elif only is not None and stage.name not in only:
                self.outcomes[stage.name] = Outcome(SKIPPED, why="it was not asked for")

    def file(self, stage: Stage, suffix: str = "json") -> Path:
        return self.out / f"{stage.name}.{suffix}"

    def key(self, stage: Stage) -> dict[str, Any]:
        """What a stage's figures depend on; the digest of the sources stands for the commit."""
        facts = {name: value for name, value in self.machine.facts.items() if name != "commit"}
        return {**facts, "kind": self.machine.kind, "gpus": self.machine.gpus, "line": stage.line}

    def run(self, seconds: float) -> None:
        """Run what has not been done, for so long at most; write the page after each stage."""
        end = time.monotonic() + seconds
        for stage in self.stages:
            if self.outcomes[stage.name].status != WAITING:
                continue
            left = end - time.monotonic()
            if left < stage.seconds:
                why = f"it takes about {stage.seconds} s, and {max(0.0, left):.0f} s were left"
                self.outcomes[stage.name] = Outcome(SKIPPED, why=why)
            else:
                print(f"{stage.name}: {stage.line}", flush=True)
                limit = max(PATIENCE * stage.seconds, LEAST)
                self.outcomes[stage.name] = self._run_one(stage, min(limit, left))
            print(f"{stage.name}: {self.outcomes[stage.name]}", flush=True)
            self.write()

    def _run_one(self, stage: Stage, seconds: float) -> Outcome:
        raw, log = self.file(stage, "raw"), self.file(stage, "log")
        raw.unlink(missing_ok=True)
        output = [] if stage.is_tests else ["--json", str(raw)]
        began = time.monotonic()
        with log.open("w") as file:
            command = [sys.executable, "-m", *stage.command, *output]
            status = run_whole(command, stage.environment, file, seconds)
        outcome = Outcome(DONE, time.monotonic() - began)
        content = {"results": printed(log, TAIL)} if stage.is_tests else _read(raw)
        if status is None:
            outcome.status, outcome.why = LATE, f"it was ended after {seconds:.0f} s"
        elif status < 0:
            name = signal.Signals(-status).name
            outcome.status, outcome.why = FAILED, f"it was ended by signal {-status} ({name})"
        elif status > 0:
            outcome.status, outcome.why = FAILED, f"it ended with exit status {status}"
        elif content is None:
            outcome.status, outcome.why = FAILED, "it wrote no results"
        if outcome.status != DONE:
            outcome.tail = printed(log, TAIL)
        about = {**asdict(outcome), "key": self.key(stage)}
        _write(self.file(stage), json.dumps({**(content or {}), "stage": about}, indent=2))
        raw.unlink(missing_ok=True)
        return outcome

    def write(self) -> None:
        """The index and the page, from files."""
        rows = [
            {"name": stage.name, "command": stage.line, **asdict(self.outcomes[stage.name])}
            for stage in self.stages
        ]
        index = {"machine": asdict(self.machine), "stages": rows}
        _write(self.out / "index.json", json.dumps(index, indent=2))
        _write(self.out / "page.md", self._page())

    def _page(self) -> str:
        facts = [f"- {what}: {value or 'none'}" for what, value in self.machine.facts.items()]
        parts = ["# fsdp2 on this machine", "", *facts, f"- GPUs: {self.machine.gpus}", ""]
        parts.append(
            "Ratios are medians over rounds of runs that took turns, with the smallest and the "
            "largest round; below 1 the first of the two is faster, or smaller. `none` is the "
            "model without sharding, `torch` and `fsdp1` are torch's FSDP2 and FSDP1."
        )
        if self.machine.kind != "cuda":
            parts.append("**This is a rehearsal without a GPU: its figures mean nothing.**")
        rows = [(s.title, self.outcomes[s.name], f"`{s.line}`") for s in self.stages]
        parts += ["", harness.markdown(("stage", "", "command"), rows), ""]
        for stage in self.stages:
            outcome = self.outcomes[stage.name]
            if outcome.status in (SKIPPED, WAITING):
                continue
            shown = outcome.tail
            if outcome.status == DONE:
                shown = printed(self.file(stage, "log"), TAIL if stage.is_tests else 0)
            text = shown.replace("```", "'''")
            head = f"**{outcome}**" if outcome.status != DONE else ""
            parts += [f"## {stage.title}", "", head, "", "```", text, "```", ""]
        return "\n".join(parts)


def _read(path: Path) -> dict[str, Any] | None:
    """What a file holds; ``None`` where it holds nothing that can be read."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else None
    return None


def printed(log: Path, last: int = 0) -> str:
    """What a stage printed; ``last``: only so many lines at the end."""
    lines = log.read_text(errors="replace").splitlines()[-last:]  # all for 0
    return "\n".join(line[:LINE] for line in lines)


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a run may be cut off at any time."""
    new = path.with_suffix(".new")
    new.write_text(text + "\n")
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
    command: Sequence[str], environment: Mapping[str, str], output: IO[str], seconds: float
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


# ---------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--minutes", type=float, default=30, help="at most (default 30)")
    parser.add_argument("--device", choices=("auto", *KINDS), default="auto")
    parser.add_argument("--only", help="comma list of stages: see --list")
    parser.add_argument("--out", type=Path, help="default: results/gpu_day/DEVICE-TORCH")
    parser.add_argument("--list", action="store_true", help="print stages, and run none")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    began = time.monotonic()
    here = found(options.device)
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
    out = options.out or ROOT / "results" / "gpu_day" / f"{here.kind}-{here.facts['torch']}"
    day = Day(here, out.resolve(), stages, only)
    seconds = options.minutes * 60
    left = seconds - min(RESERVE, seconds / 10) - (time.monotonic() - began)
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        day.run(left)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        day.write()
        print(day.out / "page.md")
    return int(any(each.status == FAILED for each in day.outcomes.values()))


def _leave(number: int, frame: FrameType | None) -> None:
    """End the stage that runs, and write what is known, as an interrupt does."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
