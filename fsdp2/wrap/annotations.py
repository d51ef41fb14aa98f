"""Modules that a model's own code marks as units.

with enable_wrap(wrapper_cls=…, **options):    wrap(module) ──> wrapper_cls(module, **options)
outside of it                                  wrap(module) ──> module
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from torch import nn

from fsdp2.core.errors import coded

Wrapper = Callable[..., nn.Module]
"""A class or function: takes a module and options, returns the module to use in its place."""

_enabled: ContextVar[tuple[Wrapper, dict[str, object]] | None] = ContextVar("enabled", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Wrapper, **wrapper_kwargs: object) -> Iterator[None]:
    """Enable `wrap` in this context.

    Args:
        wrapper_cls: the wrapper: a class, or `fully_shard`, which shards in place.
        **wrapper_kwargs: options for each call of it.

    Raises:
        NotImplementedError: the context is already active.
        TypeError: ``wrapper_cls`` cannot be called.

    Example::

        with enable_wrap(wrapper_cls=fully_shard, mesh=mesh):
            model = Model()  # whose __init__ says self.block = wrap(Block())
    """
    if not callable(wrapper_cls):
        raise coded(
            TypeError,
            "wrapper-class",
            f"enable_wrap(wrapper_cls=…) takes a class or a function of a module, not "
            f"{wrapper_cls!r}; pass for example fully_shard",
        )
    if _enabled.get() is not None:
        raise coded(
            NotImplementedError,
            "wrap-nested",
            "enable_wrap was entered inside enable_wrap, so modules would have two wrappers; "
            "leave the outer one first",
        )
    token = _enabled.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enabled.reset(token)


def wrap(module: nn.Module, **wrap_overrides: object) -> nn.Module:
    """Wrap a module inside `enable_wrap`; outside it, return the module unchanged.

    Args:
        module: the module.
        **wrap_overrides: options that override those of `enable_wrap`.

    Returns:
        The result of ``wrapper_cls``, or ``module``.

    Example::

        self.block = wrap(Block(dim), reshard_after_forward=False)
    """
    enabled = _enabled.get()
    if enabled is None:
        return module
    wrapper, options = enabled
    own = getattr(module, "_wrap_overrides", {})  # torch's way to let a module choose its own
    return wrapper(module, **{**options, **wrap_overrides, **own})
