"""Kernels and process groups that record their calls; lanes are the recorder itself.

    with on_paper(recorder, "nccl", ranks): fully_shard(model, mesh=init_device_mesh("meta", …))

The scheduler, groups, transports and reductions are the real ones: they are given these objects
instead of a device's own. Backends are recognized as usual, by the class of the process group:
there is one class for each kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
import torch.distributed as dist

from fsdp2.core.errors import coded
from fsdp2.core.facts import (
    FlatBuffer,
    FusedKernels,
    Observer,
    ParamGroup,
    Run,
    Stage,
    Streams,
    Tensors,
    Traits,
    TransientBuffer,
    know,
    local_of,
    rehearsing,
)
from fsdp2.tracing.paper.null_group import NullGroup, NullWork, null_world
from fsdp2.tracing.paper.recording import Recording
from fsdp2.tracing.record.categories import GRADIENTS
from fsdp2.tracing.record.notes import replaced

META = torch.device("meta")


# ---- memory


class PaperBuffer(TransientBuffer):
    """A buffer whose memory is noted when it comes and goes."""

    __slots__ = ("_number", "_recorder")

    def __init__(self, nbytes: int, device: torch.device, name: str, recorder: Recording) -> None:
        super().__init__(nbytes, device, name)
        # One number for all its lives: its storage stays, and only its size changes.
        self._number = recorder.storage(self._raw, name=name)
        self._recorder = recorder

    def acquire(self) -> None:
        """Note that memory came."""
        if not self.allocated:
            self._recorder.allocate(self._number, self.nbytes)
        super().acquire()

    def release(self) -> None:
        """Note that it went."""
        if self.allocated and self.nbytes:
            self._recorder.free(self._number)
        super().release()


class PaperKernels(FusedKernels):
    """Memory that is noted by its name; copies are an accelerator's where there are lanes."""

    def __init__(self, recorder: Recording) -> None:
        super().__init__(META)
        self.fuses = recorder.asynchronous
        self._recorder = recorder
        self._constants: dict[tuple[int, float, torch.dtype], torch.Tensor] = {}

    def transient(self, nbytes: int, name: str) -> TransientBuffer:
        return PaperBuffer(nbytes, META, name, self._recorder)

    def flat(self, nbytes: int, on_meta: bool) -> FlatBuffer:
        buffer = super().flat(nbytes, on_meta)
        self._named(buffer.view(torch.uint8, 0, (nbytes,)), "shard")
        return buffer

    def host_flat(self, nbytes: int, on_meta: bool, pin: bool) -> FlatBuffer:
        buffer = FlatBuffer(nbytes, META)
        self._move_to_host(buffer.view(torch.uint8, 0, (nbytes,)), "shard")
        return buffer

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device=META)
        return self._move_to_host(made, "sharded gradient")

    def _named(self, made: torch.Tensor, name: str) -> torch.Tensor:
        self._recorder.storage(made, name=name)
        return made

    def _move_to_host(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        # The recorder counted it as the device's memory when it was made, because it is on meta.
        number = self._recorder.storage(tensor, name=name)
        self._recorder.free(number)
        self._recorder.allocate(number, tensor.untyped_storage().nbytes(), host=True)
        return tensor

    def bind_empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, name: str
    ) -> Callable[[], torch.Tensor]:
        made = super().bind_empty(shape, dtype, name)
        return lambda: self._named(made(), name)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        return self._named(super().zeros(shape, dtype, name), name)

    def constant(self, numel: int, value: float, dtype: torch.dtype, name: str) -> torch.Tensor:
        """One for all of this rehearsal: of one before, which is garbage, nothing counts."""
        found = self._constants.get((numel, value, dtype))
        if found is None:
            found = self._constants[numel, value, dtype] = self.zeros((numel,), dtype, name)
        return found

    def copy_strided(self, targets: Tensors, sources: Tensors, /) -> object:
        """A CPU has no layouts that it fuses."""
        copy = super().copy_strided if self.fuses else self.copy_many
        return copy(targets, sources)

    def fetched(self, source: torch.Tensor) -> torch.Tensor:
        """Numbers that the host reads: zeros, as nothing was computed."""
        return torch.zeros(source.shape, dtype=source.dtype)


# ---- process groups


class _CopyingWork(NullWork):
    """A collective that keeps a copy of the whole tensor until it is waited for.

    Gloo's (torch 2.11 to 2.15): a thread gathers into a copy, which it frees before the wait
    returns; the time at which it runs depends on the other ranks, and a plan assumes the worst. A
    tensor to reduce is cloned at the launch, and freed with the work, which is not kept after the
    wait.
    """

    def __init__(self, recorder: Recording, nbytes: int) -> None:
        super().__init__()
        self._recorder, self._copy = recorder, recorder.hidden(nbytes)

    def wait(self, timeout: object = None) -> bool:
        self._recorder.free(self._copy)
        return True


class NcclOnPaper(NullGroup):
    """NCCL, the engine that coalesces."""


class Nccl2OnPaper(NullGroup):
    """NCCL in torch 2.15's engine, which does not."""


class GlooOnPaper(NullGroup):
    """Gloo, which copies what it gathers and reduces."""

    copies = True


_GROUPS: dict[str, type[NullGroup]] = {
    "nccl": NcclOnPaper,
    "nccl2": Nccl2OnPaper,
    "gloo": GlooOnPaper,
}

know("NcclOnPaper", Traits("null", coalesces=True, premultiplies=True))
know("Nccl2OnPaper", Traits("null", premultiplies=True))
know("GlooOnPaper", Traits("null"))

_KINDS = {
    "all_gather_single": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "allreduce": "all-reduce",
}


def _note(
    recorder: Recording, group: NullGroup, name: str, outputs: Tensors, inputs: Tensors
) -> NullWork | None:
    """Note a collective of tensors on paper, by the tensors that are whole."""
    moved = inputs if name.startswith("reduce_scatter") else outputs
    if not moved or not moved[0].is_meta:
        return None
    nbytes = sum(tensor.nbytes for tensor in moved)
    kind = _KINDS.get(name.removesuffix("_coalesced"), name)
    copies = isinstance(group, GlooOnPaper) and group.copies
    copies = copies and name in ("all_gather_single", "reduce_scatter_single")
    work = _CopyingWork(recorder, nbytes) if copies else None
    recorder.collective(kind, nbytes, moved[0].dtype, group, len(moved))
    return work


# ---- what the engine does for which unit


def noting(recorder: Recording) -> Observer:
    """Notes operations under their group's name, and which tensors are gradients."""

    def note(group: ParamGroup, run: Run, *args: object) -> object:
        with recorder.acting(group.name or "(root)"):
            return run(*args)

    def tag(group: ParamGroup) -> None:
        gathered = [p.unsharded for p in group.params if p.unsharded is not None]
        grads = [local_of(param.grad) for param in gathered if param.grad is not None]
        recorder.tag(grads, GRADIENTS)

    def take(group: ParamGroup, run: Run, *args: object) -> object:
        """It takes what autograd has left, or keeps it for a later backward: gradients both."""
        tag(group)
        found = note(group, run, *args)
        tag(group)
        return found

    names = ("start_unshard", "finish_unshard", "shard_smaller", "reduce")
    taking = dict.fromkeys(("accumulate", "collect"), take)
    return Observer(5, {**dict.fromkeys(names, note), **taking})


# ---- all of it


class _Module:
    """The functions that torch expects in ``torch.<device type>``."""

    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    is_available = is_initialized = staticmethod(lambda: True)
    set_device = staticmethod(lambda device: None)


def module_of_meta() -> AbstractContextManager[None]:
    """Let there be a ``torch.meta`` inside: DTensor of torch 2.15 asks it for its devices."""
    return nullcontext() if hasattr(torch, "meta") else replaced(torch, meta=_Module)


@contextmanager
def on_paper(recorder: Recording, backend: str, world_size: int) -> Iterator[None]:
    """Let groups that are made inside run on paper, as rank 0 of many."""
    if dist.is_initialized():
        raise coded(
            RuntimeError,
            "plan-process-group",
            "a step cannot be planned in a process that has a process group; call plan() before "
            "init_process_group(), or in a separate process",
        )
    stage = Stage(cast(Streams, recorder), PaperKernels(recorder))
    note = functools.partial(_note, recorder)
    world = null_world(world_size, observer=note, device_type="meta", kind=_GROUPS[backend])
    with world, rehearsing(stage):
        yield
