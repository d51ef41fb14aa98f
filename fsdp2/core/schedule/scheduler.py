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
wrong result: what was prefetched and not used is freed before the next prefetch. Larger windows
are another kind of scheduler, `fsdp2.core.schedule.window`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Set
from typing import ClassVar

from torch.autograd import profiler

from fsdp2.core.config import ShardingStateError
from fsdp2.core.device.streams import COMPUTE, SIDE_LANES, Event, Streams
from fsdp2.core.layout.logs import SCHEDULE
from fsdp2.core.params.param import FlagChanges
from fsdp2.core.progress import Backwards, OptimizerSteps
from fsdp2.core.schedule.connections import connect_groups
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.in_flight import InFlight
from fsdp2.core.schedule.kept import Kept
from fsdp2.core.schedule.layers import put_around
from fsdp2.core.schedule.profiling import ProfiledGroup
from fsdp2.core.schedule.states import GATHERING, HIDDEN, SHARDED, UNSHARDED
from fsdp2.core.schedule.unit import BACKWARD, FORWARD, IDLE, REDUCED, Unit


class ForwardOrder:
    """In which order a root's forwards run its units: learned from one, used in the next.

    A first guess costs little if it is wrong: modules run as they are registered.

    Args:
        units: all units, as they are registered.

    Attributes:
        entered: the units of the running forward, in the order in which they were entered.
    """

    __slots__ = ("_cursor", "_expected", "_known", "_units", "entered")

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._known: dict[Unit, list[Unit]] = {}  # of each root's last forward
        self._expected: list[Unit] = []
        self._cursor = -1
        self.entered: list[Unit] = []

    def begin(self, root: Unit) -> None:
        """A forward begins at ``root``."""
        self._expected = self._known.get(root) or self._guess(root)
        self._cursor = -1
        self.entered = []

    def _guess(self, root: Unit) -> list[Unit]:
        return [unit for unit in self._units if unit.groups] if root.is_root else []

    def enter(self, unit: Unit) -> bool:
        """Note that ``unit`` is entered; returns whether that was expected, at any time."""
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

    def successor(self) -> Unit | None:
        """The unit that is expected next."""
        following = self._cursor + 1
        return self._expected[following] if following < len(self._expected) else None

    def following(self, count: int) -> Sequence[Unit]:
        """The units that are expected next, ``count`` at most; one may be among them twice."""
        following = self._cursor + 1
        return self._expected[following : following + count]

    def is_at(self, unit: Unit) -> bool:
        """Whether ``unit``, which was entered last, was expected at any time."""
        return self._cursor >= 0 and self._expected[self._cursor] is unit

    def end(self, root: Unit) -> None:
        """The forward of ``root`` is over."""
        self._known[root] = self.entered
        self.entered = []

    def forget(self) -> None:
        """The running forward was given up."""
        self.entered = []


GRAPHS = "_fsdp2_graphs"
"""In the metadata of a node of autograd: the set of the `Graph` objects that it is in."""


class Graph:
    """Stands for a graph that a backward records; nodes of that refer to it, while they live.

    Args:
        scheduler: the scheduler whose units' backward records it.

    Attributes:
        alive: all graphs that may still be read; empty where nobody takes derivatives of
            derivatives.
        ending: the graphs that the running backward reads for the last time, as it keeps none.
        scheduler: as given, by a weak reference.
    """

    __slots__ = ("__weakref__", "scheduler")

    alive: ClassVar[weakref.WeakSet[Graph]] = weakref.WeakSet()
    ending: ClassVar[Set[Graph]] = frozenset()

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = weakref.ref(scheduler)
        Graph.alive.add(self)


class Scheduler:
    """Order, prefetch and windows of the units below one root.

    Args:
        units: all units, in the order of registration; the first is the root.
        streams: lanes of the device.

    Attributes:
        units: all units below the root, and itself.
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
        graph: stands for the graph that the running backward records (``create_graph``), if any.
        holds: whether such a graph may still be used: parameters stay in memory for it, as no hook
            sees which of them it reads. Until a backward has read it that does not keep it, or
            until its nodes go; and for each group, until nobody refers to its parameters when a
            forward begins, or a backward ends. Shards are registered meanwhile.
        groups: all parameter groups.
        unreduced: whether a group may hold gradients of backwards without sync, or partial sums.
        connected: whether the process groups of all groups have communicators.
        ranges: whether groups mark their operations for a profiler; compared with the profiler's
            own flag, without a call, when a forward or backward begins.
    """

    FORWARDS_REMEMBERED = 1024

    def __init__(self, units: Sequence[Unit], streams: Streams) -> None:
        self.units = list(units)
        self.streams = streams
        self.forward_root: Unit | None = None
        self.in_backward = False
        self.ending: Callable[[], object] = object
        self.failed = False
        self.is_last_backward = True
        self.graph: Graph | None = None
        self.holds = False
        self._order = ForwardOrder(self.units)
        self._entered = 0  # position of the unit whose backward began last
        self._starts: list[int] = []  # first positions of this iteration's forwards
        self._finished: list[Unit | None] = []  # this iteration's exits, till their backward comes
        self._without_groups: set[Unit | None] = set()  # units that have visits none the less
        self._records_exits = False
        self._prefetched: Unit | None = None  # gathered on a guess, not yet used
        self._requested: list[Unit] = []  # gathered on an explicit list, perhaps not yet used
        self._kept = Kept()
        self._in_flight = InFlight(streams)
        self.post_optim_event: Event = None
        self.manual = False
        self.unawaited = False
        self.resets = 0
        self.ranges = False
        self.unreduced = True  # so that somebody looks
        _serving.update(dict.fromkeys(units, weakref.ref(self)))
        self.refresh()

    def refresh(self) -> None:
        """Take up what counts for all units: their flags, and which groups they have."""
        self.groups = [group for unit in self.units for group in unit.own_groups]
        self.connected = False
        put_around(self.groups, ProfiledGroup, self.ranges)
        self._offloaded = [group for group in self.groups if group.offload is not None]
        if self._offloaded and all(known() is not self for known in offloading):
            offloading.append(weakref.ref(self, offloading.remove))
        self._in_flight.window = max((unit.input_buffers for unit in self.units), default=1)

    def succeed(self, former: Scheduler) -> None:
        """Take over from ``former``, whose root is part of a larger model now."""
        self._kept.succeed(former._kept)
        self.holds = self.holds or former.holds
        for graph in Graph.alive:
            if graph.scheduler() is former:
                graph.scheduler = weakref.ref(self)

    def follow_profiler(self) -> None:
        """A profiler was started or stopped: mark operations by unit name, or no longer."""
        self.ranges = profiler._is_profiler_enabled
        put_around(self.groups, ProfiledGroup, self.ranges)

    # ---- forward

    def begin_forward(self, root: Unit, expects_backward: bool, anew: bool = False) -> None:
        """A forward starts at ``root``, which is not inside another unit's forward.

        Args:
            root: the unit.
            expects_backward: whether autograd records it.
            anew: whether units that earlier forwards have left gathered are gathered again.

        Raises:
            ShardingStateError: nobody waited for the reductions of the last `finalize`, or a CUDA
                graph is recorded over memory that does not stay.
        """
        if self.unawaited:
            raise ShardingStateError(
                f"the forward of '{root.title}' was called before the gradients of the "
                f"last finalize_backward(async_op=True) were waited for; call wait() on the "
                f"handle that it returned"
            )
        captures = self.streams.captures
        if captures is not None and captures():
            self._check_capture(root, expects_backward)
        if profiler._is_profiler_enabled is not self.ranges:
            self.follow_profiler()
        if not self.connected:
            self.connected = connect_groups(self.groups, expects_backward)
        self.forward_root = root
        if self._kept.steps != OptimizerSteps.count:
            self._kept.begin_iteration(bool(self._finished))
            for unit in self.units:
                if unit.phase is IDLE:
                    unit.reshard_if_outdated()
        if self.holds:
            self._let_go()
        if self._kept.units:
            self._kept.free_stale(anew)
        self._order.begin(root)
        self._records_exits = expects_backward
        if self.in_backward and (self._in_flight.holding or self._in_flight.summing):
            self._in_flight.order_after_hooks()  # else the last backward has, at its end
        if len(self._finished) > self.FORWARDS_REMEMBERED * len(self.units):
            self._forget_exits()  # forwards whose backward never came
        if expects_backward:
            self._starts.append(len(self._finished))

    def _check_capture(self, root: Unit, expects_backward: bool) -> None:
        """A CUDA graph replays addresses, and memory that comes and goes has others by then."""
        for group in self.groups:
            options = group.options
            if not options.keep_storage or (expects_backward and not options.keep_gradients):
                raise ShardingStateError(
                    f"the forward of '{root.title}' was called while a CUDA graph is recorded, but "
                    f"memory of '{group.name}' does not stay where it is; call "
                    f"set_keep_unsharded_storage(True) and, for a backward, "
                    f"set_keep_gradient_storage(True) on the root, and run some steps before"
                )

    def _let_go(self) -> None:
        """Free what is held for graphs that are gone."""
        self.holds = False
        for group in self.groups:
            if group.state is SHARDED:
                continue
            if group.is_referred_to:
                self.holds = True
            elif group.state is HIDDEN:
                group.reshard()

    def _order_after_optimizer(self) -> None:
        """Let gathers wait for the optimizer on a user's stream, who drops gradients next."""
        event, self.post_optim_event = self.post_optim_event, None
        self.streams.wait(COMPUTE, event, "compute after the optimizer")

    def enter_forward(self, unit: Unit) -> None:
        """Gather ``unit`` and start on the one that should be next."""
        unit.phase = FORWARD
        if not unit.groups:
            if unit.forward_prefetch:
                self._request(unit.forward_prefetch)
            return
        known = self._order.enter(unit)
        if self.holds or self._kept.hides:
            self._gather_anew(unit)
        self._gather(unit)
        for group in unit.groups:
            group.refresh_requires_grad()
        if unit.forward_prefetch:
            self._request(unit.forward_prefetch)
        elif known:
            self._prefetch(self._order.successor())

    def exit_forward(self, unit: Unit, keep: bool = False) -> None:
        """Free ``unit`` unless it is kept, or is itself the next one."""
        unit.phase = IDLE
        if unit is self.forward_root:
            for inside in self.units:  # a list of modules of which some did not run
                if inside.phase is FORWARD:
                    self.exit_forward(inside)
        if unit.groups:
            if unit.frees_after_forward and not keep:
                if self.holds:
                    unit.hide()
                elif self._prefetched is None and self._comes_next(unit):
                    pass
                elif self._records_exits:
                    for group in unit.groups:
                        group.shard_smaller()
                else:
                    unit.reshard()
            else:
                self._kept.add(unit, keep)
            if self._records_exits:
                unit.visits.append(len(self._finished))
                self._finished.append(unit)
        if unit is self.forward_root:
            self._end_forward(unit)

    def _comes_next(self, unit: Unit) -> bool:
        """Whether the next call is of the same unit: it is kept for that one."""
        if self._order.successor() is not unit:
            return False
        self._prefetched = unit
        return True

    def give_up_forward(self, unit: Unit) -> None:
        """A call of ``unit`` raised, inside of a forward that may go on: it has no backward."""
        unit.phase = IDLE
        if unit.frees_after_forward and not self.holds:
            for group in unit.groups:
                if group.is_unsharded:  # else it was a gather that raised
                    group.reshard()

    def _end_forward(self, root: Unit) -> None:
        if not root.groups and self._records_exits and len(self._finished) > self._starts[-1]:
            root.visits.append(len(self._finished) - 1)  # the last inside
            self._without_groups.add(root)
        if not self._records_exits:
            self._kept.show_shards(self.holds)
        self._order.end(root)
        self._drop_unused()  # at the loss, only what is kept on request is gathered
        if not self._records_exits:  # whoever evaluates may write shards next, by hand
            self.settle()
        if self.post_optim_event is not None:  # nothing was gathered
            self._order_after_optimizer()
        self.forward_root = None

    @property
    def entered_last(self) -> Unit | None:
        """The unit that the running forward entered last; ``None`` outside. For messages."""
        entered = self._order.entered
        return entered[-1] if entered else None

    @property
    def has_calls_to_come(self) -> bool:
        """Whether forwards have run whose backward did not come yet."""
        return bool(self._finished)

    @property
    def has_unseen_gradients(self) -> bool:
        """Whether a backward that is over has left gradients that nobody took."""
        if self.in_backward or self.forward_root is not None:
            return False
        last = self.is_last_backward and not self.manual
        return last and any(group.has_gradients for unit in self.units for group in unit.groups)

    # ---- backward

    def records_graph(self) -> None:
        """The backward that begins records a graph, which reads parameters unseen."""
        self.graph, self.holds = Graph(self), True
        reference = self.graph.scheduler

        def gone() -> None:
            scheduler = reference()
            if scheduler is not None and not scheduler.in_backward and not scheduler.forward_root:
                scheduler._let_go()

        weakref.finalize(self.graph, gone).atexit = False

    def enter_backward(self, unit: Unit, recomputed_for: int | None = None) -> None:
        """Gather ``unit`` for its backward and start on the one that should be next.

        Args:
            unit: the unit.
            recomputed_for: sequence number of autograd's node for which its forward runs again.
        """
        if unit.phase is BACKWARD:
            return
        unit.phase = BACKWARD
        if not unit.groups:
            del unit.visits[-1:]
            if unit.backward_prefetch:
                self._request(unit.backward_prefetch)
            return
        position = 0
        if unit.visits:
            position = unit.visits.pop()
            self._finished[position] = None
        self._entered = position
        if unit.unshard_in_backward:
            self._gather(unit)
        else:
            unit.forbid_reading()
        if self._kept.flags != FlagChanges.count:
            for group in unit.groups:
                group.refresh_requires_grad()
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
        return False  # the gradients of both calls are reduced together

    def enter_recomputation(self, unit: Unit) -> None:
        """Gather ``unit``, in backward, for a forward that runs again."""
        if unit.is_sharded or self.holds:
            self._gather(unit)

    def exit_backward(self, unit: Unit, _: object = None) -> None:
        """Free ``unit``, unless it is itself the next one, and reduce the gradients it has.

        It may be called as a gradient's hook, with the gradient of one of the unit's inputs. Other
        kinds of schedulers override `_finish`, not this, so that it may be bound once and for all.
        """
        if unit.phase is not BACKWARD:  # a derivative by its inputs, inside of it or without it
            return
        if not self.holds:
            self._finish(unit, unit.reshard_after_backward)

    def _finish(self, unit: Unit, reshard: bool, over: bool = False, fill: bool = False) -> None:
        """Free and reduce: at the end of a call's backward, and again when all have run.

        Args:
            unit: the unit.
            reshard: whether to free it.
            over: whether the whole backward has run, not this call's alone.
            fill: whether absent gradients may count as zeros.
        """
        again = over and unit.phase is REDUCED
        if not over:
            unit.phase = REDUCED
            if reshard and unit.visits and self._stays_for_next(unit):
                reshard = False
        if not unit.sync:
            self._accumulate(unit, reshard)
            return
        if not unit.all_reduce:
            self.unreduced = True
        first = True
        for group in unit.groups:
            jobs = group.collect(unit.all_reduce, fill, again)
            if reshard and group.state is not SHARDED:
                group.reshard()
            if jobs:
                if group.state is GATHERING and group.has_grad_hooks:
                    group.reshard()  # what is gathered ahead, and a hook writes
                if self._in_flight.holding:
                    self._in_flight.make_room(group, first)
                first = False
                pending = group.reduce(jobs, unit.all_reduce)
                if pending is not None:
                    self._in_flight.holding.append(pending)
                    if unit.visits:  # gathered again for an earlier call, maybe at once
                        self._in_flight.order_after_hooks()

    def _stays_for_next(self, unit: Unit) -> bool:
        """Whether the call before was of the same unit: it is kept for that one's backward."""
        if self._prefetched is not None or unit.visits[-1] != self._entered - 1:
            return False
        self._prefetched = unit
        return True

    def _accumulate(self, unit: Unit, reshard: bool) -> None:
        """Keep the gradients, unreduced, for a backward to come."""
        self.unreduced = True
        for group in unit.groups:
            group.accumulate()
            if reshard:
                group.reshard()

    def end_backward(self) -> None:
        """The whole backward has run: finish units whose own end was not seen, and clean up."""
        Backwards.ended += 1
        if self.holds:
            left = Graph.alive - Graph.ending
            self.holds = any(graph.scheduler() is self for graph in left)
        last = self.is_last_backward and not self.manual
        for unit in self.units:
            if unit.phase is REDUCED and self._is_done(unit):  # as most are
                unit.phase = IDLE
            elif self._is_to_finish(unit, last):
                reshard = unit.reshard_after_backward and not self._keeps(unit, last)
                self._finish(unit, reshard, over=True)
                unit.phase = IDLE
        if self.holds:
            for unit in self.units:
                if unit.reshard_after_backward and unit.phase is IDLE:
                    unit.hide()
            if self.graph is None:
                self._let_go()
        if last:
            self._drop_unused()
            self._drain()
            self._kept.end_iteration()
        elif self._in_flight.holding or self._in_flight.summing:
            self._in_flight.order_after_hooks()  # the next backward may gather what they write
        # A forward around this backward goes on, and its own backward is to come.
        if self.forward_root is None and (last or not any(unit.visits for unit in self.units)):
            self._forget_exits()
        self._entered = 0
        self.graph = None
        self.in_backward = False

    def _is_done(self, unit: Unit) -> bool:
        """Whether a unit whose own end was seen is sharded, and nothing is there to reduce."""
        for group in unit.groups:  # noqa: SIM110  # asked for every unit at the end of backward
            if not group.is_over:
                return False
        return True

    def _is_to_finish(self, unit: Unit, last: bool) -> bool:
        """Whether this backward's end is the unit's."""
        if unit.phase is FORWARD and self.forward_root is not None:
            return False  # a backward inside a forward: its parameters are in use
        if unit.phase is not IDLE or last:
            return True
        return any(group.is_owed for group in unit.groups)  # else its backward is to come

    def _keeps(self, unit: Unit, last: bool) -> bool:
        """Whether the unit stays gathered: for a later backward, or for a graph of this one."""
        ahead = unit is self._prefetched or unit in self._requested or unit.phase is IDLE
        return (ahead and not last) or self.holds

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
        self._kept.end_iteration()
        if wait:
            self._drain()
        self.unawaited = not wait
        self.in_backward = False

    def finalize_unit(self, unit: Unit) -> None:
        """As `finalize`, for one unit; gradients are there on return."""
        self._finish(unit, unit.reshard_after_backward, over=True)
        self._drain()

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

    def settle(self) -> None:
        """Block the host until it may write offloaded shards (invariant I8)."""
        for group in self._offloaded:
            group.settle()

    def _drain(self) -> None:
        """Wait for all reductions, and hand over what was copied to the host."""
        self._in_flight.retire(keep=0)
        self._in_flight.finish_all_reduces()
        self.settle()
        if self._in_flight.arriving:
            self._in_flight.deliver()

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

    def hand_over(self, unit: Unit) -> None:
        """As `wait`, for a user: it stays unsharded until he reshards it."""
        self.wait(unit)
        unit.claimed = True

    def wait(self, unit: Unit) -> None:
        """Make COMPUTE wait for a unit's all-gathers and register its gathered parameters."""
        for group in unit.groups:
            if group.state is GATHERING:
                try:
                    group.finish_unshard()
                except BaseException:
                    self._abandon(group)
                    raise
            elif group.state is HIDDEN:
                group.show()
            elif group.state is UNSHARDED:
                group.take_back()

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
        self._in_flight.retire(keep=0)
        self._in_flight.finish_all_reduces()
        self.settle()
        self._in_flight.arriving.clear()
        self.unawaited = False
        self._join_lanes()
        self._prefetched = None
        self._requested.clear()
        self._kept.forget()
        for unit in self.units:
            unit.phase = IDLE
            unit.claimed = False
            for group in unit.groups:
                group.abandon()
                group.discard_gradients()
        self._forget_exits()
        self._entered = 0
        self._order.forget()
        self.forward_root = None
        self.in_backward = self.failed = False
        self.graph, self.holds = None, False

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

    def _gather_anew(self, unit: Unit) -> None:
        """Free what is hidden: its shards, which are registered, may have been written since.

        What a graph reads of it is filled again, as by an operation through ``.data``.
        """
        for group in unit.groups:
            if group.state is HIDDEN:
                group.reshard()

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


offloading: list[weakref.ref[Scheduler]] = []
"""The schedulers that serve offloaded shards; empty where nobody offloads."""


def settle_all() -> None:
    """Block the host until it may write any offloaded shards of this process: an optimizer does."""
    for reference in tuple(offloading):
        scheduler = reference()
        if scheduler is not None:
            scheduler.settle()


_serving: weakref.WeakKeyDictionary[Unit, weakref.ref[Scheduler]] = weakref.WeakKeyDictionary()


def scheduler_of(unit: Unit) -> Scheduler | None:
    """The scheduler that was made last for ``unit``; ``None`` before its root's first forward.

    A unit gets another one where its root becomes part of a larger model, or gets more units.
    """
    found = _serving.get(unit)
    return None if found is None else found()
