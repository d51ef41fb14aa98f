"""All-gather extensions: checks of hooks, their segment, and the order of everything on paper."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.core.gather import extension
from fsdp2.core.gather.extension import check_hooks
from fsdp2.core.layout.layout import Cut, ParamShape, Transport, build_layout
from fsdp2.testing.null_group import init_null_group
from fsdp2.testing.parameters import VirtualParam
from fsdp2.testing.races import races
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import (
    VirtualDevice,
    VirtualTensor,
    VirtualTransient,
    _Counted,
)
from fsdp2.tracing.record.notes import operations
from tests.common import tensors

pytestmark = pytest.mark.alone

F32, BF16, I8 = torch.float32, torch.bfloat16, torch.int8

# ---- layout


def test_their_bytes_are_reported() -> None:
    """Of the tensors that a shard wraps; other numbers are those of the rest."""
    found = []
    for extended in (True, False):
        init_null_group(4)
        model = nn.Sequential(nn.Linear(8, 8, bias=False))
        model = fsdp2.fully_shard(tensors.extend(model, tensors.Aliased) if extended else model)
        (group,) = fsdp2.report(model).groups
        found.append(
            (group.shard_bytes, group.unsharded_bytes, group.gathered_bytes, group.gathers)
        )
        dist.destroy_process_group()
    assert found[0] == found[1] == (64, 256, 256, 1)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("coalesces", [False, True])
def test_extended_parameters_are_in_a_segment_without_memory(size: int, coalesces: bool) -> None:
    plain = [
        ParamShape("a", (8, 8), Cut(0), F32, F32),
        ParamShape("b", (8,), Cut(0), F32, BF16),
    ]
    extended = [
        ParamShape("c", (7, 3), Cut(0), F32, BF16, extended=True),
        ParamShape("d", (3, 8), Cut(1), I8, I8, extended=True),
    ]
    params = [plain[0], extended[0], plain[1], extended[1]]
    layout = build_layout(params, size, coalesces)
    without = build_layout(plain, size, coalesces)
    assert layout.shard_bytes >= without.shard_bytes
    assert layout.payload_bytes == without.payload_bytes
    (segment,) = [s for s in layout.segments if s.transport is Transport.EXTENSION]
    assert (segment.shard_numel, segment.full_numel) == (0, 0)
    assert [slot.index for slot in segment.slots] == [1, 3]
    assert [slot.shape for slot in segment.slots] == [(7, 3), (3, 8)]
    assert [slot.chunk for slot in segment.slots] == [-(-7 // size), 8 // size]
    alone = build_layout(extended, size, coalesces)
    assert (alone.shard_bytes, alone.full_bytes, alone.payload_bytes) == (0, 0, 0)


# ---- checks


class Good:
    def fsdp_pre_all_gather(self, mesh: Any) -> Any: ...

    def fsdp_post_all_gather(self, *_: Any) -> Any: ...


class Five(Good):
    def fsdp_pre_all_gather(self, mesh: Any, a: Any, b: Any, c: Any, d: Any) -> Any: ...  # type: ignore[override]


class Three(Good):
    def fsdp_pre_all_gather(self, mesh: Any, a: Any, b: Any) -> Any: ...  # type: ignore[override]


class NoPre:
    def fsdp_post_all_gather(self, *_: Any) -> Any: ...


class OnlyRelease:
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool: ...  # type: ignore[empty-body]


@pytest.mark.parametrize("local", [Good(), Five(), object()])
def test_hooks_that_fit(local: Any) -> None:
    check_hooks("w", local, Cut(0), even=False)
    check_hooks("w", local, Cut(1), even=True)


@pytest.mark.parametrize(
    ("local", "dim", "message"),
    [
        (NoPre(), 0, "'w' is a NoPre, which has no fsdp_pre_all_gather"),
        (OnlyRelease(), 0, "'w' is a OnlyRelease, which has no fsdp_pre_all_gather"),
        (Three(), 0, "'w' is a Three, .* takes 3 arguments"),
        (Good(), 1, "'w' has all-gather hooks and is sharded on dim 1"),
    ],
)
def test_hooks_that_do_not(local: Any, dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_hooks("w", local, Cut(dim), even=False)


# ---- on paper


class Gathered(VirtualTensor):
    """A tensor over memory that comes and goes, as a hook makes it."""

    def stride(self) -> tuple[int, ...]:
        return (8, 1)

    def untyped_storage(self) -> Any:
        owner: VirtualTransient = self.owner

        def resize(nbytes: int) -> None:
            owner.acquire() if nbytes else owner.release()

        size = owner.nbytes
        return SimpleNamespace(
            _cdata=id(owner), size=lambda: size if owner.allocated else 0, resize_=resize
        )


class Local:
    """The shard of an extended parameter: hooks that say what they read and write."""

    def __init__(self, param: Extended) -> None:
        self._param = param

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        device = self._param.device
        inputs = []
        for shape, dtype in (((4, 8), I8), ((4, 1), F32)):
            tensor = VirtualTensor(_Counted(device, "input of the all-gather"), shape, dtype)
            device.run("quantise", [self._param.rows], [tensor])  # type: ignore[list-item]
            inputs.append(tensor)
        scale = VirtualTensor(_Counted(device, "metadata"), (1,), F32)
        device.run("metadata", [], [scale])
        return inputs, scale

    def fsdp_post_all_gather(self, outputs: Any, scale: Any, dtype: Any, out: Any = None) -> Any:
        device = self._param.device
        gathered = self._param.gathered
        if out is None:
            gathered = Gathered(VirtualTransient(device, 256, "gathered"), (8, 8), dtype)
        device.run("dequantise", [*outputs, scale], [gathered])  # type: ignore[list-item]
        return None if out is not None else (gathered, [gathered])


class Extended(VirtualParam):
    """A simulated parameter whose rows are not in the flat shard."""

    is_extended = True

    def __init__(self, device: VirtualDevice, name: str) -> None:
        super().__init__(device, name, (8, 8), F32)
        self.device = device
        self.local = Local(self)
        self.axes = SimpleNamespace(shard_mesh=None)
        self.entries = [(None, name)]

    def adopt_extended(self, slot: Any, offload: Any) -> None:
        self.rows = VirtualTensor(_Counted(self.device, "shard of the subclass"), (4, 8), F32)
        self.device.run("adopt", [], [self.rows])


def _simulate(world_size: int = 2) -> VirtualDevice:
    device = VirtualDevice()
    blocks = [Node(f"block {i}") for i in range(3)]
    simulation = Simulation(Node("root", blocks, calls=[0, 1, 2]), device, world_size)
    for unit in simulation.scheduler.units:
        for group in unit.own_groups:
            group.params[0] = Extended(device, f"{unit.name}.extended")  # type: ignore[call-overload]
            group.adopt()
    for _ in range(3):
        simulation.iteration()
    return device


@pytest.fixture
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_unsafe_preserve_version_counter", lambda _: nullcontext())
    monkeypatch.setattr(
        VirtualTensor, "untyped_storage", lambda _: SimpleNamespace(_cdata=None), raising=False
    )


@pytest.mark.usefixtures("_paper")
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_races(world_size: int) -> None:
    device = _simulate(world_size)
    assert device.races == []
    lanes: dict[str, set[str]] = {}
    for op in operations(device.trace):
        lanes.setdefault(op.kind, set()).add(op.lane.name)
    assert lanes["dequantise"] == {"COMPUTE"}
    # The first time on COMPUTE, where memory is allocated.
    assert lanes["quantise"] == ({"COMPUTE"} if world_size == 1 else {"COMPUTE", "COPY_IN"})
    live = {allocation.name for allocation in device.live}
    assert "input of the all-gather" not in live
    assert "all-gather output" not in live


@pytest.mark.usefixtures("_paper")
def test_waits_are_needed() -> None:
    device = _simulate()
    waits = enumerate(device.waits)
    noticed = {label for number, label in waits if races(device.without(number))}
    assert noticed >= {
        "copy-in after compute",
        "all-gather after copy-in",
        "compute after all-gather",
    }
