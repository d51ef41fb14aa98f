"""State from the first forward of an iteration to the end of its last backward.

    forwards     finished   a b c b            units, in the order in which their calls ended
                 starts     0                  first position of each forward
    backwards               a b . .            a unit's entry is taken when its backward begins
                            entered = 2

Only the scheduler writes it. An abandoned iteration is dropped, and another one replaces it
(`Scheduler.reset`), so that none of its state remains.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Set
from typing import ClassVar

from fsdp2.core.device.streams import COMPUTE, Streams
from fsdp2.core.params.param import ShardedParam
from fsdp2.core.reduce.reduction import PendingReduction
from fsdp2.core.schedule.retrace import Retracing
from fsdp2.core.schedule.unit import Unit

GRAPHS = "_fsdp2_graphs"
"""In the metadata of a node of autograd: the set of the `Graph` objects that it is in."""


class Graph:
    """A graph that a backward records (``create_graph=True``), which may read parameters unseen.

    Its nodes reference this object while they live; ``let_go`` tells the scheduler that it was
    freed. ``ending`` are those that the running backward reads for the last time.
    """

    alive: ClassVar[weakref.WeakSet[Graph]] = weakref.WeakSet()
    ending: ClassVar[Set[Graph]] = frozenset()

    def __init__(self, let_go: Callable[[], None]) -> None:
        self._let_go = weakref.WeakMethod(let_go)  # a scheduler that is gone keeps nothing
        Graph.alive.add(self)
        # At the end of the interpreter, there is nothing left to free.
        weakref.finalize(self, _call_if_alive, self._let_go).atexit = False

    @classmethod
    def any_held_by(cls, let_go: Callable[[], None]) -> bool:
        """Whether one of this scheduler's may still be read when the running backward is over."""
        # Equal, not identical: a bound method is another object each time.
        return any(graph._let_go() == let_go for graph in cls.alive - cls.ending)

    @classmethod
    def hand_over(cls, former: Callable[[], None], let_go: Callable[[], None]) -> None:
        """A scheduler takes over everything that ``former`` keeps for graphs."""
        for graph in cls.alive:
            if graph._let_go() == former:
                graph._let_go = weakref.WeakMethod(let_go)


def _call_if_alive(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (found := method()) is not None:
        found()


class Iteration:
    """The progress of the forwards and backwards of the units below one root.

    Attributes:
        forward_root: the unit whose forward encloses the running one; ``None`` outside.
        records: whether autograd records the forward that began last, so that it has a backward.
        ending: the function that this backward calls at its end, or ``None``.
        entered: position in ``finished`` of the call whose backward began last.
        starts: first position in ``finished`` of each forward.
        finished: units in the order in which their calls ended; ``None`` if backward has begun.
        without_groups: units without groups that nevertheless have visits.
        graph: represents the graph that the running backward records (``create_graph``), if any.
        holds: whether such a graph may still be used: parameters stay in memory for it, because no
            hook sees which of them it reads. Until a backward has read it without keeping it, or
            until its nodes are freed; and for each group, until its parameters are unreferenced
            when a forward begins or a backward ends. Shards are registered meanwhile.
        ahead: units that were prefetched and are not used yet; the oldest first.
        requested: units that were gathered by an explicit list, and may not be used yet.
        postponed: a unit whose end gathers another one, and that one.
        unawaited: whether `wait_for_reductions` must still follow a `finalize` that did not wait.
    """

    def __init__(self) -> None:
        self.forward_root: Unit | None = None
        self.records = False
        self.failed = False
        self.in_backward = False
        # ``None`` would mean a backward whose end was lost, because an exception ended it.
        self.ending: Callable[[], object] = object
        self.entered = 0
        self.starts: list[int] = []
        self.finished: list[Unit | None] = []
        self.without_groups: set[Unit] = set()
        self.graph: Graph | None = None
        self.holds = False
        self.ahead: list[Unit] = []
        self.requested: list[Unit] = []
        self.postponed: tuple[Unit, Unit] | None = None
        self.unawaited = False
        self.retracing: Retracing | None = None

    def retrace(self, wanted: bool) -> None:
        """Start or stop following units' calls; of earlier ones, only the order is known."""
        if not wanted:
            self.retracing = None
        elif self.retracing is None:
            self.retracing = Retracing(self.finished, self.starts)

    def forget_calls(self) -> None:
        for unit in self.without_groups.union(filter(None, self.finished)):
            unit.visits.clear()
        self.finished.clear()
        self.without_groups.clear()
        self.starts.clear()
        if self.retracing is not None:
            self.retracing.forget()


# ---- running reductions


class InFlight:
    """A scheduler's running reductions, of which a ``window`` of units may hold inputs (I7).

    holding ── COMPUTE waits for the reduce-scatter ──> summing ── COMPUTE waits for the all-reduce
       └────── those that end in CPU memory ──────────> arriving ── the host waits, and delivers
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.window = 1
        self.holding: list[PendingReduction] = []
        self.summing: list[PendingReduction] = []
        self.arriving: list[PendingReduction] = []

    def make_room(self, params: Sequence[ShardedParam], first: bool) -> None:
        """Before a group reduces: limit the reductions that hold inputs, and end its own last one,
        which may still read the buffer that stages gradients; a unit's groups, from its ``first``,
        are one.
        """
        if first:
            self.retire(keep=self.window - 1)
        while any(pending.params is params for pending in self.holding):
            # Oldest first: earlier ones are on the same lane, and end before the group's own.
            self.retire(keep=len(self.holding) - 1)

    def retire(self, keep: int) -> None:
        """Let COMPUTE wait for the oldest reduce-scatters until ``keep`` hold their inputs."""
        while len(self.holding) > keep:
            pending = self.holding.pop(0)
            self.streams.wait(COMPUTE, pending.scattered, "compute after reduction")
            pending.release_inputs()
            if pending.host:
                self.arriving.append(pending)
            # No all-reduce followed: the wait above was for everything.
            if pending.done is pending.scattered:
                pending.release_rest()
            else:
                # At most one all-reduce is not waited for (I7).
                self.finish_all_reduces()
                self.summing.append(pending)

    def finish_all_reduces(self) -> None:
        """Let COMPUTE wait for running all-reduces, whose inputs may then be freed."""
        while self.summing:
            pending = self.summing.pop(0)
            self.streams.wait(COMPUTE, pending.done, "compute after all-reduce")
            pending.release_rest()

    def order_after_hooks(self) -> None:
        """Make all-gathers wait for changes of shards by users' hooks after these reductions:
        COMPUTE waits, which reads shards itself on one rank; the side lanes always wait for it.
        """
        for pending in (*self.summing, *self.holding):
            if any(param.has_grad_hooks for param in pending.params):
                self.streams.wait(COMPUTE, pending.done, "compute after hooks on gradients")

    def deliver(self) -> None:
        """Let the host wait for copies to it, and deliver them."""
        arriving, self.arriving = self.arriving, []
        for pending in arriving:
            self.streams.synchronize(pending.done, "host after gradients")
            pending.deliver()
