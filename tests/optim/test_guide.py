"""docs/guides/optimizers.md: its code runs, and its table of memory is what optimizers keep."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp2
from fsdp2.core.layout.mesh import local_of
from tests.common.models import seeded
from tests.common.workers import ranks

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "optimizers.md"
TEXT = GUIDE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
ROWS, HIDDEN = 16, 64


class Net(nn.Module):
    """As the guide's: an embedding, blocks and a head, in units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, HIDDEN)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.head = nn.Linear(HIDDEN, ROWS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def sharded() -> nn.Module:
    model = seeded(Net)
    for block in model.blocks:
        fsdp2.fully_shard(block)
    return fsdp2.fully_shard(model)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens), tokens)


@ranks(2)
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_of_the_guide_runs(number: int, tmp_path: Path) -> None:
    """Each block by itself, with what the guide's reader has."""
    model = sharded()
    tokens = torch.arange(8)
    names = {
        **{"torch": torch, "fsdp2": fsdp2, "model": model, "batches": [tokens, tokens + 1]},
        **{"loss_of": loss_of, "evaluate": lambda model: model(tokens), "step": 1},
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loss": SimpleNamespace(backward=lambda: loss_of(model, tokens).backward()),
    }
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        exec(compile(BLOCKS[number], str(GUIDE), "exec"), names)
    finally:
        os.chdir(before)
    optimizer: Any = names["optimizer"]
    optimizer.zero_grad()
    loss_of(model, tokens).backward()
    optimizer.step()


# -- memory ---------------------------------------------------------------------------------------


def _table(first: str) -> dict[str, list[str]]:
    """Cells of the rows of the table whose first column is called so, by their first cell."""
    lines = TEXT.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows: dict[str, list[str]] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = cells
    return rows


def _kept(state: Any) -> int:
    """Bytes of tensors with an entry per element or per scale; step counts are none."""
    if isinstance(state, Tensor):
        return local_of(state).nbytes if local_of(state).dim() else 0
    return sum(_kept(value) for value in state.values()) if isinstance(state, dict) else 0


def _ema(model: nn.Module) -> Any:
    ema = fsdp2.optim.EMA(model, 0.9)
    ema.update()
    return ema


Made = Callable[[nn.Module], Any]

MADE: dict[str, Made] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adam, AdamW": lambda model: fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW),
    "Adagrad, RMSprop": lambda model: torch.optim.RMSprop(model.parameters()),
    "`fsdp2.optim.Muon`, of matrices": lambda model: fsdp2.optim.Muon(model),
    "`EMA`, in addition": _ema,
}


@ranks(2)
@pytest.mark.parametrize("name", list(MADE))
def test_bytes_of_states_are_the_guides(name: str) -> None:
    model = sharded()
    (state, *_) = _table("bytes per parameter")[name]
    loss_of(model, torch.arange(8)).backward()
    made = MADE[name](model)
    if name.startswith("`EMA"):
        kept, counted = _kept(made.averages()), list(model.parameters())
    else:
        made.step()
        counted = [p for p in model.parameters() if "Muon" not in name or p.ndim == 2]
        kept = sum(_kept(dict(made.state[param])) for param in counted if made.state.get(param))
    rows = sum(local_of(param).numel() for param in counted)
    assert kept == float(state) * rows
