"""The docs site: every public name and every error is on it, and it builds without a warning."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fsdp2
from docs.site import catalogue

ROOT = Path(__file__).parents[2]

ROOMS = (
    "checkpoint",
    "elastic",
    "errors",
    "full",
    "fsdp1",
    "optim",
    "planning",
    "tracing",
    "wrap",
    "xla",
)
"""Rooms whose public names have entries; those of the others are names of `fsdp2`."""

NO_ENTRY = {
    "fsdp2.elastic.Manager": "torchft's",
    "fsdp2.wrap.Strategy": "a type of strings, which `shard_model` lists",
    **{f"fsdp2.tracing.{name}": "strings" for name in ("CATEGORIES", "COLLECTIVES", "LANES")},
}


def _entries() -> set[str]:
    """The names that API pages have, each as mkdocstrings is told it."""
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    found = [
        name
        for page in pages
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(set(found)) == len(found), "a name has two entries"
    return set(found)


def _same(name: str) -> object:
    """What a name is, so that `fsdp2.trace` and `fsdp2.tracing.trace` are one."""
    return pkgutil.resolve_name(name)


@pytest.mark.alone
def test_every_public_name_has_an_entry() -> None:
    entries = [_same(name) for name in _entries()]
    names = [f"fsdp2.{name}" for name in fsdp2.__all__]
    for room in ROOMS:
        module = importlib.import_module(f"fsdp2.{room}")
        names += [f"fsdp2.{room}.{name}" for name in module.__all__]
    missing = {
        name
        for name in names
        if not isinstance(_same(name), ModuleType)
        and not any(_same(name) is entry for entry in entries)
    }
    assert missing == set(NO_ENTRY)


@pytest.mark.alone
def test_every_error_has_an_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")  # as mkdocs' hooks import it
    page = importlib.import_module("error_pages").page()
    anchors = re.findall(r"^### [a-z0-9-]+ \{ #([a-z0-9-]+) \.error \}$", page, re.MULTILINE)
    assert sorted(anchors) == sorted(catalogue.catalogue())
    first, *sections = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert first == "The most likely errors"
    assert set(sections) == {entry.section for entry in catalogue.catalogue().values()}


@pytest.mark.alone
def test_links_lead_where_they_say() -> None:
    """A link whose text is the name of a guide, a concept or a recipe leads to such a page."""
    folders = [ROOT / "docs" / name for name in ("guides", "concepts", "recipes")]
    names = {page.stem for folder in folders for page in folder.glob("*.md")}
    for page in (*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")):
        for text, target in re.findall(r"\[([^\]]+)\]\(([^)#:]+)\.md", page.read_text("utf-8")):
            name = "_".join(text.lower().split())
            assert name not in names or Path(target).name == name, (page, text)


@pytest.mark.alone
@pytest.mark.extended
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors and cross-references that lead nowhere are warnings."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "errors" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="{entry}"' in page for entry in catalogue.catalogue())
    api = (tmp_path / "api" / "fsdp2" / "index.html").read_text(encoding="utf-8")
    assert 'id="fsdp2.FSDPModule.unshard"' in api
    assert "Example::" not in api
