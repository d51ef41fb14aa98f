"""What tests of checkpoints share: a small model, values by name, a disk that fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import checkpoint, fully_shard, shard_model
from fsdp2.checkpoint import files

EXTRA = {"schedule": [1, (2.5, None)], "table": torch.arange(4)}


def small(seed: int = 0, groups: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two layers and a batch norm, not sharded; with ``groups``, parameters in another order."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    if groups:
        decayed = [model[2].weight, model[0].weight]
        others = [p for p in model.parameters() if all(p is not q for q in decayed)]
        return model, torch.optim.AdamW([{"params": decayed, "lr": 0.2}, {"params": others}])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def spread(model: nn.Module, how: str, first: str, last: str, shard: Any = fully_shard) -> None:
    """Shard a model, and two layers of it, over all ranks in one of the ways.

    Args:
        model: with two linear layers.
        how: "whole" for not at all; "zero1"; or "hybrid" or "tp" for meshes of two dims, and
            "dims" where parameters are cut on their last dim.
        first: the first layer's name; with "tp" its output is cut, and the input of ``last``.
        last: the other layer's name.
        shard: `fully_shard`, or torch's.
    """
    if how == "whole":
        return
    size, options = dist.get_world_size(), {}
    if how == "hybrid":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    elif "tp" in how:
        both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("shard", "tp"))
        parallelize_module(model, both["tp"], {first: ColwiseParallel(), last: RowwiseParallel()})
        mesh = both["shard"]
    else:
        mesh = init_device_mesh("cpu", (size,))
    if how == "zero1":
        shard_model(model, {nn.Linear}, strategy="zero1", mesh=mesh)
        return
    if "dims" in how:
        options["shard_placement_fn"] = lambda p: Shard(p.dim() - 1) if p.numel() else None
    for unit in (getattr(model, first), getattr(model, last), model):
        shard(unit, mesh=mesh, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: int = 2) -> None:
    """On random inputs, the same on all ranks; FSDP1's shards have one dim, its layers a width."""
    layers = (module.in_features for module in model.modules() if isinstance(module, nn.Linear))
    width = next((p.shape[1] for p in model.parameters() if p.ndim == 2), None) or next(layers)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(4, width, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = small(seed)
    train(model, optimizer, seed, steps=1)
    return model, optimizer


def save_by(call: str, *args: Any, **options: Any) -> Any:
    """`save`, or `async_save` and its result: where the step is."""
    found = getattr(checkpoint, call)(*args, **options)
    return found.result() if isinstance(found, checkpoint.Saving) else found


def whole(value: Any) -> Tensor:
    """A copy, without its classes; a collective for a DTensor."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    value = getattr(value, "_data", value).detach()
    return torch.empty(value.shape, dtype=value.dtype).copy_(value)


def everything(model: Any, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole, sorted by name; a collective where the model is sharded."""
    if hasattr(model, "reshard"):
        model.reshard()
    found = dict(model.state_dict())
    for optimizer in optimizers:
        for name, param in model.named_parameters():
            for key, value in optimizer.state.get(param, {}).items():
                found[f"{name}:{key}"] = value
    return {name: whole(found[name]) for name in sorted(found)}


def weights(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of `everything`, what the model's state dict has."""
    return {name: value for name, value in found.items() if ":" not in name}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


class Failing(files.Disk):
    """Raises at some operations.

    Args:
        code: of the error.
        operations: of `files.Disk`, by name.
        when: asked with an operation's arguments whether it fails; always, if not given.
    """

    def __init__(
        self, code: int, *operations: str, when: Callable[..., bool] = lambda *_: True
    ) -> None:
        self._code, self._operations, self._when = code, operations, when

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or name not in self._operations:
            return found

        def call(*args: Any) -> Any:
            if self._when(*args):
                raise OSError(self._code, os.strerror(self._code))
            return found(*args)

        return call


class Unsynced(files.Disk):
    """Leaves all to the system, where a test is not about what a crash leaves."""

    def sync(self, file: Any) -> None:
        file.flush()

    def sync_folder(self, path: Path) -> None:
        pass


class Evil:
    """Unpickled, it would make a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def flip(path: Path) -> None:
    """One bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
