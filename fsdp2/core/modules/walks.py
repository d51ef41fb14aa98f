"""Walks over modules: which belong to a unit, and which to others.

managed_modules   those below some modules that no other unit has
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from torch import nn

from fsdp2.core.modules.registry import record_of


def managed_modules(
    modules: tuple[nn.Module, ...],
    into_units: bool = False,
    pending: Set[nn.Module] = frozenset(),
) -> Iterator[tuple[nn.Module, str]]:
    """Modules below ``modules`` that no other unit has, parents first, with name prefixes.

    Args:
        modules: where to begin.
        into_units: whether those of other units are among them.
        pending: those that are to be units, and are left out in any case.
    """
    seen: set[nn.Module] = set(pending) - set(modules)
    for module in modules:
        yield from _walk(module, "", into_units, seen)


def _walk(
    module: nn.Module, prefix: str, into_units: bool, seen: set[nn.Module]
) -> Iterator[tuple[nn.Module, str]]:
    # No function inside another: one that calls itself is a cycle, here around all modules.
    if module in seen:
        return
    seen.add(module)
    yield module, prefix
    for name, child in module.named_children():
        if into_units or record_of(child) is None:
            yield from _walk(child, f"{prefix}{name}.", into_units, seen)
