"""Muon over sharded parameters: each rank orthogonalizes its own matrices, and no others.

momentum_buffer   sharded as the parameter; lerp of it and the gradient on each rank's rows
bf16 rows         travel to the owner: torch's Muon casts to bf16 before anything else, too
Newton-Schulz     of whole matrices, those of one shape by one call
bf16 updates      travel back; weight decay and the step itself are on rows
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

    Results are those of ``torch.optim.Muon`` over whole parameters: to the bit on a CPU. Each
    matrix is orthogonalized by one rank of its mesh, its owner: work is shared out by FLOPs, over
    replicas and tensor-parallel ranks, too. A unit's momentum travels to the owners in one message,
    and updates come back in another, while the unit before is computed.

    Args:
        params: the model; or its parameters, named parameters, or parameter groups. Those without
            two dims, and those of ``elementwise``, are stepped by ``elementwise_class``, in
            parameter groups of their own behind the others. A group may say ``"elementwise": True``
            for all of its parameters.
        lr: learning rate of matrices. Default 1e-3.
        weight_decay: decoupled, of matrices. Default 0.1.
        momentum: of the average of gradients. Default 0.95.
        nesterov: whether the gradient counts once more. Default ``True``.
        ns_coefficients: a, b, c of Newton-Schulz. Default: torch's.
        eps: what norms are at least. Default 1e-7.
        ns_steps: steps of Newton-Schulz. Default 5.
        adjust_lr_fn: ``"original"`` (``None``, the default, is that), ``"match_rms_adamw"`` or
            ``"spectral_unclamped"``: how the learning rate depends on the shape of a matrix.
        elementwise: which matrices are stepped element by element: names, with ``*`` and ``?``, or
            a function of name and parameter. Embeddings and heads belong here. Default: none.
        elementwise_class: an element-wise class of torch's. Default ``torch.optim.AdamW``.
        elementwise_options: its options; ``None`` (default) for its defaults, its ``lr`` too.
        split: a function of name and weight, which it returns cut into matrices: views with two
            dims, such as ``weight.unbind()`` for experts [E, m, n] or ``weight.chunk(3)`` for a
            fused projection; ``None`` leaves the weight as it is. The weight that it is given has
            the whole shape, and no values. Default ``None``: no weight is cut.
        batched: whether matrices of equal shape are orthogonalized by one call. Default ``True``;
            on a GPU the last bit of results may depend on it.

    Raises:
        TypeError: a parameter is complex.
        ValueError: an option is out of its range, a name of ``elementwise`` is that of no
            parameter, ``split`` does not cut a weight into matrices, or a group's ``"elementwise"``
            is ``False`` and it has parameters that are no matrices.

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
        """bf16, which Newton-Schulz computes in."""
        return torch.bfloat16

    def flops(self, rows: int, columns: int) -> float:
        """Of Newton-Schulz."""
        return flops(rows, columns, self.defaults["ns_steps"])

    def before_exchange(
        self,
        grads: Sequence[torch.Tensor],
        states: Sequence[ParamState],
        group: ParamGroupOptions,
    ) -> list[torch.Tensor]:
        """The momentum, with this step's gradient in it; with Nesterov, once more."""
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
        """One matrix, orthogonalized."""
        return self.update_stack(gradient[None], [state], group)[0]

    def update_stack(
        self, gradients: torch.Tensor, states: Sequence[MatrixState], group: ParamGroupOptions
    ) -> torch.Tensor:
        """Matrices of one shape, orthogonalized."""
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
