"""A step's optimizer states and options, found by parameter name: groups, ties and optimizers may
be others than they were.

    step       group 0 [a, b]   group 1 [c]        a: exp_avg …   c: exp_avg …
    optimizer  group 0 [c, a]   group 1 [new]      options where both agree; the rest is reported

torch's ``load_state_dict`` casts states to the parameter's dtype and loses strings; here they are
put in place as they were saved. An optimizer with a ``load_state_dict`` of its own is asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.reading import GROUPS, Step
from fsdp2.checkpoint.snapshots import Nested, named_parameters, names_in
from fsdp2.checkpoint.state import Differences, Names, class_of
from fsdp2.checkpoint.values import Packed, Value

_STATE = "optimizer.state"
_SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "min_momentum"}
"""Options that schedulers add to groups."""


@dataclass
class _Slot:
    """A part of a parameter's state."""

    key: str
    unit: str  # the step's name
    value: Any = None


@dataclass
class _Own:
    """A parameter of an optimizer."""

    optimizer: torch.optim.Optimizer
    number: int  # among the optimizer's parameters
    name: str
    theirs: str | None  # the step's name
    param: Tensor
    group: int  # its place among all groups
    state: Nested  # what the optimizer has of it
    slots: list[_Slot] = field(default_factory=list)  # what is loaded
    is_kept: bool = False  # left as it is


class OptimizerMatch:
    """Optimizers and a step, side by side."""

    def __init__(
        self,
        step: Step,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Names,
        cast: bool,
    ) -> None:
        self._step = step
        self._optimizers = optimizers
        self._cast = cast
        self._theirs = step.groups()
        self._place = {n: at for at, group in enumerate(self._theirs) for n in group["params"]}
        self._plain = [optimizer.state_dict() for optimizer in optimizers]
        self._groups: list[Nested] = [g for plain in self._plain for g in plain["param_groups"]]
        self._own = list(self._owned(model, names))
        self._options: list[Nested] = [{} for _ in self._groups]

    def _owned(self, model: nn.Module, names: Names) -> Iterator[_Own]:
        aliases: dict[int, list[str]] = {}
        for name, param in named_parameters(model):
            aliases.setdefault(id(param), []).append(name)
        first = {each: listed[0] for each, listed in aliases.items()}
        place = 0
        for optimizer, plain in zip(self._optimizers, self._plain, strict=True):
            called, number = names_in(optimizer, first), 0
            for group in optimizer.param_groups:
                for param in group["params"]:
                    asked = (names(alias) for alias in aliases[id(param)])
                    theirs = next((name for name in asked if name in self._place), None)
                    state = plain["state"].get(number, {})
                    yield _Own(optimizer, number, called[number], theirs, param, place, state)
                    number += 1
                place += 1

    # ---- comparing

    def compare(self, found: Differences) -> None:
        """Record the differences; change nothing. Reads values other than tensors."""
        self._compare_options(found)
        for own in self._own:
            self._compare_state(own, found)
        taken = {own.theirs for own in self._own}
        found.unexpected += [f"{_STATE}.{name}" for name in self._place if name not in taken]
        units = {
            slot.unit: self._step.states[str(own.theirs)][slot.key]
            for own in self._own
            for slot in own.slots
            if slot.unit not in self._step.abouts
        }
        values = self._step.values(units, {})
        for own in self._own:
            for slot in own.slots:
                slot.value = values.get(slot.unit)

    def _compare_options(self, found: Differences) -> None:
        """A group's values of each option in all saved groups of its parameters."""
        sources: list[dict[int, None]] = [{} for _ in self._groups]
        takers: list[dict[int, None]] = [{} for _ in self._theirs]
        for own in self._own:
            if own.theirs is not None:
                at = self._place[own.theirs]
                sources[own.group][at] = takers[at][own.group] = None
        apart = [self._apart([self._groups[place] for place in each]) for each in takers]
        for place, group in enumerate(self._groups):
            theirs = [self._theirs[at] for at in sources[place]]
            for key in {*group} - {"params", "param_names"} if theirs else ():
                name = f"{GROUPS}.{place}.{key}"
                saved = [each[key] for each in theirs if key in each]
                if len(saved) < len(theirs):
                    found.missing.append(name)
                elif not _alike(saved) or any(key in apart[at] for at in sources[place]):
                    found.conflicting.append(name)
                else:
                    is_tensor = isinstance(saved[0], Tensor) and isinstance(group[key], Tensor)
                    value = saved[0].to(group[key].device) if is_tensor else saved[0]
                    self._options[place][key] = value  # a learning rate may be a tensor
        for at, options in enumerate(self._theirs):
            known = {"params", *(key for place in takers[at] for key in self._groups[place])}
            extra = [key for key in options if takers[at] and key not in known]
            found.unexpected += [f"{GROUPS}.{at}.{key}" for key in extra]

    @staticmethod
    def _apart(groups: Sequence[Nested]) -> set[str]:
        """Options that are not the same in all."""
        keys = {key for group in groups for key in group} - {"params", "param_names"}
        return {key for key in keys if not _alike([group.get(key) for group in groups])}

    def _compare_state(self, own: _Own, found: Differences) -> None:
        """A state that only the step has is accepted, if it is from such an optimizer."""
        prefix = f"{_STATE}.{own.name}"
        if own.theirs is None:
            found.missing.append(prefix)
            own.is_kept = True
            return
        saved = self._step.states.get(own.theirs, {})
        about = self._step.abouts.get(f"model.{own.theirs}")
        reshaped = about is not None and about.shape != tuple(own.param.shape)
        if saved and not own.state and reshaped:  # nothing here says which state has its shape
            found.reshaped.append(prefix)
            own.is_kept = True
            return
        if saved and not own.state and not self._is_of(own):
            found.unexpected += [f"{_STATE}.{own.theirs}.{key}" for key in saved]
            own.is_kept = True
            return
        for key, value in own.state.items() if saved else ():
            if key not in saved:
                found.missing.append(f"{prefix}.{key}")
            elif isinstance(value, Tensor):
                unit = f"{_STATE}.{own.theirs}.{key}"
                found.compare(f"{prefix}.{key}", value, self._step.abouts.get(unit), self._cast)
        for key in saved:
            unit = f"{_STATE}.{own.theirs}.{key}"
            if own.state and key not in own.state:
                found.unexpected.append(unit)
            else:
                own.slots.append(_Slot(key, unit))

    def _is_of(self, own: _Own) -> bool:
        """Whether the step's states are those of such an optimizer, as far as it tells.

        Groups of one optimizer may be of several kinds, each with options of its own.
        """
        group, classes = self._place[str(own.theirs)], self._step.about.optimizers
        optimizer = own.optimizer
        if group < len(classes) and classes[group] == class_of(optimizer):
            return True
        options = {*self._theirs[group]} - {"params", "param_names"} - _SCHEDULED
        kind = {*self._groups[own.group]} - {"params", "param_names"} - _SCHEDULED
        known = {*optimizer.defaults, *(key for each in optimizer.param_groups for key in each)}
        return options <= known and ({*optimizer.defaults} <= options or kind == options)

    # ---- loading

    def load(self, out: set[str]) -> None:
        """Read states, and put them and the options in place, but what is ``out``."""
        tensors: list[tuple[str, Tensor]] = []
        states: dict[int, dict[int, Nested]] = {id(each): {} for each in self._optimizers}
        for own in self._own:
            slots = [each for each in own.slots if f"{_STATE}.{own.name}.{each.key}" not in out]
            for slot in slots:
                if slot.unit in self._step.abouts:
                    slot.value = self._memory(own, slot)
                    tensors.append((slot.unit, slot.value))
            kept = {  # what was left stays
                key: value
                for key, value in own.state.items()
                if own.is_kept or f"{_STATE}.{own.name}.{key}" in out
            }
            if kept or slots:
                state = kept | {slot.key: slot.value for slot in slots}
                states[id(own.optimizer)][own.number] = state
        self._step.read(tensors)
        options = iter(self._options)
        for optimizer, plain in zip(self._optimizers, self._plain, strict=True):
            groups = [{**group, **next(options)} for group in plain["param_groups"]]
            put_state(optimizer, {"state": states[id(optimizer)], "param_groups": groups})

    def _memory(self, own: _Own, slot: _Slot) -> Tensor:
        """New memory for a tensor of a state: as it is here, or as the parameter is."""
        about = self._step.abouts[slot.unit]
        dtype, param = about.dtype, own.param
        like: object = own.state.get(slot.key)
        if isinstance(like, Tensor) and self._cast:
            dtype = like.dtype
        elif self._cast and param.dtype.is_floating_point:
            theirs = self._step.abouts.get(f"model.{own.theirs}")
            if theirs is not None and theirs.dtype == dtype:
                dtype = param.dtype
        if not isinstance(like, Tensor) and about.shape == tuple(param.shape) and param.dim():
            like = param
        if isinstance(like, DTensor) or (isinstance(like, Tensor) and like.dim()):
            return torch.empty_like(like, dtype=dtype)
        options = {**self._groups[own.group], **self._options[own.group]}
        on_device = slot.key != "step" or options.get("capturable") or options.get("fused")
        device = param.device if on_device else torch.device("cpu")
        return torch.empty(about.shape, dtype=dtype, device=device)


def _alike(values: Sequence[Value]) -> bool:
    """Whether all are of one type and value; tensors in them, too."""
    if len(values) < 2:
        return True
    first, *others = (Packed(value) for value in values)
    return all(
        each.content == first.content
        and all(map(torch.equal, each.tensors.values(), first.tensors.values()))
        for each in others
    )


def put_state(optimizer: torch.optim.Optimizer, state_dict: Nested) -> None:
    """As ``optimizer.load_state_dict(state_dict)``, without its casts."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(state_dict)
        for number, kept in state_dict["state"].items():
            _undo_casts(params[number], kept, optimizer.state.get(params[number], {}))
        return
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = before(optimizer, state_dict) or state_dict
    groups = [
        {**new, "params": old["params"]}
        for old, new in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    state: defaultdict[object, Nested] = defaultdict(dict)
    for number, kept in state_dict["state"].items():
        state[params[number] if isinstance(number, int) else number] = kept
    optimizer.__setstate__({"state": state, "param_groups": groups})
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def _undo_casts(param: Tensor, kept: Nested, state: Nested) -> None:
    """Restore dtypes after an optimizer's own ``load_state_dict`` let torch cast them."""
    for key, value in kept.items():
        here = state.get(key)
        if isinstance(value, Tensor) and isinstance(here, Tensor):
            if here.dtype != value.dtype and here.dtype == param.dtype:
                state[key] = value.to(here.device)
        elif isinstance(value, str) and isinstance(here, str):
            state[key] = value
