"""nn.Module and autograd hooks; the only code that knows the autograd engine.

A unit's hooks sit at four places, and each makes one call of the scheduler:

    forward pre-hook     enter_forward    first of all pre-hooks: users' see full parameters
    forward hook         exit_forward     last of all: users' hooks registered before see them too
    grad of an output    enter_backward   first gradient that comes back to the unit
    grads of the inputs  exit_backward    the node in front of the unit, or a view or identity where
                                          that may have other uses; when its gradient is there,
                                          every node made behind it has run

Where no input requires grad there is no such node; the end of the whole backward, a callback
that the first `enter_backward` queues, finishes such units.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable, profiler

from fsdp2.core.config import MixedPrecisionPolicy, ShardingStateError
from fsdp2.core.group import ParamGroup
from fsdp2.core.journal import log_layout
from fsdp2.core.misuse import calls_of, explain, failure_of
from fsdp2.core.nested import cast, grad_tensors, map_tensors, replace_marked, unbatched
from fsdp2.core.param import GATHERED, ModuleSlot, ModuleSlots
from fsdp2.core.registrations import (
    Registrations,
    check_registered,
    follow_replaced,
    in_place,
    put_back,
)
from fsdp2.core.scheduler import Scheduler
from fsdp2.core.skipped import next_node, running_node
from fsdp2.core.streams import Streams
from fsdp2.core.uncompiled import see_through, uncompiled, uncompiled_methods
from fsdp2.core.unit import BACKWARD, FORWARD, REDUCED, Unit

_in_backward: Callable[[], int] = torch._C._current_graph_task_id
_OUTSIDE = -1
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether torch.func runs this; gathers are none of its business.

It only looks at dispatch keys. Whatever looks at the stack of transforms makes one for the thread,
which autograd then copies around each node that it runs: 300 instructions a time (torch 2.13)."""
_KEY = "_fsdp2_hooks"
"""Where a sharded module keeps its hooks, in its ``__dict__``."""


_alive: weakref.WeakSet[UnitHooks] = weakref.WeakSet()


def all_hooks() -> list[UnitHooks]:
    """The hooks of all units in this process, in no particular order."""
    return list(_alive)


def hooks_of(module: nn.Module) -> UnitHooks | None:
    """The hooks that ``fully_shard`` installed on ``module``, if it was called on it."""
    return module.__dict__.get(_KEY)


def hooks_below(module: Any, recurse: bool = True) -> list[UnitHooks]:
    """The hooks on a module and, with ``recurse``, below it; each once."""
    members = module.modules() if recurse else [module]
    return list({hooks: None for member in members if (hooks := hooks_of(member)) is not None})


class _ExitBackward(torch.autograd.Function):
    """Identity whose backward tells the unit that its own backward is over."""

    @staticmethod
    @uncompiled
    def forward(ctx: Any, hooks: UnitHooks, *tensors: torch.Tensor) -> Any:
        ctx.hooks = hooks
        return tensors

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.hooks.exit_backward()
        return (None, *grads)


@uncompiled_methods
class UnitHooks:
    """The hooks of one unit.

    Args:
        unit: what they drive.
        modules: the modules that ``fully_shard`` was called on.
        precision: casts of inputs and outputs.
        device: where inputs of a root's forward are moved; CPU inputs stay.
        streams: lanes of the device.
    """

    __slots__ = (
        "__weakref__",
        "_cast_to",
        "_first_group",
        "_is_list",
        "_lent",
        "_modules",
        "_nested",
        "_registrations",
        "_waiting",
        "arguments",
        "device",
        "ignored",
        "precision",
        "scheduler",
        "streams",
        "unit",
    )

    def __init__(
        self,
        unit: Unit,
        modules: Sequence[nn.Module],
        precision: MixedPrecisionPolicy,
        device: torch.device,
        streams: Streams,
    ) -> None:
        self.unit = unit
        # They own this object. A way back would leave their memory to the garbage collector.
        self._modules = [weakref.ref(module) for module in modules]
        self._is_list = len(modules) > 1
        self.precision = precision
        self.device = device
        self.scheduler: Scheduler | None = None
        self.streams = streams
        self.arguments: Any = None  # what fully_shard was called with
        self.ignored = ModuleSlots(())
        self._registrations = -1  # as counted when they were checked last
        self._first_group: ParamGroup | None = None  # at or below the unit, when they were checked
        self._waiting: set[int] = set()  # ids, of a list of modules, of those still to run
        self._lent = False  # whether one of a list that has run lends a parameter
        self._nested = 0  # calls of the unit that began the forward, inside of it
        self._cast_to = precision.param_dtype if precision.cast_forward_inputs else None
        for module in modules:
            module.__dict__[_KEY] = self
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward, always_call=True)
        _alive.add(self)

    def __del__(self) -> None:
        # Units that prefetch each other are a cycle.
        self.unit.forward_prefetch = self.unit.backward_prefetch = []

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that ``fully_shard`` was called on, as far as they still exist."""
        found = (reference() for reference in self._modules)
        return tuple(module for module in found if module is not None)

    # ---- forward

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather; cast inputs; mark where backward leaves the unit."""
        scheduler = self.scheduler or start(self)
        unit = self.unit
        if _in_backward() != _OUTSIDE:  # recomputation of a checkpointed forward
            if unit.phase is FORWARD:  # a derivative inside of it: its parameters are there
                return self._cast_inputs(args, kwargs)
            marks = unit.phase is not BACKWARD
            if marks:
                self._enter_backward(recomputes=True)
                # A list that is entered later leaves no telling which of its modules is first.
                marks = unit.phase is BACKWARD or not self._is_list
            scheduler.enter_recomputation(unit)
            args, kwargs = self._cast_inputs(args, kwargs)
            return self._mark_exit(args, kwargs) if marks else (args, kwargs)
        first = True
        if self._is_list:
            first = unit.phase is not FORWARD
            if first:  # an exception may have left some of the last forward's
                self._waiting.update(map(id, self.modules))
                self._lent = False
        elif scheduler.forward_root is unit and calls_of(module, self) > 1:
            self._nested += 1  # it calls itself: the forward around this one gathers and frees
            return self._cast_inputs(args, kwargs)
        if first:
            around = scheduler.forward_root
            if (
                around is unit
                or scheduler.failed
                or scheduler.in_backward
                or (unit.is_root and around is not None)
            ):  # an exception ended a forward or backward half way: no unit is around the root
                scheduler.reset()
                around = None
            if around is None:
                self._nested = 0
                args, kwargs = self._begin(scheduler, args, kwargs)
                scheduler = self.scheduler or scheduler
            if _transformed():
                with torch._C._DisableFuncTorch():
                    scheduler.enter_forward(unit)
            else:
                scheduler.enter_forward(unit)
        if self._cast_to is not None:
            args, kwargs = self._cast_inputs(args, kwargs)
        return self._mark_exit(args, kwargs) if first else (args, kwargs)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Free; mark where backward enters the unit; cast outputs. Or explain an exception."""
        scheduler = self.scheduler
        if output is None and (failure := failure_of(module)) is not None:
            if scheduler is not None:
                self._fail(scheduler, failure)
            return None
        assert scheduler is not None
        transformed = _transformed()
        seen = map_tensors(unbatched, output) if transformed else output
        lends = self._mark_entry(seen, args) if torch.is_grad_enabled() else _lends(seen)
        if self._nested and scheduler.forward_root is self.unit:
            self._nested -= 1
        elif _in_backward() == _OUTSIDE:
            if transformed:
                with torch._C._DisableFuncTorch():
                    self._exit_forward(scheduler, module, lends)
            elif self._is_list:
                self._exit_forward(scheduler, module, lends)
            else:
                scheduler.exit_forward(self.unit, lends)
        dtype = self.precision.output_dtype
        return output if dtype is None else cast(output, dtype)

    def _fail(self, scheduler: Scheduler, failure: BaseException) -> None:
        """A forward raised: if a caller catches it, the forward around it may go on."""
        explain(failure, scheduler.units)
        if scheduler.forward_root is self.unit:
            if self._nested:
                self._nested -= 1
            else:
                scheduler.failed = True

    def _exit_forward(self, scheduler: Scheduler, module: nn.Module, lends: bool) -> None:
        self._waiting.discard(id(module))
        self._lent = self._lent or lends
        if not self._waiting:
            scheduler.exit_forward(self.unit, self._lent)
        elif scheduler.forward_root is self.unit:
            # One module of a list, called on its own (a head, chunk by chunk): backward is next,
            # so that the parameters stay.
            self._waiting.clear()
            scheduler.exit_forward(self.unit, keep=True)

    def _begin(
        self, scheduler: Scheduler, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = self._first_group
        if self._registrations != Registrations.count or (first and not in_place(first)):
            scheduler = self._check_registrations(scheduler)
        scheduler.begin_forward(self.unit, torch.is_grad_enabled())
        if self.device.type == "cpu":
            return args, kwargs
        device = self.device

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

        return map_tensors(move, args), map_tensors(move, kwargs)

    def _check_registrations(self, scheduler: Scheduler) -> Scheduler:
        """Something was registered since: find new units, refuse what no unit manages."""
        self._registrations = Registrations.count
        if self.unit.is_root and {h.unit for h in hooks_below(self.modules[0])} != set(
            scheduler.units
        ):
            scheduler = start(self)
        groups: list[ParamGroup] = []
        for module in self.modules:
            managed = {}
            ignored: set[ModuleSlot] = set()
            for below in hooks_below(module):
                ignored.update(below.ignored)
                groups += below.unit.groups
                for group in below.unit.groups:
                    follow_replaced(group)
                    managed.update({slot: p for p in group.params for slot in p.slots})
            try:
                check_registered(module, managed, ignored)
            except ShardingStateError:
                self._registrations = -1
                raise
        self._first_group = groups[0] if groups else None
        for group in groups:
            put_back(group)
        return scheduler

    def _cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._cast_to is None:
            return args, kwargs
        return cast(args, self._cast_to), (cast(kwargs, self._cast_to) if kwargs else kwargs)

    # ---- backward

    def _mark_exit(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.is_grad_enabled() or not self.unit.groups:  # nothing to free and to reduce
            return args, kwargs
        if len(args) == 1 and type(args[0]) is torch.Tensor and not kwargs:  # as in most calls
            tensor = args[0]
            if not tensor.requires_grad or self._ends_at(tensor):
                return args, kwargs
            return (self._marked(tensor),), kwargs
        found: list[torch.Tensor] = []
        grad_tensors(args, found)
        if kwargs:
            grad_tensors(kwargs, found)
        if len(found) > 1 and _transformed():
            found.clear()  # torch.func has no room for such a node: the end of backward will do
        # Autograd runs each device's nodes newest first; those of others tell nothing of the unit.
        if not found or any(t.device == self.device and self._ends_at(t) for t in found):
            return args, kwargs
        if len(found) == 1 and type(found[0]) is torch.Tensor:
            marked = iter((self._marked(found[0]),))
        else:
            marked = iter(_ExitBackward.apply(self, *found))
        args = replace_marked(args, marked)
        return args, (replace_marked(kwargs, marked) if kwargs else kwargs)

    def _ends_at(self, tensor: torch.Tensor) -> bool:
        """Let the unit's backward end at an input's own gradient, if no node is newer than its.

        Then only the unit and what is newer can use it: its gradient is complete when the unit's
        nodes have run. Others may have older uses (an encoder's output, in each block of a
        decoder), for which the unit should not wait.
        """
        node = tensor.grad_fn if type(tensor) is torch.Tensor else None
        if node is None or node._sequence_nr() + 1 != next_node():
            return False
        _on_gradient(tensor, self.exit_backward, self)
        return True

    def _marked(self, tensor: torch.Tensor) -> torch.Tensor:
        # A view costs half of a custom function, and a user may modify it in place. This is the
        # one whose backward runs nothing: that of `view_as` makes a view of the gradient.
        alias = tensor[...]
        _on_gradient(alias, self.exit_backward, self)
        return alias

    def _mark_entry(self, output: Any, args: Any) -> bool:
        """Mark where backward enters the unit; returns as `_lends`."""
        found: list[torch.Tensor] = []
        lends = False
        if type(output) is torch.Tensor and output.requires_grad:
            found.append(output)
        else:
            others: list[torch.Tensor] = []
            grad_tensors(output, found, others)
            lends = any(map(_lends, others))
        for tensor in found:
            _on_gradient(tensor, self._on_output_grad, self.unit)
            base = tensor._base
            if base is None and type(tensor) is torch.Tensor:
                continue
            if base is None or base.grad_fn is None:
                lends = lends or _lends(tensor)
            elif not _is_base(base, args):
                # An in-place operation on a view routes its gradient around the view's own
                # node, straight to the node of its base.
                base.grad_fn.register_prehook(self._on_base_grad)
        return lends

    def _on_output_grad(self, grad: torch.Tensor) -> None:
        if self.unit.phase is not BACKWARD or self._is_behind():
            self._enter_backward()

    def _on_base_grad(self, grads: Any) -> None:
        unit = self.unit
        if unit.phase is REDUCED and not unit.visits:
            return  # it returned a view of its input: its backward is over
        if unit.phase is not BACKWARD or self._is_behind():
            self._enter_backward()

    def _is_behind(self) -> bool:
        """Whether this gradient is an earlier call's; the one that the unit was in is left then."""
        assert self.scheduler is not None
        return self.scheduler.leave_later_call(self.unit)

    def exit_backward(self, grad: torch.Tensor | None = None) -> None:
        """The gradients of the unit's inputs are there."""
        if self.unit.phase is not BACKWARD:
            return  # a derivative by its inputs, inside of it or without it
        assert self.scheduler is not None
        self.scheduler.exit_backward(self.unit)

    def _enter_backward(self, recomputes: bool = False) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        if not scheduler.in_backward:
            scheduler.in_backward = True
            if profiler._is_profiler_enabled is not scheduler.ranges:
                scheduler.follow_profiler()
            # Recomputation enables grad in every backward; otherwise it means create_graph=True.
            if not recomputes and torch.is_grad_enabled():
                scheduler.builds_graph = scheduler.holds = True
            end = self._end_backward
            scheduler.ending = weakref.ref(end)  # autograd holds it as long as this backward runs
            Variable._execution_engine.queue_callback(end)
        elif scheduler.ending() is None:
            raise ShardingStateError(
                f"the backward of '{self.unit.title}' follows one that an exception ended, whose "
                f"gradients are incomplete; call reset_iter_state() on the root, or run the "
                f"forward again before its backward"
            )
        scheduler.enter_backward(self.unit, running_node() if recomputes else None)

    def _end_backward(self) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        scheduler.end_backward()


def _lends(output: Any) -> bool:
    """Whether a gathered parameter, or a view of one, is in ``output``: it stays till backward."""
    if type(output) is torch.Tensor and output._base is None:
        return False
    found: list[torch.Tensor] = []
    grad_tensors(output, found, found)
    owners = [tensor if tensor._base is None else tensor._base for tensor in found]
    return any(type(owner) is not torch.Tensor and GATHERED in owner.__dict__ for owner in owners)


def _is_base(tensor: torch.Tensor, views: Any) -> bool:
    """Whether ``tensor``, or a view of it, is in ``views``: its node is outside of the unit."""
    found: list[torch.Tensor] = []
    grad_tensors(views, found)
    return any(view is tensor or view._base is tensor for view in found)


def _on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None], key: object) -> None:
    """As ``tensor.register_hook(hook)``, for good: a third of the work, as there is no handle.

    Args:
        tensor: requires grad.
        hook: called with its gradient.
        key: of one hook of the tensor; handles have integers.
    """
    if type(tensor) is not torch.Tensor:
        present: Any = tensor._backward_hooks
        if present is None or hook not in present.values():  # a parameter, at every call
            tensor.register_hook(hook)
        return
    node = tensor.grad_fn  # asked first, it is the node of a view that was changed in place
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        tensor._backward_hooks = hooks = OrderedDict()  # a handle refers to it weakly
        if node is not None:
            node._register_hook_dict(tensor)  # as torch's method does
    older = list(hooks)
    hooks[key] = hook
    for present in older:  # what came later in forward goes first, as in all of backward
        hooks[present] = hooks.pop(present)  # autograd knows nothing of `move_to_end`


def start(hooks: UnitHooks) -> Scheduler:
    """Make ``hooks``' module the root of all units below it, and give them one scheduler.

    Called before the first forward (or a call that needs the scheduler), when every unit is there.
    """
    if len(hooks.modules) > 1:
        raise ShardingStateError(
            f"the first forward ran a module of the list {hooks.unit.name}, which has no single "
            f"root; call fully_shard on the model that holds them and run that first"
        )
    root = hooks.modules[0]
    found: dict[UnitHooks, list[str]] = {}
    for name, module in root.named_modules():
        below = hooks_of(module)
        if below is not None:
            found.setdefault(below, []).append(name)
    for below, names in found.items():
        busy = below.scheduler
        if busy is not None and (busy.forward_root is not None or busy.in_backward):
            raise ShardingStateError(
                f"unit '{', '.join(names)}' is in the middle of a forward or backward of its own; "
                f"finish it, or call reset_iter_state() on it, before running its parent"
            )
        if busy is not None and busy.manual and below is not hooks:
            raise ShardingStateError(
                f"set_manual_backward_finalization was called on '{', '.join(names)}', which is "
                f"below the root; call it on the module whose forward you call"
            )
        if busy is not None:
            busy.wait_for_reductions()
    old = hooks.scheduler
    scheduler = Scheduler([below.unit for below in found], hooks.streams)
    if old is not None:  # units were added
        scheduler.is_last_backward, scheduler.holds = old.is_last_backward, old.holds
        scheduler.manual, scheduler.post_optim_event = old.manual, old.post_optim_event
    for below, names in found.items():
        below.scheduler = scheduler
        below.unit.name = ", ".join(names)
        below.unit.visits = []  # which the scheduler before counted
        below.unit.is_root = below is hooks
    _name_parameters(root, found)
    layouts = [(u.title, [g.layout for g in u.groups if g.layout]) for u in scheduler.units]
    log_layout(type(root).__name__, layouts)
    return scheduler


def _name_parameters(root: nn.Module, found: dict[UnitHooks, list[str]]) -> None:
    names = {id(param): name for name, param in root.named_parameters()}
    for below in found:
        for group in below.unit.groups:
            group.name = below.unit.title
            for param in group.params:
                registered = param.sharded if not group.is_unsharded else param.unsharded
                param.name = names.get(id(registered), param.name)


def forward_method(hooks: UnitHooks, method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, a bound method, run between the unit's forward hooks."""

    @functools.wraps(method)
    def run_between_hooks(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.pre_forward(self, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except Exception as error:
            if hooks.scheduler is not None:
                hooks._fail(hooks.scheduler, error)
            raise
        return hooks.post_forward(self, args, output)

    return see_through(run_between_hooks)
