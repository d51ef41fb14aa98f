"""Checkpoints of ranks: bits between meshes, and between kinds; torch's own FSDP1 and FSDP2 too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from fsdp2 import checkpoint, fully_shard
from fsdp2.checkpoint.converting import kind_of
from tests.checkpoint.shared import assert_same, everything, spread, train
from tests.common.errors import raises
from tests.common.workers import run_on_ranks

pytestmark = pytest.mark.ranks

DIM = 6


class Net(nn.Module):
    """Dims that two, three and four ranks divide unevenly; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM + 4)
        self.down = nn.Linear(DIM + 4, DIM)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()) * self.scale.mean()


def built(how: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model sharded in one of the ways, or ("torch") by torch's FSDP2."""
    torch.manual_seed(seed)
    model = Net()
    spread(model, how, "up", "down", torchs.fully_shard if how == "torch" else fully_shard)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


# ---- between meshes


def _saves(folder: Path, how: str) -> dict[str, Tensor]:
    model, optimizer = built(how)
    train(model, optimizer, seed=0)
    checkpoint.save(folder, model, optimizer, step=1)
    return everything(model, optimizer)


def _loads(folder: Path, how: str) -> dict[str, Tensor]:
    model, optimizer = built(how, seed=3)
    found = checkpoint.load(folder, model, optimizer, verify=True)
    assert not found.left
    return everything(model, optimizer)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("of_four") / "run"
    return folder, run_on_ranks(4, _saves, folder, "sharded")[0]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        *((1, "sharded"), (2, "sharded"), (3, "sharded"), (4, "sharded")),
        *((4, "hybrid"), (4, "tp"), (4, "dims"), (4, "zero1"), (3, "dims")),
    ],
)
def test_what_four_ranks_saved(
    of_four: tuple[Path, dict[str, Tensor]], ranks: int, how: str
) -> None:
    folder, expected = of_four
    for found in run_on_ranks(ranks, _loads, folder, how):
        assert_same(found, expected)


@pytest.mark.extended
@pytest.mark.parametrize("how", ["hybrid", "tp", "dims", "zero1"])
def test_saved_otherwise(how: str, tmp_path: Path) -> None:
    """And loaded by one process, without a process group; and converted."""
    expected = run_on_ranks(4, _saves, tmp_path / "run", how)[0]
    assert_same(_loads(tmp_path / "run", "whole"), expected)
    for kind in ("dcp", "torch", "fsdp1"):
        checkpoint.convert(tmp_path / "run", tmp_path / kind, to_kind=kind)
        checkpoint.convert(tmp_path / kind, tmp_path / f"{kind}-run", to_kind="steps", step=1)
        assert_same(_loads(tmp_path / f"{kind}-run", "whole"), expected)


def test_a_step_of_two_ranks_is_converted(tmp_path: Path) -> None:
    """Cut on the last dim: pieces are put together; and two ranks load what comes of it."""
    expected = run_on_ranks(2, _saves, tmp_path / "run", "dims")[0]
    checkpoint.convert(tmp_path / "run", tmp_path / "one.pt")
    model, optimizer = built("whole", seed=3)
    content = torch.load(tmp_path / "one.pt", weights_only=True)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    assert_same(everything(model, optimizer), expected)
    checkpoint.convert(tmp_path / "one.pt", tmp_path / "back", to_kind="steps", step=1)
    for found in run_on_ranks(2, _loads, tmp_path / "back", "sharded"):
        assert_same(found, expected)


# ---- torch's own


def _torchs_fsdp2(folder: Path) -> dict[str, Tensor]:
    """Saves by DCP, one full file, and a file of torch.save per rank, which is no source."""
    model, optimizer = built("torch")
    train(model, optimizer, seed=0)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    names = ("model", "optimizer")
    full = dict(zip(names, get_state_dict(model, optimizer, options=options), strict=True))
    state = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    if dist.get_rank() == 0:
        torch.save(full, folder / "full.pt")
    dcp.save(state, checkpoint_id=folder / "dcp")
    torch.save(state, folder / f"rank{dist.get_rank()}.pt")
    return everything(model, optimizer)


def _torchs_fsdp2_loads(folder: Path) -> dict[str, Tensor]:
    model, optimizer = built("torch", seed=3)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return everything(model, optimizer)


def _fsdp1(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    policy = torchs.wrap.ModuleWrapPolicy({nn.Linear})
    model = torchs.FullyShardedDataParallel(
        Net(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


# Not offloaded: where memory is the CPU's already, torch's would use its own again.
_TYPES: dict[str, Any] = {
    "full": (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(),
        FullOptimStateDictConfig(offload_to_cpu=False),
    ),
    "sharded": (
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ),
}


def _fsdp1_state(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> dict[str, Any]:
    with torchs.FullyShardedDataParallel.state_dict_type(model, *_TYPES[kind]):
        return {
            "model": model.state_dict(),
            "optimizer": torchs.FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }


def _fsdp1_whole(state: dict[str, Any]) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in state["model"].items()}
    for name, kept in state["optimizer"]["state"].items():
        found |= {f"{name}:{key}": value.clone() for key, value in kept.items()}
    return found


def _fsdp1_saves(folder: Path) -> dict[str, Tensor]:
    model, optimizer = _fsdp1(0)
    train(model, optimizer, seed=0)
    full, sharded = (_fsdp1_state(model, optimizer, kind) for kind in ("full", "sharded"))
    dcp.save(sharded, checkpoint_id=folder / "dcp")
    if dist.get_rank() == 0:
        torch.save(full, folder / "full.pt")
    return _fsdp1_whole(full)


def _fsdp1_loads(folder: Path, kind: str) -> dict[str, Tensor]:
    """A full file, or a folder of DCP with sharded state dicts."""
    model, optimizer = _fsdp1(3)
    train(model, optimizer, seed=0)
    api = torchs.FullyShardedDataParallel
    with api.state_dict_type(model, *_TYPES[kind]):
        if kind == "full":
            state = torch.load(folder, weights_only=True)
        else:
            state = _fsdp1_state(model, optimizer, kind)
            dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        flat = api.optim_state_dict_to_load(model, optimizer, state["optimizer"])
        optimizer.load_state_dict(flat)
    return _fsdp1_whole(_fsdp1_state(model, optimizer, "full"))


def _becomes_a_step_and_back(
    folder: Path, kind: str, saves: Any, to_kind: str, loads: Any, *how: str
) -> None:
    """State dicts of torch's become steps, and steps its state dicts; optimizer included."""
    expected = run_on_ranks(2, saves, folder)[0]
    assert kind_of(folder / kind) == {"full.pt": "torch"}.get(kind, kind)
    checkpoint.convert(folder / kind, folder / "run", to_kind="steps", step=1)
    for ranks in (2, 3):
        for found in run_on_ranks(ranks, _loads, folder / "run", "sharded"):
            assert_same(found, expected)
    checkpoint.convert(folder / "run", folder / "back", to_kind=to_kind)
    for found in run_on_ranks(2, loads, folder / "back", *how):
        assert_same(found, expected)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["dcp", "full.pt"])
def test_torchs_fsdp2(kind: str, tmp_path: Path) -> None:
    _becomes_a_step_and_back(tmp_path, kind, _torchs_fsdp2, "dcp", _torchs_fsdp2_loads)
    with raises("ckpt-file-shards"):
        checkpoint.convert(tmp_path / "rank1.pt", tmp_path / "run", step=2)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "to_kind", "way"), [("full.pt", "fsdp1", "full"), ("dcp", "dcp", "sharded")]
)
def test_torchs_fsdp1(kind: str, to_kind: str, way: str, tmp_path: Path) -> None:
    _becomes_a_step_and_back(tmp_path, kind, _fsdp1_saves, to_kind, _fsdp1_loads, way)
