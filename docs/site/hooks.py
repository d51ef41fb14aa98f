"""What the docs site adds to the Markdown files of docs: four things that mkdocs calls.

on_config         guides that `nav` does not list, and the decisions, are appended to it
on_files          CONTRIBUTING.md and CHANGELOG.md of the top level are pages, too
on_page_markdown  links to files outside docs lead to the repository;
                  errors.md is replaced by the page for users (`error_pages`)

A link to a file that is not there is a warning, and with it an error of `mkdocs build --strict`.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import error_pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOP_LEVEL = ("CONTRIBUTING.md", "CHANGELOG.md")

log = logging.getLogger("mkdocs.hooks.fsdp2")

_LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")
_CODE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the decisions, and the guides that nobody has listed."""
    config.nav = [_with_decisions(entry) for entry in config.nav]
    listed = set(_pages(config.nav))
    missing = sorted(
        path.relative_to(DOCS).as_posix()
        for path in (DOCS / "guides").glob("*.md")
        if path.relative_to(DOCS).as_posix() not in listed
    )
    if missing:
        (guides,) = (entry["Guides"] for entry in config.nav if "Guides" in entry)
        guides.append({"More": missing})
    return config


def _with_decisions(entry: Any) -> Any:
    """``entry`` of `nav`, with the pages of a folder in the folder's place."""
    if isinstance(entry, dict):
        return {title: _with_decisions(below) for title, below in entry.items()}
    if isinstance(entry, list):
        return [_with_decisions(below) for below in entry]
    if entry.endswith("/"):
        return sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / entry).glob("*.md"))
    return entry


def _pages(entry: Any) -> list[str]:
    """Every page of `nav`."""
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [page for part in below for page in _pages(part)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make pages of the files at the top level that contributors read."""
    for name in TOP_LEVEL:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that leave docs into links of the repository, and write the page of errors."""
    source = page.file.src_uri
    if source == "errors.md":
        return error_pages.page()
    folder = "" if source in TOP_LEVEL else posixpath.join("docs", posixpath.dirname(source))

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match["path"]))
        anchor = match["anchor"] or ""
        if not (ROOT / target).exists():
            return match[0]  # mkdocs warns of it
        if target in TOP_LEVEL or (target.startswith("docs/") and (ROOT / target).is_file()):
            page_of = target.removeprefix("docs/")
            return posixpath.relpath(page_of, posixpath.dirname(source) or ".") + anchor
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{config.repo_url}/{kind}/main/{target}{anchor}"

    return _outside_code(markdown, lambda text: _LINK.sub(rewritten, text))


def _outside_code(markdown: str, change: Any) -> str:
    """``change`` of all text that is no code block."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])
