"""The two kinds of memory that a group owns.

    FlatBuffer        persistent: the group's shards        [segment 0 | pad | segment 1 | …]
    TransientBuffer   temporary: gathered parameters, casts and packed collectives
    SwappedBuffer     the same if storages cannot be emptied: views are given other ``.data``

A TransientBuffer keeps its tensors permanently and frees their storage in between. Autograd saves
views of gathered parameters for backward; when the storage is filled again, those views are valid
again (I3, decision 4). A single storage means one allocation and one free per gather.

Each view has its own version counter (`_aliased`): collectives and copies increase the counter of
the view that they write to, never that of the parameter that autograd saved (invariant I4).
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides = []
    running = 1
    for length in reversed(shape):
        strides.append(running)
        running *= length
    return tuple(reversed(strides))


def _aliased(
    raw: torch.Tensor,
    dtype: torch.dtype,
    byte_offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
) -> torch.Tensor:
    """A view of ``raw``'s storage with its own version counter."""
    # A new tensor that is `set_`: a view would share its base's version counter (I4).
    typed = torch.empty(0, dtype=dtype, device=raw.device)
    if strides is None:
        strides = contiguous_strides(shape)
    typed.set_(raw.untyped_storage(), byte_offset // dtype.itemsize, shape, strides)
    return typed


def _separated(flat: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A part of a flat tensor, with a storage that begins and ends with the part."""
    numel = math.prod(shape)
    if numel == 0:
        return torch.empty(shape, dtype=flat.dtype, device=flat.device)
    if flat.is_meta:  # one storage, as the buffer is one allocation where a step is rehearsed
        start += int(flat.storage_offset())
        return flat.as_strided(shape, contiguous_strides(shape), start).data
    part = flat.narrow(0, start, numel)
    if type(flat) is not torch.Tensor:  # no memory
        return _aliased(part.view(torch.uint8), flat.dtype, 0, shape, None)
    # By capsule: it orders no streams, and takes page-locked memory as what it is. In one dim, and
    # given its shape in place: capsules change strides of dims of one, a view has a base.
    own: torch.Tensor = from_dlpack(torch._C._to_dlpack(part))
    return own.resize_(shape)


def separate(tensor: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A part of a contiguous tensor with a storage of its own: see `FlatBuffer.piece`."""
    with torch.inference_mode(False):
        return _separated(tensor.detach().view(-1), start, shape)


@functools.cache
def empties_storages(device: torch.device) -> bool:
    """Whether a storage on ``device``, unlike XLA's, can be emptied while tensors have it."""
    if device.type in ("cpu", "meta"):
        return True
    storage = torch.empty(1, dtype=torch.uint8, device=device).untyped_storage()
    try:
        storage.resize_(0)
    except RuntimeError:
        return False
    return storage.nbytes() == 0


Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""A view in a flat tensor: its shape, strides and start; the last two in elements."""


def row_major(shape: tuple[int, ...], start: int) -> Strided:
    return shape, contiguous_strides(shape), start


class Buffer:
    """Memory that tensors are views of: one storage. They are valid while that is allocated."""

    __slots__ = ("_raw",)

    _raw: torch.Tensor
    allocated: bool = True
    name: str = "the flat buffer"

    def view(
        self,
        dtype: torch.dtype,
        byte_offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A tensor over the buffer, which must be allocated; ``strides`` are in elements."""
        assert self.allocated, f"{self.name} is not allocated"
        with torch.inference_mode(False):
            # The first forward may run in inference mode, whose tensors autograd could not save.
            return _aliased(self._raw, dtype, byte_offset, shape, strides)

    def views(
        self, dtype: torch.dtype, byte_offset: int, places: Sequence[Strided]
    ) -> list[torch.Tensor]:
        """Several views of a part of the buffer, for a third of the work each."""
        assert self.allocated, f"{self.name} is not allocated"
        first = byte_offset // dtype.itemsize
        with torch.inference_mode(False), torch.no_grad():
            # Empty: `as_strided` compares bounds with the storage only.
            whole = _aliased(self._raw, dtype, 0, (0,), None)
            # ``.data`` has a version counter of its own, and is no view for autograd.
            return [
                whole.as_strided(shape, strides, first + start).data
                for shape, strides, start in places
            ]

    def keep_valid(self, tensor: torch.Tensor) -> None:
        """Nothing to do: what shares the storage finds its memory there."""


class FlatBuffer(Buffer):
    """A persistent flat buffer, viewed in any dtype at any aligned offset; may be page-locked."""

    def __init__(self, nbytes: int, device: torch.device, pin: bool = False) -> None:
        with torch.inference_mode(False):
            # Zeros, because codecs encode the padding of shards, too: it takes part in a block's
            # scale.
            self._raw = torch.zeros(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)
        self.nbytes = nbytes
        self.device = device

    def piece(self, dtype: torch.dtype, byte_offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """As `view`, with a separate storage over its part of the memory, which it keeps alive.

        torch's operations on whole storages then apply only to the piece: ``torch.save`` and
        ``copy.deepcopy`` of one parameter exclude the others. ``torch.save`` could not write a
        DTensor whose rows begin in the middle of a storage, or views of one storage in two dtypes.
        """
        return self.pieces(dtype, byte_offset, math.prod(shape), [(0, shape)])[0]

    def pieces(
        self,
        dtype: torch.dtype,
        byte_offset: int,
        numel: int,
        places: Sequence[tuple[int, tuple[int, ...]]],
    ) -> list[torch.Tensor]:
        """As `piece`, of several in a part of the buffer: starts in elements, and shapes."""
        with torch.inference_mode(False):
            end = byte_offset + numel * dtype.itemsize
            flat = self._raw[byte_offset:end].view(dtype)
            return [_separated(flat, start, shape) for start, shape in places]

    @property
    def storage(self) -> torch.UntypedStorage:
        """The storage that every view shares."""
        return self._raw.untyped_storage()


_kept: set[str] = set()
"""Names of buffers that warned of memory which is not freed."""

_all: weakref.WeakSet[TransientBuffer] = weakref.WeakSet()


def all_buffers() -> list[TransientBuffer]:
    """The buffers of this process whose memory comes and goes, in no particular order."""
    return [buffer for buffer in _all if not buffer._raw.is_meta]


class TransientBuffer(Buffer):
    """A flat buffer whose memory is allocated only between ``acquire`` and ``release``.

    Views are created once, while the buffer is first allocated, and stay valid objects permanently.
    Only this class resizes the storage, so that ``allocated`` (always, for an empty buffer) knows.
    """

    __slots__ = ("__weakref__", "_storage", "allocated", "name", "nbytes")

    def __init__(self, nbytes: int, device: torch.device, name: str) -> None:
        with torch.inference_mode(False):
            self._raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._storage = self._raw.untyped_storage()
        self.nbytes = nbytes
        self.name = name
        self.allocated = True
        _all.add(self)

    def references(self) -> int:
        """How many tensors and others refer to the memory, autograd's among them."""
        return torch._C._storage_Use_Count(self._storage._cdata)

    def acquire(self) -> None:
        """Allocate on the current stream, if the memory is not there; contents are undefined."""
        if not self.allocated:  # to resize would move memory that is there
            self._storage.resize_(self.nbytes)
            self.allocated = True

    def release(self) -> None:
        """Return the memory to the current stream's allocator, if torch can resize the storage."""
        # The storage object stays, because autograd saved views of it (decision 4).
        self.allocated = not self.nbytes  # first: an interrupt in between costs a copy at most
        try:
            self._storage.resize_(0)
        except RuntimeError:
            if self._storage.resizable():
                raise
            self._keep()

    def _keep(self) -> None:
        self.allocated = True
        if self.name not in _kept:
            _kept.add(self.name)
            warnings.warn(
                f"memory of {self.name} is not freed any more, as numpy() of an unsharded "
                f"parameter refers to it; call numpy() on a copy (param.detach().clone())",
                stacklevel=2,
            )


# ---- where storages cannot be emptied


class _Place(NamedTuple):
    """The position of a tensor in a buffer."""

    dtype: torch.dtype
    byte_offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class SavedPlace(NamedTuple):
    """Represents a tensor over gathered memory that autograd has saved; see `saved_in`."""

    buffer: SwappedBuffer
    place: _Place

    def tensor(self) -> torch.Tensor | None:
        """The same part of the present gathered memory; ``None`` if there is none."""
        if not self.buffer.allocated:
            return None
        with _plainly():
            return _aliased(self.buffer.raw, *self.place)


@contextmanager
def _plainly() -> Iterator[None]:
    """Tensors made inside are plain ones, whatever a transform or a mode around would make."""
    with torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.no_grad():
        yield


class SwappedBuffer(TransientBuffer):
    """As `TransientBuffer`, for devices on which only deleting a tensor frees memory.

    Views stay the same objects. While the memory is freed, each has one element as ``.data``,
    expanded to its own shape: NaN, or -1 of an integer dtype. An all-gather allocates new memory
    and assigns to each its part of it. Version counters belong to the tensors and do not change.

    A view of a view (``weight.t()``) is a separate tensor, which would hold the old memory. Those
    created at bind time are kept valid (`keep_valid`). Those that autograd saves are replaced by a
    `SavedPlace`, in hooks around forward (`fsdp2.core.modules.saved`). Other references stay valid,
    and keep their memory.
    """

    __slots__ = ("_device", "_followers")

    def __init__(self, nbytes: int, device: torch.device, name: str) -> None:
        super().__init__(nbytes, device, name)
        self._device = device
        # Weak: `Bound.reroute` makes other views of the same buffer, and the earlier ones end.
        self._followers: list[tuple[weakref.ref[torch.Tensor], _Place]] = []
        _present[self._storage._cdata] = self

    @property
    def raw(self) -> torch.Tensor:
        return self._raw

    def view(
        self,
        dtype: torch.dtype,
        byte_offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        made = super().view(dtype, byte_offset, shape, strides)
        self.keep_valid(made)
        return made

    def views(
        self, dtype: torch.dtype, byte_offset: int, places: Sequence[Strided]
    ) -> list[torch.Tensor]:
        made = super().views(dtype, byte_offset, places)
        for each in made:
            self.keep_valid(each)
        return made

    def keep_valid(self, tensor: torch.Tensor) -> None:
        """Let ``tensor`` have the memory of each gather; no-op for one that is not over it."""
        if tensor.untyped_storage()._cdata == self._storage._cdata:
            self._followers = [each for each in self._followers if each[0]() is not None]
            self._followers.append((weakref.ref(tensor), _place_of(tensor)))

    def references(self) -> int:
        """How many refer to the memory besides this buffer and what follows it."""
        if not self.allocated or not self.nbytes:
            return 0
        own = sum(tensor() is not None for tensor, _ in self._followers)
        return super().references() - own - 2  # and `_raw` and `_storage`

    def acquire(self) -> None:
        """Bring new memory, if there is none, and point to it."""
        if self.allocated:
            return
        with _plainly():
            self._raw = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
            self._storage = self._raw.untyped_storage()
            _present[self._storage._cdata] = self
            for reference, place in self._followers:
                tensor = reference()
                if tensor is not None:
                    tensor.data = _aliased(self._raw, *place)
        self.allocated = True

    def release(self) -> None:
        """Point to nothing, so that the memory goes."""
        if not self.nbytes or not self.allocated:
            return
        self.allocated = False
        # The key is an address, which another storage may have next.
        _present.pop(self._storage._cdata, None)
        with _plainly():
            for reference, place in self._followers:
                tensor = reference()
                if tensor is not None:
                    tensor.data = absent(place.dtype, self._device).expand(place.shape)
            self._raw = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._storage = self._raw.untyped_storage()


_present: weakref.WeakValueDictionary[int, SwappedBuffer] = weakref.WeakValueDictionary()
"""By the address of the storage that is there now."""


def saved_in(tensor: torch.Tensor) -> SavedPlace | None:
    """The position of ``tensor`` in memory of a `SwappedBuffer`, if it is over one."""
    buffer = _present.get(tensor.untyped_storage()._cdata)
    return None if buffer is None else SavedPlace(buffer, _place_of(tensor))


def _place_of(tensor: torch.Tensor) -> _Place:
    offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
    return _Place(tensor.dtype, offset, tuple(tensor.shape), tensor.stride())


@functools.cache
def absent(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The data of a tensor while its memory is freed: of shape ``(1,)``, not to be written."""
    with _plainly():
        # A bool of other bits than 0 and 1 is undefined.
        if dtype is torch.bool:
            return torch.zeros(1, dtype=dtype, device=device)
        # All bits are 1, which is NaN in nearly all floating-point formats: a read of freed memory
        # shows.
        ones = torch.full((dtype.itemsize,), 255, dtype=torch.uint8)
        return ones.view(dtype).to(device)
