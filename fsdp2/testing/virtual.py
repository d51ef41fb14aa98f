"""A device that exists only on paper: streams, memory and collectives without data.

The group, transports, reductions and scheduler run on it unchanged. Every operation states which
buffers it reads and writes, and `fsdp2.testing.races` finds every order that no event ensures:

    VirtualDevice ── Streams       record, wait, synchronize, on
                  ── Kernels       transient, flat, empty, copy, …
                  ── trace         what they did: `fsdp2.tracing.record.notes`
                  ── races         ["…", …], empty if the schedule is right
                  ── without(n)    the trace without a wait: the checker reports what it had ensured
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp2.core.device.buffers import Strided
from fsdp2.core.device.collectives import ReduceKind
from fsdp2.testing.races import Checker
from fsdp2.tracing.record.notes import HOST, Allocation, Free, Note, Notes, Operation, Place


class VirtualTensor:
    """A handle to an allocation; frees it when the last handle goes, like a tensor."""

    requires_grad = False

    def __init__(self, owner: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.owner = owner  # keeps the allocation alive
        self.shape = shape
        self.dtype = dtype

    @property
    def allocation(self) -> Allocation:
        found: Allocation = self.owner.allocation
        return found

    def is_contiguous(self) -> bool:
        return True

    def to(self, dtype: torch.dtype) -> VirtualTensor:
        """A cast copy."""
        device: VirtualDevice = self.owner.device
        result = device.empty(self.shape, dtype, "cast")
        device.copy(result, self)
        return result

    def as_strided(
        self, shape: tuple[int, ...], strides: tuple[int, ...], start: int
    ) -> VirtualTensor:
        """A view of ``shape``."""
        return VirtualTensor(self.owner, shape, self.dtype)

    def split_with_sizes(self, sizes: Sequence[int]) -> list[VirtualTensor]:
        """Views that differ in dim 0."""
        return [VirtualTensor(self.owner, (n, *self.shape[1:]), self.dtype) for n in sizes]

    def alias(self, *_: int) -> VirtualTensor:
        """A view of whatever part: the checker knows whole buffers only."""
        return VirtualTensor(self.owner, self.shape, self.dtype)

    reshape = transpose = view = alias

    def narrow(self, dim: int, start: int, length: int) -> VirtualTensor:
        """A view of a part."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return VirtualTensor(self.owner, shape, self.dtype)


class VirtualTransient:
    """A buffer that comes and goes; each life is an allocation of its own, the last of which it
    keeps.
    """

    allocation: Allocation

    def __init__(self, device: VirtualDevice, nbytes: int, name: str) -> None:
        self.device = device
        self.name = name
        self.nbytes = nbytes
        self.pinned = self.allocated = False
        self.acquire()

    def view(
        self,
        dtype: torch.dtype,
        byte_offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> VirtualTensor:
        return VirtualTensor(self, shape, dtype)

    def pieces(
        self,
        dtype: torch.dtype,
        byte_offset: int,
        numel: int,
        places: Sequence[tuple[int, tuple[int, ...]]],
    ) -> list[VirtualTensor]:
        return [VirtualTensor(self, shape, dtype) for _, shape in places]

    def views(
        self, dtype: torch.dtype, byte_offset: int, places: Sequence[Strided]
    ) -> list[VirtualTensor]:
        return [VirtualTensor(self, shape, dtype) for shape, _, _ in places]

    def acquire(self) -> None:
        if not self.allocated:
            self.allocation = self.device.allocate(self.name)
            self.allocated = True

    def release(self) -> None:
        if self.allocated:
            self.device.free(self.allocation)
            self.allocated = False

    def keep_valid(self, tensor: object) -> None:
        """Each tensor asks its buffer."""

    def references(self) -> int:
        """The number of references to its views: none here."""
        return 0


Tensors = VirtualTensor | Sequence[VirtualTensor]


def _listed(tensors: Tensors) -> Sequence[VirtualTensor]:
    return [tensors] if isinstance(tensors, VirtualTensor) else tensors


def _kernel(kind: str, reads: int, writes: int) -> Callable[..., None]:
    """A method that runs an operation on its arguments at these places."""

    def run(device: VirtualDevice, *args: Any) -> None:
        device.run(kind, _listed(args[reads]), _listed(args[writes]))

    return run


class _Counted(VirtualTransient):
    """Frees its allocation when nothing refers to it any more."""

    def __init__(self, device: VirtualDevice, name: str) -> None:
        super().__init__(device, 0, name)

    def __del__(self) -> None:
        self.release()


class VirtualDevice(Notes):
    """Streams, kernels and the checker.

    Attributes:
        trace: all notes, in the order of the host's calls.
        waits: labels of all waits so far, except those that `follow` adds.
        live: bytes are not simulated; the allocations that are live now.
        others_had: whether other ranks are to have the gradients that this one lacks.
    """

    fuses = True
    others_had = False

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[Note] = self.notes
        self.waits: list[str] = []
        self.live: set[Allocation] = set()
        self.checker = Checker()
        self._waits: list[int] = []  # positions in the trace
        self._written: dict[int, int] = {}  # the last position that wrote an allocation

    def note(self, note: Note) -> None:
        """Add to the record, and check it."""
        super().note(note)
        self.checker.take(note)

    @property
    def races(self) -> list[str]:
        """The races that the checker found, a sentence each."""
        return self.checker.races

    def without(self, number: int) -> list[Note]:
        """The trace without the wait of this number, to test the checker and the wait."""
        place = self._waits[number]
        return [*self.trace[:place], *self.trace[place + 1 :]]

    def wait(self, lane: Place, event: int | None, label: str) -> None:
        """A wait of the engine's."""
        self.waits.append(label)
        self._waits.append(len(self.trace))
        self.follow(lane, event, label)

    def follow(self, lane: Place, event: int | None, label: str = "") -> None:
        """A wait that is not the engine's, such as the user's own."""
        super().wait(lane, event, label)

    # ---- memory

    def allocate(self, name: str) -> Allocation:
        """A new allocation on the current lane."""
        note = Allocation(self.number(), lane=self.lane, name=name)
        self.note(note)
        self.live.add(note)
        return note

    def free(self, allocation: Allocation) -> None:
        """Give it back to the lane that it was allocated on."""
        self.note(Free(allocation.number, self.lane, allocation.name))
        self.live.discard(allocation)

    # ---- operations

    def run(
        self, kind: str, reads: Sequence[VirtualTensor], writes: Sequence[VirtualTensor]
    ) -> None:
        """An operation on the current lane, or on the host if it accesses only CPU memory."""
        read, written = _allocations(reads), _allocations(writes)
        lane: Place = HOST if read or written else self.lane
        for each in (*read, *written):
            if each.lane is not HOST:
                lane = self.lane
                break
        for each in written:
            self._written[each.number] = len(self.trace)
        self.note(Operation(lane, "", kind, reads=read, writes=written))

    # ---- Kernels

    def transient(self, nbytes: int, name: str) -> VirtualTransient:
        return VirtualTransient(self, nbytes, name)

    def flat(self, nbytes: int, on_meta: bool) -> VirtualTransient:
        return VirtualTransient(self, nbytes, "shard")

    def host_flat(self, nbytes: int, on_meta: bool, pin: bool) -> VirtualTransient:
        with self.on(HOST):
            buffer = VirtualTransient(self, nbytes, "host shard")
        buffer.pinned = pin
        return buffer

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> VirtualTensor:
        with self.on(HOST):
            owner = _Counted(self, "host gradient")
        owner.pinned = pin
        return VirtualTensor(owner, shape, dtype)

    def to_host(self, target: VirtualTensor, source: VirtualTensor) -> None:
        self.run("to_host", [source], [target])
        if not target.owner.pinned:
            self._come_back()

    def _come_back(self) -> None:
        """A copy with CPU memory that is not page-locked: its call returns when it is over."""
        self.follow(HOST, self.record(self.lane, ""), "a copy that blocks the host")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> VirtualTensor:
        """A new tensor on the current lane; freed when its last handle goes."""
        return VirtualTensor(_Counted(self, name), shape, dtype)

    def bind_empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, name: str
    ) -> Callable[[], VirtualTensor]:
        return functools.partial(self.empty, shape, dtype, name)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> VirtualTensor:
        tensor = self.empty(shape, dtype, name)
        self.run("zeros", [], [tensor])
        return tensor

    def constant(self, numel: int, value: float, dtype: torch.dtype, name: str) -> VirtualTensor:
        return self.zeros((numel,), dtype, name)

    def fetched(self, source: VirtualTensor) -> VirtualTensor:
        target = self.host_empty(source.shape, source.dtype, pin=True)
        self.to_host(target, source)
        return target

    def numbers(self, tensor: VirtualTensor) -> list[float]:
        """The value of ``others_had`` for each element: tensors have no values here."""
        self.run("numbers", [tensor], [])
        return [float(self.others_had)] * math.prod(tensor.shape)

    def pieces(self, flat: VirtualTensor, sizes: Sequence[int]) -> list[VirtualTensor]:
        return [VirtualTensor(flat.owner, (size,), flat.dtype) for size in sizes]

    def from_host(self, target: VirtualTensor, source: VirtualTensor) -> None:
        self.run("load", [source], [target])
        if not source.owner.pinned:
            self._come_back()

    copy = copy_many = copy_strided = _kernel("copy", reads=1, writes=0)
    split_copy = _kernel("copy_out", reads=0, writes=2)
    divide = _kernel("divide", reads=0, writes=0)

    def chunk_cat(
        self, tensors: Sequence[VirtualTensor], dim: int, chunks: int, *, out: VirtualTensor
    ) -> None:
        self.run("chunk_cat", tensors, [out])

    def transform(
        self, function: Callable[..., None], target: VirtualTensor, source: VirtualTensor
    ) -> None:
        self.run(function.__name__, [source], [target])

    def bind_fingerprint(self, tensors: Sequence[VirtualTensor]) -> Callable[[], object]:
        """For the last write to each: contents are not simulated."""

        def fingerprint() -> object:
            self.run("fingerprint", tensors, [])
            return [self._written.get(each.allocation.number) for each in tensors]

        return fingerprint

    def differ(self, now: Sequence[object], before: Sequence[object]) -> list[int]:
        return [int(one != other) for one, other in zip(now, before, strict=True)]

    def add_many(self, targets: Sequence[VirtualTensor], sources: Sequence[VirtualTensor]) -> None:
        self.run("add", [*targets, *sources], targets)


def _allocations(tensors: Sequence[VirtualTensor]) -> tuple[Allocation, ...]:
    """Those of tensors that have elements."""
    found: dict[int, Allocation] = {}
    for each in tensors:
        if 0 not in each.shape:
            allocation = each.owner.allocation
            found[allocation.number] = allocation
    return tuple(found.values())


class VirtualCollectives:
    """Collectives that move nothing."""

    premultiplies = False
    group = None

    rank = 0

    def __init__(self, device: VirtualDevice, size: int, coalesces: bool = False) -> None:
        self._device = device
        self.size = size
        self.coalesces = coalesces

    def all_gather(self, output: VirtualTensor, input_: VirtualTensor) -> None:
        self._device.run("all_gather", [input_], [output])

    def _bind(self, kind: str, outputs: Tensors, inputs: Tensors) -> Callable[[], None]:
        return lambda: self._device.run(kind, _listed(inputs), _listed(outputs))

    def bind_all_gather(self, outputs: Tensors, inputs: Tensors) -> Callable[[], None]:
        return self._bind("all_gather", outputs, inputs)

    bind_all_gather_many = bind_all_gather

    def bind_all_to_all(self, output: Tensors, input_: Tensors) -> Callable[[], None]:
        return self._bind("all_to_all", output, input_)

    def bind_reduce_scatter(self, kind: ReduceKind) -> Callable[[Tensors, Tensors], None]:
        return lambda outputs, inputs: self._bind("reduce_scatter", outputs, inputs)()

    bind_reduce_scatter_many = bind_reduce_scatter

    def custom_all_gather(
        self, comm: Callable[..., None], output: VirtualTensor, input_: VirtualTensor
    ) -> Any:
        return comm(output_tensor=output, input_tensor=input_, group=None)

    def custom_reduce_scatter(
        self,
        comm: Callable[..., None],
        output: VirtualTensor,
        input_: VirtualTensor,
        kind: ReduceKind,
    ) -> Any:
        return comm(output_tensor=output, input_tensor=input_, group=None, op=kind.op)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers)] * self.size

    def largest(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def all_reduce(self, tensor: VirtualTensor, kind: ReduceKind) -> None:
        self._device.run("all_reduce", [tensor], [tensor])
