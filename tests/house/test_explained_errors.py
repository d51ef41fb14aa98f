"""docs/errors_explained.md: each section's first example raises its error, the second works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import fsdp2
from fsdp2.testing.null_group import init_null_group
from tests.common import errors

pytestmark = pytest.mark.alone

PAGE = errors.CATALOGUE.with_name("errors_explained.md")

HEAD, *SECTIONS = re.split(r"^## (?=[a-z0-9-]+$)", PAGE.read_text(encoding="utf-8"), flags=re.M)


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


EXPLAINED = {section.partition("\n")[0]: _blocks(section) for section in SECTIONS}


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What the page's first block defines, on the first of four ranks."""
    init_null_group(4)
    names: dict[str, Any] = {}
    (setting,) = _blocks(HEAD)
    exec(setting, names)
    yield names
    fsdp2.debug(check_nan=False)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_each_is_in_the_catalogue_once() -> None:
    assert len(EXPLAINED) == len(SECTIONS) >= 25
    assert set(EXPLAINED) <= set(errors.catalogue())


@pytest.mark.parametrize("entry", EXPLAINED)
@pytest.mark.filterwarnings("ignore")
def test_the_example_raises_and_the_fix_does_not(entry: str, names: dict[str, Any]) -> None:
    example, fix = EXPLAINED[entry]
    with errors.raises(entry):
        exec(example, names)
    exec(fix, names)
