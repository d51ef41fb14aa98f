"""A signal before this machine is taken away, and ranks that agree on the step at which they leave.

rank 0   step 7 │ step 8 │ step 9 │ saves step 9, leaves
rank 1   step 7 │ step 8 │ step 9 │ saves step 9, leaves
             ▲           ▲
      SIGTERM to rank 1  all ranks start a sum here, and read it one boundary later
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import FrameType, TracebackType

from fsdp2.checkpoint.consensus import Call, lost_rank
from fsdp2.core.facts import LostRankError, ProcessGroup, Vote

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""The signals that schedulers send before SIGKILL."""


class Preemption:
    """A context in which, after a signal to any rank, all ranks can leave at the same step.

    Schedulers send SIGTERM, or a signal that the job selects, some time before SIGKILL: the grace
    time. In this context, such a signal does not end the process. Call `agreed` at the end of every
    step, on every rank: it returns ``True`` on all ranks at the same step, at most two steps after
    the signal. Then save, and exit with a code that the scheduler knows. Further signals have no
    effect.

    Each call sums one number over a separate gloo group, during the next step. A run without a
    `Preemption` has no such cost.

    Args:
        signals: the signals that announce the end. Default: SIGTERM and SIGUSR1.
        process_group: the ranks that call it, as for `save`. Default ``None``: the default process
            group; without one, this process.

    Attributes:
        exit_code: 143, the code of a process that SIGTERM ended. Schedulers recognize it as an end
            that they requested.

    Raises:
        CheckpointError: this rank is not in ``process_group``.

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
        """Whether this rank got a signal or a `request`; `agreed` also covers the other ranks."""
        return self._is_requested

    def request(self) -> None:
        """Request the end without a signal, for clouds that announce it in a file or at a URL.

        You may call it from any thread.
        """
        self._is_requested = True

    def agreed(self) -> bool:
        """Return whether all ranks leave now. Every rank must call it, after the same steps.

        Raises:
            CheckpointError: a rank was lost.
        """
        if self._vote is None:
            self._vote = Vote(self._call.members)
        try:
            return self._vote.ask(self._is_requested)
        except LostRankError as error:
            raise lost_rank(self._call.what) from error

    def __enter__(self) -> Preemption:
        """Set signal handlers in the main thread; other threads must call `request`."""
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
        """Restore the handlers; without an exception, all ranks do so, and no vote stays open."""
        self._given_back.close()
        if self._vote is not None and kind is None:
            with suppress(LostRankError):  # its answer is not needed
                self._vote.finish()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True
