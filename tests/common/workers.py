"""Real gloo ranks on CPU for tests: state how many ranks a test needs, and it runs on them.

    @ranks(2, 4)
    def test_sum(value: int) -> None:            # the body runs on every rank
        x = torch.full((3,), float(value))
        dist.all_reduce(x)
        assert x[0].item() == value * dist.get_world_size()

The marker `ranks` comes with it. pytest calls a stand-in for `test_sum` in its own process. That
sends the body's import path and its arguments to a pool of rank processes, and waits for all:

    pytest process                    pool of 2 (started once, lives until pytest ends)
    run_on_ranks(2, body, ...)  --->  rank 0: import body's module, call body(...), barrier
                                --->  rank 1:    "         "           "              "
                                <---  one ("returned", value) or ("raised", traceback) per rank

Life of a pool:

1. *start*: on the first test of its world size. Importing torch is the expensive part: it is done
   once, in a process that all ranks are forked from, and they stay for later tests, as does their
   default process group.
2. *call*: every rank starts from the same state (seed, grad mode, default dtype, one thread). The
   barrier behind the body makes a test that left the ranks out of step fail itself, and not the
   next one.
3. *failure or time-out*: ranks that do not report are asked for their stacks, then the pool is torn
   down, and the next test gets a new one: a rank that raised may have left others in a collective.
4. *end*: ranks destroy their process group and leave by `os._exit`, because torch can abort in an
   ordinary interpreter exit after gloo and a DeviceMesh were used. Should the pytest process die
   without saying so, each rank notices and leaves as well.

With FSDP2_TEST_BACKEND ranks take gloo for another kind of backend (`tests.common.backends`).

A test body must be importable by name (a module-level function), and arguments and return values
must be picklable.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest
import torch
import torch.distributed as dist

from tests.common.backends import pretend

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_TIMEOUT = 150.0  # seconds a call may take, on two busy cores shared by eight ranks
START_TIMEOUT = 180.0  # seconds until every rank has imported torch and found the others
GRACE = 5.0  # seconds the other ranks get to report, once one rank has failed
SEED = 0

RANK_BODY = "_rank_body"  # attribute of a decorated test: the function that runs on the ranks


class RankError(AssertionError):
    """At least one rank raised, died or did not answer in time. Says what each of them did."""


def ranks(
    *world_sizes: int, extended: Sequence[int] = (), timeout: float = DEFAULT_TIMEOUT
) -> Callable[[F], F]:
    """Makes a test function run on every rank of a pool, once for each of `world_sizes`.

    The extended run does so for each of `extended`, too. Parametrization and fixtures work as ever,
    as long as their values are picklable. A body that names a `world_size` argument gets it.
    """
    if not world_sizes:
        raise ValueError("ranks() needs at least one world size, as in @ranks(2)")

    def decorate(body: F) -> F:
        wants_world_size = "world_size" in inspect.signature(body).parameters

        @functools.wraps(body)
        def test(world_size: int, **kwargs: Any) -> None:
            __tracebackhide__ = True
            if wants_world_size:
                kwargs["world_size"] = world_size
            run_on_ranks(world_size, test, timeout=timeout, **kwargs)

        # pytest asks for arguments by this signature: the body's own and the world size.
        signature = inspect.signature(body)
        own = [p for p in signature.parameters.values() if p.name != "world_size"]
        world_size = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = signature.replace(parameters=[world_size, *own])  # type: ignore[attr-defined]
        setattr(test, RANK_BODY, body)
        sizes = [pytest.param(size, id=f"{size}ranks") for size in world_sizes]
        more = [
            pytest.param(size, id=f"{size}ranks", marks=pytest.mark.extended) for size in extended
        ]
        return pytest.mark.ranks(pytest.mark.parametrize("world_size", [*sizes, *more])(test))

    return decorate


def run_on_ranks(
    world_size: int,
    function: Callable[..., Any],
    /,
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT,
    **kwargs: Any,
) -> list[Any]:
    """Calls a module-level `function` on every rank; returns what each rank returned, by rank.

    Raises RankError, with every rank's traceback or stack, unless all of them return in time.
    """
    __tracebackhide__ = True
    target = (function.__module__, function.__qualname__)
    if "<locals>" in function.__qualname__ or "<lambda>" in function.__qualname__:
        raise ValueError(f"{'.'.join(target)} must be a module-level function: ranks import it")
    return _pool(world_size).call(target, args, kwargs, timeout)


# -- the pytest process ---------------------------------------------------------------------------

_pools: dict[int, _Pool] = {}


def _pool(world_size: int) -> _Pool:
    if world_size not in _pools:
        if not _pools:
            atexit.unregister(close_pools)  # at most one registration
            atexit.register(close_pools)
        _pools[world_size] = _Pool(world_size)
    return _pools[world_size]


def close_pools() -> None:
    """Ends every rank process; the next call starts new ones."""
    for pool in list(_pools.values()):
        pool.close(ask=True)


def _context() -> Any:
    """How rank processes start: forked from one that has imported what they need, or afresh.

    A device's driver must not be initialised before a fork, which an import may do where torch is
    built for one; and a Mac's own libraries do not survive it.
    """
    built = (torch.version.cuda, torch.version.hip, torch.version.xpu)
    if sys.platform != "linux" or any(built):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.common.preloaded"])
    return context


class _Pool:
    """`world_size` processes that share a default gloo process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._scratch = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._log_starts = self._log_sizes()  # where in the logs the current call begins
        context = _context()
        environment = dict(os.environ)
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(rank, world_size, str(self._scratch), environment, theirs),
                    name=f"rank {rank} of {world_size}",
                    daemon=True,
                )
                process.start()
                theirs.close()  # the rank's end lives in the rank only, so its death is seen as EOF
                self._processes.append(process)
                self._connections.append(ours)
            self._collect("start", START_TIMEOUT)
        except BaseException:
            self.close(ask=False)
            raise

    def call(
        self, target: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> list[Any]:
        __tracebackhide__ = True
        message = pickle.dumps((target, args, kwargs))
        self._log_starts = self._log_sizes()
        try:
            for connection in self._connections:
                with contextlib.suppress(BrokenPipeError):  # a dead rank: reported by _collect
                    connection.send_bytes(message)
            return self._collect(".".join(target), timeout)
        except BaseException:  # KeyboardInterrupt too: the ranks are in an unknown state
            self.close(ask=False)
            raise

    def _collect(self, what: str, timeout: float) -> list[Any]:
        """Waits for one report of every rank; raises RankError unless all of them returned."""
        __tracebackhide__ = True
        reports: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(reports) < self.world_size:
            waiting = {self._connections[r]: r for r in range(self.world_size) if r not in reports}
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), max(left, 0))
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                reports[rank] = self._receive(rank)
            if not ready and left <= 0:
                break
            if any(kind != "returned" for kind, _ in reports.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        if len(reports) == self.world_size and all(k == "returned" for k, _ in reports.values()):
            return [reports[rank][1] for rank in range(self.world_size)]
        raise RankError(self._describe(what, timeout, reports))

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = pickle.loads(self._connections[rank].recv_bytes())
            return kind, value
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(timeout=GRACE)
            return "died", f"exit code {self._processes[rank].exitcode}"

    def _describe(self, what: str, timeout: float, reports: dict[int, tuple[str, Any]]) -> str:
        silent = [r for r in range(self.world_size) if r not in reports]
        for rank in silent:
            pid = self._processes[rank].pid
            if pid is not None and hasattr(signal, "SIGUSR1"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)  # faulthandler writes the stacks to its log
        if silent:
            time.sleep(0.5)
        timed_out = all(kind == "returned" for kind, _ in reports.values())
        lines = [f"{what} on {self.world_size} ranks"]
        if timed_out:
            lines[0] += f": no answer from ranks {silent} in {timeout:g} s"
        for rank in range(self.world_size):
            kind, value = reports.get(rank, ("was still running; its stacks are below", ""))
            lines.append(f"---- rank {rank} {kind}")
            if kind != "returned":
                lines.append(str(value).rstrip())
                with contextlib.suppress(OSError):
                    log = self._log(rank).read_bytes()[self._log_starts[rank] :]
                    text = log.decode(errors="replace").strip()
                    lines.append(f"-- what rank {rank} wrote:\n{text}" if text else "")
        return "\n".join(line for line in lines if line)

    def _log(self, rank: int) -> Path:
        return _log_path(self._scratch, rank)

    def _log_sizes(self) -> list[int]:
        logs = [self._log(rank) for rank in range(self.world_size)]
        return [log.stat().st_size if log.exists() else 0 for log in logs]

    def close(self, *, ask: bool) -> None:
        """Ends the processes: if they are idle by asking (`ask`), else by terminate, then kill."""
        if _pools.get(self.world_size) is self:
            del _pools[self.world_size]
        if ask:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.send_bytes(pickle.dumps(None))
            self._join(GRACE)
        for end in (BaseProcess.terminate, BaseProcess.kill):
            for process in self._processes:
                if process.is_alive():
                    end(process)
            self._join(GRACE)
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0))


def _log_path(scratch: Path, rank: int) -> Path:
    return scratch / f"rank{rank}.log"


# -- a rank process -------------------------------------------------------------------------------


def _serve(
    rank: int, world_size: int, scratch: str, environment: dict[str, str], connection: Connection
) -> NoReturn:
    """A rank's whole life: join the process group, answer calls, leave by os._exit."""
    os.environ.clear()  # a forked rank's is the one that the first pool began with
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everyone; pytest decides
    log = os.open(_log_path(Path(scratch), rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable(log)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, log)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    code = 1
    try:
        _use_loopback()
        _share_one_device()
        pretend()
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(scratch, "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=START_TIMEOUT),
        )
        dist.barrier()
        gc.collect()
        gc.freeze()  # what the imports made stays: later collections skip it
        connection.send_bytes(pickle.dumps(("returned", None)))
        while (call := pickle.loads(connection.recv_bytes())) is not None:
            connection.send_bytes(_answer(*call))
        dist.destroy_process_group()
        code = 0
    except EOFError:
        pass  # the pytest process is gone
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps(("raised", traceback.format_exc())))
    finally:
        os._exit(code)


def _answer(target: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Runs one call from a clean state; returns the pickled report."""
    module, qualname = target
    try:
        _clean_state()
        if module not in sys.modules:
            importlib.import_module(module)
            gc.freeze()  # what it has loaded, too, or each later collection walks through it
        function: Any = sys.modules[module]
        for name in qualname.split("."):
            function = getattr(function, name)
        value = getattr(function, RANK_BODY, function)(*args, **kwargs)
        report = pickle.dumps(("returned", value))
        dist.barrier()  # a body that left the ranks out of step fails here, and not in the next one
    except BaseException:
        return pickle.dumps(("raised", traceback.format_exc()))
    return report


def _clean_state() -> None:
    gc.collect()  # models of the last call: reference cycles hold on to their buffers
    random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)


def _use_loopback() -> None:
    """Gloo asks for the host's name by default, which not every machine can resolve."""
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else ()
    for loopback in ("lo", "lo0"):
        if loopback in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _share_one_device() -> None:
    """A thread of each device of gloo wakes up 100 times per second, as long as the pool lives."""
    init: Any = dist.ProcessGroupGloo.__init__
    device = dist.ProcessGroupGloo.create_default_device()

    def over_it(
        self: Any, store: Any, rank: int, size: int, timeout: timedelta, **more: object
    ) -> None:
        options: Any = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        for name, value in more.items():  # torch 2.15 has another
            setattr(options, name, value)
        init(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = over_it  # type: ignore[method-assign]


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is always started by the pytest process"
    parent.join()
    os._exit(1)
