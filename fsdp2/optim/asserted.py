"""Checks of a class that a user passes to `FlatOptimizer` with ``elementwise=True``.

    class    a class of torch that is known to need whole parameters      refused at creation
    options  an option that the class turns into a tensor of its own      refused at creation
    state    anything but numbers and tensors with an entry per element   refused by the first step

In state dicts, state belongs to parameters. Scales of blocks, codes in a tensor subclass and dicts
belong to a run as a whole: a state dict would give each parameter those of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from fsdp2.core.errors import coded

WHOLE = (
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    torch.optim.Muon,
    torch.optim.SparseAdam,
)
"""Optimizers of torch that need several elements at a time, or gradients that are not dense."""

MakeInner = Callable[..., torch.optim.Optimizer]


def watched(make_inner: MakeInner) -> MakeInner:
    """Let each new optimizer raise for state that is not per element.

    Args:
        make_inner: makes an optimizer of parameters or groups.
    """

    def make(params: object) -> torch.optim.Optimizer:
        inner = make_inner(params)
        inner.register_step_post_hook(_check_states)
        return inner

    return make


def refuse_whole(optimizer_class: object) -> None:
    """Raise for classes of torch that need whole parameters, even with ``elementwise=True``."""
    if optimizer_class in WHOLE:
        name = cast("type[torch.optim.Optimizer]", optimizer_class).__name__
        raise coded(
            TypeError,
            "flat-whole",
            f"{name} needs whole parameters, so FlatOptimizer cannot step several as one tensor, "
            f"even with elementwise=True; pass model.parameters() to the class, or use "
            f"fsdp2.optim.Muon for Muon",
        )


def check_options(inner: torch.optim.Optimizer) -> None:
    """Raise if a class stores an option of its groups as another object than the argument."""
    (group,) = inner.param_groups
    for name, given in inner.defaults.items():
        if isinstance(group.get(name), torch.Tensor) and not isinstance(given, torch.Tensor):
            raise coded(
                TypeError,
                "flat-option",
                f"{type(inner).__name__} stores its option {name!r} as a tensor, which "
                f"FlatOptimizer does not support; pass model.parameters() to the class",
            )


def _check_states(inner: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for param, state in inner.state.items():
        for key, value in state.items():
            if not _is_by_element(value, param):
                raise coded(
                    TypeError,
                    "flat-state",
                    f"{type(inner).__name__} keeps {_shown(value)} as state {key!r} of a tensor "
                    f"{tuple(param.shape)}, which is not one value per element, so FlatOptimizer "
                    f"cannot divide it between parameters; pass model.parameters() to the class",
                )


def _is_by_element(value: object, param: torch.Tensor) -> bool:
    """Whether it is a number, or one per element; ``None`` and strings count as numbers."""
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        return plain and (value.shape == param.shape or value.numel() == 1)
    return value is None or isinstance(value, bool | int | float | complex | str)


def _shown(value: object) -> str:
    name = type(value).__name__
    return f"a {name} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {name}"
