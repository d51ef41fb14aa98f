"""Units with a tied group: what is hidden, and what is asked of a unit that does not own it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.testing.null_group import null_world

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with null_world(2):
        yield


class Language(nn.Module):
    """The head's weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, between: Any = None) -> torch.Tensor:
        if between is not None:
            self.head(torch.ones(1, 6))  # its unit ends, while the root's is under way
        result: torch.Tensor = self.head(self.embed(tokens))
        return result


TOKENS = torch.arange(4).view(2, 2)


@pytest.fixture(params=["head", "embed"])
def model(request: pytest.FixtureRequest) -> Any:
    model = Language()
    fsdp2.fully_shard(model.get_submodule(request.param))
    return fsdp2.fully_shard(model)


def test_evaluated_while_gradients_are_kept(model: Any) -> None:
    """The evaluation ends beside gradients; the group is hidden, and so is what stands for it."""
    for _ in range(2):
        with torch.no_grad():
            model(TOKENS)
        for _ in range(2):
            model(TOKENS).sum().backward()
            assert model.embed.weight is model.head.weight
            assert model.head.weight.grad is not None


def test_a_unit_ends_inside_of_another_while_a_graph_is_kept(model: Any) -> None:
    """Gathered parameters stay registered until the outer unit ends, too."""
    norm = model(TOKENS).square().sum()
    (grad,) = torch.autograd.grad(norm, [model.head.weight], create_graph=True)
    model(TOKENS, between=True)
    grad.sum().backward()
    model(TOKENS, between=True).sum().backward()


def test_all_places_of_a_tied_parameter_are_tied_to_another() -> None:
    """Its group is gone, and with it what stood for it elsewhere."""
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    model[1].weight = model[0].weight
    for module in (*model, model):
        fsdp2.fully_shard(module)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    model[0].weight = model[1].weight = model[2].weight
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    assert [name for name, _ in model.named_parameters()] == ["0.weight"]
    assert model[0].weight is model[1].weight is model[2].weight
