"""The comparison and the page of `python -m benchmarks.zoo`, without the libraries it tries."""

from __future__ import annotations

import copy

import torch
from torch import nn

from benchmarks.zoo import trial
from benchmarks.zoo.__main__ import odd, page, summary, updated
from benchmarks.zoo.instances import Instance, repeated


def _instance() -> Instance:
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.Sequential(nn.Embedding(3, 4), blocks, nn.Dropout(0.5))
    return Instance(model, lambda: {"input": torch.randint(0, 3, (2, 2))}, repeated(model))


def test_blocks_are_members_of_lists() -> None:
    made = _instance()
    assert made.blocks == list(made.model[1])


def test_two_trainings_are_exact() -> None:
    first, second = (trial.train_unsharded(_instance()) for _ in range(2))
    assert first.losses.keys() == {(s, r) for s in range(trial.STEPS) for r in range(trial.RANKS)}
    assert trial.compare(first, second) == {"verdict": "exact", "why": "", "error": 0.0}


def test_what_is_off_is_said() -> None:
    expected = trial.train_unsharded(_instance())

    found = copy.deepcopy(expected)
    found.params["1.0.weight"] += 1e-6
    assert trial.compare(expected, found)["verdict"] == "close"

    found.params["1.0.weight"] += 1.0
    answer = trial.compare(expected, found)
    assert answer["verdict"] == "differs"
    assert answer["why"].startswith("parameter 1.0.weight")

    found = copy.deepcopy(expected)
    found.gradients["1.0.bias"] = None
    assert trial.compare(expected, found)["why"] == "gradient 1.0.bias: none"

    found = copy.deepcopy(expected)
    found.names.pop()
    assert trial.compare(expected, found)["why"] == "the state dict's names"


def test_the_page_counts_and_names() -> None:
    fine = {"verdict": "exact", "why": "", "error": 0.0}
    fails = {"verdict": "fails", "why": "ValueError: a | b"}
    rows = [
        {"library": "timm", "name": "a/One", "verdict": "built", "fsdp2": fine, "torch": fine},
        {"library": "timm", "name": "a/Two", "verdict": "built", "fsdp2": fine, "torch": fails},
        {"library": "timm", "name": "b/Three", "verdict": "fails", "why": "too large"},
    ]
    assert summary(rows)[-1] == ("all", 2, 1, 2, 0, 0, 0, 1, 0, 0, 1)
    assert odd(rows) == [rows[1]]
    again = {**rows[1], "torch": fine}
    assert updated(rows, [again]) == [rows[0], again, rows[2]]
    environment = {"date": "2026-01-02T03:04:05", "torch": "2.13.0"}
    text = page({"environment": environment, "results": {"versions": {"timm": "1"}, "rows": rows}})
    assert "| Two | exact | fails: ValueError: a / b |" in text
    assert text.endswith("## Not built\n\nThree\n")
