"""Checkpoints over a process group: two jobs in one, a group that is a part, and who is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import checkpoint
from tests.checkpoint.shared import assert_same, everything, save_by, train
from tests.checkpoint.test_checkpoints import made
from tests.common import workers
from tests.common.errors import raises
from tests.common.workers import ranks


@pytest.fixture(autouse=True, scope="module")
def _its_ranks_end() -> Iterator[None]:
    """They are in unequal numbers of groups, with which no mesh of some ranks can be made."""
    yield
    if 4 in workers._pools:
        workers._pools[4].close(ask=True)


def _trained(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = made(seed, mesh=mesh)
    train(model, optimizer, seed=seed, steps=2)
    return model, optimizer


def _load(folder: Path, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Into a model that was made of other numbers."""
    model, optimizer = made(mesh=mesh, seed=50)
    found = checkpoint.load(folder, model, optimizer, rng=True, process_group=mesh.get_group())
    assert found.rank_extra == mesh.get_local_rank()
    return everything(model, optimizer)


@ranks(4)
@pytest.mark.parametrize("call", ["save", "async_save"])
def test_two_groups_save_and_load_at_the_same_time(tmp_path: Path, call: str) -> None:
    """Ranks 0 and 1 one model, ranks 2 and 3 another; nobody waits for the other group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))["shard"]
    group, number = mesh.get_group(), dist.get_rank() // 2
    model, optimizer = _trained(mesh, seed=number)
    run = tmp_path / f"run-{number}"
    for step in range(1, 4 + number):  # the second group saves once more
        train(model, optimizer, seed=step, steps=1)
        save_by(
            *(call, run, model, optimizer),
            step=step,
            keep=2,
            rng=True,
            rank_extra=mesh.get_local_rank(),
            process_group=group,
        )
    assert checkpoint.steps(run) == [2 + number, 3 + number]
    assert sorted(path.name for path in (run / f"step-{3 + number:08}").glob("*.distcp")) == [
        "__0_0.distcp",
        "__1_0.distcp",
    ]
    assert checkpoint.verify(run) == []
    assert_same(_load(run, mesh), everything(model, optimizer))


@ranks(4)
def test_ranks_that_have_made_other_numbers_of_groups(tmp_path: Path) -> None:
    """A group of ranks 1 to 3, whose first rank is 1; then all four save, then the three again."""
    pair = dist.new_group([1, 2])
    group = dist.new_group([1, 2, 3])
    if dist.get_rank():
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
        model, optimizer = _trained(mesh, seed=1)
        checkpoint.save(tmp_path / "three", model, optimizer, step=1, process_group=group)
        expected = everything(model, optimizer)
    whole, of_all = _trained(init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)), seed=2)
    checkpoint.save(tmp_path / "four", whole, of_all, step=1)
    if dist.get_rank():
        checkpoint.save(tmp_path / "three", model, optimizer, step=2, process_group=group)
        train(model, optimizer, seed=3, steps=1)
        checkpoint.load(tmp_path / "three", model, optimizer, process_group=group)
        assert_same(everything(model, optimizer), expected)
        checkpoint.export(tmp_path / "out", model, process_group=group)
        train(model, optimizer, seed=4, steps=1)
        checkpoint.load_pretrained(model, tmp_path / "out", process_group=group)
        for name, value in everything(model, optimizer).items():
            assert ":" in name or torch.equal(value, expected[name]), name
    checkpoint.load(tmp_path / "four", whole, of_all)
    del pair


@ranks(4)
def test_one_replica_saves_for_all(tmp_path: Path) -> None:
    """What the ranks of one replica write is all; ranks that have a part of it are refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = _trained(mesh, seed=1)
    expected = everything(model, optimizer)
    replica, copies = mesh["shard"].get_group(), mesh["replicate"].get_group()
    if dist.get_rank() < 2:
        checkpoint.save(tmp_path, model, optimizer, step=1, process_group=replica)
    with raises("ckpt-parts"):
        checkpoint.save(
            tmp_path / f"part-{dist.get_rank() % 2}", model, step=1, process_group=copies
        )
    assert not list(tmp_path.glob("part-*/step-*"))
    dist.barrier()
    other, its = made(mesh=mesh, seed=5)
    checkpoint.load(tmp_path, other, its)
    assert_same(everything(other, its), expected)
    other, its = made(mesh=mesh, seed=6)
    checkpoint.load(tmp_path, other, its, process_group=replica)  # each replica by itself
    assert_same(everything(other, its), expected)


@ranks(2)
def test_one_rank_alone(tmp_path: Path) -> None:
    """A group of one rank exchanges with nobody: the other one does something else meanwhile."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    if dist.get_rank() == 1:
        model = nn.Linear(2, 2)
        expected = model.weight.detach().clone()
        checkpoint.async_save(tmp_path, model, step=1, process_group=groups[1]).result()
        nn.init.zeros_(model.weight)
        assert checkpoint.load(tmp_path, model, process_group=groups[1]).step == 1
        assert torch.equal(model.weight, expected)


@ranks(4)
def test_ranks_outside_are_refused(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    model, _ = made(mesh=mesh, seed=1)
    group = dist.new_group([0, 2])
    out, run = tmp_path / "out", tmp_path / "run"
    calls = (
        lambda group: checkpoint.save(run, model, step=1, process_group=group),
        lambda group: checkpoint.async_save(run, model, step=1, process_group=group),
        lambda group: checkpoint.load(run, model, process_group=group),
        lambda group: checkpoint.export(out, model, process_group=group),
        lambda group: checkpoint.load_pretrained(model, out, process_group=group),
    )
    before = model.state_dict()["first.weight"].full_tensor()
    for call in calls:
        if dist.get_rank() % 2:
            with raises("ckpt-not-in-group"):
                call(group)
        with raises("ckpt-group-kind"):
            call(mesh)
    if dist.get_rank() % 2 == 0:
        with raises("ckpt-parts"):
            calls[0](group)
        dist.destroy_process_group(group)
        with raises("ckpt-not-in-group"):
            calls[2](group)
    assert not list(tmp_path.glob("*/step-*"))
    assert torch.equal(before, model.state_dict()["first.weight"].full_tensor())


@ranks(4)
def test_replicas_in_another_order(tmp_path: Path) -> None:
    """Only the ranks of a shard axis must be ascending."""
    names = ("replicate", "shard")
    model, optimizer = _trained(DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=names), seed=1)
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    assert_same(everything(model, optimizer), everything(*_trained(line, seed=1)))
    checkpoint.save(tmp_path / "run", model, optimizer, step=1, rng=True)
    other, its = made(mesh=line, seed=5)
    checkpoint.load(tmp_path / "run", other, its)
    assert_same(everything(other, its), everything(model, optimizer))


@ranks(2)
@pytest.mark.parametrize("call", ["save", "async_save"])
def test_buffers_that_differ_between_ranks(tmp_path: Path, call: str) -> None:
    """All come from the first rank, so that they belong together; and that is said, once."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model, optimizer = made(mesh=mesh, seed=0)
    train(model, optimizer, seed=dist.get_rank(), steps=1)
    model.register_buffer("late", torch.tensor([dist.get_rank() > 0]), persistent=False)
    first = {name: value.clone() for name, value in model.named_buffers()}
    for value in first.values():
        dist.broadcast(value, 0)
    for step, others in enumerate([", and so do 2 more", None]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save_by(call, tmp_path, model, optimizer, step=step, buffers=True)
        texts = [str(each.message) for each in caught if "buffer" in str(each.message)]
        expected = f"'norm.running_mean' of rank 0, which differs on rank 1{others}; make buffers"
        assert len(texts) == (1 if others and dist.get_rank() == 0 else 0)
        assert all(expected in text for text in texts)
        checkpoint.load(tmp_path, model, optimizer, buffers=True)
        for name, value in model.named_buffers():
            assert torch.equal(value, first[name])
