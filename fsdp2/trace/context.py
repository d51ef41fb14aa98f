"""``with fsdp2.trace(path):`` a timeline of real steps, and what is done with its file."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import torch

from fsdp2.core.config import ShardingStateError
from fsdp2.core.device.collectives import rank_and_size
from fsdp2.core.schedule.unit import all_groups
from fsdp2.trace.page import show
from fsdp2.trace.recording import Recorder
from fsdp2.trace.summary import diff, summary
from fsdp2.trace.timeline import Timeline, Value

RANK = "{rank}"


class trace:  # noqa: N801  # it is used as torch.no_grad is
    """Record a timeline of what runs inside the ``with``, and write it when that ends.

    Each unit's compute, gathers, copies and reductions become slices by lane; each wait of one lane
    for another an arrow; what fsdp2 has allocated counters. Where lanes are streams (a GPU), times
    are those of events on them. On the CPU they are the host's. `ui.perfetto.dev` opens the file,
    and so do `fsdp2.trace.summary`, `fsdp2.trace.diff` and ``python -m fsdp2.trace view``.

    Only this process is recorded, and nothing is communicated. Steps inside cost more, by some µs
    for each slice; steps outside cost what they cost without it. If an exception ends the ``with``,
    what was seen is written none the less.

    Args:
        path: the file, which is replaced. "{rank}" in it stands for this process's rank. Without
            that, rank 0 alone records.
        title: what it is called on the page. Default: "rank 0 of 8", by what it is.

    Attributes:
        timeline: what was recorded, once the ``with`` has ended; ``None`` before, and on ranks that
            record nothing.

    Raises:
        ValueError: the folder is not there, or no module is sharded.
        ShardingStateError: another one is on.

    Example::

        with fsdp2.trace("step.json"):
            for batch in batches[:2]:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        print(fsdp2.trace.summary("step.json"))
    """

    summary = staticmethod(summary)
    diff = staticmethod(diff)
    show = staticmethod(show)
    read = staticmethod(Timeline.read)
    Timeline = Timeline

    def __init__(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        self.timeline: Timeline | None = None
        self._path = os.fspath(path)
        self._title = title
        self._recorder: Recorder | None = None

    def __enter__(self) -> trace:
        rank, _ = rank_and_size()
        if RANK not in self._path and rank:
            return self
        self._path = self._path.replace(RANK, str(rank))
        folder = Path(self._path).parent
        if not folder.is_dir():
            raise ValueError(
                f"fsdp2.trace cannot write '{self._path}', as there is no folder '{folder}'; make "
                f"it first"
            )
        if Recorder.current is not None:
            raise ShardingStateError(
                "fsdp2.trace was entered while another one is on in this process; leave that first"
            )
        if not any(True for _ in all_groups()):
            raise ValueError(
                "fsdp2.trace found no sharded module in this process; call fully_shard before it"
            )
        self._recorder = Recorder()
        self._recorder.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        rank, size = rank_and_size()
        device = next((group.device.type for group in all_groups()), "cpu")
        metadata: dict[str, Value] = {
            "title": self._title or f"rank {rank} of {size}",
            "source": "run",
            "clock": "host" if recorder.is_hosts else "events",
            "rank": rank,
            "world_size": size,
            "device": device,
            "torch": str(torch.__version__),
        }
        if error is not None:
            metadata["incomplete"] = f"{type(error).__name__}: {error}"
        self.timeline = recorder.end(metadata)
        self.timeline.write(self._path)
