"""nn.Module and autograd hooks; with `engine`, the only code that knows the autograd engine.

A unit's hooks are at four positions, and each makes one call of the scheduler. The last hook is
that call itself: autograd calls it directly.

    forward pre-hook     enter_forward    first of all pre-hooks: users' see full parameters
    forward hook         exit_forward     last of all: users' hooks registered before see them too
    grad of an output    enter_backward   first gradient that comes back to the unit
    grads of the inputs  exit_backward    the node in front of the unit, or a view or identity if
                                          that may have other uses; when its gradient arrives,
                                          every node created after it has run

If no input requires grad, there is no such node; the end of the whole backward, a callback that the
first `enter_backward` queues, finishes such units.

Other modules with parameters of a root's own unit have a hook only between its forwards. It
explains the exception of a module that is called on its own, where its parameters are sharded.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.autograd import Variable

from fsdp2.core.device.streams import Streams
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.modules.containers import (
    cast,
    grad_tensors,
    map_tensors,
    outlives_transform,
    unbatched,
)
from fsdp2.core.modules.dynamo import see_through, uncompiled, uncompiled_methods
from fsdp2.core.modules.frames import FORWARD_METHODS, failure_of, running_calls
from fsdp2.core.modules.registrations import (
    Move,
    find_emptied,
    find_moves,
    follow_replaced,
    is_registered,
    owners_of,
    put_back,
    take_up,
)
from fsdp2.core.modules.registry import (
    OUTSIDE,
    RECORD,
    Args,
    Arguments,
    Kwargs,
    UnitRecord,
    record_of_unit,
    records_below,
    require_record,
    served_with,
    start,
)
from fsdp2.core.notices import Notice
from fsdp2.core.params.param import ModuleEntries, ModuleEntry, ShardedParam, form_of, gathered_name
from fsdp2.core.progress import Counts, tracing_error
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.iteration import GRAPHS
from fsdp2.core.schedule.retrace import next_node, running_node
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import BACKWARD, FORWARD, REDUCED, Unit, all_units

forward_raised: Notice[[BaseException, Iterable[Unit]]] = Notice()
"""Called with the exception of a forward, and the units below its root.

torch's message about a sharded or freed parameter does not help the author of the model. Rooms
above core change the exception in place (`fsdp2.checks.explain`); core raises it in any case.
"""

_in_backward: Callable[[], int] = torch._C._current_graph_task_id
_OUTSIDE = -1
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether torch.func runs this; gathers are none of its business.

It only looks at dispatch keys. Whatever looks at the stack of transforms makes one for the thread,
which autograd then copies around each node that it runs: 300 instructions a time (torch 2.13)."""


class _ExitBackward(torch.autograd.Function):
    """Identity whose backward marks the end of the unit's backward."""

    @staticmethod
    @uncompiled
    def forward(
        ctx: Any, leave: Callable[[], None], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.leave = leave
        return tensors

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.leave()
        return (None, *grads)


@uncompiled_methods
class UnitHooks(UnitRecord):
    """The hooks of one unit, and other changes of its modules by `fully_shard`."""

    def __init__(
        self,
        unit: Unit,
        modules: Sequence[nn.Module],
        arguments: Arguments,
        ignored: ModuleEntries,
        streams: Streams,
    ) -> None:
        super().__init__(unit, modules, arguments, ignored, streams)
        self._device = arguments.axes.device  # inputs of a root are moved there; CPU inputs stay
        self._output_dtype = unit.options.precision.output_dtype
        self._registrations = -1  # as counted when they were checked last
        self._first_group: ParamGroup | None = None  # at or below the unit, when they were checked
        self._inner_calls = 0  # of the unit, inside of its own forward
        self._is_list = len(modules) > 1
        self._starts = False  # whether this forward has just looked for all units
        self._still_to_run: set[int] = set()  # of a list: ids of modules that have not run yet
        self._returned_parameter = False  # of a list: whether one that has run returned one
        for module in modules:
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward, always_call=True)
        self._watch_outside(is_root=True)  # until one around it is known
        for hooks in self.outside:
            hooks[OUTSIDE] = _explain_outside

    def __del__(self) -> None:
        # Units that prefetch each other are a cycle.
        self.unit.forward_prefetch = self.unit.backward_prefetch = []

    # ---- forward

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Gather; cast inputs; mark where backward leaves the unit."""
        scheduler = self.scheduler or self._start()
        if _in_backward() != _OUTSIDE:
            return self._recompute(scheduler, args, kwargs)
        unit, now = self.unit, scheduler.iteration
        around = now.forward_root
        if self._is_list:
            if not self._begins_list():
                return self._cast_inputs(args, kwargs)
        elif (around is unit or unit.phase is FORWARD) and self._calls_itself(module):
            return self._cast_inputs(args, kwargs)
        self._inner_calls = 0  # what an exception left of them
        if (
            around is None or around is unit or unit.is_root or now.failed or now.in_backward
        ):  # no forward is around this one; what looks like one was ended by an exception
            args, kwargs = self._begin(scheduler, args, kwargs)
            scheduler = self.scheduler or scheduler
        # First of all: gathers wait for COMPUTE as it is at their launch, without these casts.
        if _transformed():
            with torch._C._DisableFuncTorch():
                scheduler.enter_forward(unit)
        else:
            scheduler.enter_forward(unit)
        if self.cast_to is not None:
            args, kwargs = self._cast_inputs(args, kwargs)
        # Last of all: a cast's node is the newest then, and needs no view to end the backward at.
        return self._mark_inputs(args, kwargs)

    def _start(self) -> Scheduler:
        """Its first forward: it is a root, or below one from now on."""
        self._starts = True
        return start(self)

    def _recompute(self, scheduler: Scheduler, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """A forward in a backward: a checkpointed one that runs again."""
        unit = self.unit
        if unit.phase is FORWARD:  # a derivative inside of a forward: its parameters are there
            return self._cast_inputs(args, kwargs)
        marks = False
        if unit.phase is not BACKWARD:
            self._enter_backward(recomputes=True)
            # A list that is entered later leaves no telling which of its modules is first.
            marks = unit.phase is BACKWARD or not self._is_list
        scheduler.enter_recomputation(unit)
        args, kwargs = self._cast_inputs(args, kwargs)
        return self._mark_inputs(args, kwargs) if marks else (args, kwargs)

    def _begins_list(self) -> bool:
        """Whether no other module of the list has run in this forward."""
        if self.unit.phase is FORWARD:
            return False
        # An exception may have left some of the last forward's.
        self._still_to_run.update(map(id, self.modules))
        self._returned_parameter = False
        return True

    def _calls_itself(self, module: nn.Module) -> bool:
        """Whether the unit runs inside of itself: the forward around this gathers and frees."""
        if running_calls(module, self) <= 1:
            return False
        self._inner_calls += 1
        return True

    def _begin(self, scheduler: Scheduler, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """A forward begins that is not inside of another; its inputs are moved to the device."""
        if scheduler.is_running or scheduler.iteration.failed:
            scheduler.reset()
        for hooks in self.outside:
            hooks.pop(OUTSIDE, None)
        first = self._first_group
        if self._registrations != Counts.registrations or (first and not is_registered(first)):
            scheduler = self._check_registrations(scheduler)
        scheduler.begin_forward(self.unit, torch.is_grad_enabled())
        if self._device.type == "cpu":
            return args, kwargs
        device = self._device

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

        return map_tensors(move, args), map_tensors(move, kwargs)

    def _check_registrations(self, scheduler: Scheduler) -> Scheduler:
        """Something was registered since: find new units and ties, refuse what none manages."""
        if torch.compiler.is_exporting():  # registers modules, and calls no hook for an exception
            raise tracing_error(f"unit '{self.unit.title}'", "torch.export")
        self._registrations = -1  # until nothing is refused
        fresh, self._starts = self._starts, False
        if self.unit.is_root and not fresh:
            served = {*map(record_of_unit, scheduler.units)}
            scheduler = scheduler if set(served_with(self)) == served else start(self)
        groups = scheduler.groups
        params = [param for group in groups for param in group.params]
        managed: dict[ModuleEntry, ShardedParam] = {}
        shards_alone = True  # whether each entry holds the sharded parameter
        for param in params:
            for entry in param.entries:
                managed[entry] = param
                if entry[0]._parameters.get(entry[1]) is not param.sharded:
                    shards_alone = False
        moves: list[Move] = []
        if not shards_alone:
            known = {id(form) for param in params for form in param.forms()}
            for group in groups:
                follow_replaced(group, known)
            moves = find_emptied(managed)
        inside: list[UnitRecord] = []
        for module in self.modules:
            below = records_below(module)
            inside += below
            ignored = {entry for record in below for entry in record.ignored}
            moves += find_moves(module, params, managed, ignored)
        if moves:
            scheduler.wait_for_reductions()
            take_up(moves, scheduler.units)
            scheduler.refresh()
        inner = [group for record in inside for group in record.unit.own_groups]
        self._first_group = inner[0] if inner else None
        as_found = set(groups) if shards_alone and not moves else set()
        for group in inner:
            if not group.state.is_sharded or group not in as_found:
                put_back(group)
        self._watch_outside(self.unit.is_root)
        self._registrations = Counts.registrations
        return scheduler

    def _watch_outside(self, is_root: bool) -> None:
        """Find the modules that `_explain_outside` watches between forwards of a root."""
        for hooks in self.outside:
            hooks.pop(OUTSIDE, None)
        self.outside.clear()
        groups = self.unit.own_groups if is_root and not self._is_list else ()
        for module in {owner for group in groups for owner in owners_of(group)}:
            if RECORD not in module.__dict__:
                module._forward_hooks_always_called[OUTSIDE] = True  # type: ignore[index]  # torch numbers them
                self.outside.append(module._forward_hooks)  # type: ignore[arg-type]

    def _cast_inputs(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if self.cast_to is None:
            return args, kwargs
        return cast(args, self.cast_to), (cast(kwargs, self.cast_to) if kwargs else kwargs)

    def post_forward(self, module: nn.Module, args: Args, output: object) -> object:
        """Free; mark where backward enters the unit; cast outputs. Or explain an exception."""
        if output is None and (failure := failure_of(module)) is not None:
            self.forward_raised(failure)
            return None
        scheduler = self.scheduler
        assert scheduler is not None
        transformed = _transformed()
        seen, on_grad = output, self._on_output_grad
        if transformed:
            seen = map_tensors(unbatched, output)
            if not _outlives_transform(seen):
                on_grad = self._on_transformed_grad
        if torch.is_grad_enabled():
            keep = self._mark_output(seen, args, on_grad)
        else:
            keep = _holds_parameter(seen)
        if self._inner_calls:
            self._inner_calls -= 1
        elif _in_backward() != _OUTSIDE:
            pass  # a checkpointed forward that ran again: its backward is next
        elif transformed:
            with torch._C._DisableFuncTorch():
                self._exit_forward(scheduler, module, keep)
        elif self._is_list:
            self._exit_forward(scheduler, module, keep)
        else:
            scheduler.exit_forward(self.unit, keep)
        for hooks in self.outside:
            hooks[OUTSIDE] = _explain_outside
        dtype = self._output_dtype
        return output if dtype is None else cast(output, dtype)

    def forward_raised(self, failure: BaseException) -> None:
        """Report the exception. If a caller catches it, the enclosing forward may continue."""
        scheduler = self.scheduler
        if scheduler is None:
            return
        forward_raised(failure, scheduler.units)
        if self._inner_calls:
            self._inner_calls -= 1
        elif _in_backward() != _OUTSIDE:
            pass  # one that ran again: a checkpoint ends it by an exception when it has enough
        elif scheduler.iteration.forward_root is self.unit:
            scheduler.fail()
        elif self.unit.phase is FORWARD and not self._is_list:
            scheduler.give_up_forward(self.unit)

    def _exit_forward(self, scheduler: Scheduler, module: nn.Module, keep: bool) -> None:
        """Leave the unit; of a list, when the last of its modules has run."""
        if not self._is_list:
            scheduler.exit_forward(self.unit, keep)
            return
        self._still_to_run.discard(id(module))
        self._returned_parameter = self._returned_parameter or keep
        if not self._still_to_run:
            scheduler.exit_forward(self.unit, self._returned_parameter)
        elif scheduler.iteration.forward_root is self.unit:
            # One module of a list, called on its own (a head, chunk by chunk): backward is next,
            # so that the parameters stay.
            self._still_to_run.clear()
            scheduler.exit_forward(self.unit, keep=True)

    # ---- backward

    def _mark_inputs(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Mark where backward leaves the unit: at the gradients of its inputs (decision 2).

        Autograd runs the newest ready node first. When the gradient of the node in front of the
        unit arrives, all nodes of the unit have therefore run, and its parameters have their
        gradients, without counting them.
        """
        if not torch.is_grad_enabled() or not self.unit.groups:  # nothing to free and to reduce
            return args, kwargs
        if len(args) == 1 and type(args[0]) is torch.Tensor and not kwargs:  # as in most calls
            tensor = args[0]
            if not tensor.requires_grad or self._hook_own_node(tensor):
                return args, kwargs
            return (self._hooked_view(tensor),), kwargs
        found: list[torch.Tensor] = []
        grad_tensors(args, found)
        if kwargs:
            grad_tensors(kwargs, found)
        if len(found) > 1 and _transformed():
            found.clear()  # torch.func has no room for such a node: the end of backward will do
        # Autograd runs each device's nodes newest first; those of others tell nothing of the unit.
        if not found or any(t.device == self._device and self._hook_own_node(t) for t in found):
            return args, kwargs
        direct = [value for value in (*args, *kwargs.values()) if _requires_grad(value)]
        if not direct:  # all are in containers, which are never replaced by copies
            self._hook_newest(found)
            return args, kwargs
        if len(direct) == 1 and type(direct[0]) is torch.Tensor:
            marked = iter((self._hooked_view(direct[0]),))
        else:  # one node for all costs less than a view of each
            marked = iter(_ExitBackward.apply(self.leave_backward, *direct))
        args = tuple(next(marked) if _requires_grad(value) else value for value in args)
        return args, {k: next(marked) if _requires_grad(v) else v for k, v in kwargs.items()}

    def _hook_newest(self, found: list[torch.Tensor]) -> None:
        """End the unit's backward at the gradient of the newest input in a container.

        Containers stay the same objects: a forward may change them, for example a key-value cache,
        and its caller reads them. No view has all its uses in the unit then, but most uses of the
        newest tensor are. A leaf has no position in the order of nodes.
        """
        nodes = [(t.grad_fn._sequence_nr(), t) for t in found if t.grad_fn is not None]
        here = [pair for pair in nodes if pair[1].device == self._device]
        if here:
            _on_gradient(max(here, key=operator.itemgetter(0))[1], self.leave_backward, self)

    def _hook_own_node(self, tensor: torch.Tensor) -> bool:
        """End the unit's backward at an input's own gradient, if no node is newer than the input's.

        In this case only the unit and newer nodes can use it: its gradient is complete when the
        unit's nodes have run. Other inputs may have older uses (an encoder's output, in each block
        of a decoder), for which the unit should not wait (decision 2).
        """
        node = tensor.grad_fn if type(tensor) is torch.Tensor else None
        if node is None or node._sequence_nr() + 1 != next_node():
            return False
        _on_gradient(tensor, self.leave_backward, self)
        return True

    def _hooked_view(self, tensor: torch.Tensor) -> torch.Tensor:
        # A view costs half of a custom function, and a user may modify it in place. This is the
        # one whose backward runs nothing: that of `view_as` makes a view of the gradient.
        alias = tensor[...]
        _on_gradient(alias, self.leave_backward, self)
        return alias

    def _mark_output(
        self, output: object, args: Args, on_grad: Callable[[torch.Tensor], None]
    ) -> bool:
        """Mark where backward enters the unit, by ``on_grad``; returns as `_holds_parameter`."""
        found: list[torch.Tensor] = []
        holds = False
        if type(output) is torch.Tensor and output.requires_grad:
            found.append(output)
        else:
            others: list[torch.Tensor] = []
            grad_tensors(output, found, others)
            holds = any(map(_holds_parameter, others))
        for tensor in found:
            _on_gradient(tensor, on_grad, self.unit)
            base = tensor._base
            if base is None and type(tensor) is torch.Tensor:
                continue
            if base is None or base.grad_fn is None:
                holds = holds or _holds_parameter(tensor)
            elif not _is_base(base, args):
                # An in-place operation on a view routes its gradient around the view's own
                # node, straight to the node of its base.
                base.grad_fn.register_prehook(self._on_base_grad)
        return holds

    def _on_output_grad(self, grad: torch.Tensor) -> None:
        if self.unit.phase is not BACKWARD or self._is_behind():
            self._enter_backward(grad)

    def _on_transformed_grad(self, grad: torch.Tensor) -> None:
        """For an output that only torch.func records, which it does even for an unused record."""
        if self.unit.phase is not BACKWARD or self._is_behind():
            self._enter_backward(grad, records=outlives_transform(grad))

    def _on_base_grad(self, grads: object) -> None:
        unit = self.unit
        if unit.phase is REDUCED and not unit.visits:
            return  # it returned a view of its input: its backward is over
        if unit.phase is not BACKWARD or self._is_behind():
            self._enter_backward()

    def enter_backward_aside(self) -> bool:
        """A gradient comes to a node of the unit's; whether no output had a gradient before."""
        unit = self.unit
        if unit.phase in (FORWARD, BACKWARD):
            return False  # its parameters are there, whichever of its calls it is in
        self._enter_backward()
        return True

    def _is_behind(self) -> bool:
        """Whether this gradient is an earlier call's; the one that the unit was in is left then."""
        assert self.scheduler is not None
        return self.scheduler.leave_later_call(self.unit)

    def _enter_backward(
        self, grad: torch.Tensor | None = None, recomputes: bool = False, records: bool = True
    ) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        now = scheduler.iteration
        if not now.in_backward:
            # Recomputation enables grad in every backward; otherwise it means create_graph=True.
            holds = torch.is_grad_enabled() and records and not recomputes
            self._begin_backward(scheduler, holds)
            if holds:
                self._watch_parameters(scheduler)
        elif now.ending() is None:
            raise coded(
                ShardingStateError,
                "backward-after-a-failed-one",
                f"the last backward of '{self.unit.title}' ended with an exception and left "
                f"incomplete gradients; call reset_iter_state() on the root, or run the forward "
                f"again before the next backward",
            )
        if now.graph is not None and grad is not None:
            # As long as these live: what the gradient comes from, and forward's node that it is of.
            nodes: tuple[Any, ...] = (grad.grad_fn, torch._C._current_autograd_node())
            for node in nodes:
                if node is not None:
                    node.metadata.setdefault(GRAPHS, set()).add(now.graph)
        scheduler.enter_backward(self.unit, running_node() if recomputes else None)

    def _begin_backward(self, scheduler: Scheduler, records: bool) -> None:
        end = self._end_backward
        # Autograd alone holds it, as long as this backward runs. An exception drops it uncalled:
        # the next gradient finds the reference dead, and knows that those before are incomplete.
        scheduler.begin_backward(weakref.ref(end), records)
        Variable._execution_engine.queue_callback(end)

    def _watch_parameters(self, scheduler: Scheduler) -> None:
        """A graph is recorded whose own backward may reach parameters, but no output of a unit."""
        reference = weakref.ref(self)

        def on_parameter(_: torch.Tensor) -> None:
            record = reference()
            if record is not None:
                record._on_parameter_grad()

        for group in scheduler.groups:
            for param in group.params:
                full = param.unsharded
                form = form_of(full)
                if full is None or form is None or form.watched or not full.requires_grad:
                    continue
                form.watched = True
                full.register_post_accumulate_grad_hook(on_parameter)

    def _on_parameter_grad(self) -> None:
        """Its end reduces its gradients, whether or not it reaches a unit's output."""
        scheduler = self.scheduler
        if scheduler is not None and not scheduler.iteration.in_backward:
            self._begin_backward(scheduler, torch.is_grad_enabled())

    def _end_backward(self) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        scheduler.end_backward()


def forward_method(module: nn.Module, method: Callable[..., object]) -> Callable[..., object]:
    """``method``, a bound method of a sharded module, run between the hooks of its unit."""
    record = require_record(module)
    assert isinstance(record, UnitHooks)

    def run_between_hooks(self: nn.Module, *args: object, **kwargs: object) -> object:
        args, kwargs = record.pre_forward(self, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except Exception as error:
            record.forward_raised(error)
            raise
        return record.post_forward(self, args, output)

    FORWARD_METHODS.add(run_between_hooks.__code__)  # one, however many methods there are
    return functools.update_wrapper(see_through(run_between_hooks), method)


@uncompiled
def _explain_outside(module: nn.Module, args: Args, output: object) -> None:
    """A forward hook that torch always calls; see the top of this module."""
    failure = failure_of(module) if output is None else None
    if failure is not None:
        forward_raised(failure, all_units())


def _requires_grad(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _holds_parameter(output: object) -> bool:
    """Whether an unsharded parameter, or a view of one, is in ``output``, until backward."""
    if type(output) is torch.Tensor and output._base is None:
        return False
    found: list[torch.Tensor] = []
    grad_tensors(output, found, found)
    owners = [tensor if tensor._base is None else tensor._base for tensor in found]
    return any(type(owner) is not torch.Tensor and gathered_name(owner) for owner in owners)


def _outlives_transform(output: object) -> bool:
    """`outlives_transform` of any tensor in ``output``."""
    found: list[torch.Tensor] = []
    grad_tensors(output, found)
    return any(map(outlives_transform, found))


def _is_base(tensor: torch.Tensor, views: object) -> bool:
    """Whether ``tensor``, or a view of it, is in ``views``: its node is outside of the unit."""
    found: list[torch.Tensor] = []
    grad_tensors(views, found)
    return any(view is tensor or view._base is tensor for view in found)


def _on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], object], key: object) -> None:
    """As ``tensor.register_hook(hook)``, but permanent, one per ``key``: a third of the work."""
    if type(tensor) is not torch.Tensor:
        present: Mapping[int, object] | None = tensor._backward_hooks
        if present is None or hook not in present.values():  # a parameter, at every call
            tensor.register_hook(hook)
        return
    node = tensor.grad_fn  # asked first, it is the node of a view that was changed in place
    hooks: Any = tensor._backward_hooks  # torch knows integers as keys alone
    if hooks is None:
        tensor._backward_hooks = hooks = OrderedDict()  # a handle refers to it weakly
        if node is not None:
            node._register_hook_dict(tensor)  # as torch's method does
    older = list(hooks)
    hooks[key] = hook
    for other in older:  # what came later in forward goes first, as in all of backward
        hooks[other] = hooks.pop(other)  # autograd knows nothing of `move_to_end`
