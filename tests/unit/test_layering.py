"""Who may import whom, who may talk to c10d, and how long things may be: read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp2

ROOT = Path(fsdp2.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
INSIDE = [path for path in FILES if "examples" not in path.relative_to(ROOT).parts]

# Each may import those before it only.
LAYERS = (
    "config",
    "states",
    "progress",
    "uncompiled",
    "nested",
    "layout",
    "journal",
    "streams",
    "collectives",
    "sharding",
    "agreement",
    "comm_memory",
    "buffers",
    "kernels",
    "spares",
    "param",
    "transport",
    "extension",
    "post_forward",
    "issue",
    "division",
    "kept",
    "program",
    "reduction",
    "pending",
    "binding",
    "group",
    "ranges",
    "unit",
    "misuse",
    "skipped",
    "scheduler",
    "registrations",
    "optimizer_watch",
    "hooks",
    "selection",
    "checks",
    "assembly",
    "virtual",
    "stand_ins",
    "simulate",
)

MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60

COLLECTIVES = re.compile(
    r"_?(all_?gather|reduce_?scatter|all_?reduce|all_?to_?all|broadcast|barrier|gather|scatter"
    r"|send|recv|isend|irecv)(_.*)?"
)
"""Methods of a process group, and functions of torch.distributed, that communicate."""


def _name(path: Path) -> str:
    """fsdp2/core/group.py -> core.group; fsdp2/__init__.py -> "" """
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """(module, imported name or "") of every import, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*base, module] if module else base)
            for alias in node.names:
                yield module, alias.name


def _imports_of(path: Path) -> set[tuple[str, str]]:
    package = ".".join(("fsdp2", *path.relative_to(ROOT).parts[:-1]))
    return set(_imports(_tree(path), package))


def _below(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def _modules_of(path: Path) -> set[str]:
    """Modules that a file imports; ``from package import module`` counts as the module."""
    found = set()
    for module, name in _imports_of(path):
        candidate = ROOT.parent.joinpath(*module.split("."), f"{name}.py")
        found.add(f"{module}.{name}" if name and candidate.is_file() else module)
    return found


def test_relative_imports_are_resolved() -> None:
    tree = ast.parse("from . import a\nfrom .b import c\nfrom .. import d\nfrom ..e import f")
    assert set(_imports(tree, "fsdp2.core")) == {
        ("fsdp2.core", "a"),
        ("fsdp2.core.b", "c"),
        ("fsdp2", "d"),
        ("fsdp2.e", "f"),
    }


def test_every_core_module_has_a_layer() -> None:
    found = {_name(path).removeprefix("core.") for path in (ROOT / "core").glob("*.py")}
    assert found - {"core"} == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_core_imports_only_lower_layers(layer: str) -> None:
    allowed = {f"fsdp2.core.{below}" for below in LAYERS[: LAYERS.index(layer)]}
    own = {m for m in _modules_of(ROOT / "core" / f"{layer}.py") if _below(m, "fsdp2")}
    assert own <= allowed


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("report", []),
        ("norms", []),
        ("optimizers", []),
        ("debugging", []),
        ("communication", []),
        ("interop", []),
        ("module", ["fsdp2.communication", "fsdp2.interop"]),
        ("api", ["fsdp2.interop", "fsdp2.module"]),
    ],
)
def test_public_modules_stand_on_the_core(name: str, others: list[str]) -> None:
    own = {m for m in _modules_of(ROOT / f"{name}.py") if _below(m, "fsdp2")}
    assert any(_below(module, "fsdp2.core") for module in own)
    assert all(_below(module, "fsdp2.core") or module in others for module in own)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("install", ["core.registrations", "api", "interop", "module"]),
        ("run", ["install"]),
    ],
)
def test_what_replaces_torchs_names_stands_on_public_modules(name: str, others: list[str]) -> None:
    own = {m for m in _modules_of(ROOT / f"{name}.py") if _below(m, "fsdp2")}
    assert own == {f"fsdp2.{other}" for other in others}


def test_every_exported_name_exists() -> None:
    exported = set(fsdp2.__all__)
    assert len(exported) == len(fsdp2.__all__)
    assert all(hasattr(fsdp2, name) for name in exported)


def test_examples_use_public_names_only() -> None:
    exported = {*fsdp2.__all__, "__version__"}
    for path in (ROOT / "examples").rglob("*.py"):
        for module, name in _imports_of(path):
            if not _below(module, "fsdp2") or _below(module, "fsdp2.examples"):
                continue
            assert module == "fsdp2", f"{path.name} imports {module}"
            assert name in exported or name == "examples" or not name, f"{path.name}: {name}"


@pytest.mark.parametrize("path", INSIDE, ids=_name)
def test_only_three_modules_import_torch_distributed(path: Path) -> None:
    allowed = ["torch.distributed.tensor", "torch.distributed.device_mesh"]
    exactly = []
    if _name(path) in ("core.collectives", "core.comm_memory", "core.sharding"):
        exactly.append("torch.distributed")
    if _name(path) == "core.comm_memory":
        exactly.append("torch.distributed._symmetric_memory")
    if _name(path) == "core.collectives":
        exactly += ["torch._C._distributed_c10d", "torch.distributed.distributed_c10d"]
        exactly.append("torch.distributed._functional_collectives")
    if _name(path) == "interop":
        exactly += ["torch.distributed.fsdp", "torch.distributed._composable.contract"]
    for module in _modules_of(path):
        if _below(module, "torch.distributed") or "c10d" in module:
            known = any(_below(module, parent) for parent in allowed)
            assert known or module in exactly, f"{_name(path)} imports {module}"


@pytest.mark.parametrize("path", INSIDE, ids=_name)
def test_only_collectives_communicates(path: Path) -> None:
    called = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute) and COLLECTIVES.fullmatch(node.attr):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner in ("dist", "distributed", "group", "process_group", "pg"):
                called.append(ast.unparse(node))
    assert called == [] or _name(path) == "core.collectives"


@pytest.mark.parametrize(
    "name", ["all_gather_single", "_allgather_base", "allreduce", "barrier", "scatter_object_list"]
)
def test_communication_is_recognised(name: str) -> None:
    assert COLLECTIVES.fullmatch(name)


@pytest.mark.parametrize("name", ["size", "rank", "get_backend", "init_process_group"])
def test_other_methods_of_a_group_are_not(name: str) -> None:
    assert not COLLECTIVES.fullmatch(name)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_nobody_imports_torchs_own(path: Path) -> None:
    theirs = {m for m in _modules_of(path) if _below(m, "torch.distributed.fsdp")}
    theirs |= {m for m, name in _imports_of(path) if (m, name) == ("torch.distributed", "fsdp")}
    assert theirs == set() or _name(path) == "interop"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_lengths(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_MODULE_LINES
    too_long = {
        node.name: lines
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := _lines(node)) > MAX_FUNCTION_LINES
    }
    assert too_long == {}


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its docstring left out."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines
