"""What the package says of itself in several files is one thing."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import fsdp2

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_version_is_one() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', _text("pyproject.toml"), re.MULTILINE)
    assert version == fsdp2.__version__
    assert f"\nversion: {version}\n" in _text("CITATION.cff")
    assert f"\n## {version} (" in _text("CHANGELOG.md")


def test_ci_runs_the_oldest_and_the_newest_of_what_is_said_to_work() -> None:
    project = _text("pyproject.toml")
    (bounds,) = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', project)
    pythons = re.findall(r"Python :: 3\.(\d+)", project)
    runs = re.findall(r'torch: "2\.(\d+)", python: "3\.(\d+)"', _text(".github/workflows/ci.yml"))
    assert runs == [(bounds[0], pythons[0]), (str(int(bounds[1]) - 1), pythons[-1])]
    assert f'requires-python = ">=3.{pythons[0]}"' in project


def test_links_of_the_readme_lead_somewhere_on_a_package_index() -> None:
    found = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert found is not None
    assert found.loader is not None
    setup = importlib.util.module_from_spec(found)
    found.loader.exec_module(setup)
    tag = f"v{fsdp2.__version__}"
    assert setup.read_version(_text("pyproject.toml")) == fsdp2.__version__
    text = setup.absolute(_text("README.md"), fsdp2.__version__)
    links = re.findall(r"\]\(([^)]*)\)", text)
    relative = re.findall(r"\]\((?!http)([^)]*)\)", _text("README.md"))
    assert len(relative) > 10
    for path in relative:
        assert (ROOT / path).exists(), path
        places = (f"{setup.REPOSITORY}/blob/{tag}/{path}", f"{setup.PICTURES}/{tag}/{path}")
        assert any(place in links for place in places), path
    assert all(link.startswith("https://") for link in links)
