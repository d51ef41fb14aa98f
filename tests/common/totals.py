"""How large the repository is: `python -m tests.common.totals` prints it, tests/house holds it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def lines() -> dict[str, int]:
    """Lines of Python by room of the package, of tests and of benchmarks."""
    folders = [path for path in sorted((ROOT / "fsdp2").iterdir()) if any(path.glob("*.py"))]
    found = {path.name: _lines(path) for path in folders}
    return {**found, **{name: _lines(ROOT / name) for name in ("fsdp2", "tests", "benchmarks")}}


def words() -> dict[str, int]:
    """Words of the pages by folder, as ``wc -w`` counts them, without those that are generated."""
    generated = ("errors.md", "benchmarks.md")
    pages = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name not in generated)
    pages += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    found: dict[str, int] = {}
    for page in pages:
        name = page.parent.relative_to(ROOT).as_posix()
        found[name] = found.get(name, 0) + len(page.read_text(encoding="utf-8").split())
    return {**found, "all": sum(found.values())}


def _lines(folder: Path) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in folder.rglob("*.py"))


if __name__ == "__main__":
    for name, count in [*lines().items(), *words().items()]:
        print(f"{name:20} {count:8,}")
