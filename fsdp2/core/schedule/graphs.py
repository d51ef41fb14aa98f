"""Graphs that backwards record (``create_graph=True``), which may read parameters unseen."""

from __future__ import annotations

import weakref
from collections.abc import Set
from typing import ClassVar, Protocol

GRAPHS = "_fsdp2_graphs"
"""In the metadata of a node of autograd: the set of the `Graph` objects that it is in."""


class Holder(Protocol):
    """Keeps parameters in memory for graphs: a scheduler."""

    def let_go(self) -> None:
        """A graph was freed: free what was kept for it, unless a forward or backward is running."""


class Graph:
    """Represents a graph that a backward records; its nodes reference this object while they live.

    Args:
        holder: the scheduler whose units' backward records it.

    Attributes:
        alive: all graphs that may still be read; empty if no derivatives of derivatives are taken.
        ending: the graphs that the running backward reads for the last time, because it keeps none.
        holder: as given, by a weak reference.
    """

    __slots__ = ("__weakref__", "holder")

    alive: ClassVar[weakref.WeakSet[Graph]] = weakref.WeakSet()
    ending: ClassVar[Set[Graph]] = frozenset()

    def __init__(self, holder: Holder) -> None:
        self.holder = weakref.ref(holder)
        Graph.alive.add(self)
        weakref.finalize(self, _gone, self.holder).atexit = False

    @classmethod
    def any_held_by(cls, holder: Holder) -> bool:
        """Whether a graph of ``holder`` may still be read when the running backward is over."""
        return any(graph.holder() is holder for graph in cls.alive - cls.ending)

    @classmethod
    def hand_over(cls, former: Holder, holder: Holder) -> None:
        """``holder`` takes over everything that ``former`` keeps for graphs."""
        for graph in cls.alive:
            if graph.holder() is former:
                graph.holder = weakref.ref(holder)


def _gone(holder: weakref.ref[Holder]) -> None:
    if (found := holder()) is not None:
        found.let_go()
