"""A signal that says that this machine will be taken away, and ranks that agree on when to leave.

rank 0   step 7 │ step 8 │ step 9 │ saves step 9, leaves
rank 1   step 7 │ step 8 │ step 9 │ saves step 9, leaves
             ▲           ▲
      SIGTERM to rank 1  the sum that all ranks have started here says so, one boundary later
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import FrameType, TracebackType

from fsdp2.checkpoint.consensus import Call
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.ranks.channels import LostRankError, Vote

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Schedulers send one of them before SIGKILL."""


class Preemption:
    """Inside, a signal to any rank lets all ranks leave together, at the end of the same step.

    Schedulers send SIGTERM, or the signal that a job asks for, some time before SIGKILL: the grace
    time. Inside, such a signal ends nothing. Call `agreed` at the end of every step, on every rank:
    it is ``True`` on all of them at the same step, at most two steps after the signal. Save then,
    and leave with a code that the scheduler knows. Signals that come meanwhile change nothing.

    A call costs the sum of one number over a gloo group of its own, which runs during the next
    step. A run without a `Preemption` pays nothing.

    Args:
        signals: that announce the end. Default: SIGTERM and SIGUSR1.
        process_group: the ranks that call it, as of `save`. Default ``None``: the default process
            group; without one, this process.

    Attributes:
        exit_code: 143, as of a process that SIGTERM has ended: what schedulers take for an end
            that they have asked for.

    Raises:
        CheckpointError: this rank has no part in ``process_group``.

    Example::

        with fsdp2.checkpoint.Preemption() as preemption:
            for step in range(start, steps):
                train(step)
                if preemption.agreed():
                    fsdp2.checkpoint.save("run", model, optimizer, step=step + 1)
                    raise SystemExit(preemption.exit_code)
    """

    exit_code = 143

    def __init__(
        self,
        signals: Sequence[int] = SIGNALS,
        *,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._signals = tuple(signals)
        self._call = Call("Preemption.agreed()", process_group)
        self._vote: Vote | None = None
        self._given_back = ExitStack()
        self._is_requested = False

    @property
    def requested(self) -> bool:
        """Whether this rank was told; what the others were told, `agreed` says."""
        return self._is_requested

    def request(self) -> None:
        """Say it without a signal: where a cloud tells by a file or an address that is polled.

        From any thread.
        """
        self._is_requested = True

    def agreed(self) -> bool:
        """Whether all ranks leave now. Every rank calls it, as often as the others.

        Raises:
            CheckpointError: a rank is gone.
        """
        if self._vote is None:
            self._vote = self._call.vote()
        return self._call.asked(self._vote, self._is_requested)

    def __enter__(self) -> Preemption:
        """Take the signals, in the main thread; Python lets no other one: call `request` there."""
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                before = signal.signal(number, self._take)
                again = signal.SIG_DFL if before is None else before
                self._given_back.callback(signal.signal, number, again)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the signals back; without an exception all ranks do, so that none is asked still."""
        self._given_back.close()
        if self._vote is not None and kind is None:
            with suppress(LostRankError):  # nothing more is asked of it
                self._vote.finish()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True
