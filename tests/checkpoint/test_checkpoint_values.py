"""What ranks have each their own, or a part of: extra states, DTensors, random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import checkpoint, fully_shard
from tests.checkpoint.shared import whole
from tests.common import workers
from tests.common.errors import raises

pytestmark = pytest.mark.ranks


class Counts(nn.Module):
    """Has an extra state of several types, which a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.seen: dict[Any, Any] = {"count": 0, "scale": torch.ones(2), "at": (1, {}), 7: None}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["count"] += 1
        self.seen["scale"] = self.seen["scale"] * 2
        return self.linear(x)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def made(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(Counts(), Counts())
    model[1].linear = nn.Linear(5, 3)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _saves(folder: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    model = made()
    model(torch.ones(2, 3))
    model[1].seen["count"] += 10 * rank  # rank 0's is saved
    ema = {name: value.detach() * 2 for name, value in model.state_dict().items() if "li" in name}
    checkpoint.save(
        folder,
        model,
        step=1,
        extra={"ema": ema, "rank": rank},
        rank_extra={"rank": rank, "drawn": torch.full((rank + 1,), rank)},
        states={"ema": ema},
        rng=True,
    )
    return {name: whole(value) for name, value in ema.items()}


def _loads(folder: Path) -> tuple[dict[str, Tensor], Any, Any, Any]:
    model = made(seed=1)
    ema = {n: torch.zeros_like(v.detach()) for n, v in model.state_dict().items() if "li" in n}
    found = checkpoint.load(folder, model, states={"ema": ema}, rng="if_saved")
    for name, value in ema.items():
        assert torch.equal(whole(value), found.extra["ema"][name])
        assert type(found.extra["ema"][name]) is Tensor
    assert found.extra["rank"] == 0
    assert [model[at].seen["count"] for at in (0, 1)] == [1, 1]
    assert torch.equal(model[0].seen["scale"], torch.full((2,), 2.0))
    assert model[0].seen["at"] == (1, {})
    assert 7 in model[0].seen
    others = [checkpoint.read_extra(folder, rank=rank)["rank"] for rank in (0, 1)]
    assert others == [0, 1]
    return found.extra["ema"], found.rank_extra, found.left, torch.rand(2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("values") / "run"
    return folder, workers.run_on_ranks(2, _saves, folder)[0]


@pytest.mark.parametrize("size", [0, 1, 2, 4])
def test_ranks_that_are_more_or_fewer(saved: tuple[Path, dict[str, Tensor]], size: int) -> None:
    """DTensors come back whole, and each rank's own where there was such a rank.

    On ranks, and (0) in a process without any.
    """
    folder, expected = saved
    every = workers.run_on_ranks(size, _loads, folder) if size else [_loads(folder)]
    for rank, (ema, own, left, _) in enumerate(every):
        assert ema.keys() == expected.keys()
        assert all(torch.equal(ema[name], value) for name, value in expected.items())
        assert left.missing == [f"rng.{other}.cpu" for other in range(2, size)]
        if rank < 2:
            assert own["rank"] == rank
            assert torch.equal(own["drawn"], torch.full((rank + 1,), rank))
        else:
            assert own is None


@workers.ranks(2)
def test_dcp_alone_restores_extra_states(tmp_path: Path) -> None:
    model = made()
    model(torch.ones(2, 3))
    place = checkpoint.save(tmp_path, model, step=1)
    other = made(seed=1)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=place)
    set_model_state_dict(other, state["model"])
    assert other[0].seen["count"] == 1
    assert torch.equal(other[0].seen["scale"], torch.full((2,), 2.0))


@workers.ranks(2)
def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    """Of DTensors each rank has a part, so that all must have the same ones."""
    model, rank = made(), dist.get_rank()
    values = list(model.state_dict().values())
    parts = [value for value in values if isinstance(value, DTensor)]
    with raises("ckpt-ranks-differ"):
        checkpoint.save(tmp_path, model, step=1, extra={"a": parts[rank]})
    with raises("ckpt-ranks-differ"):
        checkpoint.save(tmp_path, model, step=1, extra={"a": parts[0]} if rank else None)
    with raises("ckpt-extra"):
        checkpoint.save(tmp_path, model, step=1, rank_extra={"a": parts[0]})
    checkpoint.save(tmp_path, model, step=1)
    with raises("ckpt-load-ranks-differ"):
        checkpoint.load(tmp_path, model, cast=bool(rank))
    assert checkpoint.steps(tmp_path) == [1]


@workers.ranks(2)
def test_what_is_no_folder_of_steps(tmp_path: Path) -> None:
    """The path of a step is taken; of what else is there, all ranks say how it is loaded."""
    model = made()
    path = checkpoint.save(tmp_path / "run", model, step=1, extra=[1])
    checkpoint.save(tmp_path / "run", model, step=2)
    for given in (path, f"{path}/"):
        found = checkpoint.load(given, model)
        assert (found.step, found.extra) == (1, [1])
        assert checkpoint.load(given, model, step=1).step == 1
        assert checkpoint.read_extra(given) == [1]
    with raises("ckpt-none"):
        checkpoint.load(path, model, step=2)
    state = {"model": get_model_state_dict(model)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    if dist.get_rank() == 0:
        torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    dist.barrier()
    for name, kind in (("dcp", "dcp"), ("model.pt", "torch")):
        with raises("ckpt-other-kind") as caught:
            checkpoint.load(tmp_path / name, model)
        assert f"kind '{kind}'" in str(caught.value)
    with raises("ckpt-none"):
        checkpoint.load(tmp_path / "nothing", model)
    if dist.get_rank() == 0:
        checkpoint.convert(tmp_path / "dcp", tmp_path / "steps", to_kind="steps", step=0)
    dist.barrier()
    assert not checkpoint.load(tmp_path / "steps", made(seed=1)).left
