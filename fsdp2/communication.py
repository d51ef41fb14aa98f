"""Methods of a sharded module that say what travels, and how.

    setter ──> GroupOptions, replaced as a whole ──> group binds transports and reduction steps

Each applies to the unit it is called on, unless its ``recurse`` says that units below follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from fsdp2.core.assembly import process_group
from fsdp2.core.collectives import AllGather, GroupCollectives, ReduceScatter, backend_name
from fsdp2.core.comm_memory import (
    GroupAllGather,
    GroupMemory,
    GroupReduceScatter,
    Memory,
    SymmetricAllGather,
    SymmetricMemory,
    SymmetricReduceScatter,
    conflicting,
)
from fsdp2.core.config import GroupOptions, MixedPrecisionPolicy
from fsdp2.core.group import ParamGroup
from fsdp2.core.hooks import UnitHooks, hooks_below, hooks_of
from fsdp2.core.uncompiled import uncompiled_methods


def hooks_on(module: Any) -> UnitHooks:
    """The hooks of a sharded module; raises where it is not sharded."""
    hooks = hooks_of(module)
    if hooks is None:
        raise ValueError(
            f"{type(module).__name__} is not sharded; call fully_shard on it before its methods"
        )
    return hooks


@uncompiled_methods
class CommunicationControls:
    """The part of `FSDPModule` that is about communication."""

    # ---- what can be read

    def get_mp_policy(self) -> MixedPrecisionPolicy:
        """The mixed-precision policy that `fully_shard` was given."""
        return hooks_on(self).precision

    def get_reshard_after_forward(self) -> bool | int:
        """Whether forward frees the gathered parameters; an int where a smaller group keeps them.

        For a default of ``None`` the answer is that of a unit below the root until the first
        forward has shown which module is the root.
        """
        unit = hooks_on(self).unit
        sizes = [g.smaller_group.collectives.size for g in unit.groups if g.smaller_group]
        return sizes[0] if sizes and unit.frees_after_forward else unit.frees_after_forward

    # ---- dividing and summing

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide gradients by ``factor`` instead of averaging over the ranks; not recursive.

        Args:
            factor: a positive number; ``1.0`` sums over all data-parallel ranks. ``None`` averages
                over them again.
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
        """Let collectives only sum, and divide in kernels of their own; not recursive.

        Args:
            enable: ``True`` for transports that cannot average, such as NCCL's zero-copy ones.
                With `set_symm_mem_for_comm`, gradients are then reduced in symmetric memory too.
        """
        self._change(sum_only=bool(enable))
        for group in self._groups(recurse=False):
            if isinstance(group.options.all_gather, SymmetricAllGather):
                group.set_options(_in_symmetric_memory(group.options))

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Reduce parameters without a gradient as zeros, and give them the result as ``.grad``.

        Ranks on which different parameters of a unit are used run the same collectives in any
        case. This is for units whose outputs some ranks do not use at all: their backward is taken
        through the collectives of one that uses them, in the same order. All ranks must run the
        same forwards. Where an iteration has several backwards, call `set_is_last_backward(False)`
        before all but the last. A checkpointed region that holds several units must be recomputed
        on all ranks or on none: its gathers follow the order of forward. So must a backward that
        is not the last use a derivative taken inside a forward (``create_graph=True``).

        Args:
            reduce_scatter_unused_params: default behaviour is ``False``.
            recurse: whether units below follow. Default ``True``.
        """
        self._change(recurse=recurse, reduce_unused=bool(reduce_scatter_unused_params))
        for hooks in hooks_below(self, recurse):
            if hooks.scheduler is not None:
                hooks.scheduler.refresh()

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None] | None,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Call ``hook`` with every reduced flat gradient of this unit, before it is delivered.

        Args:
            hook: called with a 1-D tensor in the reduce dtype, to change in place: the
                reduce-scatter's output, or with replicas the all-reduce's. A unit whose parameters
                reduce in several dtypes calls it once for each. ``None`` takes a hook away again.
            stream: stream to run it on, between what is before and behind it on the all-reduce
                stream; ``None`` (default) for that stream itself. Only without a replicate axis.

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

        From the next gather on, in one collective: ``comm.allocate((ranks * n,), dtype=…,
        device=…)``, then ``comm(output_tensor=…, input_tensor=…, group=…)``, its input this rank's
        part of its output. Parameters of several dtypes travel as bytes (uint8); tensor subclasses
        with all-gather hooks do so in a collective of their own. Nothing is called where there is
        one rank.

        Args:
            comm: allocates the collective's buffer and runs it; see `AllGather`.

        Raises:
            TypeError: ``comm`` has no ``allocate`` or cannot be called.
            ValueError: the unit has parameters on several meshes, or collectives in memory of the
                process group or in symmetric memory.

        Example::

            model.set_custom_all_gather(Logged())  # of the example of fsdp2.AllGather
        """
        method = "set_custom_all_gather"
        self._check_custom(method)
        self._change(all_gather=_checked_comm(comm, method))

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this unit's gradients with ``comm``; not recursive.

        From the next reduction on, in one collective a dtype: ``comm.allocate`` for its input
        ``(ranks * n,)`` and its output ``(n,)``, then ``comm(output_tensor=…, input_tensor=…,
        group=…, op=…)``. Gradients are copied out of the output at once. Nothing is called where
        there is one rank.

        Args:
            comm: allocates the collective's buffers and runs it; see `ReduceScatter`.

        Raises:
            TypeError: ``comm`` has no ``allocate`` or cannot be called.
            ValueError: the unit has parameters on several meshes, or collectives in memory of the
                process group or in symmetric memory.
        """
        method = "set_custom_reduce_scatter"
        self._check_custom(method)
        self._change(reduce_scatter=_checked_comm(comm, method))

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Give reduce-scatters a process group of their own, so that they overlap all-gathers.

        Collective: call it on all ranks alike.

        Args:
            enable: ``False`` returns to the shard axis's group. Default ``True``.
            recurse: whether units below follow. Default ``True``.
        """
        made: dict[Any, GroupCollectives] = {}
        for group in self._groups(recurse):
            shared = group.collectives
            if not isinstance(shared, GroupCollectives):
                continue
            if not enable:
                group.set_reducers(shared)
                continue
            if shared.group not in made:
                made[shared.group] = shared.separate()
            group.set_reducers(made[shared.group])

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Choose of how many reductions the inputs may be alive at a time.

        Args:
            max_input_buffers: ``1`` (default behaviour) lets the compute stream wait for a
                reduce-scatter before the next one's input is made; more overlaps more and holds
                more memory. The largest value below a root counts.
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
        for hooks in hooks_below(self, recurse):
            hooks.unit.input_buffers = max_input_buffers
            if hooks.scheduler is not None:
                hooks.scheduler.refresh()

    # ---- memory

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether freed parameters keep their memory, so that their addresses stay.

        Args:
            keep: ``True`` for CUDA graph capture. Default behaviour is ``False``.
            recurse: whether units below follow. Default ``True``.
        """
        self._change(recurse=recurse, keep_storage=bool(keep))

    def set_keep_gradient_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether sharded gradients keep their memory and their ``.grad`` objects.

        They are then made once: a step allocates nothing for them and takes less host time, and
        their addresses stay. In exchange ``zero_grad()`` does not free them, so that a shard's size
        of memory is taken from the first backward on, and an old ``.grad`` that somebody holds
        shows the next backward's gradient: clone what should last. Results are the same.
        Gradients that are there when a backward ends are added to, as always.

        On a mesh of one rank gradients are autograd's own, and nothing is kept.

        Args:
            keep: default behaviour is ``False``.
            recurse: whether units below follow. Default ``True``.

        Example::

            model.set_keep_gradient_storage(True)
        """
        self._change(recurse=recurse, keep_gradients=bool(keep))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take collectives' buffers from the process group's own allocator; not recursive.

        Parameters and gradients then travel packed, in buffers that the backend can move without
        copies of its own (NCCL: over NVLink or InfiniBand SHARP).

        Args:
            enable: ``True`` from the next gather and reduction on; backends without an allocator
                use plain memory. ``False`` returns to the built-in way.

        Raises:
            ValueError: the unit has collectives of the user's, or in symmetric memory.
        """
        self._check_memory("set_allocate_memory_from_process_group_for_comm", GroupMemory, enable)
        for group in self._groups(recurse=False):
            shared = process_group(group)
            if shared is None:
                continue
            gather = GroupAllGather(shared) if enable else None
            reduce = GroupReduceScatter(shared) if enable else None
            if enable or isinstance(group.options.all_gather, GroupMemory):
                options = replace(group.options, all_gather=gather, reduce_scatter=reduce)
                group.set_options(options)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Take all-gathers' buffers from symmetric memory; not recursive.

        Reduce-scatters follow with `set_force_sum_reduction_for_comms`, since NCCL's symmetric ones
        only sum.

        Args:
            backend: only ``"NCCL"``, the default.

        Raises:
            ValueError: ``backend`` is another one, the process group's is, or the unit has
                collectives of the user's or in memory of the process group.
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
        for group, _ in groups:
            options = replace(group.options, all_gather=SymmetricAllGather(backend))
            group.set_options(_in_symmetric_memory(options))

    # ---- helpers

    def _groups(self, recurse: bool) -> Iterator[ParamGroup]:
        hooks_on(self)
        for hooks in hooks_below(self, recurse):
            yield from hooks.unit.groups

    def _one_group(self, method: str) -> ParamGroup | None:
        groups = hooks_on(self).unit.groups
        if len(groups) > 1:
            raise ValueError(
                f"{method} cannot be used on a unit whose parameters are on several meshes "
                f"({len(groups)} groups), since it would not know which one is meant; call "
                f"fully_shard on the modules of one mesh apart from the others"
            )
        return groups[0] if groups else None

    def _check_custom(self, method: str) -> None:
        group = self._one_group(method)
        if group is not None:
            comm = conflicting((group.options.all_gather, group.options.reduce_scatter), None)
            if comm is not None:
                raise ValueError(
                    f"{method} cannot be used where set_allocate_memory_from_process_group_for_comm"
                    f" or set_symm_mem_for_comm chose the collectives' memory "
                    f"({type(comm).__name__}); your own collective allocates its buffers itself"
                )

    def _check_memory(self, method: str, memory: Memory, enable: bool) -> None:
        for group in self._groups(recurse=False) if enable else ():
            comm = conflicting((group.options.all_gather, group.options.reduce_scatter), memory)
            if comm is not None:
                raise ValueError(
                    f"{method} cannot be used where {type(comm).__name__} runs the collectives of "
                    f"'{group.name}', which allocates their buffers itself; use one of the two"
                )

    def _change(self, recurse: bool = False, **options: Any) -> None:
        hooks_on(self)
        for hooks in hooks_below(self, recurse):
            hooks.unit.change(**options)


def _in_symmetric_memory(options: GroupOptions) -> GroupOptions:
    """Options whose reduce-scatters are in symmetric memory too, if they only sum."""
    comm = SymmetricReduceScatter("NCCL") if options.sum_only else None
    return replace(options, reduce_scatter=comm)


def _checked_comm(comm: Any, method: str) -> Any:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"{method} takes an object with allocate() and __call__(), not "
            f"{type(comm).__name__}; subclass fsdp2.AllGather or fsdp2.ReduceScatter"
        )
    return comm
