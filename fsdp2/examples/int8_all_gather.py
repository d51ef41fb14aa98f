"""Gather weights as int8: a quarter of the bytes of fp32, half of those of bf16.

    rank r's rows, fp32 ── int8 rows and one fp32 scale per row ══ all-gather ══> codes × scales

The optimizer updates fp32 rows. Each gather quantizes the rows that a rank holds, sends them, and
multiplies what arrives by its scales, in the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from fsdp2 import MixedPrecisionPolicy

_aten = torch.ops.aten
_KEEP_CLASS = {
    _aten.detach.default,
    _aten.clone.default,
    _aten.split.Tensor,
    _aten.slice.Tensor,
    _aten.view.default,
    _aten.new_zeros.default,
    _aten.empty_like.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}
"""Operators that shard, copy or allocate a tensor; these must return the class."""


class Int8Gathered(torch.Tensor):
    """A weight of full precision that is sent as int8.

    Args:
        rows: the weight, or this rank's rows of it; at least 2-D, a floating-point dtype.

    Example::

        layer.weight = nn.Parameter(Int8Gathered(layer.weight.detach()))
        fully_shard(layer)
    """

    rows: torch.Tensor

    @staticmethod
    def __new__(cls, rows: torch.Tensor) -> Int8Gathered:
        """A tensor without memory of its own: `rows` has it."""
        make: Callable[..., Int8Gathered] = torch.Tensor._make_wrapper_subclass
        return make(cls, rows.shape, strides=rows.stride(), dtype=rows.dtype, device=rows.device)

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __repr__(self) -> str:  # type: ignore[override]  # nobody passes contents
        return f"Int8Gathered({self.rows!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # C

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as torch calls it
        cls, func: Any, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        """Run every operator on the rows."""

        def unwrap(value: object) -> object:
            return value.rows if isinstance(value, Int8Gathered) else value

        def wrap(value: object) -> object:
            return cls(value) if isinstance(value, torch.Tensor) else value

        result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        if func._schema.name.endswith("_") and isinstance(args[0], Int8Gathered):
            return args[0]  # in place, as optimizers work
        return tree_map(wrap, result) if func in _KEEP_CLASS else result

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        """Quantise: int8 codes of the rows' shape, and fp32 scales [rows, 1, …]."""
        rows = self.rows
        missing = math.ceil(outer_size[0] / mesh.size()) - rows.size(0)
        if missing:  # every rank must send equally much
            rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
        within = tuple(range(1, rows.ndim))
        scales = rows.abs().amax(within, keepdim=True).float().clamp(min=1e-30) / 127
        return ((rows / scales).round().to(torch.int8), scales), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Dequantise: into new memory the first time, into the same afterwards."""
        codes, scales = all_gather_outputs
        if out is None:
            weight = (codes * scales).to(param_dtype)
            return weight, (weight,)
        local: torch.Tensor = getattr(out, "_local_tensor", out)  # of a tensor-parallel weight
        length = local.size(0)
        torch.mul(codes[:length], scales[:length], out=local)
        return None

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        """Codes and scales are not needed once they are multiplied."""
        return True


def gather_in_int8(model: nn.Module) -> int:
    """Give the weights of all linear layers the class; call it before `fully_shard`.

    Args:
        model: changed in place; embeddings, norms and biases stay as they are.

    Returns:
        How many weights there were; tied ones count once.
    """
    made: dict[torch.Tensor, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            if weight not in made:
                made[weight] = nn.Parameter(Int8Gathered(weight.detach()), weight.requires_grad)
            module.weight = made[weight]
    return len(made)
