"""Windows of several units: which gathers are issued when, behind what, and what is freed."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from fsdp2.core.modules.registry import note_calls
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.tracing.record.notes import operations
from tests.common import schedules

pytestmark = pytest.mark.alone


def gathers(sim: Simulation, start: int) -> list[str]:
    """The units that were gathered since, in the order of their gathers."""
    found = operations(sim.device.trace[start:])
    return [op.writes[0].name.split()[1] for op in found if op.kind == "all_gather"]


def choose(sim: Simulation, window: int) -> None:
    for unit in sim.scheduler.units:
        unit.prefetch_window = window
    sim.scheduler.refresh()


def test_two_units_are_gathered_ahead() -> None:
    """Gather i+2 waits for compute i-1, as gather i+1 does where the window is one unit."""
    sim = schedules.warm(schedules.chain("a", "b", "c", "d"), window=2)
    assert_expected_inline(
        schedules.emitted(sim, sim.forward),
        """\
compute:
  forward root
  alloc a
  alloc b
  alloc c
  forward a                   after all_gather a
  free a
  forward root
  alloc d
  forward b                   after all_gather b
  free b
  forward root
  forward c                   after all_gather c
  free c
  forward root
  forward d                   after all_gather d
  free d
  forward root
all_gather:
  all_gather a                after compute forward root
  all_gather b                after compute forward root
  all_gather c                after compute forward root
  all_gather d                after compute forward root""",
    )


def test_backward_looks_ahead_too() -> None:
    sim = schedules.warm(schedules.chain("a", "b", "c", "d"), window=2)
    sim.forward()
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  alloc d
  alloc c
  alloc b
  backward d                  after all_gather d
  gradient d
  free d
  backward root
  alloc a
  backward c                  after all_gather c
  gradient c
  free c
  backward root               after reduce_scatter d
  backward b                  after all_gather b
  gradient b
  free b
  backward root               after reduce_scatter c
  backward a                  after all_gather a
  gradient a
  free a
  backward root               after reduce_scatter b
  end                         after reduce_scatter a
all_gather:
  all_gather d                after compute backward root
  all_gather c                after compute backward root
  all_gather b                after compute backward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter d            after compute gradient d
  reduce_scatter c            after compute gradient c
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )


def test_a_unit_that_comes_again_within_the_window_stays() -> None:
    """And is gathered once a forward, once a backward."""
    root = Node("root", [schedules.leaf("a"), schedules.leaf("b")], [0, 1, 0, 1], shapes=())
    for window, count in ((1, 4), (2, 2)):
        sim = schedules.warm(root, window=window)
        start = len(sim.device.trace)
        sim.forward()
        assert gathers(sim, start) == ["a", "b"] * (count // 2)
        start = len(sim.device.trace)
        sim.backward()
        assert gathers(sim, start) == ["b", "a"] * (count // 2)
        assert sim.device.races == []


def test_what_is_not_used_makes_room() -> None:
    """The order of the last forward misleads: guesses go when others need their place."""
    root = schedules.chain("a", "b", "c", "d", "e")
    sim = schedules.warm(root, window=2)
    ahead: dict[str, str] = {}
    root.calls = [0, 3, 4]

    def look(sim: Simulation, what: str) -> None:
        ahead[what] = "".join(unit.name for unit in sim.gathered_ahead())

    sim._check = look
    start = len(sim.device.trace)
    sim.forward()
    assert gathers(sim, start) == ["a", "b", "c", "d", "e"]
    assert ahead["forward a"] == "bc"
    assert ahead["forward d"] == "ce"  # the oldest guess, b, made room for e
    assert ahead["forward e"] == "c"
    assert ahead["loss"] == ""


def test_lists_of_the_users_win() -> None:
    sim = schedules.warm(schedules.chain("a", "b", "c", "d"), window=3)
    a, d = schedules.unit_of(sim, "a"), schedules.unit_of(sim, "d")
    a.forward_prefetch = [d]
    start = len(sim.device.trace)
    sim.forward()
    assert gathers(sim, start)[:2] == ["a", "d"]
    assert sim.device.races == []
    assert sim.gathered_ahead() == []


def test_the_largest_window_below_a_root_counts() -> None:
    sim = schedules.warm(schedules.chain("a", "b", "c"))
    schedules.unit_of(sim, "b").prefetch_window = 3
    sim.scheduler.refresh()
    assert sim.scheduler.window == 3
    schedules.unit_of(sim, "b").prefetch_window = 1
    sim.scheduler.refresh()
    assert sim.scheduler.window == 1


def test_what_units_ask_for_combines() -> None:
    sim = schedules.warm(schedules.chain("a", "b", "c"))
    note_calls(sim.scheduler)
    choose(sim, 2)
    for group in sim.scheduler.groups:
        group.options = group.options.__class__(reduce_unused=True)
    sim.scheduler.refresh()
    assert sim.scheduler.calls is not None
    assert sim.scheduler.iteration.retracing is not None
    assert sim.scheduler.window == 2
    sim.iteration()
    choose(sim, 1)
    assert sim.scheduler.window == 1
    assert sim.scheduler.iteration.retracing is not None
    sim.iteration()
    assert sim.device.races == []
