"""What `fully_shard` makes of a module: the methods that control its unit.

    FSDP<Original> ── FSDPModule ── CommunicationControls ── Original
                        │              what travels, and how
                        └ when parameters come and go, what backward does

Every method changes flags of `Unit` or replaces `GroupOptions`; the scheduler and the groups read
them at their next use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, NoReturn, overload

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from fsdp2.communication import CommunicationControls, hooks_on
from fsdp2.core.assembly import make_groups, move_buffers, settle_in, watch_state_dicts
from fsdp2.core.config import ShardingStateError
from fsdp2.core.hooks import UnitHooks, forward_method, hooks_below, start
from fsdp2.core.optimizer_watch import watch_optimizers
from fsdp2.core.param import ModuleSlots
from fsdp2.core.scheduler import Scheduler
from fsdp2.core.selection import PlacementFn, managed_parameters, plan_parameters, slots_of
from fsdp2.core.states import SHARDED
from fsdp2.core.uncompiled import uncompiled_methods
from fsdp2.core.unit import Unit
from fsdp2.interop import TORCHS, TorchIdentity, replicated_parameters

_WALKS = ("zero_grad", "parameters", "named_parameters", "named_modules")
"""What a class must leave as it is, for `_drop_gradients` to find what ``zero_grad`` would."""


def _drop_gradients(module: nn.Module) -> None:
    """As ``nn.Module.zero_grad()``, without names: thousands of instructions less a parameter."""
    seen: set[int] = set()
    found: list[nn.Module | None] = [module]
    with DisableTorchFunctionSubclass():  # for DTensors' sake (see `fsdp2.core.param`)
        for member in found:  # which grows
            if member is None:
                continue
            for param in member._parameters.values():
                if param is not None:
                    param.grad = None
            children = member._modules
            if children and id(member) not in seen:  # a leaf may come twice
                seen.add(id(member))
                found += children.values()


@uncompiled_methods
class FSDPModule(CommunicationControls, TorchIdentity):
    """What `fully_shard` makes of a module: the methods that control its unit.

    The class comes first in the method resolution order: ``[FSDP<Original>, FSDPModule, …,
    Original]``. It is a subclass of ``torch.distributed.fsdp.FSDPModule``, so that clients of that
    recognise it, but inherits no behaviour. Methods with ``recurse`` also apply to the units below.
    """

    _fsdp2_original: type

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class: a sliced ``nn.Sequential`` is a plain one."""
        original: Any = cls._fsdp2_original
        instance = original.__new__(original, *args, **kwargs)
        instance.__init__(*args, **kwargs)
        return instance

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters; not recursive.

        Args:
            async_op: ``True`` returns a handle while the all-gather may still run; the module's
                forward waits for it if nobody else does. ``False`` (default) waits and returns
                ``None``.
        """
        hooks = hooks_on(self)
        scheduler = hooks.scheduler or _own_scheduler(hooks)
        scheduler.claim(hooks.unit)
        handle = UnshardHandle(scheduler, hooks.unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters and register the sharded ones; not recursive."""
        unit = hooks_on(self).unit
        unit.reshard()
        unit.settle()

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that an exception ended half way.

        Call it on the root after catching the exception; the next iteration then starts clean.
        Everything is freed; gradients that were not reduced are dropped, those already on the
        sharded parameters stay until ``zero_grad()``.
        """
        hooks = hooks_on(self)
        if hooks.scheduler is not None:
            if not hooks.unit.is_root:
                raise ShardingStateError(
                    f"reset_iter_state() was called on '{hooks.unit.name}', which is not the "
                    f"root; call it on the module whose forward you call"
                )
            hooks.scheduler.reset()

    def shard_new_parameters(self, shard_placement_fn: PlacementFn | None = None) -> None:
        """Take over parameters and modules that were added below after `fully_shard`.

        They become one more group of this unit, with the mesh and policies of its call of
        `fully_shard` and what methods have changed since: an adapter in every block is gathered and
        reduced with its block. Parameters of units below and ``ignored_params`` are left alone.
        Call it on every rank, between iterations, then give the parameters to the optimizer. For a
        unit of their own, call `fully_shard` on the new module instead.

        Args:
            shard_placement_fn: as for `fully_shard`, whose own is not kept: it may refer to the
                parameters that it was asked about, whole as they were. Default ``None``.

        Raises:
            RuntimeError: called during forward or backward.
            ValueError: a new parameter cannot be sharded, or is tied to a managed one; the message
                names it.

        Example::

            block.adapter = Adapter(dim)
            block.shard_new_parameters()
            optimizer.add_param_group({"params": block.adapter.parameters()})
        """
        hooks = hooks_on(self)
        if hooks.scheduler is not None:
            _require_outside(hooks.scheduler, "shard_new_parameters")
        unit, arguments = hooks.unit, hooks.arguments
        left_out = replicated_parameters(hooks.modules)
        found = managed_parameters(hooks.modules, left_out, new_to=hooks)
        plans = plan_parameters(found, arguments.axes, shard_placement_fn, hooks.precision)
        groups = make_groups(f"{unit.name or '(root)'} (new)", plans, unit.options, arguments)
        settle_in(groups, unit, [group for near in hooks_below(self) for group in near.unit.groups])
        move_buffers(hooks.modules, arguments.axes.device)
        hooks.ignored = ModuleSlots({*hooks.ignored, *slots_of(hooks.modules, left_out)})
        if hooks.scheduler is not None:
            hooks.scheduler.refresh()
        watch_state_dicts(groups)
        watch_optimizers()  # what they hold may have been replaced

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward reduces gradients.

        Args:
            requires_gradient_sync: ``False`` accumulates full gradients, without communication,
                until a backward with ``True`` reduces the sum. It sets the flag of
                `set_requires_all_reduce` too.
            recurse: whether units below follow. Default ``True``.
        """
        for hooks in hooks_below(self, recurse):
            hooks.unit.sync = requires_gradient_sync
            hooks.unit.all_reduce = requires_gradient_sync
            if not requires_gradient_sync:
                # Gradients that did not come through our hooks, as those of a zero-bubble
                # schedule's weight passes, are summed in the reduce dtype all the same.
                for group in hooks.unit.groups:
                    group.accumulate()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether reductions sum over replicas (HSDP); nothing changes without them.

        Args:
            requires_all_reduce: ``False`` reduce-scatters each backward's gradients and keeps the
                partial sums, one shard's size, until a backward with ``True`` all-reduces the
                total: less memory than no sync at all, less communication than full sync.
            recurse: whether units below follow. Default ``True``.
        """
        for hooks in hooks_below(self, recurse):
            hooks.unit.all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the next backward is the iteration's last.

        Args:
            is_last_backward: ``False`` leaves reductions in flight and a prefetched unit gathered
                for the backward to come: on a device with streams ``.grad``, and what hooks on it
                write, are not to be read before the last. Default behaviour is ``True``.
        """
        _scheduler(self).is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether the caller ends an iteration's backwards with `finalize_backward`.

        For schedules in which reducing gradients is an action of its own. While enabled, it
        supersedes `set_is_last_backward`. Call it on the root, between backwards: the next one
        follows the new mode.

        Args:
            enabled: default behaviour is ``False``.

        Raises:
            RuntimeError: called during backward, or on a module that is not the root.
        """
        scheduler = _scheduler(self)
        _require_root(self, "set_manual_backward_finalization")
        if enabled != scheduler.manual:
            _require_outside(scheduler, "set_manual_backward_finalization")
        scheduler.manual = bool(enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End an iteration's backwards outside autograd: reduce, free, clean up.

        Gradients that wait for a reduction are reduced if `set_requires_gradient_sync` says so
        now, parameters are freed if `set_reshard_after_backward` says so now. Nothing happens
        before the first forward. A backward that is still to come gathers its parameters again.

        Args:
            async_op: ``True`` returns a handle while reductions may still run: wait for it before
                gradients are used, or the next forward is called. ``False`` (default) waits and
                returns ``None``.

        Raises:
            RuntimeError: without `set_manual_backward_finalization`, during forward or backward, on
                a module that is not the root, or before the last handle was waited for.

        Example::

            model.set_manual_backward_finalization(True)
            model.set_requires_gradient_sync(False)
            for batch in batches:
                model(batch).sum().backward()
            model.set_requires_gradient_sync(True)
            model.finalize_backward()
        """
        scheduler = hooks_on(self).scheduler
        if scheduler is None:
            return GradientReductionHandle(None) if async_op else None
        _require_root(self, "finalize_backward")
        _require_outside(scheduler, "finalize_backward")
        if not scheduler.manual:
            raise RuntimeError(
                "finalize_backward() was called on a module whose backwards end by themselves; "
                "call set_manual_backward_finalization(True) before them"
            )
        if scheduler.unawaited:
            raise RuntimeError(
                "finalize_backward() was called before the handle of the last one was waited for; "
                "call its wait()"
            )
        scheduler.finalize(wait=not async_op)
        return GradientReductionHandle(scheduler) if async_op else None

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether backward gathers this unit's parameters; not recursive.

        Args:
            unshard_in_backward: ``False`` where backward does not read them, as an embedding's
                does not. Default behaviour is ``True``. Where a backward reads them all the same,
                as a linear's does, autograd raises that a variable "has been modified".
        """
        hooks_on(self).unit.unshard_in_backward = bool(unshard_in_backward)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next all-gathers wait for the optimizer's step on another stream.

        All-gathers always wait for the current stream, whose memory they take; this adds an event
        of another one. It is used once: pass a new one each iteration. Call it on the root.
        Gradients that the step reads may go when the next forward is through: the current stream
        is behind the event by then, even where that forward gathered nothing.

        Args:
            event: recorded behind the optimizer's step.
        """
        _scheduler(self).post_optim_event = event

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether forward frees the gathered parameters at its end.

        Args:
            reshard_after_forward: as the argument of `fully_shard`, but only a bool.
            recurse: whether units below follow. Default ``True``.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}; give a "
                f"number of ranks to fully_shard(reshard_after_forward=…)"
            )
        for hooks in hooks_below(self, recurse):
            hooks.unit.reshard_after_forward = reshard_after_forward
            hooks.arguments = replace(hooks.arguments, smaller=None)
            for group in hooks.unit.groups:
                group.set_smaller_group(None)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward frees the gathered parameters at its end.

        Args:
            reshard_after_backward: ``False`` saves the next micro-batch's all-gathers for the
                memory of the gathered parameters. An optimizer step makes kept parameters out of
                date: the next forward then gathers them again.
            recurse: whether units below follow. Default ``True``.
        """
        for hooks in hooks_below(self, recurse):
            hooks.unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Choose the units to gather when this unit's forward starts.

        Args:
            modules: sharded modules, in the order of their all-gathers: a list, or a slice of a
                ``ModuleList``; empty returns to the order of the last forward. Two or more overlap
                more and hold more memory.
        """
        hooks_on(self).unit.forward_prefetch = [h.unit for h in _checked_targets(modules)]

    def set_modules_to_backward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Choose the units to gather when this unit's backward starts.

        Args:
            modules: as for `set_modules_to_forward_prefetch`; empty returns to this iteration's
                forward in reverse.
        """
        hooks_on(self).unit.backward_prefetch = [h.unit for h in _checked_targets(modules)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``; gradients that were accumulated without sync go too,
        and partial sums that wait for an all-reduce."""
        hooks = hooks_on(self)
        root = hooks.scheduler if hooks.unit.is_root else None
        if root is None:
            groups = [group for below in hooks_below(self) for group in below.unit.groups]
        else:
            groups = root.groups
        unreduced = []
        if root is None or root.unreduced:
            unreduced = [group for group in groups if group.accumulates]
        if unreduced and hooks.scheduler is not None:
            # They may still add to partial sums, and deliver gradients, which must go as well.
            hooks.scheduler.wait_for_reductions()
        original: Any = self._fsdp2_original
        as_torch = all(getattr(original, name) is getattr(nn.Module, name) for name in _WALKS)
        if set_to_none and as_torch:
            _drop_gradients(self)
        else:
            super().zero_grad(set_to_none)
        for group in unreduced:
            group.discard_gradients()
        if root is not None:
            root.unreduced = False
        for group in groups:
            if group.state is not SHARDED:  # shards are not registered, but their gradients count
                for param in group.params:
                    param.clear_gradient(set_to_none)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`.to()`, `.cuda()`, `.to_empty()` …: on the sharded parameters."""
        self.reshard()
        result = super(TORCHS, self)._apply(*args, **kwargs)
        for group in hooks_on(self).unit.groups:
            group.rebind()
        return result

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be deep-copied: its parameters belong to a process "
            f"group; copy the model before fully_shard, or copy its state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: its parameters belong to a process group; "
            f"save its state_dict() with torch.distributed.checkpoint or torch.save"
        )


@uncompiled_methods
class UnshardHandle:
    """Returned by ``unshard(async_op=True)``."""

    def __init__(self, scheduler: Scheduler, unit: Unit) -> None:
        self._scheduler = scheduler
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Let the current stream wait for the all-gather and register the parameters."""
        if self._unit is not None:
            self._scheduler.wait(self._unit)
            self._unit.settle()
            self._unit = None


@uncompiled_methods
class GradientReductionHandle:
    """Returned by ``finalize_backward(async_op=True)``."""

    def __init__(self, scheduler: Scheduler | None) -> None:
        self._scheduler = scheduler
        self._resets = scheduler.resets if scheduler is not None else 0

    def wait(self) -> None:
        """Wait until gradients may be used: the current stream, and the host for offloaded ones.

        Raises:
            RuntimeError: ``reset_iter_state()`` has dropped the reductions meanwhile.
        """
        scheduler = self._scheduler
        if scheduler is None:
            return
        if scheduler.resets != self._resets:
            raise RuntimeError(
                "the gradients that this handle waits for were dropped by reset_iter_state(); run "
                "the iteration again"
            )
        scheduler.wait_for_reductions()
        self._scheduler = None


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as the chunks of a pipeline stage, share streams.

    Nothing needs to be done: all roots of a device use the same streams, and one pool of memory.

    Args:
        modules: sharded modules.

    Raises:
        ValueError: one of them is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"share_comm_ctx takes sharded modules, but got a {type(module).__name__}; call "
                f"fully_shard on it"
            )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method gather and free parameters as ``forward`` does.

    Args:
        module: the module; nothing happens if it is not sharded.
        method_name: for example ``"generate"``.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(
            f"{type(module).__name__} has no method '{method_name}'; pass the name of one that it "
            f"has, for example 'generate'"
        )
    wrapped = forward_method(hooks_on(module), method)
    setattr(module, method_name, wrapped.__get__(module, type(module)))


# ---- look-ups


def _scheduler(module: Any) -> Scheduler:
    hooks = hooks_on(module)
    return hooks.scheduler or start(hooks)


def _require_root(module: Any, method: str) -> None:
    unit = hooks_on(module).unit
    if not unit.is_root:
        raise RuntimeError(
            f"{method}() was called on '{unit.name}', which is not the root; call it on the "
            f"module whose forward you call"
        )


def _require_outside(scheduler: Scheduler, method: str) -> None:
    if scheduler.in_backward or scheduler.forward_root is not None:
        during = "backward" if scheduler.in_backward else "forward"
        raise RuntimeError(
            f"{method}() was called during {during}; call it after its end, or after an exception "
            f"call reset_iter_state() first"
        )


def _own_scheduler(hooks: UnitHooks) -> Scheduler:
    """A scheduler for a call that comes before the first forward, without choosing a root."""
    return Scheduler([hooks.unit], hooks.streams)


def _checked_targets(modules: Iterable[FSDPModule]) -> list[UnitHooks]:
    # A slice of a ModuleList is a module; a sharded Sequential would be its layers.
    if not isinstance(modules, Iterable) or isinstance(modules, FSDPModule | str):
        raise TypeError(
            f"prefetch lists are lists of sharded modules, not {type(modules).__name__}; pass "
            f"[module]"
        )
    modules = list(modules)
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"prefetch lists hold sharded modules, but got a {type(module).__name__}; call "
                f"fully_shard on it"
            )
    return [hooks_on(module) for module in modules]
