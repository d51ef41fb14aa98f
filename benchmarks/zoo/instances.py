"""A tiny model that is ready to train, and what all of them have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, CLASSES = 2, 12, 96, 5
MOST_PARAMETERS = 30_000_000  # of an instance: larger ones are not tiny

Inputs = dict[str, Any]


class NotBuiltError(Exception):
    """An architecture of which no small instance could be made; the message says why."""


@dataclass
class Instance:
    """One model, ready to train.

    Attributes:
        model: on the CPU, in float32, in training mode.
        inputs: makes a batch of its forward's keyword arguments from the global random state.
        blocks: the modules that `fully_shard` is called on before the model.
    """

    model: nn.Module
    inputs: Callable[[], Inputs]
    blocks: list[nn.Module]

    def loss(self, batch: Inputs) -> Tensor:
        """What the model calls its loss, or the mean square of all that it returns."""
        output = self.model(**batch)
        loss = getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad:
            return loss.mean()
        found = [t.float().square().mean() for t in _tensors(output) if t.requires_grad]
        if not found:
            raise NotBuiltError("the forward returns nothing that has a gradient")
        return torch.stack(found).mean()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


def repeated(model: nn.Module) -> list[nn.Module]:
    """The members of lists of modules that have two or more of one class; outermost lists only."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            kinds = [type(each) for each in child.children()]
            if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(kinds) > len(set(kinds)):
                found.extend(
                    each for each in child.children() if any(True for _ in each.parameters())
                )
            else:
                visit(child)

    visit(model)
    return list(dict.fromkeys(found))
