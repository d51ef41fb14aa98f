"""An agent of torchrun on a node whose clock is off.

python -m benchmarks.skewed SECONDS deploy/torchrun.py ARGUMENTS…

The agent's own clock alone: what its rendezvous writes and compares. Workers have theirs.
"""

from __future__ import annotations

import datetime
import runpy
import sys
import time
from collections.abc import Callable
from functools import partial

from torch.distributed.elastic.rendezvous import dynamic_rendezvous


def _ahead(clock: Callable[[], float], seconds: float) -> float:
    return clock() + seconds


class _Skewed(datetime.datetime):
    """What the rendezvous takes for the time."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return datetime.datetime.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> datetime.datetime:  # type: ignore[override]
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)


def main() -> None:
    time.time = partial(_ahead, time.time, float(sys.argv[1]))
    dynamic_rendezvous.datetime = _Skewed  # type: ignore[misc, attr-defined]
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
