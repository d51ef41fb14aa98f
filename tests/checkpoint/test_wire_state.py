"""Residuals of error feedback are state: a run that goes on is the run that was never stopped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from fsdp2 import checkpoint
from tests.common import meshes, models, parity
from tests.common.workers import ranks

HALF = 2  # steps before the checkpoint, and after it
FED = {"reduce": "int4", "rotate": True, "feedback": True}
BOTH = {"gather": "int4", "differences": True, **FED}


def make(
    seed: int = 0,
    mesh: DeviceMesh | None = None,
    mp_policy: fsdp2.MixedPrecisionPolicy = fsdp2.MixedPrecisionPolicy(),  # noqa: B008  # frozen
    **formats: Any,
) -> nn.Module:
    model = models.seeded(models.MLP, seed=seed)
    arguments: dict[str, Any] = {"mp_policy": mp_policy}
    arguments |= {} if mesh is None else {"mesh": mesh}
    for layer in model.layers:
        fsdp2.fully_shard(layer, **arguments)
    fsdp2.fully_shard(model, **arguments)
    model.set_wire_format(**(formats or FED), exact_below=20)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    width = next(iter(model.parameters())).shape[1]
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(4, width, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [param.full_tensor().detach().clone() for param in model.parameters()]


def kept(model: nn.Module) -> dict[str, Tensor]:
    state = fsdp2.checkpoint.WireState(model).state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    return {name: value.to_local().clone() for name, value in state.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    if first.keys() != second.keys():
        return False
    return all(first[n].allclose(second[n], 0, 0, equal_nan=True) for n in first)


def uninterrupted(
    **formats: Any,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = make(**formats)
    train(model, parity.adamw(model.parameters()), range(2 * HALF))
    return weights(model), kept(model)


def goes_on(
    folder: Path,
    made: Callable[[int], nn.Module],
    before: int = HALF,
    steps: Callable[..., None] = train,
    by: str = "save",
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A run that is saved on its way, and one that takes it up, end alike; what was kept there."""
    model, other = made(0), made(1)
    optimizer, its = parity.adamw(model.parameters()), parity.adamw(other.parameters())
    steps(model, optimizer, range(before))
    saved = kept(model)
    assert saved
    if by == "dcp":
        dcp.save(_all_of(model, optimizer), checkpoint_id=folder)
    else:
        saving = getattr(checkpoint, by)(folder, model, optimizer, step=before)
    steps(model, optimizer, range(before, 2 * HALF))  # which writes other residuals
    if by == "async_save":
        saving.result()
    if by == "dcp":
        state = _all_of(other, its)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state["model"])
        set_optimizer_state_dict(other, its, state["optimizer"])
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint.load(folder, other, its)
    assert same(kept(other), saved)
    steps(other, its, range(before, 2 * HALF))
    assert all(map(torch.equal, weights(other), weights(model)))
    assert same(kept(other), kept(model))
    return model, saved


def _all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "wire": fsdp2.checkpoint.WireState(model),
    }


@ranks(2)
@pytest.mark.parametrize("formats", [FED, BOTH], ids=["feedback", "and differences"])
@pytest.mark.parametrize("by", ["save", "async_save", "dcp"])
def test_a_run_that_goes_on_is_one_that_was_not_stopped(
    tmp_path: Path, by: str, formats: dict[str, Any]
) -> None:
    expected, left = uninterrupted(**formats)
    model, saved = goes_on(tmp_path, lambda seed: make(seed, **formats), by=by)
    assert all(value.any() for value in saved.values())
    assert all(map(torch.equal, weights(model), expected))
    assert same(kept(model), left)


@ranks(2)
def test_a_run_that_goes_on_before_a_gather(tmp_path: Path) -> None:
    """Weights have more bits than a gather brings: an exact one and a difference are not one."""
    half = fsdp2.MixedPrecisionPolicy(torch.bfloat16)
    goes_on(tmp_path, lambda seed: make(seed, **BOTH, mp_policy=half), before=0)


@ranks(2)
def test_padding_of_a_message_is_nobodys(tmp_path: Path) -> None:
    """A rotation spreads rounding errors into the tail of a message, which no parameter owns."""

    def made(seed: int) -> nn.Module:
        model = models.seeded(lambda: nn.Linear(5, 5, bias=False), seed=seed)  # 15 of 16 numbers
        fsdp2.fully_shard(model)
        model.set_wire_format(**FED, exact_below=20)
        return model

    goes_on(tmp_path, made)


@ranks(4)
def test_each_replica_has_its_own(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, _ = goes_on(tmp_path / "all", lambda seed: make(seed, mesh))
    replica = mesh["shard"].get_group()
    if dist.get_rank() < 2:  # which has no residuals of the other
        checkpoint.save(tmp_path / "one", model, step=1, process_group=replica)
    dist.barrier()
    assert _warned(lambda: checkpoint.load(tmp_path / "one", model))
    assert not any(value.any() for value in kept(model).values())


def _warned(load: Any) -> bool:
    """Whether the first rank warns that residuals begin at zero, and no other does."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        load()
    said = [str(each.message) for each in seen if "residuals" in str(each.message)]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    assert not any(found[1:])
    assert len(found[0]) <= 1
    return bool(found[0])


@ranks(4)
def test_of_other_ranks_and_settings_they_begin_at_zero(tmp_path: Path) -> None:
    """Two ranks' into four; a step without any; a model without feedback takes a step with them."""
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))["shard"]
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    model = make(mesh=pair)
    optimizer = parity.adamw(model.parameters())
    train(model, optimizer, range(1))
    if dist.get_rank() < 2:
        checkpoint.save(tmp_path / "two", model, step=1, process_group=pair.get_group())
    plain = make(mesh=whole, reduce="int4")
    checkpoint.save(tmp_path / "none", plain, step=1)
    dist.barrier()
    other = make(mesh=whole)
    for name in ("two", "none"):
        train(other, parity.adamw(other.parameters()), range(1))
        assert any(value.any() for value in kept(other).values())
        assert _warned(lambda name=name: checkpoint.load(tmp_path / name, other))
        assert not any(value.any() for value in kept(other).values())
    assert not _warned(lambda: checkpoint.load(tmp_path / "two", plain))
    state = fsdp2.checkpoint.WireState(model).state_dict()
    train(other, parity.adamw(other.parameters()), range(1))
    assert _warned(lambda: fsdp2.checkpoint.WireState(other).load_state_dict(state))
    assert not any(value.any() for value in kept(other).values())


@ranks(2)
def test_it_is_no_part_of_the_models_state(tmp_path: Path) -> None:
    model = make()
    train(model, parity.adamw(model.parameters()), range(1))
    names = [name for name, _ in model.named_parameters()]
    assert sorted(model.state_dict()) == sorted(names)
    assert sorted(get_model_state_dict(model)) == sorted(names)
    assert fsdp2.checkpoint.WireState(make(reduce="int4")).state_dict() == {}
    found = fsdp2.checkpoint.WireState(model).state_dict()
    assert all(name.removeprefix("residuals.") in names for name in found)
    for value in found.values():
        assert value.shape[:2] == (2, 2)
        assert value.dtype is torch.bfloat16


@ranks(2)
def test_other_kinds_of_checkpoints_leave_them_out(tmp_path: Path) -> None:
    model = make()
    train(model, parity.adamw(model.parameters()), range(1))
    checkpoint.save(tmp_path / "run", model, step=1)
    checkpoint.export(tmp_path / "out", model)
    if dist.get_rank() == 0:
        checkpoint.verify(tmp_path / "run", 1)
        checkpoint.convert(tmp_path / "run", tmp_path / "model.pt", to_kind="torch")
        found = torch.load(tmp_path / "model.pt")
        assert "wire" not in str(sorted(found))


@ranks(4)
def test_references_are_sharded_anew(tmp_path: Path) -> None:
    """Two ranks' into four: the same numbers, of which each rank has other rows."""
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))["shard"]
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    formats = {"gather": "int4", "differences": True}
    model = make(mesh=pair, **formats)
    train(model, parity.adamw(model.parameters()), range(3))
    if dist.get_rank() < 2:
        checkpoint.save(tmp_path, model, step=1, process_group=pair.get_group())
    dist.barrier()
    other = make(seed=1, mesh=whole, **formats)
    train(other, parity.adamw(other.parameters()), range(1))
    assert not _warned(lambda: checkpoint.load(tmp_path, other))
    saved, found = (fsdp2.checkpoint.WireState(each).state_dict() for each in (model, other))
    assert saved.keys() == found.keys()
    for name, param in other.named_parameters():
        if param.numel() >= 20:
            reference = found[f"references.{name}"].full_tensor()
            before = saved[f"references.{name}"].full_tensor()
            assert dist.get_rank() >= 2 or torch.equal(reference, before)  # those have not saved
            assert not torch.equal(reference, param.full_tensor())  # 4 bits have left out
    train(other, parity.adamw(other.parameters()), range(1))
    checkpoint.save(tmp_path, plain := make(mesh=whole), step=2)
    assert _warned(lambda: checkpoint.load(tmp_path, other))
    for name, param in plain.named_parameters():
        if param.numel() >= 20:  # the next gather is exact
            found = fsdp2.checkpoint.WireState(other).state_dict()[f"references.{name}"]
            assert found.full_tensor().isnan().all()


@ranks(2)
@pytest.mark.filterwarnings("ignore:the state has not all")
def test_a_reference_that_one_rank_lacks_is_dropped_by_all() -> None:
    formats = {"gather": "int4", "differences": True}
    model = make(**formats)
    train(model, parity.adamw(model.parameters()), range(1))
    state = fsdp2.checkpoint.WireState(model).state_dict()
    lost = next(iter(state))
    if dist.get_rank() == 1:
        del state[lost]
    fsdp2.checkpoint.WireState(model).load_state_dict(state)
    for name, value in kept(model).items():
        assert bool(value.isnan().all()) == (name == lost)
    train(model, parity.adamw(model.parameters()), range(1))


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


INSIDE: dict[str, Any] = {"gather": "int4", "differences": True, "level": "inside"}
HALF_PRECISION = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def on_levels(seed: int, inside: int, arguments: dict[str, Any], *formats: Any) -> nn.Module:
    """Uneven shapes, of which some ranks have no rows."""
    shape = (dist.get_world_size() // inside, inside)
    levels = fsdp2.Levels(meshes.mesh("between", "inside", shape=shape))
    model = models.seeded(
        lambda: nn.Sequential(nn.Linear(10, 9), nn.Linear(9, 5), nn.Linear(5, 10)), seed=seed
    )
    for layer in model:
        fsdp2.fully_shard(layer, mesh=levels, **arguments)
    fsdp2.fully_shard(model, mesh=levels, **arguments)
    for each in formats:
        model.set_wire_format(**each, exact_below=10)
    return model


@ranks(4)
@pytest.mark.parametrize(
    ("before", "arguments", "formats"),
    [
        (0, {}, [INSIDE]),
        (HALF, {}, [INSIDE]),
        (HALF, {}, [INSIDE | {"reduce": "int4", "rotate": True}]),
        (HALF, {}, [INSIDE, {"gather": "int8", "reduce": "int4", "level": "between"}]),
        (HALF, {"mp_policy": HALF_PRECISION}, [INSIDE]),
        (HALF, {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)}, [INSIDE]),
        (HALF, {"shard_placement_fn": last_dim}, [INSIDE]),
    ],
    ids=["nothing gathered", "steps", "rotation", "between", "bf16", "offload", "last dim"],
)
def test_references_of_two_levels(
    tmp_path: Path, before: int, arguments: dict[str, Any], formats: list[Any]
) -> None:
    goes_on(tmp_path, lambda seed: on_levels(seed, 2, arguments, *formats), before)


@ranks(4)
def test_a_load_by_some_ranks_of_two_levels_waits_for_no_others(tmp_path: Path) -> None:
    """They drop the references, because the rows of a node come from ranks of other nodes, too."""
    model = on_levels(0, 2, {}, INSIDE)
    train(model, parity.adamw(model.parameters()), range(1))
    checkpoint.save(tmp_path, model, step=1)
    node = meshes.mesh("between", "inside", shape=(2, 2))["inside"].get_group()
    if dist.get_rank() < 2:
        told = pytest.warns(match="gathered exactly") if not dist.get_rank() else nullcontext()
        with told:
            checkpoint.load(tmp_path, model, process_group=node)
    dist.barrier()


@ranks(4)
def test_references_of_two_levels_are_those_of_one(tmp_path: Path) -> None:
    """Levels to one level and back: the same numbers, of which each rank has other rows."""
    model = on_levels(0, 2, {}, INSIDE)
    train(model, parity.adamw(model.parameters()), range(3))
    checkpoint.save(tmp_path, model, step=1)
    found = [model]
    for inside in (4, 2):
        found.append(on_levels(1, inside, {}, INSIDE))
        assert not _warned(lambda: checkpoint.load(tmp_path, found[-1]))
        checkpoint.save(tmp_path, found[-1], step=1 + len(found))
    states = [fsdp2.checkpoint.WireState(each).state_dict() for each in found]
    for name, value in states[0].items():
        expected = value.full_tensor()
        assert all(torch.equal(state[name].full_tensor(), expected) for state in states)


@ranks(4)
def test_ranks_of_tensor_parallelism_have_their_own(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

    def parallel(seed: int) -> nn.Module:
        model = models.seeded(meshes.ParallelModel, seed=seed)
        meshes.parallelize(model, mesh["model"], "sequence")
        for block in model.blocks:
            fsdp2.fully_shard(block, mesh=mesh["data"])
        fsdp2.fully_shard(model, mesh=mesh["data"])
        model.set_wire_format(**BOTH, exact_below=100)
        return model

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("data"))
            ids = torch.randint(model.embed.num_embeddings, (2, 9), generator=generator)
            meshes.parallel_loss(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()

    goes_on(tmp_path, parallel, steps=steps)


@ranks(4)
def test_uneven_tensor_parallelism(tmp_path: Path) -> None:
    """One of its ranks has fewer rows, and so smaller pieces to send."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

    def made(seed: int) -> nn.Module:
        model = nn.Sequential(models.seeded(lambda: nn.Linear(12, 7, bias=False), seed=seed))
        parallelize_module(model, mesh["model"], {"0": ColwiseParallel(output_layouts=Shard(-1))})
        fsdp2.fully_shard(model, mesh=mesh["data"])
        model.set_wire_format(reduce="int4", feedback=True, exact_below=10)
        return model

    _, saved = goes_on(tmp_path, made)
    assert all(value.any() for value in saved.values())
