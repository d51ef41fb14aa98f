"""Methods of a sharded module that say what travels, and how.

    setter ──> GroupOptions, replaced as a whole ──> group binds transports and reduction steps

Each applies to the unit it is called on, unless its ``recurse`` says that units below follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch

from fsdp2.core.config import GroupOptions, MixedPrecisionPolicy
from fsdp2.core.device.collectives import (
    AllGather,
    GroupCollectives,
    ProcessGroup,
    ReduceScatter,
    backend_name,
)
from fsdp2.core.device.comm_memory import (
    GroupAllGather,
    GroupMemory,
    GroupReduceScatter,
    Memory,
    SymmetricAllGather,
    SymmetricMemory,
    SymmetricReduceScatter,
    conflicting,
)
from fsdp2.core.modules.assembly import process_group
from fsdp2.core.modules.dynamo import uncompiled_methods
from fsdp2.core.modules.registry import UnitRecord, records_below, require_record
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.interop import TorchIdentity

C = TypeVar("C")


@uncompiled_methods
class CommunicationControls(TorchIdentity):
    """The part of `FSDPModule` that is about communication."""

    # ---- what can be read

    def get_mp_policy(self) -> MixedPrecisionPolicy:
        """The mixed-precision policy that `fully_shard` was given."""
        return require_record(self).arguments.precision

    def get_reshard_after_forward(self) -> bool | int:
        """Whether this unit's forward frees the gathered parameters at its end.

        Returns:
            ``True`` or ``False``; an int where the shards of that many ranks are kept, as
            ``reshard_after_forward`` of `fully_shard` says. Where that was ``None``, the root
            answers ``False`` and others ``True``. Which module is the root is known from the first
            forward on; until then it answers ``True``, too.
        """
        unit = require_record(self).unit
        sizes = [g.smaller_group.collectives.size for g in unit.groups if g.smaller_group]
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
        for group in self._groups(recurse=False):
            if isinstance(group.options.all_gather, SymmetricAllGather):
                group.set_options(_in_symmetric_memory(group.options))

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
        made: dict[ProcessGroup, GroupCollectives] = {}
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
        for group in self._groups(recurse=False):
            shared = process_group(group)
            if shared is None:
                continue
            options = group.options
            gather, reduce = options.all_gather, options.reduce_scatter
            if enable:
                gather, reduce = GroupAllGather(shared), GroupReduceScatter(shared)
            else:  # what the user has set since stays
                gather = None if isinstance(gather, GroupMemory) else gather
                reduce = None if isinstance(reduce, GroupMemory) else reduce
            if gather is not options.all_gather or reduce is not options.reduce_scatter:
                group.set_options(replace(options, all_gather=gather, reduce_scatter=reduce))

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
        for group, _ in groups:
            options = replace(group.options, all_gather=SymmetricAllGather(backend))
            group.set_options(_in_symmetric_memory(options))

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
        if len(groups) > 1:
            raise ValueError(
                f"{method} cannot be used on a unit whose parameters are on several meshes "
                f"({len(groups)} groups), since it would not know which one is meant; call "
                f"fully_shard on the modules of one mesh apart from the others"
            )
        return groups[0] if groups else None

    def _check_memory(self, method: str, memory: Memory, enable: bool) -> None:
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


def _in_symmetric_memory(options: GroupOptions) -> GroupOptions:
    """Options whose reduce-scatters are in symmetric memory too, if they only sum."""
    comm = SymmetricReduceScatter("NCCL") if options.sum_only else None
    return replace(options, reduce_scatter=comm)


def _checked_comm(comm: C, method: str) -> C:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"{method} takes an object with allocate() and __call__(), not "
            f"{type(comm).__name__}; subclass fsdp2.AllGather or fsdp2.ReduceScatter"
        )
    return comm
