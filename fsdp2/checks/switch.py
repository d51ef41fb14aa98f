"""`fsdp2.debug`: the active checks, for all sharded models of this process.

debug(check_ranks=True) ──> Checks.switch(DebugSettings) ──> CHECKS observes every group
"""

from __future__ import annotations

from dataclasses import replace

from fsdp2.checks.groups import Checks, DebugSettings
from fsdp2.core.errors import coded


def debug(
    *,
    check_ranks: bool | None = None,
    check_nan: bool | None = None,
    check_writes: bool | None = None,
    timeout: float | None = None,
) -> DebugSettings:
    """Switch checks on or off, for all sharded models of this process; call it on all ranks.

    Call it before `fully_shard`, if possible, which then compares the ranks' full parameters.
    Otherwise, call it between iterations. Setting the environment variable ``FSDP2_DEBUG=1``, which
    is read at the first call of `fully_shard` or of this function, is equivalent to
    ``check_ranks=True``.

    Args:
        check_ranks: before each all-gather, reduce-scatter, all-reduce and optimizer step, the
            participating ranks compare it by notes in the process group's store: unit, operation,
            iteration, shapes, dtypes, flags, which gradients exist. ``None`` (default) leaves the
            setting unchanged.
        check_nan: before and after each reduction, the participating ranks compare whether
            gradients are finite. ``None`` (default) leaves the setting unchanged.
        check_writes: compare checksums of parameters, so that a write raises which no version
            counter shows: to unsharded parameters, because it would be lost, and to sharded ones of
            a unit that stays unsharded and computes with the values gathered earlier. A read of an
            unsharded parameter that was kept and is freed raises, too. ``None`` (default) leaves
            the setting unchanged.
        timeout: with ``check_ranks``, seconds that a rank waits for silent ranks. ``None``
            (default): unchanged, initially the process group's own time-out. Ranks that are known
            to be at another step are not waited for.

    Returns:
        The active checks; as a context manager, it restores the checks from before the call.

    Raises:
        ValueError: ``timeout`` is not positive, or ``FSDP2_DEBUG`` is neither 0 nor 1.

    While checks are on, a step may raise `RankMismatchError` or `NonFiniteGradientError`, on all
    ranks that take part in it. With ``check_ranks``, each step costs about five requests to the
    store, some tenths of a millisecond, and the host waits for the slowest rank. With
    ``check_nan``, each reduction costs a small all-gather for which the host waits. With
    ``check_writes``, each all-gather and each free reads all parameters, and costs such an
    all-gather; a lost write raises `ShardingStateError`.

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
    return replace(settings, _before=before)
