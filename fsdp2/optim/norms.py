"""The norm of gradients on any mix of meshes, and clipping by it.

    parameters ──> families: those sharded over the same ranks     norm^p of local tensors, summed
    families   ──> one all-reduce for each group of ranks          norm^p of whole tensors
               ──> summed over families, ^(1/p)                    the same bits on every rank

A family is reduced over the mesh dims on which its parameters are sharded and over no other, so
that replicas count once. The collectives follow from the parameters, never from which of them have
a gradient on this rank (invariant I1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
)

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import ProcessGroup, gathered_name, local_of, locals_of, sum_over, uncompiled
from fsdp2.optim.in_backward import InBackward, refuse_stepped

Tensors = torch.Tensor | Iterable[torch.Tensor]

Rows = Sequence[torch.Tensor | None]

_DOUBLE = (torch.float64, torch.complex128)


@torch.no_grad()
@uncompiled
def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, for any mix of parameters: plain ones, DTensors on
    different meshes (experts on one, the rest on another; tensor-parallel and not), gradients
    offloaded to the CPU. All ranks must call it, with the same parameters in the same order;
    gradients may be missing, on some ranks or on all.

    Args:
        parameters: parameters of any shapes and floating dtypes, or one; those without a gradient
            count as zero. A DTensor counts once, however many replicas it has. A plain parameter
            counts as this rank holds it: fsdp2 assumes the same gradient on every rank.
        max_norm: the largest norm that gradients have afterwards. All of them are multiplied by
            ``min(1, max_norm / (norm + 1e-6))``.
        norm_type: p of the p-norm over all elements: ``inf`` for the largest absolute value,
            ``-inf`` for the smallest, any number but 0. Default 2.
        error_if_nonfinite: ``True`` raises if the norm is infinite or NaN, on all ranks and before
            any gradient has changed. Default ``False``: gradients then become zero or NaN.
        foreach: ``True`` handles many tensors in one kernel, ``False`` one at a time. ``None``
            (default): many, if the device supports it.

    Returns:
        The norm before clipping, the same bits on all ranks: a plain tensor of shape ``()``
        (torch's function returns a DTensor), float32, or float64 if a parameter is float64, on the
        device of the first parameter's rows.

    Raises:
        ValueError: ``norm_type`` is 0 or NaN, a gradient is `Partial` or is sharded on mesh
            dims on which its parameter is not, or this rank is not part of a parameter's mesh.
        ShardingStateError: a parameter is an unsharded one of a unit; its gradient is on the
            sharded one.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set, or
            ``foreach=True`` on a device that does not support it.

    Example::

        loss.backward()
        norm = fsdp2.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    """
    listed = _sharded(parameters)
    if InBackward.count:
        refuse_stepped(listed, "clip_grad_norm_()")
    grads = _grads_of(listed)
    rows = locals_of(grads)
    total = _total_norm(listed, grads, rows, norm_type, error_if_nonfinite, foreach)
    _clip(rows, max_norm, total, foreach)
    return total


@torch.no_grad()
@uncompiled
def clip_grads_with_norm_(
    parameters: Tensors,
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale gradients in place by a known norm, so that it is at most ``max_norm``.

    As ``torch.nn.utils.clip_grads_with_norm_``, but for any mix of parameters, like
    `clip_grad_norm_`. It communicates nothing.

    Args:
        parameters: parameters, or one; those without a gradient are skipped.
        max_norm: all gradients are multiplied by ``min(1, max_norm / (total_norm + 1e-6))``.
        total_norm: the norm, a plain tensor of shape ``()``: the same on all ranks.
        foreach: as for `clip_grad_norm_`.

    Raises:
        ShardingStateError: as for `clip_grad_norm_`.
        RuntimeError: ``foreach=True`` on a device that does not support it.

    Example::

        power = fsdp2.optim.get_total_norm(grads) ** 2  # of this pipeline stage
        dist.all_reduce(power, group=stages)
        fsdp2.optim.clip_grads_with_norm_(model.parameters(), 1.0, power.sqrt())
    """
    _clip(locals_of(_grads_of(_sharded(parameters))), max_norm, total_norm, foreach)


def _clip(
    grads: Sequence[torch.Tensor | None],
    max_norm: float,
    total: torch.Tensor,
    foreach: bool | None,
) -> None:
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    _scale([grad for grad in grads if grad is not None], factor, foreach)


def _sharded(parameters: Tensors) -> list[torch.Tensor]:
    listed = _listed(parameters)
    for param in listed:
        name = gathered_name(param)
        if name is not None:
            raise coded(
                ShardingStateError,
                "clip-gathered",
                f"'{name}' is a gathered parameter and has no reduced "
                f"gradient; call reshard() on its module, or pass the parameters that the "
                f"optimizer holds",
            )
    return listed


def _grads_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    with DisableTorchFunctionSubclass():  # faster access to DTensors
        return [param.grad for param in params]


@torch.no_grad()
@uncompiled
def get_total_norm(
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The norm of tensors, for example of gradients, as if they were one vector.

    As ``torch.nn.utils.get_total_norm``, but for any mix of plain tensors and DTensors on different
    meshes. All ranks must call it, with tensors of the same layouts in the same order.

    With pipeline stages, each rank gets the norm of its own stage: combine them, then clip with
    `clip_grads_with_norm_`.

    Args:
        tensors: tensors of any shapes and floating dtypes, or one. A DTensor counts once, however
            many replicas it has; a plain tensor counts as this rank holds it.
        norm_type: p of the p-norm over all elements, as for `clip_grad_norm_`. Default 2.
        error_if_nonfinite: whether to raise if the norm is infinite or NaN. Default ``False``.
        foreach: as for `clip_grad_norm_`.

    Returns:
        The norm, the same bits on all ranks: a plain tensor of shape ``()``, float32, or float64 if
        a tensor is float64; on the device of the first tensor's rows. Zero for no tensors.

    Raises:
        ValueError: as for `clip_grad_norm_`.
        RuntimeError: as for `clip_grad_norm_`.

    Example::

        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norm = fsdp2.optim.get_total_norm(grads)
    """
    listed = _listed(tensors)
    rows = locals_of(listed)
    return _total_norm(listed, listed, rows, norm_type, error_if_nonfinite, foreach)


# ---- which tensors are sharded over which ranks


@dataclass(frozen=True)
class _Axis:
    """Ranks that hold different parts of tensors: a mesh dim, seen from this rank.

    Axes of several meshes that join the same ranks are one.
    """

    ranks: tuple[int, ...]
    device_type: str
    group: ProcessGroup = field(compare=False)
    position: int = field(compare=False)


@dataclass(eq=False)
class _Layout:
    """How tensors on one mesh with the same placements are distributed."""

    mesh: DeviceMesh
    dims: tuple[int, ...]  # mesh dims on which they are sharded
    axes: tuple[_Axis, ...]  # those of more than one rank
    ranks: tuple[int, ...]  # all that hold different parts


_Layouts = dict[tuple[DeviceMesh, tuple[Placement, ...]], _Layout]


@dataclass
class _Family:
    """Tensors that are reduced over the same axes."""

    axes: tuple[_Axis, ...]
    ranks: tuple[int, ...]
    device: torch.device  # where their sums are reduced
    tensors: list[torch.Tensor] = field(default_factory=list)


def _layout_of(index: int, tensor: DTensor, known: _Layouts) -> _Layout:
    """The layout of a DTensor, computed once per mesh and placements."""
    mesh, placements = tensor._spec.mesh, tensor._spec.placements
    if (mesh, placements) in known:
        return known[mesh, placements]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise coded(
            ValueError,
            "norm-not-on-mesh",
            f"this rank is not part of the mesh of {_named(index, tensor)}; pass only tensors of "
            f"which it holds a part",
        )
    if any(placement.is_partial() for placement in placements):
        raise coded(
            ValueError,
            "norm-partial",
            f"{_named(index, tensor)} is not summed over the ranks yet (placements {placements}); "
            f"redistribute it to Replicate() or Shard(…) first",
        )
    dims = tuple(i for i, p in enumerate(placements) if not p.is_replicate())
    place = tuple(coordinate)
    axes = tuple(
        _Axis(_ranks(mesh, (dim,), place), mesh.device_type, mesh.get_group(dim), place[dim])
        for dim in dims
        if mesh.size(dim) > 1
    )
    known[mesh, placements] = _Layout(mesh, dims, axes, _ranks(mesh, dims, place))
    return known[mesh, placements]


@functools.lru_cache(maxsize=64)  # reading a mesh takes longer than computing a norm
def _ranks(mesh: DeviceMesh, dims: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks along mesh dims through this rank, in ascending order."""
    place = tuple(slice(None) if i in dims else coordinate[i] for i in range(mesh.ndim))
    return tuple(sorted(mesh.mesh[place].flatten().tolist()))


def _named(index: int, tensor: torch.Tensor) -> str:
    return f"tensor {index} of shape {tuple(tensor.shape)}"


def _families(owners: Sequence[torch.Tensor], tensors: Rows, rows_of: Rows) -> list[_Family]:
    """Group the tensors that count on this rank. The families are the same on all ranks."""
    layouts: _Layouts = {}
    families: dict[object, _Family] = {}
    mesh = placements = None  # of the last owner: mostly the next one's, too
    for index, (owner, tensor, rows) in enumerate(zip(owners, tensors, rows_of, strict=True)):
        if isinstance(owner, DTensor):
            spec = owner._spec
            if spec.placements is not placements or spec.mesh is not mesh:
                mesh, placements = spec.mesh, spec.placements
                layout = _layout_of(index, owner, layouts)
                device = torch.device(mesh.device_type)
                new = _Family(layout.axes, layout.ranks, device)
                family = families.setdefault((layout.axes, device.type), new)
            if tensor is None:
                continue
            if not isinstance(tensor, DTensor):
                raise coded(
                    ValueError,
                    "norm-plain-gradient",
                    f"the parameter of {_named(index, tensor)} is a DTensor, but its gradient is "
                    f"not; assign a DTensor with the parameter's placements to its .grad",
                )
            own = tensor._spec
            alike = own.placements is placements and own.mesh is mesh
            if not alike and not _counts_here(index, tensor, layout, layouts):
                continue
        else:
            family = families.setdefault(owner.device, _Family((), (), owner.device))
            mesh = placements = None
            if isinstance(tensor, DTensor):
                raise coded(
                    ValueError,
                    "norm-plain-parameter",
                    f"{_named(index, owner)} is plain, but its gradient is a DTensor; assign "
                    f"grad.full_tensor() to its .grad",
                )
        if rows is not None and rows.numel():
            family.tensors.append(rows)
    return _with_fewest_axes(list(families.values()))


def _with_fewest_axes(families: list[_Family]) -> list[_Family]:
    """Experts on a mesh ("ep", "efsdp"), the rest on ("dp",): all are reduced over "dp" at once."""
    single = {(axis.ranks, axis.device_type): axis for f in families for axis in f.axes}
    for family in families:
        joined = single.get((family.ranks, family.device.type))
        if joined is not None:
            family.axes = (joined,)
    return families


def _counts_here(index: int, grad: DTensor, layout: _Layout, layouts: _Layouts) -> bool:
    """Whether this rank adds its part of a gradient to the sums over its parameter's ranks.

    A gradient may be replicated although its parameter is sharded (tensor-parallel embeddings);
    then the first rank of those mesh dims adds it.
    """
    own = _layout_of(index, grad, layouts)
    if own is layout:
        return True
    if own.mesh != layout.mesh or not set(own.dims) <= set(layout.dims):
        raise coded(
            ValueError,
            "norm-gradient-placements",
            f"the gradient of {_named(index, grad)} has placements {grad.placements} on "
            f"{own.mesh}, but the parameter is sharded only on mesh dims {layout.dims} of "
            f"{layout.mesh}; redistribute the gradient to the placements of its parameter first",
        )
    coordinate = layout.mesh.get_coordinate()
    assert coordinate is not None
    return all(coordinate[dim] == 0 for dim in layout.dims if dim not in own.dims)


# ---- sums


def _total_norm(
    owners: Sequence[torch.Tensor],
    tensors: Rows,
    rows: Rows,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """The norm of tensors, or of owners' gradients, which may be ``None``; as this rank's rows."""
    p = float(norm_type)
    if p == 0 or math.isnan(p):
        raise coded(
            ValueError,
            "norm-type",
            f"norm_type={norm_type!r} is not a norm over all elements; pass 2, 1, inf or another "
            f"nonzero number",
        )
    if not owners:
        return torch.tensor(0.0)
    with DisableTorchFunctionSubclass():
        double = not {owner.dtype for owner in owners}.isdisjoint(_DOUBLE)
    dtype = torch.float64 if double else torch.float32
    families = _families(owners, tensors, rows)
    parts = [_local_power(family, p, dtype, foreach) for family in families]
    _reduce(families, parts, p)
    device = local_of(owners[0]).device
    total = _root(_join(torch.stack([part.to(device) for part in parts]), p), p)
    if error_if_nonfinite and not total.isfinite():
        raise coded(
            RuntimeError,
            "norm-nonfinite",
            f"the total norm of order {p} is {total.item()}, so gradients cannot be clipped by "
            f"it; pass error_if_nonfinite=False to continue anyway",
        )
    return total


def _join(values: torch.Tensor, p: float) -> torch.Tensor:
    """Combine powers of norms along the first dim, in its order; NaN stays NaN."""
    if math.isinf(p):
        return values.amax(0) if p > 0 else values.amin(0)
    return values.sum(0)


def _root(power: torch.Tensor, p: float) -> torch.Tensor:
    if math.isinf(p) or p == 1.0:
        return power
    return power.sqrt() if p == 2.0 else power.pow(1.0 / p)


def _local_power(
    family: _Family, p: float, dtype: torch.dtype, foreach: bool | None
) -> torch.Tensor:
    """norm^p of this rank's tensors of a family, on the family's device."""
    norms = []
    for (device, _), tensors in _by_device_and_dtype(family.tensors).items():
        if _in_one_kernel(device, foreach):
            each = list(torch._foreach_norm(tensors, p, dtype=_wide(tensors[0].dtype)))
        else:
            each = [torch.linalg.vector_norm(t, p, dtype=_wide(t.dtype)) for t in tensors]
        norms.append(torch.stack(each).to(family.device, dtype))
    if not norms:
        neutral = math.inf if p == -math.inf else 0.0
        return torch.full((), neutral, dtype=dtype, device=family.device)
    joined = torch.cat(norms) if len(norms) > 1 else norms[0]
    return _join(joined if math.isinf(p) or p == 1.0 else joined.pow(p), p)


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to sum a low-precision tensor in; ``None`` for its own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


def _reduce(families: Sequence[_Family], parts: list[torch.Tensor], p: float) -> None:
    """Combine every family's part over the ranks of its axes, in place: one collective per axis.

    Each rank writes its values into its own line of a table of zeros, so that the all-reduce is
    exact in any order of its sums. All ranks then add the lines in the same order and get the same
    bits. Replicas do not communicate here, but add the same lines and get the same bits, too.
    """
    for axis in dict.fromkeys(axis for family in families for axis in family.axes):
        mine = [i for i, family in enumerate(families) if axis in family.axes]
        values = torch.stack([parts[i] for i in mine])
        table = values.new_zeros((len(axis.ranks), len(mine)))
        table[axis.position] = values
        sum_over(table, axis.group)
        for i, joined in zip(mine, _join(table, p).unbind(), strict=True):
            parts[i] = joined


# ---- tensors


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    if isinstance(tensors, nn.Module):
        raise coded(
            TypeError,
            "norm-of-module",
            f"a {type(tensors).__name__} was given where parameters or gradients are expected; "
            f"pass its parameters()",
        )
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _scale(tensors: list[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    for (device, dtype), members in _by_device_and_dtype(tensors).items():
        here = factor.to(device, dtype)
        if _in_one_kernel(device, foreach):
            torch._foreach_mul_(members, here)
        else:
            for tensor in members:
                tensor.mul_(here)


def _by_device_and_dtype(
    tensors: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Tensors that one kernel can process, in the same order on all ranks."""
    listed: list[Any] = list(tensors)
    grouped: dict[Any, Any] = {}
    if listed:
        grouped.update(_group_tensors_by_device_and_dtype([listed]))
    ordered = sorted(grouped.items(), key=lambda item: str(item[0]))
    return {key: members for key, ((members, *_), _) in ordered}


def _in_one_kernel(device: torch.device, foreach: bool | None) -> bool:
    possible: bool = _device_has_foreach_support(device)
    if foreach and not possible:
        raise coded(
            RuntimeError,
            "norm-foreach",
            f"foreach=True does not work on {device.type} tensors; leave it out",
        )
    return possible if foreach is None else foreach
