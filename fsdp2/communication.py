"""Methods of a sharded module that say what travels, and how.

    setter ──> GroupOptions, replaced as a whole ──> group binds transports and reduction steps

Each applies to the unit it is called on, unless its ``recurse`` says that units below follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import nn

from fsdp2.core.collectives import AllGather, GroupCollectives, ReduceScatter
from fsdp2.core.config import MixedPrecisionPolicy
from fsdp2.core.group import ParamGroup
from fsdp2.core.hooks import UnitHooks, hooks_of


def hooks_on(module: Any) -> UnitHooks:
    """The hooks of a sharded module; raises where it is not sharded."""
    hooks = hooks_of(module)
    if hooks is None:
        raise ValueError(
            f"{type(module).__name__} is not sharded; call fully_shard on it before its methods"
        )
    return hooks


def hooks_below(module: Any, recurse: bool) -> list[UnitHooks]:
    """The hooks on a module and, with ``recurse``, below it; each once."""
    members = cast(nn.Module, module).modules() if recurse else [module]
    found = {hooks: None for member in members if (hooks := hooks_of(member)) is not None}
    return list(found)


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

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients by ``factor`` instead of averaging over the ranks; not recursive.

        Args:
            factor: a positive number; ``1.0`` sums over all data-parallel ranks.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor takes a positive number, not {factor!r}")
        self._change(divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let collectives only sum, and divide in kernels of their own; not recursive.

        Args:
            enable: ``True`` for transports that cannot average, such as NCCL's zero-copy ones.
        """
        self._change(sum_only=bool(enable))

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Reduce parameters without a gradient as zeros, and give them the result as ``.grad``.

        Ranks on which different parameters of a unit are used run the same collectives in any
        case. This is for units whose outputs some ranks do not use at all: their backward is taken
        through the collectives of one that uses them, in the same order. All ranks must run the
        same forwards.

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
        hook: Callable[[torch.Tensor], None],
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Call ``hook`` with every reduced flat gradient of this unit, before it is delivered.

        Args:
            hook: called with a 1-D tensor in the reduce dtype, to change in place: the
                reduce-scatter's output, or with replicas the all-reduce's. A unit whose parameters
                reduce in several dtypes calls it once for each.
            stream: stream to run it on; ``None`` (default) for the all-reduce stream. Only without
                a replicate axis.

        Raises:
            ValueError: the unit has parameters on several meshes, or replicas and a stream.
        """
        group = self._one_group("set_all_reduce_hook")
        if group is None:
            return
        if stream is not None and group.replicas is not None:
            raise ValueError(
                "set_all_reduce_hook(stream=…) cannot be used with a replicate axis, whose "
                "all-reduce stream runs the hook; leave stream out"
            )
        self._change(all_reduce_hook=hook, all_reduce_hook_stream=stream)

    # ---- collectives

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit's parameters with ``comm``; not recursive.

        Args:
            comm: allocates the collective's buffer and runs it; see `AllGather`.

        Raises:
            TypeError: ``comm`` has no ``allocate`` or cannot be called.
            ValueError: the unit has parameters on several meshes.
        """
        self._one_group("set_custom_all_gather")
        self._change(all_gather=_checked_comm(comm, "set_custom_all_gather"))

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this unit's gradients with ``comm``; not recursive.

        Args:
            comm: allocates the collective's buffers and runs it; see `ReduceScatter`.

        Raises:
            TypeError: ``comm`` has no ``allocate`` or cannot be called.
            ValueError: the unit has parameters on several meshes.
        """
        self._one_group("set_custom_reduce_scatter")
        self._change(reduce_scatter=_checked_comm(comm, "set_custom_reduce_scatter"))

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

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take collectives' buffers from the process group's own allocator; not recursive.

        Args:
            enable: ``True`` where the backend has one (NCCL: zero-copy transfers). Nothing changes
                where it has none.
        """
        raise NotImplementedError(enable)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Take collectives' buffers from symmetric memory; not recursive.

        Args:
            backend: only ``"NCCL"``, the default.
        """
        raise NotImplementedError(backend)

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
                f"({len(groups)} groups), since it would not know which one is meant"
            )
        return groups[0] if groups else None

    def _change(self, recurse: bool = False, **options: Any) -> None:
        for group in self._groups(recurse):
            group.set_options(replace(group.options, **options))


def _checked_comm(comm: Any, method: str) -> Any:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"{method} takes an object with allocate() and __call__(), not "
            f"{type(comm).__name__}; subclass fsdp2.AllGather or fsdp2.ReduceScatter"
        )
    return comm
