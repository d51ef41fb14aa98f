"""What `fully_shard` makes of a module: the methods that control its unit.

    FSDP<Original> ── FSDPModule ── Original
                        when parameters come and go, what backward does
                        what travels, and how

Every method changes flags of `Unit` or replaces `GroupOptions`; the scheduler and the groups read
them at their next use.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NoReturn, TypeVar, cast, overload

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from fsdp2.comm_memory import (
    GroupAllGather,
    GroupMemory,
    GroupReduceScatter,
    MemoryKind,
    SymmetricAllGather,
    SymmetricMemory,
    SymmetricReduceScatter,
    conflicting,
)
from fsdp2.core.config import (
    EXACT_BELOW,
    Level,
    MixedPrecisionPolicy,
    ShardingStateError,
    Wire,
)
from fsdp2.core.custom_collectives import AllGather, MemoryComms, ReduceScatter
from fsdp2.core.device.collectives import Collectives
from fsdp2.core.device.process_groups import ProcessGroup, backend_name, with_own_group
from fsdp2.core.modules.dynamo import uncompiled_methods
from fsdp2.core.modules.frames import forward_method
from fsdp2.core.modules.optimizers import watch_optimizers, zeroed
from fsdp2.core.modules.registry import UnitRecord, records_below, require_record
from fsdp2.core.modules.roots import start
from fsdp2.core.params.param import ModuleEntries
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.states import SHARDED
from fsdp2.core.schedule.unit import PrefetchTime, Unit
from fsdp2.core.schedule.whole import is_whole
from fsdp2.handles import GradientReductionHandle, UnshardHandle
from fsdp2.interop import TORCHS, TorchIdentity, replicated_parameters
from fsdp2.sharding.assembly import (
    check_groups,
    choose_reshard,
    connect_meshes,
    follow_aliases,
    join_unit,
    make_groups,
    move_buffers,
    process_group,
)
from fsdp2.sharding.planned import join_others, plan_taken
from fsdp2.sharding.selection import PlacementFn
from fsdp2.sharding.state_dicts import watch_state_dicts

C = TypeVar("C")

_WALKS = ("zero_grad", "parameters", "named_parameters", "named_modules")
"""What a class must leave as it is, for `_drop_gradients` to find what ``zero_grad`` would."""


def _drop_gradients(module: nn.Module) -> None:
    """As ``nn.Module.zero_grad()``, without names: thousands of instructions less a parameter."""
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


@uncompiled_methods
class FSDPModule(TorchIdentity):
    """What `fully_shard` makes of a module: the methods that control its unit.

    The class comes first in the method resolution order: ``[FSDP<Original>, FSDPModule, …,
    Original]``. It is a subclass of ``torch.distributed.fsdp.FSDPModule``, so that clients of that
    recognise it, but inherits no behaviour. Methods with ``recurse`` also apply to the units below.
    """

    _fsdp2_original: type

    def __init_subclass__(cls, **arguments: object) -> None:
        """Tell the original's bases of a subclass, as Python does; not if they ask for more."""
        if "_fsdp2_original" not in cls.__dict__:
            super().__init_subclass__(**arguments)
            return
        with contextlib.suppress(Exception):  # of code of the user's, for classes of the user's
            super().__init_subclass__()

    def __new__(cls, *args: object, **kwargs: object) -> Any:
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
        record = require_record(self)
        scheduler = record.scheduler or _own_scheduler(record)
        scheduler.claim(record.unit)
        handle = UnshardHandle(scheduler, record.unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters and register the sharded ones; not recursive."""
        unit = require_record(self).unit
        unit.give_up()
        unit.settle()

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that an exception ended half way.

        Call it on the root after catching the exception; the next iteration then starts clean.
        Gathered parameters are freed. Gradients that were not reduced yet are dropped. Those that
        are on the sharded parameters already stay there until ``zero_grad()``.

        Raises:
            RuntimeError: called on a module that is not the root.
        """
        record = require_record(self)
        if record.scheduler is not None:
            if not record.unit.is_root:
                raise ShardingStateError(
                    f"reset_iter_state() was called on '{record.unit.name}', which is not the "
                    f"root; call it on the module whose forward you call"
                )
            record.scheduler.reset()

    def shard_new_parameters(self, shard_placement_fn: PlacementFn | None = None) -> None:
        """Shard parameters and modules that were added to this module after `fully_shard`.

        They become one more group of this unit: an adapter in a block is gathered and reduced with
        its block. The group has the mesh and the policies that `fully_shard` was called with, and
        the settings that were changed since. Parameters of units below and ``ignored_params`` are
        left alone.

        Call it on every rank, between iterations. Then give the parameters to the optimizer. To
        make the new module a unit of its own, call `fully_shard` on it instead.

        Args:
            shard_placement_fn: as for `fully_shard`. Default ``None``: the default placements, not
                the function that `fully_shard` was called with, which is not kept, as it may hold
                on to whole parameters.

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
        precision, choose = unit.options.precision, shard_placement_fn
        taken = plan_taken(
            record.modules, left_out, arguments.axes, choose, precision, new_to=record
        )
        check_groups(name, taken.plans, unit.options)
        connect_meshes(taken.plans, arguments)
        groups = make_groups(name, taken.plans, unit.options, arguments)
        join_unit(groups, unit, [g for near in records_below(self) for g in near.unit.own_groups])
        move_buffers(record.modules, arguments.axes.device)
        record.ignored = ModuleEntries({*record.ignored, *taken.left_alone})
        if record.scheduler is not None:
            record.scheduler.refresh()
        watch_state_dicts(groups)
        follow_aliases(record.modules)
        join_others(taken, record)
        watch_optimizers()  # what they hold may have been replaced

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward reduces gradients, over shards and replicas alike.

        Args:
            requires_gradient_sync: ``False`` adds up full gradients on each rank, without
                communication. The next backward with ``True`` (default behaviour) reduces their
                sum. The flag of `set_requires_all_reduce` is set to the same value.
            recurse: whether units below follow. Default ``True``.
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

        Without replicas nothing changes. Parameters that stay whole on every rank
        (``Replicate()`` from ``shard_placement_fn``) have the other ranks as replicas.

        Args:
            requires_all_reduce: ``False`` only reduce-scatters each backward's gradients, and adds
                up what comes of it, in memory of one shard's size. The next backward with ``True``
                (default behaviour) all-reduces the total. This takes less memory than
                `set_requires_gradient_sync(False)`, and communicates less than full reductions.
            recurse: whether units below follow. Default ``True``.
        """
        for record in records_below(self, recurse):
            record.unit.all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the next backward is the iteration's last.

        Args:
            is_last_backward: with ``True`` (default behaviour) backward waits for its reductions
                and frees what was gathered ahead. With ``False`` reductions may still run when it
                returns, and a unit may stay gathered for the backward to come. On a device with
                streams, do not read ``.grad`` before the last backward, nor what hooks on
                gradients have written.
        """
        _scheduler(self).is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether you end an iteration's backwards yourself, with `finalize_backward`.

        It is for schedules in which reducing gradients is a step of its own. While it is enabled,
        `set_is_last_backward` has no effect. Call it on the root, between backwards. It counts
        from the next backward on.

        Args:
            enabled: ``True`` leaves the end to you. Default behaviour is ``False``.

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
        """End an iteration's backwards: reduce gradients, free parameters, clean up.

        The flags count as they are now: `set_requires_gradient_sync` says whether waiting gradients
        are reduced, `set_reshard_after_backward` whether parameters are freed. A backward that is
        still to come gathers its parameters again. Before the first forward nothing happens.

        Args:
            async_op: ``False`` (default) waits for the reductions and returns ``None``. ``True``
                returns a handle while they may still run. Wait for it before you use gradients or
                call the next forward.

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
        scheduler = require_record(self).scheduler
        if scheduler is None:
            return GradientReductionHandle(None) if async_op else None
        _require_root(self, "finalize_backward")
        _require_outside(scheduler, "finalize_backward")
        if not scheduler.manual:
            raise RuntimeError(
                "finalize_backward() was called on a module whose backwards end by themselves; "
                "call set_manual_backward_finalization(True) before them"
            )
        if scheduler.iteration.unawaited:
            raise RuntimeError(
                "finalize_backward() was called before the handle of the last one was waited for; "
                "call its wait()"
            )
        scheduler.finalize(wait=not async_op)
        return GradientReductionHandle(scheduler) if async_op else None

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether backward gathers this unit's parameters; not recursive.

        Args:
            unshard_in_backward: ``False`` saves the all-gather where backward does not read the
                parameters: an embedding's does not. A linear layer's does, and autograd then raises
                that a variable "has been modified". Default behaviour is ``True``.
        """
        require_record(self).unit.unshard_in_backward = bool(unshard_in_backward)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next all-gathers wait for an optimizer step on a stream of your own.

        All-gathers wait for the current stream in any case. Call this if the optimizer steps on
        another one. Call it on the root, in each iteration: an event is used once.

        Keep the gradients that the step reads until the next forward has returned. The current
        stream has waited for the event by then, even if that forward gathered nothing.

        Args:
            event: recorded after the optimizer's step.
        """
        _scheduler(self).post_optim_event = event

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether forward frees the gathered parameters at its end.

        Args:
            reshard_after_forward: as the argument of `fully_shard`, but a bool: ``True`` frees
                them, and backward gathers them again.
            recurse: whether units below follow. Default ``True``.

        Raises:
            ValueError: it is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}; give a "
                f"number of ranks to fully_shard(reshard_after_forward=…)"
            )
        for record in records_below(self, recurse):
            choose_reshard(record, reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward frees the gathered parameters at its end.

        Args:
            reshard_after_backward: ``False`` keeps them. The next micro-batch then needs no
                all-gathers, and the gathered parameters take memory all the time. After an
                optimizer step they are out of date, so that the next forward gathers them again.
                Default behaviour is ``True``.
            recurse: whether units below follow. Default ``True``.
        """
        for record in records_below(self, recurse):
            record.unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Choose the units to gather ahead when this unit's forward starts.

        Without this call it is the unit that came next in the last forward.

        Args:
            modules: sharded modules, in the order in which they are gathered: a list, or a slice of
                a ``ModuleList``. Two or more overlap more and hold more memory. An empty list
                returns to the order of the last forward.

        Raises:
            TypeError: it is no list of modules.
            ValueError: one of them is not sharded.
        """
        require_record(self).unit.forward_prefetch = _checked_targets(modules)

    def set_modules_to_backward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Choose the units to gather ahead when this unit's backward starts.

        Without this call it is the unit that came before in this iteration's forward.

        Args:
            modules: as for `set_modules_to_forward_prefetch`. An empty list returns to the order of
                this iteration's forward, in reverse.

        Raises:
            TypeError: it is no list of modules.
            ValueError: one of them is not sharded.
        """
        require_record(self).unit.backward_prefetch = _checked_targets(modules)

    def set_prefetch_window(self, units: int, *, recurse: bool = True) -> None:
        """Choose how many units are gathered ahead: while one computes, those that come next.

        With 1 the gather of the next unit has one compute to hide behind. That is enough where
        units are alike. Where a small one is followed by a large one, as attention by the experts
        of a mixture, a larger number gives the large gather more time. torch's FSDP2 waits as with
        2 in forward, and as with 1 in backward (docs/decisions/0023).

        The order is that of the last forward, in backward that of this iteration's forwards in
        reverse. Units with a list of their own (`set_modules_to_forward_prefetch`) follow that.

        Args:
            units: 1 (default behaviour) or more, the same on all ranks. At most so many units are
                gathered besides those that compute and those that are kept on request: memory
                grows by one gathered unit for each. The largest number of all units below a root
                counts for all of them.
            recurse: whether units below follow. Default ``True``.

        Raises:
            TypeError: it is not an int.
            ValueError: it is below 1.

        Example::

            model.set_prefetch_window(2)
        """
        if isinstance(units, bool) or not isinstance(units, int):
            raise TypeError(f"set_prefetch_window takes an int, not {units!r}")
        if units < 1:
            raise ValueError(f"set_prefetch_window takes 1 or more, not {units}")
        records = records_below(self, recurse)
        for record in records:
            record.unit.prefetch_window = units
        for scheduler in {record.scheduler for record in records}:
            if scheduler is not None:
                scheduler.refresh()

    def set_backward_prefetch(
        self, when: Literal["before", "after", "never"], *, recurse: bool = True
    ) -> None:
        """Choose when backward gathers the unit that comes next.

        Units with a list of their own (`set_modules_to_backward_prefetch`) follow that.

        Args:
            when: ``"before"`` (default behaviour) gathers it before this unit's backward computes,
                so that the gather hides behind the compute. ``"after"`` gathers it when this unit
                is freed, before its gradients are reduced: one gathered unit less in memory, and
                only the reduction to hide behind. ``"never"`` gathers each unit when it is needed.
            recurse: whether units below follow. Default ``True``.

        Raises:
            ValueError: it is none of these.

        Example::

            model.set_backward_prefetch("after")
        """
        times = {time.value: time for time in PrefetchTime}
        if when not in times:
            raise ValueError(
                f"set_backward_prefetch takes 'before', 'after' or 'never', not {when!r}"
            )
        records = records_below(self, recurse)
        for record in records:
            record.unit.prefetches = times[when]
        for scheduler in {record.scheduler for record in records}:
            if scheduler is not None:
                scheduler.refresh()

    # ---- what can be read

    def get_mp_policy(self) -> MixedPrecisionPolicy:
        """The mixed-precision policy that `fully_shard` was given."""
        return require_record(self).unit.options.precision

    def get_reshard_after_forward(self) -> bool | int:
        """Whether this unit's forward frees the gathered parameters at its end.

        Returns:
            ``True`` or ``False``; an int where the shards of that many ranks are kept, as
            ``reshard_after_forward`` of `fully_shard` says. Where that was ``None``, the root
            answers ``False`` and others ``True``. Which module is the root is known from the first
            forward on; until then it answers ``True``, too.
        """
        unit = require_record(self).unit
        sizes = [g.smaller_group.collectives.size for g in unit.own_groups if g.smaller_group]
        return sizes[0] if sizes and unit.frees_after_forward else unit.frees_after_forward

    # ---- dividing and summing

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide summed gradients by ``factor``, not by the number of ranks; not recursive.

        Without this call gradients are averages over all data-parallel ranks.

        Args:
            factor: a positive number. ``1.0`` leaves the sum as it is. ``None`` averages again.

        Raises:
            ValueError: it is no positive number.
        """
        if factor is None:
            self._change(divide_factor=None)
            return
        if not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise ValueError(
                f"set_gradient_divide_factor takes a positive number, not {factor!r}; pass for "
                f"example 1.0 to sum over the ranks"
            )
        self._change(divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce with sums alone, and divide in a kernel of its own; not recursive.

        Some transports cannot average, such as NCCL's zero-copy ones.

        Args:
            enable: ``True`` keeps averages out of collectives. With `set_symm_mem_for_comm`,
                reduce-scatters then use symmetric memory too. Default behaviour is ``False``.
        """
        self._change(sum_only=bool(enable))

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether a parameter without a gradient takes part in reductions, as zeros.

        It is for models in which ranks use different units: experts of a mixture, branches that
        depend on the data. A rank whose loss does not use a unit then runs that unit's collectives
        all the same, in the order in which the other ranks run them. Without it the other ranks
        wait for that rank.

        Ranks that use different parameters of one unit need no call of this. They run the same
        collectives anyway, and a parameter gets a ``.grad`` on all ranks if any has used it. With
        this call every parameter gets a ``.grad``, zeros if nobody has used it. The host then need
        not wait, at the end of backward, to know which: a captured CUDA graph needs that.

        All ranks must keep to four rules:

        - They run the same forwards.
        - Where an iteration has several backwards, they call `set_is_last_backward(False)` before
          all but the last.
        - Where one checkpointed region holds several units, all ranks recompute it, or none does.
          Its units are gathered in the order of forward.
        - Where a forward takes a derivative with ``create_graph=True``, a backward that is not the
          last uses that derivative on all ranks, or on none.

        Args:
            reduce_scatter_unused_params: ``True`` reduces absent gradients as zeros. Default
                behaviour is ``False``.
            recurse: whether units below follow. Default ``True``.
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
                output of the reduce-scatter, or with replicas that of the all-reduce. It is called
                once for each dtype that the unit's parameters reduce in. Behind the rows of
                gradients are small numbers, one a parameter, that tell which rank had one: a hook
                that sums over more ranks sums the whole tensor. ``None`` removes the hook.
            stream: the stream that it runs on. It starts when the reduction is done, and ``.grad``
                waits for it. ``None`` (default): the stream of all-reduces. Only without a
                replicate axis.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: the unit has parameters on several meshes, or replicas and a stream.
        """
        if hook is not None and not callable(hook):
            raise TypeError(
                f"set_all_reduce_hook takes a function of a tensor, not {hook!r}; pass None to "
                f"take a hook away"
            )
        group = self._one_group("set_all_reduce_hook")
        if stream is not None and group is not None and group.replicas is not None:
            raise ValueError(
                "set_all_reduce_hook(stream=…) cannot be used with a replicate axis, whose "
                "all-reduce stream runs the hook; leave stream out"
            )
        self._change(all_reduce_hook=hook, all_reduce_hook_stream=stream)

    # ---- collectives

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit's parameters with ``comm``; not recursive.

        It counts from the next gather on. A gather is then one collective, in two calls:
        ``comm.allocate((ranks * n,), dtype=…, device=…)`` returns the output, and
        ``comm(output_tensor=…, input_tensor=…, group=…)`` fills it. The input is this rank's part
        of the output. Parameters of several dtypes travel together as bytes (uint8). Tensor
        subclasses with all-gather hooks travel as bytes in a collective of their own. A single
        rank calls nothing.

        Of this, `set_allocate_memory_from_process_group_for_comm` and `set_symm_mem_for_comm`, a
        custom collective that is set later counts.

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

        It counts from the next reduction on. A reduction is then one collective for each dtype,
        and a small built-in one, which tells who had a gradient.
        ``comm.allocate`` is called twice, for the input ``(ranks * n,)`` and the output ``(n,)``;
        ``comm(output_tensor=…, input_tensor=…, group=…, op=…)`` runs it. Gradients are copied out
        of the output at once, so its memory may be used again. A single rank calls nothing.

        Args:
            comm: allocates the collective's buffers and runs it; see `ReduceScatter`.

        Raises:
            TypeError: ``comm`` has no ``allocate`` or cannot be called.
            ValueError: the unit has parameters on several meshes.
        """
        method = "set_custom_reduce_scatter"
        self._one_group(method)
        self._change(reduce_scatter=_checked_comm(comm, method))

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Choose whether reduce-scatters have a process group of their own.

        In one group the backend runs collectives one after the other. With two, reduce-scatters
        overlap all-gathers. Making a group communicates: call this on all ranks alike.

        Args:
            enable: ``True`` (default) makes the group. ``False`` returns to the one that
                all-gathers use.
            recurse: whether units below follow. Default ``True``.
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
        """Choose how many reductions may hold their inputs in memory at a time.

        Args:
            max_input_buffers: with ``1`` (default behaviour) the compute stream waits for one
                reduce-scatter before it prepares the input of the next. A larger number overlaps
                more, and holds more memory. The largest number of all units below a root counts.
            recurse: whether units below follow. Default ``True``.

        Raises:
            TypeError: it is not an int.
            ValueError: it is below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"set_reduce_scatter_max_input_buffers takes an int, not {max_input_buffers!r}"
            )
        if max_input_buffers < 1:
            raise ValueError(
                f"set_reduce_scatter_max_input_buffers takes 1 or more, not {max_input_buffers}"
            )
        for record in self._records(recurse):
            record.unit.input_buffers = max_input_buffers
            if record.scheduler is not None:
                record.scheduler.refresh()

    def set_packing_threshold(self, nbytes: int, *, recurse: bool = True) -> None:
        """Choose which parameters travel packed where a backend gathers many in one launch.

        Large parameters are gathered straight into place, and their gradients reduced from where
        they are. Of small ones a backend could move many only slowly (`fsdp2.core.config` has the
        source). Those whose gathered piece on a rank is smaller than this are copied into one
        buffer, where a unit has several of the same dtypes. It goes along in the same launch.

        It counts from the next gather on. A change moves the shards to another flat buffer, as
        ``.to()`` does. All ranks must choose alike. Backends that do not coalesce, such as gloo,
        pack everything anyway.

        Args:
            nbytes: bytes of a rank's piece in the dtype that is gathered. Default behaviour is
                131072 (128 KiB). ``0`` packs only what has to be.
            recurse: whether units below follow. Default ``True``.

        Raises:
            TypeError: it is not an int.
            ValueError: it is negative.

        Example::

            model.set_packing_threshold(64 << 10)
        """
        if isinstance(nbytes, bool) or not isinstance(nbytes, int):
            raise TypeError(
                f"set_packing_threshold takes an int, a number of bytes, not {nbytes!r}"
            )
        if nbytes < 0:
            raise ValueError(f"set_packing_threshold takes 0 or more bytes, not {nbytes}")
        self._change(recurse=recurse, pack_below=nbytes)

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

        =======  ================================  ==============================================
        format   ``gather`` (parameters)           ``reduce`` (gradients)
        =======  ================================  ==============================================
        fp32     --                                4 bytes per number, exact; for backends that
                                                   reduce and scatter by an all-reduce (gloo)
        bf16     --                                2 bytes per number; sums are fp32's own sums of
                                                   the rounded numbers
        int8     1.03 bytes per number, a scale    the same; each rank adds in fp32, in the order
                 per 128 numbers                   of ranks
        int4     0.53 bytes per number, a scale    the same; lossy
                 per 64 numbers; lossy
        =======  ================================  ==============================================

        A number in ``"int8"`` is off by 1/254 of the largest magnitude of its block at most, one in
        ``"int4"`` by 1/14 (7 %): too much for the weights of most models. All ranks compute with
        the same bits: a rank's own part passes the format, too. The sharded parameters, which the
        optimizer sees, stay exact. Infinities and NaN come out as NaN of their block, or in bf16
        as they are. Gradients go by one all-to-all per reduction in place of a reduce-scatter; what
        follows it, such as an all-reduce over replicas or a copy to the CPU, has the reduce dtype.
        Rows that `fully_shard` keeps for ``reshard_after_forward=<int>`` are gathered as they are.

        With ``differences`` messages hold what parameters differ by from what was gathered last,
        which stays on each rank: errors are those of a step's change of the weights, and do not add
        up. Kept rows are reused, too: parameters travel once per optimizer step, neither again in
        backward nor for further micro-batches, until they may have been written (see the guide on
        slow networks, and call ``zero_grad()`` or ``reshard()`` after writes through ``.data``).

        It counts from the next gather on. All ranks must choose alike. Parameters that stay exact
        have collectives of their own.

        Args:
            gather: ``"int8"``, ``"int4"``, or ``None`` (default): parameters travel in the dtype
                that they are computed with.
            reduce: ``"fp32"``, ``"bf16"``, ``"int8"``, ``"int4"``, or ``None`` (default): gradients
                travel in the reduce dtype.
            differences: whether messages of parameters hold differences to what was gathered last.
                It takes memory for all parameters of each unit, in the compute dtype, on each rank,
                and is state of training: `fsdp2.wire_state`. Default ``False``.
            feedback: whether each rank adds what its messages have left out of gradients to its
                next ones, so that over steps nothing is left out (error feedback). It takes memory
                for a whole gradient of each unit in bf16 on each rank, and is state of training:
                `fsdp2.wire_state`. Default ``False``.
            rotate: whether each block of 128 numbers of gradients is multiplied by an orthonormal
                matrix (random signs and a Hadamard matrix) before it is coded, and its sum by the
                inverse: single large numbers cost their neighbours less precision. Default
                ``False``.
            level: which level of a mesh (`fsdp2.Levels`) the formats are for: ``"inside"`` a node,
                ``"between"`` nodes, or ``"all"`` (default). The other level stays as it is. Where
                there is one level, or copies (HSDP), the shard axis is inside. Differences,
                rotation and feedback are for the inside.
            exact: called once with each parameter's name below this module and the parameter;
                those for which it returns true travel as they are. Default ``None``: none of the
                larger ones.
            exact_below: elements of the whole parameter below which it travels as it is. Default
                16384.
            recurse: whether units below follow. Default ``True``.

        Raises:
            ValueError: a format is not known, ``feedback`` or ``rotate`` is given without
                ``reduce``, ``differences`` without ``gather``, or a parameter that is not left
                exact cannot travel in the format: its dtypes are not fp32, bf16 or fp16, or its
                tensor subclass has all-gather hooks. Nothing is changed then.

        Example::

            model.set_wire_format(
                gather="int8", reduce="bf16", exact=lambda name, _: "embed" in name
            )
        """
        from fsdp2.wire import set_wire_format  # who does not use it does not load it

        wire = Wire(gather, reduce, differences, rotate=rotate, feedback=feedback)
        module, records = cast(nn.Module, self), self._records(recurse)
        set_wire_format(module, records, wire, exact, exact_below, level)

    # ---- memory

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether parameters that are freed keep their memory.

        Gathered parameters then have the same addresses in every step, as the capture of CUDA
        graphs needs it. Their memory is then taken all the time.

        Args:
            keep: ``True`` keeps it. Default behaviour is ``False``.
            recurse: whether units below follow. Default ``True``.
        """
        self._change(recurse=recurse, keep_storage=bool(keep))

    def set_keep_gradient_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether sharded gradients keep their memory and their ``.grad`` objects.

        They are then made once. A step allocates nothing for them and takes less host time, and
        their addresses stay. It has two costs:

        - ``zero_grad()`` does not free them: from the first backward on they take as much memory
          as the shards.
        - The next backward writes to the same memory. Whoever holds an old ``.grad`` sees the new
          gradient there: clone what should last.

        Results are the same. Where a gradient is there when a backward ends, the new one is added
        to it, as always. On a mesh of one rank gradients are autograd's own, and nothing is kept.

        Args:
            keep: ``True`` keeps both. Default behaviour is ``False``.
            recurse: whether units below follow. Default ``True``.

        Example::

            model.set_keep_gradient_storage(True)
        """
        self._change(recurse=recurse, keep_gradients=bool(keep))

    def set_keep_rows(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether what was gathered is kept from micro-batch to micro-batch.

        ============================== ==================================== ==================
        unit                           rows that are kept, in the dtype     default
                                       that parameters are computed with
        ============================== ==================================== ==================
        `Levels`                       those that this rank's node gathers  kept
                                       from: 1 / ranks of a node
        ``reshard_after_forward=<int>`` those of the smaller group          not kept
        other                          all, so that each rank has the       not kept
                                       unit's parameters twice while they
                                       are gathered, and once between
        ============================== ==================================== ==================

        Parameters then travel from afar once per optimizer step. Rows that are not kept are freed
        after each gather.

        Kept rows count until shards may have changed: an optimizer steps, gradients are dropped, a
        forward without gradients begins or ends, a state dict is loaded, a parameter's version
        shows a write, or the user calls ``reshard()``. A user who writes shards by other routes in
        between (``.data``, a collective) calls ``reshard()``.

        Args:
            keep: whether they are kept.
            recurse: whether units below follow. Default ``True``.

        Example::

            fully_shard(block, reshard_after_forward=8)
            block.set_keep_rows(True)  # groups of 8 gather from them until optimizer.step()
        """
        for record in self._records(recurse):
            record.unit.change(keep_rows=bool(keep))
            if record.scheduler is not None:
                record.scheduler.refresh()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Choose whether collectives' buffers come from the process group; not recursive.

        The backend can move what its own allocator gave without copies (NCCL: over NVLink or
        InfiniBand SHARP). Parameters and gradients are packed into such buffers.

        Args:
            enable: ``True`` uses the allocator from the next gather and reduction on; a backend
                that has none gets plain memory. ``False`` returns to the built-in way. Default
                behaviour is ``False``.

        Raises:
            ValueError: the unit has collectives of the user's, or in symmetric memory.
        """
        self._check_memory("set_allocate_memory_from_process_group_for_comm", GroupMemory, enable)
        unit = require_record(self).unit
        comms = {g: c for g, c in unit.comms.items() if isinstance(c.all_gather, SymmetricMemory)}
        for shared in filter(None, map(process_group, unit.own_groups)) if enable else ():
            comms[shared] = MemoryComms(GroupAllGather(shared), GroupReduceScatter(shared))
        unit.set_comms(comms)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Take the buffers of all-gathers from symmetric memory; not recursive.

        Reduce-scatters use it too after `set_force_sum_reduction_for_comms(True)`: NCCL's
        symmetric ones cannot average.

        Args:
            backend: only ``"NCCL"``, the default.

        Raises:
            ValueError: ``backend`` is another one, the process group has another one, or the unit
                has collectives of the user's or in memory of the process group.
        """
        method = "set_symm_mem_for_comm"
        if backend != "NCCL":
            raise ValueError(f"{method} takes the backend 'NCCL', not {backend!r}; leave it out")
        self._check_memory(method, SymmetricMemory, enable=True)
        found = [(group, process_group(group)) for group in self._groups(recurse=False)]
        groups = [(group, shared) for group, shared in found if shared is not None]
        for group, shared in groups:
            used = backend_name(shared, group.device)
            if "nccl" not in used:
                raise ValueError(
                    f"{method} needs process groups of the NCCL backend, but those of "
                    f"'{group.name}' are of '{used}', which has no symmetric memory; leave it out"
                )
        comms = MemoryComms(
            SymmetricAllGather(backend), SymmetricReduceScatter(backend), only_sums=True
        )
        require_record(self).unit.set_comms({shared: comms for _, shared in groups})

    # ---- helpers

    def _records(self, recurse: bool) -> list[UnitRecord]:
        """Of this module's unit and, with ``recurse``, of those below."""
        module: Any = self  # of a subclass, which is an nn.Module too
        require_record(module)
        return records_below(module, recurse)

    def _groups(self, recurse: bool) -> Iterator[ParamGroup]:
        for record in self._records(recurse):
            yield from record.unit.own_groups

    def _one_group(self, method: str) -> ParamGroup | None:
        groups = require_record(self).unit.own_groups
        groups = [group for group in groups if not is_whole(group)] or groups
        if len(groups) > 1:
            raise ValueError(
                f"{method} cannot be used on a unit whose parameters are on several meshes "
                f"({len(groups)} groups), since it would not know which one is meant; call "
                f"fully_shard on the modules of one mesh apart from the others"
            )
        return groups[0] if groups else None

    def _check_memory(self, method: str, memory: MemoryKind, enable: bool) -> None:
        for group in self._groups(recurse=False) if enable else ():
            comm = conflicting((group.options.all_gather, group.options.reduce_scatter), memory)
            if comm is not None:
                raise ValueError(
                    f"{method} cannot be used where {type(comm).__name__} runs the collectives of "
                    f"'{group.name}', which allocates their buffers itself; use one of the two"
                )

    def _change(self, recurse: bool = False, **options: object) -> None:
        for record in self._records(recurse):
            record.unit.change(**options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, for all gradients that units hold.

        Those that were accumulated without sync go too, and sums that wait for an all-reduce.
        """
        record = require_record(self)
        root = record.scheduler if record.unit.is_root and record.alone else None
        units = [below.unit for below in records_below(self)] if root is None else root.units
        unreduced = []
        if root is None or root.unreduced:
            unreduced = [group for unit in units for group in unit.groups if group.accumulates]
        if unreduced and record.scheduler is not None:
            # They may still add to partial sums, and deliver gradients, which must go as well.
            record.scheduler.wait_for_reductions()
        if record.scheduler is not None and record.scheduler.reuse is not None:
            record.scheduler.reuse.zeroed = True
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
            for group in unit.groups:
                if group.state is not SHARDED:  # shards are not registered; their gradients count
                    for param in group.params:
                        param.clear_gradient(set_to_none)
        if zeroed.functions:
            zeroed(units)

    def _apply(self, *args: object, **kwargs: object) -> object:
        """`.to()`, `.cuda()`, `.to_empty()` …: on the sharded parameters."""
        self.reshard()
        result = super(TORCHS, self)._apply(*args, **kwargs)
        for group in require_record(self).unit.groups:
            group.base.rebind()
        return result

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be deep-copied: its parameters belong to a process "
            f"group; copy the model before fully_shard, or copy its state_dict()"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: its parameters belong to a process group; "
            f"save its state_dict() with torch.distributed.checkpoint or torch.save"
        )


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as the chunks of a pipeline stage, share streams.

    It changes nothing: all roots of a device share streams and memory already. It is here for code
    that was written for torch's FSDP2.

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
    wrapped = forward_method(require_record(module), method)
    setattr(module, method_name, wrapped.__get__(module, type(module)))


# ---- look-ups


def _scheduler(module: object) -> Scheduler:
    record = require_record(module)
    return record.scheduler or start(record)


def _require_root(module: object, method: str) -> None:
    unit = require_record(module).unit
    if not unit.is_root:
        raise RuntimeError(
            f"{method}() was called on '{unit.name}', which is not the root; call it on the "
            f"module whose forward you call"
        )


def _require_outside(scheduler: Scheduler, method: str) -> None:
    if scheduler.is_running:
        during = "backward" if scheduler.iteration.in_backward else "forward"
        raise RuntimeError(
            f"{method}() was called during {during}; call it after its end, or after an exception "
            f"call reset_iter_state() first"
        )


def _own_scheduler(record: UnitRecord) -> Scheduler:
    """A scheduler for a call that comes before the first forward, without choosing a root."""
    return Scheduler([record.unit], record.streams)


def _checked_targets(modules: Iterable[FSDPModule]) -> list[Unit]:
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
    return [require_record(module).unit for module in modules]


def _checked_comm(comm: C, method: str) -> C:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"{method} takes an object with allocate() and __call__(), not "
            f"{type(comm).__name__}; subclass fsdp2.AllGather or fsdp2.ReduceScatter"
        )
    return comm
