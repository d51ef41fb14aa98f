"""Figures inside of the pages' sentences: each is read from a file of results, by name.

    the step takes <!-- = compiled-small -->0.42<!-- / --> of torch FSDP2's

`benchmarks.page` writes them anew with the tables. On the pages in `SOURCED`, no figure is written
by hand: `written_by_hand` finds those that are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import targets, users
from benchmarks.files import RESULTS, newest

SOURCED = (
    *("README.md", "docs/index.md", "docs/benchmarks.md", "docs/compile.md"),
    *("docs/compat.md", "docs/compat_fsdp1.md", "docs/compat_xla.md"),
    *("docs/migration/torch_fsdp2.md", "docs/migration/fsdp1.md"),
    *("docs/migration/ddp.md", "docs/migration/deepspeed.md"),
)

STATED: Mapping[str, tuple[str, ...]] = {
    "docs/benchmarks.md": ("0.1 processors or less", "exceed 3 %", "below 2 %"),
    "docs/compat_xla.md": ("leave it at 128 KiB",),
    "docs/compat.md": ("more than 3 % and more than 1 MiB",),
    "docs/migration/torch_fsdp2.md": ("more than 3 % and more than 1 MiB",),
}
"""Numbers of definitions, and bounds, with the words around them."""


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        run: whose newest results it is from.
        text: from the results to what stands on the page.
    """

    run: str
    text: Callable[[Any], str]


def _compiled(variant: str, results: Any) -> str:
    return f"{targets.compiled(variant, results).median:.2f}"


def _ratio(label: str, results: Any) -> str:
    """The median of a ratio that the benchmark wrote, with its smallest and largest round."""
    found = targets.as_summary(results["ratios"][label])
    return f"{found.median:.2f} [{found.min:.2f} .. {found.max:.2f}]"


def _padding(kind: str, ranks: int, results: Any) -> str:
    """Per cent of the bytes of GPT-OSS-120B."""
    (found,) = (e[kind] for e in results if (e["model"], e["ranks"]) == ("GPT-OSS-120B", ranks))
    return f"{100 * found:.{1 if found < 0.1 else 0}f} %"


_ADDED = f"llama: {targets.ADDED.format('fsdp2')}"

FIGURES: Mapping[str, Figure] = {
    "added-fp32": Figure("blocks", partial(_ratio, _ADDED)),
    "added-mixed": Figure("blocks-mixed", partial(_ratio, _ADDED)),
    "gloo": Figure("gloo", partial(_ratio, "fsdp2 / torch")),
    "compiled-small": Figure("compile", partial(_compiled, "fsdp2")),
    "compiled-small-not-sharded": Figure("compile", partial(_compiled, "none")),
    "compiled-large": Figure("compile-kernels", partial(_compiled, "fsdp2")),
    **{
        f"users-{name}": Figure("users", partial(users.extremes, prefixes))
        for name, prefixes in users.SPOKEN_OF.items()
    },
    **{
        f"padding-{kind}-{ranks}": Figure("padding", partial(_padding, kind, ranks))
        for kind in ("ours", "two_dims", "torch")
        for ranks in (256, 1024)
    },
}

_MARK = re.compile(r"(<!-- = (?P<name>[\w-]+) -->).*?(<!-- / -->)")


def filled(text: str, folder: Path = RESULTS) -> str:
    """A page with each marked figure made anew; one without a file stays.

    Raises:
        KeyError: a mark names no figure.
    """

    def fill(mark: re.Match[str]) -> str:
        figure = FIGURES[mark["name"]]
        file = newest(figure.run, folder)
        return mark[0] if file is None else f"{mark[1]}{figure.text(file.results)}{mark[3]}"

    return _MARK.sub(fill, text)


_MADE = re.compile(r"^<!-- [\w ]+ -->\n.*?^<!-- end -->$|^```.*?^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`|\]\([^)]*\)")
_VERSION = re.compile(r"\b(?:2\.(?:8|1[0-5])|0\.1\.0|Python 3\.1\d|Apache 2\.0)(?![\d.]*\d)")
_FIGURE = re.compile(r"\d*\.\d+|\d[\d,]* ?(?:%|\u00d7|[nµm]?s\b|[KMGT]i?B\b|times\b|per cent)")


def written_by_hand(page: str, text: str) -> Iterator[str]:
    """Measured figures of a page outside of tables that are made, marks and code."""
    text = " ".join(_MARK.sub("", _CODE.sub("", _MADE.sub("", text))).split())
    for words in STATED.get(page, ()):
        text = text.replace(words, "")
    yield from (found[0] for found in _FIGURE.finditer(_VERSION.sub("", text)))
