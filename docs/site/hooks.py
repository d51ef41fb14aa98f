"""What the docs site adds to the Markdown files of docs: what mkdocs calls.

on_config         decisions take their folder's place in `nav`;
                  pages that it lacks are further guides
on_files          CONTRIBUTING.md and CHANGELOG.md of the top level are pages, too
on_page_markdown  comments for tests say what a block needs, or why it does not run;
                  links to files outside docs lead to the repository;
                  errors.md gets all errors of the sources (`error_pages`);
                  api/index.md gets its table of names, support.md its matrix (`support`)
on_page_content   the table of contents beside the errors lists sections, not 300 errors

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
import support

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOP_LEVEL = ("CONTRIBUTING.md", "CHANGELOG.md")

log = logging.getLogger("mkdocs.hooks.fsdp2")

_LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")
_FOR_TESTS = re.compile(
    r"^<!-- (?P<kind>given|not run): (?P<text>.*?) -->\n+", re.MULTILINE | re.DOTALL
)
_CODE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the decisions, and the pages that `nav` lacks."""
    config.nav[:] = [_with_decisions(entry) for entry in config.nav]
    listed = {*_pages(config.nav)}
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    missing = [page for page in pages if page not in listed]
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
        page.meta["search"] = {"boost": 4}  # who searches for a message wants its entry
        return _FOR_TESTS.sub(_for_readers, error_pages.page())
    if source.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.5}
    if source == "api/index.md":
        return markdown + _table_of_names(config.nav)
    if source == "support.md":
        markdown += support.table(config.repo_url)
    folder = "" if source in TOP_LEVEL else posixpath.join("docs", posixpath.dirname(source))

    markdown = _FOR_TESTS.sub(_for_readers, markdown)

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


def _for_readers(comment: re.Match[str]) -> str:
    """What a comment for tests says: why a block does not run, or the lines before it, folded."""
    if comment["kind"] == "not run":
        return f"*Tests do not run this block: {comment['text']}.*{{ .not-run }}\n\n"
    lines = comment["text"].replace("; ", "\n").splitlines()
    code = "\n".join(f"    {line}" for line in ("```python", *lines, "```"))
    return f'??? quote "This block needs these lines first"\n\n{code}\n\n'


def _table_of_names(nav: list[Any]) -> str:
    """Every name of the API pages, by page."""
    lines = ["| page | names |", "|---|---|"]
    for name in _pages(next(entry["API"] for entry in nav if "API" in entry))[1:]:
        text = (DOCS / name).read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        page = posixpath.basename(name)
        names = re.findall(r"^::: (fsdp2\.([\w.]+))$", text, re.MULTILINE)
        links = ", ".join(f"[`{short}`]({page}#{full})" for full, short in names)
        lines.append(f"| [{title}]({page}) | {links} |")
    return "\n".join(lines) + "\n"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Shorten the table of contents of the errors; headings and search keep all of them."""
    if page.file.src_uri == "errors.md":
        _, *sections = next(iter(page.toc)).children
        for section in sections:
            section.children.clear()
    return html


def _outside_code(markdown: str, change: Any) -> str:
    """``change`` of all text that is no code block."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])
