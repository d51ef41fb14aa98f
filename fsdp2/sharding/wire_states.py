"""The state that wire formats add to the state of training.

It is separate from ``model.state_dict()``, whose names stay the model's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import nan, prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad

from fsdp2.core.device.collectives import largest_over
from fsdp2.core.gather.coded import ReferenceRows
from fsdp2.core.layout.layout import Slot
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.modules.registry import records_below
from fsdp2.core.names import clean
from fsdp2.core.params.param import ShardedParam
from fsdp2.core.pieces import ceil_div
from fsdp2.core.schedule.group import ParamGroup

RESIDUALS, REFERENCES = "residuals.", "references."


class WireState:
    """The state of wire formats that a run must save to continue as if uninterrupted.

    ``fsdp2.checkpoint.save`` and ``load`` include it. `torch.distributed.checkpoint` can save it.

    Args:
        model: the model that contains the units.

    Example::

        state = {"model": get_model_state_dict(model), "wire": fsdp2.checkpoint.WireState(model)}
        torch.distributed.checkpoint.save(state, checkpoint_id="step-100")
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to be saved, or to be read into. All ranks call it.

        ``residuals.<parameter>`` is a bf16 DTensor of shape [ranks, ranks of the shard axis, n],
        sharded on dim 0 over all ranks of the parameter's mesh: each rank has its own residuals,
        one for each rank to which it sends.

        ``references.<parameter>`` is a copy, sharded like the parameter, in the compute dtype. If
        nothing was gathered yet, it is NaN: the next all-gather is exact, also after a load.

        The result is empty if no unit has either, or nothing is sent.
        """
        return {name: value for part in _parts(self._model) for name, value in part.own.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of another `state_dict`; call it after the model has its parameters.
        All ranks call it.

        Residuals from other ranks, or for other pieces of a parameter, cannot be used: those
        restart at zero. If a reference is missing, the next all-gather is exact. The first rank
        warns about either.

        Args:
            state: by name; names that the model does not have are ignored.
        """
        self.take(state, "the state")

    def take(
        self,
        state: Mapping[str, Tensor],
        of: str,
        warn: bool | None = None,
        ranks: int | None = None,
    ) -> None:
        """As `load_state_dict`, of a source ``of`` that the warning names: this rank's, if ``warn``
        (``None``: of a mesh's first); called by ``ranks`` (``None``: all of the model's meshes).
        """
        parts = list(_parts(self._model))
        if warn is None:
            meshes = [value.device_mesh for part in parts for value in part.own.values()]
            warn = not any(any(mesh.get_coordinate() or ()) for mesh in meshes)
        reset = 0
        for part in parts:
            found = {name: state[name] for name, own in part.own.items() if _fits(state, name, own)}
            if ranks is not None and part.ranks > ranks:
                found = {}
                part.take(None)
            else:
                part.take({name: local_of(value) for name, value in found.items()})
            reset += len(part.own) - len(found)
        if reset and warn:
            warnings.warn(
                f"{of} has not all that wire formats keep between steps: {reset} of "
                f"{sum(len(part.own) for part in parts)} tensors are missing, or are of other "
                f"ranks, pieces or dtypes; their residuals begin at zero, and their parameters are "
                f"gathered exactly once",
                stacklevel=3,
            )


def _fits(state: Mapping[str, Tensor], name: str, own: Tensor) -> bool:
    found = state.get(name)
    if found is None or found.shape != own.shape or found.dtype != own.dtype:
        return False
    return local_of(found).shape == local_of(own).shape


# ---- what there is


@dataclass(frozen=True)
class _Part:
    """Tensors that are taken together.

    Attributes:
        own: by name.
        take: is given this rank's part of those that were found; ``None``: nothing was found, and
            not all ranks that communicate call it.
        ranks: how many communicate in `take`.
    """

    own: Mapping[str, DTensor]
    take: Callable[[Mapping[str, Tensor] | None], None]
    ranks: int = 0


def _parts(model: nn.Module) -> Iterator[_Part]:
    names = {id(param): clean(name) for name, param in model.named_parameters()}

    def name_of(param: ShardedParam) -> str:
        found = names.get(id(param.sharded)) or names.get(id(param.unsharded))
        return found or param.name

    for record in records_below(model):
        for group in record.unit.own_groups:
            wire = group.options.wire
            if group.state.is_sharded and (wire.feedback or wire.differences):
                group.bind()
            if wire.feedback:
                yield from _residuals(group, name_of)
            if wire.differences:
                yield from _references(group, name_of)


def _residuals(group: ParamGroup, name_of: Callable[[ShardedParam], str]) -> Iterator[_Part]:
    for reduction in group.bound.reductions:
        feedback = reduction.context.feedback
        if feedback is not None:
            params = {RESIDUALS + name_of(param): param for param in reduction.members}
            columns = dict(zip(params, feedback.columns(), strict=True))
            own = {name: _of_each_rank(params[name], part) for name, part in columns.items()}

            def take(
                found: Mapping[str, Tensor] | None, columns: Mapping[str, Tensor] = columns
            ) -> None:
                for name, part in columns.items():
                    if found is not None and name in found:
                        part.copy_(found[name][0, :, : part.shape[1]])
                    else:
                        part.zero_()

            yield _Part(own, take)


def _of_each_rank(param: ShardedParam, columns: Tensor) -> DTensor:
    """A view of this rank's residuals; a copy where ranks of tensor parallelism have fewer."""
    assert isinstance(param.sharded, DTensor)
    mesh = param.sharded.device_mesh
    missing = _largest_piece(param) - columns.shape[1]
    local = pad(columns, (0, missing)) if missing else columns
    shape = torch.Size([mesh.size(), *local.shape])
    stride = (local.numel(), local.shape[1], 1)
    return DTensor.from_local(
        local.unsqueeze(0),
        mesh,
        [Shard(0)] * mesh.ndim,
        run_check=False,
        shape=shape,
        stride=stride,
    )


def _largest_piece(param: ShardedParam) -> int:
    """Elements of a rank's piece, of whichever rank of tensor parallelism has the most."""
    if param.parallel is None:
        shape = list(param.shape)
    else:
        shape = list(param.parallel.shape)
        for size, placement in zip(
            param.parallel.mesh.shape, param.parallel.placements, strict=True
        ):
            if isinstance(placement, Shard):
                shape[placement.dim] = ceil_div(shape[placement.dim], size)
        shape = shape if param.order is None else [shape[dim] for dim in param.order]
    return prod(param.cut.piece(tuple(shape), param.axes.size))


def _references(group: ParamGroup, name_of: Callable[[ShardedParam], str]) -> Iterator[_Part]:
    for part in group.bound.parts:
        if isinstance(kept := part.kept, ReferenceRows):
            segment = kept.place.segment
            rows = _pieces(group, kept.own_rows()) or _unknown(group, segment.slots)
            slots = {REFERENCES + name_of(group.params[slot.index]): slot for slot, _ in rows}
            own = {
                name: _like(group.params[slot.index], part.to(segment.full_dtype))
                for (name, slot), (_, part) in zip(slots.items(), rows, strict=True)
            }

            def take(
                found: Mapping[str, Tensor] | None,
                slots: Mapping[str, Slot] = slots,
                kept: ReferenceRows = kept,
            ) -> None:
                _restore(group, kept, slots, found)

            between = 1 if group.between is None else group.between.size
            yield _Part(own, take, group.collectives.size * between)


def _pieces(group: ParamGroup, rows: list[tuple[Slot, Tensor]]) -> list[tuple[Slot, Tensor]]:
    """This rank's part of the rows: with two levels, a piece of those of its node."""
    if group.between is None:
        return rows
    pieces, rank = _piece_slots(group), group.between.rank
    return [(slot, Slot.part(pieces[slot.index], part, rank)) for slot, part in rows]


def _piece_slots(group: ParamGroup) -> dict[int, Slot]:
    assert group.layout.pieces is not None
    return {slot.index: slot for slot in group.layout.pieces.slots}


def _node_rows(group: ParamGroup, slot: Slot, part: Tensor) -> Tensor:
    """The way back: this rank's rows of a node. All ranks of the mesh call it."""
    if group.between is None:
        return part
    piece, mesh = _piece_slots(group)[slot.index], group.params[slot.index].axes.mesh
    rows = DTensor.from_local(
        part.to(group.device).contiguous(),
        mesh,
        [Shard(piece.dim), Replicate()],  # rows of the node, on each rank inside others
        run_check=False,
        shape=torch.Size(piece.shape),
        stride=torch.empty(piece.shape, device="meta").stride(),
    )
    return rows.full_tensor()


def _unknown(group: ParamGroup, slots: tuple[Slot, ...]) -> list[tuple[Slot, Tensor]]:
    params = [(slot, group.params[slot.index]) for slot in slots]
    return [(slot, torch.full_like(param.laid_out(param.local), nan)) for slot, param in params]


def _like(param: ShardedParam, rows: Tensor) -> DTensor:
    sharded = param.sharded
    assert isinstance(sharded, DTensor)
    return DTensor.from_local(
        param.as_seen(rows.clone()).to(sharded.device),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def _restore(
    group: ParamGroup,
    kept: ReferenceRows,
    slots: Mapping[str, Slot],
    found: Mapping[str, Tensor] | None,
) -> None:
    """Make the found values the next reference; gather exactly if any rank misses one.

    The ranks agree: one may have been given fewer values, another may have no number at all.
    """
    if group.bound.keeping is not None:
        group.bound.keeping.lose()
    if found is None:
        return
    known = not all(part.isnan().all() for part in found.values())
    misses = len(found) < len(slots)
    if largest_over(group.axes_of(rows=False), [int(known), int(misses)]) == [1, 0]:
        parts = {n: group.params[slot.index].laid_out(found[n]) for n, slot in slots.items()}
        kept.restore([(slot, _node_rows(group, slot, parts[n])) for n, slot in slots.items()])
