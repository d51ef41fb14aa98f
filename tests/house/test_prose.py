"""Pages and docstrings are in plain technical English, by the rules of `tests.common.prose`."""

from __future__ import annotations

import pytest

from tests.common import prose, upper_bounds

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("rule", prose.RULES, ids=lambda rule: rule.name)
def test_a_rule_finds_its_example(rule: prose.Rule) -> None:
    found = prose.findings("page.md", f"A sentence.\n\n{rule.bad}\n")
    assert [(each.line, each.rule.name) for each in found] == [(3, rule.name)]
    assert prose.findings("page.md", f"{rule.good}\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = 1  # behind\n```",
        "Look at `behind` and [this](behind.md).",
        'Torch raises "alone and behind".',
        "# Where we lose",
        "> What is not used",
        "<!-- table -->\n| behind |\n<!-- end -->",
        "rank 0 ── behind ──> rank 1",
        "What does a step cost?",
    ],
)
def test_what_is_not_prose_is_not_checked(text: str) -> None:
    assert prose.findings("page.md", f"{text}\n") == []


def test_cells_and_items_are_checked() -> None:
    page = "| name | after |\n|---|---|\n| a | behind |\n\n- Where it is.\n  It is behind.\n"
    assert [each.line for each in prose.findings("page.md", page)] == [3, 5, 5]


def test_docstrings_are_checked() -> None:
    source = '''
def f(x):
    """Run it.

    Args:
        x: Where it is.

    Example::

        f(1)  # behind

    It is behind.
    """


NAME = 1
"""What it is."""
'''
    found = prose.findings("module.py", source)
    assert [(each.line, each.rule.name) for each in found] == [
        *((6, "sentence start"), (12, "behind, beside"), (17, "what as a subject"))
    ]


def test_no_file_has_more_findings_than_its_bound() -> None:
    found = prose.found_in(prose.checked_files())
    bounds = upper_bounds.bounds()["prose"]
    new = [str(each) for name, those in found.items() if name not in bounds for each in those]
    assert new == []
    numbers = {name: len(found.get(name, ())) for name in bounds}
    above = [str(e) for name in bounds if numbers[name] > bounds[name] for e in found[name]]
    assert above == []
    upper_bounds.hold("prose", **numbers)
