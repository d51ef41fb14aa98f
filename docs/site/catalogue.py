"""Every error that fsdp2 raises, read from the sources: what the site shows, and what tests expect.

    raise coded(ValueError, "empty-list", "fully_shard got an empty list; pass at least one module")

        Entry("empty-list", "ValueError", "fully_shard got an empty list; pass …", "fully_shard")

``{…}`` in a message stands for what varies; its name is that of the expression.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# Where fsdp2 is installed: an unpacked sdist may be tested against a wheel.
ROOT = Path(str(find_spec("fsdp2").origin)).parent  # type: ignore[union-attr]  # it is installed

PATHS = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if not {"examples", "testing"} & {*path.relative_to(ROOT).parts}
]

MAKERS = {"coded", "reword", "checkpoint_error"}
"""What gives an exception its message and its code."""

KINDS = {"error": "RuntimeError", "missing": "AttributeError"}
"""Classes of exceptions, by the expression in the class's place."""

TORCHS = {
    "integer-requires-grad": "Only Tensors of floating point and complex dtype can require "
    "gradients",
    "reads-after-opting-out": "one of the variables needed for gradient computation has been "
    "modified by an inplace operation",
    "backward-twice": "Trying to backward through the graph a second time",
    "other-shapes": "size mismatch for weight: copying a param with shape {shape} from checkpoint, "
    "the shape in current model is {shape}",
    "other-names": "Missing key(s) in state_dict: {names}",
}
"""Errors of torch's that a user of fsdp2 meets, in torch's words: a `RuntimeError` each."""

SECTIONS = {
    "checkpoint": "Checkpoints",
    "elastic": "Replica groups",
    "fsdp1": "FSDP1: the wrapper",
    "full": "Full tensors",
    "interop": "Interoperation with torch's FSDP2",
    "optim": "Optimizers and gradient norms",
    "planning": "Plans",
    "ranks": "Ranks that disagree",
    "checks": "Ranks that disagree",
    "tracing": "Timelines",
    "wrap": "Wrapping a whole model",
    "xla": "fsdp2.xla: the wrapper",
    "torch": "In torch's own words",
}
"""The section of the page, by the folder of the source."""

REST = "fully_shard, forward and backward"


@dataclass(frozen=True)
class Entry:
    """One error.

    Attributes:
        id: its code.
        exception: name of the class.
        message: the text, with ``{…}`` for what varies.
        section: where the page lists it.
    """

    id: str
    exception: str
    message: str
    section: str

    @property
    def from_torch(self) -> bool:
        """Whether torch raises it."""
        return self.id in TORCHS


PLACEHOLDER = re.compile(r"\{[^{}]*\}")
"""The part of a message that varies."""


@functools.cache
def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A parsed source."""
    return ast.parse(_text_of(path))


def _name_of(node: ast.expr) -> str:
    """A name for what varies, from its expression."""
    if isinstance(node, ast.Attribute) and node.attr in ("__name__", "__qualname__"):
        return "class"
    if isinstance(node, ast.Attribute | ast.Name):
        return (node.attr if isinstance(node, ast.Attribute) else node.id).strip("_").lower()
    if isinstance(node, ast.Subscript):
        return _name_of(node.value)
    if isinstance(node, ast.Call):
        return _name_of(node.args[0] if node.args else node.func)
    return "value"


def template(node: ast.expr) -> str | None:
    """The text of a string or an f-string, with ``{…}`` for what varies."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (
            str(part.value) if isinstance(part, ast.Constant) else f"{{{_name_of(part.value)}}}"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
        return "".join(parts)
    return None


def _section_of(path: Path) -> str:
    return SECTIONS.get(path.relative_to(ROOT).parts[0], REST)


def said_in(path: Path) -> Iterator[Entry]:
    """Every exception that a source makes, and torch's that it rewords; without a code, if none."""
    section = _section_of(path)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            if node.func.id in MAKERS and isinstance(node.args[-2], ast.Constant):
                *kinds, code, message = node.args
                text = template(message)
                assert text is not None, ast.unparse(node)
                kind = ast.unparse(kinds[0]) if kinds else "CheckpointError"
                raised = KINDS.get(kind, kind)
                yield Entry(ast.literal_eval(code), raised, text, section)
            elif node.func.id.endswith("Error") and template(node.args[0]) is not None:
                yield Entry("", node.func.id, str(template(node.args[0])), section)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "errors[index]":
            text, code = str(template(node.value)).rsplit(" ", 1)
            yield Entry(code.strip("[]"), "RuntimeError", text, section)


@functools.cache
def catalogue() -> dict[str, Entry]:
    """All entries by id, in the order of the sources."""
    torchs = [Entry(id_, "RuntimeError", text, SECTIONS["torch"]) for id_, text in TORCHS.items()]
    ours = [entry for path in PATHS for entry in said_in(path) if entry.id]
    return {entry.id: entry for entry in (*ours, *torchs)}


@functools.cache
def entry(entry_id: str) -> Entry:
    """One entry; only the sources that have its id are parsed."""
    quoted = re.compile(rf"[\"\[]{re.escape(entry_id)}[\"\]]")
    for path in PATHS if entry_id not in TORCHS else ():
        if quoted.search(_text_of(path)):
            for found in said_in(path):
                if found.id == entry_id:
                    return found
    return catalogue()[entry_id]
