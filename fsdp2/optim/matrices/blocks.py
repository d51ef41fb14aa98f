"""Boxes of a parameter's elements: the shard of a rank, and the matrices of the parameter.

W [6, 4], rows on 2 ranks          boxes of ranks   rows 0-2 | rows 3-5
split(W) = W.chunk(3)              matrices         rows 0-1, 2-3, 4-5
a message                          an intersection of both: rank 1 sends row 3 to the owner
                                   of the second matrix, row 2 from rank 0
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp2.core.errors import coded
from fsdp2.core.facts import part_at

Split = Callable[[str, torch.Tensor], "torch.Tensor | Iterable[torch.Tensor] | None"]
"""The user's choice of matrices in a weight, from its name and a full tensor without values."""


@dataclass(frozen=True)
class Box:
    """Contiguous indices in each dim of a tensor."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All elements of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @functools.cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.lengths)

    def meet(self, other: Box) -> Box:
        """The intersection of both; it may be empty."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = map(min, self._ends, other._ends)
        return Box(starts, tuple(max(0, e - s) for s, e in zip(starts, ends, strict=True)))

    def within(self, outer: Box) -> Box:
        """The same elements, counted from where ``outer`` starts."""
        starts = tuple(s - o for s, o in zip(self.starts, outer.starts, strict=True))
        return Box(starts, self.lengths)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of these elements of ``tensor``."""
        for dim, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, length)
        return tensor

    @property
    def _ends(self) -> Iterable[int]:
        return (s + n for s, n in zip(self.starts, self.lengths, strict=True))


# ---- matrices of a weight


@dataclass(frozen=True)
class Matrix:
    """A matrix in a parameter."""

    box: Box
    shape: tuple[int, int]
    transposed: bool = False

    def seen(self, stack: torch.Tensor) -> torch.Tensor:
        """Blocks [k, *box.lengths] as matrices [k, rows, columns]: a view."""
        if self.transposed:
            return stack.reshape(len(stack), *self.shape[::-1]).mT
        return stack.reshape(len(stack), *self.shape)

    def unseen(self, stack: torch.Tensor) -> torch.Tensor:
        """The inverse of `seen`; a copy if memory has another order."""
        return (stack.mT if self.transposed else stack).reshape(len(stack), *self.box.lengths)


def matrices_of(name: str, shape: torch.Size, split: Split | None) -> tuple[Matrix, ...]:
    """The matrices of a parameter; none, if it is to be stepped element by element."""
    whole = torch.empty(shape, device="meta")
    chosen = None if split is None else split(name, whole)
    if chosen is None:
        if len(shape) != 2:
            return ()
        return (Matrix(Box.whole(shape), (shape[0], shape[1])),)
    if isinstance(chosen, torch.Tensor):
        chosen = [chosen] if chosen.dim() == 2 else chosen.unbind()
    matrices = []
    for part in chosen:
        matrix = _matrix(whole, part)
        if matrix is None:
            shown = tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
            raise coded(
                ValueError,
                "muon-split-block",
                f"split() returned {shown} for '{name}', which is not a 2-D block of the weight; "
                f"return views of the weight: slices without steps, chunks or unbind(), "
                f"transposed or not",
            )
        matrices.append(matrix)
    found = sum(matrix.box.numel for matrix in matrices)
    if found != whole.numel() or _overlap([matrix.box for matrix in matrices]):
        raise coded(
            ValueError,
            "muon-split-cover",
            f"split() cut '{name}' {tuple(shape)} into matrices that do not cover each element "
            f"exactly once; return views that together cover the weight, or None to leave it uncut",
        )
    return tuple(matrices)


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two boxes share an element: they are sorted by their first dims."""
    if len({box.lengths for box in boxes}) == 1:  # one grid: they are equal or disjoint
        apart = {box.starts for box in boxes}
        aligned = all(
            start % length == 0
            for box in boxes
            for start, length in zip(box.starts, box.lengths, strict=True)
            if length
        )
        if aligned:
            return len(apart) != len(boxes)
    return any(a.meet(b).numel for a, b in itertools.combinations(boxes, 2))


def _matrix(whole: torch.Tensor, part: object) -> Matrix | None:
    """The position of a view in ``whole``; ``None`` if it is not a matrix in it."""
    if not isinstance(part, torch.Tensor) or part.dim() != 2:
        return None
    if part.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        return None
    runs = _runs(whole, part)
    if runs is None:
        return None
    offset, starts, lengths = part.storage_offset(), [], [1] * whole.dim()
    for dim, stride in enumerate(whole.stride()):
        starts.append(offset // stride if whole.shape[dim] > 1 else 0)
        offset -= starts[-1] * stride
    for run in runs:
        for dim, length in run.items():
            lengths[dim] = length
    box = Box(tuple(starts), tuple(lengths))
    if box.meet(Box.whole(whole.shape)) != box:
        return None
    rows, columns = (min(run, default=0) for run in runs)
    transposed = bool(runs[0]) and bool(runs[1]) and rows > columns
    return Matrix(box, (part.shape[0], part.shape[1]), transposed)


def _runs(whole: torch.Tensor, part: torch.Tensor) -> list[dict[int, int]] | None:
    """Dims of ``whole`` along which both dims of ``part`` run, and their lengths."""
    found: list[dict[int, int]] = []
    for size, stride in zip(part.shape, part.stride(), strict=True):
        run: dict[int, int] = {}
        dims = [d for d in range(whole.dim()) if whole.shape[d] > 1 and whole.stride(d) == stride]
        dim = dims[0] if dims else -1
        while size > 1:
            if dim < 0:
                return None
            length = min(size, whole.shape[dim])
            if size % length:
                return None
            run[dim], size, dim = length, size // length, dim - 1
        found.append(run)
    return None if found[0].keys() & found[1].keys() else found


# ---- boxes of ranks


@dataclass(frozen=True)
class Spread:
    """How a parameter is distributed over ranks."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    copies: tuple[tuple[int, ...], ...]
    position: int

    @property
    def own(self) -> Box:
        """This rank's box."""
        return self.boxes[self.position]


def plain_spread(shape: torch.Size) -> Spread:
    """For a parameter that is on no mesh: every rank steps it without the others."""
    return Spread((), (Box.whole(shape),), ((),), 0)


def spread_of(name: str, spec: DTensorSpec, rows: torch.Size) -> Spread:
    """How a DTensor is distributed."""
    spread = _spread(spec.mesh, spec.placements, spec.shape)
    if spread is None or spread.own.lengths != tuple(rows):
        raise coded(
            ValueError,
            "muon-placements",
            f"'{name}' has placements {spec.placements} and shape {tuple(rows)} on this rank, "
            f"which an optimizer of whole matrices does not support; give it to a separate "
            f"optimizer",
        )
    return spread


@functools.lru_cache(maxsize=512)
def _spread(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> Spread | None:
    coordinate = mesh.get_coordinate()
    if coordinate is None or not all(
        isinstance(placement, Replicate | Shard | _StridedShard) for placement in placements
    ):
        return None
    ranks = mesh.mesh
    sizes = tuple(ranks.shape)
    # Ranks in groups, not coordinates: torch distributes and gathers in that order.
    orders = (ranks.argsort(axis).argsort(axis).flatten().tolist() for axis in range(ranks.ndim))
    places: list[tuple[int, ...]] = list(zip(*orders, strict=True))
    return Spread(
        tuple(ranks.flatten().tolist()),
        tuple(Box(*part_at(place, sizes, placements, shape)) for place in places),
        tuple(
            tuple(at for at, p in zip(place, placements, strict=True) if isinstance(p, Replicate))
            for place in places
        ),
        list(itertools.product(*map(range, sizes))).index(tuple(coordinate)),
    )
