"""Optimizers of torch that step shards as plain tensors, without DTensor's dispatcher.

    optimizer.step(closure)
      └─ hook before it ──> twin: an optimizer of the same class, for this one step
           └─ twin.step     evaluates the closure; then torch's kernels step, in the twin,
                parameters    this rank's rows of each, with the rows of its gradient as ``.grad``
                state         the same entries, with rows in place of DTensors

Kernels write into the rows, so that nothing is copied back. The optimizer does not change:
parameters, gradients and state are DTensors for all other code. Two cases go through DTensor: the
first step, so that torch creates the state, and tensors that are not sharded like their parameter
(decision 28).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import cast

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.hooks import RemovableHandle

from fsdp2.core.errors import coded
from fsdp2.optim.flat import ELEMENTWISE
from fsdp2.optim.runs import ParamGroupOptions, ParamState

Closure = Callable[[], object]


def step_shards(optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Let an optimizer of torch step this rank's shards as plain tensors from now on.

    Results are the same to the bit, for all options, because torch's own kernels run on the same
    memory; a step takes less than half of the host time. Parameters, ``.grad``, `state` and state
    dicts stay DTensors. Unlike `FlatOptimizer`, it needs no model and creates no new optimizer.
    Hooks of the optimizer run as before, but their arguments contain a stand-in for the optimizer
    and a closure.

    Args:
        optimizer: of one of torch's element-wise classes, such as ``torch.optim.AdamW``, but not of
            a subclass. Plain parameters are stepped as without this function.

    Returns:
        A handle whose ``remove()`` restores the plain step. A copy of the optimizer has the plain
        step.

    Raises:
        TypeError: ``optimizer`` is of another class.

    Example::

        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        fsdp2.optim.step_shards(optimizer)
    """
    if type(optimizer) not in ELEMENTWISE:
        raise coded(
            TypeError,
            "not-steppable-by-shard",
            f"step_shards takes a torch optimizer that updates each element independently, such "
            f"as AdamW, not {type(optimizer).__name__}; use that optimizer without step_shards",
        )
    return optimizer.register_step_pre_hook(_hand_over)


def _hand_over(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """Let a twin perform this step.

    It takes gradients when the closure is evaluated, which happens after all hooks.
    """
    if torch.compiler.is_compiling():
        return None
    closure = cast(Closure | None, next(iter((*args[1:], *kwargs.values())), None))
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))

    def evaluate() -> object:
        loss = None if closure is None else closure()
        for name in vars(twin).keys() - vars(optimizer).keys():  # torch's flags of warnings
            setattr(optimizer, name, getattr(twin, name))
        with torch.no_grad(), DisableTorchFunctionSubclass():
            _take_rows(twin)
        return loss

    return (twin, evaluate), {}


def _take_rows(twin: torch.optim.Optimizer) -> None:
    """Replace DTensors by rows in all groups and state of the twin, or in none of them."""
    groups: list[ParamGroupOptions] = []
    states: defaultdict[torch.Tensor, ParamState] = defaultdict(dict)
    stepped: list[torch.Tensor] = []
    for group in twin.param_groups:
        if group.get("differentiable"):
            return
        without_state = type(twin) is torch.optim.SGD and not group["momentum"]
        params: list[torch.Tensor] = []
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            state = twin.state.get(param)
            if not state and not without_state:
                return
            if not isinstance(param, DTensor):
                states[param] = state or {}
                params.append(param)
                continue
            spec = param._spec
            rows, gradient = param._local_tensor, _rows(grad, spec)
            if gradient is None or type(rows) is not torch.Tensor:
                return
            rows = rows.detach()
            if gradient.dtype != rows.dtype:
                rows.grad_dtype = gradient.dtype
            rows.grad = gradient
            if state:
                found = states[rows]
                for key, value in state.items():
                    if isinstance(value, DTensor):
                        value = _rows(value, spec)
                    if value is None:
                        return
                    found[key] = value
            params.append(rows)
            stepped.append(param)
        groups.append({**group, "params": params})
    twin.param_groups, twin.state = groups, states
    torch.autograd.graph.increment_version(stepped)  # as DTensor's kernels would


def _rows(tensor: torch.Tensor, wanted: DTensorSpec) -> torch.Tensor | None:
    """The rows of a tensor that is sharded like a parameter; ``None`` for others."""
    if not isinstance(tensor, DTensor):
        return None
    spec, rows = tensor._spec, tensor._local_tensor
    alike = spec is wanted or (spec.mesh == wanted.mesh and spec.placements == wanted.placements)
    return rows if alike and type(rows) is torch.Tensor else None
