"""The tensor operations that transports and reductions launch on the current stream.

They are few, so that the same code also runs on simulated tensors (`fsdp2.testing.virtual`), where
each call states what it reads and writes. If torch's own function
takes exactly these arguments, it is used directly, which saves a call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fsdp2.core.device.buffers import (
    FlatBuffer,
    SwappedBuffer,
    TransientBuffer,
    empties_storages,
)
from fsdp2.core.device.fingerprint import bind_fingerprint, differ
from fsdp2.core.device.streams import Streams, make_streams
from fsdp2.core.errors import coded

Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]
"""The argument of torch's functions of many tensors."""


_add_many: Callable[[Tensors, Tensors], object] = torch._foreach_add_
_copy_many: Callable[[Tensors, Tensors], object] = torch._foreach_copy_
_chunk_cat: Callable[..., object] = torch._chunk_cat
_divide: Callable[[torch.Tensor, float], object] = torch.Tensor.div_

_constants: weakref.WeakValueDictionary[
    tuple[torch.device, int, float, torch.dtype], torch.Tensor
] = weakref.WeakValueDictionary()


class Kernels:
    """Memory and copies of one device; if it ``fuses``, one kernel copies many tensors.

    These are a CPU's; others are subclasses.
    """

    fuses = False

    copy_many = staticmethod(_copy_many)
    """Copy pairwise, in one fused kernel where the device and the tensors allow it."""

    copy_strided = staticmethod(_copy_many)  # a CPU copies one by one in any case
    """As `copy_many` into contiguous tensors, where sources may have any strides."""

    add_many = staticmethod(_add_many)
    """Add pairwise, in place."""

    chunk_cat = staticmethod(_chunk_cat)  # fused on accelerators, the cast included
    """Rows of each tensor in equal (zero-padded) chunks → ``out``: [chunks, …]."""

    divide = staticmethod(_divide)
    """Divide in place."""

    bind_fingerprint = staticmethod(bind_fingerprint)
    differ = staticmethod(differ)

    def __init__(self, device: torch.device, blocks: bool = False) -> None:
        self._device = device
        # Without streams, a copy is there when its call returns, and memory need not be pinned.
        self._non_blocking = not blocks
        self._pins = device.type != "cpu" and not blocks
        self._transient = TransientBuffer if empties_storages(device) else SwappedBuffer

    def transient(self, nbytes: int, name: str) -> TransientBuffer:
        """A buffer that comes and goes."""
        return self._transient(nbytes, self._device, name)

    def flat(self, nbytes: int, on_meta: bool) -> FlatBuffer:
        """A persistent buffer."""
        return FlatBuffer(nbytes, torch.device("meta") if on_meta else self._device)

    def host_flat(self, nbytes: int, on_meta: bool, pin: bool) -> FlatBuffer:
        """A persistent buffer in CPU memory, page-locked if ``pin``."""
        return FlatBuffer(nbytes, torch.device("meta" if on_meta else "cpu"), pin)

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> torch.Tensor:
        """A new tensor in CPU memory, page-locked if ``pin``."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pin)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, casting where dtypes differ; to or from page-locked memory the host does not wait:
        the result is available after the lane has run this call.
        """
        target.copy_(source, non_blocking=self._non_blocking)

    to_host = from_host = copy

    def bind_empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, name: str
    ) -> Callable[[], torch.Tensor]:
        """A function that creates a new tensor, freed with its last reference."""
        # One by one: torch looks at a tuple for symbolic sizes, which takes half as long again.
        return functools.partial(torch.empty, *shape, dtype=dtype, device=self._device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def constant(self, numel: int, value: float, dtype: torch.dtype, name: str) -> torch.Tensor:
        """A flat tensor of one value, which is never written: one for all that ask for the same, as
        long as one of them has it.
        """
        key = (self._device, numel, value, dtype)
        found = _constants.get(key)
        if found is None:
            # The first caller shares it with all others, which may be in another mode.
            with torch.inference_mode(False):
                found = torch.full((numel,), value, dtype=dtype, device=self._device)
            _constants[key] = found
        return found

    def fetched(self, source: torch.Tensor) -> torch.Tensor:
        """A tensor's copy in CPU memory, available once the host has waited for the lane."""
        # From a device to pageable memory, a copy would make the host wait.
        target = self.host_empty(tuple(source.shape), source.dtype, self._pins)
        self.to_host(target, source)
        return target

    def numbers(self, tensor: torch.Tensor) -> list[float]:
        """The numbers in a flat tensor in CPU memory."""
        found: list[float] = tensor.tolist()
        return found

    def pieces(self, flat: torch.Tensor, sizes: Sequence[int]) -> Tensors:
        """Consecutive flat views of ``flat``, by one call: cheaper than a narrow each."""
        return flat.split_with_sizes(sizes)

    def transform(
        self,
        function: Callable[[torch.Tensor, torch.Tensor], None],
        target: torch.Tensor,
        source: torch.Tensor,
    ) -> None:
        """Run operators of a codec, which read ``source`` and write ``target``."""
        function(target, source)

    def split_copy(self, source: torch.Tensor, sizes: Sequence[int], targets: Tensors) -> None:
        """``source``: [ranks, sum(sizes)], contiguous rows → ``targets[i]``: [ranks, sizes[i]]; one
        fused kernel on accelerators.
        """
        torch.split_with_sizes_copy(source, sizes, dim=1, out=targets)


class FusedKernels(Kernels):
    """Those of an accelerator, where torch fuses copies of many tensors."""

    fuses = True

    def copy_strided(self, targets: Tensors, sources: Tensors, /) -> object:
        """One kernel for contiguous pairs; torch copies all one by one if a single pair is not."""
        # (ForeachBinaryOpList.cu: one transposed gradient would cost a kernel per parameter.)
        alike: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for target, source in zip(targets, sources, strict=True):
            if source.is_contiguous():
                alike[0].append(target)
                alike[1].append(source)
            else:
                self.copy(target, source)
        if alike[0]:
            self.copy_many(*alike)
        return None


def kernels_for(device: torch.device, has_streams: bool) -> Kernels:
    """Those of ``device``."""
    if device.type in ("cpu", "meta"):
        return Kernels(device)
    return FusedKernels(device) if has_streams else Kernels(device, blocks=True)


# ---- what groups of a device run on

META = torch.device("meta")


@dataclass(frozen=True)
class Stage:
    """Lanes and memory of a device."""

    streams: Streams
    kernels: Kernels


_stages: dict[torch.device, Stage] = {}
_rehearsed: list[Stage] = []
"""The stage of the running rehearsal, on ``meta``: lanes and memory of the planned device."""


def stage_of(device: torch.device) -> Stage:
    """The lanes and kernels of ``device``, for all groups on it."""
    if device == META and _rehearsed:
        return _rehearsed[0]
    if device not in _stages:
        streams = make_streams(device)
        _stages[device] = Stage(streams, kernels_for(device, streams.asynchronous))
    return _stages[device]


@contextmanager
def rehearsing(on: Stage) -> Iterator[None]:
    """Let groups on ``meta`` that are made inside run on a stage, which records what they do; a
    process makes one plan at a time.
    """
    if _rehearsed:
        raise coded(
            RuntimeError,
            "plan-rehearsal",
            "another plan is being made in this process; wait until it has ended",
        )
    _rehearsed.append(on)
    try:
        yield
    finally:
        _rehearsed.clear()
