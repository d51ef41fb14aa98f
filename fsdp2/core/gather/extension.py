"""Parameters whose tensor subclass defines the sent tensors, and builds the result.

    shard ── fsdp_pre_all_gather ──> inputs ── copy ──> own row of [ranks, n bytes]
          ══ one all-gather of bytes ══> rows ── copy ──> outputs
          ── fsdp_post_all_gather ──> the gathered parameter

    own row   [ a: int8 … | pad | a: float32 … | pad | b: bfloat16 … | pad ]     16 bytes aligned
    outputs   [ranks * rows, …] of every input, each in a separate storage

The subclass's methods, as torch's FSDP2 calls them:

    fsdp_pre_all_gather(mesh)                                          either signature
    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        -> (inputs, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)
        -> (gathered tensor, tensors that are freed and refilled with it)     the first time
        -> None; fills ``out``, the gathered parameter                        later
    fsdp_should_release_all_gather_outputs_after_post_all_gather() -> bool    optional

The results of each rank's first call are compared over the ranks, once: shapes or dtypes that
differ raise on all of them; a collective would hang or mix up bytes.
"""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions
from fsdp2.core.custom_collectives import AllGather, checked_buffer
from fsdp2.core.device.buffers import TransientBuffer, contiguous_strides
from fsdp2.core.device.collectives import Collectives, Work
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.gather.program import Gather
from fsdp2.core.layout.layout import (
    COLLECTIVE_ALIGN_BYTES,
    Cut,
    Segment,
    Slot,
)
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.params.param import POST_HOOK, PRE_HOOK, ShardedParam, compute_dtype
from fsdp2.core.pieces import round_up

RELEASE_HOOK = "fsdp_should_release_all_gather_outputs_after_post_all_gather"

_FAILED = 0
"""A rank's value for a parameter whose hook raised; digests are odd."""


class Input(NamedTuple):
    """One input of the all-gather: the same on all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes on one rank."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the contents of a tensor subclass."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.as_subclass(torch.Tensor)]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]


def check_hooks(name: str, local: torch.Tensor, cut: Cut, even: bool) -> None:
    """Raise, naming the parameter, if its subclass cannot be gathered through its hooks.

    A subclass that wraps other tensors must have them: without them, it would become one plain
    tensor. On the meta device it may get them later. ``even``: all ranks hold equally much of it.
    """
    kind = type(local).__name__
    has = [hasattr(local, hook) for hook in (PRE_HOOK, POST_HOOK)]
    needs = hasattr(local, RELEASE_HOOK) or (
        is_traceable_wrapper_subclass(local) and not local.is_meta
    )
    if has[0] != has[1] or (needs and not has[0]):
        missing = PRE_HOOK if not has[0] else POST_HOOK
        raise coded(
            ValueError,
            "hooks-missing",
            f"parameter '{name}' is a {kind}, which has no {missing}; all-gather extensions need "
            f"both {PRE_HOOK} and {POST_HOOK}",
        )
    if not has[0]:
        return
    signature = inspect.signature(getattr(local, PRE_HOOK))
    if len(signature.parameters) not in (1, 5):
        raise coded(
            ValueError,
            "hooks-arguments",
            f"parameter '{name}' is a {kind}, whose {PRE_HOOK}{signature} takes "
            f"{len(signature.parameters)} arguments; it must take (mesh) or (mesh, outer_size, "
            f"outer_stride, module, mp_policy)",
        )
    if cut.bands > 1:
        raise coded(
            ValueError,
            "hooks-two-dims",
            f"parameter '{name}' has all-gather hooks, which support one shard dim, but it is "
            f"sharded on {cut}; let shard_placement_fn return one Shard for it",
        )
    if cut.dim != 0 and not even:
        raise coded(
            ValueError,
            "hooks-uneven",
            f"parameter '{name}' has all-gather hooks and is sharded on dim {cut.dim}, whose size "
            f"is not a multiple of the number of ranks; shard it on dim 0, or change that size",
        )


class ExtendedParam:
    """One parameter, its hooks, and their tensors; ``targets`` are [ranks, *input shape]."""

    def __init__(
        self,
        param: ShardedParam,
        slot: Slot,
        options: GroupOptions,
        device: torch.device,
        offload: CPUOffloadPolicy | None,
    ) -> None:
        self.param, self.slot = param, slot
        self._options, self._device, self._offload = options, device, offload
        self.inputs: tuple[Input, ...] = ()
        check_hooks(param.name, param.local, slot.cut, slot.even)
        release = getattr(param.local, RELEASE_HOOK, None)
        self._releases = False if release is None else release()
        if not isinstance(self._releases, bool):
            raise self._wrong(RELEASE_HOOK, f"a bool, not {self._releases!r}")
        self._takes_all = len(inspect.signature(getattr(param.local, PRE_HOOK)).parameters) == 5
        self._mesh: DeviceMesh = param.axes.shard_mesh
        self._gathered: torch.nn.Parameter | None = None
        self._guarded: tuple[torch.Tensor, ...] = ()  # versions are kept while it is filled
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        self._metadata: object = None
        self.forget()

    def forget(self) -> None:
        """Forget its inputs: the next gather begins from nothing."""
        self._known = False
        self._buffers: list[TransientBuffer] = []
        self._outputs: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []

    # ---- before the all-gather

    def pre(self) -> list[torch.Tensor]:
        """Run the pre hook on the present rows of this rank."""
        param = self.param
        local: Any = param.local
        if self._offload is not None:
            # By itself: extended parameters are not in the flat shard, which the mirror copies as a
            # whole.
            local = local.to(self._device, non_blocking=True)
        arguments: tuple[object, ...] = (self._mesh,)
        if self._takes_all:
            strides = contiguous_strides(param.shape)
            module, _ = next(iter(param.entries))
            arguments += (torch.Size(param.shape), strides, module, self._options.precision)
        result = getattr(local, PRE_HOOK)(*arguments)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise self._wrong(PRE_HOOK, f"(inputs, metadata), not {type(result).__name__}")
        inputs, self._metadata = list(result[0]), result[1]
        for tensor in inputs:
            if not hasattr(tensor, "dtype"):
                raise self._wrong(PRE_HOOK, f"tensors, not a {type(tensor).__name__}")
        found = tuple(Input(tuple(tensor.shape), tensor.dtype) for tensor in inputs)
        if self._known and found != self.inputs:
            raise coded(
                ShardingStateError,
                "hooks-changing",
                f"{PRE_HOOK} of parameter '{param.name}' returned {_text(found)}, but "
                f"{_text(self.inputs)} before; it must always return the same shapes and dtypes",
            )
        self.inputs = found
        return inputs

    def learn(self, kernels: Kernels, ranks: int) -> list[torch.Tensor]:
        """Run the pre hook for the first time, and make memory for the outputs."""
        inputs, slot = self.pre(), self.slot
        if slot.dim != 0 and any(i.shape != slot.local_shape(0) for i in self.inputs):
            raise self._wrong(
                PRE_HOOK,
                f"inputs of the shard's shape {slot.local_shape(0)} where it is sharded on "
                f"dim {slot.dim}, not {_text(self.inputs)}",
            )
        for index, found in enumerate(self.inputs):
            shape, dtype = found
            name = f"{self.param.name}, all-gather output {index}"
            buffer = kernels.transient(ranks * found.nbytes, name)
            whole = (ranks * shape[0], *shape[1:]) if shape else (ranks,)
            self._outputs.append(buffer.view(dtype, 0, whole))
            # The ranks' pieces in an output are one after another on the sharded dim.
            strides = (torch.Size(shape).numel(), *contiguous_strides(shape))
            if slot.dim != 0:
                strides = (slot.chunk * slot.inner, *contiguous_strides(slot.shape))
            # Apart from the tensor that the hook gets: writes must not increment its version (I4).
            self.targets.append(buffer.view(dtype, 0, (ranks, *shape), strides))
            buffer.release()
            self._buffers.append(buffer)
        self._known = True
        return inputs

    # ---- after it

    def acquire(self) -> None:
        for buffer in self._buffers:
            buffer.acquire()

    def post(self) -> bool:
        """Run the post hook: make the gathered parameter, or fill it again; whether it is new."""
        hook = getattr(self.param.local, POST_HOOK)
        dtype = compute_dtype(self._options, self.param)
        # Dropped here, as it may hold tensors of this gather.
        metadata, self._metadata = self._metadata, None
        outputs = tuple(self._outputs)
        is_new = self._gathered is None
        if is_new:
            self._make(hook(outputs, metadata, dtype))
        else:
            for storage, nbytes in self._storages:
                if storage.size() != nbytes:
                    storage.resize_(nbytes)
            # Autograd has saved these: an all-gather must not look like a user's write (I4).
            with _unsafe_preserve_version_counter(self._guarded):
                hook(outputs, metadata, dtype, out=self._gathered)
        if self._releases:
            self._release_outputs()
        return is_new

    def _make(self, result: object) -> None:
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise self._wrong(
                POST_HOOK,
                f"(gathered tensor, inner tensors) the first time, not {type(result).__name__}",
            )
        gathered, inner = result
        with torch.inference_mode(False), torch.no_grad():
            self.param.materialize(self._cut(gathered))
        made = self._gathered = self.param.unsharded
        assert made is not None
        known = {output.untyped_storage()._cdata for output in self._outputs}
        for tensor in inner:
            storage = tensor.untyped_storage()
            # Outputs have buffers that free them; these are the hook's own allocations.
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._storages.append((storage, storage.size()))
        self._guarded = (made, local_of(made), *self._outputs, *inner)

    def _cut(self, gathered: torch.Tensor) -> torch.Tensor:
        """The parameter's shape and strides, over a tensor that may have padding after it."""
        shape = self.param.shape
        strides = contiguous_strides(shape)
        if tuple(gathered.shape) == shape and gathered.stride() == strides:
            return gathered
        if gathered.numel() < torch.Size(shape).numel():
            raise self._wrong(
                POST_HOOK, f"a tensor of shape {shape}, not one of {tuple(gathered.shape)}"
            )
        cut: torch.Tensor = torch.as_strided(gathered, shape, strides, gathered.storage_offset())
        return cut

    def free(self) -> None:
        """Give back the memory of the gathered parameter."""
        self._release_outputs()
        for storage, _ in self._storages:
            storage.resize_(0)

    def _release_outputs(self) -> None:
        for buffer in self._buffers:
            buffer.release()

    def _wrong(self, hook: str, wanted: str) -> TypeError:
        return coded(
            TypeError,
            "hooks-result",
            f"{hook} of parameter '{self.param.name}' must return {wanted}",
        )


class Extension:
    """All extended parameters of a group, in one collective; the first gather makes them.

    ``made`` is called with each new unsharded parameter: weak, as its object owns this one.
    """

    def __init__(
        self,
        segment: Segment,
        params: Sequence[ShardedParam],
        collectives: Collectives,
        kernels: Kernels,
        options: GroupOptions,
        device: torch.device,
        offload: CPUOffloadPolicy | None,
        made: weakref.WeakMethod[Callable[[ShardedParam], None]],
    ) -> None:
        self.kernels, self.collectives = kernels, collectives
        self.comm: AllGather | None = None
        self._device, self._made = device, made
        self._members = [
            ExtendedParam(params[slot.index], slot, options, device, offload)
            for slot in segment.slots
        ]
        self._learned = False
        self._starts: list[int] = []  # of each input, in a rank's row
        self._width = 0
        self._inputs: list[torch.Tensor] | None = None  # of the all-gather that runs
        self._packed: torch.Tensor | None = None
        self._own: torch.Tensor | None = None

    def operations(self) -> Gather:
        """The operations of an all-gather; a single rank sends nothing."""
        release = [self._release]
        if self.collectives.size == 1:
            return Gather(copy_out=[self._run_hooks, self._copy_out], release=release)
        own = [self._acquire], [self._copy_in], [self._gather], [self._copy_out], release
        return Gather((), *own)

    def _run_hooks(self) -> None:
        """Run the pre hooks of this gather, unless `_learn` has: a hook runs once per gather."""
        with torch.inference_mode(False), torch.no_grad():
            if not self._learned:
                self._learn()
            elif self._inputs is None:
                self._inputs = [tensor for member in self._members for tensor in member.pre()]

    def _acquire(self) -> None:
        if not self._learned:
            self._run_hooks()
        numel = self.collectives.size * self._width
        if self.comm is None:
            self._packed = self.kernels.bind_empty((numel,), torch.uint8, "all-gather output")()
        else:
            self._packed = checked_buffer(self.comm, numel, torch.uint8, self._device)

    def _copy_in(self) -> None:
        self._run_hooks()
        with torch.inference_mode(False), torch.no_grad():
            assert self._packed is not None
            assert self._inputs is not None
            self._own = self._packed.narrow(0, self.collectives.rank * self._width, self._width)
            rows = self._pieces(self._own.view(1, self._width))
            targets = [row.view(i.shape) for row, i in zip(rows, self._described, strict=True)]
            self.kernels.copy_many(targets, self._inputs)

    def _gather(self) -> Work | None:
        assert self._packed is not None
        assert self._own is not None
        if self.comm is None:
            return self.collectives.all_gather(self._packed, self._own)
        return self.collectives.custom_all_gather(self.comm, self._packed, self._own)

    def _copy_out(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            pieces = self._inputs or []
            if self._packed is not None:
                pieces = self._pieces(self._packed.view(self.collectives.size, self._width))
            targets: list[torch.Tensor] = []
            for member in self._members:
                member.acquire()
                targets += member.targets
            sources = [p.view(t.shape) for p, t in zip(pieces, targets, strict=True)]
            self.kernels.copy_many(targets, sources)
            for member in self._members:
                if member.post():
                    notify = self._made()
                    assert notify is not None
                    notify(member.param)

    def _release(self) -> None:
        """Drop the sent tensors: the copy-in lane's work on them has ended."""
        self._packed = self._own = self._inputs = None

    def free(self) -> None:
        for member in self._members:
            member.free()

    @property
    def _described(self) -> list[Input]:
        return [i for member in self._members for i in member.inputs]

    def _pieces(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The inputs' places in packed rows: [ranks, numel] of each input's dtype."""
        return [
            rows.narrow(1, start, described.nbytes).view(described.dtype)
            for start, described in zip(self._starts, self._described, strict=True)
        ]

    def _learn(self) -> None:
        """Run the pre hooks for the first time, on COMPUTE, which allocates; lay results out."""
        inputs: list[list[torch.Tensor]] = []
        failure: Exception | None = None
        try:
            for member in self._members:
                inputs.append(member.learn(self.kernels, self.collectives.size))
        except Exception as error:
            # Raised after ranks have compared: others would wait in `exchange` for a rank that has
            # left.
            failure = error
        try:
            if self.collectives.size > 1:
                self._compare(len(inputs), failure)
            elif failure is not None:
                raise failure
        except BaseException:
            for member in self._members:  # of which some have outputs already
                member.forget()
            raise
        for described in self._described:
            self._starts.append(self._width)
            self._width += round_up(described.nbytes, COLLECTIVE_ALIGN_BYTES)
        self._learned = True
        self._inputs = [tensor for found in inputs for tensor in found]

    def _compare(self, known: int, failure: Exception | None) -> None:
        """Raise on all ranks where one of them failed or its inputs differ (invariant I1)."""
        digests = [
            _digest(member.inputs) if index < known else _FAILED
            for index, member in enumerate(self._members)
        ]
        everyones = self.collectives.exchange(digests)
        if failure is not None:
            raise failure
        for index, member in enumerate(self._members):
            name, slot = member.param.name, member.slot
            column = [numbers[index] for numbers in everyones]
            failed = [rank for rank, digest in enumerate(column) if digest == _FAILED]
            if failed:
                raise coded(
                    ShardingStateError,
                    "hooks-failed-elsewhere",
                    f"{PRE_HOOK} of parameter '{name}' failed on ranks {failed} of its shard "
                    f"axis; see the errors of those ranks",
                )
            others = [r for r, digest in enumerate(column) if digest != digests[index]]
            if others:
                raise coded(
                    ValueError,
                    "hooks-differ-over-ranks",
                    f"{PRE_HOOK} of parameter '{name}' of shape {slot.shape} returned "
                    f"{_text(member.inputs)} on this rank, but different ones on ranks {others} of "
                    f"its shard axis; all ranks must return the same shapes and dtypes, so pad "
                    f"shards with fewer than {slot.chunk} rows to {slot.local_shape(0)}",
                )


def _digest(inputs: tuple[Input, ...]) -> int:
    # `hash()` is salted per process; 56 bits, because ranks exchange signed int64.
    found = hashlib.sha256(repr(inputs).encode()).digest()
    return int.from_bytes(found[:7], "little") | 1


def _text(inputs: tuple[Input, ...]) -> str:
    return ", ".join(f"{i.shape} {i.dtype}" for i in inputs) or "nothing"
