"""A scheduler that gathers more than one unit ahead: on request (`set_prefetch_window`).

    window 1    enter i ──> gather i+1        behind compute i-1    `Scheduler`
    window 2    enter i ──> gather i+2        behind compute i-1    `LookingAhead`
                            i+1 was issued at i-1

In backward the same, in the reverse order of this iteration's forwards. So a gather of unit i has
the time of as many computes as the window says to hide behind. That counts where units are unequal:
a small compute in front of a large gather. For equal blocks nothing is gained by it.

At most so many units are gathered besides those under way and those kept on request (invariant I6).
What was gathered ahead and is not among the units that come next makes room for one that is.

    _ahead    [i+1, i+2]    gathered on a guess and not used yet, in the order of their gathers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import BACKWARD, Unit


def window_of(units: Iterable[Unit]) -> int:
    """How many units a scheduler of these gathers ahead: the most that one of them asks for."""
    return max((unit.prefetch_window for unit in units), default=1)


class LookingAhead(Scheduler):
    """A scheduler whose window is larger than one unit.

    A scheduler becomes one, by its class, while a unit asks for it (`refresh_scheduler`). It keeps
    its guesses in a list of its own, and what the base class has for its single one is unused.

    Attributes:
        window: how many units are gathered ahead at most.
    """

    window: int
    _ahead: list[Unit]

    # ---- a larger window, another, or none

    def look(self, window: int) -> None:
        """Gather so many units ahead from now on; what is gathered by now stays if it fits."""
        self.window = window
        while len(self._ahead) > window:
            self._free(self._ahead.pop())

    def begin_looking(self) -> None:
        """Take over the only guess of a scheduler without a window."""
        guess, self._prefetched = self._prefetched, None
        self._ahead = [] if guess is None else [guess]

    def stop_looking(self) -> None:
        """Leave one guess at most to a scheduler without a window."""
        self.look(1)
        self._prefetched = self._ahead.pop() if self._ahead else None
        del self._ahead, self.window

    # ---- forward

    def enter_forward(self, unit: Unit) -> None:
        """Gather ``unit`` and start on those that should be next."""
        super().enter_forward(unit)
        if unit.groups and not unit.forward_prefetch and self._order.is_at(unit):
            self._gather_ahead(self._order.following(self.window))

    def _comes_next(self, unit: Unit) -> bool:
        """Whether a call of the same unit is within the window: it is kept for that one."""
        following = self._order.following(self.window)
        if unit not in following:
            return False
        self._keep_ahead(unit, following)
        return True

    # ---- backward

    def enter_backward(self, unit: Unit, recomputed_for: int | None = None) -> None:
        """Gather ``unit`` for its backward and start on those that should be next."""
        if unit.phase is BACKWARD:
            return
        super().enter_backward(unit, recomputed_for)
        if unit.groups and not unit.backward_prefetch:
            self._gather_ahead(self._preceding())

    def _preceding(self) -> list[Unit]:
        """The units whose backward should be next, the first one first."""
        start = max(self._entered - self.window, 0)
        before = self._finished[start : self._entered]
        before.reverse()
        return [unit for unit in before if unit is not None and unit.unshard_in_backward]

    def _stays_for_next(self, unit: Unit) -> bool:
        """Whether a call of the same unit is within the window: it is kept for that backward."""
        within = self._entered - self.window <= unit.visits[-1] < self._entered
        if not within or not unit.groups:
            return False
        self._keep_ahead(unit, self._preceding())
        return True

    def _keeps(self, unit: Unit, last: bool) -> bool:
        return (unit in self._ahead and not last) or super()._keeps(unit, last)

    # ---- on request

    def claim(self, unit: Unit) -> None:
        """As it is; and what was a guess until now stays until the user reshards it."""
        if unit in self._ahead:
            self._ahead.remove(unit)
        super().claim(unit)

    def reset(self) -> None:
        """As it is, and there are no guesses."""
        self._ahead.clear()
        super().reset()

    # ---- gathering and freeing

    def _gather(self, unit: Unit) -> None:
        if unit in self._ahead:
            self._ahead.remove(unit)
        super()._gather(unit)

    def _gather_ahead(self, units: Sequence[Unit]) -> None:
        """Gather those that are not gathered; other guesses make room for them."""
        for unit in units:
            if unit.is_sharded:
                self._make_room(unit, units)
                self.unshard(unit)
                if unit not in self._ahead:
                    self._ahead.append(unit)

    def _keep_ahead(self, unit: Unit, units: Sequence[Unit]) -> None:
        """Leave ``unit`` gathered, which is one of the ``units`` that come next."""
        self._make_room(unit, units)
        if unit not in self._ahead:
            self._ahead.append(unit)

    def _make_room(self, unit: Unit, units: Sequence[Unit]) -> None:
        """Free the oldest guess that is none of ``units``, if there is no room for ``unit``.

        There is one: ``units`` are no more than the window has places, and ``unit`` is one of them.
        """
        if unit not in self._ahead and len(self._ahead) >= self.window:
            stale = next(guess for guess in self._ahead if guess not in units)
            self._ahead.remove(stale)
            self._free(stale)

    def _prefetch(self, unit: Unit | None) -> None:
        """Nothing: that is one unit, and all come together behind it (`_gather_ahead`)."""

    def _request(self, units: Sequence[Unit]) -> None:
        wanted = [guess for guess in self._ahead if guess in units]
        for guess in self._ahead:
            if guess not in wanted:
                self._free(guess)
        self._ahead = []  # of what the base class drops
        super()._request(units)
        self._ahead = wanted

    def _free(self, guess: Unit) -> None:
        self._prefetched = guess
        super()._drop_guess()

    def _drop_guess(self) -> None:
        """Free all that was gathered ahead."""
        ahead, self._ahead = self._ahead, []
        for guess in ahead:
            self._free(guess)
