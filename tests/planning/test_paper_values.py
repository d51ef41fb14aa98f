"""Values that follow from constants are those of the CPU, whatever is done to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.tracing.paper.devices import NamedDevices
from fsdp2.tracing.paper.values import LARGEST, Following, Values

pytestmark = pytest.mark.alone

MADE: list[Callable[[random.Random], dict[str, Any]]] = [
    lambda rng: {"make": torch.arange, "args": (rng.randint(1, 6),)},
    lambda rng: {"make": torch.ones, "args": (rng.randint(1, 6),), "dtype": torch.int64},
    lambda rng: {"make": torch.full, "args": ((rng.randint(1, 6),), rng.randint(-3, 3))},
    lambda rng: {"make": torch.tensor, "args": ([rng.randint(-9, 9) for _ in range(4)],)},
]

CHANGED: list[Callable[[Tensor, int], Any]] = [
    lambda x, n: x + n,
    lambda x, n: x.view(-1).flip(0),
    lambda x, n: x[: 1 + n % len(x)],
    lambda x, n: x.cumsum(0),
    lambda x, n: x.unsqueeze(0).expand(3, -1).reshape(-1)[: 6 + n % 2],
    lambda x, n: torch.where(x > n, x, -x),
    lambda x, n: x.mul_(2),
    lambda x, n: x[n % len(x)].fill_(7).view(1),
    lambda x, n: x.copy_(torch.flip(x, (0,))),
    lambda x, n: torch.cat((x, x[:1])).sort().values,
    lambda x, n: x.zero_() if n == 3 else x,
    lambda x, n: torch.zeros_like(x).add_(x, alpha=n),
    lambda x, n: x.to(torch.int32).to(torch.int64),
    lambda x, n: x[x > n] if bool((x > n).any()) else x,
]


def _program(seed: int, device: str) -> list[list[int]]:
    """Numbers that are asked for on the way, of all tensors that there are."""
    rng = random.Random(seed)
    tensors: list[Tensor] = []
    seen: list[list[int]] = []
    for _ in range(12):
        if len(tensors) < 2 or rng.random() < 0.2:
            given = rng.choice(MADE)(rng)
            make, args = given.pop("make"), given.pop("args")
            tensors.append(make(*args, device=device, **given))
        else:
            changed = rng.choice(CHANGED)(rng.choice(tensors), rng.randint(-3, 3))
            if changed.numel():
                tensors.append(changed)
        seen.append([int(each) for tensor in tensors for each in tensor.flatten().tolist()])
    return seen


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_see_the_same_numbers(seed: int) -> None:
    with Following(Values()), NamedDevices():
        found = _program(seed, "meta")
    assert found == _program(seed, "cpu")


def _is_known(run: Callable[[], Tensor]) -> bool:
    values = Values()
    with Following(values):
        made = run()
    return values.of(made) is not None


def test_what_does_not_follow_from_constants_is_not_known() -> None:
    on_paper = {"device": "meta"}
    assert not _is_known(lambda: torch.empty(3, **on_paper))
    assert not _is_known(lambda: torch.rand(3, **on_paper))
    assert not _is_known(lambda: torch.randperm(3, **on_paper))
    assert not _is_known(lambda: torch.ones(3, **on_paper) + torch.rand(3, **on_paper))
    assert not _is_known(lambda: torch.ones(3, **on_paper).bernoulli_())
    assert not _is_known(lambda: torch.ones(3, **on_paper).mul_(torch.empty(3, **on_paper)))
    assert not _is_known(lambda: torch.zeros(LARGEST, dtype=torch.int16, **on_paper))
    assert _is_known(lambda: torch.empty(3, **on_paper).fill_(2))
    assert _is_known(lambda: torch.zeros_like(torch.rand(3, **on_paper)))


def test_a_view_of_what_was_written_by_somebody_else_is_not_known() -> None:
    values = Values()
    with Following(values):
        made = torch.ones(4, device="meta")
        view = made[1:]
        assert values.of(view) is not None
        made[:2].copy_(torch.rand(2, device="meta"))
        assert values.of(view) is None
        made.fill_(3)
        assert view.tolist() == [3, 3, 3]


def test_parameters_are_forgotten() -> None:
    values = Values()
    with Following(values):
        made = torch.ones(4, device="meta")
        values.forget([made])
        with pytest.raises(RuntimeError, match="meta"):
            made[0].item()
