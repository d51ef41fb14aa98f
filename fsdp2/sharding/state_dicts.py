"""State dicts that hold shards at any time, and parameters that a load has replaced.

A save exchanges gathered parameters for the shards, without communication; what is registered after
a load is managed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.checks.explain import explain_loading
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.modules import registrations
from fsdp2.core.modules.registry import scheduler_of
from fsdp2.core.params.param import ModuleEntries, ShardedParam
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.unit import all_units, operations_of


def watch_state_dicts(owners: set[nn.Module], group: ParamGroup) -> None:
    """State dicts of modules hold a group's sharded parameters, without communication.

    Between steps those are registered first. During a forward or a backward nothing is: it goes on
    to use what is gathered, and what the state dict has taken of that is exchanged for the shards.
    """
    collected: list[list[str]] = []  # where the load under way collects its errors
    shown = _Shown(group)
    outside = _OutsideInference()

    def before() -> None:
        if not group.state.is_sharded:  # a look at the state is shorter than one at all units
            operations_of(group).reshard()
        group.settle()

    def before_save(*_: object) -> None:
        outside.enter()
        if not _is_in_use(group):
            before()

    def after_save(module: nn.Module, state: dict[str, object], prefix: str, _: object) -> None:
        shown.put_into(state, module, prefix)
        outside.leave()

    def before_load(*given: object) -> None:
        before()
        collected[:] = cast("list[list[str]]", list(given[-1:]))

    def after_load(module: nn.Module, _: object) -> None:
        group.reregister(module)
        explain_loading(collected.pop() if collected else [])

    for owner in owners:
        owner.register_state_dict_pre_hook(before_save)
        handle = owner.register_state_dict_post_hook(after_save)
        hooks = cast("OrderedDict[int, object]", owner._state_dict_hooks)
        hooks.move_to_end(handle.id, last=False)  # others may rename the keys
        owner.register_load_state_dict_pre_hook(before_load)
        owner.register_load_state_dict_post_hook(after_load)


class _OutsideInference(threading.local):
    """State dicts are taken, by each thread, outside inference mode: no views of DTensors in it."""

    def __init__(self) -> None:
        self._left: list[torch.inference_mode | None] = []

    def enter(self) -> None:
        mode = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if mode is not None:
            mode.__enter__()
        self._left.append(mode)

    def leave(self) -> None:
        mode = self._left.pop()
        if mode is not None:
            mode.__exit__(None, None, None)


def _is_in_use(group: ParamGroup) -> bool:
    """Whether a running forward or backward may read the unsharded parameters of a group."""
    if group.state.is_sharded and group.offload is None:
        return False
    for unit in all_units():
        if any(used.base is group for used in unit.groups):
            scheduler = scheduler_of(unit)
            if scheduler is None or scheduler.iteration.failed:
                continue
            if scheduler.is_running:
                return True
    return False


class _Shown:
    """The parameters of a group in state dicts: shards, whatever modules register."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = group
        self._known: list[ModuleEntries] = []
        self._places: dict[int, list[tuple[str, ShardedParam]]] = {}  # by id of the module

    def put_into(self, state: dict[str, object], module: nn.Module, prefix: str) -> None:
        """Replace unsharded parameters of ``module`` in the state dict by shards, by what each
        value is, not by the group's state: another thread may gather and free units meanwhile.
        """
        for name, param in self._places_of(module):
            value = state.get(prefix + name)
            if value is None or value is param.sharded:
                continue
            if value is param.unsharded or value is param.smaller:  # with keep_vars=True
                state[prefix + name] = param.sharded
            elif isinstance(value, torch.Tensor) and self._is_gathered(value, param, module, name):
                state[prefix + name] = param.sharded.detach()

    def _places_of(self, module: nn.Module) -> list[tuple[str, ShardedParam]]:
        entries = [param.entries for param in self._group.params]
        if entries != self._known:  # some were tied, or dropped
            places: dict[int, list[tuple[str, ShardedParam]]] = {}
            for param in self._group.params:
                for owner, name in param.entries:
                    places.setdefault(id(owner), []).append((name, param))
            self._places, self._known = places, entries
        return self._places.get(id(module), [])

    @staticmethod
    def _is_gathered(
        value: torch.Tensor, param: ShardedParam, module: nn.Module, name: str
    ) -> bool:
        """Whether it is of another form of a parameter than the sharded one, and not the user's."""
        if isinstance(value, DTensor):
            spec, own = value._spec, cast(DTensor, param.sharded)._spec
            if spec.mesh == own.mesh and spec.placements == own.placements:
                return False
        if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
            registered = module._parameters.get(name)
            return any(registered is form for form in param.forms())
        others = [form for form in param.forms() if form is not param.sharded]
        return any(_shares_memory(local_of(value), local_of(form)) for form in others)


def _shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if is_traceable_wrapper_subclass(tensor) or is_traceable_wrapper_subclass(other):
        return type(tensor) is type(other)
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


registrations.gained.add(watch_state_dicts)
