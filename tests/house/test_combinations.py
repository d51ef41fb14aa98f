"""The default run meets every value of a test's arguments, the exhaustive one all combinations."""

from __future__ import annotations

import itertools

import pytest

from tests.common import combinations

pytestmark = pytest.mark.alone


def _cases(mark: pytest.MarkDecorator) -> tuple[list[str], list[str], list[str]]:
    """Ids of the cases of the default run, of the extended one, and of the rest."""
    runs: dict[str, list[str]] = {"": [], "extended": [], "exhaustive": []}
    for case in mark.args[1]:
        runs[case.marks[0].name if case.marks else ""].append(case.id)
    return runs[""], runs["extended"], runs["exhaustive"]


def test_every_value_is_met_by_default_and_some_more_in_the_extended_run() -> None:
    runs = _cases(combinations.each_once(way=["a", "b", "c"], mixed={"fp32": 0, "mixed": 1}))
    assert runs == (["a-fp32", "b-mixed", "c-fp32"], ["a-mixed", "c-mixed"], ["b-fp32"])
    runs = _cases(combinations.each_once(way=["a", "b", "c"], mixed=["x", "y", "z"]))
    assert [len(run) for run in runs] == [3, 2, 4]


@pytest.mark.parametrize("lengths", [(1,), (2, 2), (4, 2), (2, 2, 2), (11, 2, 2), (3, 4, 2, 2)])
def test_all_combinations_are_there(lengths: tuple[int, ...]) -> None:
    lists = {f"v{i}": [f"{i}{at}" for at in range(length)] for i, length in enumerate(lengths)}
    runs = _cases(combinations.each_once(**lists))
    everything = {"-".join(values) for values in itertools.product(*lists.values())}
    assert {case for run in runs for case in run} == everything
    assert sum(map(len, runs)) == len(everything)
    met = {value for case in runs[0] for value in case.split("-")}
    assert met == {value for values in lists.values() for value in values}
    assert len(runs[1]) <= len(runs[0])


def test_seldom_marks_all_but_the_first() -> None:
    cases = combinations.seldom([("a", 1), ("b", 2), ("c", 3)], extended=1)
    assert [case.values for case in cases] == [("a", 1), ("b", 2), ("c", 3)]
    assert [case.marks[0].name for case in cases] == ["extended", "exhaustive", "exhaustive"]


def test_two_short_lists_do_not_go_in_step() -> None:
    default, _, _ = _cases(
        combinations.each_once(cast=[*"abcd"], when=["early", "late"], swap=["set", "swap"])
    )
    pairs = {tuple(case.split("-")[1:]) for case in default}
    assert len(pairs) == 4
