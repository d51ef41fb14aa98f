"""Which rank owns a matrix, and which units' matrices share messages.

    unit 0   q k v o up down ──┐ one wave, if the rank with the most work has at most a fifth more
    unit 1   q k v o up down ──┘ than the mean; otherwise units are joined, within a memory bound
    wave     largest first, each to the rank with the least work so far

The decision depends only on facts that all ranks share: shapes, and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

BALANCED = 1.2
"""Work of the busiest rank over the mean, above which a wave also takes the next unit."""


@dataclass(frozen=True)
class MatrixOwners:
    """The owners of matrices among the ranks of a mesh.

    Attributes:
        ranks: global ranks, in the order of the mesh.
        flops: per rank, the FLOPs of one step's updates.
        nbytes: per rank, the bytes of the matrices that it owns, in the dtype of messages.
        matrices: per rank, the number of matrices that it owns.
        waves: messages per step and direction.
    """

    ranks: tuple[int, ...]
    flops: tuple[float, ...]
    nbytes: tuple[int, ...]
    matrices: tuple[int, ...]
    waves: int

    @property
    def busiest_over_mean(self) -> float:
        """FLOPs of the busiest rank over the mean; 1 means equal work."""
        total = sum(self.flops)
        return max(self.flops) * len(self.flops) / total if total else 1.0


@dataclass
class Tally:
    """Work of ranks so far."""

    flops: list[float]
    nbytes: list[int]
    matrices: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, ranks: int) -> Tally:
        """No work yet."""
        return cls([0.0] * ranks, [0] * ranks, [0] * ranks)

    def least(self) -> int:
        """The rank with the least work."""
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
    """Runs of units that share messages.

    In a run of several units, a rank owns at most half of the bytes of the largest unit, or the
    bytes of the largest matrix.
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
    """Work of a wave's busiest rank over the mean, and bytes of the rank with the most bytes."""
    load = Tally.of(ranks)
    assign(wave, load)
    total = sum(load.flops)
    return (max(load.flops) * ranks / total if total else 1.0), max(load.nbytes)
