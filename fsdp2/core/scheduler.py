"""When groups are gathered, freed and reduced.

One scheduler serves all units below a root. It learns the order of units in each forward and uses
it in the next; backward follows this iteration's forward in reverse.

    enter i   COMPUTE waits for gather i; issue gather i+1 (in backward i-1)
              … compute i …
    exit i    free i; in backward wait for the reduction before, and reduce i

Gather i+1 is issued before compute i and its side lane waits for COMPUTE as it is at that moment:
for compute i-1, whose buffer the free of i-1 gave back. So besides units whose forward (or
backward) is under way and units that are kept on request, at most one unit is gathered: two in
all for a sequence of blocks (invariant I6). A wrong guess costs one gather and one free, never a
wrong result: what was prefetched and not used is freed before the next prefetch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum

from fsdp2.core.group import ParamGroup, PendingReduction, State
from fsdp2.core.streams import Lane, Streams

_NONE = sys.maxsize
"""The position before the first unit of a backward."""


class Phase(Enum):
    """Where a unit is in its iteration."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCED = "reduced"


class Unit:
    """What one call of ``fully_shard`` made: groups that are used together, and their flags.

    Attributes:
        name: full name of its module ("" for the root), or several joined by commas.
        groups: its parameter groups; none if every parameter belongs to other units.
        reshard_after_forward: ``None`` for the default: keep at the root, free elsewhere.
        reshard_after_backward: whether parameters are freed after backward.
        sync: whether backward reduces gradients; otherwise they accumulate unreduced.
        reduce_unused: whether parameters without a gradient are reduced too, as zeros.
        forward_prefetch: units to gather when this one's forward starts; empty for the recorded
            order.
        backward_prefetch: the same for backward.
        is_root: whether it is the root of its scheduler.
        phase: where it is in the iteration.
    """

    def __init__(self, name: str, groups: Sequence[ParamGroup]) -> None:
        self.name = name
        self.groups = list(groups)
        self.reshard_after_forward: bool | None = None
        self.reshard_after_backward = True
        self.sync = True
        self.reduce_unused = False
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.is_root = False
        self.phase = Phase.IDLE
        self.visits: list[int] = []  # its positions in this iteration's order, backward to come
        self.position = 0  # of the visit whose backward began last
        self.began = 0  # units whose forward was over when its own began, for that visit

    @property
    def frees_after_forward(self) -> bool:
        """Whether parameters are freed when its forward ends."""
        if self.reshard_after_forward is None:
            return not self.is_root
        return self.reshard_after_forward

    @property
    def is_sharded(self) -> bool:
        """Whether a group of it has to be gathered before use."""
        return any(group.state is State.SHARDED for group in self.groups)

    @property
    def is_gathered(self) -> bool:
        """Whether a group of it is gathered, or on its way."""
        return any(group.state is not State.SHARDED for group in self.groups)

    def reshard(self) -> None:
        """Free its gathered parameters; no-op where they are sharded."""
        for group in self.groups:
            group.reshard()

    def reshard_if_outdated(self) -> None:
        """Free what was gathered before an optimizer step."""
        for group in self.groups:
            group.free_if_outdated()

    def __repr__(self) -> str:
        return f"Unit({self.name or '(root)'!r}, {self.phase.value})"


class Scheduler:
    """Order, prefetch and windows of the units below one root.

    Args:
        units: all units, in the order of registration; the first is the root.
        streams: lanes of the device.

    Attributes:
        forward_root: the unit whose forward encloses the running one; ``None`` outside.
        in_backward: whether a backward has begun whose end was not seen.
        is_last_backward: whether the end of this backward waits for reductions and cleans up.
        builds_graph: whether the running backward records a graph of its own (``create_graph``).
        holds: whether such a graph may still be used: parameters stay gathered for it until a
            backward that records none is over, as no hook sees which of them it reads.
    """

    REDUCTIONS_IN_FLIGHT = 1
    FORWARDS_REMEMBERED = 1024

    def __init__(self, units: Sequence[Unit], streams: Streams) -> None:
        self.units = list(units)
        self.streams = streams
        self.forward_root: Unit | None = None
        self.in_backward = False
        self.is_last_backward = True
        self.builds_graph = False
        self.holds = False
        # A first guess that costs little if it is wrong: modules run as they are registered.
        self._orders: dict[Unit, list[Unit]] = {}
        self._expected: list[Unit] = []
        self._cursor = -1
        self._entered = _NONE  # position of the unit whose backward began last
        self._running: list[Unit] = []  # this forward's order of entries
        self._finished: list[Unit] = []  # this iteration's order of exits, backward's in reverse
        self._began: list[int] = []  # for each of them, how many had finished when it began
        self._records_exits = False
        self._prefetched: Unit | None = None  # gathered on a guess, not yet used
        self._requested: list[Unit] = []  # gathered on an explicit list, perhaps not yet used
        self._pending: list[PendingReduction] = []

    # ---- forward

    def begin_forward(self, root: Unit, expects_backward: bool) -> None:
        """A forward starts at ``root``, which is not inside another unit's forward."""
        self.forward_root = root
        self._expected = self._orders.get(root) or self._registration_order(root)
        self._cursor = -1
        self._running = []
        self._records_exits = expects_backward
        if len(self._finished) > self.FORWARDS_REMEMBERED * len(self.units):
            self._forget_exits()  # forwards whose backward never came

    def _registration_order(self, root: Unit) -> list[Unit]:
        return [unit for unit in self.units if unit.groups] if root.is_root else []

    def enter_forward(self, unit: Unit) -> None:
        """Gather ``unit`` and start on the one that should be next."""
        unit.phase = Phase.FORWARD
        if not unit.groups:
            return
        self._running.append(unit)
        unit.began = len(self._finished)
        known = self._advance(unit)
        unit.reshard_if_outdated()
        self._gather(unit)
        for group in unit.groups:
            group.refresh_requires_grad()
        if unit.forward_prefetch:
            self._request(unit.forward_prefetch)
        elif known:
            successor = self._successor()
            if successor is not None and successor.phase is Phase.IDLE:
                successor.reshard_if_outdated()
            self._prefetch(successor)

    def exit_forward(self, unit: Unit, keep: bool = False) -> None:
        """Free ``unit`` unless it is kept, or is itself the next one."""
        unit.phase = Phase.IDLE
        if unit.groups:
            if unit.frees_after_forward and not keep and not self.holds:
                if self._successor() is unit and self._prefetched is None:
                    self._prefetched = unit
                else:
                    unit.reshard()
            if self._records_exits:
                unit.visits.append(len(self._finished))
                self._finished.append(unit)
                self._began.append(unit.began)
        if unit is self.forward_root:
            self._end_forward(unit)

    def _end_forward(self, root: Unit) -> None:
        for unit in self.units:  # a list of modules of which some did not run
            if unit.phase is Phase.FORWARD:
                self.exit_forward(unit)
        self._orders[root] = self._running
        self._running = []
        self._drop_unused()  # at the loss, only what is kept on request is gathered
        self.forward_root = None

    def _advance(self, unit: Unit) -> bool:
        """Move the cursor to ``unit`` in the expected order; False if it is not there."""
        expected = self._expected
        following = self._cursor + 1
        if following < len(expected) and expected[following] is unit:
            self._cursor = following
            return True
        for start, stop in ((following, len(expected)), (0, min(following, len(expected)))):
            for position in range(start, stop):
                if expected[position] is unit:
                    self._cursor = position
                    return True
        return False

    def _successor(self) -> Unit | None:
        following = self._cursor + 1
        return self._expected[following] if following < len(self._expected) else None

    # ---- backward

    def enter_backward(self, unit: Unit) -> None:
        """Gather ``unit`` for its backward and start on the one that should be next."""
        if unit.phase is Phase.BACKWARD:
            return
        unit.phase = Phase.BACKWARD
        if not unit.groups:
            return
        position = unit.visits.pop() if unit.visits else 0
        if unit.reduce_unused:
            self._replay_skipped(down_to=position + 1)
        unit.position = self._entered = position
        self._gather(unit)
        if unit.backward_prefetch:
            self._request(unit.backward_prefetch)
        elif position:
            self._prefetch(self._finished[position - 1])

    def exit_backward(self, unit: Unit) -> None:
        """Free ``unit``, unless it is itself the next one, and reduce the gradients it has."""
        if self.holds:
            return
        if unit.reduce_unused and unit.position < len(self._began):
            self._replay_skipped(down_to=self._began[unit.position])
        called_in_a_row = (
            unit.reshard_after_backward
            and bool(unit.visits)
            and unit.visits[-1] == self._entered - 1
        )
        if called_in_a_row and self._prefetched is None:
            self._prefetched = unit
            self._finish(unit, reshard=False)
        else:
            self._finish(unit, reshard=unit.reshard_after_backward)
        unit.phase = Phase.REDUCED

    def _replay_skipped(self, down_to: int) -> None:
        """Enter and leave the units behind ``down_to`` that this rank's backward did not reach.

        Others' may have: collectives then have one order on all ranks.
        """
        if not self.is_last_backward:
            return  # their backward may be to come
        for position in range(min(self._entered, len(self._finished)) - 1, down_to - 1, -1):
            unit = self._finished[position]
            if unit.reduce_unused and unit.visits and unit.visits[-1] == position:
                self.enter_backward(unit)
                self.exit_backward(unit)

    def _finish(self, unit: Unit, reshard: bool) -> None:
        for group in unit.groups:
            if not unit.sync:
                group.accumulate()
                if reshard:
                    group.reshard()
                continue
            # A unit that was called more than once gets its gradients at its first call's end.
            last = unit.phase is not Phase.REDUCED and not unit.visits
            jobs = group.collect(True) if last and unit.reduce_unused else group.collect()
            if reshard:
                group.reshard()
            if jobs:
                self._retire(keep=self.REDUCTIONS_IN_FLIGHT - 1)
                pending = group.reduce(jobs)
                if pending is not None:
                    self._pending.append(pending)

    def end_backward(self) -> None:
        """The whole backward has run: finish units whose own end was not seen, and clean up."""
        if self.units[0].reduce_unused:
            self._replay_skipped(down_to=0)
        self.in_backward = False
        self.holds = self.builds_graph
        for unit in self.units:
            if unit.phase is Phase.FORWARD and self.forward_root is not None:
                continue  # a backward inside a forward: its parameters are in use
            if unit.phase is Phase.IDLE and not self.is_last_backward:
                continue  # its backward is to come; it may be gathered for that
            ahead = unit is self._prefetched or unit in self._requested
            keep = (ahead and not self.is_last_backward) or self.holds
            self._finish(unit, reshard=unit.reshard_after_backward and not keep)
            unit.phase = Phase.IDLE
        if self.is_last_backward:
            self._drop_unused()
            self._retire(keep=0)
            self._forget_exits()
        self._entered = _NONE
        self.builds_graph = False

    def _forget_exits(self) -> None:
        self._finished.clear()
        self._began.clear()
        for unit in self.units:
            unit.visits.clear()

    def finish_reductions(self) -> None:
        """Let COMPUTE wait for every reduction in flight."""
        self._retire(keep=0)

    def _retire(self, keep: int) -> None:
        """Let COMPUTE wait for the oldest reductions until ``keep`` are left in flight."""
        while len(self._pending) > keep:
            pending = self._pending.pop(0)
            self.streams.wait(Lane.COMPUTE, pending.event, "compute after reduction")
            for reduction, _ in pending.jobs:
                reduction.release()

    # ---- on request

    def unshard(self, unit: Unit) -> None:
        """Issue the all-gathers of a unit; `wait` or its forward finishes them."""
        for group in unit.groups:
            if group.state is State.SHARDED:
                group.bind()
                group.start_unshard()

    def wait(self, unit: Unit) -> None:
        """Make COMPUTE wait for a unit's all-gathers and register its gathered parameters."""
        for group in unit.groups:
            if group.state is State.GATHERING:
                group.finish_unshard()

    def reset(self) -> None:
        """Forget a forward or backward that an exception ended half way.

        Everything is freed, gradients that were not reduced are dropped, reductions that were
        under way are waited for.
        """
        self._retire(keep=0)
        self._prefetched = None
        self._requested.clear()
        for unit in self.units:
            unit.phase = Phase.IDLE
            for group in unit.groups:
                group.reshard()
                group.discard_gradients()
        self._forget_exits()
        self._entered = _NONE
        self._running = []
        self.forward_root = None
        self.in_backward = False
        self.builds_graph = self.holds = False

    # ---- gathering and freeing

    def _gather(self, unit: Unit) -> None:
        if self._prefetched is unit:
            self._prefetched = None
        self.unshard(unit)
        self.wait(unit)

    def _prefetch(self, unit: Unit | None) -> None:
        """Gather ``unit`` ahead; a guess that is still unused makes room for it (invariant I6)."""
        if unit is not None and unit.is_sharded:
            self._drop_guess()
            self.unshard(unit)
            self._prefetched = unit

    def _request(self, units: Sequence[Unit]) -> None:
        if self._prefetched not in units:
            self._drop_guess()
        for unit in units:
            if unit.is_sharded:
                self.unshard(unit)
                self._requested.append(unit)

    def _drop_guess(self) -> None:
        """Free the unit that was gathered ahead, unless it has come into use since."""
        guess, self._prefetched = self._prefetched, None
        if guess is not None and guess.phase in (Phase.IDLE, Phase.REDUCED):
            guess.reshard()

    def _drop_unused(self) -> None:
        self._drop_guess()
        for unit in self._requested:
            if any(group.state is State.GATHERING for group in unit.groups):
                unit.reshard()
        self._requested.clear()
