"""`reshard_after_forward` an int: between forward and backward, a smaller group holds the rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.common import meshes, models, parity
from tests.common.backends import packs
from tests.common.cases import in_turn
from tests.common.combinations import often
from tests.common.errors import raises
from tests.common.workers import ranks

EVEN = partial(
    models.seeded, partial(models.MLP, out=8)
)  # every rank's share is whole gloo blocks: one order


def _train(api: Any, build: Any, steps: Any, **arguments: Any) -> Any:
    return meshes.train_micro(parity.shard(api, build(), **arguments), steps)


def _assert_like_plain(
    ours: Any, build: Any, steps: Any, mixed: bool = False, where: str = "unsharded"
) -> None:
    tolerance = parity.REORDERED_MIXED if mixed else parity.FP32
    parity.assert_close(ours, meshes.train_plain(build(), steps, mixed=mixed), tolerance, where)


def _assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    found, expected = parity.full_grads(model), parity.full_grads(plain)
    parity.assert_close(found, expected, parity.FP32, "unsharded")


# -- training -------------------------------------------------------------------------------------


@ranks(4, extended=(2,))
@pytest.mark.parametrize("mixed", often([True, False]), ids=["mixed", "fp32"])
def test_every_divisor(mixed: bool) -> None:
    steps = meshes.micro_batches(models.DIM, 8, steps=2)
    size = dist.get_world_size()
    for divisor in [d for d in range(1, size + 1) if size % d == 0]:
        ours = meshes.like_torch(
            partial(_train, build=EVEN, steps=steps, reshard_after_forward=divisor, mixed=mixed)
        )
        _assert_like_plain(ours, EVEN, steps, mixed, f"by {divisor}")


@pytest.mark.extended
@ranks(8)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_eight_ranks(size: int, copies: int) -> None:
    steps = meshes.micro_batches(models.DIM, 8)
    mesh = meshes.hsdp_mesh(copies, 8 // copies)
    ours = meshes.like_torch(
        partial(_train, build=EVEN, steps=steps, reshard_after_forward=size, mesh=mesh),
        parity.REORDERED_FP32,
    )
    _assert_like_plain(ours, EVEN, steps)


@ranks(4)
def test_with_copies() -> None:
    steps = meshes.micro_batches(models.DIM, 8)
    arguments = {"mesh": meshes.hsdp_mesh(1, 4), "reshard_after_forward": 2}
    ours = meshes.like_torch(
        partial(_train, build=EVEN, steps=steps, **arguments), parity.REORDERED_FP32
    )
    _assert_like_plain(ours, EVEN, steps)


@ranks(4)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_uneven_rows(mixed: bool) -> None:
    """Rows that divide neither by the world nor by the smaller group."""
    build = partial(models.seeded, models.OddMLP)
    steps = meshes.micro_batches(models.DIM, 1)
    ours = _train(parity.OURS, build, steps, reshard_after_forward=2, mixed=mixed)
    _assert_like_plain(ours, build, steps, mixed)


def _columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


@ranks(4)
@pytest.mark.parametrize("width", [8, 7])
def test_other_shard_dims(width: int) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 3))
        for layer in (model[0], model[2]):
            layer.is_unit = True
        return model

    steps = meshes.micro_batches(width, 3)
    arguments = {"reshard_after_forward": 2, "shard_placement_fn": _columns}
    seeded = partial(models.seeded, build)
    _assert_like_plain(_train(parity.OURS, seeded, steps, **arguments), seeded, steps)


# -- what is registered in between ----------------------------------------------------------------


def _between(model: nn.Module) -> dict[str, Any]:
    return {
        name: (
            param.placements,
            param.device_mesh.mesh.tolist(),
            tuple(param.shape),
            param.to_local().detach().clone(),
        )
        for name, param in model.layers.named_parameters()
    }


@ranks(4)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_registered_parameters_between_forward_and_backward(mixed: bool) -> None:
    """DTensors over the smaller groups, as torch's: in the dtype that was gathered."""
    inputs, _ = parity.my_part(parity.regression_batches(models.DIM, 8, steps=1)[0])

    def scenario(api: Any) -> Any:
        model = parity.shard(
            api, EVEN(), reshard_after_forward=2, root={"reshard_after_forward": None}
        )
        loss = model(inputs).float().square().mean()
        between = _between(model)
        loss.backward()
        assert all(param.device_mesh == parity.world_mesh() for param in model.layers.parameters())
        return between

    def mixed_scenario(api: Any) -> Any:
        model = parity.shard(api, EVEN(), reshard_after_forward=2, mixed=True)
        loss = model(inputs).float().square().mean()
        between = _between(model)
        loss.backward()
        return between

    between = meshes.like_torch(mixed_scenario if mixed else scenario)
    rank = dist.get_rank()
    for (name, whole), found in zip(
        EVEN().layers.named_parameters(), between.values(), strict=True
    ):
        placements, ranks_, shape, local = found
        assert placements == (Replicate(), Shard(0)), name
        assert ranks_ == [[0, 1], [2, 3]]
        assert shape == whole.shape
        half = whole.detach().chunk(2)[rank % 2]
        parity.assert_equal(local, half.bfloat16() if mixed else half, name)


@packs
@ranks(4)
def test_backward_gathers_over_the_smaller_group() -> None:
    """Half a unit in, a whole one out; with all ranks a quarter comes in."""
    layers = nn.Sequential(*(nn.Linear(models.DIM, models.DIM) for _ in range(3)))
    for layer in layers:
        parity.OURS.fully_shard(layer, reshard_after_forward=2)
    parity.OURS.fully_shard(layers)
    numel = sum(param.numel() for param in layers.parameters())
    inputs = torch.ones(2, models.DIM)
    for _ in range(2):
        loss = layers(inputs).sum()
        with parity.CountCollectives() as count:
            loss.backward()
        assert count.all_gathers == 3
        assert count.elements["all_gather"] == numel * 3 // 2


# -- what may happen in between -------------------------------------------------------------------


@ranks(4)
def test_something_in_between() -> None:
    """Parameters resharded by hand, a state dict, an evaluation: backward is right after each.

    Also where the first use is in inference mode: what is registered is no inference tensor.
    """
    names = ("reshard", "state_dict", "eval", "gather", "inference before")
    in_turn({name: name for name in names}, _in_between)


def _in_between(what: str) -> None:
    steps = meshes.micro_batches(models.DIM, 8)
    model: Any = parity.shard(parity.OURS, EVEN(), reshard_after_forward=2)
    plain = EVEN()
    sharded = dict(model.named_parameters())
    if what == "inference before":
        with torch.inference_mode():
            model(parity.my_part(steps[0][0][0]))
    for ((inputs, targets),) in steps:
        loss = (model(parity.my_part(inputs)) - parity.my_part(targets)).square().mean()
        if what == "reshard":
            for layer in model.layers:
                layer.reshard()
            model.reshard()
            assert dict(model.named_parameters()) == sharded
        elif what == "state_dict":
            for name, value in model.state_dict().items():
                assert value.device_mesh == parity.world_mesh()
                assert value.to_local().data_ptr() == sharded[name].to_local().data_ptr()
        elif what == "eval":
            with torch.no_grad():
                model(parity.my_part(inputs))
        elif what == "gather":
            model.layers[1].unshard()
            assert model.layers[1].weight.shape == (models.DIM, models.DIM)
            assert not isinstance(model.layers[1].weight, DTensor)
        loss.backward()
        parity.regression_loss(plain, (inputs, targets)).backward()
    _assert_same_gradients(model, plain)


@ranks(4)
@pytest.mark.parametrize("written", ["data", "local"])
def test_writes_in_between_are_refused_where_they_are_checked(written: str) -> None:
    """No version tells of them, and the rows of the smaller group go with the next reshard."""
    with fsdp2.debug(check_writes=True):
        model: Any = parity.shard(parity.OURS, EVEN(), reshard_after_forward=2)
        loss = model(torch.ones(1, models.DIM)).sum()
        weight = model.layers[1].weight
        with torch.no_grad():
            (weight.data if written == "data" else weight.to_local()).mul_(2)
        with raises("written-unsharded"):
            loss.backward()


@ranks(4)
def test_optimizer_step_after_a_forward_without_backward() -> None:
    """The smaller group's rows are out of date then, and must not be used."""
    model: Any = parity.shard(parity.OURS, EVEN(), reshard_after_forward=2)
    optimized = list(model.parameters())
    optimizer = torch.optim.SGD(optimized, lr=0.1)
    inputs, targets = parity.my_part(parity.regression_batches(models.DIM, 8, steps=1)[0])
    parity.regression_loss(model, (inputs, targets)).backward()
    model(inputs)
    optimizer.step()
    plain = EVEN()
    for param, sharded in zip(plain.parameters(), parity.full_all(optimized), strict=True):
        param.data = sharded
    parity.assert_close(
        model(inputs).detach(), plain(inputs).detach(), parity.FP32, "after the step"
    )


@ranks(4)
@pytest.mark.parametrize("reshard", [True, False])
def test_set_reshard_after_forward_afterwards(reshard: bool) -> None:
    model: Any = parity.shard(parity.OURS, EVEN(), reshard_after_forward=2)
    steps = meshes.micro_batches(models.DIM, 8)
    meshes.train_micro(model, steps)
    assert fsdp2.report(model).groups[-1].reshard_after_forward == 2
    model.set_reshard_after_forward(reshard)
    assert fsdp2.report(model).groups[-1].reshard_after_forward is reshard
    loss = model(torch.ones(1, models.DIM)).sum()
    assert isinstance(model.layers[0].weight, DTensor) == reshard
    if reshard:
        assert model.layers[0].weight.device_mesh == parity.world_mesh()
    loss.backward()
    model.zero_grad()
    plain = EVEN()
    plain.load_state_dict(parity.full_params(model))
    _assert_like_plain(meshes.train_micro(model, steps), lambda: plain, steps)


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(models.DIM, models.DIM) for _ in range(3))
        for layer in self.layers:
            layer.is_unit = True
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, torch.tanh(x), use_reentrant=self.reentrant)
        return x


@ranks(4)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    build = partial(models.seeded, partial(_Checkpointed, reentrant))
    model, plain = parity.shard(parity.OURS, build(), reshard_after_forward=2), build()
    for inputs, targets in parity.regression_batches(models.DIM, models.DIM, steps=2):
        for each, part in ((model, parity.my_part), (plain, lambda whole: whole)):
            x = part(inputs).clone().requires_grad_()
            parity.regression_loss(each, (x, part(targets))).backward()
    _assert_same_gradients(model, plain)


@ranks(4)
def test_recovery_from_an_exception() -> None:
    model: Any = parity.shard(parity.OURS, EVEN(), reshard_after_forward=2)
    steps = meshes.micro_batches(models.DIM, 8, steps=2)
    model(torch.ones(1, models.DIM))
    with pytest.raises(RuntimeError):
        model(torch.ones(1, models.DIM + 1))
    model.reset_iter_state()
    _assert_like_plain(meshes.train_micro(model, steps), EVEN, steps)


# ---- between forward and backward


def _two_linears() -> Any:
    model: Any = models.seeded(
        lambda: nn.Sequential(nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM))
    )
    for unit in (*model, model):
        fsdp2.fully_shard(unit, mesh=parity.world_mesh(), reshard_after_forward=2)
    return model


@ranks(4)
def test_a_parameter_frozen_between_forward_and_backward() -> None:
    """The object that is registered then is neither the shard nor the gathered parameter."""
    model = _two_linears()
    sharded = dict(model.named_parameters())
    loss = model(torch.ones(2, models.DIM)).sum()
    model[0].requires_grad_(False)
    loss.backward()
    model.zero_grad()
    model(torch.ones(2, models.DIM)).sum().backward()
    trained = {
        name: (param.requires_grad, param.grad is not None) for name, param in sharded.items()
    }
    assert trained == {
        "0.weight": (False, False),
        "0.bias": (False, False),
        "1.weight": (True, True),
        "1.bias": (True, True),
    }


@ranks(4)
def test_an_optimizer_made_between_forward_and_backward_is_repointed() -> None:
    model = _two_linears()
    loss = model(torch.ones(2, models.DIM)).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    before = [parity.full(param) for param in model.parameters()]
    fsdp2.optim.repoint_optimizer(optimizer)
    optimizer.step()
    after = [parity.full(param) for param in model.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@ranks(4)
def test_nothing_has_changed_where_the_smaller_groups_cannot_be_made() -> None:
    data = meshes.unshared_mesh("smaller groups")
    linear = nn.Linear(models.DIM, models.DIM)
    with meshes.more_groups_on_some(), raises("group-counts"):
        fsdp2.fully_shard(linear, mesh=data, reshard_after_forward=2)
    assert type(linear.weight) is nn.Parameter
    fsdp2.fully_shard(linear, mesh=data, reshard_after_forward=2)
    linear(torch.ones(2, models.DIM)).sum().backward()
