"""A device that exists only on paper: streams, memory and collectives without data.

The group, transports, reductions and scheduler run on it unchanged. Every operation states which
buffers it reads and writes, and a happens-before checker finds every order that no event ensures:

    VirtualDevice ── Streams       record, wait, synchronize, on
                  ── Kernels       transient, flat, empty, copy, …
                  ── trace         what they did: `fsdp2.tracing.record.notes`
                  ── races         ["…", …], empty if the schedule is right

Each lane carries a vector clock: the position in each lane that it is known to run after. An access
happens before another if the second's clock covers it. For each buffer the checker requires that
  - a read comes after the last write, and there was one;
  - a write comes after the last write and after every read since;
  - any access comes after all accesses of all buffers that were freed, in the host's order,
    before this one was allocated on the same lane: a caching allocator may have reused their memory
        at once;
  - no access comes after the free.

Two more clocks exist besides the lanes' clocks:
  - HOST, for operations that access only CPU memory: an optimizer that steps on offloaded shards, a
    gradient that arrived. An operation on a lane runs after the host's calls before it; the host
    runs after a lane only where it waits (`synchronize`). CPU memory is reused late enough: torch
    keeps page-locked memory until its copies have ended, and a copy with other memory has ended
    when its call returns.
  - USER, a stream of the user's, which the lanes know only by its events.

Removing a wait (`drop_wait`) shows that the checker reports it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fsdp2.core.device.buffers import Strided
from fsdp2.core.device.collectives import ReduceKind
from fsdp2.tracing.record.notes import (
    HOST,
    PLACES,
    Allocation,
    Await,
    Free,
    Note,
    Notes,
    Operation,
    Place,
)

Clock = tuple[int, ...]
_ZERO: Clock = (0,) * len(PLACES)


def _join(a: Clock, b: Clock) -> Clock:
    return tuple(map(max, a, b))


class VirtualEvent(NamedTuple):
    """The result of `VirtualDevice.record`: its number, and the clock of its lane."""

    number: int
    clock: Clock


class Life:
    """One life of a buffer, from allocation to free."""

    def __init__(self, note: Allocation, after: Clock) -> None:
        self.note = note
        self.name, self.lane = note.name, note.lane
        self.after = after  # all accesses of buffers whose memory this one may have
        self.write: tuple[Place, int] | None = None
        self.reads: dict[Place, int] = {}
        self.last = list(_ZERO)  # the last access on each lane
        self.freed = False


class VirtualTensor:
    """A handle to an allocation; frees it when the last handle goes, like a tensor."""

    requires_grad = False

    def __init__(self, owner: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.owner = owner  # keeps the allocation alive
        self.shape = shape
        self.dtype = dtype

    @property
    def allocation(self) -> Life | None:
        found: Life | None = self.owner.allocation
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
    """A buffer that comes and goes; each life is an allocation of its own."""

    allocation: Life | None = None  # until there is memory

    def __init__(self, device: VirtualDevice, nbytes: int, name: str) -> None:
        self.device = device
        self.name = name
        self.nbytes = nbytes
        self.pinned = False
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
        if self.allocation is None:
            self.allocation = self.device.allocate(self.name)

    def release(self) -> None:
        if self.allocation is not None:
            self.device.free(self.allocation)
            self.allocation = None

    @property
    def allocated(self) -> bool:
        return self.allocation is not None

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

    Args:
        drop_wait: leave out the wait of this number (from 0), to test the checker.

    Attributes:
        trace: all notes, in the order of the host's calls.
        races: what the checker found, a sentence each.
        waits: labels of all waits so far, the dropped one included.
        live: bytes are not simulated; names of the allocations that are live now.
        others_had: whether other ranks are to have the gradients that this one lacks.
    """

    asynchronous = True
    captures: Callable[[], bool] | None = None
    fuses = True
    others_had = False

    def __init__(self, drop_wait: int | None = None) -> None:
        super().__init__()
        self.trace: list[Note] = self.notes
        self.races: list[str] = []
        self.waits: list[str] = []
        self.live: set[Life] = set()
        self._drop_wait = drop_wait
        self._clocks: dict[Place, Clock] = dict.fromkeys(PLACES, _ZERO)
        self._released: dict[Place, Clock] = dict.fromkeys(PLACES, _ZERO)

    # ---- Streams

    def make_event(self) -> None:
        """Each record is an event of its own here."""

    def record(self, lane: Place, label: str, event: None = None) -> VirtualEvent:
        return VirtualEvent(self.signal(lane, label), self._clocks[lane])

    def wait(self, lane: Place, event: VirtualEvent, label: str) -> None:
        if not self._is_dropped(label):
            self.follow(lane, event, label)

    def follow(self, lane: Place, event: VirtualEvent, label: str = "") -> None:
        """A wait that is never dropped, such as the user's own."""
        self.note(Await(lane, event.number, label))
        self._clocks[lane] = _join(self._clocks[lane], event.clock)

    def synchronize(self, event: VirtualEvent, label: str) -> None:
        """The host waits, and its later calls run after the event."""
        if not self._is_dropped(label):
            self.follow(HOST, event, label)

    def _is_dropped(self, label: str) -> bool:
        self.waits.append(label)
        return len(self.waits) - 1 == self._drop_wait

    # ---- memory

    def allocate(self, name: str) -> Life:
        """A new allocation on the current lane."""
        note = Allocation(self.number(), lane=self.lane, name=name)
        self.note(note)
        allocation = Life(note, self._released[self.lane])
        self.live.add(allocation)
        return allocation

    def free(self, allocation: Life) -> None:
        """Give it back to the lane that it was allocated on."""
        self.note(Free(allocation.note.number, self.lane, allocation.name))
        self.live.discard(allocation)
        allocation.freed = True
        lane = allocation.lane
        if lane is HOST:  # CPU memory is reused late enough
            return
        self._released[lane] = _join(self._released[lane], tuple(allocation.last))

    # ---- operations

    def run(
        self, kind: str, reads: Sequence[VirtualTensor], writes: Sequence[VirtualTensor]
    ) -> None:
        """An operation on the current lane, or on the host if it accesses only CPU memory.

        Tensors without elements are not accessed.
        """
        seen_reads = self._allocations(kind, reads)
        seen_writes = self._allocations(kind, writes)
        lane = self._place(seen_reads, seen_writes)
        clock = list(self._clocks[lane])
        if self._clocks[HOST] is not _ZERO:  # the host, which issues it, has waited for a lane
            clock = list(map(max, clock, self._clocks[HOST]))
        clock[lane] += 1
        self._clocks[lane] = now = tuple(clock)
        moved = [tuple(each.note for each in some) for some in (seen_reads, seen_writes)]
        self.note(Operation(lane, "", kind, reads=moved[0], writes=moved[1]))
        for allocation in seen_reads:
            self._check_read(kind, lane, now, allocation)
        for allocation in seen_writes:
            self._check_write(kind, lane, now, allocation)

    def _place(self, reads: list[Life], writes: list[Life]) -> Place:
        for buffer in reads:
            if buffer.lane is not HOST:
                return self.lane
        for buffer in writes:
            if buffer.lane is not HOST:
                return self.lane
        return HOST if reads or writes else self.lane

    def _allocations(self, kind: str, tensors: Sequence[VirtualTensor]) -> list[Life]:
        found: dict[Life, None] = {}
        for tensor in tensors:
            if 0 in tensor.shape:
                continue
            allocation = tensor.allocation
            # A view of a transient buffer outlives the buffer's memory; an owner's does not.
            if allocation is None or allocation.freed:
                self.races.append(f"{kind} uses a buffer that is not allocated")
            else:
                found[allocation] = None
        return list(found)

    def _check_read(self, kind: str, lane: Place, now: Clock, buffer: Life) -> None:
        self._check_reuse(kind, now, buffer)
        if buffer.write is None:
            self.races.append(f"{kind} reads {buffer.name}, which nothing wrote")
        elif now[buffer.write[0]] < buffer.write[1]:
            self.races.append(f"{kind} reads {buffer.name} while {_name(buffer.write)} writes it")
        buffer.reads[lane] = now[lane]
        buffer.last[lane] = now[lane]

    def _check_write(self, kind: str, lane: Place, now: Clock, buffer: Life) -> None:
        self._check_reuse(kind, now, buffer)
        if buffer.write is not None and now[buffer.write[0]] < buffer.write[1]:
            self.races.append(f"{kind} writes {buffer.name} while {_name(buffer.write)} writes it")
        for reader, count in buffer.reads.items():
            if now[reader] < count:
                self.races.append(
                    f"{kind} writes {buffer.name} while {_name((reader, count))} reads it"
                )
        # Whatever comes after this write comes after the reads before it.
        buffer.write = (lane, now[lane])
        buffer.reads.clear()
        buffer.last[lane] = now[lane]

    def _check_reuse(self, kind: str, now: Clock, buffer: Life) -> None:
        if all(map(operator.ge, now, buffer.after)):
            return
        for lane, count in zip(PLACES, buffer.after, strict=True):
            if now[lane] < count:
                self.races.append(
                    f"{kind} uses {buffer.name}, whose memory {_name((lane, count))} still uses"
                )

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
            return [each.allocation.write for each in tensors if each.allocation is not None]

        return fingerprint

    def differ(self, now: Sequence[object], before: Sequence[object]) -> list[int]:
        return [int(one != other) for one, other in zip(now, before, strict=True)]

    def add_many(self, targets: Sequence[VirtualTensor], sources: Sequence[VirtualTensor]) -> None:
        self.run("add", [*targets, *sources], targets)


def _name(access: tuple[Place, int]) -> str:
    return f"{access[0].name.lower()}#{access[1]}"


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
