"""torch's functions of total norms, for gradients of which a rank may hold nothing.

    torch.nn.utils.clip_grad_norm_ ──> get_total_norm         tensors ──> their norm
                                   ──> clip_grads_with_norm_  scales them by it

torch takes the norm of each local tensor. Some norms (``inf`` and negative ones) have none of an
empty tensor, so that a rank whose shard is empty raises, and the others wait for it. These give
torch's results on any shards, and on tensors of several meshes. `fsdp2.install` puts them in place
of torch's, which they call for all that those compute: the bits are torch's then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.utils import clip_grads_with_norm_ as torchs_clip_grads_with_norm_
from torch.nn.utils import get_total_norm as torchs_get_total_norm

from fsdp2.core.facts import wrap_local
from fsdp2.optim import norms

Tensors = torch.Tensor | Iterable[torch.Tensor]


def get_total_norm(
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """As ``torch.nn.utils.get_total_norm``; of DTensors it is one, replicated on their mesh."""
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    first = next((tensor for tensor in listed if isinstance(tensor, DTensor)), None)
    waits_for_ever = math.isinf(float(norm_type)) or float(norm_type) < 0
    torchs = not waits_for_ever and _are_together(listed)
    if first is None or torchs or _waits_for_sums(listed):
        return torchs_get_total_norm(listed, norm_type, error_if_nonfinite, foreach)
    total = norms.get_total_norm(listed, norm_type, error_if_nonfinite, foreach)
    mesh = first.device_mesh
    meta = TensorMeta(total.shape, total.stride(), total.dtype)
    return wrap_local(total, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta))


def clip_grads_with_norm_(
    parameters: Tensors,
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """As ``torch.nn.utils.clip_grads_with_norm_``, with the norm of any mesh."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [param.grad for param in listed if param.grad is not None]
    total = [total_norm] if isinstance(total_norm, DTensor) else []
    if _waits_for_sums(grads) or _are_together([*grads, *total]):
        torchs_clip_grads_with_norm_(listed, max_norm, total_norm, foreach)
        return
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    norms.clip_grads_with_norm_(listed, max_norm, total_norm, foreach)


def _are_together(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors are on one mesh, or all of them on none."""
    return len({getattr(tensor, "device_mesh", None) for tensor in tensors}) <= 1


def _waits_for_sums(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether ranks hold summands of a tensor, which torch's functions add up themselves."""
    return any(
        placement.is_partial()
        for tensor in tensors
        if isinstance(tensor, DTensor)
        for placement in tensor.placements
    )
