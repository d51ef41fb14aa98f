"""Checkpoints of shards that are unlike: bands, empty ranks, ties, strides, subclasses, offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdp2 import CPUOffloadPolicy, checkpoint, fully_shard
from fsdp2.examples.int8_all_gather import gather_in_int8
from tests.checkpoint.shared import assert_same, everything, train, weights, whole
from tests.common.errors import raises
from tests.common.workers import ranks

KINDS = {
    "bands": {"place": (Shard(0), Shard(1))},
    "last": {"place": Shard(-1)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "int8": {},
}


class Odd(nn.Module):
    """A parameter a kind of trouble."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 6, 6))
        self.one = nn.Parameter(torch.randn(1, 6))  # ranks without rows
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.first = nn.Linear(6, 7, bias=False)
        self.again = nn.Linear(6, 7, bias=False)
        self.again.weight = self.first.weight
        self.brief = nn.Parameter(torch.randn(7).bfloat16())
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("none", torch.zeros(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = torch.tanh(x @ expert) + self.one + self.frozen.mean()
        y = self.again(self.first(x)[:, :6]) * self.brief + self.wide.abs().sum()
        image = self.conv(x[:, :3, None, None].expand(-1, -1, 3, 3))
        return y.square().sum() + image.square().sum()


def made(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Odd()
    if kind == "int8":
        gather_in_int8(model)
    if dist.is_initialized():
        options: dict[str, Any] = dict(KINDS[kind])
        place = options.pop("place", None)
        if isinstance(place, tuple):
            options["shard_placement_fn"] = lambda p: place if p.ndim == 3 else None
        elif place is not None:
            options["shard_placement_fn"] = lambda p: (
                Shard(p.ndim - 1) if p.is_contiguous() else None
            )
        fully_shard(model, **options)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": trained[:2]}, {"params": trained[2:], "lr": 0.05}]
    return model, torch.optim.AdamW(groups, lr=0.1)


@pytest.mark.parametrize("kind", KINDS)
@ranks(4)
def test_there_and_back(tmp_path: Path, kind: str) -> None:
    """Saved at once and beside training; loaded into other values; exported and loaded."""
    model, optimizer = made(kind)
    for step in (1, 2):
        train(model, optimizer, seed=step, steps=1)
        if step == 1:
            checkpoint.save(tmp_path / "run", model, optimizer, step=1)
        else:
            saving = checkpoint.async_save(tmp_path / "run", model, optimizer, step=2)
        expected = everything(model, optimizer)
        if step == 2:
            train(model, optimizer, seed=3, steps=1)
            saving.result()
        other, others = made(kind, seed=step)
        train(other, others, seed=9, steps=1)
        other.reshard()
        found = checkpoint.load(tmp_path / "run", other, others, step=step, verify=True)
        assert not found.left
        assert_same(everything(other, others), expected)
    dist.barrier()
    if kind != "int8":
        _as_safetensors(tmp_path, kind, weights(expected))
    dist.barrier()


def _as_safetensors(folder: Path, kind: str, expected: dict[str, Tensor]) -> None:
    model, _ = made(kind, seed=5)
    checkpoint.load(folder / "run", model, step=2)
    checkpoint.export(folder / "out", model)
    checkpoint.export(folder / "step", folder / "run", step=2, names=_once)
    for out in ("out", "step"):
        other, _ = made(kind, seed=6)
        checkpoint.load_pretrained(other, folder / out)
        assert_same(everything(other), expected)


def _once(name: str) -> str | None:
    return None if name == "again.weight" else name


class FourBit(nn.Linear):
    """As bitsandbytes': codes in the weight, scales in an attribute of it, written below its name.

    The state dict's entries are attributes of the quantized weight, and not of its shard.
    """

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.weight.requires_grad_(False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = torch.ones(2)
        destination[prefix + "weight.quant_state.nf4"] = torch.ones(3)


def adapted(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return fully_shard(nn.Sequential(FourBit(), nn.Linear(4, 4)))


@ranks(2)
def test_what_a_module_writes_beside_a_frozen_weight(tmp_path: Path) -> None:
    model, other = adapted(0), adapted(1)
    with raises("ckpt-beside") as caught:
        checkpoint.save(tmp_path, model, step=1)
    assert "'0.weight.absmax'" in str(caught.value)
    checkpoint.save(tmp_path, model, step=1, trainable=True)
    assert not checkpoint.load(tmp_path, other).left
    for i, param in enumerate(other.parameters()):
        same = torch.equal(whole(param), whole(list(model.parameters())[i]))
        assert same == param.requires_grad
