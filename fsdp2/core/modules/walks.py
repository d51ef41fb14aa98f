"""The walk over modules, and which of them belong to a unit.

walk              modules below some, each once, by one of three orders
managed_modules   those that no other unit has
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import Literal

from torch import nn

from fsdp2.core.modules.registry import record_of

Order = Literal["parents first", "children first", "by depth"]
"""Depth-first, a module before or after those below it; or breadth-first."""


def walk(
    roots: Iterable[nn.Module],
    leaves_out: Callable[[nn.Module], bool] | None = None,
    order: Order = "parents first",
) -> Iterator[tuple[nn.Module, str]]:
    """Modules at and below ``roots``, each once, with the prefix of their parameters' names.

    Args:
        roots: where to begin.
        leaves_out: whether to exclude a module below, and modules that are only below it. ``None``
            (default): no.
        order: see `Order`. Children come in the order in which they are registered.
    """
    seen: set[nn.Module] = set()
    if order == "by depth":
        yield from _by_depth(roots, leaves_out, seen)
        return
    for root in roots:
        if order == "children first":
            yield from _children_first(root, "", leaves_out, seen)
        else:
            yield from _parents_first(root, leaves_out, seen)


def _parents_first(
    root: nn.Module, leaves_out: Callable[[nn.Module], bool] | None, seen: set[nn.Module]
) -> Iterator[tuple[nn.Module, str]]:
    # One generator: `fully_shard` walks several times over all modules that it is called on.
    waiting = [(root, "")]
    while waiting:
        module, prefix = waiting.pop()
        if module in seen or (module is not root and leaves_out is not None and leaves_out(module)):
            continue
        seen.add(module)
        yield module, prefix
        for name, child in reversed(module._modules.items()):
            if child is not None:
                waiting.append((child, f"{prefix}{name}."))


def _children_first(
    module: nn.Module,
    prefix: str,
    leaves_out: Callable[[nn.Module], bool] | None,
    seen: set[nn.Module],
) -> Iterator[tuple[nn.Module, str]]:
    # No function inside another: one that calls itself is a cycle, here around all modules.
    if module in seen:
        return
    seen.add(module)
    for name, child in module.named_children():
        if leaves_out is None or not leaves_out(child):
            yield from _children_first(child, f"{prefix}{name}.", leaves_out, seen)
    yield module, prefix


def _by_depth(
    roots: Iterable[nn.Module],
    leaves_out: Callable[[nn.Module], bool] | None,
    seen: set[nn.Module],
) -> Iterator[tuple[nn.Module, str]]:
    queue = [(root, "") for root in dict.fromkeys(roots)]
    seen.update(module for module, _ in queue)
    for module, prefix in queue:  # which grows
        yield module, prefix
        for name, child in module.named_children():
            if child not in seen and not (leaves_out is not None and leaves_out(child)):
                seen.add(child)
                queue.append((child, f"{prefix}{name}."))


def managed_modules(
    modules: tuple[nn.Module, ...],
    into_units: bool = False,
    pending: Set[nn.Module] = frozenset(),
) -> Iterator[tuple[nn.Module, str]]:
    """Modules at and below ``modules`` that no other unit has, parents first.

    Args:
        modules: where to begin.
        into_units: whether those of other units are among them.
        pending: those that are to be units, and are left out in any case.
    """
    others = pending - set(modules)
    return walk(modules, lambda m: m in others or not (into_units or record_of(m) is None))
