"""``with fsdp2.trace(path):`` a timeline of real steps, as a file."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from types import TracebackType

import torch

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import all_groups, rank_and_size
from fsdp2.tracing.recording import Tracer
from fsdp2.tracing.seams import tracing
from fsdp2.tracing.timeline import Timeline, Value

RANK = "{rank}"


class trace:  # noqa: N801  # it is used as torch.no_grad is
    """Record a timeline of the steps inside the ``with``, and write it at the end.

    The compute, all-gathers, copies and reductions of each unit become slices by lane; each wait of
    one lane for another becomes an arrow; fsdp2's allocations become counters. If lanes are streams
    (on a GPU), times come from events on them; on the CPU they are the host's. `ui.perfetto.dev`,
    `fsdp2.tracing.summary`, `fsdp2.tracing.diff` and ``fsdp2 trace view`` open the file.

    Only this process is recorded, and nothing is communicated. Recorded steps cost some µs more per
    slice; other steps cost the same as without it. Units bind their collectives again in the first
    step inside, and in the first step after it. If an exception ends the ``with``, the recorded
    part is still written, and the exception propagates, even if that write fails, which causes a
    warning.

    Args:
        path: the file, which is replaced. "{rank}" in it is replaced by this process's rank.
            Without it, only rank 0 records; the other ranks of its node check the path in the same
            way, so that all of them raise.
        title: its title on the page. Default: a description such as "rank 0 of 8".

    Attributes:
        timeline: the recorded timeline, after the ``with`` has ended; ``None`` before, and on ranks
            that record nothing.

    Raises:
        ValueError: the folder does not exist, the file cannot be written, or no module is sharded.
        ShardingStateError: another trace is active.
        OSError: the file could be written when the ``with`` began, but not when it ended, for
            example because the disk is full. `timeline` is still available.

    Example::

        with fsdp2.trace("step.json"):
            for batch in batches[:2]:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        print(fsdp2.tracing.summary("step.json"))
    """

    def __init__(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        self.timeline: Timeline | None = None
        self._path = os.fspath(path)
        self._title = title
        self._exits: contextlib.ExitStack | None = None

    def __enter__(self) -> trace:
        rank, size = rank_and_size()
        records = RANK in self._path or not rank
        if not records and rank >= int(os.environ.get("LOCAL_WORLD_SIZE", size)):
            return self  # on another node than rank 0, and may see other disks
        self._path = self._path.replace(RANK, str(rank))
        folder = Path(self._path).parent
        if not folder.is_dir():
            raise coded(
                ValueError,
                "trace-no-folder",
                f"fsdp2.trace cannot write '{self._path}', because the folder '{folder}' does not "
                f"exist; create it first",
            )
        if not records:
            _check_file(self._path)
            return self
        if Tracer.current is not None:
            raise coded(
                ShardingStateError,
                "trace-nested",
                "fsdp2.trace was entered while another fsdp2.trace is active in this process; "
                "leave that one first",
            )
        if not any(True for _ in all_groups()):
            raise coded(
                ValueError,
                "trace-not-sharded",
                "fsdp2.trace found no sharded module in this process; call fully_shard before it",
            )
        _check_file(self._path)
        exits = contextlib.ExitStack()
        self._tracer = exits.enter_context(tracing())
        self._exits = exits
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        exits, self._exits = self._exits, None
        if exits is None:
            return
        try:
            with exits:
                self._tracer.finish()
            self.timeline = self._tracer.timeline(_metadata(self._tracer, self._title, error))
            self.timeline.write(self._path)
        except Exception as failed:
            if error is not None:
                _warn(self._path, failed)
            elif isinstance(failed, OSError):
                raise coded(
                    OSError,
                    "trace-not-written",
                    f"fsdp2.trace could not write '{self._path}' when it ended: {failed}; the "
                    f"timeline is still in memory: write it elsewhere with "
                    f"trace.timeline.write(path)",
                ) from failed
            else:
                raise


def _check_file(path: str) -> None:
    """Raise now rather than after the steps; the file stays as it is."""
    try:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
        except FileNotFoundError:
            if not os.access(Path(os.path.realpath(path)).parent, os.W_OK | os.X_OK):
                raise
    except OSError as error:
        raise coded(
            ValueError,
            "trace-cannot-write",
            f"fsdp2.trace cannot write '{path}': {error.strerror}; pass a file that this process "
            f"may write",
        ) from error


def _warn(path: str, failed: Exception) -> None:
    """Warn that the file could not be written, without replacing the user's exception."""
    with contextlib.suppress(Warning):  # a filter may make it an exception
        warnings.warn(
            f"fsdp2.trace wrote no '{path}' for the steps that an exception ended: {failed}",
            stacklevel=3,
        )


def _metadata(tracer: Tracer, title: str | None, error: BaseException | None) -> dict[str, Value]:
    rank, size = rank_and_size()
    metadata: dict[str, Value] = {
        "title": title or f"rank {rank} of {size}",
        "source": "run",
        "clock": "host" if tracer.clock.events is None else "events",
        "rank": rank,
        "world_size": size,
        "device": next((group.device.type for group in all_groups()), "cpu"),
        "torch": str(torch.__version__),
    }
    if error is not None:
        metadata["incomplete"] = f"{type(error).__name__}: {error}"
    return metadata
