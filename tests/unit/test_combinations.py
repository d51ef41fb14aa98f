"""The default run meets every value of a test's arguments, the extended one all combinations."""

from __future__ import annotations

import itertools

import pytest

from tests.common.combinations import each_once


def _cases(mark: pytest.MarkDecorator) -> tuple[list[str], list[str]]:
    """Ids of the cases of the default run, and of those that the extended run adds."""
    ids: tuple[list[str], list[str]] = ([], [])
    for case in mark.args[1]:
        ids[bool(case.marks)].append(case.id)
    return ids


def test_every_value_is_met_by_default() -> None:
    default, extended = _cases(each_once(way=["a", "b", "c"], mixed={"fp32": 0, "mixed": 1}))
    assert default == ["a-fp32", "b-mixed", "c-fp32"]
    assert extended == ["a-mixed", "b-fp32", "c-mixed"]


@pytest.mark.parametrize("lengths", [(1,), (2, 2), (4, 2), (2, 2, 2), (11, 2, 2), (3, 4, 2, 2)])
def test_all_combinations_are_there(lengths: tuple[int, ...]) -> None:
    lists = {f"v{i}": [f"{i}{at}" for at in range(length)] for i, length in enumerate(lengths)}
    default, extended = _cases(each_once(**lists))
    everything = {"-".join(values) for values in itertools.product(*lists.values())}
    assert {*default, *extended} == everything
    assert len(default) + len(extended) == len(everything)
    met = {value for case in default for value in case.split("-")}
    assert met == {value for values in lists.values() for value in values}


def test_two_short_lists_do_not_go_in_step() -> None:
    default, _ = _cases(each_once(cast=[*"abcd"], when=["early", "late"], swap=["set", "swap"]))
    pairs = {tuple(case.split("-")[1:]) for case in default}
    assert len(pairs) == 4
