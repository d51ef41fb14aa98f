"""fsdp2 on a device with streams, without a GPU: the same bits as on the CPU, all of it in order.

The stand-in computes with the CPU's kernels, so lanes, events and autograd's own thread must not
change a bit of what ranks train; and it reports each access that no event orders.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import CPUOffloadPolicy, Levels, MixedPrecisionPolicy
from fsdp2.checkpoint import staging
from fsdp2.core.device.streams import DeviceStreams
from fsdp2.core.modules.registry import require_record
from fsdp2.testing.stand_in import device, group
from tests.common import parity, workers
from tests.common.looped import coalescing

DIM, HIDDEN, STEPS = 16, 32, 3
SMALL = 300  # bytes of a piece: norms and biases are packed, which go along with the weights

Change = Callable[[Any], None]

WHOLE: dict[str, Any] = {"shard_placement_fn": fsdp2.whole_below(DIM * 4)}
"""Norms, biases, the scale and the outlet are whole on every rank."""


class Block(nn.Module):
    """Even and uneven parameters; recomputed in backward, and without its scale, if asked for."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.checkpoints = False
        self.scales = True

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.scale * y if self.scales else x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.outlet = nn.Linear(DIM, 3)  # uneven on two ranks

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def _mesh(kind: str, backend: str, shape: tuple[int, ...]) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    device.load()  # before the first backward, at which autograd starts a thread for each device
    group.register()
    if kind == "cpu":
        return init_device_mesh("cpu", shape, mesh_dim_names=names)
    override = dict.fromkeys(names, backend)
    return init_device_mesh(kind, shape, mesh_dim_names=names, backend_override=override)


# ---- what is changed about a model before it is trained


def _prefetch(model: Any) -> None:
    for before, after in zip(model.blocks, model.blocks[1:], strict=False):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def _look_ahead(model: Any) -> None:
    model.set_tuning(prefetch_window=3)


def _checkpoint(model: Any) -> None:
    for block in model.blocks:
        block.checkpoints = True


def _keep_gradients(model: Any) -> None:
    model.set_tuning(keep_gradients=True)


def _hook(model: Any, stream: Any = None) -> None:
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5), stream=stream)


def _hook_on_a_stream(model: Any) -> None:
    on_device = next(model.parameters()).device.type != "cpu"
    _hook(model, torch.Stream(device.load()) if on_device else None)


def _code(model: Any) -> None:
    model.set_wire_format(gather="int8", reduce="bf16", exact_below=SMALL)


def _send_differences(model: Any) -> None:
    model.set_wire_format(gather="int4", differences=True, exact_below=SMALL)


def _feed_back(model: Any) -> None:
    model.set_wire_format(reduce="int4", rotate=True, feedback=True, exact_below=SMALL)


CASES: dict[str, tuple[dict[str, Any], Change | None]] = {
    "usual": ({}, None),
    "mixed": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, None),
    "kept": ({"reshard_after_forward": False}, None),
    "offloaded": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, None),
    "pinned": ({"offload_policy": CPUOffloadPolicy()}, None),
    "prefetched": ({}, _prefetch),
    "three ahead": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, _look_ahead),
    "recomputed": ({}, _checkpoint),
    "kept gradients": ({}, _keep_gradients),
    "hooked": ({}, _hook_on_a_stream),
    "coded": ({}, _code),
    "fed back": ({}, _feed_back),
    "fed back, mixed": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, _feed_back),
    "coded, offloaded": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, _code),
    "coded differences": ({}, _send_differences),
    "coded differences, pinned": ({"offload_policy": CPUOffloadPolicy()}, _send_differences),
    "whole": (WHOLE, None),
    "whole, mixed": (
        {**WHOLE, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        None,
    ),
    "whole, offloaded": ({**WHOLE, "offload_policy": CPUOffloadPolicy()}, None),
    "whole, kept gradients": (WHOLE, _keep_gradients),
    "whole, hooked": (WHOLE, _hook),
}


def _build(mesh: DeviceMesh, case: str, levels: bool = False) -> nn.Module:
    arguments, change = CASES[case]
    torch.manual_seed(0)
    model = Model().to(mesh.device_type)
    where = Levels(mesh) if levels else mesh
    parity.shard(parity.OURS, model, mesh=where, **arguments)
    # The small parameters stand for large ones; in other cases norms and biases for small ones.
    model.set_tuning(pack_below=0 if case == "usual" else SMALL)
    if change is not None:
        change(model)
    return model


def sharded_layers(mesh: DeviceMesh, *layers: nn.Module, **options: Any) -> nn.Sequential:
    """Layers on the device, each a unit, and one around them."""
    model = nn.Sequential(*layers).to(mesh.device_type)
    for unit in (*model, model):
        fsdp2.fully_shard(unit, mesh=mesh, **options)
    return model


def _batch(step: int, mesh: DeviceMesh) -> Tensor:
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    return torch.randn(8, 4, generator=generator).to(mesh.device_type)


def _train(model: nn.Module, mesh: DeviceMesh, accumulate: int = 1) -> list[list[Tensor]]:
    # One tensor at a time: the CPU and other devices choose different defaults.
    optimizer = parity.ShardwiseAdamW(model.parameters(), lr=1e-2, foreach=False)
    seen = []
    for step in range(STEPS):
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)
            loss = model(_batch(step * accumulate + micro, mesh)).float().square().mean()
            loss.backward()
        grads = [param.grad for param in model.parameters()]
        seen.append([torch.empty(0) if grad is None else _local(grad) for grad in grads])
        optimizer.step()
        optimizer.zero_grad()
        seen.append([loss.detach().cpu(), *map(_local, model.parameters())])
    return seen


def _local(tensor: Any) -> Tensor:
    rows: Tensor = tensor.to_local().detach().cpu().clone()
    return rows


def _assert_ordered() -> None:
    found = device.races()
    assert not found, "\n".join(sorted(set(found)))


def _as_it_is(_: Any) -> None:
    pass


def _use_some(model: Any) -> None:
    """Rank 0 lacks a gradient that another rank has; one more is on no rank."""
    model.blocks[1].scales = dist.get_rank() != 0
    model.blocks[2].scales = False


def trained_as_on_the_cpu(
    case: str,
    backend: str,
    shape: tuple[int, ...],
    accumulate: int = 1,
    change: Change = _as_it_is,
    levels: bool = False,
) -> tuple[nn.Module, list[int]]:
    """Train on the CPU, then on the device; nothing may be out of order, and all bits are equal.

    Returns the device's model, and how many events it recorded, waits and recorded streams it had.
    """
    plain, mesh = (_mesh(kind, backend, shape) for kind in ("cpu", device.NAME))
    with coalescing():
        model = _build(plain, case, levels)
        change(model)
        expected = _train(model, plain, accumulate)
    model = _build(mesh, case, levels)
    change(model)
    counted = ("record", "wait", "record_stream")
    before = list(map(device.count_of, counted))
    device.races()
    parity.assert_equal(_train(model, mesh, accumulate), expected, case)
    _assert_ordered()
    return model, [device.count_of(what) - was for what, was in zip(counted, before, strict=True)]


def _compare(case: str, backend: str = group.COALESCING, shape: Any = (2,), **options: Any) -> None:
    model, (_, waits, recorded) = trained_as_on_the_cpu(case, backend, shape, **options)
    kinds = {kind for r in fsdp2.report(model).groups for kind in r.transport.split("+")}
    coded = "coded" in case  # what is not, is small, and packed
    assert ("coalesced" in kinds) is (backend == group.COALESCING and not coded)
    assert ("coded" in kinds) is coded
    assert recorded == 0
    assert waits > 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "backend",
    [group.COALESCING, pytest.param(group.PACKING, marks=pytest.mark.extended)],
)
@workers.ranks(2)
def test_same_bits_as_on_the_cpu(case: str, backend: str) -> None:
    _compare(case, backend)


@pytest.mark.parametrize("case", ["usual", "mixed", "kept", "whole, mixed"])
@workers.ranks(4)
def test_replicated(case: str) -> None:
    """Two sums of two ranks: one order only."""
    _compare(case, shape=(2, 2))


@pytest.mark.parametrize("case", ["usual", "mixed", "offloaded", "kept gradients", "hooked"])
@workers.ranks(4)
def test_levels(case: str) -> None:
    """Gathers and reductions of two levels, on the lanes of one."""
    _compare(case, shape=(2, 2), accumulate=2, change=_use_some, levels=True)


@pytest.mark.parametrize(
    "case", ["usual", "mixed", "offloaded", "kept gradients", "whole, mixed", "whole, offloaded"]
)
@workers.ranks(2)
def test_accumulating(case: str) -> None:
    _compare(case, accumulate=3)


@pytest.mark.parametrize(
    "case",
    [
        *("usual", "mixed", "offloaded", "kept gradients", "hooked"),
        *("whole", "whole, offloaded", "whole, hooked"),
    ],
)
@workers.ranks(2)
def test_gradients_that_another_rank_has(case: str) -> None:
    """The host reads who had one behind the reduction, and delivers at the end of backward."""
    _compare(case, accumulate=2, change=_use_some)


@workers.ranks(4)
def test_gradients_that_another_replica_has() -> None:
    _compare("usual", shape=(2, 2), change=_use_some)


@workers.ranks(2)
def test_collectives_on_a_stream_of_their_own() -> None:
    """As NCCL's before torch 2.8: what the call returns makes the current stream wait."""
    with mock.patch.object(group.StandInGroup, "own_stream", True):
        _compare("mixed")


@workers.ranks(2)
def test_optimizer_on_a_stream_of_the_users() -> None:
    mesh = _mesh(device.NAME, group.COALESCING, (2,))
    model: Any = _build(mesh, "usual")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    stream = torch.Stream(mesh.device_type)
    device.races()
    for step in range(STEPS):
        loss = model(_batch(step, mesh)).square().mean()
        optimizer.zero_grad()  # the last step has read them: the forward is behind it
        loss.backward()
        stream.wait_stream(torch.accelerator.current_stream(0))
        with stream:
            optimizer.step()
        model.set_post_optim_event(stream.record_event())
    stream.synchronize()  # it reads gradients that go with the model
    _assert_ordered()


@pytest.mark.parametrize("case", ["usual", "mixed", "offloaded", "replicated"])
@workers.ranks(2)
def test_steps_in_backward(case: str) -> None:
    """On the lane of the reduction, while COMPUTE goes on: the same bits, and no race."""
    mesh = _mesh(device.NAME, group.COALESCING, (2,) if case != "replicated" else (2, 1))
    losses = []
    for early in (False, True):
        model = _build(mesh, case if case != "replicated" else "usual")
        optimizer = fsdp2.optim.FlatOptimizer(
            model, torch.optim.AdamW, lr=1e-2, step_in_backward=early
        )
        device.races()
        losses.append([])
        for step in range(STEPS):
            loss = model(_batch(step, mesh)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        _assert_ordered()
    assert losses[1] == losses[0]


@pytest.mark.parametrize("case", ["usual", "offloaded"])
@workers.ranks(2)
def test_a_save_beside_training(tmp_path: Path, case: str) -> None:
    """A stream of its own copies, into the same page-locked memory each time; the step waits."""
    mesh = _mesh(device.NAME, group.COALESCING, (2,))
    model = _build(mesh, case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    device.races()
    places = set()
    with mock.patch.object(staging, "_AT_ONCE", 0):
        for step in range(STEPS):
            loss = model(_batch(step, mesh)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            before = [_local(param) for param in model.parameters()]
            saving = fsdp2.checkpoint.async_save(tmp_path, model, optimizer, step=step, keep=1)
            assert saving._copy is not None
            memory = saving._copy.memory._buffer
            assert memory is not None
            if step:  # the first one has no state of the optimizer's, and less memory
                places.add(memory.view(torch.uint8, 0, (1,)).data_ptr())
            assert memory.view(torch.uint8, 0, (1,)).is_pinned() or case == "offloaded"
            model(_batch(step, mesh)).square().mean().backward()
            optimizer.step()  # waits for the copy
            optimizer.zero_grad()
            saving.result()
            other = _build(mesh, case)
            fsdp2.checkpoint.load(tmp_path, other)
            parity.assert_equal([_local(param) for param in other.parameters()], before)
    assert len(places) == 1
    _assert_ordered()


@workers.ranks(2)
def test_compiled_blocks() -> None:
    mesh = _mesh(device.NAME, group.COALESCING, (2,))
    expected = _train(_build(mesh, "mixed"), mesh)
    model: Any = _build(mesh, "mixed")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    device.races()
    seen = _train(model, mesh)
    _assert_ordered()
    torch._dynamo.reset()
    parity.assert_equal(seen, expected)


# ---- calls and memory


def _calls_a_block(mesh: DeviceMesh, api: Any, mixed: bool) -> dict[str, float]:
    """What one more block of 9 even parameters adds to a step."""

    def count(blocks: int) -> list[int]:
        model = nn.Sequential(*[NineWeights() for _ in range(blocks)]).to(mesh.device_type)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else None
        for unit in (*model, model) if api is not None else ():
            api.fully_shard(unit, mesh=mesh, **({"mp_policy": policy} if policy else {}))
        x = torch.ones(2, DIM, device=mesh.device_type, requires_grad=True)
        for _ in range(3):
            model(x).float().sum().backward()
            model.zero_grad()
        before = [device.count_of(what) for what in CALLS]
        model(x).float().sum().backward()
        return [device.count_of(what) - was for what, was in zip(CALLS, before, strict=True)]

    few, many = count(4), count(8)
    return {what: (b - a) / 4 for what, a, b in zip(CALLS, few, many, strict=True)}


CALLS = ("record", "wait", "set stream")


class NineWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(DIM)) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        return x


@workers.ranks(2)
def test_events_and_streams_of_a_units_step() -> None:
    """The numbers of the table in docs/performance.md; a switch goes there and back.

    Autograd switches for each node: for none more than without sharding.
    """
    mesh = _mesh(device.NAME, group.COALESCING, (2,))
    own = _calls_a_block(mesh, None, False)["set stream"]
    for mixed, events, switches in ((False, 6, 3), (True, 8, 5)):
        found = _calls_a_block(mesh, fsdp2, mixed)
        assert (found["record"], found["wait"]) == (events, events), found
        assert found["set stream"] == own + 2 * switches, (found, own)


@pytest.mark.parametrize("window", [1, 2, 4])
@workers.ranks(2)
def test_units_that_are_gathered(window: int) -> None:
    """In forward: one that computes and those ahead, besides shards and activations."""
    mesh = _mesh(device.NAME, group.COALESCING, (2,))
    dim, layers = 64, 6
    unit = dim * dim * 4
    model: Any = sharded_layers(mesh, *[nn.Linear(dim, dim, bias=False) for _ in range(layers)])
    model.set_tuning(prefetch_window=window)
    x = torch.ones(1, dim, device=mesh.device_type)
    with torch.no_grad():
        model(x)
        before = device.live_bytes()
        device.peak_bytes()
        model(x)
        assert device.live_bytes() == before
        peak = device.peak_bytes() - before
    assert window * unit < peak <= (1 + window) * unit + 4 * x.nbytes


@workers.ranks(2)
def test_each_gather_is_waited_for_alone() -> None:
    """However many are under way: compute in the second unit is not behind those that come later.

    Events of a ring of 16 would be those of later gathers by then.
    """
    mesh = _mesh(device.NAME, group.COALESCING, (2,))
    units = DeviceStreams.RING + 4
    layers = [nn.Linear(DIM, DIM, bias=False) for _ in range(units)]
    model: Any = sharded_layers(mesh, *layers)
    x = torch.ones(1, DIM, device=mesh.device_type)
    gathered = [require_record(layer).unit.own_groups[0] for layer in model]

    def run(peeks_at: int | None) -> list[str]:
        def peek(*_: Any) -> None:
            if peeks_at is not None:
                gathered[peeks_at].params[0].unsharded.detach().clone()

        hook = model[1].register_forward_pre_hook(peek)  # behind the wait for its gather
        device.races()
        with torch.no_grad():
            model(x)
        hook.remove()
        return device.races()

    model[0].set_modules_to_forward_prefetch(model[1:])
    assert run(None) == []
    assert run(1) == []
    for later in (2, 1 + DeviceStreams.RING, units - 1):
        assert any("all-gather" in race for race in run(later)), later
    assert run(None) == []


@workers.ranks(2)
def test_an_input_on_another_device_does_not_end_a_unit() -> None:
    """Autograd runs its node in another thread, perhaps before the unit's own."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(DIM))
            self.seen: tuple[Tensor, ...] = ()

        def forward(self, *inputs: Tensor) -> Tensor:
            self.seen = inputs
            x, bias = inputs
            return x * self.weight + bias.to(x.device)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Adds()

        def forward(self, x: Tensor, kind: str) -> Tensor:
            self.given = x.sin(), torch.ones(DIM, device=kind, requires_grad=True).cos()
            return self.inner(*self.given)

    mesh = _mesh(device.NAME, group.COALESCING, (2,))
    model: Any = Around().to(mesh.device_type)
    fsdp2.fully_shard(model.inner, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    x = torch.ones(1, DIM, device=mesh.device_type, requires_grad=True)
    for kind, marks in ((mesh.device_type, False), ("cpu", True)):
        model(x, kind).sum().backward()
        passed = [seen is not one for seen, one in zip(model.inner.seen, model.given, strict=True)]
        assert passed == [marks, marks], "through a node that waits for both gradients"


# ---- the device itself


@workers.ranks(2)
def test_the_device_notices_what_is_not_waited_for() -> None:
    mesh = _mesh(device.NAME, group.COALESCING, (2,))
    model = _build(mesh, "usual")
    device.races()
    with mock.patch.object(DeviceStreams, "wait", return_value=None):
        _train(model, mesh)
    found = device.races()
    assert any("all-gather" in race and "writes" in race for race in found)
    assert any("reduce-scatter" in race for race in found)
    assert any("whose memory" in race for race in found)


@workers.ranks(2)
@pytest.mark.parametrize("case", ["usual", "mixed", "pinned", "whole, offloaded"])
def test_whole_tensors(case: str) -> None:
    """Between steps they are read, changed and loaded, on the device or from host memory."""
    seen = []
    for kind in ("cpu", device.NAME):
        mesh = _mesh(kind, group.COALESCING, (2,))
        with coalescing():
            model = _build(mesh, case)
        device.races()
        rows = [_train(model, mesh)[-1]]
        for rank0_only in (False, True):
            held = dist.get_rank() == 0 or not rank0_only
            with fsdp2.gathered(model, rank0_only=rank0_only, with_grads=True), torch.no_grad():
                for param in model.parameters() if held else ():
                    assert param.device.type == mesh.device_type
                    param.mul_(1.5)
            rows += [list(map(_local, model.parameters())), _train(model, mesh)[-1]]
        streamed = fsdp2.full_parameters(model, rank0_only=True, offload_to_cpu=True)
        weights = {name: tensor * 2 for name, tensor in streamed}
        rows.append(list(weights.values()))
        fsdp2.load_from_rank0(model, weights or None)
        seen.append([*rows, list(map(_local, model.parameters())), _train(model, mesh)[-1]])
    _assert_ordered()
    expected, found = seen
    parity.assert_equal(found, expected)
