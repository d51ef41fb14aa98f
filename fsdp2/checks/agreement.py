"""Ranks agree on their next step before they take it, by notes on a board (decision 12).

    board   <run>.<failures>/ 0,1,2,3 / 17 / 2 ──> "3f2a…|the all-gather of 'a' for its forward"
            a run of the checks, the ranks that must agree, their 17th step, rank 2's note on it
            …/ 17 / outcome    ──> whether they take it, or give it up
            …/ details / 3f2a… ──> {"parameter 'weight'": "torch.float32 [8, 8]", …}
            …/ waits / 2       ──> which note rank 2 waits for, and from which rank
            …/ left / 2        ──> that rank 2 takes no further steps, and why
            …/ failure         ──> "-", or the sentence that every rank raises

    rank 0  write its note ── all are there? ── all are equal? ──> settle that it is taken, take it
    rank 1  write its note ── all are there? ── one is not ──> claim the failure, raise it

Each set of ranks counts its steps, over all process groups and units. A rank that waits reads the
board repeatedly; it raises the failure that another rank claimed, and claims one itself if

- another rank's note on the same step is a different one, or that rank has left;
- the ranks that it waits for wait, themselves or through others, for it;
- they do not come in time.

The first claim counts, so that all raise the same sentence. A failure begins a new count of steps.

Ranks may read of a failure elsewhere at different steps, but each step is taken by all of its ranks
or by none; otherwise one would wait in a collective without end. The first of them that continues,
or gives up, settles the outcome for all. Those that continued raise at their next step.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypedDict

from fsdp2.checks.presence import LONGEST_PAUSE, looks
from fsdp2.core.device.channels import StoreBoard
from fsdp2.core.errors import RankMismatchError, coded, resaid

LOOK_INTERVAL = 0.1  # seconds between looks at each rank that has not come
GRACE = 3.0  # seconds that a rank which found a disagreement gives others to say where they are
_NONE = "-"
_TAKEN, _GIVEN_UP = "taken", "given up"
_FAILURE, _OUTCOME = "failure", "outcome"


@dataclass(frozen=True)
class Intent:
    """The next step of a rank."""

    what: str
    details: Mapping[str, str] = field(default_factory=dict)
    fix: str = "give every rank the same"

    @property
    def note(self) -> str:
        """The note on the board: equal for equal steps."""
        return f"{self.digest}|{self.what}"

    @property
    def digest(self) -> str:
        """The digest of the details."""
        return hashlib.sha256(json.dumps(dict(self.details)).encode()).hexdigest()[:16]


@dataclass
class _Meeting:
    """One step of a set of ranks."""

    ranks: tuple[int, ...]
    number: int
    step: Intent
    name: str

    def key(self, part: int | str, back: int = 0) -> str:
        """The key of a rank's note or of the `_OUTCOME`, for a step that is so many ``back``."""
        return f"{self.name}/{self.number - back}/{part}"


# What a rank says that waits: which of its waits it is, for whose notes, and at which step.
_Wait = TypedDict("_Wait", {"turn": int, "for": list[tuple[int, str]], "at": str})


class Agreement:
    """The steps of one rank, and those of the others as far as it must know them."""

    def __init__(self, board: StoreBoard, clock: Callable[[], int]) -> None:
        self.board = board
        self._clock = clock
        self._failures = -1
        self._waits = 0
        self._begin()

    def _begin(self) -> None:
        """Count from the start: at first, and when all ranks have raised."""
        self._failures += 1
        self._began = self._clock()
        self._steps: dict[tuple[int, ...], int] = {}
        self._published: set[str] = set()
        self.board.claim(self._key(_FAILURE), "", _NONE)

    @property
    def iteration(self) -> int:
        """Iterations since the checks began, the same on all ranks that keep step."""
        return self._clock() - self._began

    def _key(self, *parts: object) -> str:
        return "/".join(str(part) for part in (self._failures, *parts))

    # ---- agreeing

    def agree(self, ranks: tuple[int, ...], step: Intent, timeout: float) -> None:
        """Return once all of ``ranks`` are about to take ``step``."""
        if len(ranks) == 1:
            return
        board = self.board
        number = self._steps.get(ranks, 0)
        self._steps[ranks] = number + 1
        meeting = _Meeting(ranks, number, step, self._key(",".join(map(str, ranks))))
        if step.digest not in self._published:
            self._published.add(step.digest)
            board.write(self._key("details", step.digest), json.dumps(dict(step.details)))
        board.write(meeting.key(board.rank), step.note)
        keys = [meeting.key(rank) for rank in ranks]
        if not board.has(keys):
            self._wait(meeting, keys, timeout)
        *notes, failure = board.read([*keys, self._key(_FAILURE)])
        if failure != _NONE:
            self._give_up(meeting, failure)
        elif any(note != step.note for note in notes):
            self._fail(meeting, self._error(meeting))
        elif board.claim(meeting.key(_OUTCOME), "", _TAKEN) != _TAKEN:
            self._raise(board.read([self._key(_FAILURE)])[0])
        if number > 1:  # the last note stays, for ranks that ask where this one is
            board.erase(meeting.key(board.rank, back=2))
            if board.rank == ranks[0]:
                board.erase(meeting.key(_OUTCOME, back=2))

    def leave(self, why: str) -> None:
        """Tell the others that this rank takes no further steps."""
        self.board.write(self._key("left", self.board.rank), why)

    # ---- waiting

    def _wait(self, meeting: _Meeting, keys: list[str], timeout: float) -> None:
        looked = 0.0
        own = self._key("waits", self.board.rank)  # of these steps, also when they have failed
        announced = False
        try:
            for waited in looks(self.board, keys):
                failure = self.board.read([self._key(_FAILURE)])[0]
                if failure != _NONE:
                    self._give_up(meeting, failure)
                    continue  # they have all come
                if waited - looked < LOOK_INTERVAL:
                    continue
                looked = waited
                missing = [r for r in meeting.ranks if not self.board.has([meeting.key(r)])]
                if not announced:
                    announced = True
                    self._waits += 1
                    ahead = [(rank, meeting.key(rank)) for rank in missing]
                    mine: _Wait = {"turn": self._waits, "for": ahead, "at": meeting.step.what}
                    self.board.write(own, json.dumps(mine))
                error = self._trouble(meeting, missing, waited, timeout)
                if error is not None:
                    self._fail(meeting, error)
        finally:
            if announced:
                self.board.write(own, "")

    def _trouble(
        self, meeting: _Meeting, missing: list[int], waited: float, timeout: float
    ) -> RankMismatchError | None:
        """The reason why this rank cannot wait for the others."""
        came = [meeting.key(rank) for rank in meeting.ranks if rank not in missing]
        if any(note != meeting.step.note for note in self.board.read(came)):
            return self._error(meeting)
        if any(self.board.has([self._key("left", rank)]) for rank in missing):
            return self._error(meeting)
        circle = self._circle()
        if circle and circle == self._circle():
            return _describe({rank: f"is at {note['at']}" for rank, note in circle.items()})
        return self._error(meeting, waited) if waited > timeout else None

    def _circle(self) -> dict[int, _Wait]:
        """Notes of the ranks that wait for this one while it waits for them; empty if none do.

        A wait that is there at two looks was there all the time between: where two looks find the
        same, all of these ranks were waiting at once, and always will be.
        """
        found: dict[int, _Wait] = {}
        ahead = [self.board.rank]
        closed = False
        while ahead:
            rank = ahead.pop()
            closed = closed or (rank == self.board.rank and bool(found))
            text = self._peek("waits", rank) if rank not in found else None
            if text is not None:
                found[rank] = json.loads(text)
                ahead += [r for r, key in found[rank]["for"] if not self.board.has([key])]
        return found if closed else {}

    def _peek(self, *parts: object) -> str | None:
        """A note that may not be there, or empty."""
        key = self._key(*parts)
        return (self.board.read([key])[0] or None) if self.board.has([key]) else None

    # ---- failing

    def _fail(self, meeting: _Meeting, error: RankMismatchError) -> None:
        """Claim the failure, and raise the first claim; see `_give_up`."""
        self._give_up(meeting, self.board.claim(self._key(_FAILURE), _NONE, str(error)))

    def _give_up(self, meeting: _Meeting, sentence: str) -> None:
        """Raise the failure; returns if another rank continued with the step, as this one must."""
        if self.board.claim(meeting.key(_OUTCOME), "", _GIVEN_UP) != _TAKEN:
            self._raise(sentence)

    def _raise(self, sentence: str) -> NoReturn:
        self._begin()
        raise resaid(RankMismatchError, sentence)

    def _error(self, meeting: _Meeting, waited: float | None = None) -> RankMismatchError:
        """The error with the step of each rank; without ``waited``, ranks still on their way get a
        moment to report theirs.
        """
        deadline = time.monotonic() + (GRACE if waited is None else 0)
        notes, places = self._places(meeting)
        while None in places.values() and time.monotonic() < deadline:
            time.sleep(LONGEST_PAUSE)
            notes, places = self._places(meeting)
        if len(set(notes.values())) > len({places[rank] for rank in notes}) == 1:
            return self._differences(meeting.step, notes)
        late = "" if waited is None else f"has not come for {waited:.1f} s and "
        return _describe(
            {
                rank: late + self._last(meeting, rank) if place is None else place
                for rank, place in places.items()
            }
        )

    def _places(self, meeting: _Meeting) -> tuple[dict[int, str], dict[int, str | None]]:
        """The notes of ranks that have arrived, and the position of each; ``None`` if unknown."""
        notes: dict[int, str] = {}
        places: dict[int, str | None] = {}
        for rank in meeting.ranks:
            places[rank] = None
            if self.board.has([meeting.key(rank)]):
                notes[rank] = self.board.read([meeting.key(rank)])[0]
                places[rank] = f"is at {notes[rank].partition('|')[2]}"
            elif (why := self._peek("left", rank)) is not None:
                places[rank] = f"{why} and {self._last(meeting, rank)}"
            elif (waits := self._peek("waits", rank)) is not None:
                places[rank] = f"is at {json.loads(waits)['at']}"
        return notes, places

    def _last(self, meeting: _Meeting, rank: int) -> str:
        key = meeting.key(rank, back=1)
        if meeting.number == 0 or not self.board.has([key]):
            return "has announced no step yet"
        return f"was last at {self.board.read([key])[0].partition('|')[2]}"

    def _differences(self, step: Intent, notes: Mapping[int, str]) -> RankMismatchError:
        """All that have come are at the same step; what differs in its details."""
        keys = [self._key("details", note.partition("|")[0]) for note in notes.values()]
        everyones = [json.loads(text) for text in self.board.read(keys)]
        differing = []
        for name in dict.fromkeys(name for details in everyones for name in details):
            values = [details.get(name, "not there") for details in everyones]
            if len(set(values)) > 1:
                by_value = _gather(dict(zip(notes, values, strict=True)))
                said = ", ".join(f"{value} on {_ranks(of)}" for value, of in by_value.items())
                differing.append(f"{name} is {said}")
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        return coded(
            RankMismatchError,
            "ranks-differ",
            f"ranks disagree about {step.what}: {'; '.join(differing[:3])}{more}; {step.fix}",
        )


def _describe(places: Mapping[int, str]) -> RankMismatchError:
    said = ", ".join(
        f"{_ranks(of)} {place.replace('is at', 'are at', 1) if len(of) > 1 else place}"
        for place, of in _gather(dict(sorted(places.items()))).items()
    )
    return coded(
        RankMismatchError,
        "ranks-elsewhere",
        f"ranks disagree on their next step: {said}; run the same units in the same order on "
        f"every rank, with zeros as input if a rank does not need a unit",
    )


def _gather(values: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks of each value, in the order of their first."""
    found: dict[str, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def _ranks(ranks: Sequence[int]) -> str:
    """``"rank 2"``, ``"ranks 0, 1 and 3"``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
