"""Starting, watching and ending this machine's workers, and the worker's side of it.

`run_workers` does on one machine what torchrun does: it sets RANK, WORLD_SIZE and similar
variables, and starts the same command once per rank. A worker cannot tell the two apart, except by
three things that only `run_workers` provides: a store that the parent serves (so another process
cannot take the port), a file for its traceback, and a pipe that closes when the parent ends.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from .options import GivenRanks

_PARENT_STORE = "FSDP2_EXAMPLE_PARENT_STORE"
_TRACEBACK_FILE = "FSDP2_EXAMPLE_TRACEBACK_FILE"
_LIFELINE = "FSDP2_EXAMPLE_LIFELINE"
_HOST = "127.0.0.1"
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_MAX_RESTARTS = 100  # of all groups together
_TIMEOUT = timedelta(minutes=10)  # of a collective, and of a store
_SPEAKING_SECONDS = 60.0


# --- the parent ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """How a run ends that is told to.

    Attributes:
        grace: seconds that workers have from the signal on, to save; a second signal ends them.
        preempted: the exit code of workers that a signal has ended, and that have saved. Default
            ``None``: they do not save.
    """

    grace: float = _GRACE_SECONDS
    preempted: int | None = None


def run_workers(
    module: str,
    argv: Sequence[str],
    world_size: int,
    threads: int,
    name: str = "train_lm",
    ending: Ending = Ending(),
) -> int:
    """Run ``python -m module *argv`` on `world_size` ranks; returns one exit code for all.

    The exit code is 0 if every rank ended without error. If one fails, the others are ended, its
    traceback goes to stderr and its exit code (or 1) is returned. After a signal to this process,
    it is 128 + number, or the exit code of workers that have saved. Messages begin with `name`.
    """
    _die_with_parent()  # of one that started this group beside others
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="fsdp2-train-") as folder, _caught_signals() as caught:
        lifeline, held_end = os.pipe()
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                env = _worker_env(rank, world_size, threads, store.port, Path(folder), lifeline)
                command = [sys.executable, "-m", module, *argv]
                # Ctrl-C reaches the whole foreground group; only the parent shall act on it. A
                # blocked signal stays blocked in a child, and waits for the parent.
                with _blocked(signal.SIGINT):
                    workers.append(subprocess.Popen(command, env=env, pass_fds=(lifeline,)))
            return _watch(workers, caught, Path(folder), name, ending)
        finally:
            _end(workers)
            os.close(lifeline)
            os.close(held_end)
            if sys.stdout.isatty():
                # A worker that was ended beside its progress bar could not bring the cursor back.
                print("\x1b[?25h", end="", flush=True)


def run_groups(
    module: str,
    argv: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    watch: Callable[[Sequence[int]], bool],
    name: str = "train_lm",
) -> int:
    """Run ``python -m module *argv`` in each environment; one that fails is started again.

    0 where all ended well. `watch` is called again and again with the numbers of those that run; it
    says whether one that fails now is started again.
    """
    with _caught_signals() as caught:
        lifeline, held_end = os.pipe()
        groups: list[subprocess.Popen[bytes]] = []
        restarts = 0

        def start(number: int) -> subprocess.Popen[bytes]:
            env = {**os.environ, **environments[number], _LIFELINE: str(lifeline)}
            with _blocked(signal.SIGINT):
                command = [sys.executable, "-m", module, *argv]
                return subprocess.Popen(command, env=env, pass_fds=(lifeline,))

        try:
            groups += map(start, range(len(environments)))
            while not caught:
                codes = [group.poll() for group in groups]
                starts_again = watch([n for n, code in enumerate(codes) if code is None])
                for number, code in enumerate(codes):
                    if code and (code == 2 or restarts == _MAX_RESTARTS):
                        return code if code > 0 else 1
                    if code and starts_again:
                        restarts += 1
                        print(f"{name}: group {number} is started again", flush=True)
                        groups[number] = start(number)
                if all(group.poll() is not None for group in groups):
                    return 0 if 0 in codes else 1
                time.sleep(_POLL_SECONDS)
            return 128 + caught[0]
        finally:
            _end(groups)
            os.close(lifeline)
            os.close(held_end)


def _worker_env(
    rank: int, world_size: int, threads: int, port: int, folder: Path, lifeline: int
) -> dict[str, str]:
    # Threads that wait by spinning take the core from those they wait for once another process
    # wants it too: 700 tokens/s with spinning against 8,000 without on two busy cores.
    return (
        {"OMP_WAIT_POLICY": "PASSIVE"}
        | os.environ
        | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": str(threads),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(port),
            _PARENT_STORE: "1",
            _TRACEBACK_FILE: str(folder / f"rank{rank}"),
            _LIFELINE: str(lifeline),
        }
    )


def _watch(
    workers: list[subprocess.Popen[bytes]],
    caught: list[int],
    folder: Path,
    name: str,
    ending: Ending,
) -> int:
    """Wait until all workers ended well (0), one did not, or a signal came."""
    well = (0, ending.preempted)
    while not caught:
        codes = [worker.poll() for worker in workers]
        failed = {rank: code for rank, code in enumerate(codes) if code and code not in well}
        if failed:
            return _report_failure(failed, folder, name)
        if None not in codes:
            return max(code for code in codes if code is not None)
        time.sleep(_POLL_SECONDS)
    _end(workers, ending.grace, caught)
    if all(worker.returncode == ending.preempted for worker in workers):
        return workers[0].returncode
    return 128 + caught[0]


def _report_failure(failed: dict[int, int], folder: Path, name: str) -> int:
    """Name the worker that failed first and print its traceback; the exit code to leave with.

    A rank that dies takes its peers down with connection errors, so of those that had ended by the
    same look, one that a signal ended comes first, then the one whose traceback is the oldest.
    """

    def order(rank: int) -> tuple[bool, int]:
        file = folder / f"rank{rank}"
        return failed[rank] > 0, file.stat().st_mtime_ns if file.exists() else sys.maxsize

    rank = min(failed, key=order)
    code = failed[rank]
    file = folder / f"rank{rank}"
    if file.exists():
        print(file.read_text(), end="", file=sys.stderr)
    if code == 2 and not file.exists():
        return 2  # the worker has said in one sentence what was wrong
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"
    print(f"{name}: worker {rank} {how}; the others were ended.", file=sys.stderr)
    return code if code > 0 else 1


def _end(
    workers: list[subprocess.Popen[bytes]],
    grace: float = _GRACE_SECONDS,
    caught: Sequence[int] = (0,),
) -> None:
    """End those that still run: SIGTERM, then SIGKILL after a grace period, or a second signal."""
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    deadline = time.monotonic() + grace
    while len(caught) < 2 and any(worker.poll() is None for worker in workers):
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
            worker.wait()


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """A list that receives signals instead of their ending this process."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- a worker ------------------------------------------------------------------------------------


def run_as_worker(work: Callable[[], int]) -> NoReturn:
    """Run `work` and leave with its code, whatever torch's threads do at interpreter exit.

    gloo together with a DeviceMesh sometimes aborts while the interpreter shuts down; `os._exit`
    keeps that from turning a good run into a bad exit code.
    """
    code = 1
    try:
        _die_with_parent()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # what the model writes may be no ASCII
        code = work()
    except BaseException:
        _write_traceback(traceback.format_exc())
    finally:
        with suppress(OSError):  # a reader that went away, as `| head` does
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def let_rank_0_speak() -> None:
    """Stay while rank 0 reports a mistake that all ranks find.

    A launcher ends all ranks as soon as one leaves; it usually ends this one long before the time
    is over. On a busy machine rank 0 may be many seconds later.
    """
    time.sleep(_SPEAKING_SECONDS)


def init_process_group(
    ranks: GivenRanks, backend: str, device: torch.device, timeout: timedelta = _TIMEOUT
) -> None:
    """Join the default group: over the parent's store where there is one, else as torchrun says."""
    if dist.is_initialized():
        return  # Ray Train has made it
    store: TCPStore | PrefixStore | None = None
    if _PARENT_STORE in os.environ:
        port = int(os.environ["MASTER_PORT"])
        store = TCPStore(_HOST, port, is_master=False, timeout=_TIMEOUT)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _store_of_this_attempt()
    dist.init_process_group(
        backend,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )


def _store_of_this_attempt() -> PrefixStore | None:
    """The elastic agent's store, without what workers of earlier attempts wrote into it.

    torch keeps one store for all attempts, in which a restarted worker may find the address of a
    peer that is dead, and wait for it until the time-out. Agents of several machines count their
    attempts for themselves, so there only TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 helps.
    """
    env = os.environ
    if env.get("GROUP_WORLD_SIZE") != "1":
        return None
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    agents = TCPStore(address, port, is_master=False, timeout=_TIMEOUT)
    return PrefixStore(f"attempt {env['TORCHELASTIC_RESTART_COUNT']}", agents)


def _die_with_parent() -> None:
    """Leave when the parent's end of the pipe closes, so that not even SIGKILL leaves an orphan."""
    lifeline = os.environ.get(_LIFELINE)
    if lifeline is None:
        return

    def wait() -> None:
        os.read(int(lifeline), 1)
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _write_traceback(text: str) -> None:
    path = os.environ.get(_TRACEBACK_FILE)
    if path is None:
        print(text, end="", file=sys.stderr)
    else:
        Path(path).write_text(text)
