"""What lasts from the first forward of an iteration to the end of its last backward.

    forwards     finished   a b c b            units, in the order in which their calls ended
                 starts     0                  first position of each forward
    backwards               a b . .            a unit's place is taken when its backward begins
                            entered = 2

The scheduler alone writes it. An iteration that is given up is dropped: another one takes its place
(`Scheduler.reset`), so that nothing of it is left over.
"""

from __future__ import annotations

from collections.abc import Callable

from fsdp2.core.schedule.graphs import Graph
from fsdp2.core.schedule.kept import Kept
from fsdp2.core.schedule.retrace import Retracing
from fsdp2.core.schedule.unit import Unit


class Iteration:
    """Where the units below one root are in their forwards and backwards.

    Attributes:
        forward_root: the unit whose forward encloses the running one; ``None`` outside.
        records: whether autograd records the forward that began last, so that it has a backward.
        failed: whether the forward of ``forward_root`` raised.
        in_backward: whether a backward has begun whose end was not seen.
        ending: gives what that backward calls at its end; ``None`` where it is over without.
        entered: position in ``finished`` of the call whose backward began last.
        starts: first position in ``finished`` of each forward.
        finished: units in the order in which their calls ended; ``None`` where backward has begun.
        without_groups: units without groups that have visits none the less.
        graph: stands for the graph that the running backward records (``create_graph``), if any.
        holds: whether such a graph may still be used: parameters stay in memory for it, as no hook
            sees which of them it reads. Until a backward has read it that does not keep it, or
            until its nodes go; and for each group, until nobody refers to its parameters when a
            forward begins, or a backward ends. Shards are registered meanwhile.
        ahead: units that were gathered on a guess, and are not used yet; the oldest first.
        requested: units that were gathered on an explicit list, and perhaps are not used yet.
        postponed: a unit whose end gathers another one, and that one.
        kept: units that forwards have left unsharded.
        unawaited: whether a `finalize` that did not wait is still to be followed by
            `wait_for_reductions`.
        retracing: how far backwards have come in ``finished``, where none may miss a unit.
    """

    __slots__ = (
        "ahead",
        "ending",
        "entered",
        "failed",
        "finished",
        "forward_root",
        "graph",
        "holds",
        "in_backward",
        "kept",
        "postponed",
        "records",
        "requested",
        "retracing",
        "starts",
        "unawaited",
        "without_groups",
    )

    def __init__(self) -> None:
        self.forward_root: Unit | None = None
        self.records = False
        self.failed = False
        self.in_backward = False
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
        self.kept = Kept()
        self.unawaited = False
        self.retracing: Retracing | None = None

    def retrace(self, wanted: bool) -> None:
        """Follow the calls of units from now on, or no longer.

        Of the calls before, it is known in which order they ended.
        """
        if not wanted:
            self.retracing = None
        elif self.retracing is None:
            self.retracing = Retracing(self.finished, self.starts)

    def forget_calls(self) -> None:
        """The calls whose backward did not come: most often there are none."""
        for unit in self.without_groups.union(filter(None, self.finished)):
            unit.visits.clear()
        self.finished.clear()
        self.without_groups.clear()
        self.starts.clear()
        if self.retracing is not None:
            self.retracing.forget()

    def succeed(self, former: Iteration) -> None:
        """Take over from the iteration of a root that is part of a larger model now."""
        self.kept.succeed(former.kept)
        self.holds = self.holds or former.holds
