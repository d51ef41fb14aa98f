"""The catalogue of errors has all that the sources raise, and tests assert each of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.site import catalogue
from tests.common import cases

pytestmark = pytest.mark.alone

TESTS = Path(__file__).parents[1]

MINIMUM = 60

NOT_CATALOGUED = {
    "AssertionError('one rank has nobody to communicate with')": "an assertion",
    "resaid(ValueError, plan)": "what the first rank has said: a message of `fsdp1`",
    "resaid(CheckpointError, sentence)": "what a rank has said: a message of `checkpoint`",
    "MemoryError(str(error))": "the system's; reworded by `checkpoint.consensus`",
    "BrokenError()": "readers of `checkpoint` have messages for it",
    "BlockingIOError(_said(file.read()))": "reworded by `checkpoint.stores`",
    "BlockingIOError(_said(before))": "the same",
    "BlockingIOError(_said(found))": "the same",
    "LostRankError(str(error))": "reworded by `checkpoint.consensus`",
    "lost_rank(self.what)": "`checkpoint.consensus` has it",
    "lost_rank(self._call.what)": "the same",
    "self._first": "the first failure of several actions: `checkpoint.stores` goes on behind it",
    "self._failure.error": "what a save has failed with: a message of `checkpoint`",
    "failure": "what the user's hook raised, once the other ranks know of it",
    "resaid(RankMismatchError, sentence)": "what a rank has claimed: a message of `agreement`",
    "AutocastError": "`plan.reasons` has a message for it",
    "_BrokenError()": "`elastic.fetching` has a message for it",
    "_EarlyError()": "the same",
    "self._unsent": "the user's; `elastic.transport` has a message for it",
    "refused": "what `elastic.transport` has raised before, in another thread",
    "communication_error(operation, name, error)": "`core.progress` has it",
}
"""What is raised besides, and why the catalogue does not have it."""

HELPERS = {
    *("_not_loadable", "_wrong", "communication_error", "refused", "store_gone", "tracing_error"),
}
"""Functions that return the exception to raise; what they return is looked at in their place."""


def _raised(path: Path) -> Iterator[ast.expr]:
    for node in ast.walk(catalogue.tree_of(path)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node.exc


def test_a_code_names_one_message() -> None:
    said = {found for path in catalogue.PATHS for found in catalogue.said_in(path) if found.id}
    by_id: dict[str, set[str]] = {}
    for found in said:
        by_id.setdefault(found.id, set()).add(catalogue.PLACEHOLDER.sub("{}", found.message))
    assert [id_ for id_, messages in by_id.items() if len(messages) > 1] == []
    assert len(by_id) >= MINIMUM


@cases.each("path", catalogue.PATHS)
def test_every_message_of_the_sources_is_there(path: Path) -> None:
    """What is raised has a code, but for assertions and `NOT_CATALOGUED`."""
    said = catalogue.said_in(path)
    assert [found for found in said if not found.id and found.exception != "AssertionError"] == []
    for raised in _raised(path):
        text = ast.unparse(raised)
        if text not in NOT_CATALOGUED:
            assert isinstance(raised, ast.Call), text
            maker = ast.unparse(raised.func).removeprefix("self.")
            assert maker in catalogue.MAKERS | HELPERS, text


def test_exceptions_to_the_rule_are_still_raised() -> None:
    raised = {ast.unparse(found) for path in catalogue.PATHS for found in _raised(path)}
    assert set(NOT_CATALOGUED) <= raised


def test_a_test_asserts_each_entry() -> None:
    """By `raises` or `assert_said`, or in a table of misuses."""
    asserted: set[str] = set()
    for path in TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        asserted.update(re.findall(r'(?:\(\s*|, |^    )"([a-z0-9-]+)"', text, re.MULTILINE))
    assert set(catalogue.catalogue()) - asserted == set()


def test_messages_are_one_sentence() -> None:
    """It starts with a subject, ends without a full stop, and has no second sentence."""
    messages = {name: entry.message for name, entry in catalogue.catalogue().items()}
    assert [name for name, message in messages.items() if message.endswith(".")] == []
    second = re.compile(r"[a-z)']\. [A-Z]")
    assert [name for name, message in messages.items() if second.search(message)] == []


def test_messages_say_what_to_do() -> None:
    """Behind a semicolon, or as what is wanted in the place of what was given."""
    wanted = re.compile(r";| (takes|must return) ")
    ours = (entry for entry in catalogue.catalogue().values() if not entry.from_torch)
    assert [entry.id for entry in ours if not wanted.search(entry.message)] == []
