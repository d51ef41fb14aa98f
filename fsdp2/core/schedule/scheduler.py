"""When groups are unsharded, resharded and reduced.

One scheduler serves all units below a root. It records the order of units in each forward and uses
it in the next; backward follows this iteration's forward in reverse.

    enter i   COMPUTE waits for all-gather i; launch all-gather i+1 (in backward i-1)
              … compute i …
    exit i    free i; in backward wait for the last reduction, and reduce i

All-gather i+1 is launched before compute i, and its side lane waits for everything on COMPUTE so
far: for compute i-1, whose buffer was freed with unit i-1. In addition to units whose forward (or
backward) is running and units that are kept on request, at most one unit is therefore unsharded:
two in all for a sequence of blocks (invariant I6). A wrong prediction costs one all-gather and one
free, never a wrong result: a prefetched unit that is not used is freed before the next prefetch.

Why a unit that does not run is gathered. Each reason has one owner; the scheduler frees the unit
when the last one goes, and not before:

    reason      owner                       taken by                    dropped by
    guess       `Iteration.ahead`           a prefetch, the next call   its use, another prefetch
    request     `Iteration.requested`       an explicit list            its use
    backward    the unit's flags            the end of its forward      the end of its backward
    the user    `Unit.claimed`              ``unshard()``               ``reshard()``
    a graph     `Iteration.holds`, HIDDEN   ``create_graph=True``       its last reference
    a later use `Reuse`, RETAINED, GRANTED  the end of a forward or     the next forward, if shards
                                            a backward that keeps it    have changed

The end of a forward and of a backward drops guesses and requests, too. `Scheduler.reset` drops all.

Other features of units have separate modules:

    a larger window           `Scheduler._gather_ahead`, which gathers i+2 at i (decision 23)
    when backward prefetches  before it computes, after its end, never: `Scheduler.exit_backward`
    no unit is missed         `fsdp2.core.schedule.retrace` (decision 7)
    tied, and whole groups    `Scheduler._collect_late` (decision 21)
    side doors                `fsdp2.core.schedule.calls`
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

from torch.autograd import profiler

from fsdp2.core.device.streams import COMPUTE, SIDE_LANES, Event, Streams
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.layout.logs import SCHEDULE
from fsdp2.core.progress import Counts
from fsdp2.core.reduce.reduction import Jobs
from fsdp2.core.schedule.calls import Calls
from fsdp2.core.schedule.connections import connect_groups
from fsdp2.core.schedule.iteration import Graph, InFlight, Iteration
from fsdp2.core.schedule.observers import PROFILER, GroupOperations
from fsdp2.core.schedule.retrace import NOWHERE, running_node
from fsdp2.core.schedule.reuse import Reuse
from fsdp2.core.schedule.states import GATHERING, GRANTED, HIDDEN, UNSHARDED
from fsdp2.core.schedule.unit import (
    BACKWARD,
    FORWARD,
    IDLE,
    REDUCED,
    PrefetchTime,
    Unit,
    put_around,
)
from fsdp2.core.schedule.whole import together

_BEFORE = PrefetchTime.BEFORE


class ForwardOrder:
    """The order in which a root's forwards run its units: recorded in one, used in the next.

    For the first forward, it is the order of registration; a wrong guess costs little. ``entered``
    has the units of the last forward in the order in which they were entered, until it ends.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._known: dict[Unit, list[Unit]] = {}  # of each root's last forward
        self._expected: list[Unit] = []
        self._cursor = -1
        self.entered: list[Unit] = []

    def begin(self, root: Unit) -> None:
        self._expected = self._known.get(root) or []
        if root.is_root and not self._expected:
            self._expected = [unit for unit in self._units if unit.groups]
        self._cursor = -1
        self.entered = []

    def enter(self, unit: Unit) -> bool:
        """Record that ``unit`` is entered; returns whether it was expected at any time."""
        self.entered.append(unit)
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

    def following(self, count: int) -> Sequence[Unit]:
        """The units that are expected next, ``count`` at most; one may occur twice."""
        following = self._cursor + 1
        return self._expected[following : following + count]

    def end(self, root: Unit) -> None:
        self._known[root] = self.entered
        self.entered = []


class Scheduler:
    """Order, prefetch and windows of the units below one root.

    Attributes:
        units: the root, then all units below it in the order of registration.
        is_last_backward: whether the end of this backward waits for reductions and cleans up.
        manual: whether it leaves both to `finalize`, whatever ``is_last_backward`` is.
        resets: how often an iteration was abandoned.
        post_optim_event: recorded after the optimizer's step by a user who runs it on a separate
            stream; the next all-gather waits for it, or otherwise the end of the next forward.
        calls: records of the units' calls, while it makes them (`fsdp2.core.modules.registry`).
        groups: all parameter groups, for anything that is not an operation.
        unreduced: whether a group may hold gradients of backwards without sync, or partial sums.
        connected: whether the process groups of all groups have communicators.
        ranges: whether groups mark their operations for a profiler; compared with the profiler's
            own flag, without a call, when a forward or backward begins.
    """

    FORWARDS_REMEMBERED = 1024

    def __init__(self, units: Sequence[Unit], streams: Streams) -> None:
        self.units = list(units)
        self.streams = streams
        self.iteration = Iteration()
        self.is_last_backward = True
        self.manual = False
        self.resets = 0
        self.post_optim_event: Event = None
        self.window = 1
        self.calls: Calls | None = None
        self.ranges = False
        self.unreduced = True  # so that the first check looks
        self._order = ForwardOrder(self.units)
        self._in_flight = InFlight(streams)
        self.reuse = Reuse()
        self.refresh()

    def refresh(self) -> None:
        """Read again what applies to all units: their flags, and their groups."""
        self.groups = [group for unit in self.units for group in unit.own_groups]
        self.connected = False
        self.reuse.rows = [group for group in self.groups if group.keeps_rows]
        put_around(self.units, PROFILER, self.ranges)
        self._offloaded = [group for group in self.groups if group.offload is not None]
        if self._offloaded and all(known() is not self for known in offloading):
            offloading.append(weakref.ref(self, offloading.remove))
        self._in_flight.window = max((unit.input_buffers for unit in self.units), default=1)
        self.window = window_of(self.units)
        self._whole = together(self.units)
        while len(self.iteration.ahead) > self.window:
            self._free_guess(self.iteration.ahead.pop())
        self.iteration.retrace(self._misses_no_unit)

    @property
    def _misses_no_unit(self) -> bool:
        return any(group.options.reduce_unused for group in self.groups)

    def succeed(self, former: Scheduler) -> None:
        """Take over from ``former``, whose root is now part of a larger model."""
        # Nothing else is left: a root that is running is not taken over.
        self.iteration.holds = self.iteration.holds or former.iteration.holds
        self.reuse.succeed(former.reuse)
        Graph.hand_over(former.let_go, self.let_go)

    def run_on(self, streams: Streams) -> None:
        """Order lanes by another object for the same streams, such as that of a trace."""
        self.streams = self._in_flight.streams = streams

    def follow_profiler(self) -> None:
        """A profiler was started or stopped: mark operations by unit name, or no longer."""
        self.ranges = profiler._is_profiler_enabled
        put_around(self.units, PROFILER, self.ranges)

    # ---- the running forward or backward

    @property
    def is_running(self) -> bool:
        """Whether a forward or backward is running, or was when an exception was raised."""
        return self.iteration.in_backward or self.iteration.forward_root is not None

    @property
    def entered_last(self) -> Unit | None:
        """The unit that the running forward entered last; ``None`` outside. For messages."""
        entered = self._order.entered
        return entered[-1] if entered and self.iteration.forward_root is not None else None

    @property
    def has_calls_to_come(self) -> bool:
        """Whether forwards have run whose backward is still to come."""
        return bool(self.iteration.finished)

    @property
    def has_unseen_gradients(self) -> bool:
        """Whether an ended backward has left gradients that no reduction took."""
        if self.is_running:
            return False
        last = self.is_last_backward and not self.manual
        return last and any(group.has_gradients for group in self.groups)

    # ---- forward

    def begin_forward(self, root: Unit, expects_backward: bool) -> None:
        """A forward starts at ``root``, not inside another unit's; raises if reductions of the last
        `finalize` were not waited for, or a CUDA graph is captured over memory that does not stay.
        """
        now = self.iteration
        if now.unawaited:
            raise coded(
                ShardingStateError,
                "forward-before-wait",
                f"the forward of '{root.title}' was called before wait() on the handle of the "
                f"last finalize_backward(async_op=True); call wait() on that handle first",
            )
        captures = self.streams.captures
        if captures is not None and captures():
            self._check_capture(root, expects_backward)
        if profiler._is_profiler_enabled is not self.ranges:
            self.follow_profiler()
        if not self.connected:
            self.connected = connect_groups(self.groups, expects_backward)
        now.forward_root = root
        reuse = self.reuse
        if reuse.steps != Counts.steps:
            reuse.steps = Counts.steps
            if not now.finished:  # backwards to come are of forwards with the flags of before
                reuse.flags = Counts.flag_changes
            for unit in self.units:
                if unit.phase is IDLE:
                    unit.reshard_if_outdated()
        if now.holds:
            self._let_go()
        if now.in_backward and (self._in_flight.holding or self._in_flight.summing):
            self._in_flight.order_after_hooks()  # otherwise the last backward did, at its end
        looks = reuse.units or reuse.rows or reuse.asks or not expects_backward
        between = bool(now.starts) if self.manual else not self.is_last_backward
        if looks and not between:
            if self.post_optim_event is not None:
                self._order_after_optimizer()
            reuse.begin_forward(self.units, expects_backward)
        self._order.begin(root)
        now.records = expects_backward
        if len(now.finished) > self.FORWARDS_REMEMBERED * len(self.units):
            now.forget_calls()  # forwards whose backward never came
        if expects_backward:
            now.starts.append(len(now.finished))

    def _check_capture(self, root: Unit, expects_backward: bool) -> None:
        """Raise for a CUDA graph over memory that moves: replays use the recorded addresses."""
        self.reuse.forget()
        for group in self.groups:
            options = group.options
            if not options.keep_storage or (expects_backward and not options.keep_gradients):
                raise coded(
                    ShardingStateError,
                    "captured-in-moving-memory",
                    f"the forward of '{root.title}' was called while a CUDA graph is recorded, "
                    f"but the memory of '{group.name}' moves between steps; call "
                    f"set_keep_unsharded_storage(True) and, for a backward, "
                    f"set_tuning(keep_gradients=True) on the root, and run some steps before you "
                    f"record",
                )

    def let_go(self) -> None:
        """A graph was freed: free what was kept for it, unless a forward or backward is running."""
        if not self.is_running:
            self._let_go()

    def _let_go(self) -> None:
        """Free what was kept for graphs that were freed."""
        self.iteration.holds = False
        for unit in self.units:
            for group in unit.groups:
                if group.state.is_sharded or unit.borrows(group):
                    continue
                if group.is_referred_to:
                    self.iteration.holds = True
                elif group.state is HIDDEN:
                    group.reshard()

    def _order_after_optimizer(self) -> None:
        """Let all-gathers wait for an optimizer on a user's stream, who drops gradients next."""
        event, self.post_optim_event = self.post_optim_event, None
        self.streams.wait(COMPUTE, event, "compute after the optimizer")

    def enter_forward(self, unit: Unit) -> None:
        """Gather ``unit``, and prefetch the next ones."""
        now = self.iteration
        unit.phase = FORWARD
        if not unit.groups:
            if unit.forward_prefetch:
                self._request(unit.forward_prefetch)
            return
        if now.records:
            if self.calls is not None:
                self.calls.begin(unit)
            if now.retracing is not None:
                now.retracing.forward_begins(unit)
        known = self._order.enter(unit)
        if now.holds or self.reuse.hides:
            self._gather_anew(unit)
        self._gather(unit)
        for group in unit.groups:
            group.refresh_requires_grad()
        if unit.forward_prefetch:
            self._request(unit.forward_prefetch)
        elif known:
            self._gather_ahead(self._order.following(self.window))

    def exit_forward(self, unit: Unit, keep: bool = False) -> None:
        """Free ``unit``, unless it is used again within the window, or the caller reads it."""
        now = self.iteration
        if self.calls is not None:
            self._note_exit(unit, self.calls)
        unit.phase = IDLE
        is_root = unit is now.forward_root
        if is_root:
            for inside in self.units:  # of a list of modules, some did not run
                if inside.phase is FORWARD:
                    self.exit_forward(inside)
        if unit.groups:
            if unit.frees_after_forward and not keep:
                if now.holds:
                    unit.hide()
                elif len(now.ahead) < self.window and unit in self._order.following(self.window):
                    if unit not in now.ahead:  # its forward may free it, and a child gather it
                        now.ahead.append(unit)
                elif now.records:
                    for group in unit.groups:
                        group.shard_smaller()
                else:
                    unit.reshard()
            else:
                self.reuse.units[unit] = None
            if now.records:
                unit.visits.append(len(now.finished))
                now.finished.append(unit)
        if now.retracing is not None and now.records:
            self._retrace_exit(unit, is_root)
        if is_root:
            self._end_forward(unit)

    def _note_exit(self, unit: Unit, calls: Calls) -> None:
        """Record the end of the first iteration's calls, and raise if the forward has written."""
        for group in unit.groups:
            if written := group.written:
                raise coded(
                    ShardingStateError,
                    "forward-writes",
                    f"the forward of '{unit.title}' wrote parameter '{written}' in place, and "
                    f"resharding loses the write; keep values that forward changes in a buffer, "
                    f"or write the sharded parameter between steps",
                )
        if self.iteration.records:
            calls.whole = calls.whole or unit.is_root
            calls.end(unit)

    def _retrace_exit(self, unit: Unit, is_root: bool) -> None:
        """Record that a call has ended, for backwards that miss no unit."""
        now = self.iteration
        assert now.retracing is not None
        if unit.groups:
            now.retracing.forward_ends()
        elif not is_root:  # so that this call is not taken for an earlier one, of which it was root
            unit.visits.append(NOWHERE)
            now.without_groups.add(unit)

    def give_up_forward(self, unit: Unit) -> None:
        """A call of ``unit`` raised, inside a forward that may continue: it has no backward."""
        now = self.iteration
        unit.phase = IDLE
        if unit.frees_after_forward and not now.holds:
            for group in unit.groups:
                if group.state is UNSHARDED:  # otherwise an all-gather raised
                    group.reshard()
        if self.calls is not None:
            self.calls.end(unit)
        if now.retracing is not None and unit.groups and now.records:
            now.retracing.forward_gives_up(unit)

    def fail(self) -> None:
        """The forward that encloses all others has raised."""
        self.iteration.failed = True

    def _end_forward(self, root: Unit) -> None:
        now = self.iteration
        if not root.groups and now.records and len(now.finished) > now.starts[-1]:
            root.visits.append(len(now.finished) - 1)  # the last inside
            now.without_groups.add(root)
        if not now.records:
            self.reuse.end_forward(now.holds)
        self._order.end(root)
        self._drop_unused()  # at the loss, only units kept on request are unsharded
        if not now.records:  # after an evaluation, users may write shards
            self.settle()
        if self.post_optim_event is not None:  # nothing was gathered
            self._order_after_optimizer()
        now.forward_root = None

    # ---- backward

    def begin_backward(self, ending: Callable[[], object], records: bool) -> None:
        """The first gradient of a backward arrives.

        ``ending`` returns the function that this backward calls at its end, or ``None``;
        ``records`` tells whether it records a graph, which reads parameters without hooks.
        """
        self.iteration.in_backward = True
        self.iteration.ending = ending
        if profiler._is_profiler_enabled is not self.ranges:
            self.follow_profiler()
        if records:
            self.iteration.graph, self.iteration.holds = Graph(self.let_go), True

    def end_unseen_backward(self) -> None:
        """A backward ended whose gradients passed no hook of a unit: reduce what it has left."""
        self.iteration.in_backward = True
        self.end_backward()

    def enter_backward(
        self, unit: Unit, recomputed_for: int | None = None, skipped: bool = False
    ) -> None:
        """Gather ``unit`` for its backward, and prefetch the next ones.

        ``recomputed_for`` is the number of autograd's node for which its forward runs again; if it
        is ``skipped``, it gets no gradient, and its position in the order is reached.
        """
        if unit.phase is BACKWARD:
            return
        now = self.iteration
        if now.retracing is not None:
            if not skipped and not now.retracing.comes_to(unit, recomputed_for, self._turn):
                self._gather(unit)
                return
            now.retracing.backward_begins(unit, None if skipped else running_node())
        unit.phase = BACKWARD
        now.postponed = None
        if not unit.groups:
            del unit.visits[-1:]
            if unit.backward_prefetch:
                self._request(unit.backward_prefetch)
            return
        position = 0
        if unit.visits:
            position = unit.visits.pop()
            now.finished[position] = None
        now.entered = position
        if unit.unshard_in_backward:
            self._gather(unit)
        else:
            unit.forbid_reading()
        if self.reuse.flags != Counts.flag_changes:
            for group in unit.groups:
                group.refresh_requires_grad()
        if unit.backward_prefetch:
            self._request(unit.backward_prefetch)
        elif position:
            before = now.finished[max(position - self.window, 0) : position]
            before.reverse()
            if unit.prefetches is _BEFORE:
                self._gather_ahead(before, backward=True)
            else:  # at its end, maybe (`exit_backward`)
                following = next((u for u in before if u and u.unshard_in_backward), None)
                now.postponed = None if following is None else (unit, following)

    def leave_later_call(self, unit: Unit) -> bool:
        """Leave ``unit`` if a gradient has arrived at a call before that of its running backward,
        and return if it was left: the earlier call is entered next.

        If no unit may be missed, nothing is entered between two calls of one. Otherwise the
        gradients of both calls are reduced together.
        """
        retracing = self.iteration.retracing
        if retracing is None or not (unit.visits and retracing.is_past(unit)):
            return False
        self.exit_backward(unit)
        return True

    def _turn(self, unit: Unit, enters: bool) -> None:
        """For `Retracing`: enter a unit that is skipped, or leave one."""
        if enters:
            self.enter_backward(unit, skipped=True)
        else:
            self.exit_backward(unit)

    def enter_recomputation(self, unit: Unit) -> None:
        """Gather ``unit`` in backward for a recomputed forward."""
        for group in unit.groups:
            if group.state is not UNSHARDED:
                self._gather(unit)
                break

    def exit_backward(self, unit: Unit, _: object = None) -> None:
        """Free ``unit``, unless it is its own successor, and reduce its gradients; a hook, too."""
        if unit.phase is not BACKWARD:  # a derivative with respect to its inputs
            return
        if not self.iteration.holds:  # else a graph may read parameters: its end finishes the unit
            self._finish(unit, unit.reshard_after_backward)

    def _finish(self, unit: Unit, reshard: bool, over: bool = False) -> None:
        """Reshard and reduce, at the end of a call's backward; again, ``over``, of all."""
        now = self.iteration
        fill = False  # whether absent gradients count as zeros, on request
        again = over and unit.phase is REDUCED
        if now.retracing is not None:
            if not over and unit in now.retracing.inside:
                now.retracing.exit(unit, self._turn)
            fill = unit.sync and now.retracing.fills(unit, over)
            if unit.sync and not (fill or over) and self._is_reduced_later(unit, reshard):
                return
        unit.phase = IDLE if over else REDUCED
        if now.postponed is not None and now.postponed[0] is unit:
            self._gather_postponed(now.postponed, reshard, over)
        if not over and reshard and unit.visits and self._stays_for_next(unit):
            reshard = False
        if not unit.sync:
            self._accumulate(unit, reshard)
            return
        if not unit.all_reduce:
            self.unreduced = True
        first = True
        # Gradients are taken from the unsharded parameters, whose memory is freed before the
        # reduction allocates, so that it can reuse it: both are on COMPUTE (decision 1).
        for group in unit.groups:
            if unit.ties or group.is_whole:
                jobs = self._collect_late(unit, group, fill, again)
            else:
                jobs = group.collect(unit.all_reduce, fill, again)
            if reshard and not group.state.is_sharded:
                group.reshard()
            if jobs:
                if group.state is GATHERING and group.base.has_grad_hooks:
                    group.reshard()  # prefetched, and written by a hook
                if self._in_flight.holding:  # only the window's inputs may be alive
                    self._in_flight.make_room(group.params, first)
                first = False
                pending = group.reduce(jobs, unit.all_reduce)
                if pending is not None:
                    self._in_flight.holding.append(pending)
                    if unit.visits:  # gathered again for an earlier call
                        self._in_flight.order_after_hooks()

    @staticmethod
    def _collect_late(unit: Unit, group: GroupOperations, fill: bool, again: bool) -> Jobs:
        """Take the gradients of a group whose reduction may have to wait.

        Autograd delivers the gradient of a tied parameter after all its uses have run: the owner of
        the group reduces it at its end if no other unit's backward is to come. Parameters that are
        whole on every rank are all-reduced together, at the end of the whole backward.
        """
        if unit.borrows(group):
            return []
        base = group.base
        # The backward of another unit that uses it is running, or to come.
        others = unit.ties.get(base, ()) if unit.phase is REDUCED else ()
        awaits = any(u is not unit and (u.phase is BACKWARD or u.visits) for u in others)
        fill = fill or base.fills
        base.fills = fill and (awaits or base.is_whole)
        if awaits:
            return []
        if base.is_whole:
            if not unit.all_reduce or unit.visits:  # a later backward, or call, adds to them
                group.accumulate()
            return []
        return group.collect(unit.all_reduce, fill, again)

    def _is_reduced_later(self, unit: Unit, reshard: bool) -> bool:
        """Free a unit with more calls to come, if one reduction is to sum them all: ranks may have
        gradients for different parameters (invariant I11).
        """
        if not any(group.base.options.reduce_unused for group in unit.groups):
            return False
        unit.phase = REDUCED
        if reshard and not (unit.visits and self._stays_for_next(unit)):
            unit.reshard()
        return True

    def _gather_postponed(self, postponed: tuple[Unit, Unit], reshard: bool, over: bool) -> None:
        """After the end of a unit, gather the next one, if the unit requests it there."""
        unit, following = postponed
        self.iteration.postponed = None
        if unit.prefetches is PrefetchTime.AFTER and not over and following is not unit:
            if reshard:
                unit.reshard()
            self._gather_ahead([following])

    def _stays_for_next(self, unit: Unit) -> bool:
        """Whether the window contains a call of the same unit, for whose backward it is kept."""
        now = self.iteration
        within = now.entered - self.window <= unit.visits[-1] < now.entered
        if not within or len(now.ahead) >= self.window or not unit.groups:
            return False
        if unit not in now.ahead:
            now.ahead.append(unit)
        return True

    def _accumulate(self, unit: Unit, reshard: bool) -> None:
        """Keep the gradients, unreduced, for a backward to come."""
        self.unreduced = True
        for group in unit.groups:
            if not unit.borrows(group):
                group.accumulate()
            if reshard:
                group.reshard()

    def end_backward(self) -> None:
        """The whole backward has run: finish units whose end had no hook, and clean up."""
        Counts.backwards += 1  # so that the engine knows that a hook ran
        now = self.iteration
        if now.retracing is not None:
            if now.forward_root is None:
                now.retracing.end(self._turn)
            else:  # a derivative inside a forward: the backward of that is to come
                now.retracing.interrupt()
        if now.holds:
            now.holds = Graph.any_held_by(self.let_go)
        last = self.is_last_backward and not self.manual
        # Left over are units none of whose inputs required grad (often the root), units that got
        # gradients after their own end, and units that this backward did not reach.
        for unit in self.units:
            if unit.phase is REDUCED and self._is_done(unit):  # as most are
                unit.phase = IDLE
            elif self._is_to_finish(unit, last):
                ahead = unit in now.ahead or unit in now.requested or unit.phase is IDLE
                held = (ahead and not last) or now.holds
                self._finish(unit, unit.reshard_after_backward and not held, over=True)
                self._retain_on_request(unit)
        if self._whole is not None:
            self._whole.reduce(self._in_flight)
        if now.holds:
            for unit in self.units:
                if unit.reshard_after_backward and unit.phase is IDLE:
                    unit.hide()
            if now.graph is None:
                self._let_go()
        if last:  # otherwise backward continues: reductions and prefetched units stay
            self._drop_unused()
            self._drain()
            self.reuse.end_iteration()
            if now.retracing is not None:
                now.retracing.filled.clear()  # what the next iteration never calls counts again
        elif self._in_flight.holding or self._in_flight.summing:
            self._in_flight.order_after_hooks()  # the next backward may gather what they write
        # A forward around this backward continues, and its own backward is to come.
        if now.forward_root is None and (last or not any(unit.visits for unit in self.units)):
            now.forget_calls()
        now.entered = 0
        now.graph = None
        now.in_backward = False

    def _retain_on_request(self, unit: Unit) -> None:
        """Show the shards, with their gradients, of a unit that backward leaves gathered.

        Clipping and optimizers find them in ``model.parameters()``. Another backward of the same
        iteration uses what is gathered; a forward first looks whether shards were written.
        """
        if not (unit.reshard_after_backward or unit.claimed or self.iteration.holds):
            self.reuse.units[unit] = None
            if unit.sync:  # otherwise unsharded parameters have the gradients
                unit.hide(GRANTED)

    def _is_done(self, unit: Unit) -> bool:
        """Whether a unit whose end had a hook is sharded, and has nothing to reduce."""
        retracing = self.iteration.retracing
        if retracing is not None and unit not in retracing.filled:
            return False
        for group in unit.groups:  # noqa: SIM110  # asked for every unit at the end of backward
            if not (group.is_over or unit.borrows(group)):
                return False
        return True

    def _is_to_finish(self, unit: Unit, last: bool) -> bool:
        """Whether the end of this backward is also the end of the unit's."""
        if unit.phase is FORWARD and self.iteration.forward_root is not None:
            return False  # a backward inside a forward: its parameters are in use
        if unit.phase is not IDLE or last:
            return True
        # Otherwise its backward is to come; another unit's has left gradients of what is tied.
        return any(g.has_gradients for g in unit.own_groups if g in unit.ties)

    def finalize(self, wait: bool) -> None:
        """End an iteration's backwards; without ``wait``, `wait_for_reductions` must follow."""
        now = self.iteration
        now.in_backward = True
        for unit in self.units:
            self._finish(unit, unit.reshard_after_backward, over=True)
            if unit.reshard_after_backward:
                unit.drop_retained()
            self._retain_on_request(unit)
        if self._whole is not None:
            self._whole.reduce(self._in_flight)
        self._drop_unused()
        now.forget_calls()
        self.reuse.end_iteration()
        if now.retracing is not None:
            now.retracing.filled.clear()
        if wait:
            self._drain()
        now.unawaited = not wait
        now.in_backward = False

    def finalize_unit(self, unit: Unit) -> None:
        """As `finalize`, for one unit; gradients are complete on return."""
        self._finish(unit, unit.reshard_after_backward, over=True)
        if self._whole is not None:
            self._whole.reduce(self._in_flight)
        self._drain()

    def wait_for_reductions(self) -> None:
        """Let COMPUTE, and the host for offloaded gradients, wait for running reductions."""
        self._drain()
        self.iteration.unawaited = False

    def settle(self) -> None:
        """Block the host until it may write offloaded shards (invariant I8)."""
        for group in self._offloaded:
            group.settle()

    def _drain(self) -> None:
        """Wait for all reductions, and deliver gradients that were copied to the host."""
        self._in_flight.retire(keep=0)
        self._in_flight.finish_all_reduces()
        self.settle()
        if self._in_flight.arriving:
            self._in_flight.deliver()

    # ---- on request

    def unshard(self, unit: Unit) -> bool:
        """Launch a unit's all-gathers, if any; `wait` or its forward finishes them."""
        issued = False
        for group in unit.groups:
            if group.state.needs_gather:
                if self.post_optim_event is not None:
                    self._order_after_optimizer()
                try:
                    # Programs are bound here, where shards are registered and no collective runs.
                    # In a backward, autograd holds what forward has bound: it stays as it is, but
                    # for another way to gather, which leaves the gathered parameters alone.
                    if group.stale or not self.iteration.in_backward:
                        group.bind()
                    group.start_unshard()
                except BaseException:
                    self._abandon(group)
                    raise
                issued = True
        return issued

    def claim(self, unit: Unit) -> None:
        """As `unshard`, for a user: a prefetched unit stays until the user reshards it."""
        now = self.iteration
        for ahead in (now.ahead, now.requested):
            if unit in ahead:
                ahead.remove(unit)
        for group in unit.groups:
            if group.state.is_sharded:
                group.base.forget_rows()
                group.bind()  # also where a backward raised, and parameters were replaced since
        self.unshard(unit)

    def hand_over(self, unit: Unit) -> None:
        """As `wait`, for a user: it stays unsharded until the user reshards it."""
        self.wait(unit)
        unit.claimed = True
        if not self.is_running:
            unit.note_contents()

    def wait(self, unit: Unit) -> None:
        """Make COMPUTE wait for a unit's all-gathers, and register its unsharded parameters."""
        for group in unit.groups:
            if group.state is GATHERING:
                try:
                    group.finish_unshard()
                except BaseException:
                    self._abandon(group)
                    raise
            elif group.state is HIDDEN or group.state is GRANTED:
                group.show()
            elif group.state is UNSHARDED:
                group.take_back()

    def _abandon(self, group: GroupOperations) -> None:
        """Free all memory of an all-gather that failed, because memory or a peer was missing."""
        self._join_lanes()
        group.abandon()

    def _join_lanes(self) -> None:
        """Make COMPUTE wait for interrupted work on other lanes, for which there is no event."""
        for lane in SIDE_LANES:
            behind = self.streams.record(lane, "what was interrupted")
            self.streams.wait(COMPUTE, behind, "compute after what was interrupted")

    def reset(self) -> None:
        """Discard a forward or backward that an exception ended: free unsharded memory, drop
        gradients that were not reduced, and let the host wait for running reductions.
        """
        self.resets += 1
        SCHEDULE.debug("an iteration was given up, everything is freed: %s", self.units)
        self._in_flight.retire(keep=0)
        self._in_flight.finish_all_reduces()
        self.settle()
        self._in_flight.arriving.clear()
        self._join_lanes()
        for unit in self.units:
            unit.give_up_iteration()
        if self._whole is not None:
            self._whole.abandon()
        if self.calls is not None:
            self.calls.forget()
        self.reuse.units.clear()
        self.reuse.hides = False
        self.iteration = Iteration()
        self.iteration.retrace(self._misses_no_unit)

    # ---- gathering and freeing

    def _gather(self, unit: Unit) -> None:
        now = self.iteration
        if unit in now.ahead:
            now.ahead.remove(unit)
        if now.requested and unit in now.requested:
            now.requested.remove(unit)
        for group in unit.groups:
            if group.state.needs_gather:
                self.unshard(unit)
                break
        self.wait(unit)

    def _gather_anew(self, unit: Unit) -> None:
        """Free hidden parameters, because registered shards may have been written since."""
        for group in unit.groups:
            # The memory that a graph reads is filled again, as by a write through ``.data``.
            if group.state is HIDDEN:
                group.reshard()

    def _gather_ahead(self, units: Sequence[Unit | None], backward: bool = False) -> None:
        """Prefetch units; prefetched units that are still unused make room (invariant I6).

        ``units`` are the next in their order, at most as many as the window allows; ``None``: one
        that has ended. In ``backward``, units that gather nothing there are left out.
        """
        ahead = self.iteration.ahead
        for unit in units:
            if unit is None or (backward and not unit.unshard_in_backward):
                continue
            if len(ahead) >= self.window and unit.is_sharded and unit not in ahead:
                # There is one: of so many units, at least this one is not among the guesses.
                stale = next(guess for guess in ahead if guess not in units)
                ahead.remove(stale)
                self._free_guess(stale)
            if self.unshard(unit) and unit not in ahead:
                ahead.append(unit)

    def _request(self, units: Sequence[Unit]) -> None:
        now = self.iteration
        self._drop_guesses(but=units)
        for unit in units:
            if unit.is_sharded:
                self.unshard(unit)
                now.requested.append(unit)

    def _free_guess(self, guess: Unit) -> None:
        """Free a prefetched unit, unless it has since been used."""
        if guess.phase in (IDLE, REDUCED):
            if not guess.is_sharded:
                SCHEDULE.debug("gathered ahead and not used, so it is freed: %s", guess)
            guess.reshard()

    def _drop_guesses(self, but: Sequence[Unit | None] = ()) -> None:
        ahead = self.iteration.ahead
        dropped = [guess for guess in ahead if guess not in but]
        ahead[:] = [guess for guess in ahead if guess in but]
        for guess in dropped:
            self._free_guess(guess)

    def _drop_unused(self) -> None:
        now = self.iteration
        if now.ahead:
            self._drop_guesses()
        for unit in now.requested:
            if any(group.state is GATHERING for group in unit.groups):
                unit.reshard()
        now.requested.clear()


def window_of(units: Iterable[Unit]) -> int:
    """The number of units that a scheduler of these prefetches: the largest that one requests."""
    return max((unit.prefetch_window for unit in units), default=1)


offloading: list[weakref.ref[Scheduler]] = []
"""The schedulers that serve offloaded shards; empty without offload."""


def settle_all() -> None:
    """Block the host until an optimizer may write any offloaded shards of this process."""
    for reference in tuple(offloading):
        scheduler = reference()
        if scheduler is not None:
            scheduler.settle()
