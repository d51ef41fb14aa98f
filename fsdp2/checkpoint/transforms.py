"""Tensors of a model that `load` makes of a step's: transposed, padded, joined, cut.

    step   q [4, 4] ┐
           k [4, 4] ├─ whole, on the CPU ─> function ─> qkv [12, 4] ─> this rank's rows
           v [4, 4] ┘

Names say which tensors of the step, functions what to make of them. All is made before anything of
the model is written, so that a wrong shape changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fsdp2.checkpoint.optimizers import Names
from fsdp2.checkpoint.state import held_of
from fsdp2.core.errors import checkpoint_error

Sources: TypeAlias = Callable[[str], str | Sequence[str] | None]
"""The model's name of a tensor to the step's, or to several; ``None`` leaves it out."""

Transform: TypeAlias = Callable[..., Tensor]
"""Makes a whole tensor of the step's whole tensors, in the order of their names."""


class Transforms:
    """Functions by names, or patterns of names, of the model's tensors."""

    def __init__(self, given: Mapping[str, Transform], names: Sources) -> None:
        self._given = given
        self._names = names

    def check(self, names: Iterable[str]) -> None:
        """Raise unless each pattern fits one of the model's names."""
        known = list(names)
        for pattern in self._given:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise checkpoint_error(
                    "ckpt-transform-unused",
                    f"transforms= has '{pattern}', which matches no tensor of the model; pass "
                    f"names of its state dict, or patterns",
                )

    def sources(self, name: str) -> tuple[str, ...]:
        """The step's names of what a tensor is made of; none: it is left out."""
        found = self._names(name)
        if found is None:
            return ()
        return (found,) if isinstance(found, str) else tuple(found)

    def of(self, name: str) -> Transform | None:
        """The function for a tensor of the model; ``None`` where it is read as it is."""
        for pattern, function in self._given.items():
            if fnmatchcase(name, pattern):
                return function
        sources = self.sources(name)
        if len(sources) > 1:
            raise checkpoint_error(
                "ckpt-transform-several",
                f"names= maps several tensors of the step to '{name}', {list(sources)}; pass "
                f"transforms= with a function that combines them",
            )
        return None

    def plain(self) -> Names:
        """The step's name of what is read as it is, for states of optimizers; else ``None``."""

        def name_of(name: str) -> str | None:
            sources = self.sources(name)
            return sources[0] if sources and self.of(name) is None else None

        return name_of


@torch.no_grad()
def rows_of(name: str, value: Tensor, function: Transform, sources: Sequence[Tensor]) -> Tensor:
    """This rank's rows of what a function makes, in new memory, of the dtype that it returned."""
    held = held_of(name, value.detach())
    shapes = [tuple(source.shape) for source in sources]
    try:
        made = function(*sources)
    except Exception as error:  # of the user's function
        raise checkpoint_error(
            "ckpt-transform-raised",
            f"transforms= of '{name}' raised {type(error).__name__} for tensors of shapes "
            f"{shapes} ({error}); correct the function",
        ) from error
    is_plain = type(made) in (Tensor, nn.Parameter)
    if not is_plain or tuple(made.shape) != held.shape:
        found = f"a tensor of shape {tuple(made.shape)}" if is_plain else f"a {type(made).__name__}"
        raise checkpoint_error(
            "ckpt-transform-shape",
            f"transforms= of '{name}' returned {found} for tensors of shapes {shapes}, but the "
            f"model has one of shape {held.shape}; return a tensor of that shape",
        )
    rows = made.detach()
    for dim, (start, length) in enumerate(zip(held.offsets, held.local.shape, strict=True)):
        rows = rows.narrow(dim, start, length)
    return rows.clone()
