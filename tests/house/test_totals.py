"""How much there is to read: totals that may only fall, in the table of `upper_bounds`.

There are no limits for a single function or class. They led to helpers whose only purpose was to
keep something else below its limit, and each helper is one more thing to read.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import fsdp2
from tests.common import totals, upper_bounds

pytestmark = pytest.mark.alone

ROOT = Path(fsdp2.__file__).parent
CORE = ROOT / "core"
BESIDE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _code_lines(text: str) -> int:
    """Lines with code: without docstrings, comments and blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*BESIDE, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def _room(*paths: Path) -> int:
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return sum(_code_lines(file.read_text(encoding="utf-8")) for file in files)


def _classes(root: Path) -> list[ast.ClassDef]:
    return [
        node
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]


def test_lines_and_words() -> None:
    """Everything that there is to read; `python -m tests.common.totals` prints it."""
    lines = totals.lines()
    kept = {name: lines[name] for name in ("fsdp2", "tests", "benchmarks")}
    upper_bounds.hold("lines and words", **kept, words=totals.words()["all"])


def test_lines_of_code_are_recognised() -> None:
    text = '''"""A module."""

# why
def function() -> str:
    """What."""
    return """two
lines"""
'''
    assert _code_lines(text) == 3


def test_lines_of_code() -> None:
    """Those of the rooms that `fully_shard` and a step enter."""
    rooms = {path.name: _room(path) for path in CORE.iterdir() if (path / "__init__.py").exists()}
    upper_bounds.hold(
        "lines of code",
        **rooms,
        ground=_room(*CORE.glob("*.py")),
        sharding=_room(ROOT / "sharding"),
    )


def test_classes() -> None:
    """Those of core; and protocols, of which one with a single implementation says nothing."""
    protocols = [
        node for node in _classes(ROOT) if any("Protocol" in ast.unparse(b) for b in node.bases)
    ]
    upper_bounds.hold("classes", core=len(_classes(CORE)), protocols=len(protocols))


def test_terms() -> None:
    """Those of the glossary."""
    design = (ROOT.parent / "docs" / "design.md").read_text(encoding="utf-8")
    glossary = design.partition("## Glossary")[2].partition("\n## ")[0]
    terms = re.findall(r"^\| (?!term|---)", glossary, re.MULTILINE)
    upper_bounds.hold("glossary", terms=len(terms))
