"""Checkpoints behind URLs, of several ranks: the bits of a disk's, and what all refuse alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from fsdp2 import checkpoint
from fsdp2.checkpoint import remote, saving
from tests.checkpoint import object_store
from tests.checkpoint.shared import EXTRA, assert_same, everything, save_by, train
from tests.checkpoint.test_checkpoints import made
from tests.common import workers
from tests.common.errors import raises

pytestmark = pytest.mark.ranks


def _saves(folder: Path) -> dict[str, Tensor]:
    """On a disk and on the store: the same files."""
    url = f"{object_store.url_of(folder)}/run"
    model, optimizer = made()
    train(model, optimizer, seed=1, steps=2)
    on_disk = checkpoint.save(
        folder.parent / "run", model, optimizer, step=2, extra=EXTRA, rng=True
    )
    under_way = checkpoint.async_save(url, model, optimizer, step=2, extra=EXTRA, rng=True)
    train(model, optimizer, seed=2, steps=1)
    on_store = under_way.result()
    names = [f"__{rank}_0.distcp" for rank in range(dist.get_world_size())]
    for name in names:
        assert (on_store / name).read_bytes() == (on_disk / name).read_bytes()
    found = json.loads((Path(on_disk) / "manifest.json").read_text())["files"]
    there = object_store.ObjectStore().cat_file(
        f"{url.partition('//')[2]}/step-00000002/manifest.json"
    )
    assert {k.rpartition("/")[2]: v for k, v in json.loads(there)["files"].items()} == found
    assert {*names} <= {*found}
    _loads(folder)
    return everything(model, optimizer)


def _loads(folder: Path) -> dict[str, Tensor]:
    """What was saved, on however many ranks, and a step on."""
    model, optimizer = made(seed=5)
    loaded = checkpoint.load(f"{object_store.url_of(folder)}/run", model, optimizer, verify=True)
    assert loaded.step == 2
    train(model, optimizer, seed=2, steps=1)
    return everything(model, optimizer)


def test_bits_between_numbers_of_ranks(tmp_path: Path) -> None:
    """Saved on two, loaded on two and on one: training goes on with the same bits."""
    (tmp_path / "objects").mkdir()
    expected, _ = workers.run_on_ranks(2, _saves, tmp_path / "objects")
    for found in workers.run_on_ranks(2, _loads, tmp_path / "objects"):
        assert_same(found, expected)
    assert checkpoint.verify(f"{object_store.url_of(tmp_path / 'objects')}/run") == []
    model, optimizer = made(seed=5)
    other, other_optimizer = made(seed=6)
    checkpoint.load(f"{object_store.url_of(tmp_path / 'objects')}/run", model, optimizer)
    checkpoint.load(tmp_path / "run", other, other_optimizer)
    assert_same(everything(model, optimizer), everything(other, other_optimizer))


@pytest.mark.parametrize("call", ["save", "async_save"])
@workers.ranks(2)
def test_a_rank_whose_put_fails(tmp_path: Path, call: str) -> None:
    """All raise the same sentence, complete steps are as they were, and saving goes on."""
    url = f"{object_store.url_of(tmp_path)}/run"
    rank = dist.get_rank()
    model, optimizer = made()
    train(model, optimizer, seed=0, steps=1)
    checkpoint.save(url, model, optimizer, step=1)
    train(model, optimizer, seed=1, steps=1)

    for failing, part in ((0, "__0_"), (1, "__1_"), (0, ".metadata"), (0, "manifest.json")):

        def fails(kind: str, path: str, of: tuple[int, str] = (failing, part)) -> bool:
            return kind == "put" and rank == of[0] and of[1] in path

        with object_store.refusing(fails), raises("ckpt-rank-failed") as caught:
            save_by(call, url, model, optimizer, step=2, keep=2)
        sentences: list[Any] = [None, None]
        dist.all_gather_object(sentences, str(caught.value))
        assert len({*sentences}) == 1
        assert f"on rank {failing} (PermissionError: Access Denied)" in sentences[0]
        assert checkpoint.steps(url) == [1]
        assert checkpoint.verify(url) == []
        dist.barrier()
        if rank == 0:
            checkpoint.remove(url)
            assert checkpoint.unfinished(url) == []
        dist.barrier()
    save_by(call, url, model, optimizer, step=2, keep=2)
    assert checkpoint.steps(url) == [1, 2]
    assert checkpoint.verify(url) == []


@workers.ranks(2)
def test_refused_on_one_rank_alone(tmp_path: Path) -> None:
    """A package that one rank does not have: all say so, in both calls."""
    url = f"{object_store.url_of(tmp_path)}/run"
    model, optimizer = made()
    checkpoint.save(url, model, optimizer, step=1)

    def reach(url: str) -> Any:
        if dist.get_rank() == 1:
            return remote_reach("nowhere://bucket")
        return remote_reach(url)

    remote_reach = remote.reach
    with mock.patch.object(remote, "reach", reach):
        with raises("ckpt-not-reached"):
            checkpoint.save(url, model, optimizer, step=2)
        with raises("ckpt-not-reached"):
            checkpoint.load(url, model, optimizer)
    dist.barrier()
    assert checkpoint.steps(url) == [1]
    assert checkpoint.unfinished(url) == []


@workers.ranks(2)
def test_two_tries_do_not_mix(tmp_path: Path) -> None:
    """What a killed job has left of a step stays beside it, named, until it is removed."""
    url = f"{object_store.url_of(tmp_path)}/run"
    model, optimizer = made()
    checkpoint.save(url, model, optimizer, step=1)
    if dist.get_rank() == 0:
        saving._process._plans.clear()  # rank 1 writes by its plan before it hears of another
    checkpoint.save(url, model, optimizer, step=3)
    assert checkpoint.unfinished(url) == []
    dist.barrier()
    with (
        object_store.refusing(lambda kind, _: kind == "delete"),
        mock.patch.object(remote.RemoteAttempt, "commit", side_effect=OSError("killed")),
        raises("ckpt-rank-failed"),
    ):
        checkpoint.save(url, model, optimizer, step=2)
    assert checkpoint.unfinished(url) == ["step-00000002"]
    train(model, optimizer, seed=1, steps=1)
    checkpoint.save(url, model, optimizer, step=2)
    (left,) = checkpoint.unfinished(url)
    assert left.startswith("step-00000002/")
    dist.barrier()
    if dist.get_rank() == 0:
        assert checkpoint.remove(url) == [left]
    dist.barrier()
    assert checkpoint.verify(url) == checkpoint.unfinished(url) == []
    other, other_optimizer = made(seed=3)
    checkpoint.load(url, other, other_optimizer, step=2)
    assert_same(everything(other, other_optimizer), everything(model, optimizer))
