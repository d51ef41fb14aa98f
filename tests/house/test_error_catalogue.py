"""docs/errors.md says what the sources say, all of it, and what tests show."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp2
from tests.common import errors

pytestmark = pytest.mark.alone

ROOT = Path(fsdp2.__file__).parent
TESTS = Path(__file__).parents[1]

MINIMUM = 60

NOT_CATALOGUED = {
    "AssertionError('one rank has nobody to communicate with')": "an assertion",
    "resaid(CheckpointError, str(error))": "what `fsdp2.xla` says of its files",
    "resaid(CheckpointError, sentence)": "what a rank has said: a message of `checkpoint`",
    "MemoryError(str(error))": "the system's; reworded by `checkpoint.consensus`",
    "OSError(errno.EINVAL, os.strerror(errno.EINVAL))": "as files raise it; zipfile expects it",
    "BrokenError()": "readers of `checkpoint` have messages for it",
    "_unlike(source, name)": "a message of `checkpoint.contents`",
    "_unlike(source, str(key))": "the same",
    "BlockingIOError(_said(file.read()))": "reworded by `checkpoint.stores`",
    "BlockingIOError(_said(before))": "the same",
    "BlockingIOError(_said(found))": "the same",
    "LostRankError(str(error))": "reworded by `checkpoint.consensus`",
    "lost_rank(self.what)": "`checkpoint.consensus` has it",
    "self._first": "the first failure of several actions: `checkpoint.stores` goes on behind it",
    "end.failure.error": "what a save has failed with: a message of `checkpoint`",
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

MAKERS = {"coded", "reword"}
"""What gives an exception its message and its code."""

KINDS = {"error": "RuntimeError", "missing": "AttributeError"}
"""Classes of exceptions, by the expression in the class's place."""

HELPERS = {"_wrong", "communication_error", "refused", "tracing_error"}
"""Functions that return the exception to raise; what they return is looked at in their place."""


PATHS = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if not {"examples", "testing"} & {*path.relative_to(ROOT).parts}
]


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in PATHS:
        yield path, _tree(path)


def _template(node: ast.expr) -> str | None:
    """The text of a string or an f-string, with {} for what varies."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
        return "".join(str(part) for part in parts)
    return None


def _said(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """(exception, code, message) of every exception that is made, and of torch's reworded ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            if node.func.id in MAKERS and isinstance(node.args[1], ast.Constant):
                kind, code, message = node.args
                text = _template(message)
                assert text is not None, ast.unparse(node)
                yield KINDS.get(ast.unparse(kind), ast.unparse(kind)), ast.literal_eval(code), text
            elif node.func.id.endswith("Error") and _template(node.args[0]) is not None:
                yield node.func.id, "", str(_template(node.args[0]))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "errors[index]":
            text, code = str(_template(node.value)).rsplit(" ", 1)
            yield "RuntimeError", code.strip("[]"), text


def _raised(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node.exc


@functools.cache
def _entries() -> set[tuple[str, str, str]]:
    return {
        (entry.exception, entry.id, errors.PLACEHOLDER.sub("{}", entry.message))
        for entry in errors.catalogue().values()
        if not entry.from_torch
    }


def test_every_line_of_the_catalogue_is_understood() -> None:
    text = errors.CATALOGUE.read_text(encoding="utf-8")
    assert len(re.findall(r"^- \*\*", text, re.MULTILINE)) == len(errors.catalogue()) >= MINIMUM
    assert len(re.findall(r"^  > ", text, re.MULTILINE)) == len(errors.catalogue())
    assert "\n## Ranks that disagree\n" in text


def test_every_message_is_in_the_sources() -> None:
    said = {found for _, tree in _sources() for found in _said(tree)}
    assert _entries() - said == set()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_message_of_the_sources_is_there(path: Path) -> None:
    tree = _tree(path)
    assert {said for said in _said(tree) if said[0] != "AssertionError"} - _entries() == set()
    for raised in _raised(tree):
        text = ast.unparse(raised)
        if text not in NOT_CATALOGUED:
            assert isinstance(raised, ast.Call), text
            maker = ast.unparse(raised.func).removeprefix("self.")
            assert maker in MAKERS | HELPERS, text


def test_exceptions_to_the_rule_are_still_raised() -> None:
    raised = {ast.unparse(found) for _, tree in _sources() for found in _raised(tree)}
    assert set(NOT_CATALOGUED) <= raised


@pytest.mark.parametrize("entry", errors.catalogue())
def test_the_test_that_is_named_asserts_the_entry(entry: str) -> None:
    """By `raises` or `assert_said`, or by the decorator that puts it into a table of misuses."""
    path, name = errors.catalogue()[entry].test.split("::")
    tree = _tree(TESTS / path)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    (named,) = (function for function in functions if function.name == name)
    table = name.removeprefix("test_")
    calls = {
        ast.unparse(node.func): _template(node.args[0])
        for node in [*ast.walk(named), *(d for f in functions for d in f.decorator_list)]
        if isinstance(node, ast.Call)
        and node.args
        and ast.unparse(node.func).rpartition(".")[2] in ("raises", "assert_said", table)
        and _template(node.args[0]) == entry
    }
    assert calls, f"{path}::{name} does not assert {entry}"


def test_messages_are_one_sentence() -> None:
    """It starts with a subject, ends without a full stop, and has no second sentence."""
    messages = {name: entry.message for name, entry in errors.catalogue().items()}
    assert [name for name, message in messages.items() if message.endswith(".")] == []
    second = re.compile(r"[a-z)']\. [A-Z]")
    assert [name for name, message in messages.items() if second.search(message)] == []


def test_messages_say_what_to_do() -> None:
    """Behind a semicolon, or as what is wanted in the place of what was given."""
    wanted = re.compile(r";| (takes|must return) ")
    ours = (entry for entry in errors.catalogue().values() if not entry.from_torch)
    assert [entry.id for entry in ours if not wanted.search(entry.message)] == []
