"""Child processes that each hold one variant ready, so that variants can take turns.

A machine drifts: its clock, its temperature, what else runs on it. So the parent starts one worker
per variant, keeps all of them alive, and asks them for a short burst of steps in turn, A B C A B C;
only one runs at any time. Figures are then compared within a round.

A benchmark module `benchmarks.<name>` offers `make_worker(spec) -> handler`, which builds and warms
up the variant that `spec` describes; `handler(request)` runs one burst and returns its figures.
Requests and answers are JSON, one a line, on the worker's standard input and output.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

ROOT = Path(__file__).resolve().parents[1]

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def join_ranks(
    spec: dict[str, Any], ranks: int, timeout: datetime.timedelta, backend: str = "gloo"
) -> int:
    """In a worker: be one of some ranks of one thread each; returns which.

    Args:
        spec: has "rank", and in "store" the path of a file that all of them share.
        ranks: how many there are.
        timeout: of a collective, should another rank have died.
        backend: of the default process group.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank: int = spec["rank"]
    store = dist.FileStore(spec["store"], ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    return rank


class Lost(SystemExit):
    """A worker ended, or did not answer in time. It ends a benchmark that does not catch it."""


class Worker:
    """The parent's end of one worker; ``log`` takes what it writes to standard error.

    A spec may have "environment", variables of the worker's own, and "prefix", a command that runs
    it, such as ``ip netns exec NAME``.
    """

    def __init__(
        self, module: str, label: str, spec: dict[str, Any], log: IO[str] | None = None
    ) -> None:
        self.label = label
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        self._process = subprocess.Popen(
            [
                *spec.get("prefix", ()),
                *(sys.executable, "-m", "benchmarks.workers", module, json.dumps(spec)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **spec.get("environment", {})},
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

    def kill(self) -> None:
        """Ends it in the middle of what it does."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Tells it that nothing more will be asked; ranks leave together."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        self.stop()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The second half of `ask`; ``timeout`` in seconds, by default none."""
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], timeout)[0]:
            raise Lost(f"worker {self.label!r} has not answered in {timeout:.0f} s")
        line = stdout.readline()
        if not line:
            raise Lost(
                f"worker {self.label!r} ended with exit status {self._process.wait()}; "
                f"its own error message is above"
            )
        return json.loads(line)


def _keep(
    call: Callable[[], dict[str, Any]], label: str, lost: dict[str, str] | None
) -> dict[str, Any] | None:
    """What a call of a worker returns; ``None``, and a note, if the worker is lost."""
    try:
        return call()
    except Lost as error:
        if lost is None:
            raise
        lost[label] = str(error)
        return None


@contextmanager
def pool(
    module: str,
    specs: dict[str, dict[str, Any]],
    *,
    at_once: bool = False,
    lost: dict[str, str] | None = None,
) -> Iterator[dict[str, Worker]]:
    """Workers by label, warmed up; one after another, or all `at_once` where cores abound.

    Those that end meanwhile are put into ``lost``, with the reason; without it they end us, too.
    """
    workers: dict[str, Worker] = {}
    try:
        for label, spec in specs.items():
            workers[label] = Worker(module, label, spec)
            if not at_once:
                _keep(workers[label].wait_until_ready, label, lost)
        if at_once:
            for label, worker in workers.items():
                _keep(worker.wait_until_ready, label, lost)
        yield workers
    finally:
        for worker in workers.values():
            worker.stop()
        for worker in workers.values():
            worker.close()


class Ranks:
    """The ranks of one variant: all get every request, of each figure the largest counts.

    What is no number is as rank 0 says.
    """

    def __init__(self, ranks: list[Worker]) -> None:
        self._ranks = ranks

    def ask(self, **request: Any) -> dict[str, Any]:
        for rank in self._ranks:
            rank.send(**request)
        answers = [rank.receive() for rank in self._ranks]
        return {
            key: max(each[key] for each in answers) if isinstance(value, (int, float)) else value
            for key, value in answers[0].items()
        }


@contextmanager
def rank_pools(
    module: str, specs: dict[str, dict[str, Any]], ranks: int, lost: dict[str, str] | None = None
) -> Iterator[dict[str, Ranks]]:
    """`ranks` workers for each spec, which find "rank" and "store" in it; warmed up in turn.

    ``lost`` is as for `pool`: a variant is lost with any of its ranks.
    """
    found: dict[str, Ranks] = {}
    with tempfile.TemporaryDirectory(prefix="fsdp2-ranks-") as folder, ExitStack() as stack:
        for number, (label, spec) in enumerate(specs.items()):
            store = os.path.join(folder, str(number))
            each = {f"{label}, rank {r}": {**spec, "store": store, "rank": r} for r in range(ranks)}
            gone: dict[str, str] | None = None if lost is None else {}
            own = stack.enter_context(pool(module, each, at_once=True, lost=gone))
            found[label] = Ranks(list(own.values()))
            if lost is not None and gone:
                lost[label] = next(iter(gone.values()))
        yield found


class Asked(Protocol):
    """What takes turns: a worker, or several that run together."""

    def ask(self, **request: Any) -> dict[str, Any]: ...


def take_turns(
    workers: Mapping[str, Asked],
    rounds: int,
    lost: dict[str, str] | None = None,
    **request: Any,
) -> dict[str, list[dict[str, Any]]]:
    """Ask every worker in turn, `rounds` times: answers by label, one a round.

    Workers in ``lost``, which grows as in `pool`, are asked no more, and have no answers.
    """
    answers: dict[str, list[dict[str, Any]]] = {
        label: [] for label in workers if not lost or label not in lost
    }
    for _ in range(rounds):
        for label in list(answers):
            answer = _keep(partial(workers[label].ask, **request), label, lost)
            if answer is None:
                del answers[label]
            else:
                answers[label].append(answer)
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
