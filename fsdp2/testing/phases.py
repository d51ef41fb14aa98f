"""Units whose phase changes only as `fsdp2.core.schedule.unit.MOVES` allows.

    unit.phase = BACKWARD ──> is it in MOVES[the phase before]? ──> stored, or an AssertionError

A simulation makes its units of this kind; `check_phases` turns those of a sharded module into it.
`Unit` itself stores whatever it is given: the check costs nothing where it is not wanted.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp2.core.schedule.unit import MOVES, Phase, Unit

_stored = Unit.__dict__["phase"]  # the slot that this property hides


class CheckedUnit(Unit):
    """A unit that refuses a move of its phase which the table does not have."""

    __slots__ = ()

    @property
    def phase(self) -> Phase:
        """Where it is in the iteration."""
        return _stored.__get__(self)

    @phase.setter
    def phase(self, phase: Phase) -> None:
        before = getattr(self, "phase", Phase.IDLE)  # a unit that is being made has none
        assert phase in MOVES[before], (
            f"unit '{self.title}' cannot go from {before.value} to {phase.value}"
        )
        _stored.__set__(self, phase)


def check_phases(units: Iterable[Unit]) -> None:
    """Check the moves of these units from now on."""
    for unit in units:
        unit.__class__ = CheckedUnit
