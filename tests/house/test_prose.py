"""Pages and docstrings are in plain technical English, by the rules of `tests.common.prose`."""

from __future__ import annotations

import pytest

from docs.site import catalogue
from tests.common import prose

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


def test_no_file_breaks_a_rule() -> None:
    found = prose.found_in(prose.checked_files())
    assert [str(each) for those in found.values() for each in those] == []


@pytest.mark.parametrize(
    "name", [name for name, entry in catalogue.catalogue().items() if not entry.from_torch]
)
def test_no_message_breaks_a_rule(name: str) -> None:
    message = catalogue.entry(name).message
    assert prose.findings("page.md", f"{message[0].upper()}{message[1:]}\n") == []
