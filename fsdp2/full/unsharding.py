"""How one parameter is unsharded and sharded again: exactly, in its own dtype, leaf by leaf.

    global   [ 8, 6 ]      ── Level(tensor parallel dim) ──>  [ 4, 6 ]
             [ 4, 6 ]      ── Level(replicas)            ──>  [ 4, 6 ]     the same on each
             [ 4, 6 ]      ── Level(shard axis)          ──>  [ 2, 6 ]     this rank's rows

To unshard, rows go up the levels: on every rank (all-gathers), or only on the first (gathers to the
first of each level, so that no other rank ever receives more than its part). To shard, each rank
takes its rows if every rank has the full tensor; otherwise the first sends them.

The engine's all-gather is for compute: it casts. This one is for values: it copies bytes. Small
tensors are packed together, and large ones start before others have ended.

A tensor subclass is sent as the plain tensors that it wraps, its *leaves*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import (
    Cut,
    GroupCollectives,
    MeshAxes,
    ProcessGroup,
    ShardedParam,
    Slot,
    Work,
    broadcast_from_first,
    gather_to_first,
    is_extended,
    scatter_from_first,
)

PACK_BELOW, PACK = 128 << 10, 1 << 20
"""Bytes of a full tensor below which it is packed with others, and of the largest pack."""


@dataclass(frozen=True)
class Level:
    """One dim of a mesh: how its ranks hold the tensor of the level above.

    Attributes:
        group: process group; ``None`` if there is one rank.
        size: its number of ranks.
        rank: this process's position.
        cut: how it is sharded; ``None`` if each rank has a copy.
    """

    group: ProcessGroup | None
    size: int
    rank: int
    cut: Cut | None = None

    def slot(self, whole: Sequence[int]) -> Slot:
        """The parts of a tensor of this shape, wherever they lie."""
        assert self.cut is not None
        return Slot(0, tuple(whole), self.cut, self.size, 0, 0)

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of a whole tensor: a view."""
        return whole if self.cut is None else self.slot(whole.shape).part(whole, rank)

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's part."""
        return tuple(whole) if self.cut is None else self.slot(whole).local_shape(rank)


@dataclass(frozen=True)
class ParamLevels:
    """The levels of one parameter, the whole one's first.

    Attributes:
        name: the parameter's, for messages.
        levels: as described above.
        device: where collectives run.
        dims: the dims that are cut, as the rows are laid out.
        shape: of the whole parameter, laid out.
    """

    name: str
    levels: tuple[Level, ...]
    device: torch.device
    dims: frozenset[int]
    shape: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of every level: "rank 0" of this parameter."""
        return all(level.rank == 0 for level in self.levels)

    def gather(self, rows: torch.Tensor, everywhere: bool) -> torch.Tensor | None:
        """The full tensor of one leaf; ``None`` on ranks that do not get it.

        Args:
            rows: this rank's, a plain tensor, laid out; in the memory of any device.
            everywhere: whether all ranks get it, or only the first.
        """
        shapes = self._shapes(rows)
        held = rows.to(self.device).contiguous()
        for level, shape in zip(reversed(self.levels), reversed(shapes[:-1]), strict=True):
            if level.cut is not None and level.group is not None:
                found = _gather(level, held, shape, everywhere)
                if found is None:
                    return None
                held = found
            elif not everywhere and level.rank != 0:
                return None
        return held

    def only_gather(self, everywhere: bool) -> Level | None:
        """The level whose gather makes a leaf full, if no other has to do anything."""
        moving = [each for each in self.levels if each.cut is not None and each.group is not None]
        lone = len(moving) == 1 and (everywhere or len(self.levels) == 1)
        return moving[0] if lone else None

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole leaf: a view."""
        for level in self.levels:
            whole = level.part(whole, level.rank)
        return whole

    def send(
        self, whole: torch.Tensor | None, like: torch.Tensor, everywhere: bool = False
    ) -> torch.Tensor:
        """This rank's rows of a leaf that is whole on the first rank.

        Args:
            whole: on the first rank; ``None`` elsewhere.
            like: this rank's present rows, which have the right shape.
            everywhere: whether all ranks get the whole leaf instead.
        """
        shapes = self._shapes(like)
        held = None if whole is None else whole.to(self.device, like.dtype)
        for at, level in enumerate(self.levels):
            if level.group is None or any(below.rank for below in self.levels[at + 1 :]):
                continue
            shape = shapes[0 if everywhere else at]
            if level.cut is None or everywhere:
                held = _broadcast(level.group, held, shape, like.dtype, self.device)
            else:
                held = _scatter(level, held, shape, like.dtype, self.device)
        assert held is not None
        return held

    def whole_shape(self, rows: torch.Tensor) -> tuple[int, ...]:
        """The full shape of a leaf of which this rank has ``rows``."""
        return self._shapes(rows)[0]

    def _shapes(self, rows: torch.Tensor) -> list[tuple[int, ...]]:
        """The shapes of a leaf: full, below the first level, and so on; this rank's is last."""
        whole = tuple(
            self.shape[dim] if dim in self.dims else length for dim, length in enumerate(rows.shape)
        )
        shapes = [whole]
        for level in self.levels:
            shapes.append(level.shape(shapes[-1], level.rank))
        if shapes[-1] != tuple(rows.shape):
            raise coded(
                ShardingStateError,
                "subclass-parts",
                f"parameter '{self.name}' is a tensor subclass with an inner tensor of shape "
                f"{tuple(rows.shape)}, which is not sharded like the parameter; leave it out with "
                f"names=",
            )
        return shapes


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor as what every backend moves."""
    return tensor.view(torch.uint8)


def _gather(
    level: Level, rows: torch.Tensor, shape: tuple[int, ...], everywhere: bool
) -> torch.Tensor | None:
    flat = _padded(rows, level.slot(shape).shard_numel)
    buffer, work = _start(level, flat, everywhere)
    if work is not None:
        work.wait()
    return None if buffer is None else _arranged(level, buffer, shape)


def _padded(rows: torch.Tensor, n: int) -> torch.Tensor:
    """Rows as a flat tensor of ``n`` elements."""
    flat = rows.reshape(-1)
    if flat.numel() == n:
        return flat
    return torch.cat([flat, flat.new_zeros(n - flat.numel())])


def _start(
    level: Level, flat: torch.Tensor, everywhere: bool
) -> tuple[torch.Tensor | None, Work | None]:
    """Start to gather flat tensors of one size: the buffer [ranks * n], and what to wait for.

    Args:
        level: its ranks take part.
        flat: this rank's.
        everywhere: whether all get it; otherwise the first does, and the buffer of others is
            ``None``.
    """
    assert level.group is not None
    receives = everywhere or level.rank == 0
    buffer = flat.new_empty(level.size * flat.numel() if receives else 0)
    work: Work | None = None
    if flat.numel():
        if everywhere:
            line = GroupCollectives(level.group, flat.device, asynchronous=False)
            work = line.all_gather(_bytes(buffer), _bytes(flat))
        else:
            pieces = buffer.split(flat.numel()) if receives else ()
            received = [_bytes(piece) for piece in pieces] if receives else None
            gather_to_first(level.group, received, _bytes(flat))
    return (buffer if receives else None), work


def _arranged(level: Level, buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The full tensor of its parts, which follow each other, padded."""
    if level.slot(shape).in_order:
        return buffer[: torch.Size(shape).numel()].view(shape)
    n = buffer.numel() // level.size
    whole = buffer.new_empty(shape)
    for rank in range(level.size):
        part = level.part(whole, rank)
        part.copy_(buffer[rank * n : rank * n + part.numel()].view(part.shape))
    return whole


@dataclass(frozen=True)
class _Packed:
    """A small leaf in a pack.

    Attributes:
        at: its place among the leaves.
        level: the only level that gathers it.
        flat: this rank's elements, padded.
        shape: of the full tensor.
    """

    at: int
    level: Level
    flat: torch.Tensor
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor, padded."""
        return self.level.size * self.flat.nbytes


def _gather_pack(
    pack: Sequence[_Packed], everywhere: bool
) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Gather small leaves of one process group together: their places and full tensors."""
    level, flats = pack[0].level, [_bytes(each.flat) for each in pack]
    buffer, work = _start(level, torch.cat(flats), everywhere)
    if work is not None:
        work.wait()
    if buffer is None:
        return
    columns = buffer.view(level.size, -1).split([flat.numel() for flat in flats], 1)
    for each, column in zip(pack, columns, strict=True):
        own = each.flat.new_empty(level.size * each.flat.numel())
        _bytes(own).view(level.size, -1).copy_(column)
        yield each.at, _arranged(each.level, own, each.shape)


def gather_leaves(
    leaves: Sequence[tuple[ParamLevels, torch.Tensor]], everywhere: bool
) -> list[torch.Tensor | None]:
    """The full tensors of many leaves: what `ParamLevels.gather` returns for each.

    Small ones are packed together. Large ones that need no copy on this rank run together. The
    memory is that of the full tensors, one pack for each process group, and the copies of one leaf.

    Args:
        leaves: as the arguments of `ParamLevels.gather`, in one order on all ranks.
        everywhere: whether all ranks get them, or only the first.
    """
    found: list[torch.Tensor | None] = [None] * len(leaves)
    packs: dict[tuple[ProcessGroup, torch.device], list[_Packed]] = {}
    works: list[Work] = []

    def unpack(pack: list[_Packed]) -> None:
        for at, whole in _gather_pack(pack, everywhere):
            found[at] = whole
        pack.clear()

    for at, (levels, rows) in enumerate(leaves):
        level, shape = levels.only_gather(everywhere), levels.whole_shape(rows)
        if level is None or level.group is None or len(leaves) == 1:
            found[at] = levels.gather(rows, everywhere)
            continue
        slot = level.slot(shape)
        n = slot.shard_numel
        if level.size * n * rows.itemsize < PACK_BELOW:
            pack = packs.setdefault((level.group, levels.device), [])
            small = _Packed(at, level, _padded(rows.to(levels.device), n), shape)
            if sum(each.nbytes for each in pack) + small.nbytes > PACK:
                unpack(pack)
            pack.append(small)
        elif everywhere and rows.numel() == n and _is_sendable(rows, levels, slot.in_order):
            buffer, work = _start(level, rows.view(-1), everywhere)
            assert buffer is not None
            found[at] = _arranged(level, buffer, shape)
            works += [] if work is None else [work]
        else:
            found[at] = levels.gather(rows, everywhere)
    for pack in packs.values():
        unpack(pack)
    for work in works:
        work.wait()
    return found


def _is_sendable(rows: torch.Tensor, levels: ParamLevels, in_order: bool) -> bool:
    """Whether a leaf needs no copy, neither before nor after its gather."""
    return in_order and rows.device == levels.device and rows.is_contiguous()


def _scatter(
    level: Level,
    whole: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    assert level.group is not None
    slot = level.slot(shape)
    n, own = slot.shard_numel, slot.local_shape(level.rank)
    received = torch.empty(n, dtype=dtype, device=device)
    if n:
        pieces = None
        if whole is not None and slot.in_order and whole.numel() == level.size * n:
            pieces = [_bytes(piece) for piece in whole.contiguous().view(-1).split(n)]
        elif whole is not None:
            padded = torch.zeros(level.size, n, dtype=dtype, device=device)
            for rank in range(level.size):
                part = level.part(whole, rank)
                padded[rank, : part.numel()].view(part.shape).copy_(part)
            pieces = [_bytes(piece) for piece in padded.unbind()]
        scatter_from_first(level.group, _bytes(received), pieces)
    return received[: torch.Size(own).numel()].view(own)


def _broadcast(
    group: ProcessGroup,
    held: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    sent = torch.empty(shape, dtype=dtype, device=device) if held is None else held.contiguous()
    if sent.numel():
        broadcast_from_first(group, _bytes(sent.view(-1)))
    return sent


# ---- from a parameter to its levels


def levels_of(param: ShardedParam) -> ParamLevels:
    """The levels of a parameter.

    Raises:
        ShardingStateError: its tensor-parallel placements are of a kind that is not known.
    """
    axes, cut, copies = param.axes, param.cut, param.axes.replicas
    levels: list[Level] = []
    shape = param.shape
    if param.parallel is not None:
        shape = tuple(param.parallel.shape)
        levels += _parallel_levels(param, axes)
    if copies is not None and not axes.levels:
        levels.append(Level(copies, axes.copies, copies.rank()))
    levels.append(Level(axes.group, axes.size, axes.rank, cut))
    if copies is not None and axes.levels:  # pieces of these rows
        levels.append(Level(copies, axes.copies, axes.piece_rank, Cut(cut.dim)))
    dims = frozenset(dim for each in levels if each.cut is not None for dim in each.cut.dims)
    return ParamLevels(param.name, tuple(levels), axes.device, dims, shape)


def _parallel_levels(param: ShardedParam, axes: MeshAxes) -> Iterator[Level]:
    assert param.parallel is not None
    mesh: DeviceMesh = param.parallel.mesh
    own = () if axes.dims is None else (*axes.dims.shard_names, *axes.dims.replicate_names)
    for at, placement in enumerate(param.parallel.placements):
        if axes.full is not None and (mesh.mesh_dim_names or ())[at] in own:
            continue  # a data-parallel dim of the full mesh: the shard axis or the replicas
        group, size, rank = mesh.get_group(at), mesh.size(at), mesh.get_local_rank(at)
        if placement.is_replicate():
            yield Level(group, size, rank)
        elif type(placement) is Shard:
            yield Level(group, size, rank, Cut(placement.dim))
        else:
            raise coded(
                ShardingStateError,
                "strided-parallel",
                f"parameter '{param.name}' is {placement} on a tensor-parallel mesh, which is not "
                f"supported here; leave it out with names=, and call its full_tensor()",
            )


# ---- leaves of tensor subclasses


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that make up a local tensor; itself if it is plain."""
    if isinstance(tensor, DTensor):
        return leaves_of(tensor._local_tensor)
    if not is_extended(tensor):
        return [tensor]
    inner = _inner(tensor)
    if not inner:
        return [tensor.as_subclass(torch.Tensor)]
    return [leaf for name in inner for leaf in leaves_of(getattr(tensor, name))]


def rebuilt(
    like: torch.Tensor, leaves: Sequence[torch.Tensor], shape: Sequence[int]
) -> torch.Tensor:
    """A tensor of ``like``'s class over ``leaves``.

    Args:
        like: a local tensor.
        leaves: as `leaves_of` orders them, all of another length than ``like``'s.
        shape: of the result.
    """
    if not is_extended(like):
        return leaves[0]
    inner = _inner(like)
    if not inner:
        return leaves[0].as_subclass(type(like))
    if not is_traceable_wrapper_subclass(like):  # only its own operators know how to make one
        made = like.new_zeros(tuple(shape))
        for target, leaf in zip(leaves_of(made), leaves, strict=True):
            target.copy_(leaf)
        return made
    taken = iter(leaves)
    parts = {}
    for name in inner:
        below = getattr(like, name)
        own = [next(taken) for _ in leaves_of(below)]
        parts[name] = rebuilt(below, own, own[0].shape)
    _, context = like.__tensor_flatten__()
    stride = torch.empty(tuple(shape), device="meta").stride()
    made_of: torch.Tensor = type(like).__tensor_unflatten__(
        parts, context, torch.Size(shape), stride
    )
    return made_of


def _inner(tensor: torch.Tensor) -> list[str]:
    """Names of the attributes that hold the inner tensors of a tensor subclass."""
    if is_traceable_wrapper_subclass(tensor):
        names: list[str] = list(tensor.__tensor_flatten__()[0])
        return names
    return [name for name, value in vars(tensor).items() if isinstance(value, torch.Tensor)]


# ---- whole tensors and rows of a parameter, or of what is shaped like it


def made_whole(param: ShardedParam, rows: torch.Tensor, everywhere: bool) -> torch.Tensor | None:
    """The full tensor from all ranks' rows, in new memory; ``None`` on ranks that do not get it.

    Args:
        param: the parameter.
        rows: this rank's, of the parameter or of an optimizer's state: a local tensor.
        everywhere: whether all ranks get it, or only the first.
    """
    return made_whole_together([(param, rows)], everywhere)[0]


@torch.no_grad()
def made_whole_together(
    given: Sequence[tuple[ShardedParam, torch.Tensor]], everywhere: bool
) -> list[torch.Tensor | None]:
    """The results of `made_whole` for many, in fewer collectives (`gather_leaves`)."""
    levels = [levels_of(param) for param, _ in given]
    sources = [leaves_of(rows) for _, rows in given]
    laid_out = [
        (each, param.laid_out(leaf))
        for each, (param, _), leaves in zip(levels, given, sources, strict=True)
        for leaf in leaves
    ]
    moved = iter(gather_leaves(laid_out, everywhere))
    found: list[torch.Tensor | None] = []
    for each, (param, rows), leaves in zip(levels, given, sources, strict=True):
        wholes = [param.as_seen(leaf) for _ in leaves if (leaf := next(moved)) is not None]
        shared = {leaf.untyped_storage()._cdata for leaf in leaves}
        wholes = [x.clone() if x.untyped_storage()._cdata in shared else x for x in wholes]
        there = len(wholes) == len(leaves)
        found.append(rebuilt(rows, wholes, each.shape) if there else None)
    return found


@torch.no_grad()
def cut_rows(param: ShardedParam, whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a whole plain tensor of the parameter's shape: a view."""
    return param.as_seen(levels_of(param).cut(param.laid_out(whole.detach())))


@torch.no_grad()
def scattered_rows(
    param: ShardedParam, whole: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """This rank's rows of a tensor of the parameter's shape that the first rank has.

    Args:
        param: the parameter.
        whole: on the first rank; ``None`` elsewhere.
        dtype: its dtype.
    """
    like = torch.empty_like(param.laid_out(param.local), dtype=dtype, device="meta")
    laid_out = None if whole is None else param.laid_out(whole.detach())
    return param.as_seen(levels_of(param).send(laid_out, like))
