"""`load(transforms=…)`: what is made of a step's tensors is what an unsharded model would have."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import checkpoint, fully_shard
from tests.checkpoint.shared import whole
from tests.common import workers
from tests.common.errors import raises

pytestmark = pytest.mark.ranks

WIDTH = 5


class Apart(nn.Module):
    """What is saved: GPT-2's way to store a matrix, three projections, a table, a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, WIDTH))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.table = nn.Embedding(7, WIDTH)
        self.pair = nn.Parameter(torch.randn(2 * WIDTH, 3))
        self.register_buffer("scale", torch.tensor(2.0))


class Joined(nn.Module):
    """What loads it."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.zeros(WIDTH, 3))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.table = nn.Embedding(8, WIDTH)
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.table.weight
        self.gate, self.up = (nn.Parameter(torch.zeros(WIDTH, 3)) for _ in range(2))
        self.register_buffer("scale", torch.tensor(0.0))
        self.new = nn.Parameter(torch.ones(2))


def names(name: str) -> str | list[str] | None:
    if name.startswith("qkv"):
        return [name.replace("qkv", each) for each in "qkv"]
    renamed = {"head.weight": "table.weight", "gate": "pair", "up": "pair", "new": None}
    return renamed.get(name, name)


def _padded(table: Tensor) -> Tensor:
    return torch.cat([table, table.new_zeros(1, WIDTH)])


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "turned": Tensor.t,
    "qkv.*": lambda *parts: torch.cat(parts),
    "table.weight": _padded,
    "head.weight": _padded,
    "gate": lambda pair: pair[:WIDTH],
    "up": lambda pair: pair[WIDTH:],
    "scale": lambda scale: scale.mul_(3),  # in place: it is a copy of this function alone
}


def _shard(model: nn.Module, dim: int) -> None:
    if dist.is_initialized():
        fully_shard(model, shard_placement_fn=lambda p: Shard(dim if p.ndim > dim else 0))


def _saves(folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Apart()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    _shard(model, 0)
    checkpoint.save(folder, model, torch.optim.AdamW(model.parameters()), step=1)
    return expected


def _resumes(folder: Path) -> None:
    """The states of what was made are left as they are, and told; the others' are loaded."""
    torch.manual_seed(0)
    model = Apart()
    _shard(model, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    checkpoint.save(folder, model, optimizer, step=1)
    pair = optimizer.state[model.pair]["exp_avg"].clone()
    optimizer.step()
    other = optimizer.state[model.turned]["exp_avg"].clone()
    found = checkpoint.load(
        folder, model, optimizer, strict=False, transforms={"turned": lambda it: it + 1}
    )
    assert found.left.missing == ["optimizer.state.turned"]
    assert torch.equal(whole(optimizer.state[model.turned]["exp_avg"]), whole(other))
    assert torch.equal(whole(optimizer.state[model.pair]["exp_avg"]), whole(pair))


def _loads(folder: Path) -> list[tuple[torch.dtype, dict[str, Tensor]]]:
    """Cut on one dim or the other, in fp32 and cast."""
    every = []
    for dim, dtype in itertools.product((0, 1), (torch.float32, torch.bfloat16)):
        model = Joined().to(dtype)
        _shard(model, dim)
        cast = dtype != torch.float32
        found = checkpoint.load(folder, model, names=names, transforms=TRANSFORMS, cast=cast)
        assert not found.left
        state = model.state_dict().items()
        every.append((dtype, {name: whole(value) for name, value in state}))
    return every


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("saved") / "run"
    return folder, workers.run_on_ranks(2, _saves, folder)[0]


@pytest.mark.parametrize("size", [0, 1, 2, 4])
def test_as_of_whole_tensors(saved: tuple[Path, dict[str, Tensor]], size: int) -> None:
    """In one process (0), and on ranks, some of which have no row of a tensor."""
    folder, before = saved
    every = workers.run_on_ranks(size, _loads, folder) if size else [_loads(folder)]
    table = _padded(before["table.weight"])
    expected = {
        "turned": before["turned"].t(),
        "qkv.weight": torch.cat([before[f"{each}.weight"] for each in "qkv"]),
        "qkv.bias": torch.cat([before[f"{each}.bias"] for each in "qkv"]),
        "table.weight": table,
        "head.weight": table,
        "gate": before["pair"][:WIDTH],
        "up": before["pair"][WIDTH:],
        "scale": before["scale"] * 3,
        "new": torch.ones(2),
    }
    for dtype, found in itertools.chain(*every):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value.to(dtype)), (name, dtype)


@workers.ranks(2)
def test_what_is_refused(tmp_path: Path) -> None:
    """One sentence that names the parameter, on all ranks; nothing is changed."""
    _saves(folder := tmp_path / "run")
    model = Joined()
    _shard(model, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrong: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (raises("ckpt-transform-shape"), {"turned": lambda it: it}, "turned"),
        (raises("ckpt-transform-shape"), {"turned": lambda it: None}, "turned"),
        (raises("ckpt-transform-raised"), {"turned": lambda it: it.view(1)}, "turned"),
        (raises("ckpt-transform-unused"), {"trned": Tensor.t}, "trned"),
        (raises("ckpt-differs"), {"gate": lambda pair: pair[:WIDTH].double()}, "model.gate"),
    )
    for refusal, transforms, said in wrong:
        with refusal as caught:
            checkpoint.load(
                *(folder, model),
                names=names,
                strict=said.startswith("model."),
                transforms={**TRANSFORMS, **transforms},
            )
        assert f"'{said}'" in str(caught.value)
    alone = {**TRANSFORMS, "turned": (lambda it: it) if dist.get_rank() else Tensor.t}
    with raises("ckpt-transform-shape"):  # on rank 1 alone
        checkpoint.load(folder, model, names=names, transforms=alone)
    without = {name: each for name, each in TRANSFORMS.items() if name != "qkv.*"}
    with raises("ckpt-transform-several"):
        checkpoint.load(folder, model, names=names, transforms=without)
    with raises("ckpt-load-ranks-differ"):
        checkpoint.load(
            *(folder, model),
            names=names,
            transforms=without if dist.get_rank() else TRANSFORMS,
        )
    other = {**TRANSFORMS, "head.weight": lambda it: _padded(it) + 1}
    with raises("ckpt-differs") as caught:
        checkpoint.load(folder, model, names=names, transforms=other)
    assert "with several values for one ['model.head.weight']" in str(caught.value)
    with raises("ckpt-differs") as caught:
        checkpoint.load(folder, model, optimizer, names=names, transforms=TRANSFORMS)
    assert "'optimizer.state.qkv.weight'" in str(caught.value)
    for name, value in model.state_dict().items():
        local = value.to_local() if isinstance(value, DTensor) else value
        kept = before[name]
        assert torch.equal(local, kept.to_local() if isinstance(kept, DTensor) else kept), name


def test_states_of_what_is_made_are_left(tmp_path: Path) -> None:
    workers.run_on_ranks(2, _resumes, tmp_path)
