"""Parameters that are stepped element by element, inside an optimizer of matrices.

    optimizer   param_groups, state           DTensors, as in an optimizer of the class
    twin        groups and state of rows      one object of the class; contents are set in each step

torch's kernels write into the rows. State that the class creates or replaces becomes DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core.facts import local_of
from fsdp2.optim.matrices.members import gradient_rows
from fsdp2.optim.runs import ParamGroupOptions, ParamState, keep, localized, options_of

States = Mapping[torch.Tensor, ParamState]


class Elementwise:
    """Steps groups of parameters with a torch optimizer."""

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        options: Mapping[str, object],
    ) -> None:
        self._twin = optimizer_class([nn.Parameter(torch.empty(0))], **options)

    @property
    def defaults(self) -> dict[str, object]:
        """Options of a group of such parameters."""
        return dict(self._twin.defaults)

    def step(self, groups: Sequence[ParamGroupOptions], state: States) -> None:
        """Step parameters that have a gradient."""
        twin = self._twin
        rows_of: dict[torch.Tensor, torch.Tensor] = {}
        twin.state.clear()
        twin.param_groups = []
        for group in groups:
            found = []
            for param in group["params"]:  # type: ignore[attr-defined]  # its one such entry
                if param.grad is not None:
                    rows = rows_of[param] = _rows_with_gradient(param)
                    found.append(rows)
                    if state.get(param):
                        twin.state[rows] = localized(dict(state[param]))
            twin.param_groups.append({**options_of(group), "params": found})
        twin.step()
        for group, stepped in zip(groups, twin.param_groups, strict=True):
            group.update(options_of(stepped))  # a class may store counts there
        for param, rows in rows_of.items():
            keep(state[param], twin.state[rows], param)
        torch.autograd.graph.increment_version([p for p in rows_of if isinstance(p, DTensor)])
        twin.state.clear()
        twin.param_groups = []


def _rows_with_gradient(param: torch.Tensor) -> torch.Tensor:
    """This rank's rows, a separate leaf in the same memory; a plain parameter itself."""
    grad = param.grad
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
        return param
    rows, gradient = local_of(param).detach(), gradient_rows(param, grad)
    if gradient.dtype != rows.dtype:
        rows.grad_dtype = gradient.dtype
    rows.grad = gradient
    return rows
