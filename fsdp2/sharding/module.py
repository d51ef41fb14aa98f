"""`FSDPModule`: the methods that control the unit of a sharded module.

Every method changes flags of `Unit` or replaces `GroupOptions`; the scheduler and the groups read
them at their next use.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NoReturn, TypeVar, cast, overload

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.nn.utils.parametrize import is_parametrized

from fsdp2.core.config import EXACT_BELOW, Level, Wire
from fsdp2.core.custom_collectives import AllGather, ReduceScatter
from fsdp2.core.device.collectives import Collectives
from fsdp2.core.device.comm_memory import (
    GroupMemory,
    Memory,
    OwnAllGather,
    OwnReduceScatter,
    SymmetricMemory,
    conflicting,
)
from fsdp2.core.device.process_groups import ProcessGroup, backend_name, with_own_group
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.modules.dynamo import uncompiled_methods
from fsdp2.core.modules.hooks import forward_method
from fsdp2.core.modules.registry import UnitRecord, records_below, refresh, require_record, start
from fsdp2.core.params.param import ModuleEntries
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import PrefetchTime, Unit
from fsdp2.interop import TORCHS, TorchIdentity, replicated_parameters
from fsdp2.sharding.assembly import (
    choose_reshard,
    connect_meshes,
    finish,
    join_unit,
    make_groups,
    process_group,
)
from fsdp2.sharding.plan import PlacementFn, plan_unit

C = TypeVar("C")

_WALKS = ("zero_grad", "parameters", "named_parameters", "named_modules")
"""Methods that a class must not override, so that `_drop_gradients` finds the same as
``zero_grad``.
"""


def _drop_gradients(module: nn.Module) -> None:
    """As ``nn.Module.zero_grad()``, without names: thousands of instructions less per parameter."""
    seen: set[int] = set()
    found: list[nn.Module | None] = [module]
    with DisableTorchFunctionSubclass():  # for DTensors' sake (see `fsdp2.core.params.param`)
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


# ---- handles of asynchronous calls


@uncompiled_methods
class UnshardHandle:
    """The handle that ``unshard(async_op=True)`` returns.

    Example::

        handle: fsdp2.UnshardHandle = model.blocks[0].unshard(async_op=True)
        handle.wait()  # after other work
    """

    def __init__(self, scheduler: Scheduler, unit: Unit) -> None:
        self._scheduler = scheduler
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Make the current stream wait for the all-gather; register the unsharded parameters."""
        if self._unit is not None:
            self._scheduler.hand_over(self._unit)
            self._unit.settle()
            self._unit = None


@uncompiled_methods
class GradientReductionHandle:
    """The handle that ``finalize_backward(async_op=True)`` returns.

    Example::

        model.set_manual_backward_finalization(True)
        model(batch).sum().backward()
        handle: fsdp2.GradientReductionHandle = model.finalize_backward(async_op=True)
        handle.wait()  # before the optimizer
    """

    def __init__(self, scheduler: Scheduler | None) -> None:
        self._scheduler = scheduler
        self._resets = scheduler.resets if scheduler is not None else 0

    def wait(self) -> None:
        """Make the current stream wait for the reductions, and the host for offloaded gradients.

        Raises:
            RuntimeError: ``reset_iter_state()`` has dropped the reductions meanwhile.
        """
        scheduler = self._scheduler
        if scheduler is None:
            return
        if scheduler.resets != self._resets:
            raise coded(
                RuntimeError,
                "handle-outlived",
                "the gradients that this handle waits for were dropped by reset_iter_state(); run "
                "the iteration again",
            )
        scheduler.wait_for_reductions()
        self._scheduler = None


# ---- the class


@uncompiled_methods
class FSDPModule(TorchIdentity):
    """The class that `fully_shard` gives a module: the methods that control its unit.

    The class comes first in the method resolution order: ``[FSDP<Original>, FSDPModule, …,
    Original]``. It is a subclass of ``torch.distributed.fsdp.FSDPModule``, so frameworks recognize
    it, but inherits no behavior. Methods with ``recurse`` also apply to the units
    below.

    Example::

        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    """

    _fsdp2_original: type

    def __init_subclass__(cls, **arguments: object) -> None:
        """Notify the original's bases of a subclass, as Python does, unless they require more
        arguments.
        """
        if "_fsdp2_original" not in cls.__dict__:
            super().__init_subclass__(**arguments)
            return
        with contextlib.suppress(Exception):  # of code of the user's, for classes of the user's
            super().__init_subclass__()

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        """Create an instance of the original class: a sliced ``nn.Sequential`` is a plain one."""
        original: Any = cls._fsdp2_original
        instance = original.__new__(original, *args, **kwargs)
        instance.__init__(*args, **kwargs)
        return instance

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard this unit's parameters; not recursive.

        Args:
            async_op: ``True`` returns a handle while the all-gather may still run; if you do not
                wait for it, the module's forward does. ``False`` (default) waits and returns
                ``None``.
        """
        record = require_record(self)
        # One of its own before the first forward, without choosing a root.
        scheduler = record.scheduler or Scheduler([record.unit], record.streams)
        scheduler.claim(record.unit)
        handle = UnshardHandle(scheduler, record.unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and register the sharded ones; not recursive."""
        unit = require_record(self).unit
        unit.give_up()
        unit.settle()

    def reset_iter_state(self) -> None:
        """Discard the state of a forward or backward that an exception ended.

        Call it on the root after catching the exception; the next iteration then starts clean. It
        reshards all units and drops gradients that were not reduced yet. Gradients that are already
        on the sharded parameters stay there until ``zero_grad()``.

        Raises:
            RuntimeError: called on a module that is not the root.

        Example::

            try:
                model(batch).sum().backward()
            except torch.OutOfMemoryError:
                model.reset_iter_state()
                optimizer.zero_grad()
        """
        record = require_record(self)
        if record.scheduler is not None:
            if not record.unit.is_root:
                raise coded(
                    ShardingStateError,
                    "reset-not-root",
                    f"reset_iter_state() was called on '{record.unit.name}', which is not the "
                    f"root; call it on the module whose forward you call",
                )
            record.scheduler.reset()

    def shard_new_parameters(self, shard_placement_fn: PlacementFn | None = None) -> None:
        """Shard parameters and modules that were added to this module after `fully_shard`.

        They form one more group of this unit: an adapter in a block is unsharded and reduced with
        its block. The group uses the mesh and the policies of the original `fully_shard` call, and
        the settings that were changed since. Parameters of units below and ``ignored_params`` are
        not affected.

        Call it on every rank, between iterations. Then add the parameters to the optimizer. To make
        the new module a separate unit, call `fully_shard` on it instead.

        Args:
            shard_placement_fn: as for `fully_shard`. Default ``None``: the default placements. The
                function passed to `fully_shard` is not used, because fsdp2 does not keep it: it
                might hold references to unsharded parameters.

        Raises:
            RuntimeError: called during forward or backward.
            ValueError: a new parameter cannot be sharded; the message names it.

        Example::

            block.adapter = Adapter(dim)
            block.shard_new_parameters()
            optimizer.add_param_group({"params": block.adapter.parameters()})
        """
        record = require_record(self)
        if record.scheduler is not None:
            _require_outside(record.scheduler, "shard_new_parameters")
        unit, arguments = record.unit, record.arguments
        name = f"{unit.name or '(root)'} (new)"
        left_out = replicated_parameters(record.modules)
        call = plan_unit(
            name,
            record.modules,
            left_out,
            arguments,
            unit.options,
            shard_placement_fn,
            new_to=record,
        )
        call.check()
        connect_meshes(call)
        groups = make_groups(call)
        join_unit(groups, unit, [g for near in records_below(self) for g in near.unit.own_groups])
        record.ignored = ModuleEntries({*record.ignored, *call.left_alone})
        refresh([record])
        finish(call, record, groups)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward reduces gradients, over shards and replicas.

        Args:
            requires_gradient_sync: ``False`` accumulates unsharded gradients on each rank, without
                communication. The next backward with ``True`` (the initial value) reduces their
                sum. The flag of `set_requires_all_reduce` is set to the same value.
            recurse: whether the call applies to units below. Default ``True``.
        """
        for record in records_below(self, recurse):
            record.unit.sync = requires_gradient_sync
            record.unit.all_reduce = requires_gradient_sync
            if not requires_gradient_sync:
                # Gradients that did not come through our hooks, as those of a zero-bubble
                # schedule's weight passes, are summed in the reduce dtype all the same.
                for group in record.unit.groups:
                    group.accumulate()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backward sums gradients over replicas (HSDP).

        Without replicas it has no effect. For parameters replicated on every rank
        (``Replicate()`` from ``shard_placement_fn``), the other ranks are replicas.

        Args:
            requires_all_reduce: ``False`` only reduce-scatters the gradients of each backward, and
                accumulates the results in memory of the size of one shard. The next backward with
                ``True`` (the initial value) all-reduces the total. This takes less memory than
                `set_requires_gradient_sync(False)`, and communicates less than full reductions.
            recurse: whether the call applies to units below. Default ``True``.
        """
        for record in records_below(self, recurse):
            record.unit.all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the next backward is the iteration's last.

        Args:
            is_last_backward: with ``True`` (the initial value), backward waits for its reductions
                and frees prefetched units. With ``False``, reductions may still run when it
                returns, and a unit may stay unsharded for the next backward; a forward in between
                does not check whether shards were written, so do not write any. On a device with
                streams, do not read ``.grad``, or values written by gradient hooks, before the last
                backward.
        """
        _scheduler(self).is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether you end an iteration's backwards yourself, with `finalize_backward`.

        Use it for schedules in which the reduction of gradients is a separate step. While it is
        enabled, `set_is_last_backward` has no effect. Call it on the root, between backwards. It
        takes effect in the next backward.

        Args:
            enabled: ``True`` requires you to call `finalize_backward`. The initial value is
                ``False``.

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
        """End an iteration's backwards: reduce gradients, reshard parameters, clean up.

        The current values of the flags apply: `set_requires_gradient_sync` determines whether
        waiting gradients are reduced, `set_reshard_after_backward` whether parameters are
        resharded. A later backward gathers its parameters again. Before the first forward the call
        has no effect.

        Args:
            async_op: ``False`` (default) waits for the reductions and returns ``None``. ``True``
                returns a handle while they may still run. Wait for it before you use gradients or
                call the next forward.

        Raises:
            RuntimeError: without `set_manual_backward_finalization`, during forward or backward, on
                a module that is not the root, or before you waited for the last handle.

        Example::

            model.set_manual_backward_finalization(True)
            model.set_requires_gradient_sync(False)
            for batch in batches:
                model(batch).sum().backward()
            model.set_requires_gradient_sync(True)
            model.finalize_backward()
        """
        scheduler = require_record(self).scheduler
        if scheduler is None:
            return GradientReductionHandle(None) if async_op else None
        _require_root(self, "finalize_backward")
        _require_outside(scheduler, "finalize_backward")
        if not scheduler.manual:
            raise coded(
                RuntimeError,
                "not-manual",
                "finalize_backward() was called on a module that finalizes its backward itself; "
                "call set_manual_backward_finalization(True) before backward",
            )
        if scheduler.iteration.unawaited:
            raise coded(
                RuntimeError,
                "finalized-twice",
                "finalize_backward() was called again before wait() on the handle of the last "
                "call; call wait() on that handle first",
            )
        scheduler.finalize(wait=not async_op)
        return GradientReductionHandle(scheduler) if async_op else None

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether backward unshards this unit's parameters; not recursive.

        Args:
            unshard_in_backward: ``False`` saves the all-gather if backward does not read the
                parameters, as for an embedding. The backward of a linear layer does read them;
                autograd then raises that a variable "has been modified". The initial value is
                ``True``.

        Example::

            fully_shard(model.embed).set_unshard_in_backward(False)
        """
        require_record(self).unit.unshard_in_backward = bool(unshard_in_backward)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the next all-gathers wait for an optimizer step on a stream of your own.

        All-gathers always wait for the current stream. Call this if the optimizer steps on another
        one. Call it on the root, in each iteration: an event is used once.

        Keep the gradients that the step reads until the next forward has returned. The current
        stream has waited for the event by then, even if that forward gathered nothing.

        Args:
            event: recorded after the optimizer's step.

        Example::

            with torch.cuda.stream(stream):
                optimizer.step()
            model.set_post_optim_event(stream.record_event())
        """
        _scheduler(self).post_optim_event = event

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether forward reshards the parameters at its end.

        Args:
            reshard_after_forward: as the argument of `fully_shard`, but a bool: with ``True``,
                forward reshards them and backward gathers them again.
            recurse: whether the call applies to units below. Default ``True``.

        Raises:
            ValueError: it is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise coded(
                ValueError,
                "set-reshard-type",
                f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}; give a "
                f"number of ranks to fully_shard(reshard_after_forward=…)",
            )
        for record in records_below(self, recurse):
            choose_reshard(record, reshard_after_forward)

    def _choose_reshard(self, value: bool | int) -> None:
        """As an attribute of torch's state does (`fsdp2.interop.identity`)."""
        choose_reshard(require_record(self), value)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward reshards the parameters at its end.

        Args:
            reshard_after_backward: ``False`` retains them in memory. The next micro-batch then
                needs no all-gathers, if no shard was written meanwhile, which fsdp2 checks. The
                sharded parameters are registered after backward, with their gradients. An optimizer
                step makes retained ones out of date, so that the next forward gathers again. The
                initial value is ``True``.
            recurse: whether the call applies to units below. Default ``True``.
        """
        for record in records_below(self, recurse):
            record.unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Choose the units to prefetch when this unit's forward starts.

        By default fsdp2 prefetches the unit that came next in the last forward.

        Args:
            modules: sharded modules, in the order in which they are gathered: a list, or a slice of
                a ``ModuleList``. Two or more overlap more and take more memory. An empty list
                restores the order of the last forward.

        Raises:
            TypeError: it is not a list of modules.
            ValueError: one of the modules is not sharded.
        """
        require_record(self).unit.forward_prefetch = _checked_targets(modules)

    def set_modules_to_backward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Choose the units to prefetch when this unit's backward starts.

        By default fsdp2 prefetches the unit that came before in this iteration's forward.

        Args:
            modules: as for `set_modules_to_forward_prefetch`. An empty list restores the reverse
                order of this iteration's forward.

        Raises:
            TypeError: it is not a list of modules.
            ValueError: one of the modules is not sharded.

        Example::

            for i, block in enumerate(model.blocks):
                block.set_modules_to_backward_prefetch(model.blocks[max(i - 2, 0) : i][::-1])
        """
        require_record(self).unit.backward_prefetch = _checked_targets(modules)

    # ---- dividing and summing

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks; not recursive.

        By default gradients are averages over all data-parallel ranks.

        Args:
            factor: a positive number. ``1.0`` leaves the sum unchanged. ``None`` restores
                averaging.

        Raises:
            ValueError: it is not a positive number.

        Example::

            model.set_gradient_divide_factor(1.0)  # sums over ranks
        """
        if factor is None:
            self._change(divide_factor=None)
            return
        if not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise coded(
                ValueError,
                "divide-factor",
                f"set_gradient_divide_factor takes a positive number, not {factor!r}; pass for "
                f"example 1.0 to sum over the ranks",
            )
        self._change(divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """The older name of `set_gradient_divide_factor`.

        Example::

            model.set_reduce_scatter_divide_factor(1.0)
        """
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce only with sums, and divide in a separate kernel; not recursive.

        Some transports cannot average, such as NCCL's zero-copy ones.

        Args:
            enable: ``True`` keeps averages out of collectives. With `set_symm_mem_for_comm`,
                reduce-scatters then also use symmetric memory. The initial value is ``False``.

        Example::

            model.set_force_sum_reduction_for_comms(True)
        """
        self._change(sum_only=bool(enable))

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether a parameter without a gradient takes part in reductions, as zeros.

        Use it for models in which ranks use different units: experts of a mixture, branches that
        depend on the data. A rank whose loss does not use a unit then still runs that unit's
        collectives, in the same order as the other ranks. Without it, the other ranks wait for that
        rank.

        Ranks that use different parameters of one unit do not need this call. They run the same
        collectives in any case, and a parameter gets a ``.grad`` on all ranks if any rank has used
        it. With this call every parameter gets a ``.grad``, which is zero if no rank has used it.
        The host then does not wait at the end of backward to find out which parameters have
        gradients: a captured CUDA graph needs this.

        All ranks must follow four rules:

        - They run the same forwards.
        - If an iteration has several backwards, they call `set_is_last_backward(False)` before all
          but the last.
        - If one checkpointed region contains several units, all ranks recompute it, or none does.
          Its units are unsharded in the order of forward.
        - If a forward takes a derivative with ``create_graph=True``, a backward that is not the
          last uses that derivative on all ranks, or on none.

        Args:
            reduce_scatter_unused_params: ``True`` reduces absent gradients as zeros. The initial
                value is ``False``.
            recurse: whether the call applies to units below. Default ``True``.
        """
        self._change(recurse=recurse, reduce_unused=bool(reduce_scatter_unused_params))
        for record in self._records(recurse):
            if record.scheduler is not None:
                record.scheduler.refresh()

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None] | None,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Call ``hook`` with this unit's reduced gradients, before they become ``.grad``.

        Args:
            hook: called with one flat tensor in the reduce dtype, which it may change in place: the
                output of the reduce-scatter, or with replicas that of the all-reduce. fsdp2 calls
                it once per dtype in which the unit's parameters reduce. After the rows of
                gradients, the tensor holds one small number per parameter, which marks the ranks
                that had a gradient: a hook that sums over more ranks must sum the full tensor.
                ``None`` removes the hook.
            stream: the stream on which the hook runs. It starts after the reduction, and ``.grad``
                waits for it. ``None`` (default): the stream of all-reduces. Only without a
                replicate axis.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: the unit has parameters on several meshes, or replicas and a stream.

        Example::

            model.set_all_reduce_hook(lambda reduced: dist.all_reduce(reduced, group=more_replicas))
        """
        if hook is not None and not callable(hook):
            raise coded(
                TypeError,
                "reduce-hook-type",
                f"set_all_reduce_hook takes a function of a tensor, not {hook!r}; pass None to "
                f"remove a hook",
            )
        group = self._one_group("set_all_reduce_hook")
        if stream is not None and group is not None and group.replicas is not None:
            raise coded(
                ValueError,
                "reduce-hook-stream",
                "set_all_reduce_hook(stream=…) cannot be used with a replicate axis, whose "
                "all-reduce stream runs the hook; leave stream out",
            )
        self._change(all_reduce_hook=hook, all_reduce_hook_stream=stream)

    # ---- collectives

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit's parameters with ``comm``; not recursive.

        It takes effect in the next all-gather. An all-gather is then one collective, in two calls:
        ``comm.allocate((ranks * n,), dtype=…, device=…)`` returns the output, and
        ``comm(output_tensor=…, input_tensor=…, group=…)`` fills it. The input is this rank's part
        of the output. Parameters of several dtypes are sent together as bytes (uint8). Tensor
        subclasses with all-gather hooks are sent as bytes in a separate collective. A single rank
        calls nothing.

        A custom collective that is set later replaces this one,
        `set_allocate_memory_from_process_group_for_comm` and `set_symm_mem_for_comm`.

        Args:
            comm: allocates the collective's buffer and runs it; see `AllGather`.

        Raises:
            TypeError: ``comm`` has no ``allocate`` or cannot be called.
            ValueError: the unit has parameters on several meshes.

        Example::

            model.set_custom_all_gather(Logged())  # of the example of fsdp2.AllGather
        """
        method = "set_custom_all_gather"
        self._one_group(method)
        self._change(all_gather=_checked_comm(comm, method))

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this unit's gradients with ``comm``; not recursive.

        It takes effect in the next reduction. A reduction is then one collective per dtype, and a
        small built-in one that marks which ranks had a gradient. ``comm.allocate`` is called twice,
        for the input ``(ranks * n,)`` and the output ``(n,)``; ``comm(output_tensor=…,
        input_tensor=…, group=…, op=…)`` runs it. fsdp2 copies gradients out of the output at once,
        so you may reuse its memory. A single rank calls nothing.

        Args:
            comm: allocates the collective's buffers and runs it; see `ReduceScatter`.

        Raises:
            TypeError: ``comm`` has no ``allocate`` or cannot be called.
            ValueError: the unit has parameters on several meshes.

        Example::

            model.set_custom_reduce_scatter(Logged())  # of the example of fsdp2.ReduceScatter
        """
        method = "set_custom_reduce_scatter"
        self._one_group(method)
        self._change(reduce_scatter=_checked_comm(comm, method))

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Choose whether reduce-scatters use a separate process group.

        In one group the backend runs collectives one after the other. With two groups,
        reduce-scatters overlap all-gathers. Creating a group communicates: call this on all ranks
        in the same way.

        Args:
            enable: ``True`` (default) creates the group. ``False`` returns to the group of
                all-gathers.
            recurse: whether the call applies to units below. Default ``True``.

        Example::

            model.set_separate_reduce_scatter_group()
        """
        made: dict[ProcessGroup, Collectives] = {}
        for group in self._groups(recurse):
            shared = group.collectives
            if shared.group is None:
                continue
            if not enable:
                group.set_reducers(shared)
                continue
            if shared.group not in made:
                made[shared.group] = with_own_group(shared, group.device)
            group.set_reducers(made[shared.group])
        for record in self._records(recurse):
            if record.scheduler is not None:
                record.scheduler.connected = False

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Choose how many reductions may hold their inputs in memory at the same time.

        Args:
            max_input_buffers: with ``1`` (the initial value), the compute stream waits for one
                reduce-scatter before it prepares the input of the next. A larger number overlaps
                more, and takes more memory. The largest number of all units below a root applies.
            recurse: whether the call applies to units below. Default ``True``.

        Raises:
            TypeError: it is not an int.
            ValueError: it is below 1.

        Example::

            model.set_reduce_scatter_max_input_buffers(2)
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise coded(
                TypeError,
                "input-buffers-type",
                f"set_reduce_scatter_max_input_buffers takes an int, not {max_input_buffers!r}",
            )
        if max_input_buffers < 1:
            raise coded(
                ValueError,
                "input-buffers-value",
                f"set_reduce_scatter_max_input_buffers takes 1 or more, not {max_input_buffers}",
            )
        records = self._records(recurse)
        for record in records:
            record.unit.input_buffers = max_input_buffers
        refresh(records)

    def set_wire_format(
        self,
        *,
        gather: str | None = None,
        reduce: str | None = None,
        differences: bool = False,
        feedback: bool = False,
        rotate: bool = False,
        level: Level = "all",
        exact: Callable[[str, nn.Parameter], bool] | None = None,
        exact_below: int = EXACT_BELOW,
        recurse: bool = True,
    ) -> None:
        """Send parameters, gradients or both in fewer bytes between the ranks of the shard axis.

        All ranks compute with the same bits, and the sharded parameters stay exact. Errors of each
        format, and what stays unencoded, are in the guide on slow networks.

        It takes effect in the next all-gather. All ranks must make the same choice. Parameters that
        stay exact use separate collectives.

        Args:
            gather: ``"int8"``, ``"int4"`` (1.03 and 0.53 bytes per number), or ``None`` (default):
                parameters are sent in the compute dtype.
            reduce: ``"fp32"``, ``"bf16"``, ``"int8"``, ``"int4"``, or ``None`` (default): gradients
                are sent in the reduce dtype. Encoded ones are sent by one all-to-all, and each rank
                sums them in fp32, in the order of ranks.
            differences: whether messages of parameters hold differences to the values gathered
                last, which stay on each rank, in the compute dtype: parameters are sent once per
                optimizer step. They are state of training (`fsdp2.checkpoint.WireState`). Default
                ``False``.
            feedback: whether each rank adds the rounding errors of its gradient messages to its
                next ones (error feedback). This takes memory for an unsharded gradient of each unit
                in bf16 on each rank, and is state of training. Default ``False``.
            rotate: whether blocks of 128 gradient numbers are rotated before encoding, so that a
                single large number costs its neighbors less precision. Default ``False``.
            level: the level of a mesh (`fsdp2.Levels`) to which the formats apply: ``"inside"`` a
                node, ``"between"`` nodes, or ``"all"`` (default). The other level is unchanged.
                With one level, or with replicas (HSDP), the shard axis is inside. Differences,
                rotation and feedback apply only inside.
            exact: called once with each parameter's name below this module and the parameter.
                Parameters for which it returns true are sent without a format. Default ``None``:
                none of the larger ones.
            exact_below: parameters with fewer elements (unsharded) than this are sent without a
                format. Default 16384.
            recurse: whether the call applies to units below. Default ``True``.

        Raises:
            ValueError: a format is unknown, ``feedback`` or ``rotate`` is given without ``reduce``,
                ``differences`` without ``gather``, or a parameter that is not exact cannot be
                encoded: its dtypes are not fp32, bf16 or fp16, or its tensor subclass has
                all-gather hooks. Nothing has changed in this case.

        Example::

            model.set_wire_format(
                gather="int8", reduce="bf16", exact=lambda name, _: "embed" in name
            )
        """
        from fsdp2.sharding.wire import set_wire_format  # who does not use it does not load it

        wire = Wire(gather, reduce, differences, rotate=rotate, feedback=feedback)
        module, records = cast(nn.Module, self), self._records(recurse)
        set_wire_format(module, records, wire, exact, exact_below, level)

    # ---- memory

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether resharded parameters keep the memory of their unsharded form.

        Unsharded parameters then have the same addresses in every step, as the capture of CUDA
        graphs requires. They take this memory permanently.

        Args:
            keep: ``True`` keeps it. The initial value is ``False``.
            recurse: whether the call applies to units below. Default ``True``.
        """
        self._change(recurse=recurse, keep_storage=bool(keep))

    def set_tuning(
        self,
        *,
        prefetch_window: int | None = None,
        backward_prefetch: PrefetchTime | None = None,
        keep_rows: bool | None = None,
        keep_gradients: bool | None = None,
        pack_below: int | None = None,
        recurse: bool = True,
    ) -> None:
        """Trade memory for time; results stay bitwise identical.

        Args:
            prefetch_window: how many units are prefetched while one computes: 1 (the initial value)
                or more, the same on all ranks; the largest number of all units below a root applies
                to all of them. A larger number helps if a small unit precedes a large one, and
                takes the memory of as many unsharded units. The order is that of the last forward,
                or that of `set_modules_to_forward_prefetch`.
            backward_prefetch: when backward prefetches the next unit. ``BEFORE`` (the initial
                value) gathers it before this unit's backward computes. ``AFTER`` gathers it when
                this unit is resharded, before its gradients are reduced: this takes one unsharded
                unit less memory, and overlaps only with the reduction. ``NEVER`` gathers each unit
                when it is needed.
            keep_rows: whether gathered rows are kept until an optimizer steps, so that parameters
                are sent over the outer network once per step: those of a node with `Levels`
                (initially kept), those of the smaller group with ``reshard_after_forward=<int>``,
                otherwise all (initially not). They are reused while shards are unchanged: as a
                forward begins, ranks compare fingerprints of them. ``reshard()`` frees them.
            keep_gradients: whether sharded gradients keep their memory and their ``.grad`` objects,
                so that a step allocates nothing for them and their addresses stay constant.
                ``zero_grad()`` then does not free them, and a reference to an old ``.grad`` shows
                the new gradient: clone values that you need to keep. On a mesh of one rank nothing
                is kept. The initial value is ``False``.
            pack_below: parameters whose gathered piece on a rank has fewer bytes than this, in the
                gathered dtype, are copied into one buffer, if a unit has several of the same
                dtypes: backends may send many small parameters only slowly. The initial value is
                131072 (128 KiB); ``0`` packs only what must be packed. All ranks must choose the
                same value. A change moves the shards to another flat buffer, as ``.to()`` does.
            recurse: whether the call applies to units below. Default ``True``.

        Settings that are ``None`` (default) stay as they are. Others take effect in the next
        all-gather or reduction.

        Raises:
            TypeError: a number is not an int, or ``backward_prefetch`` is not a `PrefetchTime`.
            ValueError: a number is too small.

        Example::

            model.set_tuning(prefetch_window=2, backward_prefetch=PrefetchTime.AFTER)
            model.set_tuning(keep_rows=True)  # parameters are sent once per optimizer step
        """
        for name, value, least in (
            ("prefetch_window", prefetch_window, 1),
            ("pack_below", pack_below, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise coded(
                    TypeError, "tuning-type", f"set_tuning({name}=…) takes an int, not {value!r}"
                )
            if value is not None and value < least:
                raise coded(
                    ValueError,
                    "tuning-value",
                    f"set_tuning({name}=…) takes {least} or more, not {value}",
                )
        if not isinstance(backward_prefetch, PrefetchTime | None):
            raise coded(
                TypeError,
                "backward-prefetch",
                f"set_tuning(backward_prefetch=…) takes a fsdp2.PrefetchTime, not "
                f"{backward_prefetch!r}",
            )
        chosen = {
            "pack_below": pack_below,
            "keep_rows": keep_rows,
            "keep_gradients": keep_gradients,
        }
        options = {name: value for name, value in chosen.items() if value is not None}
        records = self._records(recurse)
        for record in records:
            if options:
                record.unit.change(**options)
            if prefetch_window is not None:
                record.unit.prefetch_window = prefetch_window
            if backward_prefetch is not None:
                record.unit.prefetches = backward_prefetch
        refresh(records)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Choose whether collectives' buffers come from the process group; not recursive.

        The backend can send memory from its own allocator without copies (NCCL: over NVLink or
        InfiniBand SHARP). Parameters and gradients are packed into such buffers.

        Args:
            enable: ``True`` uses the allocator from the next all-gather and reduction on; a backend
                without an allocator gets plain memory. ``False`` restores the built-in allocation.
                The initial value is ``False``.

        Raises:
            ValueError: the unit has custom collectives, or collectives in symmetric memory.

        Example::

            model.set_allocate_memory_from_process_group_for_comm(True)
        """
        self._check_memory("set_allocate_memory_from_process_group_for_comm", GroupMemory, enable)
        unit = require_record(self).unit
        comms = {g: c for g, c in unit.comms.items() if isinstance(c[0].memory, SymmetricMemory)}
        for shared in filter(None, map(process_group, unit.own_groups)) if enable else ():
            memory = GroupMemory(shared)
            comms[shared] = OwnAllGather(memory), OwnReduceScatter(memory)
        unit.set_comms(comms)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Allocate the buffers of all-gathers in symmetric memory; not recursive.

        Reduce-scatters also use it after `set_force_sum_reduction_for_comms(True)`: NCCL's
        symmetric ones cannot average.

        Args:
            backend: only ``"NCCL"``, the default.

        Raises:
            ValueError: ``backend`` is another one, the process group has another one, or the unit
                has custom collectives or collectives in memory of the process group.

        Example::

            model.set_symm_mem_for_comm()
        """
        method = "set_symm_mem_for_comm"
        if backend != "NCCL":
            raise coded(
                ValueError,
                "symmetric-backend",
                f"{method} takes the backend 'NCCL', not {backend!r}; leave it out",
            )
        self._check_memory(method, SymmetricMemory, enable=True)
        found = [(group, process_group(group)) for group in self._groups(recurse=False)]
        groups = [(group, shared) for group, shared in found if shared is not None]
        for group, shared in groups:
            used = backend_name(shared, group.device)
            if "nccl" not in used:
                raise coded(
                    ValueError,
                    "symmetric-needs-nccl",
                    f"{method} needs process groups of the NCCL backend, but those of "
                    f"'{group.name}' use '{used}', which has no symmetric memory; leave it out",
                )
        gather = OwnAllGather(SymmetricMemory(backend))
        comms = gather, OwnReduceScatter(SymmetricMemory(backend))
        require_record(self).unit.set_comms({shared: comms for _, shared in groups})

    # ---- helpers

    def _records(self, recurse: bool) -> list[UnitRecord]:
        """The records of this module's unit and, with ``recurse``, of those below."""
        module: Any = self  # of a subclass, which is an nn.Module too
        require_record(module)
        return records_below(module, recurse)

    def _groups(self, recurse: bool) -> Iterator[ParamGroup]:
        for record in self._records(recurse):
            yield from record.unit.own_groups

    def _one_group(self, method: str) -> ParamGroup | None:
        groups = require_record(self).unit.own_groups
        groups = [group for group in groups if not group.is_whole] or groups
        if len(groups) > 1:
            raise coded(
                ValueError,
                "several-meshes",
                f"{method} cannot be used on a unit whose parameters are on several meshes "
                f"({len(groups)} groups), because it applies to one mesh; call fully_shard "
                f"separately on the modules of each mesh",
            )
        return groups[0] if groups else None

    def _check_memory(self, method: str, memory: type[Memory], enable: bool) -> None:
        for group in self._groups(recurse=False) if enable else ():
            comm = conflicting((group.options.all_gather, group.options.reduce_scatter), memory)
            if comm is not None:
                raise coded(
                    ValueError,
                    "memory-beside-custom",
                    f"{method} cannot be used while {type(comm).__name__} runs the collectives of "
                    f"'{group.name}' and allocates their buffers; use one of the two",
                )

    def _change(self, recurse: bool = False, **options: object) -> None:
        for record in self._records(recurse):
            record.unit.change(**options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, for all gradients that units hold.

        It also drops gradients accumulated without sync, and sums that wait for an all-reduce.
        """
        record = require_record(self)
        root = record.scheduler if record.unit.is_root and record.alone else None
        units = [below.unit for below in records_below(self)] if root is None else root.units
        unreduced = []
        if root is None or root.unreduced:
            unreduced = [group for unit in units for group in unit.own_groups if group.accumulates]
        if unreduced and record.scheduler is not None:
            # They may still add to partial sums, and deliver gradients, which must go as well.
            record.scheduler.wait_for_reductions()
        original = self._fsdp2_original
        as_torch = all(getattr(original, name) is getattr(nn.Module, name) for name in _WALKS)
        if set_to_none and as_torch:
            _drop_gradients(self)
        else:
            super().zero_grad(set_to_none)
        for group in unreduced:
            group.discard_gradients()
        if root is not None:
            root.unreduced = False
        for unit in units:
            for used in unit.groups:
                if not used.state.is_sharded:  # shards are not registered; their gradients count
                    for param in used.base.params:
                        param.clear_gradient(set_to_none)

    def _apply(self, *args: object, **kwargs: object) -> object:
        """`.to()`, `.cuda()`, `.to_empty()` …: on the sharded parameters."""
        with torch.inference_mode(False):  # an optimizer writes the shards later
            self.reshard()
            result = super(TORCHS, self)._apply(*args, **kwargs)
        for group in require_record(self).unit.groups:
            group.base.rebind()
        return result

    def __prepare_scriptable__(self) -> NoReturn:
        raise coded(
            ShardingStateError,
            "not-scriptable",
            f"{type(self).__name__} cannot be compiled by torch.jit.script: its hooks gather "
            f"parameters; script an unsharded model, or use torch.compile",
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise coded(
            TypeError,
            "deep-copy",
            f"{type(self).__name__} cannot be deep-copied: its parameters belong to a process "
            f"group; copy the model before fully_shard, or copy its state_dict()",
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise coded(
            TypeError,
            "pickle",
            f"{type(self).__name__} cannot be pickled: its parameters belong to a process group; "
            f"save its state_dict() with torch.distributed.checkpoint or torch.save",
        )


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as the chunks of a pipeline stage, share streams.

    It has no effect, because all roots of a device share streams and memory already. It exists for
    code that was written for torch's FSDP2.

    Args:
        modules: sharded modules.

    Raises:
        ValueError: one of them is not sharded.

    Example::

        fsdp2.share_comm_ctx(list(model.blocks))
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise coded(
                ValueError,
                "share-plain",
                f"share_comm_ctx takes sharded modules, but got a {type(module).__name__}; call "
                f"fully_shard on it",
            )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method unshard and reshard parameters as ``forward`` does.

    Args:
        module: the module; the call has no effect if it is not sharded.
        method_name: for example ``"generate"``.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise coded(
            ValueError,
            "forward-method",
            f"{type(module).__name__} has no method '{method_name}'; pass the name of one that it "
            f"has, for example 'generate'",
        )
    wrapped = forward_method(module, method)
    setattr(module, method_name, wrapped.__get__(module, type(module)))


# ---- look-ups


def _scheduler(module: object) -> Scheduler:
    record = require_record(module)
    return record.scheduler or start(record)


def _require_root(module: object, method: str) -> None:
    unit = require_record(module).unit
    if not unit.is_root:
        raise coded(
            RuntimeError,
            "not-root",
            f"{method}() was called on '{unit.name}', which is not the root; call it on the "
            f"module whose forward you call",
        )


def _require_outside(scheduler: Scheduler, method: str) -> None:
    if scheduler.is_running:
        during = "backward" if scheduler.iteration.in_backward else "forward"
        raise coded(
            RuntimeError,
            "while-running",
            f"{method}() was called during {during}; call it after its end, or after an exception "
            f"call reset_iter_state() first",
        )


def _checked_targets(modules: Iterable[FSDPModule]) -> list[Unit]:
    # A slice of a ModuleList is a module; a sharded Sequential would be its layers.
    if not isinstance(modules, Iterable) or isinstance(modules, FSDPModule | str):
        raise coded(
            TypeError,
            "prefetch-type",
            f"prefetch lists are lists of sharded modules, not {type(modules).__name__}; pass "
            f"[module]",
        )
    modules = list(modules)
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise coded(
                ValueError,
                "prefetch-plain",
                f"prefetch lists hold sharded modules, but got a {type(module).__name__}; call "
                f"fully_shard on it",
            )
    return [require_record(module).unit for module in modules]


def _checked_comm(comm: C, method: str) -> C:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise coded(
            TypeError,
            "custom-type",
            f"{method} takes an object with allocate() and __call__(), not "
            f"{type(comm).__name__}; subclass fsdp2.AllGather or fsdp2.ReduceScatter",
        )
    return comm


# ---- the subclass of each original

# Python gives an object another class only if both lay out their instances alike, which it tells by
# the chain of each class's first base. That chain differs where a base without `nn.Module` comes
# first: `class Block(Mixin, nn.Module)` with `class Mixin(ABC)`. The original is then the first
# base, and a metaclass moves `FSDPModule` to the front of the lookup:
#
#     FSDP<Original> ── FSDPModule ── … ── Original     order in which methods are looked up
#     FSDP<Original> ── Original                        base that memory is laid out by, if needed
#
# No class of the user's is changed, and no object is until all of this has succeeded.

_made: dict[type, type] = {}

_set_class: Callable[[object, type], None] = vars(object)["__class__"].__set__
"""Changes an object's class, whatever its own class makes of attributes."""


def sharded_class(module: nn.Module) -> type:
    """``FSDP<Original>`` for a module's class: made once, and checked to fit; changes nothing."""
    original = type(module)
    if issubclass(original, FSDPModule):
        return original  # sharded already, which others refuse
    if original not in _made:
        _made[original] = _parametrized(module) or _fitting(module, original)
    return _made[original]


def set_sharded_class(module: nn.Module) -> None:
    """Give a module its ``FSDP<Original>``."""
    _set_class(module, sharded_class(module))


def _parametrized(module: nn.Module) -> type | None:
    """The class of a module that torch has parametrized; ``None`` for another one."""
    original = type(module)
    own = vars(original)
    names = list(dict(module.named_children()).get("parametrizations", nn.Module())._modules)
    if not is_parametrized(module) or any(name not in own for name in names):
        return None
    unparametrized = original.__bases__[0]
    if unparametrized not in _made:
        _made[unparametrized] = _fitting(module, unparametrized)
    attributes = {name: own[name] for name in names}
    attributes["_fsdp2_original"] = original
    sharded = _made[unparametrized]
    return type(sharded)(f"FSDP{original.__name__}", (sharded,), attributes)


def _fitting(module: nn.Module, original: type) -> type:
    before = type(module)
    refused: Exception | None = None
    for attempt in _attempts(original):
        try:
            kind = attempt()
            _set_class(module, kind)
        except Exception as error:  # of Python, or of any code of the user's that makes classes
            refused = refused or error
        else:
            _set_class(module, before)
            return kind
    assert refused is not None
    raise coded(
        TypeError,
        "class-resists",
        f"fully_shard cannot give a {original.__name__} the subclass that it needs ({refused}); "
        f"call fully_shard on a module around it, or on the modules inside it",
    ) from refused


def _attempts(original: type) -> Iterator[Callable[[], type]]:
    """Ways to make the class, the plainest first."""
    for bases, metaclass in (
        ((FSDPModule, original), type(original)),
        ((original, FSDPModule), _ControlsFirst.over(type(original))),
    ):
        # As a class statement does; then without what the user's metaclass asks for besides.
        for make in (metaclass, _plain_maker(metaclass, type(original))):
            attributes = {"_fsdp2_original": original}
            yield functools.partial(make, f"FSDP{original.__name__}", bases, attributes)


def _plain_maker(metaclass: type, of_user: type) -> Callable[..., type]:
    """Creates classes of a metaclass with only Python's own code."""
    own: object = abc.ABCMeta if issubclass(of_user, abc.ABCMeta) else type
    made: Callable[..., type] = functools.partial(own.__new__, metaclass)
    return made


class _ControlsFirst(type):
    """A metaclass: methods of `FSDPModule` are found before those of the base in front of it."""

    @staticmethod
    def over(metaclass: type) -> type:
        """It, on top of the metaclass of a user's class."""
        if issubclass(_ControlsFirst, metaclass):
            return _ControlsFirst
        name = f"{_ControlsFirst.__name__}{metaclass.__name__}"
        return type.__new__(type, name, (_ControlsFirst, metaclass), {})

    def mro(cls) -> list[type]:
        order = super().mro()
        if FSDPModule not in cls.__bases__:
            return order  # a subclass has its base's order
        front = [kind for kind in FSDPModule.__mro__ if kind is not object]
        return [cls, *front, *(kind for kind in order[1:] if kind not in front)]
