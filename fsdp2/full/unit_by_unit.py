"""`full_parameters`: a model's full parameters, one unit in memory at a time.

ranks compare ── each unit: are all ranks still here? ── gather it ── yield its parameters
end, or left early ── tell the others, who raise at their next unit
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fsdp2.core.errors import RankMismatchError, ShardingStateError, coded
from fsdp2.core.facts import Counts, is_extended
from fsdp2.full.gathering import require_released
from fsdp2.full.loading import items_of
from fsdp2.full.selection import (
    MeshRanks,
    SelectedParam,
    require_idle,
    require_memory,
    selected_params,
    settle,
)
from fsdp2.full.unsharding import made_whole_together

_HERE, _GONE, _CHANGED = 0, 1, 2
"""How a rank comes to the next unit; the largest counts."""


def full_parameters(
    module: nn.Module,
    *,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    dtype: torch.dtype | None = None,
    with_buffers: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter of a sharded model, in full, with its name: for export between steps.

    Parameters come unit by unit, in the order of the modules, and then those that are not sharded.
    One unit is unsharded at a time: this is the peak on the device, besides the tensors that you
    keep. Each tensor is a separate copy, exact in its dtype, which you may keep. A tied parameter
    comes once, under its first name in ``named_parameters()``. Names do not contain the prefixes of
    torch.compile and checkpoint wrappers.

    Every rank must run through it between iterations, to the end, including those that get nothing.
    If one stops early, by a ``break`` or an exception, the model stays unchanged, and the others
    raise `RankMismatchError` at their next unit or at the end. This requires that the generator of
    that rank is closed: a ``break`` closes it; if an exception is kept, use ``contextlib.closing``.
    Do not train before it has ended.

    Args:
        module: a module with sharded parameters; names are those below it.
        rank0_only: only the first rank of each parameter's mesh gets the parameter. The others get
            nothing, and never hold it. Default ``False``.
        offload_to_cpu: tensors are yielded in CPU memory, each created on request. With
            ``rank0_only``, only the first rank has one at a time. Default ``False``.
        dtype: floating-point tensors are cast to it. ``None`` (default): no cast.
        with_buffers: whether to yield, at the end, the buffers that a state dict contains. Default
            ``False``.

    Raises:
        RankMismatchError: ranks pass different arguments, or one has stopped early.
        ShardingStateError: a forward, a backward or `gathered` is running; a parameter has no
            memory yet; an optimizer stepped since the first was yielded.
        TypeError: ``dtype`` has the wrong type.

    Example::

        for name, tensor in fsdp2.full_parameters(model, rank0_only=True, dtype=torch.bfloat16):
            engine.update_weight(name, tensor)      # on other ranks the loop has no turns
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise coded(
            TypeError,
            "stream-dtype",
            f"full_parameters(dtype=…) takes a torch.dtype or None, not {dtype!r}",
        )
    selection = selected_params(module, recurse=True)
    require_idle(selection, "full_parameters")
    require_released(selection, "full_parameters")
    require_memory(selection)
    ranks = MeshRanks(selected.param for selected in selection)
    facts = (rank0_only, str(dtype), with_buffers, [selected.names for selected in selection])
    if not ranks.is_alike(facts):
        raise coded(
            RankMismatchError,
            "stream-ranks-differ",
            "ranks called full_parameters() with different arguments, or on different models; "
            "call it with the same ones on all ranks",
        )
    copies = [] if rank0_only and not ranks.is_first else _copies(module, selection, with_buffers)
    return _stream(selection, copies, ranks, rank0_only, offload_to_cpu, dtype)


def _stream(
    selection: list[SelectedParam],
    copies: list[tuple[str, torch.Tensor]],
    ranks: MeshRanks,
    rank0_only: bool,
    offload_to_cpu: bool,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    units: dict[int, list[SelectedParam]] = {}
    for selected in selection:
        units.setdefault(id(selected.unit), []).append(selected)
    steps, here = Counts.ended_steps, True
    device = torch.device("cpu") if offload_to_cpu else None

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        kind = tensor.dtype
        if dtype is not None and kind.is_floating_point and not is_extended(tensor):
            kind = dtype
        return tensor.to(device or tensor.device, kind)

    try:
        for members in units.values():
            here = False  # where this raises, it does so on all ranks
            _meet(ranks, steps)
            whole = _whole_unit(members, not rank0_only)
            here = True
            whole.reverse()
            while whole:
                name, tensor = whole.pop()
                yield name, cast(tensor)
                del tensor
        for name, tensor in copies:
            yield name, cast(tensor.detach().clone())
        here = False
        _meet(ranks, steps)
    except GeneratorExit:
        if here:
            ranks.largest([_GONE])
        raise


def _meet(ranks: MeshRanks, steps: int) -> None:
    """Check that every rank is here, and that the model is unchanged."""
    found = ranks.largest([_HERE if steps == Counts.ended_steps else _CHANGED])[0]
    if found == _CHANGED:
        raise coded(
            ShardingStateError,
            "stream-stepped",
            "an optimizer stepped before full_parameters() had ended, so its tensors would come "
            "from different steps; iterate to the end first",
        )
    if found == _GONE:
        raise coded(
            RankMismatchError,
            "stream-left",
            "another rank left full_parameters() before its end; iterate to the end on all "
            "ranks, also on those that get nothing",
        )


@torch.no_grad()
def _whole_unit(members: list[SelectedParam], everywhere: bool) -> list[tuple[str, torch.Tensor]]:
    settle(members, with_grads=False)
    given = [(selected.param, selected.param.local) for selected in members]
    wholes = zip(members, made_whole_together(given, everywhere), strict=True)
    return [(selected.names[0], whole) for selected, whole in wholes if whole is not None]


def _copies(
    module: nn.Module, selection: list[SelectedParam], with_buffers: bool
) -> list[tuple[str, torch.Tensor]]:
    """Parameters that no unit has, and buffers of a state dict, each once."""
    return [
        (item.names[0], item.tensor)
        for item in items_of(module, selection)
        if item.selected is None
        and (isinstance(item.tensor, nn.Parameter) or (with_buffers and item.required))
    ]
