"""Ranks as threads that agree on their steps over a board in memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from fsdp2.checks.agreement import LOOK_INTERVAL, Agreement, Intent
from fsdp2.core.errors import RankMismatchError

pytestmark = pytest.mark.alone

LONG = 60.0  # seconds: no test waits that long unless it fails


class Notes:
    """The store: what all ranks see."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.notes: dict[str, str] = {}


class MemoryBoard:
    def __init__(self, notes: Notes, rank: int) -> None:
        self.rank = rank
        self._shared = notes

    def write(self, key: str, text: str) -> None:
        with self._shared.lock:
            self._shared.notes[key] = text

    def has(self, keys: list[str]) -> bool:
        with self._shared.lock:
            return all(key in self._shared.notes for key in keys)

    def read(self, keys: list[str]) -> list[str]:
        with self._shared.lock:
            return [self._shared.notes[key] for key in keys]  # a store would wait for ever

    def claim(self, key: str, expected: str, text: str) -> str:
        with self._shared.lock:
            if self._shared.notes.get(key, "") == expected:
                self._shared.notes[key] = text
            return self._shared.notes[key]

    def erase(self, key: str) -> None:
        with self._shared.lock:
            self._shared.notes.pop(key, None)


def _run(size: int, body: Callable[[Agreement], Any], notes: Notes | None = None) -> list[Any]:
    """What ``body`` returned or raised, by rank."""
    notes = notes or Notes()
    with ThreadPoolExecutor(size) as pool:
        agreements = [Agreement(MemoryBoard(notes, rank), lambda: 0) for rank in range(size)]
        futures = [pool.submit(body, agreement) for agreement in agreements]
        return [future.exception(LONG) or future.result() for future in futures]


def _sentence(results: list[Any]) -> str:
    """What every rank raised."""
    assert all(isinstance(result, RankMismatchError) for result in results), results
    found = {str(result) for result in results}
    assert len(found) == 1
    return found.pop()


Play = list[list[tuple[tuple[int, ...], Intent]]]
"""By rank: with whom it agrees, on what."""


def _played(play: Play, agreement: Agreement) -> str:
    for ranks, intent in play[agreement.board.rank]:
        agreement.agree(ranks, intent, LONG)
    return "done"


def test_equal_steps_pass_and_leave_few_notes() -> None:
    notes = Notes()
    play = [[((0, 1, 2), Intent(f"step {number}")) for number in range(20)]] * 3
    assert _run(3, partial(_played, play), notes) == ["done"] * 3
    assert len([key for key in notes.notes if "0,1,2" in key]) == 2 * (3 + 1)


THREE, FOUR = (0, 1, 2), (0, 1, 2, 3)
A, B, C = (Intent(f"the all-gather of '{unit}'") for unit in "abc")
STEPS = [Intent(f"step {rank}") for rank in range(4)]


def _detailed(dtype: str, **more: str) -> Intent:
    return Intent("the all-gather of 'a'", {"dtype": dtype, "shape": "[8]", **more}, "mend it")


DISAGREEMENTS: dict[str, tuple[Play, tuple[str, ...]]] = {
    "another step": (
        [[(THREE, A), (THREE, last)] for last in (B, C, B)],
        (
            "ranks disagree on their next step: ranks 0 and 2 are at the all-gather of 'b', rank 1 "
            "is at the all-gather of 'c'; run the same units in the same order on every rank, with "
            "zeros as input if a rank does not need a unit [ranks-elsewhere]",
        ),
    ),
    "noticed before rank 2 comes, which waits for rank 3": (
        [[(THREE, STEPS[0])], [(THREE, STEPS[1])], [((2, 3), A)], []],
        ("rank 0 is at step 0, rank 1 is at step 1, rank 2 ",),
    ),
    "details: equal ones are not named": (
        [*[[(FOUR, _detailed("fp32"))]] * 3, [(FOUR, _detailed("bf16", bias="[3]"))]],
        (
            "ranks disagree about the all-gather of 'a': dtype is fp32 on ranks 0, 1 and 2, bf16 "
            "on rank 3; bias is not there on ranks 0, 1 and 2, [3] on rank 3; mend it "
            "[ranks-differ]",
        ),
    ),
    "details: only the first three are named": (
        [[((0, 1), Intent("it", {f"d{i}": str(rank) for i in range(5)}))] for rank in (0, 1)],
        (
            "d0 is 0 on rank 0, 1 on rank 1; d1 is 0 on rank 0, 1 on rank 1; d2 is 0 on rank 0, "
            "1 on rank 1, and 2 more; ",
        ),
    ),
    # No set of ranks has two different notes, and yet nobody can go on.
    "a circle of two, as parts of two sets": (
        [[((0, 1, 10 + rank), STEPS[rank])] for rank in (0, 1)],
        ("rank 0 is at step 0", "rank 1 is at step 1"),
    ),
    "a circle of four": (
        [[(tuple(sorted((rank, (rank + 1) % 4))), STEPS[rank])] for rank in FOUR],
        tuple(f"rank {rank} is at step {rank}" for rank in FOUR),
    ),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_all_ranks_raise_the_same_sentence(case: str) -> None:
    play, parts = DISAGREEMENTS[case]
    results = _run(len(play), partial(_played, play))
    said = _sentence([result for result, own in zip(results, play, strict=True) if own])
    for part in parts:
        assert part in said


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    def body(agreement: Agreement) -> str | None:
        agreement.agree(THREE, A, LONG)
        if agreement.board.rank == 2:
            agreement.leave("has ended")
            return "left"
        agreement.agree(THREE, B, LONG)
        return None

    *others, last = _run(3, body)
    assert last == "left"
    assert (
        "ranks 0 and 1 are at the all-gather of 'b', rank 2 has ended and was last at the "
        "all-gather of 'a'; "
    ) in _sentence(others)


def test_a_rank_that_does_not_come_is_named_and_raises_when_it_does() -> None:
    raised = threading.Event()

    def body(agreement: Agreement) -> None:
        agreement.agree((0, 1), A, LONG)
        if agreement.board.rank == 1:
            assert raised.wait(LONG)
        try:
            agreement.agree((0, 1), B, 0.3)
        finally:
            raised.set()

    sentence = _sentence(_run(2, body))
    assert "rank 0 is at the all-gather of 'b', rank 1 has not come for " in sentence
    assert "was last at the all-gather of 'a'; " in sentence


@pytest.mark.parametrize(
    "play",
    [
        pytest.param([[((0, 1), A)]] * 2, id="one step"),
        # Rank 0 waits for 1, 1 for 2, and 2 is only slow.
        pytest.param([[((0, 1), A)], [((1, 2), B), ((0, 1), A)], [((1, 2), B)]], id="a chain"),
    ],
)
def test_a_slow_rank_is_no_disagreement_and_no_circle(play: Play) -> None:
    def body(agreement: Agreement) -> str:
        if agreement.board.rank == len(play) - 1:
            time.sleep(4 * LOOK_INTERVAL)
        return _played(play, agreement)

    assert _run(len(play), body) == ["done"] * len(play)


class _WhileLooking(MemoryBoard):
    """Rank 0's, on which the others go on while it follows who waits for whom.

    It reads that rank 1 waits for rank 2. Then the two meet, rank 2 waits for rank 0 and says so:
    by what rank 0 has read, all wait in a circle. By its next look rank 1 is on its way.
    """

    def __init__(self, notes: Notes, coming: Intent) -> None:
        super().__init__(notes, 0)
        self.looks = 0
        self._coming = coming
        self._waits(1, "the step of 1 and 2", for_=(2, "0/1,2/0/2"))

    def _waits(self, rank: int, at: str, for_: tuple[int, str]) -> None:
        self.write(f"0/waits/{rank}", json.dumps({"turn": 1, "for": [for_], "at": at}))

    def has(self, keys: list[str]) -> bool:
        if keys == ["0/waits/2"]:
            self.write("0/1,2/0/2", "rank 2 has come")
            self.write("0/waits/1", "")
            self._waits(2, "the step of 0 and 2", for_=(0, "0/0,2/0/0"))
        elif keys == ["0/waits/1"]:
            self.looks += 1
            if self.looks == 2:
                self.write("0/0,1/0/1", self._coming.note)
        return super().has(keys)


def test_waits_that_were_not_there_all_at_once_are_no_circle() -> None:
    step = Intent("the step of 0 and 1")
    board = _WhileLooking(Notes(), step)
    Agreement(board, lambda: 0).agree((0, 1), step, LONG)
    assert board.looks == 2


def test_ranks_that_raised_agree_again_and_count_iterations_from_there() -> None:
    def body(own: Agreement) -> list[int]:
        counted = Agreement(own.board, iter((5, 6, 9, 9)).__next__)
        found = [counted.iteration]
        with pytest.raises(RankMismatchError):
            counted.agree((0, 1), STEPS[own.board.rank], LONG)
        found.append(counted.iteration)
        for step in STEPS:
            counted.agree((0, 1), step, LONG)
        return found

    assert _run(2, body) == [[1, 0]] * 2


def test_one_rank_agrees_with_itself() -> None:
    notes = Notes()
    Agreement(MemoryBoard(notes, 0), lambda: 0).agree((0,), Intent("it"), 0.0)
    assert len(notes.notes) == 1  # the failure that nobody has claimed


class _HeldBack(MemoryBoard):
    """A board that its rank reads late: not before ``until``."""

    def __init__(self, notes: Notes, rank: int, until: threading.Event) -> None:
        super().__init__(notes, rank)
        self._until = until

    def read(self, keys: list[str]) -> list[str]:
        assert self._until.wait(LONG)
        return super().read(keys)


def test_a_failure_elsewhere_does_not_stop_a_step_that_another_rank_has_taken() -> None:
    """Rank 1 is in the collective when ranks 0 and 2 disagree: rank 3 must join it."""
    notes, taken, failed = Notes(), threading.Event(), threading.Event()
    passed: list[int] = []

    def body(agreement: Agreement) -> None:
        rank = agreement.board.rank
        if rank % 2:
            agreement.agree((1, 3), Intent("a"), LONG)
            passed.append(rank)
            taken.set()
            assert failed.wait(LONG)
            agreement.agree((1, 3), Intent("b"), LONG)
        else:
            assert taken.wait(LONG)
            try:
                agreement.agree((0, 2), Intent(f"step {rank}"), LONG)
            finally:
                failed.set()

    def slow(agreement: Agreement) -> None:
        if agreement.board.rank == 3:
            agreement.board = _HeldBack(notes, 3, failed)
        body(agreement)

    assert "rank 0 is at step 0, rank 2 is at step 2" in _sentence(_run(4, slow, notes))
    assert sorted(passed) == [1, 3]


def test_no_rank_takes_a_step_that_another_gave_up() -> None:
    """Rank 3 stops waiting for rank 1 because ranks 0 and 2 disagree: rank 1 must not go on."""
    given_up = threading.Event()
    passed: list[int] = []

    def body(agreement: Agreement) -> None:
        rank = agreement.board.rank
        if rank % 2 == 0:
            agreement.agree((0, 2), Intent(f"step {rank}"), LONG)
        if rank == 1:
            assert given_up.wait(LONG)
        try:
            agreement.agree((1, 3), Intent("a"), LONG)
            passed.append(rank)
        finally:
            given_up.set()

    assert "rank 0 is at step 0, rank 2 is at step 2" in _sentence(_run(4, body))
    assert passed == []
