"""Rules that select the modules that become units.

    objects      ModuleWrapPolicy, CustomPolicy        see all modules of a model at once
    functions    size_based_auto_wrap_policy, …        are called twice for each module:
                   recurse=True    descend into the module?
                   recurse=False   make it a unit, given the number of its remaining elements?

Functions with further arguments get them with ``functools.partial``. Names, arguments and
selections match ``torch.distributed.fsdp.wrap``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import nn

from fsdp2.core.errors import coded

Options = dict[str, object]
"""The options of a wrapper call, besides the module."""


WrapFunction = Callable[..., bool]
"""A policy that is a function of ``module``, ``recurse`` and ``nonwrapped_numel``: whether to
descend into the module (``recurse``), or to make it a unit. It needs no further arguments."""


class WrapPolicy(Protocol):
    """A policy that is an object: fsdp2's, or one of torch's."""

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Options
    ) -> dict[nn.Module, Options]:
        """The chosen modules, the model itself perhaps among them, with options for each."""


class ModuleWrapPolicy:
    """Makes every module of the given classes a unit, with the options of the whole model.

    Args:
        module_classes: classes of modules; instances of subclasses count, too.

    Raises:
        TypeError: one of them is not a class of modules.

    Example::

        shard_model(model, ModuleWrapPolicy({TransformerBlock}))
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(module_classes)
        for found in self._module_classes:
            if not (isinstance(found, type) and issubclass(found, nn.Module)):
                raise coded(
                    TypeError,
                    "wrap-classes",
                    f"ModuleWrapPolicy takes classes of modules, but one is {found!r}; pass for "
                    f"example [TransformerBlock]",
                )

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Options
    ) -> dict[nn.Module, Options]:
        classes = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *_: object, **__: object) -> bool:
        """As a function: the same selection, for code that asks module by module."""
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        names = ", ".join(sorted(found.__name__ for found in self._module_classes))
        return f"ModuleWrapPolicy({{{names}}})"


class CustomPolicy:
    """Selects units with a function, which may also set options for each module.

    Args:
        lambda_fn: called with each module that is not ignored, including the model itself.
            ``False`` or an empty dict: not a unit. ``True``: a unit with the options of the whole
            model. A dict: a unit with these options in addition to the model's, which they
            override.

    Example::

        def choose(module):
            if isinstance(module, TransformerBlock):
                return True
            return {"reshard_after_forward": False} if module is model.head else False

        shard_model(model, CustomPolicy(choose))
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Options]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Options
    ) -> dict[nn.Module, Options]:
        chosen = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer: object = self._lambda_fn(module)
            if not isinstance(answer, bool | Mapping):
                raise coded(
                    ValueError,
                    "wrap-answer",
                    f"the function of CustomPolicy returned {answer!r} for '{name or '(root)'}'; "
                    f"return True, False, or a dict of options",
                )
            if answer:
                own = answer if isinstance(answer, Mapping) else {}
                chosen[module] = {**root_kwargs, **own}
        return chosen

    def __repr__(self) -> str:
        return f"CustomPolicy({getattr(self._lambda_fn, '__qualname__', self._lambda_fn)})"


# ---- functions


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """Makes every module a unit: small units, many collectives. Arguments are ignored."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Makes every module for which ``lambda_fn`` returns true a unit.

    Args:
        module: the module in question.
        recurse: whether the question is to descend into ``module``; the answer is always yes.
        nonwrapped_numel: elements of ``module`` that no unit has yet; not used.
        lambda_fn: returns whether a module becomes a unit.

    Example::

        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: m in chosen)
    """
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Makes every module of the given classes a unit; the rest of the model belongs to the root.

    Args:
        module: the module in question.
        recurse: whether the question is to descend into ``module``; the answer is always yes.
        nonwrapped_numel: elements of ``module`` that no unit has yet; not used.
        transformer_layer_cls: classes of modules.

    Example::

        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


class _SizeBased:
    """`size_based_auto_wrap_policy`: a function with two settings that users may change."""

    FORCE_LEAF_MODULES: set[type[nn.Module]]
    EXCLUDE_WRAP_MODULES: set[type[nn.Module]]

    def __init__(self) -> None:
        self.FORCE_LEAF_MODULES = {nn.MultiheadAttention}
        self.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}
        self.__name__ = self.__qualname__ = "size_based_auto_wrap_policy"

    def __call__(
        self,
        module: nn.Module,
        recurse: bool,
        nonwrapped_numel: int,
        min_num_params: int = int(1e8),
        force_leaf_modules: set[type[nn.Module]] | None = None,
        exclude_wrap_modules: set[type[nn.Module]] | None = None,
    ) -> bool:
        """Selects a module with at least ``min_num_params`` elements outside the units below it."""
        if nonwrapped_numel < min_num_params:
            return False
        leaves, excluded = force_leaf_modules, exclude_wrap_modules
        if recurse:
            return not isinstance(
                module, tuple(self.FORCE_LEAF_MODULES if leaves is None else leaves)
            )
        excluded = self.EXCLUDE_WRAP_MODULES if excluded is None else excluded
        return not isinstance(module, tuple(excluded))

    def __repr__(self) -> str:
        return "size_based_auto_wrap_policy"


size_based_auto_wrap_policy = _SizeBased()


def any_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[WrapFunction]
) -> bool:
    """Selects what any of several functions selects; torch calls it ``_or_policy``.

    Args:
        module: the module in question.
        recurse: whether the question is to descend into ``module``.
        nonwrapped_numel: elements of ``module`` that no unit has yet.
        policies: functions, and `ModuleWrapPolicy`.

    Example::

        policy = functools.partial(any_wrap_policy, policies=[by_class, by_size])
    """
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )
