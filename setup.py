"""README for the package index: there, a link relative to this folder leads nowhere.

Everything else that the build needs is in pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/fsdp2/fsdp2"
PICTURES = "https://raw.githubusercontent.com/fsdp2/fsdp2"
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?!https?:|#)[^)]+)\)")


def absolute(text: str, version: str) -> str:
    """Markdown with links to the files of a version's tag in place of relative ones."""

    def link(found: re.Match[str]) -> str:
        base = f"{PICTURES}/v{version}" if found["picture"] else f"{REPOSITORY}/blob/v{version}"
        return f"{found['picture']}[{found['text']}]({base}/{found['path']})"

    return _LINK.sub(link, text)


def read_version(project: str) -> str:
    """The version that pyproject.toml has."""
    (version,) = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    return str(version)


if __name__ == "__main__":
    folder = Path(__file__).parent
    found = read_version((folder / "pyproject.toml").read_text(encoding="utf-8"))
    readme = (folder / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=absolute(readme, found),
        long_description_content_type="text/markdown",
    )
