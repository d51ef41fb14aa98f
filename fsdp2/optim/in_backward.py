"""Steps of a unit's parameters as soon as a reduction has delivered their gradients.

    backward   unit 3 reduces ── deliver ── hooks ──> stepped; .grad = None
               unit 2 reduces ── deliver ── hooks ──> …
    step()     the rest: parameters of no unit, and of units whose delivery was incomplete

A reduction delivers all of its gradients and then runs post-accumulate-grad hooks, so the last of
these hooks finds the unit complete. They run where the gradient is ready (on the lane of the
reduction, or on the CPU), and COMPUTE waits for that lane before the next iteration.

Each unit's parameters are a section of the optimizer with runs of its own. Clipping by the norm of
all gradients, gradient scalers and several reductions before a step need gradients that are gone by
then: `clip_grad_norm_` and a second reduction raise.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.autograd import Variable

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import ParamGroup, unit_of
from fsdp2.optim import offloaded
from fsdp2.optim.offloaded import LEAVING, HostSection, Staging, step_all
from fsdp2.optim.runs import (
    ParamGroupOptions,
    ParamState,
    Section,
    groups_with,
    localized,
    places_of,
)

OUTSIDE = -1
"""Autograd's number of the running backward while none runs."""

TAKEN = "_fsdp2_gradient_taken"
"""A mark of a parameter: the `InBackward` that uses its gradients, by a weak reference."""


class Sectioned(torch.optim.Optimizer):
    """An optimizer that steps its parameters in sections: `fsdp2.optim.flat.FlatOptimizer`."""

    _make_inner: Callable[..., torch.optim.Optimizer]
    _sections: list[Section]
    _loaded: dict[torch.Tensor, ParamState]  # state that no run has yet
    _offloads: bool
    _staging: Staging | None

    @property
    def rest(self) -> Section:
        """The parameters that no unit has; all of them if units are not stepped separately."""
        return self._sections[0]

    def split(self) -> list[tuple[ParamGroup, Section]]:
        """Step each unit separately whose parameters are in no other section."""
        rest = self._sections[0]
        for param, state in rest.states().items():
            self._loaded[param] = localized(state)
        known = {p for section in self._sections[1:] for p in section.members or ()}
        params = self._params()
        own = {*params} - known
        made: list[tuple[ParamGroup, Section]] = []
        for group in groups_with(params):
            members = own & {param.sharded for param in group.params}
            if members:
                made.append((group, self._section_of(members)))
                own -= members
        self._sections = [
            Section(self._make_inner, own),
            *self._sections[1:],
            *(section for _, section in made),
        ]
        return made

    def _params(self) -> list[torch.Tensor]:
        """All parameters, in the order of the groups."""
        return [param for group in self.param_groups for param in group["params"]]

    def _section_of(self, members: Set[torch.Tensor]) -> Section:
        device = next(iter(members)).device
        if not self._offloads or not offloaded.travels(device):
            return Section(self._make_inner, members)
        if self._staging is None:
            self._staging = Staging(device)
        return HostSection(self._make_inner, members, self._staging)

    def step_sections(self) -> None:
        """Step all sections; those that are copied to the host, one after the other."""
        hosted: list[HostSection] = []
        for section in self._sections:
            self.prepare(section)
            if isinstance(section, HostSection):
                hosted.append(section)
            else:
                section.step(self.param_groups)
        if hosted:
            step_all(hosted, self.param_groups)
        self.hand_back(self._sections[-1].written(self.param_groups))

    def hand_back(self, written: Sequence[ParamGroupOptions]) -> None:
        """Copy options that a step wrote into the groups: a class may store counts there."""
        for group, options in zip(self.param_groups, written, strict=True):
            group.update(options)

    def prepare(self, section: Section) -> None:
        """Set the gradients of a section's runs; create the runs again if they do not fit."""
        if not section.stale and section.set_gradients():
            return
        members = section.members
        known = self._loaded if members is None else self._loaded.keys() & members
        loaded = {param: self._loaded.pop(param) for param in tuple(known)}
        section.cut(self.param_groups, places_of(self._params()), loaded)
        fits = section.set_gradients()
        assert fits


def refuse_stepped(params: Iterable[torch.Tensor], action: str) -> None:
    """Raise if a parameter is stepped in backward, and so has no gradient when ``action`` asks."""
    if is_stepped(params):
        raise coded(
            ShardingStateError,
            "stepped-in-backward",
            f"{action} needs all gradients, but FlatOptimizer(step_in_backward=True) has used and "
            f"freed them in backward; create the optimizer without step_in_backward, or leave "
            f"this call out",
        )


def is_stepped(params: Iterable[torch.Tensor]) -> bool:
    """Whether an optimizer steps any of these in backward."""
    for param in params:
        taker = getattr(param, "__dict__", {}).get(TAKEN)
        if taker is not None and taker() is not None:
            return True
    return False


class InBackward:
    """Steps one optimizer's sections when reductions deliver.

    A thread steps sections on the host, while backward continues. One section may be stepped while
    the next one is copied out; all have ended when backward ends.
    """

    count = 0  # in this process; code checks it before it asks parameters

    def __init__(self, optimizer: Sectioned) -> None:
        self._optimizer: weakref.ref[Sectioned] = weakref.ref(optimizer)
        self._units: list[_UnitGradients] = []
        self._written: list[ParamGroupOptions] = []
        self._thread: ThreadPoolExecutor | None = None
        self._running: deque[tuple[HostSection, Future[None]]] = deque()
        self.watch()
        InBackward.count += 1

    def watch(self) -> None:
        """Create sections of the units' parameters, and watch their gradients."""
        optimizer = self.optimizer
        known = {param for unit in self._units for param in unit.params}
        if is_stepped({*optimizer._params()} - known):
            raise coded(
                ValueError,
                "stepped-twice-owner",
                "another FlatOptimizer(step_in_backward=True) already takes the gradient of a "
                "parameter of this one; create one optimizer with parameter groups",
            )
        for group, section in optimizer.split():
            self._units.append(_UnitGradients(self, group, section))

    @property
    def optimizer(self) -> Sectioned:
        """The optimizer of the sections."""
        optimizer = self._optimizer()
        assert optimizer is not None  # it holds this
        return optimizer

    def use(self, unit: _UnitGradients, group: ParamGroup) -> None:
        """Step a unit whose gradients are complete, unless it was stepped before."""
        given = unit.given()
        if given & unit.used:
            raise coded(
                ShardingStateError,
                "stepped-again",
                f"unit '{group.name}' has reduced gradients twice since the last "
                f"optimizer.step(), but FlatOptimizer(step_in_backward=True) has already used the "
                f"first ones; call step() after each backward that reduces, or accumulate with "
                f"set_requires_gradient_sync(False)",
            )
        unit.used |= given
        section = unit.section
        if isinstance(section, HostSection):
            self._step_apart(section)
        else:
            with torch.no_grad():
                self.optimizer.prepare(section)
            self._step(section)

    def end(self) -> None:
        """Step units with incomplete deliveries, and parameters that no unit has."""
        self._wait()
        optimizer = self.optimizer
        for unit in self._units:
            unit.end()
        optimizer.prepare(optimizer.rest)
        self._step(optimizer.rest)
        optimizer.hand_back(self._written)

    @torch.no_grad()
    def _step(self, section: Section) -> None:
        groups = self.optimizer.param_groups
        section.step(groups)
        self._written = section.written(groups)

    def _step_apart(self, section: HostSection) -> None:
        """Copy a section to the host, and let the thread step it."""
        again = any(section is other for other, _ in self._running)  # late gradients of it
        self._wait(all_but=0 if again else LEAVING - 1)
        with torch.no_grad():
            self.optimizer.prepare(section)
            section.leave()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "fsdp2-optimizer")
        self._running.append((section, self._thread.submit(self._step, section)))
        if torch._C._current_graph_task_id() == OUTSIDE:
            self._wait()
        else:
            Variable._execution_engine.queue_callback(self._wait)

    def _wait(self, all_but: int = 0) -> None:
        """Wait until sections are stepped; after all, COMPUTE waits for their parameters."""
        section = None
        while len(self._running) > all_but:
            section, step = self._running.popleft()
            step.result()
        if section is not None and not all_but:
            section.arrive()  # after the earlier ones


class _UnitGradients:
    """The gradients of one unit's group."""

    def __init__(self, owner: InBackward, group: ParamGroup, section: Section) -> None:
        assert section.members is not None
        self.params = list(section.members)
        self.section = section
        self.used: set[torch.Tensor] = set()  # parameters that were stepped since the last step()
        self._owner = weakref.ref(owner)
        self._group = weakref.ref(group)
        self._waiting = 0  # hooks of this delivery that are still to run
        delivered = weakref.WeakMethod(self._delivered)

        def hook(param: torch.Tensor) -> None:
            method = delivered()
            if method is not None:
                method(param)

        for param in self.params:
            param.__dict__[TAKEN] = self._owner
            param.register_post_accumulate_grad_hook(hook)

    def given(self) -> set[torch.Tensor]:
        """The parameters that have a gradient."""
        return {param for param in self.params if param.grad is not None}

    def _delivered(self, param: torch.Tensor) -> None:
        """A reduction has delivered the gradient of ``param``, and possibly of others."""
        if not self._waiting:
            self._waiting = sum(each.grad is not None for each in self.params)
        self._waiting -= 1
        group = self._group()
        if self._waiting or group is None:
            return
        if unit_of(group).visits:
            return  # another call's gradients are to be added
        self._use(group)

    def _use(self, group: ParamGroup) -> None:
        owner = self._owner()
        if owner is None:
            return
        given = self.given()
        owner.use(self, group)
        for param in given:
            param.grad = None

    def end(self) -> None:
        """The user's step: use the gradients of an incomplete delivery now."""
        self._waiting = 0
        group = self._group()
        if group is not None and self.given():
            self._use(group)
        self.used.clear()
