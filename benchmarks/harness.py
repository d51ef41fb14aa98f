"""What all benchmarks share: variants that take turns, a quiet check, tables, JSON.

A machine drifts: its clock, its temperature, what else runs on it. The parent starts one worker (or
several ranks) per variant, keeps all of them alive, and asks them for a short burst of steps in
turn, A B C A B C; only one variant runs at any time. Figures are then compared within a round.

A module `benchmarks.<name>` has `make_worker(spec) -> handler`, which builds and warms up the
variant that ``spec`` describes; ``handler(request)`` runs one burst and returns its figures.
Requests and answers are JSON, one per line, on the worker's standard input and output. All times
are milliseconds.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import select
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # seconds
TIMEOUT = datetime.timedelta(minutes=3)  # of a collective, should another rank have died

Handler = Callable[[dict[str, Any]], dict[str, Any]]
Rounds = dict[str, dict[str, list[Any]]]
"""Figures by variant and kind, one per round."""


# ---------------------------------------------------------------------------------------------
# Medians and tables


@dataclass(frozen=True)
class Summary:
    """Median, smallest and largest of one figure's values per round."""

    median: float
    min: float
    max: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.min:.2f} .. {self.max:.2f}]"


def summarize(values: Sequence[float]) -> Summary:
    return Summary(statistics.median(values), min(values), max(values))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Summary:
    """Round by round, numerator / denominator: drift of the machine cancels within a round."""
    return summarize([n / d for n, d in zip(numerator, denominator, strict=True)])


def added(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round, what ``values`` adds to ``base``."""
    return [v - b for v, b in zip(values, base, strict=True)]


def over(rounds: Rounds, kind: str, base: str) -> dict[str, Summary]:
    """One kind of figure of each variant, divided by that of ``base``."""
    if base not in rounds:
        return {}
    others = {name: each[kind] for name, each in rounds.items() if name != base}
    return {f"{name} / {base}": ratio(own, rounds[base][kind]) for name, own in others.items()}


def print_ratios(ratios: Mapping[str, Summary]) -> None:
    for label, found in ratios.items():
        print(f"{label}: {found.median:.3f} [{found.min:.3f} .. {found.max:.3f}]")


def print_rounds(rounds: Rounds, kinds: Sequence[str] | None = None) -> None:
    """A table of medians: a row per variant, a column per kind of number."""
    some = next(iter(rounds.values()))
    shown = kinds or [kind for kind in some if not isinstance(some[kind][0], str)]
    rows = [[name, *(summarize(each[k]) for k in shown)] for name, each in rounds.items()]
    print(table(("variant", *shown), rows))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain text table: the first column to the left, the others to the right."""
    from fsdp2.tracing import summaries  # a worker may measure the import of fsdp2

    return "\n".join(summaries.table(header, [[str(cell) for cell in row] for row in rows]))


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same as a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# ---------------------------------------------------------------------------------------------
# The machine: what it is, and whether others used it

QUIET = 0.1  # processors
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Taken:
    """Processors that others used, as a mean over a run.

    A load average says less: for a minute it still has the process that ran before, and it has no
    time of a hypervisor.

    Attributes:
        others: used by processes that are neither the benchmark nor its children.
        stolen: given to other machines by the hypervisor.
    """

    others: float
    stolen: float

    @property
    def quiet(self) -> bool:
        """Whether figures of the run count."""
        return self.others + self.stolen <= QUIET

    def __str__(self) -> str:
        used = f"other processes used {self.others:.2f} processors, other machines"
        found = "quiet" if self.quiet else "busy, repeat this run"
        return f"{found}: {used} {self.stolen:.2f}"


def _now() -> tuple[float, float, float, float] | None:
    """Seconds: all processors busy, stolen, of this process and its children, on the clock."""
    try:
        line = _STAT.read_text().split("\n", 1)[0]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    ticks = os.sysconf("SC_CLK_TCK")
    busy = (user + nice + system + irq + softirq) / ticks
    return busy, steal / ticks, sum(os.times()[:4]), time.monotonic()


_START = _now()  # from the import on


def taken() -> Taken | None:
    """What others used since this process began; ``None`` where the system does not tell."""
    end = _now()
    if _START is None or end is None:
        return None
    busy, stolen, own, wall = (b - a for a, b in zip(_START, end, strict=True))
    return Taken(max(busy - own, 0.0) / max(wall, 1e-9), stolen / max(wall, 1e-9))


def environment(device_type: str = "cpu") -> dict[str, Any]:
    """What a figure depends on besides the code: versions, processor, accelerator, command."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
    }
    found = taken()
    if found is not None:
        facts["taken"] = asdict(found)
    if device_type == "cuda" and torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe(facts: Mapping[str, Any]) -> str:
    """One line of `environment`'s facts."""
    on = facts.get("gpu") or f"{facts['cpu']} ({facts['cores']} cores)"
    return f"torch {facts['torch']}, Python {facts['python']}, {on}"


def write_json(
    path: str | None, results: object, device_type: str = "cpu", *, timed: bool = True
) -> None:
    """Keep results and their environment in a file, if one was asked for; call it last.

    Prints whether the machine was quiet, unless nothing is ``timed``.
    """
    facts = environment(device_type)
    if not timed:
        facts.pop("taken", None)
    if "taken" in facts:
        print(f"\nmachine: {Taken(**facts['taken'])}")
    if path is not None:
        content = {"environment": facts, "results": results}
        Path(path).write_text(json.dumps(content, indent=2, default=_plain) + "\n")


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else vars(value)


# ---------------------------------------------------------------------------------------------
# Options


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


def make_parser(
    doc: str | None,
    *,
    variants: Sequence[str] = (),
    default: Sequence[str] = (),
    rounds: int | None = 7,
    steps: int | None = None,
    devices: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks share, for those whose defaults are given.

    Args:
        doc: of the module, which ``--help`` prints.
        variants: all that are known.
        default: those that run unless others are named; empty: all.
        rounds: how often each variant is asked.
        steps: of a burst.
        devices: the first one is the default.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    if variants:
        shown, chosen = ", ".join(variants), ",".join(default or variants)
        parser.add_argument(
            "--variants", type=among(variants), default=chosen, help=f"comma list of {shown}"
        )
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}")
    if steps is not None:
        parser.add_argument("--steps", type=int, default=steps, help=f"of a burst, default {steps}")
    if devices:
        parser.add_argument("--device", choices=devices, default=devices[0])
    parser.add_argument("--json", metavar="FILE", help="write results there, too")
    return parser


# ---------------------------------------------------------------------------------------------
# Workers


def join_ranks(spec: Mapping[str, Any], ranks: int, backend: str = "gloo") -> int:
    """In a worker: be rank ``spec["rank"]`` of some, of one thread each; returns the rank."""
    torch.set_num_threads(1)
    rank: int = spec["rank"]
    store = dist.FileStore(spec["store"], ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    return rank


class Lost(SystemExit):
    """A worker ended, or did not answer in time; ends a benchmark that does not catch it."""


class Worker:
    """The parent's end of one worker.

    A spec may have "environment", variables of the worker's own, and "prefix", a command that runs
    it, such as ``ip netns exec NAME``.
    """

    def __init__(self, module: str, label: str, spec: Mapping[str, Any]) -> None:
        self.label = label
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        command = [sys.executable, "-m", "benchmarks.harness", module, json.dumps(spec)]
        self._process = subprocess.Popen(
            [*spec.get("prefix", ()), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **spec.get("environment", {})},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def send(self, **request: Any) -> None:
        self._stdin.write(json.dumps(request) + "\n")
        self._stdin.flush()

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The next answer; ``timeout`` in seconds, by default none."""
        if not select.select([self._stdout], [], [], timeout)[0]:
            raise Lost(f"worker {self.label!r} has not answered in {timeout:.0f} s")
        line = self._stdout.readline()
        if not line:
            status = self._process.wait()
            raise Lost(f"worker {self.label!r} ended with exit status {status}: see above")
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        """Tell it that nothing more will be asked; ranks leave together."""
        with suppress(BrokenPipeError):
            self._stdin.close()

    def close(self) -> None:
        self.stop()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Ranks:
    """The workers of one variant: all get each request; of each number the largest counts.

    Of what is no number, rank 0's counts.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def ask(self, **request: Any) -> dict[str, Any]:
        for worker in self._workers:
            worker.send(**request)
        answers = [worker.receive() for worker in self._workers]
        return {
            key: max(each[key] for each in answers) if isinstance(value, (int, float)) else value
            for key, value in answers[0].items()
        }


@contextmanager
def pool(
    module: str,
    specs: Mapping[str, Mapping[str, Any]],
    ranks: int = 0,
    *,
    at_once: bool = False,
    lost: dict[str, str] | None = None,
) -> Iterator[dict[str, Ranks]]:
    """Workers of each variant, warmed up in turn, or all ``at_once`` where cores abound.

    Args:
        module: of benchmarks, that has ``make_worker``.
        specs: by variant.
        ranks: workers of a variant, which find "rank" and "store" in their specs; 0: one worker
            that has neither. A spec's "where" has one more spec per rank instead.
        at_once: see above.
        lost: takes variants whose workers end, and the reason; without it they end us, too.
    """
    found: dict[str, list[Worker]] = {}

    def wait(label: str) -> None:
        for worker in found[label]:
            with _noted(label, lost):
                worker.receive()

    with tempfile.TemporaryDirectory(prefix="fsdp2-ranks-") as folder, ExitStack() as stack:
        stack.callback(lambda: [worker.close() for own in found.values() for worker in own])
        stack.callback(lambda: [worker.stop() for own in found.values() for worker in own])
        for number, (label, spec) in enumerate(specs.items()):
            own = [dict(spec)]
            if ranks or "where" in spec:
                places = spec.get("where") or [{}] * ranks
                store = os.path.join(folder, str(number))
                own = [{**spec, **p, "rank": r, "store": store} for r, p in enumerate(places)]
            found[label] = [Worker(module, label, {**each, "where": None}) for each in own]
            if not at_once:
                wait(label)
        for label in found if at_once else ():
            wait(label)
        yield {label: Ranks(own) for label, own in found.items()}


@contextmanager
def _noted(label: str, lost: dict[str, str] | None) -> Iterator[None]:
    try:
        yield
    except Lost as error:
        if lost is None:
            raise
        lost.setdefault(label, str(error))


def take_turns(
    pool: Mapping[str, Ranks], rounds: int, lost: dict[str, str] | None = None, **request: Any
) -> Rounds:
    """Ask every variant in turn, ``rounds`` times; those that are ``lost`` have no figures."""
    answers: dict[str, list[dict[str, Any]]] = {label: [] for label in pool}
    for _ in range(rounds):
        for label in pool:
            if not lost or label not in lost:
                with _noted(label, lost):
                    answers[label].append(pool[label].ask(**request))
    return {
        label: {kind: [answer[kind] for answer in each] for kind in each[0]}
        for label, each in answers.items()
        if not lost or label not in lost
    }


def measure(
    module: str,
    specs: Mapping[str, Mapping[str, Any]],
    rounds: int,
    ranks: int = 0,
    lost: dict[str, str] | None = None,
    **request: Any,
) -> Rounds:
    """Start workers of each spec, and let them take turns."""
    with pool(module, specs, ranks, lost=lost) as found:
        return take_turns(found, rounds, lost, **request)


def main() -> None:
    """The worker's end."""
    # What libraries print goes to standard error: standard output is for answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, spec = sys.argv[1], json.loads(sys.argv[2])
    handler: Handler = importlib.import_module(f"benchmarks.{module}").make_worker(spec)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(handler(json.loads(line))), file=answers, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
