"""Which batch a group trains on, and which group writes, over groups that come and go."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from torch import nn

import fsdp2
from fsdp2 import elastic
from tests.common.errors import raises

pytestmark = pytest.mark.alone


class Group:
    """A manager's counts, as torchft keeps them."""

    def __init__(self) -> None:
        self.step = self.batches = 0
        self.place: int | None = None

    def participating_rank(self) -> int | None:
        return self.place

    def batches_committed(self) -> int:
        return self.batches


def run(seed: int, steps: int) -> tuple[list[list[int]], list[int]]:
    """(batches of each committed step, how many groups would write it), with random faults."""
    choose = random.Random(seed)
    groups = [Group() for _ in range(4)]
    committed, writers = [], []
    while len(committed) < steps:
        newest = max(group.step for group in groups)
        there = [g for g in groups if choose.random() < 0.8 and g.step == newest]
        for group in groups:  # those that heal in this step have no place
            group.place = there.index(group) if group in there else None
        numbers = [elastic.batch_number(group) for group in there]
        if not there or choose.random() < 0.2:
            continue  # dropped by all
        committed.append(numbers)
        writers.append(sum(elastic.is_writer(group, nn.Identity()) for group in groups))
        for group in there:
            group.step, group.batches = newest + 1, group.batches + len(there)
        for group in groups:
            if group not in there and choose.random() < 0.5:
                group.step, group.batches = there[0].step, there[0].batches
    return committed, writers


@pytest.mark.parametrize("seed", range(5))
def test_no_batch_twice_and_none_left_out(seed: int) -> None:
    committed, writers = run(seed, 200)
    numbers = [number for step in committed for number in step]
    assert numbers == list(range(len(numbers)))
    assert len({len(step) for step in committed}) > 2
    assert set(writers) == {1}


def test_an_epoch_has_each_example_once() -> None:
    batches = elastic.Batches(23, 5, seed=3)
    epochs = [[at for n in range(4) for at in batches[4 * epoch + n]] for epoch in range(3)]
    for epoch in epochs:
        assert len(epoch) == 20
        assert max(Counter(epoch).values()) == 1
        assert set(epoch) <= set(range(23))
    assert epochs[0] != epochs[1] != epochs[2]
    assert elastic.Batches(23, 5, seed=3)[9] == batches[9]
    assert elastic.Batches(23, 5, seed=4)[9] != batches[9]


def test_no_batch() -> None:
    with raises("elastic-no-batch"):
        elastic.Batches(3, 4)
    with raises("elastic-no-batch"):
        elastic.Batches(3, 0)


def test_a_group_that_did_not_write_makes_no_branch(tmp_path: Path) -> None:
    """Group 1 has loaded step 1; group 0 writes 2 and is gone; then group 1 writes 3."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    one, other = Group(), Group()
    one.place, other.place = 0, 1
    for step in (1, 2):
        assert elastic.is_writer(one, first)
        fsdp2.checkpoint.save(tmp_path, first, step=step)
    fsdp2.checkpoint.load(tmp_path, second, step=1)  # as if before the save of 2
    assert not elastic.is_writer(other, second)
    other.place = 0
    assert elastic.is_writer(other, second)
    fsdp2.checkpoint.save(tmp_path, second, step=3, extra={"manager": {"step": 3}})
    assert fsdp2.checkpoint.steps(tmp_path) == [1, 2, 3]
    assert not fsdp2.checkpoint.replaced(tmp_path)
