"""`FlatOptimizer(step_in_backward=True)`: units are stepped as soon as their gradients are there.

    backward   unit 3 reduces ── deliver ── hooks ──> its section steps, .grad = None
               unit 2 reduces ── deliver ── hooks ──> …
    step()     what is left: parameters of no unit, or of calls that came to nothing

A reduction delivers all of its gradients and then runs post-accumulate-grad hooks, so the last of
these hooks finds the unit complete. They run where the gradient is ready (on the lane of the
reduction, or on the CPU), and COMPUTE waits for that lane before the next iteration.

Each unit's parameters are a section of the optimizer with runs of its own. Clipping by the norm of
all gradients, gradient scalers and several reductions before a step need gradients that are gone by
then: `clip_grad_norm_` and a second reduction raise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol, cast

import torch

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.unit import unit_of
from fsdp2.optim.runs import ParamGroupOptions, Section

STEPPED = "_fsdp2_stepped_in_backward"
"""A mark of a parameter: the optimizer that steps it in backward, by a weak reference."""


class InSections(Protocol):
    """An optimizer that steps its parameters in sections: `fsdp2.optim.flat.FlatOptimizer`."""

    param_groups: list[ParamGroupOptions]

    @property
    def rest(self) -> Section:
        """The parameters that no unit has."""

    def split(self) -> list[tuple[ParamGroup, Section]]:
        """Make sections of the parameters that units have, but for those that have some."""

    def step_section(self, section: Section) -> None:
        """Step a section's parameters that have a gradient."""


def refuse_stepped(params: Iterable[torch.Tensor], action: str) -> None:
    """Raise if a parameter is stepped in backward, and so has no gradient when ``action`` asks.

    Args:
        params: the parameters.
        action: what asks for all gradients, as a call.
    """
    for param in params if InBackward.count else ():
        optimizer = getattr(param, "__dict__", {}).get(STEPPED)
        if optimizer is not None and optimizer() is not None:
            raise coded(
                ShardingStateError,
                "stepped-in-backward",
                f"{action} needs all gradients, but FlatOptimizer(step_in_backward=True) has "
                f"stepped and dropped them in backward; make the optimizer without "
                f"step_in_backward, or leave this out",
            )


class InBackward:
    """Steps the sections of one optimizer when reductions deliver.

    Args:
        optimizer: the optimizer, whose sections it makes.

    Attributes:
        count: how many were made in this process.
    """

    count = 0

    def __init__(self, optimizer: InSections) -> None:
        self._optimizer: weakref.ref[InSections] = weakref.ref(optimizer)
        self._units: list[_UnitSteps] = []
        self._written: list[ParamGroupOptions] = []
        self.watch()
        InBackward.count += 1

    def watch(self) -> None:
        """Make sections of the parameters that units have, and watch their gradients.

        Raises:
            ValueError: another optimizer steps one of them in backward.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        known = {param for unit in self._units for param in unit.params}
        own = _params_of(optimizer) - known
        for param in own:
            other = param.__dict__.get(STEPPED)
            if other is not None and other() is not None:
                raise coded(
                    ValueError,
                    "stepped-twice-owner",
                    "another FlatOptimizer(step_in_backward=True) steps a parameter of this one; "
                    "make one optimizer with parameter groups",
                )
        for group, section in optimizer.split():
            self._units.append(_UnitSteps(self, group, section))

    def step(self, section: Section) -> None:
        """Step a section whose gradients are complete, and drop them."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        with torch.no_grad():
            optimizer.step_section(section)
        self._written = section.written(optimizer.param_groups)

    def end(self) -> None:
        """Step what is left, and let the next backward step again."""
        optimizer = self._optimizer()
        assert optimizer is not None
        for unit in self._units:
            unit.end()
        self.step(optimizer.rest)
        for group, written in zip(optimizer.param_groups, self._written, strict=True):
            group.update(written)


class _UnitSteps:
    """The parameters of one unit's group.

    Args:
        owner: what steps.
        group: the group.
        section: of these parameters.
    """

    def __init__(self, owner: InBackward, group: ParamGroup, section: Section) -> None:
        assert section.members is not None
        self.params = list(section.members)
        self._section = section
        self._owner = weakref.ref(owner)
        self._group = weakref.ref(group)
        self._waiting = 0  # hooks of this delivery that are still to run
        self._stepped: set[torch.Tensor] = set()
        hook: weakref.ref[Hook] = weakref.WeakMethod(self._delivered)
        for param in self.params:
            param.__dict__[STEPPED] = owner._optimizer
            param.register_post_accumulate_grad_hook(_when_alive(hook))

    def _delivered(self, param: torch.Tensor) -> None:
        """A reduction has delivered the gradient of ``param``, and perhaps of others."""
        if not self._waiting:
            self._waiting = sum(each.grad is not None for each in self.params)
        self._waiting -= 1
        group = self._group()
        if self._waiting or group is None:
            return
        if unit_of(group).visits:
            return  # another call's gradients are to be added
        self._step(group)

    def _step(self, group: ParamGroup) -> None:
        given = {param for param in self.params if param.grad is not None}
        if given & self._stepped:
            raise coded(
                ShardingStateError,
                "stepped-again",
                f"unit '{group.name}' has reduced gradients twice since the last optimizer.step(), "
                f"but FlatOptimizer(step_in_backward=True) has used the first ones; call step() "
                f"after each backward that reduces, or accumulate with "
                f"set_requires_gradient_sync(False)",
            )
        owner = self._owner()
        if owner is None:
            return
        owner.step(self._section)
        self._stepped |= given
        for param in given:
            param.grad = None

    def end(self) -> None:
        """The user's step: what no delivery has completed is stepped now."""
        self._waiting = 0
        group = self._group()
        if group is not None and any(param.grad is not None for param in self.params):
            self._step(group)
        self._stepped.clear()


def _params_of(optimizer: InSections) -> set[torch.Tensor]:
    groups = optimizer.param_groups
    return {param for group in groups for param in cast("list[torch.Tensor]", group["params"])}


Hook = Callable[[torch.Tensor], None]


def _when_alive(hook: weakref.ref[Hook]) -> Hook:
    """A hook that does nothing once the optimizer is gone."""

    def run(param: torch.Tensor) -> None:
        found = hook()
        if found is not None:
            found(param)

    return run
