"""The walk over modules: those below some, each once, by one of three orders."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

from torch import nn

Order = Literal["parents first", "children first", "by depth"]
"""Depth-first, a module before or after those below it; or breadth-first."""


def walk(
    roots: Iterable[nn.Module],
    leaves_out: Callable[[nn.Module], bool] | None = None,
    order: Order = "parents first",
) -> list[tuple[nn.Module, str]]:
    """Modules at and below ``roots``, each once, with the prefix of their parameters' names.

    Args:
        roots: where to begin.
        leaves_out: whether to exclude a module below, and modules that are only below it. ``None``
            (default): no.
        order: see `Order`. Children come in the order in which they are registered.
    """
    # A list and no generator: `fully_shard` walks several times over all modules that it is called
    # on, and a generator is entered once for each of them.
    found: dict[nn.Module, str] = {}
    if order == "children first":
        seen: set[nn.Module] = set()
        for root in roots:
            _children_first(root, "", leaves_out, seen, found)
        return list(found.items())
    waiting = deque([(root, "", True) for root in roots])
    while waiting:
        module, prefix, is_root = waiting.popleft()
        if module in found or not (is_root or leaves_out is None or not leaves_out(module)):
            continue
        found[module] = prefix
        below = module._modules.items()
        if order == "by depth":
            waiting.extend([(m, f"{prefix}{name}.", False) for name, m in below if m is not None])
            continue
        for name, child in reversed(below):
            if child is not None:
                waiting.appendleft((child, f"{prefix}{name}.", False))
    return list(found.items())


def _children_first(
    module: nn.Module,
    prefix: str,
    leaves_out: Callable[[nn.Module], bool] | None,
    seen: set[nn.Module],
    found: dict[nn.Module, str],
) -> None:
    # No function inside another: one that calls itself is a cycle, here around all modules.
    if module in seen:
        return
    seen.add(module)
    for name, child in module.named_children():
        if leaves_out is None or not leaves_out(child):
            _children_first(child, f"{prefix}{name}.", leaves_out, seen, found)
    found[module] = prefix
