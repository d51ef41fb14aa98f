"""Collectives of the user's and in memory of the backend, on stand-ins and on paper."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp2 import MixedPrecisionPolicy
from fsdp2.core.config import GroupOptions
from fsdp2.core.device import comm_memory
from fsdp2.core.device.comm_memory import (
    GroupMemory,
    OwnAllGather,
    OwnReduceScatter,
    SymmetricMemory,
)
from fsdp2.core.device.streams import OnStream
from fsdp2.core.layout.layout import Cut, Slot, Transport
from fsdp2.core.reduce.spec import is_direct, reduction_spec
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.unit import Unit
from fsdp2.testing.parameters import VirtualParam
from fsdp2.testing.races import races
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import VirtualCollectives, VirtualDevice, VirtualTensor
from fsdp2.tracing.record.notes import operations

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")

# ---- memory of the process group


class Group:
    """A process group whose backend has an allocator, or not."""

    group_name = "group"

    def __init__(self, allocates: bool) -> None:
        self.allocates = allocates
        self.asked: list[Any] = []

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self.allocates

    def allocate_tensor(self, numel: int, **options: Any) -> torch.Tensor:
        self.asked.append((numel, options))
        return torch.zeros(numel, **options)


@pytest.mark.parametrize("allocates", [False, True])
@pytest.mark.parametrize("kind", [OwnAllGather, OwnReduceScatter])
def test_buffers_are_the_process_groups_where_it_has_an_allocator(
    kind: Any, allocates: bool
) -> None:
    group = Group(allocates)
    buffer = kind(GroupMemory(group)).allocate((6,), dtype=torch.bfloat16, device=CPU)
    assert buffer.shape == (6,)
    assert buffer.dtype is torch.bfloat16
    assert group.asked == ([(6, {"dtype": torch.bfloat16, "device": CPU})] if allocates else [])


# ---- symmetric memory


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What symmetric memory and the collectives were asked, on stand-ins."""
    import torch.distributed._symmetric_memory as symmetric

    heard: list[Any] = []

    @contextmanager
    def pool(found: str) -> Any:
        heard.append(f"in {found}")
        yield

    def meet(buffer: torch.Tensor, group: str) -> None:
        heard.append(f"meet {group} {buffer.numel()}")

    monkeypatch.setattr(symmetric, "set_backend", lambda name: heard.append(f"backend {name}"))
    monkeypatch.setattr(symmetric, "get_mem_pool", lambda device: "the pool")
    monkeypatch.setattr(symmetric, "rendezvous", meet)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(use_mem_pool=pool))
    monkeypatch.setattr(comm_memory, "run_barrier", lambda group: heard.append("barrier"))
    for name in ("run_all_gather", "run_reduce_scatter"):
        monkeypatch.setattr(comm_memory, name, lambda *_, name=name: heard.append(name))
    return heard


def symmetric_comms() -> tuple[OwnAllGather, OwnReduceScatter]:
    return OwnAllGather(SymmetricMemory("NCCL")), OwnReduceScatter(SymmetricMemory("NCCL"))


def test_symmetric_buffers_meet_before_the_collective(heard: list[Any]) -> None:
    gather, scatter = symmetric_comms()
    group: Any = Group(allocates=False)
    small, large = (gather.allocate((numel,), dtype=torch.float32, device=CPU) for numel in (2, 8))
    assert heard == ["backend NCCL", "backend NCCL", "in the pool", "in the pool"]
    heard.clear()
    for _ in range(2):
        gather(large, small, group)
    first = ["barrier", "meet group 8", "run_all_gather"]  # in place: the output alone
    assert heard == [*first, *first[1:]]
    heard.clear()
    scatter(small, large, group, op=None)
    assert heard == ["barrier", "meet group 8", "meet group 2", "run_reduce_scatter"]


@pytest.mark.usefixtures("heard")
def test_a_groups_options_are_its_units_in_the_memory_of_its_process_group() -> None:
    unit, group = chosen_for(shared := Group(allocates=False))
    comms = gather, reduce = symmetric_comms()
    own: Any = object()
    unit.set_comms({Group(allocates=False): comms})  # type: ignore[dict-item]  # a stand-in
    assert group.options is unit.options
    unit.set_comms({shared: comms})  # type: ignore[dict-item]
    assert (group.options.all_gather, group.options.reduce_scatter) == (gather, None)
    unit.change(sum_only=True, keep_storage=True)
    assert group.options.keep_storage
    assert group.options.reduce_scatter is reduce
    unit.change(reduce_scatter=own)
    assert (group.options.all_gather, group.options.reduce_scatter) == (gather, own)
    unit.set_comms({})
    assert group.options == replace(unit.options, all_gather=None)
    assert group.options.reduce_scatter is own


def chosen_for(shared: Any) -> tuple[Unit, ParamGroup]:
    """A unit with a group over a process group, before its first use."""
    device: Any = VirtualDevice()
    collectives: Any = VirtualCollectives(device, 2, coalesces=True)
    collectives.group = shared
    param: Any = VirtualParam(device, "weight", (8, 8), torch.float32, Cut(0))
    options = GroupOptions()
    group = ParamGroup("block", [param], options, collectives, device, device, device)
    return Unit("block", [group], options), group


# ---- what a reduction's spec says


def test_a_hooks_stream_and_the_users_collective_are_in_the_spec() -> None:
    dtypes = {"dtype": torch.float32, "dtype_override": None, "grad_dtype": torch.float32}
    param: Any = SimpleNamespace(**dtypes, exact=False)
    slot = Slot(0, (8, 8), Cut(0), 2, 0, 0)
    stream, comm = object(), object()

    def spec(**options: Any) -> Any:
        return reduction_spec(replace(GroupOptions(), **options), param, None, CPU)

    found = spec(all_reduce_hook=print, all_reduce_hook_stream=stream)
    assert found.hook == OnStream(print, stream)  # type: ignore[arg-type]  # a stand-in
    assert found == spec(all_reduce_hook=print, all_reduce_hook_stream=stream)  # one family
    assert is_direct(spec(), slot, Transport.COALESCED)
    assert not is_direct(spec(reduce_scatter=comm), slot, Transport.COALESCED)


# ---- the order of everything, on paper


class VirtualComm:
    """Collectives of a user who keeps his buffers, or not."""

    def __init__(self, device: VirtualDevice, keeps: bool) -> None:
        self._device = device
        self._keeps = keeps
        self._kept: dict[Any, VirtualTensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> VirtualTensor:
        key = (*size, dtype)
        if key in self._kept:
            return self._kept[key]
        buffer = self._device.empty(size, dtype, "the user's buffer")
        if self._keeps:
            self._kept[key] = buffer
        return buffer

    def __call__(self, output_tensor: Any, input_tensor: Any, **_: Any) -> None:
        self._device.run("the user's collective", [input_tensor], [output_tensor])


def _simulate(keeps: bool, mixed: bool) -> VirtualDevice:
    device = VirtualDevice()
    blocks = [Node(f"block {i}", shapes=((8, 8), (7, 3), (3,))) for i in range(3)]
    root = Node("root", blocks, calls=[0, 1, 2])
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else None
    simulation = Simulation(root, device, world_size=2, precision=precision)
    for unit in simulation.scheduler.units:
        for group in unit.own_groups:
            names = ("all_gather", "reduce_scatter")
            comms = {name: VirtualComm(device, keeps) for name in names}
            group.set_options(replace(group.options, **comms))  # type: ignore[arg-type]
    for _ in range(2):
        simulation.iteration()
    return device


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_nothing_races(keeps: bool, mixed: bool) -> None:
    device = _simulate(keeps, mixed)
    assert device.races == []
    used = [op for op in operations(device.trace) if op.kind == "the user's collective"]
    gathers = {op.lane.name for op in used}
    assert gathers == {"ALL_GATHER", "REDUCE"}


def test_waits_are_needed() -> None:
    device = _simulate(keeps=True, mixed=True)
    waits = enumerate(device.waits)
    noticed = {label for number, label in waits if races(device.without(number))}
    assert noticed >= {
        "copy-in after compute",
        "all-gather after copy-in",
        "compute after all-gather",
        "reduction after compute",
    }
