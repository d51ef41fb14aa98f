"""Which rank owns a matrix, and which units' matrices travel together.

    unit 0   q k v o up down ──┐ one wave, if the rank with most work has a fifth more than the
    unit 1   q k v o up down ──┘ mean at most; else units are joined, within a bound of memory
    wave     the longest first, each to the rank that has least to do so far

Facts that all ranks share decide alone: shapes, and how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

BALANCED = 1.2
"""Work of the busiest rank over the mean, above which a wave takes the next unit along."""


@dataclass(frozen=True)
class MatrixOwners:
    """How matrices are shared out among the ranks of a mesh.

    Attributes:
        ranks: global ranks, in the order of the mesh.
        flops: of each, of one step's updates.
        nbytes: of each, of the matrices that it owns, as they travel.
        matrices: of each, how many it owns.
        waves: messages each way of a step.
    """

    ranks: tuple[int, ...]
    flops: tuple[float, ...]
    nbytes: tuple[int, ...]
    matrices: tuple[int, ...]
    waves: int

    @property
    def busiest_over_mean(self) -> float:
        """FLOPs of the busiest rank over the mean of all; 1 is even."""
        total = sum(self.flops)
        return max(self.flops) * len(self.flops) / total if total else 1.0


@dataclass
class Tally:
    """Work of ranks so far.

    Attributes:
        flops: of each rank.
        nbytes: of each rank.
        matrices: of each rank.
    """

    flops: list[float]
    nbytes: list[int]
    matrices: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, ranks: int) -> Tally:
        """Nothing yet."""
        return cls([0.0] * ranks, [0] * ranks, [0] * ranks)

    def least(self) -> int:
        """The rank that has least to do."""
        return min(range(len(self.flops)), key=lambda r: (self.flops[r], self.nbytes[r], r))

    def add(self, rank: int, flops: float, nbytes: int) -> None:
        """Give a rank a matrix."""
        self.flops[rank] += flops
        self.nbytes[rank] += nbytes
        self.matrices[rank] += 1


Weight = tuple[float, int]
"""FLOPs and bytes of a matrix."""


def assign(weights: Sequence[Weight], load: Tally) -> list[int]:
    """The owner of each matrix, added to ``load``."""
    owners = [0] * len(weights)
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i][0], -weights[i][1], i)):
        owners[index] = load.least()
        load.add(owners[index], *weights[index])
    return owners


def join_units(units: Sequence[Sequence[Weight]], ranks: int) -> list[range]:
    """Runs of units that travel together.

    A rank owns at most half of the largest unit's bytes in several, or the largest matrix.

    Args:
        units: matrices of each.
        ranks: how many may own them.
    """
    largest = max((sum(w[1] for w in unit) for unit in units), default=0)
    bound = max(largest // 2, max((w[1] for unit in units for w in unit), default=0))
    runs: list[range] = []
    wave: list[Weight] = []
    start = 0
    for index, unit in enumerate(units):
        joined = [*wave, *unit]
        if wave and (_spread(wave, ranks)[0] <= BALANCED or _spread(joined, ranks)[1] > bound):
            runs.append(range(start, index))
            start, joined = index, list(unit)
        wave = joined
    if wave:
        runs.append(range(start, len(units)))
    return runs


def _spread(wave: Sequence[Weight], ranks: int) -> tuple[float, int]:
    """Work of a wave's busiest rank over the mean, and bytes of the rank that owns most."""
    load = Tally.of(ranks)
    assign(wave, load)
    total = sum(load.flops)
    return (max(load.flops) * ranks / total if total else 1.0), max(load.nbytes)
