"""What fsdp2 takes a backend for, from facts that a stand-in can provide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.core.device.backends import _KNOWN, Traits, know, traits_of
from fsdp2.core.device.collectives import GroupCollectives, ReduceKind
from fsdp2.core.device.process_groups import _options_like, _unsplit
from tests.common import backends

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")

# kind -> coalesces, premultiplies, connects late
EXPECTED = {
    "nccl-legacy": (True, True, True),
    "nccl2": (False, True, True),
    "gloo": (False, False, False),
    "unknown": (False, False, False),
}


@pytest.mark.parametrize("kind", backends.KINDS)
def test_kinds(kind: str) -> None:
    traits = backends.known(kind)
    assert (traits.coalesces, traits.premultiplies, traits.connects_late) == EXPECTED[kind]
    assert kind == "unknown" or traits.source


def test_a_name_is_no_knowledge() -> None:
    """As `TORCH_DISTRIBUTED_USE_TORCHCOMMS` and other projects call theirs "nccl", too."""
    for name in ("nccl", "ncclx", "nccl2"):
        backend = type("_BackendWrapper", (), {"name": lambda self, name=name: name})()
        found = traits_of(backends.Served(backend), CPU)
        assert not found.coalesces
        assert not found.premultiplies
        assert found.name == "unknown (_BackendWrapper)"


def test_a_wrapped_backend_does_not_coalesce() -> None:
    wrapper = type("_ProcessGroupWrapper", (), {})
    backend: Any = wrapper()
    backend.wrapped_pg = backends.stand_in("nccl-legacy")
    found = traits_of(backends.Served(backend), CPU)
    assert found.name == "nccl-legacy, wrapped"
    assert (found.coalesces, found.premultiplies) == (False, True)


def test_a_group_in_python_is_known_by_its_own_class() -> None:
    class Mine:
        def _get_backend(self, device: torch.device) -> None:
            raise RuntimeError("no backend")

    try:
        assert not traits_of(Mine(), CPU).coalesces
        know("Mine", Traits("mine", coalesces=True))
        assert traits_of(Mine(), CPU).coalesces
    finally:
        _KNOWN.pop("Mine", None)


def test_classes_are_called_what_the_table_says() -> None:
    """In the torch that is installed, as far as it is built with them."""
    found = {name for name in vars(torch._C._distributed_c10d) if name in _KNOWN}
    assert {"ProcessGroupGloo", "FakeProcessGroup"} <= found
    if dist.is_nccl_available():
        assert "ProcessGroupNCCL" in found
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
            assert "ProcessGroupNCCL2" in found  # 2.14 may have it, and gives nobody one


# ---- a Work that is returned


class _Group:
    """Whose collectives return what they are told to."""

    def __init__(self, work: object) -> None:
        self._work = work
        self.size = self.rank = lambda: 1

    def _run(self, *_: object, **__: object) -> object:
        return self._work

    all_gather_single = all_gather_single_coalesced = _run
    reduce_scatter_single = reduce_scatter_single_coalesced = _run
    _allgather_base = allgather_into_tensor_coalesced = _run
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = _run


class _Work:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def _launch_all(work: object, asynchronous: bool) -> list[object]:
    group: Any = _Group(work)
    collectives, kind = GroupCollectives(group, CPU, asynchronous), ReduceKind(average=False)
    x = torch.zeros(1)
    return [
        collectives.all_gather(x, x),
        collectives.bind_all_gather_many([x], [x])(),
        collectives.bind_reduce_scatter(kind)(x, x),
        collectives.bind_reduce_scatter_many(kind)([x], [x]),
    ]


def test_on_streams_a_work_is_waited_for_at_once() -> None:
    """Nccl2 returns one, legacy NCCL does not; either way nothing is left to wait for."""
    work = _Work()
    assert _launch_all(work, True) == [None] * 4
    assert work.waits == 4
    assert _launch_all(None, True) == [None] * 4


def test_without_streams_a_work_is_returned() -> None:
    work = _Work()
    assert _launch_all(work, False) == [work] * 4
    assert work.waits == 0


# ---- process groups like another


class _Like(backends.Served):
    _device_types = (CPU,)


def _like(kind: str, options: object) -> Any:
    return _options_like(_Like(backends.stand_in(kind, options)))  # type: ignore[arg-type]


def test_options_are_carried_over() -> None:
    given = backends.Options()
    given.is_high_priority_stream = True
    given.config.max_ctas = 8
    given.split_from = "the default group"  # type: ignore[attr-defined]
    found = _like("nccl-legacy", given)
    assert found is not given
    assert found.is_high_priority_stream
    assert (found.config.max_ctas, found.config.min_ctas) == (8, backends.Config().min_ctas)
    assert found._timeout == given._timeout
    assert not hasattr(found, "split_from")
    assert not hasattr(found, "lazy_init")
    # Those that can leave out the split do.
    assert _like("nccl2", backends.LazyOptions()).lazy_init
    for other in ("gloo", "unknown"):
        assert _like(other, object()) is None


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch is built without NCCL")
def test_torchs_own_options() -> None:
    given = dist.ProcessGroupNCCL.Options()
    given.is_high_priority_stream = True
    given.config.min_ctas = 4
    found = _like("nccl-legacy", given)
    assert type(found) is dist.ProcessGroupNCCL.Options
    assert (found.is_high_priority_stream, found.config.min_ctas) == (True, 4)
    assert getattr(found, "lazy_init", True)


@pytest.mark.parametrize("options", [None, backends.Options(), backends.LazyOptions()])
def test_the_default_group_is_unbound_where_options_do_not_do(
    options: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class World:
        bound_device_id: object = "cuda:3"

    world = World()
    monkeypatch.setattr(type(dist.group), "WORLD", world, raising=False)
    seen: list[object] = []

    def fail() -> None:
        with _unsplit(options):
            seen.append(world.bound_device_id)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen[0] == ("cuda:3" if isinstance(options, backends.LazyOptions) else None)
    assert world.bound_device_id == "cuda:3"
