"""fsdp2 on a device without streams, whose storages cannot be emptied: the stand-in without both.

Gathered parameters are freed by giving them other ``.data``. The bits are the CPU's, no event is
recorded, and the memory is really gone between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.core.device.buffers import SwappedBuffer, empties_storages
from fsdp2.core.device.streams import Streams
from fsdp2.core.modules.registry import require_record
from fsdp2.core.modules.saved import SavingUnitHooks
from fsdp2.sharding.assembly import choose_reshard
from fsdp2.testing.stand_in import device, group
from tests.accelerator.test_lanes import CASES, _mesh, sharded_layers, trained_as_on_the_cpu
from tests.common import tensors, workers
from tests.common.errors import raises

DIM, LAYERS = 64, 6
UNIT = DIM * DIM * 4  # bytes of one gathered layer


@pytest.fixture(scope="module", autouse=True)
def _robbed_ranks() -> Iterator[None]:
    """They serve no other tests: the device that they know has lost its streams."""
    workers.close_pools()
    yield
    workers.close_pools()


def _robbed(backend: str = group.COALESCING, shape: tuple[int, ...] = (2,)) -> DeviceMesh:
    device.load()
    device.take_away()
    return _mesh(device.NAME, backend, shape)


def _compare(case: str, backend: str, shape: Any = (2,), **options: Any) -> None:
    _robbed(backend, shape)
    _, counts = trained_as_on_the_cpu(case, backend, shape, **options)
    assert counts == [0, 0, 0]


@workers.ranks(2)
def test_what_the_device_can_do_is_tried() -> None:
    mesh = _robbed()
    where = torch.device(mesh.device_type, 0)
    assert not empties_storages(where)
    with pytest.raises(RuntimeError, match="no streams"):
        torch.Stream(where)
    layer = nn.Linear(DIM, DIM).to(where)
    fsdp2.fully_shard(layer, mesh=mesh)
    layer(torch.ones(2, DIM, device=where))
    record = require_record(layer)
    (made,) = record.unit.own_groups
    assert type(record.streams) is Streams
    assert not made.kernels._non_blocking
    assert isinstance(made.bound.full, SwappedBuffer)
    assert isinstance(record, SavingUnitHooks)


@pytest.mark.parametrize("case", [case for case in CASES if case != "hooked"])
@pytest.mark.parametrize(
    "backend",
    [group.COALESCING, pytest.param(group.PACKING, marks=pytest.mark.extended)],
)
@workers.ranks(2)
def test_same_bits_as_on_the_cpu(case: str, backend: str) -> None:
    _compare(case, backend)


@workers.ranks(4)
def test_replicas_and_smaller_groups() -> None:
    _compare("mixed", group.COALESCING, (2, 2))

    def smaller(model: Any) -> None:
        for block in model.blocks:
            choose_reshard(require_record(block), 2)

    _compare("usual", group.COALESCING, (4,), change=smaller)


# ---- memory


def _layers(make: Callable[[], nn.Module]) -> list[nn.Module]:
    return [make() for _ in range(LAYERS)]


def _linear() -> nn.Module:
    return nn.Linear(DIM, DIM, bias=False)


class Scale(nn.Module):
    """Saves its parameter itself, no view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-1) * self.weight).sum(-2)


def _held(mesh: DeviceMesh, make: Callable[[], nn.Module], plain: bool = False) -> int:
    """Bytes that are alive between forward and backward, beyond those of the same without units."""

    def grown(model: nn.Module) -> int:
        x = torch.ones(1, DIM, device=mesh.device_type, requires_grad=True)
        for _ in range(2):
            before = device.live_bytes()
            loss = model(x).sum()
            after = device.live_bytes()
            loss.backward()
            model.zero_grad()
            x.grad = None
        return after - before

    with mock.patch("fsdp2.sharding.api.empties_storages", return_value=plain):
        sharded = sharded_layers(mesh, *_layers(make))
    return grown(sharded) - grown(nn.Sequential(*_layers(make)).to(mesh.device_type))


@workers.ranks(2)
def test_memory_between_forward_and_backward() -> None:
    """A parameter that autograd saved is the object that is given other data: its memory goes.

    A view is not. Without hooks on what is saved, six linear layers would hold theirs.
    """
    mesh = _robbed()
    assert 0 <= _held(mesh, _linear) < UNIT // 8
    assert _held(mesh, _linear, plain=True) == LAYERS * UNIT
    assert 0 <= _held(mesh, Scale) < UNIT // 8
    assert 0 <= _held(mesh, Scale, plain=True) < UNIT // 8


@workers.ranks(2)
def test_memory_under_no_grad_and_after_backward() -> None:
    mesh = _robbed()
    model = sharded_layers(mesh, *_layers(_linear))
    x = torch.ones(1, DIM, device=mesh.device_type)
    model(x).sum().backward()
    model.zero_grad()
    before = device.live_bytes()
    with torch.no_grad():
        model(x)
    model(x).sum().backward()
    device.peak_bytes()
    model.zero_grad()
    model(x).sum().backward()
    peak = device.peak_bytes() - before
    model.zero_grad()
    assert device.live_bytes() == before
    # Two gathered layers, one whole gradient, the shards of all gradients, and activations.
    assert peak <= 3 * UNIT + LAYERS * UNIT // 2 + 4 * LAYERS * x.nbytes


@pytest.mark.parametrize("reentrant", [False, True])
@workers.ranks(2)
def test_checkpoints_around_units_keep_nothing_but_inputs(reentrant: bool) -> None:
    """Hooks of a checkpoint around get what is not a parameter's."""
    mesh = _robbed()

    class Wide(nn.Module):
        def __init__(self, api: bool) -> None:
            super().__init__()
            self.inner = nn.Linear(DIM, DIM, bias=False, device=mesh.device_type)
            if api:
                fsdp2.fully_shard(self.inner, mesh=mesh)

        def run(self, x: Tensor) -> Tensor:
            return self.inner(x.sin()).cos().exp().tanh()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.run, x, use_reentrant=reentrant)
            return y

    found = []
    for api in (False, True):
        torch.manual_seed(0)
        model = Wide(api)
        if api:
            fsdp2.fully_shard(model, mesh=mesh)
        x = torch.ones(32, DIM, device=mesh.device_type, requires_grad=True)
        for _ in range(2):
            x.grad = None
            before = device.live_bytes()
            loss = model(x).sum()
            after = device.live_bytes()
            loss.backward()
        assert x.grad is not None
        found.append((after - before, x.grad.cpu()))
    assert abs(found[1][0] - found[0][0]) < x.nbytes // 2
    assert torch.equal(found[0][1], found[1][1])


class Odd(nn.Module):
    """Saves a sparse tensor, and may take a derivative inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.weight = nn.Parameter(torch.linspace(-1, 1, DIM * DIM).view(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            return torch.func.grad(lambda v: (v @ self.weight).sin().sum())(x)
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), (x @ self.weight).sin())


@pytest.mark.parametrize("outside", [False, True])
@workers.ranks(2)
def test_derivatives_and_sparse_tensors(outside: bool) -> None:
    """Tensors without storages are saved as they are; on the CPU, whose storages stay here."""
    plain, model = Odd(), Odd()
    swapped = mock.Mock(return_value=False)
    with (
        mock.patch("fsdp2.core.device.kernels.empties_storages", swapped),
        mock.patch("fsdp2.sharding.api.empties_storages", swapped),
    ):
        fsdp2.fully_shard(model, mesh=_mesh("cpu", "gloo", (2,)), reshard_after_forward=True)
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(1))
    results = []
    for each in (plain, model):
        if outside:
            results.append(torch.func.grad(lambda v, m=each: m(v).square().sum())(x))
        else:
            loss = each(x).square().sum()
            loss.backward()
            grad: Any = each.weight.grad
            results.append(grad.full_tensor() if each is model else grad)
    assert isinstance(require_record(model), SavingUnitHooks)
    assert torch.equal(results[0], results[1])
    model.inside = True
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        model(x)
    model.inside = False
    assert torch.equal(model(x), plain(x))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


# ---- what is refused


@workers.ranks(2)
def test_what_is_refused() -> None:
    mesh = _robbed()
    extended = tensors.extend(nn.Linear(DIM, DIM, bias=False), tensors.Bf16Weight)
    with raises("extended-not-emptied"):
        fsdp2.fully_shard(extended, mesh=mesh)
    layer: Any = nn.Linear(DIM, DIM).to(mesh.device_type)
    fsdp2.fully_shard(layer, mesh=mesh)
    root: Any = nn.Sequential(layer, nn.Linear(DIM, DIM).to(mesh.device_type))
    fsdp2.fully_shard(root, mesh=mesh)
    x = torch.ones(2, DIM, device=mesh.device_type, requires_grad=True)
    layer.set_unshard_in_backward(False)
    with raises("saved-and-freed"):
        root(x).sum().backward()
    root.reset_iter_state()
    layer.set_unshard_in_backward(True)
    root(x).sum().backward()


class Modifies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight).exp()
        y.square().sum()
        z = y * y
        y.add_(1)
        return z


@workers.ranks(2)
def test_what_is_modified_in_place() -> None:
    mesh = _robbed()
    model = Modifies().to(mesh.device_type)
    fsdp2.fully_shard(model, mesh=mesh)
    with raises("saved-and-modified"):
        model(torch.ones(2, DIM, device=mesh.device_type)).sum().backward()
