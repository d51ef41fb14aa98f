"""Moves of units' phases that `fsdp2.core.schedule.unit.MOVES` does not allow are refused.

    unit.phase = BACKWARD ──> is it in MOVES[the phase before]? ──> stored, or an AssertionError

A simulation makes its units as `CheckedUnit`; `checking_phases` watches those of sharded modules.
`Unit` itself stores whatever it is given: the check costs nothing where it is not wanted.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from fsdp2.core.schedule.unit import MOVES, Phase, Unit, watched_phase, watching


def _check(unit: Unit, before: Phase, after: Phase) -> None:
    assert after in MOVES[before], (
        f"unit '{unit.title}' cannot go from {before.value} to {after.value}"
    )


class CheckedUnit(Unit):
    """A unit that refuses a change of phase that is not in the table."""

    __slots__ = ()

    phase = watched_phase(_check)


def checking_phases() -> AbstractContextManager[None]:
    """Check the moves of all units of this process, while it is on."""
    return watching(_check)
