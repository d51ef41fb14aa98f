"""Backwards that the caller ends, reductions that outlive them, and gathers on request: on paper.

Schedules are printed as in `test_schedule`.
"""

from __future__ import annotations

from typing import Any

import pytest
from expecttest import assert_expected_inline

from fsdp2.core.config import CPUOffloadPolicy
from fsdp2.core.schedule.iteration import InFlight
from fsdp2.core.schedule.unit import Phase
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import VirtualDevice
from fsdp2.tracing.record.notes import HOST, Await, operations
from tests.common import schedules

pytestmark = pytest.mark.alone

OFFLOAD = CPUOffloadPolicy(pin_memory=False)


def _set(sim: Simulation, **flags: object) -> None:
    """Flags of all units."""
    for unit in sim.scheduler.units:
        for name, value in flags.items():
            setattr(unit, name, value)


# -- finalize -------------------------------------------------------------------------------------


def test_accumulated_gradients_are_reduced_by_finalize() -> None:
    sim = schedules.warm(schedules.chain("a", "b"))
    sim.scheduler.manual = True
    _set(sim, sync=False)
    for _ in range(2):
        sim.iteration(step=False)
    assert not [op for op in operations(sim.device.trace) if op.kind == "reduce_scatter"][2:]
    _set(sim, sync=True)
    assert_expected_inline(
        schedules.emitted(sim, lambda: sim.scheduler.finalize(wait=False)),
        """\
reduce:
  reduce_scatter a            after compute backward root
  reduce_scatter b            after compute backward root""",
    )

    def wait() -> None:
        sim.scheduler.wait_for_reductions()
        sim.optimizer_step()

    assert_expected_inline(
        schedules.emitted(sim, wait),
        """\
compute:
  step a                      after reduce_scatter b
  step b""",
    )


def test_reductions_in_backward_are_left_in_flight() -> None:
    sim = schedules.warm(schedules.chain("a", "b"))
    sim.scheduler.manual = True
    sim.forward()
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  alloc b
  alloc a
  backward b                  after all_gather b
  gradient b
  free b
  backward root
  backward a                  after all_gather a
  gradient a
  free a
  backward root               after reduce_scatter b
all_gather:
  all_gather b                after compute backward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )

    def finalize() -> None:
        sim.scheduler.finalize(wait=True)
        sim.optimizer_step()

    assert_expected_inline(
        schedules.emitted(sim, finalize),
        """\
compute:
  step a                      after reduce_scatter a
  step b""",
    )


def test_parameters_that_backward_kept_are_freed_if_flags_say_so() -> None:
    sim = schedules.warm(schedules.chain("a", "b"))
    sim.scheduler.manual = True
    _set(sim, reshard_after_backward=False)
    sim.iteration(step=False)
    assert all(group.is_retained for group in schedules.groups(sim))
    sim.scheduler.finalize(wait=True)
    assert all(group.is_retained for group in schedules.groups(sim))
    _set(sim, reshard_after_backward=True)
    sim.scheduler.finalize(wait=True)
    assert not any(unit.is_gathered for unit in sim.scheduler.units)


def test_finalize_between_forward_and_backward() -> None:
    sim = schedules.warm(schedules.chain("a", "b", reshard_after_forward=False))
    sim.scheduler.manual = True
    sim.forward()
    sim.scheduler.finalize(wait=True)
    assert not any(unit.is_gathered for unit in sim.scheduler.units)
    sim.backward()
    sim.scheduler.finalize(wait=True)
    sim.optimizer_step()
    assert sim.device.races == []


# -- replicas -------------------------------------------------------------------------------------


def test_all_reduce_runs_one_unit_longer() -> None:
    sim = schedules.warm(schedules.chain("a", "b", "c"), copies=2)
    sim.forward()
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  alloc c
  alloc b
  backward c                  after all_gather c
  gradient c
  free c
  backward root
  alloc a
  backward b                  after all_gather b
  gradient b
  free b
  backward root               after reduce_scatter c
  backward a                  after all_gather a
  gradient a
  free a
  backward root               after reduce_scatter b, all_reduce c
  end                         after reduce_scatter a, all_reduce b, all_reduce a
all_gather:
  all_gather c                after compute backward root
  all_gather b                after compute backward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter c            after compute gradient c
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a
all_reduce:
  all_reduce c                after reduce_scatter c
  all_reduce b                after reduce_scatter b
  all_reduce a                after reduce_scatter a""",
    )


def test_partial_sums_wait_for_an_all_reduce() -> None:
    sim = schedules.warm(schedules.chain("a"), copies=2)
    _set(sim, all_reduce=False)
    sim.iteration(step=False)
    assert all(group.accumulates for group in schedules.groups(sim))
    sim.scheduler.is_last_backward = False
    sim.iteration(step=False)
    _set(sim, all_reduce=True)
    sim.scheduler.is_last_backward = True
    sim.forward()
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  alloc a
  backward a                  after all_gather a
  gradient a
  free a
  backward root               after add a
  end                         after reduce_scatter a, all_reduce a
all_gather:
  all_gather a                after compute backward root
reduce:
  reduce_scatter a            after compute gradient a
all_reduce:
  add a                       after reduce_scatter a
  all_reduce a""",
    )
    assert not any(group.accumulates for group in schedules.groups(sim))


@pytest.mark.parametrize("copies", [1, 2])
def test_gathers_wait_for_hooks_behind_reductions_in_flight(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> VirtualDevice:
        sim = schedules.warm(schedules.chain("a", "b"), copies=copies)
        sim.step_in_backward()
        sim.scheduler.is_last_backward = False
        for _ in range(3):
            sim.iteration(step=False)
        sim.scheduler.is_last_backward = True
        sim.iteration(step=False)
        return sim.device

    assert run().races == []
    monkeypatch.setattr(InFlight, "order_after_hooks", lambda self: None)
    assert any("reads shard while" in race for race in run().races)


@pytest.mark.parametrize("copies", [1, 2])
def test_exception_in_a_hook(copies: int) -> None:
    """Whatever the interrupted reduction uses may be reused after the reset."""
    sim = schedules.warm(schedules.chain("a", "b", "c"), copies=copies)

    def fail(param: Any) -> None:
        raise KeyError(param.name)

    for name in ("c", "b", "a"):
        (group,) = schedules.unit_of(sim, name).own_groups
        group.params[0].hook = fail  # type: ignore[attr-defined]
        with pytest.raises(KeyError):
            sim.iteration()
        group.params[0].hook = None  # type: ignore[attr-defined]
        sim.active.clear()
        sim.calls.clear()
        sim.scheduler.reset()
        sim.iteration()
    assert sim.device.races == []


@pytest.mark.parametrize("copies", [1, 2])
def test_results_that_the_host_delivers_leave_the_device_at_once(copies: int) -> None:
    sim = schedules.warm(schedules.chain("a", "b", "c", "d"), copies=copies, offload=OFFLOAD)
    results: list[int] = []

    def look(sim: Simulation, what: str) -> None:
        names = [allocation.name for allocation in sim.device.live]
        results.append(names.count("reduce-scatter output"))

    sim._check = look
    sim.forward()
    sim.backward()
    sim._check = None
    assert max(results) <= (2 if copies == 1 else 3)
    assert any(isinstance(n, Await) and n.lane is HOST for n in sim.device.trace[-4:])
    sim.optimizer_step()
    assert sim.device.races == []


# -- gathers on request ---------------------------------------------------------------------------


def test_what_was_requested_and_used_is_freed_by_a_backward_that_is_not_the_last() -> None:
    sim = schedules.warm(schedules.chain("a", "b", grad_to_input=False))
    a, b = schedules.unit_of(sim, "a"), schedules.unit_of(sim, "b")
    b.backward_prefetch = [a]
    sim.scheduler.is_last_backward = False
    sim.forward()
    sim.backward()
    assert not a.is_gathered


def test_backwards_that_are_not_the_last_gather_nothing_in_vain() -> None:
    """Each has a forward of its own, and nothing to expect of those before it."""
    sim = schedules.warm(schedules.chain("a", "b"))
    sim.scheduler.is_last_backward = False
    sim.iteration(step=False)
    sim.forward()
    gathered = [op for op in operations(sim.device.trace) if op.kind == "all_gather"]
    sim.backward()
    after = [op for op in operations(sim.device.trace) if op.kind == "all_gather"]
    assert len(after) - len(gathered) == 2
    assert not any(unit.is_gathered for unit in sim.scheduler.units)


def test_a_guess_for_the_next_backward_stays() -> None:
    """Two forwards, of which the first backward leaves b gathered ahead for the second."""
    sim = schedules.warm(schedules.chain("a", "b"))
    sim.scheduler.is_last_backward = False
    sim.forward()
    sim.forward()
    sim.backward()
    assert schedules.unit_of(sim, "b").is_gathered
    assert all(unit.phase is Phase.IDLE for unit in sim.scheduler.units)
    sim.scheduler.is_last_backward = True
    sim.backward()
    assert not any(unit.is_gathered for unit in sim.scheduler.units)
    assert sim.device.races == []


# -- windows --------------------------------------------------------------------------------------


def test_two_reductions_in_flight() -> None:
    sim = schedules.warm(schedules.chain("a", "b", "c"))
    _set(sim, input_buffers=2)
    sim.scheduler.refresh()
    sim.forward()
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  alloc c
  alloc b
  backward c                  after all_gather c
  gradient c
  free c
  backward root
  alloc a
  backward b                  after all_gather b
  gradient b
  free b
  backward root
  backward a                  after all_gather a
  gradient a
  free a
  backward root               after reduce_scatter c
  end                         after reduce_scatter b, reduce_scatter a
all_gather:
  all_gather c                after compute backward root
  all_gather b                after compute backward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter c            after compute gradient c
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )


# -- an optimizer on another stream ---------------------------------------------------------------


def test_gradients_may_go_after_a_forward_that_gathers_nothing() -> None:
    root = Node("root", [schedules.leaf("a"), Node("bare", shapes=())], calls=[0], shapes=())
    sim = Simulation(root, VirtualDevice())
    sim.iteration(step=False)
    sim.step_elsewhere()
    root.calls = [1]
    sim.forward()
    sim.drop_gradients()
    sim.backward()
    assert sim.device.races == []
    assert sim.device.waits[-1] == "compute after the optimizer"
