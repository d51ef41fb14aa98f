"""`fsdp2.debug`: what is checked, for all sharded models of this process.

debug(check_ranks=True) ──> Checks.switch(EnabledChecks) ──> a layer around every group
"""

from __future__ import annotations

from dataclasses import replace

from fsdp2.checks.groups import Checks, EnabledChecks
from fsdp2.core.errors import coded


class DebugSettings:
    """What `debug` checks, and a context that puts back what was checked before.

    Attributes:
        check_ranks: whether ranks agree on each step before they take it.
        check_nan: whether reduced gradients must be finite.
        check_writes: whether parameters that are written where that counts for nothing are refused.
        timeout: seconds that a rank waits for others of which nothing is heard; ``None`` for the
            process group's own time-out.
    """

    def __init__(self, settings: EnabledChecks, before: EnabledChecks) -> None:
        self.check_ranks = settings.check_ranks
        self.check_nan = settings.check_nan
        self.check_writes = settings.check_writes
        self.timeout = settings.timeout
        self._before = before

    def __enter__(self) -> DebugSettings:
        return self

    def __exit__(self, *_: object) -> None:
        Checks.switch(self._before)

    def __repr__(self) -> str:
        return (
            f"DebugSettings(check_ranks={self.check_ranks}, check_nan={self.check_nan}, "
            f"check_writes={self.check_writes}, timeout={self.timeout})"
        )


def debug(
    *,
    check_ranks: bool | None = None,
    check_nan: bool | None = None,
    check_writes: bool | None = None,
    timeout: float | None = None,
) -> DebugSettings:
    """Switch checks on or off, for all sharded models of this process; on all ranks alike.

    Best called before `fully_shard`, which then compares the ranks' whole parameters. Later on,
    call it between iterations. Setting the environment variable ``FSDP2_DEBUG=1``, which is read
    at the first call of `fully_shard` or of this function, is the same as ``check_ranks=True``.

    Args:
        check_ranks: before each all-gather, reduce-scatter, all-reduce and optimizer step, the
            ranks that take part agree on it by notes in the process group's store: unit,
            operation, iteration, shapes, dtypes, flags, which gradients are there. ``None``
            (default) leaves it as it is.
        check_nan: before and after each reduction, the ranks that take part ask each other whether
            gradients are finite. ``None`` (default) leaves it as it is.
        check_writes: compare checksums of parameters, so that a write by any route is refused which
            no version counter tells of: to unsharded parameters, as it would be lost, and to
            sharded ones of a unit that stays unsharded and computes with what it has gathered.
            ``None`` (default) leaves it as it is.
        timeout: with ``check_ranks``, seconds that a rank waits for others of which nothing is
            heard. ``None`` (default): as it is, at first the process group's own time-out. Ranks
            that are known to be elsewhere are not waited for.

    Returns:
        What is checked now; as a context manager, it puts back what was checked before the call.

    Raises:
        ValueError: ``timeout`` is not positive, or ``FSDP2_DEBUG`` is neither 0 nor 1.

    While checks are on, a step may raise `RankMismatchError` or `NonFiniteGradientError`, on all
    ranks that take part in it. With ``check_ranks`` each step costs about five requests to the
    store, some tenths of a millisecond, and the host waits for the slowest rank; with
    ``check_nan`` each reduction costs a small all-gather for which the host waits; with
    ``check_writes`` each gather and each free reads all parameters, and costs such an all-gather. A
    write raises `ShardingStateError`.

    Example::

        with fsdp2.debug(check_ranks=True, check_nan=True):
            train_some_steps()
    """
    before = Checks.current()
    if timeout is not None and not timeout > 0:
        raise coded(
            ValueError,
            "debug-timeout",
            f"debug takes a positive number of seconds as timeout, not {timeout!r}",
        )
    settings = replace(
        before,
        check_ranks=before.check_ranks if check_ranks is None else bool(check_ranks),
        check_nan=before.check_nan if check_nan is None else bool(check_nan),
        check_writes=before.check_writes if check_writes is None else bool(check_writes),
        timeout=before.timeout if timeout is None else timeout,
    )
    if settings != before:
        Checks.switch(settings)
    return DebugSettings(settings, before)
