"""What the examples of guides and docstrings take as given: a small model, its data, its ranks.

    with process_group(ranks=32):
        exec(block, names(sharded=False))

Docs say which names these are: "a model whose blocks are in `model.blocks`, a process group, …".
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh

import fsdp2
from fsdp2 import checkpoint, fully_shard
from fsdp2.testing.null_group import init_null_group
from fsdp2.wrap import ModuleWrapPolicy

DIM = 32

init_device_mesh = device_mesh.init_device_mesh


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(q * k + v)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.experts = Attention(), MLP(), nn.Linear(DIM, DIM)
        self.adapter: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.adapter(self.experts(self.mlp(self.attention(x))))


class Model(nn.Module):
    """Its output is a scalar, so that any loss of an example takes it."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) if tokens.dtype == torch.int64 else tokens
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.mean()

    def generate(self, tokens: Tensor) -> Tensor:
        result: Tensor = self(tokens)
        return result

    def loss(self, output: Tensor, targets: Tensor | None = None) -> Tensor:
        return output


class Engine:
    """Something that takes weights."""

    def update_weight(self, name: str, tensor: Tensor) -> None:
        pass


def shard(model: nn.Module, mesh: device_mesh.DeviceMesh | None = None) -> nn.Module:
    """As every guide does: blocks first, then the model."""
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """A scalar."""
    loss: Tensor = model(batch)
    return loss


def step(model: nn.Module, batch: Tensor) -> None:
    """Forward and backward."""
    loss_of(model, batch).backward()


@contextlib.contextmanager
def process_group(ranks: int) -> Iterator[None]:
    """The first of so many ranks: of a null group, or of gloo where it is the only one.

    Examples name meshes of GPUs. They get one of CPUs, of so many ranks as there are: of one rank
    per dim, or of the shape that they name.
    """
    if ranks == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        init_null_group(ranks)

    def mesh(_: str, shape: tuple[int, ...], **options: Any) -> device_mesh.DeviceMesh:
        return init_device_mesh("cpu", shape if ranks > 1 else (1,) * len(shape), **options)

    try:
        with mock.patch.object(device_mesh, "init_device_mesh", mesh):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def names(*, sharded: bool) -> dict[str, Any]:
    """The names that examples use without making them."""
    model = Model()
    if sharded:
        shard(model)
    whole = device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    tokens = torch.randint(0, 64, (4, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {
        "functools": functools,
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "init_device_mesh": device_mesh.init_device_mesh,
        "fsdp2": fsdp2,
        "fully_shard": fully_shard,
        "checkpoint": checkpoint,
        "ModuleWrapPolicy": ModuleWrapPolicy,
        "Model": Model,
        "Transformer": Model,
        "Block": Block,
        "TransformerBlock": Block,
        "Norm": nn.LayerNorm,
        "Adapter": lambda dim: nn.Linear(dim, dim),
        "add_adapters": lambda model: None,
        "make_model": Model,
        "build": lambda: shard(Model()),
        "shard": shard,
        "model": model,
        "block": model.blocks[0],
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer),
        "loss": lambda output: output,
        "loss_of": loss_of,
        "step": step,
        "evaluate": lambda model: None,
        "train_some_steps": lambda *model: None,
        "batch": tokens,
        "batches": [tokens, tokens],
        "micro_batches": [tokens, tokens],
        "x": torch.randn(4, DIM, requires_grad=True),
        "tokens": tokens,
        "config": None,
        "dim": DIM,
        "rank": 0,
        "device": "cpu",
        "engine": Engine(),
        "path": "dcp",
        "mesh": whole,
    }
