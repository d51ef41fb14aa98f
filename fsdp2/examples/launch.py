"""Starting ranks by torchrun, and the side of a rank.

`main` of an example calls `start` where no launcher has set RANK; otherwise it is a rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import get_args_parser, run

from fsdp2 import checkpoint

from .flags import Common, GivenRanks, UsageError

PREEMPTED = checkpoint.Preemption.exit_code
_SIGNALS = "SIGTERM,SIGHUP,SIGQUIT,SIGUSR1"  # Ctrl-C ends workers by SIGTERM, so that they save
_SPEAKING_SECONDS = 60.0
_STARTED = "FSDP2_STARTED_BY"
"""The process of `start`, which its ranks die with. torchrun's agent may be lost: ranks then live
until they are told of the next one, and save first."""


def torchrun(
    arguments: Sequence[str], preempted: int | None = checkpoint.Preemption.exit_code
) -> int:
    """Run torchrun in this process; its exit code says whether a signal has ended a saved run.

    torchrun itself leaves with 1 whatever its workers leave with. This hands SIGUSR1 on to them,
    too, and gives them TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds (120) to save.

    Args:
        arguments: of torchrun.
        preempted: the exit code of workers that have saved after a signal; then, and where a signal
            has ended this process, it is returned. ``None``: workers save nothing, and after a
            signal 128 + number is returned.
    """
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    # A restarted worker must not read the address of a dead one in the agent's store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    parser = get_args_parser()
    parser.allow_abbrev = False  # else it takes the example's --nproc for its own
    try:
        run(parser.parse_args([f"--signals-to-handle={_SIGNALS}", *arguments]))
    except SignalException as error:
        print(f"torchrun: {error}", file=sys.stderr)
        return 128 + error.sigval if preempted is None else preempted
    except KeyboardInterrupt:
        return 128 + signal.SIGINT if preempted is None else preempted
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code == preempted:
            return code
        print(error, file=sys.stderr)
        return 1
    return 0


def start(module: str, argv: Sequence[str], options: Common) -> int:
    """Run ``python -m module *argv`` on ranks of this machine; the exit code of `torchrun`."""
    # Threads that wait by spinning take the core from those they wait for once another process
    # wants it too: 700 tokens/s with spinning against 8,000 without on two busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ[_STARTED] = str(os.getpid())
    agent = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    agent += ["--local-addr=localhost", f"--max-restarts={options.restarts}"]
    agent += [f"--nproc-per-node={options.world_size}", "-m", module]
    return torchrun([*agent, *argv], options.preempted)


# --- a rank --------------------------------------------------------------------------------------


def run_as_worker(work: Callable[[], int]) -> NoReturn:
    """Run `work` and leave with its code, whatever torch's threads do at interpreter exit.

    gloo together with a DeviceMesh sometimes aborts while the interpreter shuts down; `os._exit`
    keeps that from turning a good run into a bad exit code.
    """
    code = 1
    try:
        if sys.platform == "linux" and os.environ.get(_STARTED) == str(os.getppid()):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan of `start`
        code = record(work)() or 0  # torchrun's summary names the exception
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):  # a reader that went away, as `| head` does
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _complain(name: str, error: Exception, rank: int = 0) -> int:
    """Exit code 2, and the sentence of a mistake that all ranks find, from rank 0."""
    if rank == 0:
        print(f"{name}: {str(error).removesuffix('.')}.", file=sys.stderr, flush=True)
    else:
        time.sleep(_SPEAKING_SECONDS)  # a launcher ends all ranks as soon as one leaves
    return 2


Given = TypeVar("Given", bound=Common)
Prepare = Callable[[Sequence[str], GivenRanks | None], Given | int]
"""Checks arguments, and all else that can be wrong; an exit code where nothing is to be run."""

Work = Callable[[Given], int]
"""A rank's; returns its exit code."""


def main(
    module: str, argv: Sequence[str] | None, prepare: Prepare[Given], work: Work[Given]
) -> int:
    """The ``main`` of an example: start the ranks of `module`, or be one."""
    argv = sys.argv[1:] if argv is None else list(argv)
    name = module.rpartition(".")[2]
    try:
        ranks = GivenRanks.from_environment()
        if ranks is not None:
            run_as_worker(lambda: run_rank(name, argv, ranks, prepare, work))
        options = prepare(argv, None)
    except UsageError as error:
        return _complain(name, error)
    return options if isinstance(options, int) else start(module, argv, options)


def run_rank(
    name: str,
    argv: Sequence[str],
    ranks: GivenRanks,
    prepare: Prepare[Given],
    work: Work[Given],
) -> int:
    """Be a rank in this process; its exit code."""
    try:
        options = prepare(argv, ranks)
        return options if isinstance(options, int) else work(options)
    except UsageError as error:
        return _complain(name, error, ranks.rank)


@contextmanager
def process_group(options: Common, timeout: float = 600.0) -> Iterator[torch.device]:
    """The default process group, and this rank's device; one that is there already is used."""
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", options.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if not dist.is_initialized():  # Ray Train has made it
        dist.init_process_group(
            options.backend,
            rank=options.rank,
            world_size=options.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if options.backend == "nccl" else None,
        )
    yield device
    dist.barrier()
    dist.destroy_process_group()
