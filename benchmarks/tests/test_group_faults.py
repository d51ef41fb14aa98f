"""benchmarks/group_faults.py: a judgement of lines; the runs themselves need torchft."""

from __future__ import annotations

import pytest

from benchmarks import group_faults
from benchmarks.group_faults import Row, judge

pytestmark = pytest.mark.alone

LINES = [
    (1.0, "step 1: 2 of 2 groups take part"),
    (9.0, "step 20: loss 3.1"),
    (11.0, "group 0: step 21 is dropped, and tried again: connection closed"),
    (11.5, "step 21: 1 of 2 groups take part"),
    (12.5, "step 30: loss 3.0"),
    (20.0, "step 90: 2 of 2 groups take part"),
    (30.0, "2 of 2 groups end with the same weights"),
]


def test_a_group_that_comes_back() -> None:
    assert judge(LINES, 10.0) == Row(step=2.5, back=10.0, dropped=1, equal=True)


def test_a_group_that_stays_away() -> None:
    found = judge(LINES[:5], 10.0)
    assert found == Row(step=2.5, back=None, dropped=1, equal=False)


@pytest.mark.extended
def test_a_replica_group_is_killed() -> None:
    pytest.importorskip("torchft")
    row = group_faults.observe("a replica group is killed", steps=400)
    assert row.equal
    assert row.back is not None
