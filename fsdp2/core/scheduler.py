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

from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd import profiler

from fsdp2.core.config import ShardingStateError
from fsdp2.core.group import ParamGroup
from fsdp2.core.journal import SCHEDULE
from fsdp2.core.pending import PendingReduction
from fsdp2.core.progress import OptimizerSteps
from fsdp2.core.ranges import record_ranges
from fsdp2.core.skipped import Retracing
from fsdp2.core.states import GATHERING, SHARDED
from fsdp2.core.streams import COMPUTE, SIDE_LANES, Streams
from fsdp2.core.unit import BACKWARD, FORWARD, IDLE, REDUCED, Unit


class Scheduler:
    """Order, prefetch and windows of the units below one root.

    Args:
        units: all units, in the order of registration; the first is the root.
        streams: lanes of the device.

    Attributes:
        forward_root: the unit whose forward encloses the running one; ``None`` outside.
        in_backward: whether a backward has begun whose end was not seen.
        ending: gives what that backward calls at its end; ``None`` where it is over without.
        failed: whether the forward of ``forward_root`` raised.
        is_last_backward: whether the end of this backward waits for reductions and cleans up.
        manual: whether it leaves both to `finalize`, whatever ``is_last_backward`` says.
        unawaited: whether a `finalize` that did not wait is still to be followed by
            `wait_for_reductions`.
        resets: how often an iteration was given up.
        post_optim_event: recorded behind the optimizer's step by a user who runs it on a stream of
            his own; the next gather waits for it, or else the end of the next forward.
        builds_graph: whether the running backward records a graph of its own (``create_graph``).
        holds: whether such a graph may still be used: parameters stay gathered for it until a
            backward that records none is over, as no hook sees which of them it reads.
        groups: all parameter groups.
        unreduced: whether a group may hold gradients of backwards without sync, or partial sums.
        ranges: whether groups mark their operations for a profiler; compared with the profiler's
            own flag, without a call, when a forward or backward begins.
    """

    FORWARDS_REMEMBERED = 1024

    def __init__(self, units: Sequence[Unit], streams: Streams) -> None:
        self.units = list(units)
        self.streams = streams
        self.forward_root: Unit | None = None
        self._steps = -1  # of optimizers, when a forward began last
        self.in_backward = False
        self.ending: Callable[[], object] = object
        self.failed = False
        self.is_last_backward = True
        self.builds_graph = False
        self.holds = False
        # A first guess that costs little if it is wrong: modules run as they are registered.
        self._orders: dict[Unit, list[Unit]] = {}
        self._expected: list[Unit] = []
        self._cursor = -1
        self._entered = 0  # position of the unit whose backward began last
        self._starts: list[int] = []  # first positions of this iteration's forwards
        self._running: list[Unit] = []  # this forward's order of entries
        self._finished: list[Unit | None] = []  # this iteration's exits, till their backward comes
        self._without_groups: set[Unit | None] = set()  # units that have visits none the less
        self._retracing = Retracing(self._finished, self._starts)  # where no unit may be missed
        self._records_exits = False
        self._prefetched: Unit | None = None  # gathered on a guess, not yet used
        self._requested: list[Unit] = []  # gathered on an explicit list, perhaps not yet used
        self._pending: list[PendingReduction] = []  # their inputs are alive
        self._summing: list[PendingReduction] = []  # their all-reduces may still run
        self._arriving: list[PendingReduction] = []  # on their way to the host
        self.post_optim_event: Any = None
        self.manual = False
        self.unawaited = False
        self.resets = 0
        self.ranges = False
        self.unreduced = True  # so that somebody looks
        self.refresh()

    def refresh(self) -> None:
        """Take up what counts for all units: their flags, and which groups they have."""
        self.groups = [group for unit in self.units for group in unit.groups]
        if self.ranges:
            record_ranges(self.groups, True)
        self._offloaded = [group for group in self.groups if group.offload is not None]
        self._window = max((unit.input_buffers for unit in self.units), default=1)
        self._misses_none = any(group.options.reduce_unused for group in self.groups)

    def follow_profiler(self) -> None:
        """A profiler was started or stopped: mark operations by unit name, or no longer."""
        self.ranges = profiler._is_profiler_enabled
        record_ranges(self.groups, self.ranges)

    # ---- forward

    def begin_forward(self, root: Unit, expects_backward: bool) -> None:
        """A forward starts at ``root``, which is not inside another unit's forward.

        Raises:
            ShardingStateError: nobody waited for the reductions of the last `finalize`.
        """
        if self.unawaited:
            raise ShardingStateError(
                f"the forward of '{root.title}' was called before the gradients of the "
                f"last finalize_backward(async_op=True) were waited for; call wait() on the "
                f"handle that it returned"
            )
        if profiler._is_profiler_enabled is not self.ranges:
            self.follow_profiler()
        self.forward_root = root
        if self._steps != OptimizerSteps.count:
            self._steps = OptimizerSteps.count
            for unit in self.units:
                if unit.phase is IDLE:
                    unit.reshard_if_outdated()
        self._expected = self._orders.get(root) or self._registration_order(root)
        self._cursor = -1
        self._running = []
        self._records_exits = expects_backward
        if self._pending or self._summing:
            self._order_after_hooks()
        if len(self._finished) > self.FORWARDS_REMEMBERED * len(self.units):
            self._forget_exits()  # forwards whose backward never came
        if expects_backward:
            self._starts.append(len(self._finished))

    def _order_after_hooks(self) -> None:
        """Let gathers wait for what users' hooks do to shards behind reductions in flight.

        COMPUTE waits, which reads shards itself on one rank; the side lanes wait for it anyway.
        """
        for pending in (*self._summing, *self._pending):
            if any(param.has_grad_hooks for param in pending.group.params):
                self.streams.wait(COMPUTE, pending.done, "compute after hooks on gradients")

    def _order_after_optimizer(self) -> None:
        """The same for the optimizer on a stream of the user's, who drops gradients next."""
        event, self.post_optim_event = self.post_optim_event, None
        self.streams.wait(COMPUTE, event, "compute after the optimizer")

    def _registration_order(self, root: Unit) -> list[Unit]:
        return [unit for unit in self.units if unit.groups] if root.is_root else []

    def enter_forward(self, unit: Unit) -> None:
        """Gather ``unit`` and start on the one that should be next."""
        unit.phase = FORWARD
        if not unit.groups:
            return
        self._running.append(unit)
        if self._misses_none and self._records_exits:
            self._retracing.forward_begins(unit)
        known = self._advance(unit)
        self._gather(unit)
        for group in unit.groups:
            group.refresh_requires_grad()
        if unit.forward_prefetch:
            self._request(unit.forward_prefetch)
        elif known:
            self._prefetch(self._successor())

    def exit_forward(self, unit: Unit, keep: bool = False) -> None:
        """Free ``unit`` unless it is kept, or is itself the next one."""
        unit.phase = IDLE
        if unit is self.forward_root:
            for inside in self.units:  # a list of modules of which some did not run
                if inside.phase is FORWARD:
                    self.exit_forward(inside)
        if unit.groups:
            if unit.frees_after_forward and not keep and not self.holds:
                if self._prefetched is None and self._successor() is unit:
                    self._prefetched = unit
                elif self._records_exits:
                    for group in unit.groups:
                        group.shard_smaller()
                else:
                    unit.reshard()
            if self._records_exits:
                unit.visits.append(len(self._finished))
                self._finished.append(unit)
                if self._misses_none:
                    self._retracing.forward_ends()
        if unit is self.forward_root:
            if not unit.groups and self._records_exits and len(self._finished) > self._starts[-1]:
                unit.visits.append(len(self._finished) - 1)  # the last inside
                self._without_groups.add(unit)
            self._end_forward(unit)

    def _end_forward(self, root: Unit) -> None:
        self._orders[root] = self._running
        self._running = []
        self._drop_unused()  # at the loss, only what is kept on request is gathered
        self._settle()
        if self.post_optim_event is not None:  # nothing was gathered
            self._order_after_optimizer()
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

    @property
    def entered_last(self) -> Unit | None:
        """The unit that the running forward entered last; ``None`` outside. For messages."""
        return self._running[-1] if self._running else None

    def _successor(self) -> Unit | None:
        following = self._cursor + 1
        return self._expected[following] if following < len(self._expected) else None

    # ---- backward

    def enter_backward(self, unit: Unit, recomputed_for: int | None = None) -> None:
        """Gather ``unit`` for its backward and start on the one that should be next.

        Args:
            unit: the unit.
            recomputed_for: sequence number of autograd's node for which its forward runs again.
        """
        if unit.phase is BACKWARD:
            return
        if self._misses_none and unit.visits:
            if recomputed_for is not None:  # it is entered when its turn is
                self._retracing.recompute(unit, recomputed_for, self)
                self._gather(unit)
                return
            self._retracing.enter(unit.visits[-1], self)
        self.begin_backward(unit)

    def begin_backward(self, unit: Unit) -> None:
        """As `enter_backward`, whether or not others were skipped."""
        if unit.phase is IDLE:
            unit.filled = False
        unit.phase = BACKWARD
        if not unit.groups:
            del unit.visits[-1:]
            return
        position = 0
        if unit.visits:
            position = unit.visits.pop()
            self._finished[position] = None
        self._entered = position
        if self._misses_none:
            self._retracing.backward_begins(unit)
        if unit.unshard_in_backward:
            self._gather(unit)
        else:
            unit.forbid_reading()
        if unit.backward_prefetch:
            self._request(unit.backward_prefetch)
        elif position:
            following = self._finished[position - 1]
            if following is not None and following.unshard_in_backward:
                self._prefetch(following)

    def leave_later_call(self, unit: Unit) -> bool:
        """Leave ``unit`` if a gradient has come to a call before the one whose backward it is in.

        Returns:
            Whether it was left: the earlier call is to be entered.
        """
        if not (self._misses_none and unit.visits and self._retracing.is_past(unit)):
            return False
        self.exit_backward(unit)
        return True

    def enter_recomputation(self, unit: Unit) -> None:
        """Gather ``unit``, in backward, for a forward that runs again."""
        if unit.is_sharded:
            self._gather(unit)

    def exit_backward(self, unit: Unit) -> None:
        """Free ``unit``, unless it is itself the next one, and reduce the gradients it has."""
        if self.holds:
            return
        if self._misses_none and unit in self._retracing.inside:
            self._retracing.exit(unit, self)
        unit.phase = REDUCED
        called_in_a_row = (
            unit.reshard_after_backward
            and bool(unit.visits)
            and unit.visits[-1] == self._entered - 1
        )
        if called_in_a_row and self._prefetched is None:
            self._prefetched = unit
            self._finish(unit, reshard=False, over=False)
        else:
            self._finish(unit, reshard=unit.reshard_after_backward, over=False)

    def _finish(self, unit: Unit, reshard: bool, over: bool) -> None:
        """Free and reduce.

        Args:
            unit: the unit.
            reshard: whether to free.
            over: whether the whole backward has run, not this call's alone.
        """
        if not (unit.sync and unit.all_reduce):
            self.unreduced = True
        # Once no more gradients are to come, absent ones may count as zeros (invariant I10).
        fill = (over or not unit.visits) and unit.sync and not unit.filled
        if fill:
            unit.filled = True
        first, again = True, over and unit.phase is REDUCED
        for group in unit.groups:
            if not unit.sync:
                group.accumulate()
                if reshard:
                    group.reshard()
                continue
            # Where absent gradients count, ranks differ in which they have: one reduction takes
            # them all, when none is to come any more (invariant I11).
            if self._misses_none and group.options.reduce_unused and not (fill or over):
                jobs = []
            else:
                jobs = group.collect(unit.all_reduce, fill and self._misses_none, again)
            if reshard and group.state is not SHARDED:
                group.reshard()
            if jobs:
                if self._pending:
                    self._make_room(group, first)
                first = False
                pending = group.reduce(jobs, unit.all_reduce)
                if pending is not None:
                    self._pending.append(pending)

    def end_backward(self) -> None:
        """The whole backward has run: finish units whose own end was not seen, and clean up."""
        if self._misses_none and self.forward_root is None:
            self._retracing.end(self)
        elif self._misses_none:
            self._retracing.interrupt()  # a derivative inside a forward: its backward is to come
        self.holds = self.builds_graph
        last = self.is_last_backward and not self.manual
        for unit in self.units:
            phase = unit.phase
            if phase is REDUCED and unit.filled and unit.is_over:  # as most are
                unit.phase = IDLE
                continue
            if phase is FORWARD and self.forward_root is not None:
                continue  # a backward inside a forward: its parameters are in use
            if phase is IDLE and not last:
                continue  # its backward is to come; it may be gathered for that
            ahead = unit is self._prefetched or unit in self._requested
            keep = (ahead and not last) or self.holds
            reshard = unit.reshard_after_backward and not keep
            self._finish(unit, reshard, over=True)
            unit.phase = IDLE
        if last:
            self._drop_unused()
            self._drain()
            self._empty()
        # A forward around this backward goes on, and its own backward is to come.
        over = last or not any(unit.visits for unit in self.units)
        if over and self.forward_root is None:
            self._forget_exits()
        self._entered = 0
        self.builds_graph = False
        self.in_backward = False

    def finalize(self, wait: bool) -> None:
        """End an iteration's backwards: reduce what waits, free as units' flags say, clean up.

        Args:
            wait: whether gradients are there on return; else after `wait_for_reductions`.
        """
        self.in_backward = True
        for unit in self.units:
            self._finish(unit, unit.reshard_after_backward, over=True)
            unit.phase = IDLE
        self._drop_unused()
        self._forget_exits()
        self._empty()
        if wait:
            self._drain()
        self.unawaited = not wait
        self.in_backward = False

    def _empty(self) -> None:
        """The iteration is over: units that the next one never calls count as zeros again."""
        for unit in self.units:
            unit.filled = False

    def wait_for_reductions(self) -> None:
        """Let COMPUTE, and the host for offloaded gradients, wait for what is under way."""
        self._drain()
        self.unawaited = False

    def _forget_exits(self) -> None:
        """The calls whose backward did not come: most often there are none."""
        for unit in self._without_groups.union(self._finished):
            if unit is not None:
                unit.visits.clear()
        self._finished.clear()
        self._without_groups.clear()
        self._starts.clear()
        self._retracing.forget()

    def _make_room(self, group: ParamGroup, first: bool) -> None:
        """Before ``group`` reduces: the window's reductions hold inputs, none of them its (I7).

        A group stages its gradients in one buffer, which its own reduction before may still read.
        The groups of a unit count as one: ``first`` says whether this is the first of them.
        """
        if first:
            self._retire(keep=self._window - 1)
        while self._pending and any(pending.group is group for pending in self._pending):
            self._retire(keep=len(self._pending) - 1)

    def _retire(self, keep: int) -> None:
        """Let COMPUTE wait for the oldest reduce-scatters until ``keep`` hold their inputs."""
        while len(self._pending) > keep:
            pending = self._pending.pop(0)
            self.streams.wait(COMPUTE, pending.scattered, "compute after reduction")
            pending.release_inputs()
            if pending.host:
                self._arriving.append(pending)
            if pending.done is pending.scattered:
                pending.release_rest()
            else:
                self._finish_all_reduces()
                self._summing.append(pending)

    def _finish_all_reduces(self) -> None:
        """Let COMPUTE wait for the all-reduces under way; what they read may be freed then."""
        while self._summing:
            pending = self._summing.pop(0)
            self.streams.wait(COMPUTE, pending.done, "compute after all-reduce")
            pending.release_rest()

    def _settle(self) -> None:
        """Forward or backward returns: the host may write offloaded shards (invariant I8)."""
        for group in self._offloaded:
            group.settle()

    def _drain(self, deliver: bool = True) -> None:
        """Wait for all reductions, and hand over what was copied to the host."""
        self._retire(keep=0)
        self._finish_all_reduces()
        self._settle()
        arriving, self._arriving = self._arriving, []
        for pending in arriving if deliver else ():
            self.streams.synchronize(pending.done, "host after gradients")
            pending.deliver()

    # ---- on request

    def unshard(self, unit: Unit) -> bool:
        """Issue the all-gathers of a unit; `wait` or its forward finishes them.

        Returns:
            Whether there were any.
        """
        issued = False
        for group in unit.groups:
            if group.state.needs_gather:
                if self.post_optim_event is not None:
                    self._order_after_optimizer()
                try:
                    if group.reroute or not (self.in_backward and group.bound):
                        group.bind()
                    group.start_unshard()
                except BaseException:
                    self._abandon(group)
                    raise
                issued = True
        return issued

    def claim(self, unit: Unit) -> None:
        """As `unshard`, for a user: what was a guess until now stays until he reshards it."""
        if self._prefetched is unit:
            self._prefetched = None
        if unit in self._requested:
            self._requested.remove(unit)
        for group in unit.groups:
            if group.state is SHARDED:
                group.bind()  # also where a backward raised, and parameters were replaced since
        self.unshard(unit)

    def wait(self, unit: Unit) -> None:
        """Make COMPUTE wait for a unit's all-gathers and register its gathered parameters."""
        for group in unit.groups:
            if group.state is GATHERING:
                try:
                    group.finish_unshard()
                except BaseException:
                    self._abandon(group)
                    raise

    def _abandon(self, group: ParamGroup) -> None:
        """Leave nothing of a gather that failed, for want of memory or of a peer."""
        self._join_lanes()
        group.abandon()

    def _join_lanes(self) -> None:
        """Let COMPUTE wait for what was interrupted on other lanes: nobody has its event."""
        for lane in SIDE_LANES:
            behind = self.streams.record(lane, "what was interrupted")
            self.streams.wait(COMPUTE, behind, "compute after what was interrupted")

    def reset(self) -> None:
        """Forget a forward or backward that an exception ended half way.

        Everything is freed, gradients that were not reduced are dropped, reductions that were
        under way are waited for.
        """
        self.resets += 1
        SCHEDULE.debug("an iteration was given up, everything is freed: %s", self.units)
        self._drain(deliver=False)
        self.unawaited = False
        self._join_lanes()
        self._prefetched = None
        self._requested.clear()
        for unit in self.units:
            unit.phase = IDLE
            for group in unit.groups:
                group.abandon()
                group.discard_gradients()
        self._forget_exits()
        self._empty()
        self._entered = 0
        self._running = []
        self.forward_root = None
        self.in_backward = self.failed = False
        self.builds_graph = self.holds = False

    # ---- gathering and freeing

    def _gather(self, unit: Unit) -> None:
        if self._prefetched is unit:
            self._prefetched = None
        if self._requested and unit in self._requested:
            self._requested.remove(unit)
        for group in unit.groups:
            if group.state.needs_gather:
                self.unshard(unit)
                break
        self.wait(unit)

    def _prefetch(self, unit: Unit | None) -> None:
        """Gather ``unit`` ahead; a guess that is still unused makes room for it (invariant I6)."""
        if unit is None:
            return
        if self._prefetched is not None and unit.is_sharded:
            self._drop_guess()
        if self.unshard(unit):
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
        if guess is not None and guess.phase in (IDLE, REDUCED):
            if not guess.is_sharded:
                SCHEDULE.debug("gathered ahead and not used, so it is freed: %s", guess)
            guess.reshard()

    def _drop_unused(self) -> None:
        self._drop_guess()
        for unit in self._requested:
            if any(group.state is GATHERING for group in unit.groups):
                unit.reshard()
        self._requested.clear()
