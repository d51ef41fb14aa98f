"""Schedules of replicas, offloaded shards, smaller groups after forward, and the other flags.

As in `tests.schedule.test_schedule`; the host and the user's stream are rendered as lanes.
"""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions, MixedPrecisionPolicy
from fsdp2.testing.simulation import Node
from tests.common import schedules

pytestmark = pytest.mark.alone


def test_replicas() -> None:
    sim = schedules.warm(schedules.chain("a", "b"), copies=2)
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
  end                         after reduce_scatter a, all_reduce b, all_reduce a
all_gather:
  all_gather b                after compute backward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a
all_reduce:
  all_reduce b                after reduce_scatter b
  all_reduce a                after reduce_scatter a""",
    )


def test_partial_sums() -> None:
    sim = schedules.warm(schedules.leaf("root"), copies=2)
    (unit,) = sim.scheduler.units

    def accumulate() -> None:
        for all_reduce in (False, False, True):
            unit.all_reduce = all_reduce
            sim.iteration(step=all_reduce)

    assert_expected_inline(
        schedules.emitted(sim, accumulate),
        """\
compute:
  alloc root
  forward root                after all_gather root
  backward root
  gradient root
  free root
  alloc root
  forward root                after reduce_scatter root, all_gather root
  backward root
  gradient root
  free root
  alloc root
  forward root                after add root, all_gather root
  backward root
  gradient root
  free root
  step root                   after reduce_scatter root, all_reduce root
all_gather:
  all_gather root             after compute step root
  all_gather root             after compute gradient root
  all_gather root             after compute gradient root
reduce:
  reduce_scatter root         after compute gradient root
  reduce_scatter root         after compute gradient root
  add root
  reduce_scatter root         after compute gradient root
all_reduce:
  add root                    after reduce_scatter root
  all_reduce root""",
    )


def test_replicas_alone() -> None:
    sim = schedules.warm(schedules.leaf("root"), world_size=1, copies=2)
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  alloc root
  forward root
  backward root
  gradient root
  free root
  copy root
  step root                   after all_reduce root
all_reduce:
  all_reduce root""",
    )


def test_offload() -> None:
    sim = schedules.warm(schedules.chain("a"), offload=CPUOffloadPolicy())
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  forward root
  alloc a
  forward a                   after all_gather a
  free a
  forward root
  backward root
  alloc a
  backward a                  after all_gather a
  gradient a
  free a
  backward root
  end                         after to_host a
copy_in:
  load a                      after compute forward root
  load a                      after compute backward root
all_gather:
  all_gather a                after load a
  all_gather a                after load a
reduce:
  reduce_scatter a            after compute gradient a
  to_host a
host:
  step a                      after load a, to_host a""",
    )


def test_offload_after_an_evaluation() -> None:
    sim = schedules.warm(schedules.leaf("root"), offload=CPUOffloadPolicy())

    def evaluate() -> None:
        sim.forward(expects_backward=False)
        sim.write("load_state_dict")

    assert_expected_inline(
        schedules.emitted(sim, evaluate),
        """\
compute:
  alloc root
  forward root                after all_gather root
copy_in:
  load root                   after compute gradient root
all_gather:
  all_gather root             after load root
host:
  fingerprint root
  load_state_dict root        after load root""",
    )


def test_offload_and_replicas() -> None:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    sim = schedules.warm(
        schedules.leaf("root"), offload=CPUOffloadPolicy(), copies=2, precision=precision
    )
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  alloc root
  forward root                after all_gather root
  backward root
  gradient root
  free root
  end                         after reduce_scatter root, to_host root
copy_in:
  load root                   after compute gradient root
  copy root
all_gather:
  all_gather root             after copy root
reduce:
  reduce_scatter root         after compute gradient root
all_reduce:
  all_reduce root             after reduce_scatter root
  copy root
  to_host root
host:
  step root                   after copy root, to_host root""",
    )


def test_smaller_group_after_forward() -> None:
    precision = MixedPrecisionPolicy(torch.bfloat16)
    sim = schedules.warm(schedules.chain("a"), world_size=4, smaller=2, precision=precision)
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  forward root
  alloc a
  forward a                   after all_gather a
  copy a
  free a
  forward root
  backward root
  alloc a
  backward a                  after all_gather a
  gradient a
  free a
  copy a
  backward root
  step a                      after reduce_scatter a
copy_in:
  copy a                      after compute forward root
all_gather:
  all_gather a                after copy a
  all_gather a                after compute backward root
reduce:
  reduce_scatter a            after compute copy a""",
    )


def test_two_groups_in_a_unit() -> None:
    sim = schedules.warm(
        Node("root", shapes=schedules.SHAPES, more=[schedules.SHAPES]), world_size=4
    )
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  alloc root
  alloc root/1
  forward root                after all_gather root, all_gather root/1
  backward root
  gradient root
  gradient root/1
  free root
  free root/1
  step root                   after reduce_scatter root, reduce_scatter root/1
  step root/1
all_gather:
  all_gather root             after compute step root/1
  all_gather root/1           after compute step root/1
reduce:
  reduce_scatter root         after compute gradient root/1
  reduce_scatter root/1       after compute gradient root/1""",
    )


def test_backward_that_does_not_read_parameters() -> None:
    sim = schedules.warm(schedules.chain("a", "b"))
    sim.scheduler.units[1].unshard_in_backward = False
    sim.forward()
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  alloc b
  backward b                  after all_gather b
  gradient b
  free b
  backward root
  backward a
  gradient a
  backward root               after reduce_scatter b
  end                         after reduce_scatter a
all_gather:
  all_gather b                after compute backward root
reduce:
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )


def test_two_input_buffers() -> None:
    sim = schedules.warm(schedules.chain("a", "b"))
    sim.scheduler.units[1].input_buffers = 2
    sim.scheduler.refresh()
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
  backward root
  end                         after reduce_scatter b, reduce_scatter a
all_gather:
  all_gather b                after compute backward root
  all_gather a                after compute backward root
reduce:
  reduce_scatter b            after compute gradient b
  reduce_scatter a            after compute gradient a""",
    )


def test_memory_that_is_kept() -> None:
    sim = schedules.warm(
        schedules.leaf("root"), options=GroupOptions(pack_below=0, keep_storage=True)
    )
    assert_expected_inline(
        schedules.emitted(sim, sim.iteration),
        """\
compute:
  forward root                after all_gather root
  backward root
  gradient root
  step root                   after reduce_scatter root
all_gather:
  all_gather root             after compute step root
reduce:
  reduce_scatter root         after compute gradient root""",
    )


def test_hook_on_reduced_gradients() -> None:
    sim = schedules.warm(schedules.leaf("root"))
    (group,) = sim.scheduler.units[0].own_groups

    def hook(flat: object) -> None:
        sim.device.run("hook", [flat], [flat])  # type: ignore[list-item]  # simulated

    group.set_options(GroupOptions(all_reduce_hook=hook))
    sim.forward()
    assert_expected_inline(
        schedules.emitted(sim, sim.backward),
        """\
compute:
  backward root
  gradient root
  free root
  end                         after reduce_scatter root, hook root
reduce:
  reduce_scatter root         after compute gradient root
all_reduce:
  hook root                   after reduce_scatter root""",
    )


def test_caller_ends_the_backward() -> None:
    sim = schedules.warm(schedules.leaf("root"))
    sim.scheduler.manual = True
    (unit,) = sim.scheduler.units

    def iterate() -> None:
        unit.sync = False
        sim.iteration(step=False)
        unit.sync = True
        sim.finalize(wait=False)
        sim.optimizer_step()

    assert_expected_inline(
        schedules.emitted(sim, iterate),
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


def test_optimizer_on_another_stream() -> None:
    sim = schedules.warm(schedules.leaf("root"))

    def iterate() -> None:
        sim.iteration(step=False)
        sim.step_elsewhere()
        sim.forward()
        sim.drop_gradients()

    assert_expected_inline(
        schedules.emitted(sim, iterate),
        """\
compute:
  alloc root
  forward root                after all_gather root
  backward root
  gradient root
  free root
  alloc root
  forward root                after reduce_scatter root, step root, all_gather root
all_gather:
  all_gather root             after compute step root
  all_gather root             after compute gradient root
reduce:
  reduce_scatter root         after compute gradient root
user:
  step root                   after compute gradient root""",
    )
