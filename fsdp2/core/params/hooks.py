"""Hooks that users register on sharded parameters, and how a reduction learns of them.

    weight.register_hook(f)                          f(gradient) may return another gradient
    weight.register_post_accumulate_grad_hook(f)     f(weight), when .grad is there

Autograd never comes to a sharded parameter: the reduction that delivers its gradient runs the
hooks, on the reduced gradient of this rank's rows. It would have to look at two attributes of each
parameter in each step. So the dicts that torch keeps the hooks in count what is put into them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor

from fsdp2.core.errors import coded

Hook = Callable[[Any], Any]


class CountedHooks(OrderedDict[int, Hook]):
    """The hooks of one kind on one sharded parameter.

    Attributes:
        count: how many hooks were registered in this process so far.
    """

    __slots__ = ()

    count: ClassVar[int] = 0

    def __setitem__(self, key: int, hook: Hook) -> None:
        CountedHooks.count += 1
        super().__setitem__(key, hook)


def count_hooks(param: torch.Tensor) -> None:
    """From now on, hooks that are registered on ``param`` are counted.

    Dicts that are there stay the objects that they are: handles of users refer to them.
    """
    if param._backward_hooks is None:
        param._backward_hooks = CountedHooks()
    if param._post_accumulate_grad_hooks is None:
        param._post_accumulate_grad_hooks = CountedHooks()
    CountedHooks.count += 1  # whoever has looked at another parameter in its place looks again


def may_have_hooks(param: torch.Tensor) -> tuple[bool, bool]:
    """Whether ``param`` has hooks on its gradient, and post-accumulate-grad hooks.

    So it may where the dict of such hooks is one that does not count.
    """
    edits, watches = param._backward_hooks, param._post_accumulate_grad_hooks
    return (
        bool(edits) or type(edits) is not CountedHooks,
        bool(watches) or type(watches) is not CountedHooks,
    )


def run_tensor_hooks(param: torch.Tensor, gradient: DTensor, name: str) -> DTensor:
    """Run the hooks of ``register_hook`` on a reduced gradient.

    Args:
        param: the sharded parameter.
        gradient: of the parameter's shape and placements.
        name: the parameter's, for messages.

    Returns:
        The result of the last hook that returned one, otherwise ``gradient``.

    Raises:
        TypeError: a hook returned something other than a gradient of the parameter.
    """
    hooks: Any = param._backward_hooks
    for hook in tuple(hooks.values()) if hooks else ():
        result = hook(gradient)
        if result is None:
            continue
        fits = isinstance(result, DTensor) and result.shape == gradient.shape
        if not fits or result.dtype != gradient.dtype:
            raise coded(
                TypeError,
                "gradient-hook-result",
                f"a hook on the gradient of parameter '{name}' must return None or a DTensor of "
                f"shape {tuple(gradient.shape)} and {gradient.dtype}, not {_described(result)}",
            )
        if result.placements != gradient.placements:
            result = result.redistribute(placements=gradient.placements)
        gradient = result.detach()
    return gradient


def _described(result: object) -> str:
    if isinstance(result, torch.Tensor):
        return f"a {type(result).__name__} of shape {tuple(result.shape)} and {result.dtype}"
    return f"a {type(result).__name__}"
