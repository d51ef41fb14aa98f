"""Rank 0's weights and buffers to all ranks, one tensor after another.

    ranks compare their models ── rank 0 checks its values ── its result goes to all
    for each tensor: rank 0's ── broadcast over each axis ──> each rank keeps its rows

Only rank 0 ever holds more than its shards and one full tensor. Rank 0 is the rank that is the
first of all axes of the model's meshes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2.core.errors import RankMismatchError, coded
from fsdp2.core.facts import (
    ParamGroup,
    clean,
    default_mesh,
    is_extended,
    wrap_local,
)
from fsdp2.full.gathering import require_released
from fsdp2.full.selection import (
    MeshRanks,
    SelectedParam,
    outdate,
    require_idle,
    selected_params,
    settle,
)
from fsdp2.full.unsharding import leaves_of, levels_of


class IncompatibleKeys(NamedTuple):
    """The names that `load_from_rank0` did not load, in the form of ``load_state_dict``.

    Attributes:
        missing_keys: names of the model that are not in the state dict.
        unexpected_keys: names of the state dict that are not in the model.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class _Verdict(NamedTuple):
    """Rank 0's result: a problem, or names that do not match."""

    problem: str = ""
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()


@dataclass
class ModelTensor:
    """One tensor of a model.

    Attributes:
        names: its full names, several if it is tied.
        tensor: a sharded parameter, another parameter, or a buffer.
        selected: of a sharded parameter.
        required: whether a state dict has it.
        places: the modules' dictionaries that hold it, and under which name.
    """

    names: list[str]
    tensor: torch.Tensor
    selected: SelectedParam | None
    required: bool
    places: list[tuple[dict[str, torch.Tensor | None], str]]


def load_from_rank0(
    model: nn.Module, full_state_dict: Mapping[str, torch.Tensor] | None, *, strict: bool = True
) -> IncompatibleKeys:
    """Load a full state dict that only rank 0 has into a sharded model.

    Rank 0 sends parameters and buffers to all ranks one after another. Each rank keeps its shard;
    ranks other than 0 hold at most their shards and one full tensor at a time. Parameters and
    buffers on the meta device get memory during the load. Buffers that are in no state dict
    (``persistent=False``) take the values of rank 0's own model, unless the state dict has them.

    Call it on every rank, between iterations. Rank 0 is the first rank of the model's mesh. It
    checks all names, shapes and dtypes, and all ranks raise the errors that it finds, before
    anything is written. Names are those of ``named_parameters()``. Values of another floating-point
    dtype are cast, as in ``load_state_dict``. The values of a tied parameter may be under any of
    its names.

    Args:
        model: a module with sharded parameters.
        full_state_dict: on rank 0, name to full tensor, on any device. ``None`` on other ranks,
            where it is not read.
        strict: ``False`` leaves parameters unchanged that are not in the state dict, and ignores
            names that are not in the model. Default ``True``.

    Returns:
        Missing and unexpected names, the same on all ranks.

    Raises:
        ValueError: the model has no sharded parameters; rank 0 found an error.
        RankMismatchError: ranks have different models.
        ShardingStateError: a forward, a backward or `gathered` is running.

    Example::

        with torch.device("meta"):
            model = Model()
        shard(model)
        weights = torch.load("model.pt") if rank == 0 else None
        fsdp2.load_from_rank0(model, weights)
    """
    selection = selected_params(model, recurse=True)
    if not selection:
        raise coded(
            ValueError,
            "load-unsharded",
            "load_from_rank0() got a model without sharded parameters; call fully_shard on it, or "
            "use load_state_dict()",
        )
    require_idle(selection, "load_from_rank0")
    require_released(selection, "load_from_rank0")
    ranks = MeshRanks(selected.param for selected in selection)
    items = items_of(model, selection)
    _require_alike(items, ranks, "load_from_rank0")
    values: dict[str, torch.Tensor] = {}
    verdict = _Verdict()
    if ranks.is_first:
        verdict = _verdict(items, full_state_dict, strict)
        if not verdict.problem:
            assert full_state_dict is not None
            values = {clean(name): value for name, value in full_state_dict.items()}
    verdict = _Verdict(*json.loads(ranks.told(json.dumps(verdict))))
    if verdict.problem:
        raise coded(
            ValueError,
            "load-refused",
            f"load_from_rank0() wrote nothing, because rank 0 found that {verdict.problem}; pass "
            f"it a full state dict of this model, or strict=False if names differ",
        )
    _write_all(items, values, set(verdict.missing), ranks)
    return IncompatibleKeys(list(verdict.missing), list(verdict.unexpected))


def sync_module_states(model: nn.Module, *, mesh: DeviceMesh | None = None) -> None:
    """Broadcast rank 0's values of all unsharded tensors to all ranks.

    These are: before `fully_shard` all parameters, later the ignored ones; and always buffers.
    Replicas (HSDP) take the shards of sharded parameters from the first replica. Rows that no other
    rank has stay unchanged. To load a sharded model from one rank, use `load_from_rank0`.

    Call it on every rank. Tensors are sent one by one. On ranks other than 0 they may be on the
    meta device; they then get memory.

    Args:
        model: any module. Parameters may be tied.
        mesh: the mesh whose ranks take part, if nothing in the model is sharded. ``None``
            (default): the ranks of the sharded parameters' meshes, otherwise all ranks.

    Raises:
        ValueError: a tensor is on the meta device on rank 0.
        RankMismatchError: ranks have different models.
        ShardingStateError: a forward, a backward or `gathered` is running.

    Example::

        model = Model()                      # other random numbers on each rank
        fsdp2.full.sync_module_states(model)      # now rank 0's, on all
        shard(model)
    """
    selection = selected_params(model, recurse=True)
    require_idle(selection, "sync_module_states")
    require_released(selection, "sync_module_states")
    ranks = MeshRanks(
        (selected.param for selected in selection),
        None if selection else default_mesh() if mesh is None else mesh,
    )
    items = items_of(model, selection)
    _require_alike(items, ranks, "sync_module_states")
    meta = [item.names[0] for item in items if item.tensor.is_meta]
    found = ranks.told(meta[0] if meta and ranks.is_first else "")
    if found:
        raise coded(
            ValueError,
            "sync-meta",
            f"sync_module_states() found '{found}' on the meta device on rank 0; give it values "
            f"there, with to_empty() and an initialization",
        )
    with _rewritten(selection):
        for item in items:
            if item.selected is None:
                _write_copy(item, item.tensor, ranks)
            else:
                for leaf in leaves_of(item.selected.param.local):
                    _from_first_replica(item.selected, leaf)


# ---- for what writes by itself


def require_writable(model: nn.Module, function: str) -> None:
    """Raise unless the parameters of a model may be written now.

    Args:
        model: sharded or not.
        function: that will write, for the message.

    Raises:
        ShardingStateError: a forward, a backward or `gathered` is running.
    """
    selection = selected_params(model, recurse=True)
    require_idle(selection, function)
    require_released(selection, function)


@contextmanager
def rewritten(model: nn.Module) -> Iterator[None]:
    """A model whose shards, other parameters and buffers are written inside, on this rank.

    Sharded parameters are registered, what is on the meta device gets memory, tied as it was, and
    what is gathered anywhere is out of date afterwards. `require_writable` comes first.
    """
    selection = selected_params(model, recurse=True)
    devices = [selected.param.axes.device for selected in selection]
    with _rewritten(selection):
        for item in items_of(model, selection):
            if item.selected is None and item.tensor.is_meta:
                _give_memory(item, devices[0] if devices else torch.device("cpu"))
        yield


@contextmanager
def _rewritten(selection: list[SelectedParam]) -> Iterator[None]:
    """The same of sharded parameters alone."""
    settle(selection, with_grads=False)
    for group in {selected.group: None for selected in selection}:
        _materialize_group(group)
    try:
        yield
    finally:
        outdate(selection)


# ---- what a model has


def items_of(model: nn.Module, selection: list[SelectedParam]) -> list[ModelTensor]:
    """Sharded parameters first, then all else; each once."""
    managed = {entry: selected for selected in selection for entry in selected.entries}
    items = [ModelTensor(s.names, s.param.sharded, s, True, []) for s in selection]
    found: dict[int, ModelTensor] = {}
    for prefix, member in model.named_modules(remove_duplicate=False):
        for key, tensor, required in _own(member):
            if tensor is None or (member, key) in managed:
                continue
            item = found.get(id(tensor))
            if item is None:
                item = found[id(tensor)] = ModelTensor([], tensor, None, required, [])
                items.append(item)
            item.required = item.required or required
            name = clean(f"{prefix}.{key}" if prefix else key)
            if name not in item.names:
                item.names.append(name)
                store = member._parameters if key in member._parameters else member._buffers
                item.places.append((store, key))
    return items


def _own(member: nn.Module) -> Iterator[tuple[str, torch.Tensor | None, bool]]:
    for key, param in member._parameters.items():
        yield key, param, True
    for key, buffer in member._buffers.items():
        yield key, buffer, key not in member._non_persistent_buffers_set


def _require_alike(items: list[ModelTensor], ranks: MeshRanks, function: str) -> None:
    facts = [(item.names, tuple(item.tensor.shape), str(item.tensor.dtype)) for item in items]
    if not ranks.is_alike((function, facts)):
        raise coded(
            RankMismatchError,
            "models-differ",
            f"{function}() was called on models that differ in names, shapes or dtypes; build the "
            f"same model on all ranks, and call it on all of them",
        )


def _verdict(items: list[ModelTensor], values: object, strict: bool) -> _Verdict:
    """Compute rank 0's result."""
    if not isinstance(values, Mapping):
        return _Verdict(f"it was given a {type(values).__name__} instead of a state dict")
    names = {clean(name): value for name, value in values.items()}
    known = {name for item in items for name in item.names}
    absent = [item for item in items if not names.keys() & set(item.names)]
    missing = [item.names[0] for item in absent if item.required]
    unexpected = sorted(names.keys() - known)
    if strict and (missing or unexpected):
        what = "the model's" if missing else "no name of the model,"
        name = (missing or unexpected)[0]
        how = "is not in its state dict" if missing else "is in its state dict"
        return _Verdict(f"{what} '{name}' {how}")
    for item in absent:
        if item.tensor.is_meta:
            return _Verdict(f"'{item.names[0]}' is on the meta device and not in its state dict")
    for item in items:
        given = [(name, names[name]) for name in item.names if name in names]
        for name, value in given:
            problem = _mismatch(item.tensor, value)
            if problem is not None:
                return _Verdict(f"'{name}' {problem}")
            if value is not given[0][1] and not _same(value, given[0][1]):
                return _Verdict(f"'{name}' and '{given[0][0]}' are tied, but differ there")
    return _Verdict("", missing, unexpected)


def _mismatch(tensor: torch.Tensor, value: object) -> str | None:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.is_meta:
        kind = "meta tensor" if isinstance(value, torch.Tensor) and value.is_meta else None
        return f"is a {kind or type(value).__name__}, not a full tensor with values"
    if value.shape != tensor.shape:
        return f"is of shape {tuple(value.shape)}, not {tuple(tensor.shape)}"
    if value.dtype != tensor.dtype and not (
        value.is_floating_point() and tensor.is_floating_point()
    ):
        return f"is {value.dtype}, not {tensor.dtype}"
    return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


# ---- from rank 0 to all


@torch.no_grad()
def _write_all(
    items: list[ModelTensor],
    values: Mapping[str, torch.Tensor],
    missing: set[str],
    ranks: MeshRanks,
) -> None:
    with _rewritten([item.selected for item in items if item.selected is not None]):
        for item in items:
            if item.required and item.names[0] in missing:
                continue
            value = next((values[name] for name in item.names if name in values), None)
            if item.selected is None:
                own = item.tensor if ranks.is_first and value is None else value
                _write_copy(item, own, ranks)
            else:
                _write_rows(item.selected, value, ranks)


def _write_rows(selected: SelectedParam, value: torch.Tensor | None, ranks: MeshRanks) -> None:
    param, levels = selected.param, levels_of(selected.param)
    rows = leaves_of(param.local)
    wholes: list[torch.Tensor | None] = [None] * len(rows)
    if value is not None:
        if is_extended(param.local) and not is_extended(value):
            value = param.local.new_zeros(value.shape).copy_(value)
        wholes[:] = leaves_of(value.detach())
    for whole, own in zip(wholes, rows, strict=True):
        shape = levels.whole_shape(param.laid_out(own))
        sent = ranks.scratch(shape, own.dtype)
        if whole is not None:
            sent.copy_(param.laid_out(whole))
        ranks.spread(sent)
        param.laid_out(own).copy_(levels.cut(sent))


@torch.no_grad()
def _write_copy(item: ModelTensor, value: torch.Tensor | None, ranks: MeshRanks) -> None:
    """Write a tensor that each rank holds in full."""
    if item.tensor.is_meta:
        _give_memory(item, ranks.device)
    target = item.tensor
    local = target._local_tensor if isinstance(target, DTensor) else target.detach()
    sent = ranks.scratch(local.shape, local.dtype)
    if value is not None:
        given = value._local_tensor if isinstance(value, DTensor) else value.detach()
        if not given.is_meta:
            sent.copy_(given)
    ranks.spread(sent)
    local.copy_(sent)


def _give_memory(item: ModelTensor, device: torch.device) -> None:
    """To a tensor on the meta device, wherever it is registered."""
    made = torch.empty_like(item.tensor, device=device)
    if isinstance(item.tensor, nn.Parameter):
        made = nn.Parameter(made, item.tensor.requires_grad)
        made.__dict__.update(item.tensor.__dict__)
    for store, key in item.places:
        store[key] = made
    item.tensor = made


def _from_first_replica(selected: SelectedParam, rows: torch.Tensor) -> None:
    """With HSDP, copy the shards of the first replica to the others."""
    param = selected.param
    if param.axes.replicas is not None and not param.axes.levels and rows.numel():
        sent = rows.detach().to(param.axes.device).contiguous()
        MeshRanks.of_group(param.axes.replicas, param.axes.device).spread(sent)
        rows.detach().copy_(sent)


def _materialize_group(group: ParamGroup) -> None:
    """Allocate the shards of a group, if they have no memory."""
    if not any(param.is_meta for param in group.params):
        return
    home = group.device if group.offload is None else torch.device("cpu")
    for param in group.params:
        before = param.sharded
        assert isinstance(before, DTensor)
        local = param.local
        if is_extended(local):
            rows = torch.empty_like(local, device=home)
        else:  # what `adopt` moves has no memory of its own
            rows = torch.zeros((), dtype=local.dtype, device=home).expand(local.shape)
        made = nn.Parameter(wrap_local(rows, before._spec), before.requires_grad)
        made.__dict__.update(before.__dict__)
        param.register(made)
    group.reregister()
    group.adopt()
