"""benchmarks/faults.py: what goes wrong happens here, and each run goes on as it should."""

from __future__ import annotations

import math

import pytest

from benchmarks import faults

AGAIN = "workers are started again, from step 10"
EXPECTED: dict[str, tuple[str, int]] = {
    "a rank is killed in forward": (AGAIN, 2),
    "a rank is killed in backward": (AGAIN, 2),
    "a rank is killed in the all-reduce over copies": (AGAIN, 2),
    "a rank is killed in the optimizer's step": (AGAIN, 2),
    "a rank is killed in a save": (AGAIN, 5),
    "one rank has no memory left": (AGAIN, 2),
    "a rank stands still for 5 s": ("goes on", 0),
    "the clock of a rank is a minute ahead": ("goes on", 0),
    "the disk is full in a save": (AGAIN, 5),
    "a node is killed": (AGAIN, 2),
    "a node's link is cut for 5 s": ("goes on", 0),
    "a node's link is cut for good": (AGAIN, 2),
    "a minute behind with MISSED=20": ("goes on", 0),
}
"""How a run goes on, and how many steps it trains again."""

ELSEWHERE = ("forward", "backward", "step", "save")
"""Kills that tests/jobs/test_killed.py has, too."""


def _marked(name: str) -> object:
    seldom = name.endswith(ELSEWHERE)
    reason = faults.missing(name)
    marks = [pytest.mark.exhaustive if seldom else pytest.mark.extended]
    return pytest.param(
        name, marks=[*marks, pytest.mark.skipif(reason is not None, reason=f"{reason}")]
    )


@pytest.mark.parametrize("name", [_marked(name) for name in EXPECTED])
def test_a_run_goes_on(name: str) -> None:
    row = faults.run(name)
    assert row.equal
    assert (row.outcome, row.again) == EXPECTED[name]


@pytest.mark.extended
def test_sigterm_loses_no_step() -> None:
    row = faults.run("SIGTERM to a rank")
    assert row.equal
    assert row.outcome.startswith("ends with code 143; started again, from step 1")
    assert row.again == 0


@pytest.mark.extended
@pytest.mark.skipif(
    faults.missing("a node is killed") is not None, reason=f"{faults.missing('a node is killed')}"
)
def test_an_agent_that_is_lost_loses_no_step() -> None:
    """Its worker and the others' save when they are told of the new node."""
    row = faults.run("a node's agent is killed, its worker lives")
    assert row.equal
    assert row.outcome.startswith("workers are started again, from step ")
    assert row.again == 0


@pytest.mark.extended
@pytest.mark.skipif(
    faults.missing("a node is killed") is not None, reason=f"{faults.missing('a node is killed')}"
)
def test_a_clock_that_is_behind_leaves_its_node_out() -> None:
    """torch's rendezvous does so; should it stop to, the guide has to."""
    row = faults.run("the clock of a node's agent is a minute behind")
    assert row.outcome.startswith("one node trains alone; ends with code ")


LOSSES = {number: f"{5 - number / 100:.4f}" for number in range(1, faults.STEPS + 1)}


def _line(number: int, loss: str | None = None) -> str:
    return f"step {number:2}/{faults.STEPS}  loss {loss or LOSSES[number]}  9 tokens/s"


def _seen(*numbers: int, fault: float | None = None, **others: object) -> faults.Seen:
    lines = [(float(at), _line(number)) for at, number in enumerate(numbers)]
    return faults.Seen(lines, fault, **{"codes": [0], **others})  # type: ignore[arg-type]


def test_what_was_seen_is_judged() -> None:
    whole = range(1, faults.STEPS + 1)
    assert faults.judge(_seen(*whole), LOSSES) == faults.Row("goes on", None, 0, True)
    row = faults.judge(_seen(*range(1, 13), *range(11, 31), fault=11.5), LOSSES)
    assert (row.again, row.equal) == (2, True)
    assert row.seconds is not None
    assert math.isclose(row.seconds, 14 - 11.5)  # step 13 is the fifteenth line


def test_losses_that_differ_or_are_missing_are_found() -> None:
    seen = _seen(*range(1, 31))
    assert not faults.judge(seen, {**LOSSES, 7: "9.0000"}).equal
    assert not faults.judge(_seen(*range(1, 30)), LOSSES).equal
    assert not faults.judge(_seen(), LOSSES).equal


def test_a_run_says_how_it_went_on() -> None:
    resumed = [(0.5, "[default0]:resumed from /x at step 10; held-out loss")]
    steps = _seen(*range(1, 31)).lines

    def outcome(lines: list[tuple[float, str]], codes: list[int], hung: bool = False) -> str:
        return faults.judge(faults.Seen(lines, 0.2, codes, hung), LOSSES).outcome

    assert outcome(resumed + steps, [0]) == AGAIN
    assert outcome(steps, [0]) == "goes on"
    assert outcome(resumed + steps, [143, 0]) == "ends with code 143; started again, from step 10"
    assert outcome(steps, [1]) == "ends with code 1"
    alone = [(0.1, "tiny: 131,392 parameters, fp32, 1 rank(s) on cpu over gloo")]
    assert outcome(alone + steps, [1]) == "one node trains alone; ends with code 1"
    assert outcome(resumed + steps, [], hung=True) == "hangs"


def test_a_machine_that_may_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.os, "geteuid", lambda: 1000)
    assert "need Linux and root" in str(faults.missing("a node is killed"))
    assert faults.missing("the disk is full in a save") == "a disk of its own needs root"
    assert faults.missing("SIGTERM to a rank") is None


def test_faults_that_are_not_known_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        faults.parse(["--faults", "an earthquake"])
    assert "'an earthquake' is none of" in capsys.readouterr().err
