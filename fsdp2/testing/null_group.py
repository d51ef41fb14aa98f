"""The process group whose collectives do nothing (`tracing.paper.null_group`), to measure with.

A measurement with it contains only the sharding library's own cost; every library pays the same for
the group:

    init_null_group(8)                      # the default group, backend "null"
    mesh = null_mesh(8)                     # the same, and a 1-D DeviceMesh over it
    with null_world(8) as group: ...        # and destroyed afterwards
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2.tracing.paper.null_group import (
    NullGroup,
    NullWork,
    Observer,
    init_null_group,
    null_world,
)

__all__ = [
    "Call",
    "CallLog",
    "NullGroup",
    "NullWork",
    "Observer",
    "fill_gathered",
    "init_null_group",
    "null_mesh",
    "null_world",
]


class Call(NamedTuple):
    """One collective: its name, how many tensors it was given, and the bytes of all of them."""

    name: str
    tensors: int
    nbytes: int


class CallLog(list[Call]):
    """An observer of null groups that keeps every call. Share one, or give each group its own."""

    def __call__(self, _: object, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        tensors = [*outputs, *inputs]
        self.append(Call(name, len(tensors), sum(t.nbytes for t in tensors)))

    def counts(self) -> dict[str, int]:
        """Calls by name."""
        return dict(Counter(call.name for call in self))


@torch.no_grad()
def fill_gathered(_: object, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """An observer that copies what this rank gives to a gather to every rank's place.

    For a warm-up: memory that is used again later then holds a model's values rather than anything.
    """
    if name.startswith("all_gather_single"):
        for output, input_ in zip(outputs, inputs, strict=True):
            if input_.is_floating_point() and input_.numel():
                # .data: a parameter's version must not change
                rows = output.data.view(-1, input_.numel())
                rows[0].copy_(input_.view(-1))  # which may be a row itself
                rows[1:].copy_(rows[0])


def null_mesh(
    world_size: int | tuple[int, ...],
    device_type: str = "cpu",
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    observer: Observer | None = None,
) -> DeviceMesh:
    """A DeviceMesh over null groups: `8` for one dim, `(2, 4)` for two.

    Makes the default group where there is none yet; `observer` is for that case only.
    """
    shape = (world_size,) if isinstance(world_size, int) else world_size
    if not dist.is_initialized():
        init_null_group(math.prod(shape), observer=observer)
    elif not isinstance(dist.group.WORLD, NullGroup):
        raise ValueError(
            f"null_mesh needs the null default group, but the default group's backend is "
            f"{dist.get_backend()!r}: call destroy_process_group() first"
        )
    return init_device_mesh(device_type, shape, mesh_dim_names=mesh_dim_names)
