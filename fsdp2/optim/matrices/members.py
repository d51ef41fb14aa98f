"""Parameters in a step of whole matrices, and the ranks with which it exchanges rows.

member   a parameter: its matrices, its distribution, this rank's rows and gradient
line     ranks that exchange messages of one dtype; members on the same ranks share it
present  members for which some rank has a gradient: ranks agree by a few numbers per line
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
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
    gather_numbers,
    local_of,
    new_groups,
    ranks_of,
    units_by_param,
)
from fsdp2.optim.matrices.blocks import Matrix, Split, Spread, matrices_of, plain_spread, spread_of
from fsdp2.optim.runs import ParamGroupOptions

WORD = 62
"""Members per number: one bit each."""


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
        if isinstance(grad, DTensor) and isinstance(param, DTensor):
            spec = param._spec
            if grad._spec.placements != spec.placements or grad._spec.mesh != spec.mesh:
                grad = grad.redistribute(spec.mesh, spec.placements)
        return local_of(grad)


class MatrixMembers:
    """The members of an optimizer, in its order."""

    def __init__(
        self, split: Split | None, travels_as: Callable[[torch.dtype], torch.dtype]
    ) -> None:
        self._split = split
        self._travels_as = travels_as
        self._units = units_by_param()
        self._lines: dict[object, Line] = {}
        self.listed: list[Member] = []

    def add(self, param: torch.Tensor, name: str, group: int) -> None:
        """Add one; this may create its process group, which is a collective of its ranks."""
        unit = self._units.get(cast(nn.Parameter, param))
        if isinstance(param, DTensor):
            spread = spread_of(name, param._spec, local_of(param).shape)
            device, mesh = device_of(param.device_mesh), param.device_mesh
        else:
            spread, device, mesh = plain_spread(param.shape), param.device, None
        dtype = self._travels_as(getattr(param, "grad_dtype", None) or param.dtype)
        key = (spread.ranks, dtype, device)
        if key not in self._lines:
            self._lines[key] = _line(spread, mesh, dtype, device)
        matrices = matrices_of(name, param.shape, self._split)
        self.listed.append(Member(param, name, group, unit, matrices, spread, self._lines[key]))

    @property
    def lines(self) -> list[Line]:
        """Each line once, in the order of members."""
        return list(self._lines.values())

    def present(self, gradients: Sequence[torch.Tensor | None]) -> tuple[bool, ...]:
        """Whether any rank of each member's line has a gradient; the same on all of them."""
        found = [gradient is not None for gradient in gradients]
        asked: set[tuple[int, ...]] = set()
        for line in self.lines:
            if line.group is None or line.ranks in asked:
                continue
            asked.add(line.ranks)  # lines of several dtypes are one here
            mine = [i for i, m in enumerate(self.listed) if m.line.ranks == line.ranks]
            answers = gather_numbers(line.group, _words([found[i] for i in mine]), line.device)
            for at, index in enumerate(mine):
                found[index] = any(words[at // WORD] >> at % WORD & 1 for words in answers)
        return tuple(found)


def resolved(param: torch.Tensor) -> torch.Tensor:
    """The sharded parameter by which `fully_shard` replaced this one, or this one."""
    form = form_of(param)
    managed = None if form is None else form.param()
    return param if managed is None else managed.sharded


def first_group(group: ParamGroupOptions) -> list[torch.Tensor]:
    """The parameters of a group."""
    params: list[torch.Tensor] = group["params"]  # type: ignore[assignment]  # its one such entry
    return params


def _words(bits: Sequence[bool]) -> list[int]:
    return [
        sum(bit << at for at, bit in enumerate(bits[start : start + WORD]))
        for start in range(0, len(bits), WORD)
    ]


def _line(
    spread: Spread, mesh: DeviceMesh | None, dtype: torch.dtype, device: torch.device
) -> Line:
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
