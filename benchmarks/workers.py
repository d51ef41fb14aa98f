"""Child processes that each hold one variant ready, so that variants can take turns.

A machine drifts: its clock, its temperature, what else runs on it. So the parent starts one worker
per variant, keeps all of them alive, and asks them for a short burst of steps in turn, A B C A B C;
only one runs at any time. Figures are then compared within a round.

A benchmark module `benchmarks.<name>` offers `make_worker(spec) -> handler`, which builds and warms
up the variant that `spec` describes; `handler(request)` runs one burst and returns its figures.
Requests and answers are JSON, one a line, on the worker's standard input and output.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class Worker:
    """The parent's end of one worker."""

    def __init__(self, module: str, label: str, spec: dict[str, Any]) -> None:
        self.label = label
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.workers", module, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait for the worker's warm-up; returns what it says about itself."""
        return self.receive()

    def ask(self, **request: Any) -> dict[str, Any]:
        self.send(**request)
        return self.receive()

    def send(self, **request: Any) -> None:
        """The first half of `ask`, for workers that must run together."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def receive(self) -> dict[str, Any]:
        """The second half of `ask`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"worker {self.label!r} ended with exit status {self._process.wait()}; "
                f"its own error message is above"
            )
        return json.loads(line)


@contextmanager
def pool(
    module: str, specs: dict[str, dict[str, Any]], *, at_once: bool = False
) -> Iterator[dict[str, Worker]]:
    """Workers by label, warmed up; one after another, or all `at_once` where cores abound."""
    workers: dict[str, Worker] = {}
    try:
        for label, spec in specs.items():
            workers[label] = Worker(module, label, spec)
            if not at_once:
                workers[label].wait_until_ready()
        if at_once:
            for worker in workers.values():
                worker.wait_until_ready()
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


class Asked(Protocol):
    """What takes turns: a worker, or several that run together."""

    def ask(self, **request: Any) -> dict[str, Any]: ...


def take_turns(
    workers: Mapping[str, Asked], rounds: int, **request: Any
) -> dict[str, list[dict[str, Any]]]:
    """Ask every worker in turn, `rounds` times: answers by label, one a round."""
    answers: dict[str, list[dict[str, Any]]] = {label: [] for label in workers}
    for _ in range(rounds):
        for label, worker in workers.items():
            answers[label].append(worker.ask(**request))
    return answers


def main() -> None:
    """The worker's end."""
    # Whatever libraries print goes to standard error: standard output is for answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    module, spec = sys.argv[1], json.loads(sys.argv[2])
    handler: Handler = importlib.import_module(f"benchmarks.{module}").make_worker(spec)
    answer({"ready": True})
    for line in sys.stdin:
        answer(handler(json.loads(line)))

    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
