"""The contents of a model and an optimizer, by name, read without any change.

    module ── _parameters ──> unsharded, during a forward   a state dict reshards them in between
    group  ── params ──────> sharded, at any time           ─> used here

Nothing communicates, runs hooks or registers anything, so that another thread may read while a
forward computes. If a module writes its own state dict (hooks, ``_save_to_state_dict``), it is
called.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp2.core.errors import checkpoint_error
from fsdp2.core.facts import clean, local_of, records_below, wrap_local

Nested = dict[str, Any]
"""A state dict: tensors and the user's values."""

_KNOWN_HOOKS = ("fsdp2.", "torch.distributed.algorithms._checkpoint.")
"""Owners of state dict hooks that add nothing to what this module does."""


@dataclass(frozen=True)
class Snapshot:
    """Views of the contents of a model and an optimizer. Tensors are not copies: do not write to
    them.

    Attributes:
        model: parameters and persistent buffers by name; a sharded parameter is a DTensor.
        buffers: non-persistent buffers.
        optimizer: ``"state"`` by name of the parameter and key, and ``"param_groups"`` with names
            instead of parameters; ``None`` without an optimizer.
        shards: by unit, the local shards of all its parameters as they are in memory: uint8 [n],
            including padding. A unit with several groups has further entries ``name#1`` and so on.
    """

    model: Mapping[str, Any]
    buffers: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any] | None
    shards: Mapping[str, torch.Tensor]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Snapshot:
    """Return views of the current shards and states, from any thread, at any time between two
    steps.

    It runs no collective and no hook, and changes nothing: an unsharded unit stays unsharded, and a
    forward running in another thread continues. A module or an optimizer that writes its own state
    dict is called, which is as safe as its code.

    Args:
        model: sharded or not.
        optimizer: over parameters of ``model``. Default ``None``.

    Raises:
        CheckpointError: a parameter of ``optimizer`` is not in ``model``.

    Example::

        >>> fsdp2.checkpoint.snapshot(model).model["blocks.0.weight"].to_local().norm()
    """
    with torch.inference_mode(False), torch.no_grad():
        params = dict(named_parameters(model))
        return Snapshot(
            MappingProxyType(_model_state(model, params)),
            MappingProxyType({name: value.detach() for name, value in _buffers(model, False)}),
            None if optimizer is None else MappingProxyType(optimizer_state([optimizer], params)),
            MappingProxyType(dict(_flat_shards(model))),
        )


def whole_state(model: nn.Module) -> Nested:
    """As ``get_model_state_dict``, also of a quantized weight with entries below its name."""
    try:
        return dict(get_model_state_dict(model))
    except AttributeError:
        return {clean(name): value for name, value in model.state_dict().items()}


def above(name: str, params: Container[str]) -> str:
    """The parameter that an entry is, or below whose name a module has written it; or ""."""
    while name and name not in params:
        name = name.rpartition(".")[0]
    return name


def named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, parameter) of all, sharded wherever a unit has it; a tied one under each name."""
    sharded = {  # by the place that a unit manages, whatever is registered there
        (id(module), name): param.sharded
        for record in records_below(model)
        for group in record.unit.own_groups
        for param in group.params
        for module, name in param.entries
    }
    for prefix, module in _modules(model):
        for name, param in module._parameters.items():
            if param is not None:
                yield prefix + name, sharded.get((id(module), name), param)


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of all: persistent ones, then the others."""
    for persistent in (True, False):
        yield from _buffers(model, persistent)


def extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of each module that has an extra state."""
    for prefix, module in _modules(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}_extra_state", module


# ---- the model


def _modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Each module with the prefix of its parameters' names; a shared one under each."""
    yield prefix, module
    is_wrapper = isinstance(module, nn.parallel.DistributedDataParallel)
    for name, child in module._modules.items():
        if child is not None:
            left_out = not clean(f"{name}.") or (is_wrapper and name == "module")
            yield from _modules(child, prefix if left_out else f"{prefix}{name}.")


def _buffers(model: nn.Module, persistent: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in _modules(model):
        for name, value in module._buffers.items():
            if value is not None and (name in module._non_persistent_buffers_set) != persistent:
                yield prefix + name, value


def _model_state(model: nn.Module, params: Mapping[str, torch.Tensor]) -> Nested:
    if any(_writes_itself(module) for module in model.modules()):
        return whole_state(model)
    state: Nested = {name: _view(param) for name, param in params.items()}
    state.update((name, value.detach()) for name, value in _buffers(model, True))
    state.update((name, module.get_extra_state()) for name, module in extra_states(model))
    return state


def _view(param: torch.Tensor) -> torch.Tensor:
    """As ``param.detach()``, which asks a DTensor's dispatcher."""
    if isinstance(param, DTensor):
        return wrap_local(local_of(param).detach(), param._spec)
    return param.detach()


def _writes_itself(module: nn.Module) -> bool:
    """Whether its state dict is more than its parameters, buffers and extra state."""
    return (
        type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
        or (
            type(module).state_dict is not nn.Module.state_dict
            and not type(module).__module__.startswith("torch.")
        )
        or any(
            not str(getattr(hook, "__module__", "")).startswith(_KNOWN_HOOKS)
            for hook in module._state_dict_hooks.values()
        )
    )


def _flat_shards(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for record in records_below(model):
        for place, group in enumerate(record.unit.own_groups):
            name = f"{group.name}#{place}" if place else group.name
            yield name, group.shard.view(torch.uint8, 0, (group.shard.nbytes,))


# ---- the optimizer


def optimizer_state(
    optimizers: Sequence[torch.optim.Optimizer], params: Mapping[str, torch.Tensor]
) -> Nested:
    """``"state"`` and ``"param_groups"`` of all, by name; of attributes, which runs no hook."""
    names: dict[int, str] = {}
    for name, param in params.items():
        names.setdefault(id(param), name)
    found: Nested = {"state": {}, "param_groups": []}
    seen: set[str] = set()
    for optimizer in optimizers:
        state = _state_of_one(optimizer, names)
        own = {name for group in state["param_groups"] for name in group["params"]}
        if own & seen:
            raise checkpoint_error(
                "ckpt-two-optimizers",
                f"two optimizers have parameter '{min(own & seen)}', so their states would have "
                f"one name; give it to one of them, or save them in two folders",
            )
        seen |= own
        found["state"].update(state["state"])
        found["param_groups"] += state["param_groups"]
    return found


def names_in(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    """Names of an optimizer's parameters in the order of their numbers, by their ``id``."""
    return [name_of(param, names) for group in optimizer.param_groups for param in group["params"]]


def _state_of_one(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Nested:
    hooks = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
    if hooks or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        return renamed(optimizer.state_dict(), names_in(optimizer, names))
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [name_of(param, names) for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {name_of(param, names): dict(kept) for param, kept in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def name_of(param: torch.Tensor, names: Mapping[int, str]) -> str:
    """The name of a parameter of an optimizer's."""
    if id(param) not in names:
        raise checkpoint_error(
            "ckpt-foreign-parameter",
            f"the optimizer has a parameter of shape {tuple(getattr(param, 'shape', ()))} that "
            f"the model does not have now; create the optimizer with model.parameters(), or call "
            f"model.reshard() first",
        )
    return names[id(param)]


def renamed(plain: Nested, names: Mapping[Any, str] | Sequence[str]) -> Nested:
    """An optimizer's state dict, with ``names`` in the place of numbers."""
    groups = [
        {key: value for key, value in group.items() if key != "param_names"}
        | {"params": [names[place] for place in group["params"]]}
        for group in plain["param_groups"]
    ]
    state = {names[place]: dict(kept) for place, kept in plain["state"].items()}
    return {"state": state, "param_groups": groups}
