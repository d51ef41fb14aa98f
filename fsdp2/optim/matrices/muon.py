"""Muon over sharded parameters: each rank orthogonalizes only the matrices that it owns.

momentum_buffer   sharded like the parameter; lerp of it and the gradient on each rank's rows
bf16 rows         are sent to the owner: torch's Muon also casts to bf16 first
Newton-Schulz     of whole matrices, one call per shape
bf16 updates      are sent back; weight decay and the step itself are on rows
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

from fsdp2.core.errors import coded
from fsdp2.optim.matrices.base import (
    Choice,
    MatrixOptimizer,
    MatrixState,
    OptimizerClass,
    Params,
    number_of,
)
from fsdp2.optim.matrices.blocks import Split
from fsdp2.optim.matrices.newton_schulz import COEFFICIENTS, EPS, STEPS, flops, orthogonalized
from fsdp2.optim.runs import ParamGroupOptions, ParamState

_ADJUSTED = (None, "original", "match_rms_adamw", "spectral_unclamped")


class Muon(MatrixOptimizer):
    """``torch.optim.Muon`` over sharded parameters, with an element-wise optimizer for the others.

    Results are those of ``torch.optim.Muon`` over unsharded parameters; on a CPU, they are equal to
    the bit. One rank of its mesh, the owner, orthogonalizes each matrix. fsdp2 assigns matrices to
    owners by FLOPs, also over replicas and tensor-parallel ranks. The momentum of a unit is sent to
    the owners in one message, and updates come back in another, while another unit is computed.

    Args:
        params: the model; or its parameters, named parameters, or parameter groups.
            ``elementwise_class`` steps parameters without two dims, and those of ``elementwise``,
            in separate parameter groups after the others. A group with ``"elementwise": True``
            contains only such parameters.
        lr: learning rate of matrices. Default 1e-3.
        weight_decay: decoupled weight decay of matrices. Default 0.1.
        momentum: factor of the average of gradients. Default 0.95.
        nesterov: whether the present gradient is added once more. Default ``True``.
        ns_coefficients: a, b, c of Newton-Schulz. Default: torch's.
        eps: lower bound of norms. Default 1e-7.
        ns_steps: steps of Newton-Schulz. Default 5.
        adjust_lr_fn: how the learning rate depends on the shape of a matrix: ``"original"``,
            ``"match_rms_adamw"`` or ``"spectral_unclamped"``. Default ``None``: ``"original"``.
        elementwise: which matrices are stepped element by element: names, with ``*`` and ``?``, or
            a function of name and parameter. Pass embeddings and heads. Default: none.
        elementwise_class: an element-wise torch optimizer. Default ``torch.optim.AdamW``.
        elementwise_options: its options. Default ``None``: its defaults, also for ``lr``.
        split: a function of name and weight that cuts the weight into matrices: it returns 2-D
            views, such as ``weight.unbind()`` for experts [E, m, n] or ``weight.chunk(3)`` for a
            fused projection, or ``None`` to leave the weight uncut. The weight that it gets has
            its full shape, but no values. Default ``None``: no weight is cut.
        batched: whether one call orthogonalizes all matrices of the same shape. Default ``True``;
            on a GPU, the last bit of results may depend on it.

    Raises:
        TypeError: a parameter is complex.
        ValueError: an option is out of range, a name in ``elementwise`` matches no parameter,
            ``split`` does not cut a weight into matrices, or a group with ``"elementwise": False``
            has parameters that are not matrices.

    Example::

        optimizer = fsdp2.optim.Muon(
            model,
            lr=0.02,
            elementwise=["embed.*", "head.*"],
            elementwise_options={"lr": 3e-4, "betas": (0.9, 0.95)},
        )
    """

    def __init__(
        self,
        params: nn.Module | Params,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = STEPS,
        adjust_lr_fn: str | None = None,
        *,
        elementwise: Choice = (),
        elementwise_class: OptimizerClass = torch.optim.AdamW,
        elementwise_options: Mapping[str, object] | None = None,
        split: Split | None = None,
        batched: bool = True,
    ) -> None:
        ranges = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        for name, value in ranges.items():
            if not value >= 0.0:
                raise coded(
                    ValueError,
                    "muon-range",
                    f"Muon({name}={value}) is out of range; pass 0 or a positive number",
                )
        if adjust_lr_fn not in _ADJUSTED:
            raise coded(
                ValueError,
                "muon-adjust",
                f"Muon(adjust_lr_fn={adjust_lr_fn!r}) is not known; pass one of {_ADJUSTED}",
            )
        if not 0 <= ns_steps < 100 or len(ns_coefficients) != 3:
            raise coded(
                ValueError,
                "muon-steps",
                f"Muon takes fewer than 100 steps of Newton-Schulz and three coefficients, not "
                f"ns_steps={ns_steps} and ns_coefficients={ns_coefficients}",
            )
        defaults = {
            **ranges,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(
            params,
            defaults,
            elementwise=elementwise,
            elementwise_class=elementwise_class,
            elementwise_options=elementwise_options,
            split=split,
            batched=batched,
        )

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """bf16, in which Newton-Schulz computes."""
        return torch.bfloat16

    def flops(self, rows: int, columns: int) -> float:
        """The FLOPs of Newton-Schulz."""
        return flops(rows, columns, self.defaults["ns_steps"])

    def before_exchange(
        self,
        grads: Sequence[torch.Tensor],
        states: Sequence[ParamState],
        group: ParamGroupOptions,
    ) -> list[torch.Tensor]:
        """The momentum with this step's gradient; with Nesterov, added once more."""
        momentum = number_of(group, "momentum")
        buffers = []
        for grad, state in zip(grads, states, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(grad)
            buffers.append(state["momentum_buffer"])
        torch._foreach_lerp_(buffers, list(grads), 1 - momentum)
        if not group["nesterov"]:
            return buffers
        return list(torch._foreach_lerp(list(grads), buffers, momentum))

    def update(
        self, gradient: torch.Tensor, state: MatrixState, group: ParamGroupOptions
    ) -> torch.Tensor:
        """Orthogonalize one matrix."""
        return self.update_stack(gradient[None], [state], group)[0]

    def update_stack(
        self, gradients: torch.Tensor, states: Sequence[MatrixState], group: ParamGroupOptions
    ) -> torch.Tensor:
        """Orthogonalize matrices of one shape."""
        coefficients = cast("tuple[float, float, float]", group["ns_coefficients"])
        steps, eps = cast(int, group["ns_steps"]), number_of(group, "eps")
        return orthogonalized(gradients, coefficients, steps, eps)

    def step_size(self, shape: tuple[int, int], group: ParamGroupOptions) -> float:
        """The learning rate, adjusted to the shape."""
        rows, columns = shape
        rate, adjusted = super().step_size(shape, group), group["adjust_lr_fn"]
        if adjusted == "match_rms_adamw":
            return rate * (0.2 * math.sqrt(max(rows, columns)))
        if adjusted == "spectral_unclamped":
            return rate * math.sqrt(rows / columns)
        return rate * math.sqrt(max(1, rows / columns))
