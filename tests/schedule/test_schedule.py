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
    mid = Node(
        "mid", [schedules.leaf("leaf"), schedules.leaf("twin")], [0, 1], shapes=schedules.SHAPES
    )
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
  alloc twin
  forward leaf                after all_gather leaf
  free leaf
  forward mid
  alloc head
  forward twin                after all_gather twin
  free twin
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
  all_gather twin             after compute forward mid
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
  alloc twin
  backward mid                after all_gather mid
  alloc leaf
  backward twin               after all_gather twin
  gradient twin
  free twin
  backward mid                after reduce_scatter head
  backward leaf               after all_gather leaf
  gradient leaf
  free leaf
  backward mid                after reduce_scatter twin
  gradient mid
  free mid
  backward root               after reduce_scatter leaf
  gradient root
  free root
  end                         after reduce_scatter mid, reduce_scatter root
all_gather:
  all_gather head             after compute forward root
  all_gather mid              after compute backward root
  all_gather twin             after compute backward root
  all_gather leaf             after compute backward mid
reduce:
  reduce_scatter head         after compute gradient head
  reduce_scatter twin         after compute gradient twin
  reduce_scatter leaf         after compute gradient leaf
  reduce_scatter mid          after compute gradient mid
  reduce_scatter root         after compute gradient root""",
    )


def test_no_prefetch_where_no_order_is_known() -> None:
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


def test_prefetch_in_the_order_of_the_last_forward() -> None:
    mid = Node("mid", [schedules.leaf("a"), schedules.leaf("b")], [0, 1], shapes=schedules.SHAPES)
    sim = schedules.bound(Node("root", [mid], [0], shapes=schedules.SHAPES))
    sim.forward(start=mid)
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


def test_wrong_guess_makes_room_for_the_next() -> None:
    root = schedules.chain("a", "b", "c", "d")
    sim = schedules.warm(root)
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


def test_guess_that_was_only_early_is_used() -> None:
    root = schedules.chain("a", "b", "x")
    root.calls = [0, 1]
    sim = schedules.warm(root)
    root.calls = [0, 2, 1]  # what follows x is not known, so that b need not make room
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
  alloc x
  forward x                   after all_gather x
  free x
  forward root
  forward b                   after all_gather b
  free b
  forward root
all_gather:
  all_gather a                after compute forward root
  all_gather b                after compute forward root
  all_gather x                after compute forward root""",
    )


def test_last_wrong_guess_is_freed_at_the_loss() -> None:
    root = schedules.chain("a", "b", "c")
    sim = schedules.warm(root)
    root.calls = [0, 2]
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
  forward c                   after all_gather c
  free c
  forward root
  free b                      after all_gather b
all_gather:
  all_gather a                after compute forward root
  all_gather b                after compute forward root
  all_gather c                after compute forward root""",
    )


def test_explicit_forward_prefetch() -> None:
    sim = schedules.warm(schedules.chain("a", "b", "c"))
    _, a, b, c = sim.scheduler.units
    a.forward_prefetch = [b, c]
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
  forward b                   after all_gather b
  free b
  forward root
  forward c                   after all_gather c
  free c
  forward root
all_gather:
  all_gather a                after compute forward root
  all_gather b                after compute forward root
  all_gather c                after compute forward root""",
    )


def test_explicit_prefetch_of_a_unit_without_parameters() -> None:
    """As with torch's FSDP2: the root's list counts, whatever it owns."""
    sim = schedules.warm(schedules.chain("a", "b"))
    root, a, b = sim.scheduler.units
    root.forward_prefetch, root.backward_prefetch = [a, b], [b, a]
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  alloc a
  alloc b
  forward root
  forward a                   after all_gather a
  free a
  forward root
  forward b                   after all_gather b
  free b
  forward root
  alloc b
  alloc a
  backward root
  backward b                  after all_gather b
  gradient b
  free b
  backward root
  backward a                  after all_gather a
  gradient a
  free a
  backward root               after reduce_scatter b
  step a                      after reduce_scatter a
  step b
all_gather:
  all_gather a                after compute step b
  all_gather b                after compute step b
  all_gather b                after compute forward root
  all_gather a                after compute forward root
reduce:
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )


def test_explicit_prefetch_takes_the_place_of_a_wrong_guess() -> None:
    root = schedules.chain("a", "b", "c", "d")
    sim = schedules.warm(root)
    _, _, _, c, d = sim.scheduler.units
    c.forward_prefetch = [d]
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


def test_explicit_backward_prefetch() -> None:
    sim = schedules.warm(schedules.chain("a", "b", "c"))
    _, a, b, c = sim.scheduler.units
    c.backward_prefetch = [b, a]
    sim.forward()
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  alloc c
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
  end                         after reduce_scatter a
all_gather:
  all_gather c                after compute backward root
  all_gather b                after compute backward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter c            after compute gradient c
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )


def test_reshard_after_forward() -> None:
    root = Node(
        "root", [schedules.leaf("a")], [0], shapes=schedules.SHAPES, reshard_after_forward=True
    )
    sim = schedules.warm(root)
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  alloc root
  alloc a
  forward root                after all_gather root
  forward a                   after all_gather a
  free a
  forward root
  free root
  alloc root
  alloc a
  backward root               after all_gather root
  backward a                  after all_gather a
  gradient a
  free a
  backward root
  gradient root
  free root
  step root                   after reduce_scatter a, reduce_scatter root
  step a
all_gather:
  all_gather root             after compute step a
  all_gather a                after compute step a
  all_gather root             after compute forward root
  all_gather a                after compute forward root
reduce:
  reduce_scatter a            after compute gradient a
  reduce_scatter root         after compute gradient root""",
    )


def test_no_reshard_after_forward() -> None:
    sim = schedules.warm(schedules.chain("a", "b", reshard_after_forward=False))
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  forward root
  alloc a
  alloc b
  forward a                   after all_gather a
  forward root
  forward b                   after all_gather b
  forward root
  backward root
  backward b
  gradient b
  free b
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
reduce:
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )


def test_accumulation() -> None:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    sim = schedules.warm(schedules.chain("a", "b"), precision=precision)
    sim.forward()
    for unit in sim.scheduler.units:
        unit.sync = False
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  alloc b
  alloc a
  backward b                  after all_gather b
  gradient b
  copy b
  free b
  backward root
  backward a                  after all_gather a
  gradient a
  copy a
  free a
  backward root
copy_in:
  copy b                      after compute backward root
  copy a                      after compute backward root
all_gather:
  all_gather b                after copy b
  all_gather a                after copy a""",
    )
    sim.forward()
    for unit in sim.scheduler.units:
        unit.sync = True
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
  copy b
  backward root
  backward a                  after all_gather a
  gradient a
  free a
  copy a                      after reduce_scatter b
  backward root
  end                         after reduce_scatter a
copy_in:
  copy b                      after compute backward root
  copy a                      after compute backward root
all_gather:
  all_gather b                after copy b
  all_gather a                after copy a
reduce:
  reduce_scatter b            after compute copy b
  reduce_scatter a            after compute copy a""",
    )


def test_no_reshard_after_backward() -> None:
    sim = schedules.warm(schedules.chain("a", "b"))
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
  fingerprint b
  alloc b
  fingerprint a               after all_gather b
  alloc a
  backward b
  gradient b
  backward root
  backward a                  after all_gather a
  gradient a
  backward root               after reduce_scatter b
  end                         after reduce_scatter a
all_gather:
  all_gather b                after compute fingerprint b
  all_gather a                after compute fingerprint a
reduce:
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )
    assert_expected_inline(
        schedules.emitted(sim, sim.forward),
        """\
compute:
  fingerprint a
  fingerprint b
  forward root
  forward a
  free a
  forward root
  forward b
  free b
  forward root""",
    )  # nothing to gather


def test_steps_that_use_nothing_again_take_no_fingerprints() -> None:
    sim = schedules.warm(schedules.chain("a", "b"))
    for unit in sim.scheduler.units:
        unit.reshard_after_backward = False
    sim.iteration()
    emitted = schedules.emitted(sim, sim.iteration)
    assert "all_gather b" in emitted
    assert "fingerprint" not in emitted


def test_kept_parameters_are_gathered_again_after_a_step() -> None:
    sim = schedules.warm(schedules.chain("a", "b"))
    for unit in sim.scheduler.units:
        unit.reshard_after_backward = False
    sim.iteration()
    assert_expected_inline(
        schedules.emitted(sim, sim.forward),
        """\
compute:
  free a
  free b
  forward root
  alloc a
  alloc b
  forward a                   after all_gather a
  free a
  forward root
  forward b                   after all_gather b
  free b
  forward root
all_gather:
  all_gather a                after compute forward root
  all_gather b                after compute forward root""",
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
    sim = schedules.warm(schedules.chain("a", "b"), world_size=1, precision=precision)
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  forward root
  alloc a
  copy a
  forward a
  free a
  forward root
  alloc b
  copy b
  forward b
  free b
  forward root
  backward root
  alloc b
  copy b
  backward b
  gradient b
  free b
  copy b
  backward root
  alloc a
  copy a
  backward a
  gradient a
  free a
  copy a
  backward root
  step a
  step b""",
    )


def test_coalesced_without_casts() -> None:
    sim = schedules.warm(schedules.chain("a", "b"), coalesces=True)
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
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


def test_packed_with_casts() -> None:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    leaves = [Node(name, shapes=schedules.SHAPES * 2) for name in ("a", "b")]
    root = Node("root", leaves, [0, 1], shapes=())
    sim = schedules.warm(root, coalesces=False, precision=precision)
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  forward root
  alloc a
  copy_out a                  after all_gather a
  forward a
  free a
  forward root
  alloc b
  copy_out b                  after all_gather b
  forward b
  free b
  forward root
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
  step a                      after copy a
  step b
copy_in:
  copy a                      after compute forward root
  copy b                      after compute copy_out a
  copy b                      after compute backward root
  copy a                      after compute copy_out b
all_gather:
  all_gather a                after copy a
  all_gather b                after copy b
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
        schedules.emitted(sim, sim.iteration),
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
  backward root
  alloc b
  alloc a
  backward b                  after all_gather b
  gradient b
  free b
  chunk_cat b
  backward root
  backward a                  after all_gather a
  gradient a
  free a
  chunk_cat a                 after copy b
  backward root
  step a                      after copy a
  step b
copy_in:
  copy a                      after compute forward root
  copy b                      after compute forward root
  copy b                      after compute backward root
  copy a                      after compute backward root
all_gather:
  all_gather a                after copy a
  all_gather b                after copy b
  all_gather b                after copy b
  all_gather a                after copy a
reduce:
  reduce_scatter b            after compute chunk_cat b
  copy b
  reduce_scatter a            after compute chunk_cat a
  copy a""",
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


def test_not_the_last_backward_keeps_what_was_gathered_ahead() -> None:
    sim = schedules.warm(schedules.chain("a", "b"))
    sim.forward()
    sim.forward()
    sim.scheduler.is_last_backward = False
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
  alloc b
  backward a                  after all_gather a
  gradient a
  free a
  backward root               after reduce_scatter b
all_gather:
  all_gather b                after compute backward root
  all_gather a                after compute backward root
  all_gather b                after compute backward root
reduce:
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )
    sim.scheduler.is_last_backward = True
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  alloc a
  backward b                  after all_gather b
  gradient b
  free b
  backward root               after reduce_scatter a
  backward a                  after all_gather a
  gradient a
  free a
  backward root               after add b
  end                         after add a
all_gather:
  all_gather a                after compute backward root
reduce:
  reduce_scatter b            after compute gradient b
  add b
  reduce_scatter a            after compute gradient a
  add a""",
    )


def test_not_the_last_backward_leaves_units_alone_whose_backward_is_to_come() -> None:
    root = schedules.chain("a", "b", reshard_after_forward=False)
    root.calls = [0]
    sim = schedules.warm(root)
    for _ in range(2):  # the second one finds something to use again
        sim.forward()
    sim.backward(2)
    sim.optimizer_step()
    sim.forward()
    root.calls = [1]
    sim.forward()
    sim.scheduler.is_last_backward = False
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  backward b
  gradient b
  free b
  backward root
reduce:
  reduce_scatter b            after compute gradient b""",
    )  # a stays
    sim.scheduler.is_last_backward = True
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  backward a
  gradient a
  free a
  backward root               after reduce_scatter b
  end                         after reduce_scatter a
reduce:
  reduce_scatter a            after compute gradient a""",
    )


def test_unit_called_twice_in_a_row() -> None:
    root = schedules.chain("a", "b")
    root.calls = [0, 0, 1, 1]
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
  forward root
  forward b
  free b
  forward root
  backward root
  alloc b
  backward b                  after all_gather b
  backward root
  alloc a
  backward b
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
    empty = Node("empty", shapes=((0, 8),))
    sim = schedules.warm(Node("root", [schedules.leaf("a"), empty], [0, 1], shapes=()))
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  forward root
  alloc a
  forward a                   after all_gather a
  free a
  forward root
  alloc empty
  forward empty
  free empty
  forward root
  backward root
  alloc empty
  alloc a
  backward empty
  gradient
  free empty
  backward root
  backward a                  after all_gather a
  gradient a
  free a
  backward root               after reduce_scatter a
  step a                      after reduce_scatter a
  step
all_gather:
  all_gather a                after compute forward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter a            after compute gradient, compute gradient a""",
    )  # only memory of no bytes


def test_step_in_backward_after_gradients_that_were_left() -> None:
    sim = schedules.warm(schedules.chain("a", "b"))
    sim.iteration(step=False)
    sim.step_in_backward()
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
  backward root               after step b
  end                         after step a
all_gather:
  all_gather b                after compute backward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter b            after compute gradient b
  add b
  step b
  reduce_scatter a            after compute gradient a
  add a
  step a""",
    )


def test_second_backward_adds_to_the_gradient() -> None:
    sim = schedules.warm(schedules.chain("a"))
    sim.iteration(step=False)
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
  end                         after add a
all_gather:
  all_gather a                after compute backward root
reduce:
  reduce_scatter a            after compute gradient a
  add a""",
    )
