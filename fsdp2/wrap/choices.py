"""The selection of a policy in a model, and how to wrap it.

    a function   called top-down to select modules to descend into, bottom-up to select units;
                 elements of selected modules do not count for the enclosing ones
    an object    returns its whole selection at once
    classes      as ModuleWrapPolicy

The selection never contains the model itself: the caller wraps it last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from fsdp2.core.errors import coded
from fsdp2.wrap.policies import ModuleWrapPolicy, Options, WrapFunction, WrapPolicy

Policy = WrapPolicy | WrapFunction | Iterable[type[nn.Module]]
"""A rule that selects the modules that become units."""

Wrapper = Callable[..., nn.Module]
"""A class or function that takes a module and options, and returns its replacement."""


@dataclass(frozen=True)
class Choice:
    """A module that a policy selected.

    Attributes:
        name: its name below the model, the first one if it has several.
        module: the module.
        options: the options to wrap it with: those of the model, overridden by its own.
    """

    name: str
    module: nn.Module
    options: Mapping[str, Any]


def chosen_modules(
    model: nn.Module,
    policy: Policy | None,
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    options: Mapping[str, object] | None = None,
) -> list[Choice]:
    """Return the modules of a model that a policy selects, children before parents.

    Args:
        model: the model, which is not wrapped yet. The result never contains it.
        policy: `ModuleWrapPolicy`, `CustomPolicy`, a function such as
            `size_based_auto_wrap_policy`, one of torch's, classes of modules, or ``None`` for
            nothing.
        ignored_modules: modules that are not selected. Functions are not called for modules below
            them either.
        ignored_params: parameters that a function's ``nonwrapped_numel`` excludes.
        options: those of the model, which selected modules inherit. Default: none.

    Returns:
        A `Choice` for each, in the order in which to wrap them.

    Raises:
        TypeError: ``policy`` is none of these.

    Example::

        for choice in chosen_modules(model, ModuleWrapPolicy({Block}), options={"mesh": mesh}):
            fully_shard(choice.module, **choice.options)
        fully_shard(model, mesh=mesh)
    """
    checked = _checked(policy)
    if checked is None:
        return []
    ignored, root_options = set(ignored_modules), dict(options or {})
    run = getattr(checked, "_run_policy", None)
    if run is not None:
        found = run(model, ignored, root_options)
    else:
        asked = _Asked(_by_keyword(checked), ignored, set(ignored_params))
        asked.ask_below(model, asked.numel(model))
        found = {module: dict(root_options) for module in asked.chosen}
    return [
        Choice(prefix.removesuffix("."), module, found[module])
        for module, prefix in children_first(model)
        if module in found and module is not model
    ]


def children_first(
    module: nn.Module, prefix: str = "", seen: set[nn.Module] | None = None
) -> list[tuple[nn.Module, str]]:
    """Modules at and below ``module``, each once, before those around it, and their prefixes."""
    seen = set() if seen is None else seen
    if module in seen:
        return []
    seen.add(module)
    below = module.named_children()
    found = [each for name, m in below for each in children_first(m, f"{prefix}{name}.", seen)]
    return [*found, (module, prefix)]


def options_for(
    module: nn.Module,
    policy: Policy | None,
    *,
    numel: int | None = None,
    options: Mapping[str, object] | None = None,
) -> Options | None:
    """The options to wrap one module with; ``None`` if a policy does not select it."""
    checked, root_options = _checked(policy), dict(options or {})
    if checked is None:
        return None
    run = getattr(checked, "_run_policy", None)
    if run is not None:
        found: dict[nn.Module, Options] = run(
            module, set(module.modules()) - {module}, root_options
        )
        return found.get(module)
    left = numel_of(module.parameters()) if numel is None else numel
    return root_options if _by_keyword(checked)(module, False, left) else None


def wrap_chosen(model: nn.Module, choices: Iterable[Choice], wrapper: Wrapper) -> None:
    """Replace chosen modules of a model by their wrappers, wherever they are registered."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, key))
    for choice in choices:
        wrapped = wrapper(choice.module, **choice.options)
        if wrapped is not choice.module:
            for parent, key in places[choice.module]:
                setattr(parent, key, wrapped)


# ---- asking


class _Asked:
    """A function's choices, one module after the other.

    A module with several parents is asked about once.
    """

    def __init__(
        self,
        policy: Callable[[nn.Module, bool, int], bool],
        ignored: set[nn.Module],
        ignored_params: set[nn.Parameter],
    ) -> None:
        self._policy = policy
        self._ignored = ignored
        self._ignored_params = ignored_params
        self._wrapped: dict[nn.Module, int] = {}
        self.chosen: dict[nn.Module, None] = {}

    def numel(self, module: nn.Module) -> int:
        """Elements of its parameters that are not ignored."""
        return numel_of(p for p in module.parameters() if p not in self._ignored_params)

    def ask(self, module: nn.Module) -> int:
        """Ask about a module and those below; returns how many of its elements units have."""
        if module not in self._wrapped:
            numel = self.numel(module)
            below = self.ask_below(module, numel)
            if below is not None and self._policy(module, False, numel - below):
                self.chosen[module] = None
                below = numel
            self._wrapped[module] = below or 0
        return self._wrapped[module]

    def ask_below(self, module: nn.Module, numel: int) -> int | None:
        """Ask about the modules below one; ``None`` where the function does not want to."""
        if not self._policy(module, True, numel):
            return None
        children = (child for child in module.children() if child not in self._ignored)
        return sum(self.ask(child) for child in children)


def numel_of(params: Iterable[nn.Parameter]) -> int:
    """Elements of parameters; those of lazy modules, which have no shape yet, have none."""
    return sum(p.numel() for p in params if not isinstance(p, UninitializedParameter))


def _by_keyword(policy: Any) -> Callable[[nn.Module, bool, int], bool]:
    """A function called by keywords, as torch does; XLA's call the third ``unwrapped_params``."""
    try:
        known = set(inspect.signature(policy).parameters)
    except (TypeError, ValueError):
        known = set()
    count = "unwrapped_params" if "unwrapped_params" in known else "nonwrapped_numel"
    return lambda module, recurse, numel: bool(
        policy(module=module, recurse=recurse, **{count: numel})
    )


def check_policy(policy: object) -> None:
    """Raise an error if it is not a policy."""
    _checked(policy)


def _checked(policy: object) -> WrapPolicy | WrapFunction | None:
    kind = isinstance(policy, type | str | nn.Module)
    if policy is None or (not kind and (hasattr(policy, "_run_policy") or callable(policy))):
        return policy
    if not kind and isinstance(policy, Iterable):
        return ModuleWrapPolicy(policy)
    raise coded(
        TypeError,
        "wrap-policy",
        f"a wrap policy is a ModuleWrapPolicy, a CustomPolicy, a function of (module, recurse, "
        f"nonwrapped_numel), or classes of modules, not {policy!r}; pass for example [Block]",
    )
