"""docs/errors.md: each section's first example raises its error, the second works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import fsdp2
from docs.site import catalogue
from fsdp2.testing.null_group import init_null_group
from tests.common import errors

pytestmark = pytest.mark.alone

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"

HEAD, *SECTIONS = re.split(r"^## (?=[a-z0-9-]+$)", PAGE.read_text(encoding="utf-8"), flags=re.M)


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


NOT_RUN = "<!-- not run: it needs two ranks -->\n```python"
"""In front of both examples of an error that `tests.ranks` raises."""

EXPLAINED = {section.partition("\n")[0]: _blocks(section) for section in SECTIONS}
ON_ONE_RANK = [s.partition("\n")[0] for s in SECTIONS if s.count(NOT_RUN) != 2]


def _as_if_ranks_were_alike(
    _: object, __: str, outputs: list[Tensor], inputs: list[Tensor]
) -> None:
    """Fill what a collective writes with what this rank has sent.

    A null group leaves that memory as it is: NaN in it would be found where the example has none.
    """
    for output, sent in zip(outputs, inputs, strict=False):  # an all-reduce has no inputs
        numel = min(output.numel(), sent.numel())
        if numel and output.dtype == sent.dtype:
            first = sent.detach().reshape(-1)[:numel].clone()
            output.data.view(-1).copy_(first.repeat(output.numel() // numel))


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What the page's first block defines, on the first of four ranks."""
    init_null_group(4, observer=_as_if_ranks_were_alike)
    names: dict[str, Any] = {}
    (setting,) = _blocks(HEAD)
    exec(setting, names)
    yield names
    fsdp2.debug(check_nan=False)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_each_is_in_the_catalogue_once() -> None:
    assert len(EXPLAINED) == len(SECTIONS) >= 25
    assert set(EXPLAINED) <= set(catalogue.catalogue())


@pytest.mark.parametrize("entry", ON_ONE_RANK)
@pytest.mark.filterwarnings("ignore")
def test_the_example_raises_and_the_fix_does_not(entry: str, names: dict[str, Any]) -> None:
    example, fix = EXPLAINED[entry]
    with errors.raises(entry):
        exec(example, names)
    exec(fix, names)
