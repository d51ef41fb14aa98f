"""Faults among replica groups (`train_lm --elastic`): how they end, and after how many seconds.

    python benchmarks/group_faults.py                        # all; needs torchft
    python benchmarks/group_faults.py --faults "a replica group is killed"

Groups of two gloo ranks train a tiny model. When all of them have committed step `AT`, something
happens; the run ends when each group that was lost has come back and committed steps with the
others. Per fault:

    seconds until a step  from the fault until a step is committed and printed (one step in ten is)
    until all are back    seconds from the fault until all groups take part again
    dropped               votes of groups against a step, which was then tried again
    weights               whether all groups end with the same weights, bit for bit
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import options as common
from benchmarks import stats
from benchmarks.printed import PATIENCE, Printed

AT = 20
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
MARK = "FSDP2_BENCHMARK_RUN"
COMMITTED = re.compile(r"step (\d+): loss ")
TAKING_PART = re.compile(r"step \d+: (\d+) of (\d+) groups take part")
SERVE = (
    "import sys, time; from torchft.coordination import LighthouseServer; "
    "server = LighthouseServer(bind=f'[::]:{sys.argv[1]}', min_replicas=1, join_timeout_ms=60000, "
    "heartbeat_timeout_ms=2000); print(server.address(), flush=True); time.sleep(10**6)"
)
"""A lighthouse in a process of its own, at a port that is given."""


@dataclass(frozen=True)
class Row:
    """What became of a fault; the attributes are the columns of the table."""

    step: float | None
    back: float | None
    dropped: int
    equal: bool


class Lighthouse:
    """torchft's lighthouse, which may be killed and started again at its old port."""

    def __init__(self) -> None:
        self._port = 0
        self.address = ""
        self.start()

    def start(self) -> None:
        """Serve, at the port of before if there was one."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(self._port)],
            env={**os.environ, "RUST_LOG": "error"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        self._port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


class Run(Printed):
    """A run of the example.

    Args:
        groups: how many.
        steps: that are committed in all.
        lighthouse: of its own where there is none.
    """

    def __init__(self, groups: int, steps: int, lighthouse: Lighthouse | None = None) -> None:
        self.mark = f"{os.getpid()}-{id(self)}"
        environment = {"RUST_LOG": "error", MARK: self.mark}
        if lighthouse is not None:
            environment[LIGHTHOUSE] = lighthouse.address
        command = ["-m", "fsdp2.examples.train_lm", "--elastic", str(groups), "--preset", "tiny"]
        command += ["--data", "docs", "--seq-len", "16", "--steps", str(steps)]
        super().__init__([sys.executable, *command], environment)

    def kill(self, group: int, rank: int = 1) -> None:
        """Kill one rank of a group, which takes the group with it."""
        wanted = {f"{MARK}={self.mark}", f"FSDP2_EXAMPLE_GROUP={group}", f"RANK={rank}"}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = folder.joinpath("environ").read_bytes().decode(errors="replace")
                if wanted <= {*words.split("\0")}:
                    os.kill(int(folder.name), signal.SIGKILL)

    def end(self) -> None:
        """Wait for the end; a run that hangs is ended."""
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(30)
        self.reader.join(10)


def _killed(numbers: Sequence[int]) -> Callable[[int], tuple[Run, float]]:
    """A rank of each of these groups is killed at once."""

    def happen(steps: int) -> tuple[Run, float]:
        run = Run(max(numbers) + 1, steps)
        run.wait_for(rf"^step {AT}: loss")
        fault = time.monotonic()
        for number in numbers:
            run.kill(number)
        return run, fault

    return happen


def _lighthouse(steps: int) -> tuple[Run, float]:
    """The lighthouse is killed, and started again 5 s later."""
    lighthouse = Lighthouse()
    run = Run(2, steps, lighthouse)
    run.wait_for(rf"^step {AT}: loss")
    fault = time.monotonic()
    lighthouse.kill()
    time.sleep(5)
    lighthouse.start()
    threading.Thread(target=lambda: (run.process.wait(), lighthouse.kill()), daemon=True).start()
    return run, fault


FAULTS: dict[str, Callable[[int], tuple[Run, float]]] = {
    "a replica group is killed": _killed([1]),
    "two of three groups are killed, and join at once": _killed([1, 2]),
    "the lighthouse is killed, and started again after 5 s": _lighthouse,
}


def judge(lines: Sequence[tuple[float, str]], fault: float) -> Row:
    """A row of the table."""
    after = [(at, line) for at, line in lines if at > fault]
    step = next((at for at, line in after if COMMITTED.match(line)), None)
    counts = [(at, m[1] == m[2]) for at, line in after if (m := TAKING_PART.match(line))]
    fewer = next((at for at, are_all in counts if not are_all), None)
    all_back = [at for at, are_all in counts if are_all and fewer is not None and at > fewer]
    return Row(
        step=None if step is None else step - fault,
        back=all_back[0] - fault if all_back else None,
        dropped=sum("is dropped, and tried again" in line for _, line in after),
        equal=any("groups end with the same weights" in line for _, line in after),
    )


def observe(name: str, steps: int) -> Row:
    """Let it happen."""
    run, fault = FAULTS[name](steps)
    run.end()
    row = judge(run.lines, fault)
    if not row.equal:
        print(run.text(), file=sys.stderr)
    return row


def table(rows: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows."""
    header = ("fault", "seconds until a step", "until all are back", "dropped", "weights")
    return header, [
        (
            name,
            _seconds(row["step"]),
            _seconds(row["back"]),
            str(row["dropped"]),
            "equal" if row["equal"] else "DIFFER",
        )
        for name, row in rows.items()
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def page_table(results: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    return "\n\n" + stats.markdown(*table(results["rows"]))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What goes wrong among replica groups.")
    parser.add_argument(
        "--faults",
        type=common.among(FAULTS, ";"),
        default=list(FAULTS),
        help=f"of, with ; between: {'; '.join(FAULTS)}",
    )
    parser.add_argument("--steps", type=int, default=1500, help="of a run (default 1500)")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if importlib.util.find_spec("torchft") is None:
        raise SystemExit("torchft is missing: pip install 'fsdp2[elastic]'")
    print(f"{stats.describe(stats.environment('cpu'))}\n")
    rows = {name: asdict(observe(name, options.steps)) for name in options.faults}
    print(stats.table(*table(rows)))
    stats.write_json(options.json, "cpu", {"rows": rows})


if __name__ == "__main__":
    main()
