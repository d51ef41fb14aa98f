"""The schedule that is emitted, lane by lane, with what each lane waits for.

All are of the second iteration unless a test says otherwise: the order is known by then. To
accept a change on purpose: ``EXPECTTEST_ACCEPT=1 pytest tests/schedule/test_schedule.py``.
"""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from fsdp2.core.config import MixedPrecisionPolicy
from fsdp2.testing.simulation import Node
from tests.common import schedules

pytestmark = pytest.mark.alone


def test_one_block() -> None:
    sim = schedules.warm(schedules.leaf("root"))
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  alloc root
  forward root                after all_gather root
  backward root
  gradient root
  free root
  step root                   after reduce_scatter root
all_gather:
  all_gather root             after compute step root
reduce:
  reduce_scatter root         after compute gradient root""",
    )


def test_nested_blocks() -> None:
    mid = Node("mid", [schedules.leaf("leaf")], [0], shapes=schedules.SHAPES)
    sim = schedules.warm(
        Node("root", [mid, schedules.leaf("head")], [0, 1], shapes=schedules.SHAPES)
    )
    assert_expected_inline(
        schedules.emitted(sim, sim.forward),
        """\
compute:
  alloc root
  alloc mid
  forward root                after all_gather root
  alloc leaf
  forward mid                 after all_gather mid
  alloc head
  forward leaf                after all_gather leaf
  free leaf
  forward mid
  free mid
  forward root
  forward head                after all_gather head
  free head
  forward root
all_gather:
  all_gather root             after compute step head
  all_gather mid              after compute step head
  all_gather leaf             after compute forward root
  all_gather head             after compute forward mid""",
    )
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  alloc head
  backward root
  alloc mid
  backward head               after all_gather head
  gradient head
  free head
  backward root
  alloc leaf
  backward mid                after all_gather mid
  backward leaf               after all_gather leaf
  gradient leaf
  free leaf
  backward mid                after reduce_scatter head
  gradient mid
  free mid
  backward root               after reduce_scatter leaf
  gradient root
  free root
  end                         after reduce_scatter mid, reduce_scatter root
all_gather:
  all_gather head             after compute forward root
  all_gather mid              after compute backward root
  all_gather leaf             after compute backward root
reduce:
  reduce_scatter head         after compute gradient head
  reduce_scatter leaf         after compute gradient leaf
  reduce_scatter mid          after compute gradient mid
  reduce_scatter root         after compute gradient root""",
    )


def test_prefetch_in_the_order_of_the_last_forward() -> None:
    """Whose first unit it was; nothing is gathered ahead where none is known."""
    mid = Node("mid", [schedules.leaf("a"), schedules.leaf("b")], [0, 1], shapes=schedules.SHAPES)
    sim = schedules.bound(Node("root", [mid], [0], shapes=schedules.SHAPES))
    assert_expected_inline(
        schedules.emitted(sim, lambda: sim.forward(start=mid)),
        """\
compute:
  alloc mid
  forward mid                 after all_gather mid
  alloc a
  forward a                   after all_gather a
  free a
  forward mid
  alloc b
  forward b                   after all_gather b
  free b
  forward mid
  free mid
all_gather:
  all_gather mid              after compute zeros
  all_gather a                after compute forward mid
  all_gather b                after compute forward mid""",
    )
    assert_expected_inline(
        schedules.emitted(sim, lambda: sim.forward(start=mid)),
        """\
compute:
  alloc mid
  alloc a
  forward mid                 after all_gather mid
  alloc b
  forward a                   after all_gather a
  free a
  forward mid
  forward b                   after all_gather b
  free b
  forward mid
  free mid
all_gather:
  all_gather mid              after compute forward mid
  all_gather a                after compute forward mid
  all_gather b                after compute forward mid""",
    )


@pytest.mark.parametrize("explicit", [False, True])
def test_wrong_guess_makes_room_for_the_next(explicit: bool) -> None:
    root = schedules.chain("a", "b", "c", "d")
    sim = schedules.warm(root)
    if explicit:
        schedules.unit_of(sim, "c").forward_prefetch = [schedules.unit_of(sim, "d")]
    root.calls = [0, 2, 3]
    assert_expected_inline(
        schedules.emitted(sim, sim.forward),
        """\
compute:
  forward root
  alloc a
  alloc b
  forward a                   after all_gather a
  free a
  forward root
  alloc c
  free b                      after all_gather c, all_gather b
  alloc d
  forward c
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


def test_explicit_prefetch() -> None:
    """As with torch's FSDP2: the root's list counts, whatever it owns."""
    sim = schedules.warm(schedules.chain("a", "b", "c"))
    root, a, b, c = sim.scheduler.units
    root.forward_prefetch, a.forward_prefetch = [a], [b, c]
    root.backward_prefetch, c.backward_prefetch = [c], [b, a]
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  alloc a
  forward root
  alloc b
  alloc c
  forward a                   after all_gather a
  free a
  forward root
  forward b                   after all_gather b
  free b
  forward root
  forward c                   after all_gather c
  free c
  forward root
  alloc c
  backward root
  alloc b
  alloc a
  backward c                  after all_gather c
  gradient c
  free c
  backward root
  backward b                  after all_gather b
  gradient b
  free b
  backward root               after reduce_scatter c
  backward a                  after all_gather a
  gradient a
  free a
  backward root               after reduce_scatter b
  step a                      after reduce_scatter a
  step b
  step c
all_gather:
  all_gather a                after compute step c
  all_gather b                after compute forward root
  all_gather c                after compute forward root
  all_gather c                after compute forward root
  all_gather b                after compute backward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter c            after compute gradient c
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )


def test_reshard_after_forward() -> None:
    sim = schedules.warm(schedules.leaf("root", reshard_after_forward=True))
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  alloc root
  forward root                after all_gather root
  free root
  alloc root
  backward root               after all_gather root
  gradient root
  free root
  step root                   after reduce_scatter root
all_gather:
  all_gather root             after compute step root
  all_gather root             after compute forward root
reduce:
  reduce_scatter root         after compute gradient root""",
    )


def test_no_reshard_after_forward() -> None:
    sim = schedules.warm(schedules.chain("a", reshard_after_forward=False))
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  forward root
  alloc a
  forward a                   after all_gather a
  forward root
  backward root
  backward a
  gradient a
  free a
  backward root
  step a                      after reduce_scatter a
all_gather:
  all_gather a                after compute forward root
reduce:
  reduce_scatter a            after compute gradient a""",
    )


def test_accumulation() -> None:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    sim = schedules.warm(schedules.chain("a"), precision=precision)

    def backward(sync: bool) -> str:
        sim.forward()
        for unit in sim.scheduler.units:
            unit.sync = sync
        return schedules.emitted(sim, sim.backward)

    assert_expected_inline(
        backward(sync=False),
        """\
compute:
  backward root
  alloc a
  backward a                  after all_gather a
  gradient a
  copy a
  free a
  backward root
copy_in:
  copy a                      after compute backward root
all_gather:
  all_gather a                after copy a""",
    )
    assert_expected_inline(
        backward(sync=True),
        """\
compute:
  backward root
  alloc a
  backward a                  after all_gather a
  gradient a
  free a
  copy a
  backward root
  end                         after reduce_scatter a
copy_in:
  copy a                      after compute backward root
all_gather:
  all_gather a                after copy a
reduce:
  reduce_scatter a            after compute copy a""",
    )


def test_no_reshard_after_backward() -> None:
    sim = schedules.warm(schedules.chain("a"))
    for unit in sim.scheduler.units:
        unit.reshard_after_backward = False
    for _ in range(2):  # the second forward finds something to use again
        sim.iteration(step=False)
    sim.optimizer_step()
    sim.forward()
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  fingerprint a
  alloc a
  backward a                  after all_gather a
  gradient a
  backward root
  end                         after reduce_scatter a
all_gather:
  all_gather a                after compute fingerprint a
reduce:
  reduce_scatter a            after compute gradient a""",
    )
    # nothing to gather
    assert_expected_inline(
        schedules.emitted(sim, sim.forward),
        """\
compute:
  fingerprint a
  forward root
  forward a
  free a
  forward root""",
    )


def test_kept_parameters_are_gathered_again_after_a_step() -> None:
    """Steps that use nothing again take no fingerprints."""
    sim = schedules.warm(schedules.chain("a"))
    for unit in sim.scheduler.units:
        unit.reshard_after_backward = False
    sim.iteration()
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  free a
  forward root
  alloc a
  forward a                   after all_gather a
  free a
  forward root
  backward root
  alloc a
  backward a                  after all_gather a
  gradient a
  backward root
  step a                      after reduce_scatter a
all_gather:
  all_gather a                after compute forward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter a            after compute gradient a""",
    )


def test_world_size_one() -> None:
    sim = schedules.warm(schedules.chain("a", "b"), world_size=1)
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  forward root
  alloc a
  forward a
  free a
  forward root
  alloc b
  forward b
  free b
  forward root
  backward root
  alloc b
  backward b
  gradient b
  free b
  backward root
  alloc a
  backward a
  gradient a
  free a
  backward root
  step a
  step b""",
    )


def test_world_size_one_with_casts() -> None:
    precision = MixedPrecisionPolicy(torch.bfloat16)
    sim = schedules.warm(schedules.leaf("root"), world_size=1, precision=precision)
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  alloc root
  copy root
  forward root
  backward root
  gradient root
  free root
  copy root
  step root""",
    )


def test_packed_with_casts() -> None:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    leaves = [Node(name, shapes=schedules.SHAPES * 2) for name in ("a", "b")]
    root = Node("root", leaves, [0, 1], shapes=())
    sim = schedules.warm(root, coalesces=False, precision=precision)
    sim.forward()
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  alloc b
  copy_out b                  after all_gather b
  backward b
  gradient b
  free b
  chunk_cat b
  backward root
  alloc a
  copy_out a                  after all_gather a
  backward a
  gradient a
  free a
  chunk_cat a                 after copy b
  backward root
  end                         after copy a
copy_in:
  copy b                      after compute backward root
  copy a                      after compute copy_out b
all_gather:
  all_gather b                after copy b
  all_gather a                after copy a
reduce:
  reduce_scatter b            after compute chunk_cat b
  copy b
  reduce_scatter a            after compute chunk_cat a
  copy a""",
    )


def test_packed_with_casts_of_one_parameter_a_unit() -> None:
    """It is gathered into its slot: nothing to copy behind the collective."""
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    sim = schedules.warm(schedules.chain("a", "b"), coalesces=False, precision=precision)
    assert_expected_inline(
        schedules.emitted(sim, sim.forward),
        """\
compute:
  forward root
  alloc a
  alloc b
  forward a                   after all_gather a
  free a
  forward root
  forward b                   after all_gather b
  free b
  forward root
copy_in:
  copy a                      after compute forward root
  copy b                      after compute forward root
all_gather:
  all_gather a                after copy a
  all_gather b                after copy b""",
    )


def test_two_forwards_and_one_backward() -> None:
    sim = schedules.warm(schedules.chain("a", "b"))
    sim.forward()
    sim.forward()
    assert_expected_inline(
        schedules.emitted(sim, lambda: sim.backward(2)),
        """\
compute:
  backward root
  alloc b
  alloc a
  backward b                  after all_gather b
  free b
  backward root
  alloc b
  backward a                  after all_gather a
  free a
  backward root
  alloc a
  backward b                  after all_gather b
  gradient b
  free b
  backward root
  backward a                  after all_gather a
  gradient a
  free a
  backward root               after reduce_scatter b
  end                         after reduce_scatter a
all_gather:
  all_gather b                after compute backward root
  all_gather a                after compute backward root
  all_gather b                after compute backward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )


def test_unit_called_twice_in_a_row() -> None:
    root = schedules.chain("a", "b")
    root.calls = [0, 0, 1]
    sim = schedules.warm(root)
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  forward root
  alloc a
  forward a                   after all_gather a
  forward root
  alloc b
  forward a
  free a
  forward root
  forward b                   after all_gather b
  free b
  forward root
  backward root
  alloc b
  alloc a
  backward b                  after all_gather b
  gradient b
  free b
  backward root
  backward a                  after all_gather a
  backward root
  backward a
  gradient a
  free a
  backward root               after reduce_scatter b
  step a                      after reduce_scatter a
  step b
all_gather:
  all_gather a                after compute forward root
  all_gather b                after compute forward root
  all_gather b                after compute backward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )


def test_unit_of_empty_parameters() -> None:
    """Only memory of no bytes."""
    sim = schedules.warm(Node("root", shapes=((0, 8),)))
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  alloc root
  forward root
  backward root
  gradient
  free root
  step""",
    )


def test_step_in_backward_after_gradients_that_were_left() -> None:
    sim = schedules.warm(schedules.chain("a"))
    sim.iteration(step=False)
    sim.step_in_backward()
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
  backward root
  end                         after step a
all_gather:
  all_gather a                after compute backward root
reduce:
  reduce_scatter a            after compute gradient a
  add a
  step a""",
    )
