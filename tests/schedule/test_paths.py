"""How far a reader must go: files that a step visits, and moves between them.

Counted for one steady unit of four parameters, in fp32, on a null process group of 8 ranks: each
call of a Python function of fsdp2 is a stop in the file that defines it. To follow a gradient on
its way to ``.grad`` five files must be open, and the page is turned less than ten times.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.testing.null_group import init_null_group
from tests.common import upper_bounds

pytestmark = pytest.mark.alone

ROOT = Path(fsdp2.__file__).parent
HELPERS = {"testing", "paper"}  # where the null process group is


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture
def step() -> Iterator[Callable[[], None]]:
    """A step of three such units below a root, which is steady."""
    init_null_group(8)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model).set_tuning(pack_below=0)  # small parameters stand for large ones

    def run() -> None:
        model(torch.randn(4, 64)).sum().backward()
        model.zero_grad()

    for _ in range(3):
        run()
    yield run
    dist.destroy_process_group()


def stops(run: Callable[[], None]) -> list[tuple[str, str]]:
    """File and name of each function of fsdp2 that ``run`` calls, in order."""
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and not HELPERS & set(path.parts):
            found.append((str(path.relative_to(ROOT)), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def part(found: list[tuple[str, str]], begins: str, number: int, *ends: str) -> dict[str, int]:
    """The path from the ``number``-th call of ``begins`` to the next of ``ends``."""
    starts = [i for i, (_, name) in enumerate(found) if name == begins]
    start = starts[number]
    stop = next((i for i in range(start + 1, len(found)) if found[i][1] in ends), len(found))
    files = [file for file, _ in found[start:stop]]
    moves = sum(a != b for a, b in itertools.pairwise(files))
    return {"calls": len(files), "moves": moves, "files": len(set(files))}


PARTS = {
    # The backward of the second unit is left: its gradients are reduced and delivered.
    "leave backward": ("exit_backward", 1, "_on_output_grad", "_end_backward"),
    # The second unit's forward begins: it waits for its gather and launches the next one's.
    "pre-forward": ("pre_forward", 2, "post_forward"),
    "post-forward": ("post_forward", 1, "pre_forward"),
    "enter backward": ("_on_output_grad", 2, "exit_backward"),
}


def test_parts_of_a_step(step: Callable[[], None]) -> None:
    found = stops(step)
    for name, (begins, number, *ends) in PARTS.items():
        upper_bounds.hold(name, **part(found, begins, number, *ends))
