"""The record of a rehearsed step: units and phases, and kinds of memory.

    Recording.notes       see `fsdp2.tracing.record.notes`
    Recording.before      what was allocated when the step began
    Recording.categories  the kind of each allocation, by its number
    Recording.groups      the ranks of each process group, by `Operation.group`

Kernels, groups and operators report to it, and it takes the place of streams. Until `start` it
records only memory. A storage has a number of its own, which it keeps as long as it lives.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from fsdp2.core.facts import Lane, ProcessGroup, ranks_of
from fsdp2.tracing.record.categories import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    TEMPORARY,
    category_of,
)
from fsdp2.tracing.record.notes import (
    COLLECTIVE,
    COMPUTE,
    COPY,
    HOST,
    Allocation,
    Free,
    Note,
    Notes,
    Operation,
    Place,
    operations,
    replaced,
)


class _Life(NamedTuple):
    """The allocation of a storage: it separates activations from temporary memory."""

    stretch: int
    phase: str


class Recording(Notes):
    """A rehearsed step, and what notes it."""

    def __init__(self, asynchronous: bool) -> None:
        super().__init__()
        self.asynchronous = asynchronous
        self.before: list[Allocation] = []
        self.categories: dict[int, str] = {}
        self.groups: list[tuple[int, ...]] = []
        self.phase = ""
        self._notes = False  # until it starts
        self._numbers: dict[int, int] = {}  # of storages that live, by address
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live: dict[int, Allocation] = {}
        self._lives: dict[int, _Life] = {}
        self._outlived: set[int] = set()  # that were there when the next stretch began
        self._engine = ""  # the unit that it works for
        self._stretch = 0
        self._inside: list[str] = []  # units whose forward is under way
        self._marks: list[int] = []  # autograd's numbers at which another unit's nodes begin
        self._units: list[str] = []
        self._unit = ""
        self._groups: dict[ProcessGroup, int] = {}  # the index in `groups` of each one's ranks

    def start(self) -> None:
        """Note everything from now on."""
        self.before = list(self._live.values())
        self._notes = True

    def stop(self) -> None:
        """Note nothing more, and say of what kind each allocation was."""
        self._notes = False
        self._groups.clear()  # a plan is kept for longer than they are
        for number in self._lives:
            self.categories.setdefault(number, self._category(number))

    @property
    def operations(self) -> list[Operation]:
        """Only the operations."""
        return operations(self.notes)

    def note(self, note: Note) -> None:
        """Add to the record, once it has started."""
        if self._notes:
            self.notes.append(note)

    # ---- lanes; or one lane, where the device has no others

    def record(self, lane: Place, label: str, event: object = None) -> int | None:
        """Note an event, where there are lanes."""
        return super().record(lane, label) if self.asynchronous else None

    def on(self, lane: Place) -> AbstractContextManager[None]:
        """Operations in this context run on that lane."""
        return super().on(lane if self.asynchronous else Lane.COMPUTE)

    # ---- where we are

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Operations in this context belong to a phase of the step."""
        self._stretch += 1
        with replaced(self, phase=phase):
            yield
        self._stretch += 1

    def enter(self, unit: str) -> None:
        """A unit's forward begins, also one that is run again in backward."""
        if not self._inside:
            self._stretch += 1
        self._inside.append(unit)
        self._mark(unit)

    def leave(self) -> None:
        """The forward that was entered last is over."""
        self._inside.pop()
        if not self._inside:
            self._stretch += 1
        self._mark(self._inside[-1] if self._inside else "")

    def _mark(self, unit: str) -> None:
        if self.phase != "backward":
            number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # no stub
            self._marks.append(number)
            self._units.append(unit)

    def forget_units(self) -> None:
        """A step is over: autograd's nodes are gone."""
        self._marks.clear()
        self._units.clear()

    @property
    def unit(self) -> str:
        """The unit that runs now: the engine's, or the one whose module or gradient computes."""
        if self._engine:
            return self._engine
        if self._inside:
            return self._inside[-1]
        if self.phase == "backward":
            node = torch._C._current_autograd_node()
            if node is not None and (number := node._sequence_nr()) <= _LAST_NUMBER:
                found = bisect_right(self._marks, number) - 1
                self._unit = self._units[found] if found >= 0 else ""
            return self._unit
        return ""

    def acting(self, unit: str) -> AbstractContextManager[None]:
        """Operations in this context are the engine's own, for a unit."""
        return replaced(self, _engine=unit)

    # ---- memory

    def storage(self, tensor: torch.Tensor, host: bool = False, name: str = "") -> int:
        """The number of a tensor's storage, which is noted if it is new; the engine names its."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = self.number()
            self._watches[number] = weakref.ref(storage, lambda _: self._gone(address, number))
            self._lives[number] = _Life(self._stretch, self.phase)
            self.allocate(number, storage.nbytes(), host)
        if name:
            self.categories[number] = category_of(name)
        return number

    def _gone(self, address: int, number: int) -> None:
        del self._numbers[address]
        del self._watches[number]
        if self._lives[number].stretch != self._stretch:
            self._outlived.add(number)
        self.free(number)

    def allocate(self, number: int, nbytes: int, host: bool = False) -> None:
        """Memory came."""
        note = Allocation(number, nbytes, HOST if host else Lane.COMPUTE)
        self._live[number] = note
        self.note(note)

    def hidden(self, nbytes: int) -> int:
        """Memory came that no tensor here has; returns its number, to `free` it."""
        number = self.number()
        self.categories[number] = TEMPORARY
        self.allocate(number, nbytes)
        return number

    def free(self, number: int) -> None:
        """Memory went; no-op where it had gone."""
        if self._live.pop(number, None) is not None:
            self.note(Free(number))

    def is_host(self, number: int) -> bool:
        """Whether a storage is in CPU memory next to a device's."""
        live = self._live.get(number)
        return live is not None and live.host

    def tag(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Say of what kind tensors are."""
        for tensor in tensors:
            self.categories[self.storage(tensor)] = category

    def _category(self, number: int) -> str:
        life = self._lives[number]
        if life.phase == "optimizer":
            return OPTIMIZER if number in self._live else TEMPORARY
        if number not in self._outlived:
            return TEMPORARY
        # What a backward leaves for a later one are sums of gradients.
        return GRADIENTS if life.phase == "backward" else ACTIVATIONS

    # ---- operations and events

    def operation(
        self,
        lane: Place,
        name: str,
        kind: str,
        flops: int,
        nbytes: int,
        dtype: torch.dtype,
        tensors: int = 1,
    ) -> None:
        """An operator ran."""
        if self._notes:
            kind = COPY if self._engine and kind == COMPUTE else kind
            unit, phase = self.unit, self.phase
            self.note(Operation(lane, name, kind, unit, phase, flops, nbytes, dtype, -1, tensors))

    def collective(
        self,
        name: str,
        nbytes: int,
        dtype: torch.dtype,
        group: ProcessGroup,
        tensors: int,
    ) -> None:
        """A collective was launched."""
        if not self._notes:
            return
        if group not in self._groups:
            ranks = tuple(ranks_of(group))
            if ranks not in self.groups:
                self.groups.append(ranks)
            self._groups[group] = self.groups.index(ranks)
        about = (self.unit, self.phase, 0, nbytes, dtype, self._groups[group], tensors)
        self.note(Operation(self.lane, name, COLLECTIVE, *about))


_LAST_NUMBER = 2**63
"""Autograd's nodes that were not made in a forward, such as AccumulateGrad, have higher ones."""
