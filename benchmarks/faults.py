"""What goes wrong in a run of train_lm, how it goes on, and after how many seconds.

    python -m benchmarks.faults                                     # all that this machine can have
    python -m benchmarks.faults --faults "a rank is killed in forward"
    python -m benchmarks.faults --json FILE

Two ranks train `STEPS` steps of a tiny model, which take a tenth of a second more than they need,
and save every `EVERY`. In the middle, something happens to a rank, to a node or to what is between
nodes. Nodes are network namespaces (`benchmarks/namespaces.py`: Linux, root, iproute2);
deploy/torchrun_c10d.sh starts their agents. Without these, such faults are left out. Per fault:

    how it goes on        as was seen: whether workers were started again, and from which step
    seconds               from the fault until a step is done that was not done before it; where
                          workers are started again, by these
    steps trained again   those since the last save
    losses                whether all that were printed are those of the undisturbed run

Seconds have the start of Python and torch in them where workers are started again, and the time
that agents wait for a node; a process group waits `TIMEOUT` seconds for a rank that says nothing.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness, namespaces

STEPS, EVERY, AT = 30, 5, 12
"""How long the run is, how often it saves, and after which step faults from outside come."""
TIMEOUT = 10.0
PATIENCE = 300.0  # seconds, after which a run that has not ended hangs
TRAIN = "tests.jobs.killed_train_lm"
RUN = (
    *("--preset", "tiny", "--device", "cpu", "--threads", "1", "--seed", "1", "--seq-len", "16"),
    *("--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--timeout", str(TIMEOUT)),
)
OURS = (sys.executable, "-m", TRAIN, "--nproc", "2")
TORCHRUN = (
    *(sys.executable, "deploy/torchrun.py", "--standalone", "--nproc-per-node=2"),
    *("--max-restarts=3", "-m", TRAIN),
)
ENVIRONMENT = {"FSDP2_TEST_STEP": "0.1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
STEP = re.compile(r"(?:\[\w+\]:)?step +(\d+)/\d+ +loss (\d\.\d{4}) ")
RESUMED = re.compile(r"(?:\[\w+\]:)?resumed from \S+ at step (\d+);")


# ---------------------------------------------------------------------------------------------
# What was seen


@dataclass(frozen=True)
class Seen:
    """Lines that all processes of a run have printed, and the exit codes of those not killed.

    ``fault`` is when it happened; ``None``: there was no moment, as a clock is off all the time.
    """

    lines: list[tuple[float, str]]
    fault: float | None
    codes: list[int]
    hung: bool = False


@dataclass(frozen=True)
class Row:
    """What became of a fault; the attributes are the columns of the table."""

    outcome: str
    seconds: float | None
    again: int
    equal: bool


def judge(seen: Seen, losses: Mapping[int, str]) -> Row:
    """A row of the table, of a run whose losses undisturbed are ``losses``."""
    steps = [(at, int(m[1]), m[2]) for at, line in seen.lines if (m := STEP.match(line))]
    starts = [int(m[1]) for at, line in seen.lines if (m := RESUMED.match(line))]
    fault = float("inf") if seen.fault is None else seen.fault
    before = max((number for at, number, _ in steps if at <= fault), default=0)
    after = [(at, number) for at, number, _ in steps if at > fault]
    again = max((at for at, line in seen.lines if RESUMED.match(line)), default=fault)
    new = next((at for at, number in after if number > before and at > again), None)
    alone = any(re.search(r"\b1 rank\(s\)", line) for _, line in seen.lines)
    how = "one node trains alone" if alone else "goes on"
    if starts:
        how = f"workers are started again, from step {starts[0]}"
    codes = [code for code in seen.codes if code]
    if codes:
        again_from = f"; started again, from step {starts[0]}" if starts else ""
        how = f"{how}; " if alone else ""
        how += f"ends with code {codes[0]}{again_from}"
    if seen.hung:
        how = "hangs"
    return Row(
        outcome=how,
        seconds=None if new is None else new - fault,
        again=len([number for _, number in after if number <= before]),
        equal=bool(steps)
        and max(number for _, number, _ in steps) == STEPS
        and all(losses.get(number) == loss for _, number, loss in steps),
    )


class Job:
    """One start of the run, in a session of its own; its lines are read as it prints them."""

    def __init__(self, command: Sequence[str], folder: Path, **environment: str) -> None:
        self.was_killed = False
        self.lines: list[tuple[float, str]] = []
        path = os.pathsep.join(filter(None, [str(harness.ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [*command, *RUN, "--checkpoint", str(folder / "run"), "--resume"],
            cwd=harness.ROOT,
            env={**os.environ, "PYTHONPATH": path, **ENVIRONMENT, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        atexit.register(self._end_session)  # Ctrl-C does not reach another session

    def _end_session(self) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def wait_for(self, pattern: str) -> float:
        """When a line was printed that has ``pattern`` in it."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            is_over = self.process.poll() is not None and not self.reader.is_alive()
            for at, line in list(self.lines):
                if re.search(pattern, line):
                    return at
            if is_over:
                break
            time.sleep(0.01)
        last = "\n".join(line for _, line in self.lines[-60:])
        raise SystemExit(f"no {pattern!r} was printed:\n{last}")

    def pids(self) -> dict[int, int]:
        """Processes of ranks, by rank."""
        found = {}
        for pid in _below(self.process.pid):
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if rank := re.search(rb"\0RANK=(\d+)\0", environment):
                    found[int(rank[1])] = pid
        return found

    def kill(self) -> None:
        """All of it, at once; workers of an agent are sessions of their own."""
        self.was_killed = True
        for pid in {self.process.pid, *_below(self.process.pid)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def end(self, deadline: float) -> int | None:
        """The exit code; ``None`` where it had to be killed."""
        try:
            code = self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            return None
        self.reader.join(10)
        return code


def _below(pid: int) -> list[int]:
    """A process's children, and theirs."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *_below(child)]
    return found


def ended(jobs: Sequence[Job], fault: float | None) -> Seen:
    """What was seen, when all have ended."""
    deadline = time.monotonic() + PATIENCE
    codes = [job.end(deadline) for job in jobs if not job.was_killed]
    lines = sorted(line for job in jobs for line in list(job.lines))
    known = [code for code in codes if code is not None]
    return Seen(lines, fault, known, hung=len(known) < len(codes))


# ---------------------------------------------------------------------------------------------
# Faults of a rank


def _inside(kill: str, *more: str) -> Callable[[Path], Seen]:
    """A rank brings it on itself, in step `AT` + 1 or in the next save: ``RANK:PHASE:HOW``.

    Under torchrun, whose agent starts both ranks again.
    """

    def run(folder: Path) -> Seen:
        rank, phase, how = kill.split(":")
        job = Job([*TORCHRUN, *more], folder, FSDP2_TEST_KILL=f"{rank}:{phase}:@{AT + 1}:{how}")
        fault = job.wait_for("^fault$")
        return ended([job], fault)

    return run


def _clock_of_a_rank(folder: Path) -> Seen:
    return ended([Job(TORCHRUN, folder, FSDP2_TEST_CLOCK="1:60")], None)


def _signal(folder: Path) -> Seen:
    """SIGTERM to one rank; a scheduler starts the same command again."""
    first = Job(OURS, folder)
    first.wait_for(rf"step +{AT}/")
    fault = time.monotonic()
    os.kill(first.pids()[1], signal.SIGTERM)
    first.process.wait(PATIENCE)
    return ended([first, Job(OURS, folder)], fault)


def _disk_full(folder: Path) -> Seen:
    """A disk of 16 MB that something else fills; there is room again when the run has failed."""
    disk = folder / "run"
    disk.mkdir()
    size = "size=16m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "fsdp2", str(disk)], check=True)
    try:
        job = Job(TORCHRUN, folder)
        job.wait_for(rf"step +{AT}/")
        filler = disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        fault = job.wait_for(r"CheckpointError: .*(No space|full)")
        filler.unlink()
        return ended([job], fault)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


# ---------------------------------------------------------------------------------------------
# Faults of nodes, and of what is between them


class Nodes:
    """Agents of one rank each, in namespaces; two of them make the run, a third one is spare."""

    def __init__(self, network: namespaces.Network, folder: Path) -> None:
        self.network, self._folder = network, folder
        self.jobs: list[Job] = []

    def start(self, number: int, **environment: str) -> Job:
        """The agent of a node."""
        job = Job(
            [*namespaces.inside(self.network.nodes[number]), "deploy/torchrun_c10d.sh"],
            self._folder,
            **{
                "PYTHON": sys.executable,
                "NODES": "2",
                "NPROC": "1",
                "RUN": "faults",
                "HEAD": f"{namespaces.address(0)}:29400",
                "ADDRESS": namespaces.address(number),
                "IS_HOST": str(int(number == 0)),
                "CHECKPOINT": str(self._folder / "run"),
                "LOGS": str(self._folder / f"logs{number}"),
                "GLOO_SOCKET_IFNAME": namespaces.INTERFACE,
                "TRAIN": f"-m {TRAIN}",
                **environment,
            },
        )
        self.jobs.append(job)
        return job

    def trained(self) -> float:
        """When rank 0, on whichever node, has trained `AT` steps; now."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            lines = [line for job in self.jobs for _, line in list(job.lines)]
            if any(re.search(rf"step +{AT}/", line) for line in lines):
                return time.monotonic()
            time.sleep(0.01)
        raise SystemExit(f"faults: step {AT} was never done:\n" + "\n".join(lines[-40:]))


@contextmanager
def nodes(folder: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        made = Nodes(stack.enter_context(namespaces.network(3)), folder)
        stack.callback(lambda: [job.kill() for job in made.jobs if job.process.poll() is None])
        yield made


def _node_killed(folder: Path) -> Seen:
    """The agent and its worker; another node is there at once."""
    with nodes(folder) as made:
        _, lost = made.start(0), made.start(1)
        fault = made.trained()
        lost.kill()
        made.start(2)
        return ended(made.jobs, fault)


def _agent_killed(folder: Path) -> Seen:
    """The agent alone, whose worker trains on; another node is there at once.

    Steps take longer: agents miss one another after 15.
    """
    with nodes(folder) as made:
        _, lost = made.start(0, FSDP2_TEST_STEP="1.5"), made.start(1, FSDP2_TEST_STEP="1.5")
        fault = made.trained()
        orphans = _below(lost.process.pid)
        lost.was_killed = True
        os.kill(lost.process.pid, signal.SIGKILL)
        made.start(2, FSDP2_TEST_STEP="1.5")
        try:
            return ended(made.jobs, fault)
        finally:
            for pid in orphans:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _cut_for_a_while(folder: Path) -> Seen:
    with nodes(folder) as made:
        made.start(0)
        made.start(1)
        fault = made.trained()
        made.network.set_link(1, "down")
        time.sleep(5)
        made.network.set_link(1, "up")
        return ended(made.jobs, fault)


def _cut_for_ever(folder: Path) -> Seen:
    """The node that is cut off is given up; another one is there at once."""
    with nodes(folder) as made:
        _, lost = made.start(0), made.start(1)
        fault = made.trained()
        made.network.set_link(1, "down")
        made.start(2)
        made.jobs[0].process.wait(PATIENCE)
        lost.kill()
        return ended(made.jobs, fault)


def _clock_of_a_node(folder: Path, **environment: str) -> Seen:
    """Its agent's is a minute behind: what agents tell each other has times in it."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -m benchmarks.skewed -60 "$@"\n')
    python.chmod(0o755)
    with nodes(folder) as made:
        made.start(0, **environment)
        made.start(1, **environment, PYTHON=str(python))
        return ended(made.jobs, None)


FAULTS: dict[str, Callable[[Path], Seen]] = {
    "a rank is killed in forward": _inside("1:forward:kill"),
    "a rank is killed in backward": _inside("1:backward:kill"),
    "a rank is killed in the all-reduce over copies": _inside(
        "1:all-reduce:kill", "--replicate", "2"
    ),
    "a rank is killed in the optimizer's step": _inside("1:step:kill"),
    "a rank is killed in a save": _inside("1:save:kill"),
    "one rank has no memory left": _inside("1:forward:memory"),
    "a rank stands still for 5 s": _inside("1:forward:slow"),
    "the clock of a rank is a minute ahead": _clock_of_a_rank,
    "SIGTERM to a rank": _signal,
    "the disk is full in a save": _disk_full,
    "a node is killed": _node_killed,
    "a node's agent is killed, its worker lives": _agent_killed,
    "a node's link is cut for 5 s": _cut_for_a_while,
    "a node's link is cut for good": _cut_for_ever,
    "the clock of a node's agent is a minute behind": _clock_of_a_node,
    "a minute behind with MISSED=20": functools.partial(_clock_of_a_node, MISSED="20"),
}
OF_NODES = [name for name in FAULTS if "node" in name or "MISSED" in name]
OF_ROOT = [*OF_NODES, "the disk is full in a save"]


def missing(name: str) -> str | None:
    """Why this machine cannot have a fault."""
    if name in OF_NODES:
        return namespaces.missing()
    if name in OF_ROOT and os.geteuid() != 0:
        return "a disk of its own needs root"
    return None


# ---------------------------------------------------------------------------------------------
# Undisturbed runs, and the table


@functools.cache
def undisturbed() -> dict[int, str]:
    """Losses by step."""
    with tempfile.TemporaryDirectory(prefix="fsdp2-faults-") as folder:
        seen = ended([Job(OURS, Path(folder), FSDP2_TEST_STEP="0")], None)
    losses = {int(m[1]): m[2] for _, line in seen.lines if (m := STEP.match(line))}
    if len(losses) != STEPS:
        raise SystemExit("faults: " + "\n".join(line for _, line in seen.lines[-40:]))
    return losses


def run(name: str) -> Row:
    """Let it happen."""
    with tempfile.TemporaryDirectory(prefix="fsdp2-faults-") as folder:
        seen = FAULTS[name](Path(folder))
    row = judge(seen, undisturbed())
    if not row.equal or seen.hung:
        print("\n".join(line for _, line in seen.lines[-60:]), file=sys.stderr)
    return row


def table(rows: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows."""
    header = ("fault", "how it goes on", "seconds", "steps trained again", "losses")
    return header, [
        (
            name,
            row["outcome"],
            "" if row["seconds"] is None else f"{row['seconds']:.1f}",
            str(row["again"]),
            "equal" if row["equal"] else "DIFFER",
        )
        for name, row in rows.items()
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__, rounds=None)
    words = "; ".join(FAULTS)
    kind = harness.among(FAULTS, ";")
    parser.add_argument(
        "--faults", type=kind, default=list(FAULTS), help=f"with ; between: {words}"
    )
    return parser.parse_args(None if arguments is None else list(arguments))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    print(f"{harness.describe(harness.environment())}\n")
    rows: dict[str, dict[str, Any]] = {}
    for name in options.faults:
        reason = missing(name)
        if reason is not None:
            print(f"left out: {name} ({reason})")
            continue
        rows[name] = asdict(run(name))
        print("  ".join(table({name: rows[name]})[1][0]), flush=True)
    print(f"\n{harness.table(*table(rows))}")
    harness.write_json(options.json, {"rows": rows}, timed=False)


if __name__ == "__main__":
    main()
