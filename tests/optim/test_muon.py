"""`Muon` over shards steps as ``torch.optim.Muon`` does over whole matrices, to the bit.

Gradients are given, not computed: the same whole ones to both, of which each rank takes its rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from fsdp2.core.layout import layout
from fsdp2.core.layout.mesh import wrap_local
from fsdp2.optim.matrices.blocks import spread_of
from tests.common import meshes, models, parity
from tests.common.cases import in_turn
from tests.common.workers import ranks

HEAD = {"lr": 1e-3, "foreach": True}
"""Options of the element-wise optimizer: foreach kernels treat all elements alike."""

Missing = Callable[[int, str], bool]


class Weights(nn.Module):
    """Matrices of several shapes, a bias and an embedding, in units of two or three."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes = [((6, 4), (4, 6), (5,)), ((7, 3), (3, 7), (7, 3)), ((1, 5), (8, 8))]
        self.units = nn.ModuleList(nn.ParameterList(map(self._made, each)) for each in shapes)
        self.embed = nn.Embedding(9, 4)
        self.to(dtype)

    @staticmethod
    def _made(shape: tuple[int, ...]) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape))


class Experts(nn.Module):
    """A stack of experts, a fused projection and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 6, 5))
        self.qkv = nn.Parameter(torch.randn(12, 4))
        self.out = nn.Parameter(torch.randn(4, 4))


def cut_experts(name: str, weight: Tensor) -> Any:
    if name == "experts":
        return weight
    return weight.chunk(3) if name == "qkv" else None


def sharded(model: Any, mesh: DeviceMesh | None = None, **arguments: Any) -> Any:
    for unit in getattr(model, "units", ()):
        fsdp2.fully_shard(unit, mesh=mesh, **arguments)
    return fsdp2.fully_shard(model, mesh=mesh, **arguments)


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Whole ones, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(param.shape, generator=generator).to(param.dtype)
        for name, param in model.named_parameters()
    }


def give(model: nn.Module, grads: dict[str, Tensor]) -> None:
    """Each parameter its gradient, or this rank's rows of it."""
    for name, param in model.named_parameters():
        grad = grads.get(name)
        if grad is not None and isinstance(param, DTensor):
            box = spread_of(name, param._spec, param._local_tensor.shape).own
            grad = wrap_local(box.of(grad).clone(), param._spec)
        param.grad = grad


def torchs(model: nn.Module, elementwise: Sequence[str] = (), **options: Any) -> list[Any]:
    """torch's optimizers over a whole model."""
    named = list(model.named_parameters())
    chosen = [p for n, p in named if p.dim() == 2 and n not in elementwise]
    others = [p for n, p in named if p.dim() != 2 or n in elementwise]
    return [torch.optim.Muon(chosen, **options), torch.optim.AdamW(others, **HEAD)]


def check(
    model: Any,
    ours: torch.optim.Optimizer,
    whole: nn.Module,
    theirs: Sequence[torch.optim.Optimizer],
    steps: int = 3,
    missing: Missing = lambda step, name: False,
) -> None:
    """Both take the same steps."""
    parity.assert_equal(parity.full_params(model), dict(whole.named_parameters()))
    for step in range(steps):
        grads = gradients(whole, step)
        grads = {name: grad for name, grad in grads.items() if not missing(step, name)}
        for each, optimizers in ((model, [ours]), (whole, theirs)):
            give(each, grads)
            for optimizer in optimizers:
                optimizer.step()
        parity.assert_equal(parity.full_params(model), dict(whole.named_parameters()), f"{step}")


def both(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    return models.seeded(build), models.seeded(build)


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no nesterov": {"nesterov": False, "weight_decay": 0.0, "momentum": 0.5, "lr": 0.1},
    "as adamw": {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 2, "eps": 1e-3},
    "coefficients": {"ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "original"},
    "bf16": {},  # parameters and momentum
}


@ranks(2, 4)
def test_steps_like_torchs() -> None:
    """Uneven and empty shards; matrices wide, tall and of one row; embedding and bias aside."""
    in_turn({name: name for name in OPTIONS}, _steps_like_torchs)


def _steps_like_torchs(name: str) -> None:
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    model, whole = both(lambda: Weights(dtype))
    sharded(model)
    options = {"elementwise": ["embed.*"], "elementwise_options": HEAD, **OPTIONS[name]}
    theirs = torchs(whole, ["embed.weight"], **OPTIONS[name])
    check(model, fsdp2.optim.Muon(model, **options), whole, theirs)


@ranks(4)
@pytest.mark.parametrize("dim", [0, 1])
def test_any_dim(dim: int) -> None:
    """Columns in place of rows: blocks that are no rows of a matrix."""
    model, whole = both(Weights)
    sharded(model, shard_placement_fn=lambda p: Shard(min(dim, p.dim() - 1)))
    ours = fsdp2.optim.Muon(model, elementwise_options=HEAD, batched=False)
    check(model, ours, whole, torchs(whole))


@ranks(4)
def test_replicas_own_matrices_too() -> None:
    """HSDP: each matrix is computed once, on one rank of all four."""
    model, whole = both(Weights)
    sharded(model, meshes.hsdp_mesh(2, 2))
    ours = fsdp2.optim.Muon(model, elementwise_options=HEAD)
    with mock.patch.object(ours, "orthogonalized", side_effect=ours.orthogonalized) as updates:
        check(model, ours, whole, torchs(whole), steps=2)
    computed = torch.tensor(sum(len(call.args[0]) for call in updates.call_args_list))
    dist.all_reduce(computed)
    matrices = sum(param.dim() == 2 for param in whole.parameters())
    assert computed == 2 * matrices
    (owners,) = ours.owners()
    assert owners.ranks == (0, 1, 2, 3)
    assert sum(owners.matrices) == matrices
    assert min(owners.matrices) >= 1


@ranks(4)
def test_tensor_parallel() -> None:
    """A matrix is whole over both axes, and computed once; rows of rows and rows of columns."""
    mesh = meshes.mesh("shard", "tp", shape=(2, 2))
    model, whole = both(Weights)
    for unit in model.units:
        for index, param in enumerate(unit):
            if param.dim() == 2:
                placement = [Shard(index % 2)]
                spread = distribute_tensor(param.data, mesh["tp"], placement)
                unit[index] = nn.Parameter(spread)
    sharded(model, mesh["shard"])
    ours = fsdp2.optim.Muon(model, elementwise_options=HEAD)
    check(model, ours, whole, torchs(whole))
    assert {owners.ranks for owners in ours.owners()} == {(0, 1, 2, 3), _line(mesh["shard"])}


def _line(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.tolist())


@ranks(2, 4)
def test_splits_and_bands() -> None:
    """Experts of a stack that is cut on two dims, and parts of a fused projection."""
    model, whole = both(Experts)
    place = {3: (Shard(0), Shard(1))}
    with mock.patch.object(layout, "SMALL_PADDING_BYTES", 0):
        sharded(model, shard_placement_fn=lambda p: place.get(p.dim()))
    bands = dist.get_world_size() == 4
    assert (model.experts.placements == (Shard(0), Shard(1))) is bands
    ours = fsdp2.optim.Muon(model, split=cut_experts)
    matrices = [*whole.experts.unbind(), *whole.qkv.chunk(3), whole.out]
    parts = [nn.Parameter(matrix.detach()) for matrix in matrices]  # views: steps reach the model
    theirs = torch.optim.Muon(parts)
    for step in range(3):
        grads = gradients(whole, step)
        give(model, grads)
        each = [*grads["experts"].unbind(), *grads["qkv"].chunk(3), grads["out"]]
        for part, grad in zip(parts, each, strict=True):
            part.grad = grad.clone()
        ours.step()
        theirs.step()
        parity.assert_equal(parity.full_params(model), dict(whole.named_parameters()))


@ranks(2)
def test_missing_gradients() -> None:
    """A parameter that no rank has a gradient of is not stepped, nor its momentum."""
    model, whole = both(Weights)
    sharded(model)
    frozen = "units.1.0"
    model.units[1][0].requires_grad_(False)

    def missing(step: int, name: str) -> bool:
        return name == frozen or (step == 1 and name.startswith("units.0"))

    ours = fsdp2.optim.Muon(model, elementwise_options=HEAD)
    check(model, ours, whole, torchs(whole), missing=missing)
    assert model.units[1][0] not in ours.state


@ranks(2, 4)
def test_gradients_that_some_ranks_miss() -> None:
    """They count as zeros there, and no rank waits for another."""
    model, whole = both(Weights)
    sharded(model)
    ours = fsdp2.optim.Muon(model, elementwise_options=HEAD)
    theirs = torch.optim.Muon([p for p in whole.parameters() if p.dim() == 2])
    lacks = ("units.0.0", "units.2.1")
    for step in range(3):
        grads = gradients(whole, step)
        give(model, grads)
        for name in lacks:
            param = model.get_parameter(name)
            box = spread_of(name, param._spec, param._local_tensor.shape).boxes[-1]
            box.of(grads[name]).zero_()
            if dist.get_rank() == dist.get_world_size() - 1:
                param.grad = None
        give(whole, grads)
        ours.step()
        theirs.step()
        for name in (*lacks, "units.1.1"):
            found = parity.full(model.get_parameter(name))
            parity.assert_equal(found, whole.get_parameter(name), name)


@ranks(2)
def test_groups_and_schedules() -> None:
    """Options belong to groups; a schedule reaches both kinds; a group may be added."""

    def run(model: Any, make: Any) -> tuple[Any, Any]:
        matrices = [p for unit in list(model.units)[:2] for p in unit if p.dim() == 2]
        others = [p for unit in model.units for p in unit if p.dim() != 2]
        late = [p for p in model.units[2] if p.dim() == 2]
        groups = [{"params": matrices[:2], "lr": 0.1}, {"params": matrices[2:], "momentum": 0.5}]
        aside = {"params": [*others, model.embed.weight], "lr": 1e-2}
        optimizers = make(groups, aside)
        optimizers[0].add_param_group({"params": late, "weight_decay": 0.5})
        halved = [
            torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.5**step) for each in optimizers
        ]
        for step in range(3):
            give(model, grads[step])
            for each in (*optimizers, *halved):
                each.step()
        rates = sorted(g["lr"] for each in optimizers for g in each.param_groups)
        return rates, parity.full_params(model)

    model, whole = both(Weights)
    grads = [gradients(whole, step) for step in range(3)]
    sharded(model)
    found = run(
        model,
        lambda groups, aside: [
            fsdp2.optim.Muon([*groups, {**aside, "elementwise": True, "foreach": True}])
        ],
    )
    expected = run(
        whole,
        lambda groups, aside: [
            torch.optim.Muon(groups),
            torch.optim.AdamW([aside], foreach=True),
        ],
    )
    parity.assert_equal(found, expected)


@ranks(2)
def test_a_training() -> None:
    """Gradients of backward, a closure, and a copy that goes on as the optimizer does."""
    model = parity.shard(parity.OURS, models.seeded(models.Transformer))
    optimizer = fsdp2.optim.Muon(model, lr=0.02, elementwise=["embed.*", "head.*"])
    batches = parity.language_batches(13, steps=8)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = parity.language_loss(model, parity.my_part(batches[0]))
        loss.backward()
        return loss

    for _ in range(8):
        losses.append(optimizer.step(closure).item())
    assert losses[-1] < losses[0] - 0.1
    assert sum(sum(owners.matrices) for owners in optimizer.owners()) == 8
    optimizer.zero_grad()
    twin = copy.deepcopy(optimizer)
    assert isinstance(twin, fsdp2.optim.Muon)
    assert len(twin.param_groups) == 2
