"""The support matrix: the tests that it names are there, and a feature without one says so."""

from __future__ import annotations

import pytest

from docs.site import support

pytestmark = pytest.mark.alone

ON_A_GPU_ONLY = {"CUDA graphs", "NCCL with one rank"}
UNTESTED = ON_A_GPU_ONLY | {"NCCL with several ranks", "Several machines", "Windows and macOS"}


def test_what_has_not_run_is_untested() -> None:
    rows = [line.strip("| ").split(" | ") for line in support.table("").splitlines()[2:]]
    assert {name for name, *_, on in rows if on == "**untested**"} == UNTESTED
    assert {name for name, ranks, *_ in rows if ranks == "-"} == UNTESTED
    named = {feature for feature, tests in support.FEATURES.items() if tests}
    assert named == {name for name, *_ in rows} - UNTESTED | ON_A_GPU_ONLY


def test_versions_are_those_of_the_package() -> None:
    default, every = support.versions()
    project = (support.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    major, newest = default[-1].split(".")
    assert f'"torch>={default[0]},<{major}.{int(newest) + 1}"' in project
    assert set(every) < set(default)
    said = f"with torch {', '.join(default[:-1])} and {default[-1]}"
    assert said in (support.ROOT / "README.md").read_text(encoding="utf-8")
