"""docs/guides/optimizers.md: its table of memory is what optimizers keep."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.core.layout.mesh import local_of
from tests.common.cases import in_turn
from tests.common.workers import ranks
from tests.house import guide_setting

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "optimizers.md"
BYTES = dict(
    re.findall(r"^\| (.+?) \| ([\d.]+) \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
)


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
def test_bytes_of_states_are_the_guides() -> None:
    in_turn({name: name for name in MADE}, _check_bytes)


def _check_bytes(name: str) -> None:
    model = guide_setting.shard(guide_setting.Model())
    model(torch.arange(8)).backward()
    made = MADE[name](model)
    if name.startswith("`EMA"):
        kept, counted = _kept(made.averages()), list(model.parameters())
    else:
        made.step()
        counted = [p for p in model.parameters() if "Muon" not in name or p.ndim == 2]
        kept = sum(_kept(dict(made.state[param])) for param in counted if made.state.get(param))
    rows = sum(local_of(param).numel() for param in counted)
    assert kept == float(BYTES[name]) * rows
