"""Parameters in a step of whole matrices, and the ranks with which it exchanges rows.

member   a parameter: its matrices, its distribution, this rank's rows and gradient
line     ranks that exchange messages of one dtype; members on the same ranks share it
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2.core.errors import coded
from fsdp2.core.facts import (
    ProcessGroup,
    Unit,
    current_world,
    default_group,
    device_of,
    form_of,
    local_of,
    new_groups,
    ranks_of,
)
from fsdp2.optim.matrices.blocks import Matrix, Spread


@dataclass(eq=False)
class Line:
    """Ranks that exchange rows."""

    group: ProcessGroup | None
    order: tuple[int, ...]
    position: int
    ranks: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False)
class Member:
    """A parameter with matrices."""

    param: torch.Tensor
    name: str
    group: int
    unit: Unit | None
    matrices: tuple[Matrix, ...]
    spread: Spread
    line: Line

    @property
    def rows(self) -> torch.Tensor:
        """This rank's elements of the parameter."""
        return local_of(self.param)

    def gradient(self) -> torch.Tensor | None:
        """This rank's elements of the gradient."""
        grad, param = self.param.grad, self.param
        if grad is None:
            return None
        if grad.is_sparse or isinstance(grad, DTensor) is not isinstance(param, DTensor):
            raise coded(
                TypeError,
                "muon-gradient",
                f"the gradient of '{self.name}' {tuple(param.shape)} is not sharded or stored "
                f"like the parameter; assign a dense gradient with the parameter's placements",
            )
        return gradient_rows(param, grad)


def gradient_rows(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a gradient, distributed like its parameter."""
    if isinstance(grad, DTensor) and isinstance(param, DTensor):
        spec = param._spec
        if grad._spec.placements != spec.placements or grad._spec.mesh != spec.mesh:
            grad = grad.redistribute(spec.mesh, spec.placements)
    return local_of(grad)


def resolved(param: torch.Tensor) -> torch.Tensor:
    """The sharded parameter by which `fully_shard` replaced this one, or this one."""
    form = form_of(param)
    managed = None if form is None else form.param()
    return param if managed is None else managed.sharded


def line_of(
    spread: Spread, mesh: DeviceMesh | None, dtype: torch.dtype, device: torch.device
) -> Line:
    """The ranks of a parameter; this may create their process group, a collective of them."""
    if mesh is None or len(spread.ranks) == 1:
        return Line(None, (0,), 0, spread.ranks, dtype, device)
    group = _group_of(mesh, spread.ranks, current_world())
    order = tuple(spread.ranks.index(rank) for rank in ranks_of(group))
    return Line(group, order, spread.position, spread.ranks, dtype, device)


@functools.lru_cache(maxsize=64)
def _group_of(mesh: DeviceMesh, ranks: tuple[int, ...], world: object) -> ProcessGroup:
    """A process group of all ranks of a mesh: an existing one, or a new one."""
    for group in (*mesh.get_all_groups(), default_group()):
        if sorted(ranks_of(group)) == sorted(ranks):
            return group
    (made,) = new_groups(mesh.get_all_groups(), device_of(mesh), [sorted(ranks)])
    return made
