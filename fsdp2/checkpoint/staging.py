"""The state to save, copied to host memory during training, with its values at the call.

    async_save ── launch ──> returns          forward   backward   optimizer.step()
                    └ a thread, or a stream:  copy … copy ─┘ done    └ waits for the rest, if any

Tensors that an optimizer writes (shards, its states) are copied during training. All others
(buffers, numbers, plain values) may change in a forward: they are small, and copied during the
call.

Code that writes shards through torch or fsdp2 waits: `ShardReaders`. Version counters show any
other write, and the save then fails instead of mixing old and new values.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.core.errors import checkpoint_error
from fsdp2.core.facts import FlatBuffer, ShardReaders, local_of, round_up, steps, watch_steps

_ALIGNMENT = 64  # bytes
_AT_ONCE = 4096  # bytes: copied at the call, as a place of its own would cost more than the copy
_PIECE = 1 << 26  # bytes of one copy, in which the interpreter runs other threads

State = Mapping[str, Any]
"""A flat state dict: tensors and plain values by name."""


def plain(value: object) -> object:
    """This rank's rows of a tensor, without autograd; any other value as it is."""
    return local_of(value).detach() if isinstance(value, torch.Tensor) else value


class HostMemory:
    """Memory that saves copy into: it grows, and is page-locked for an accelerator."""

    def __init__(self) -> None:
        self._buffer: FlatBuffer | None = None
        self._layout: list[tuple[torch.dtype, tuple[int, ...]]] = []
        self._places: list[torch.Tensor] = []

    def places(self, sources: list[torch.Tensor]) -> list[torch.Tensor]:
        """A contiguous tensor for each, the same ones as long as shapes and dtypes are."""
        layout = [(source.dtype, tuple(source.shape)) for source in sources]
        if layout != self._layout:
            starts, total = [], 0
            for source in sources:
                starts.append(total)
                total += round_up(source.nbytes, _ALIGNMENT)
            if self._buffer is None or self._buffer.nbytes < total:
                self._layout, self._places, self._buffer = [], [], None  # the old one goes first
                pinned = any(source.device.type != "cpu" for source in sources)
                try:
                    self._buffer = FlatBuffer(total, torch.device("cpu"), pinned)
                except RuntimeError as error:
                    raise MemoryError(str(error)) from error
            pairs = zip(layout, starts, strict=True)
            self._places = [self._buffer.piece(dtype, at, shape) for (dtype, shape), at in pairs]
            self._layout = layout
        return self._places


class Copy:
    """A running copy of everything that one save needs."""

    def __init__(self, state: State, beside: State, memory: HostMemory) -> None:
        self.staged: dict[str, Any] = {}
        self._sources: dict[str, torch.Tensor] = {}
        for name, value in state.items():
            rows = plain(value)
            if not isinstance(rows, torch.Tensor):
                self.staged[name] = copy.deepcopy(rows)
            elif (
                name not in beside
                or rows.nbytes <= _AT_ONCE
                or not is_plain(rows)
                or rows.is_inference()  # no counter tells when it is written
            ):
                self.staged[name] = rows.cpu() if rows.device.type != "cpu" else copied(rows)
            else:
                self._sources[name] = rows
        self.memory = memory
        # A write to a DTensor counts in it, and not in its rows.
        both = {name: (rows, beside[name]) for name, rows in self._sources.items()}
        self._versions = [(name, two, _versions(two)) for name, two in both.items()]
        self._torn: str | None = None
        self._checking = threading.Lock()
        self.done = threading.Event()  # all is in host memory, or has failed to come there
        self._event = self._launch()
        ShardReaders.waiting.append(self.wait)

    def _launch(self) -> torch.Event | None:
        """If shards are on an accelerator, copy them on a separate stream."""
        places = self.memory.places(list(self._sources.values()))
        self.staged.update(zip(self._sources, places, strict=True))
        devices = {source.device for source in self._sources.values()} - {torch.device("cpu")}
        if not devices:
            return None
        (device,) = devices
        stream = _stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            for name, source in self._sources.items():
                if source.device.type != "cpu":
                    self.staged[name].copy_(source, non_blocking=True)
            event = torch.Event(device)
            event.record(stream)
        return event

    def run(self) -> None:
        """Copy what is in host memory already; return when all is. For a thread of the save's."""
        try:
            for name, source in self._sources.items():
                if source.device.type == "cpu":
                    copy_rows(self.staged[name], source)
            if self._event is not None:
                self._event.synchronize()
        finally:
            self._check()
            self.done.set()
            ShardReaders.waiting.remove(self.wait)
            self._sources = {}
        if self._torn is not None:
            raise checkpoint_error(
                "ckpt-written-while-copied",
                f"'{self._torn}' was written while async_save() was copying it, but not by an "
                f"optimizer or a load; call wait_staged() on the result of async_save() before "
                f"you write, or use save()",
            )

    def wait(self) -> None:
        """Return when what was copied may be written: the host waits, or the current stream."""
        from_host = any(source.device.type == "cpu" for source in self._sources.values())
        if self._event is not None and not from_host:
            self._check()
            torch.accelerator.current_stream().wait_event(self._event)
        else:
            self.done.wait()

    def _check(self) -> None:
        """Whether anything was written since the call; once, before the first that may write."""
        with self._checking:
            for name, both, before in self._versions:
                if _versions(both) != before:
                    self._torn = self._torn or name
            self._versions = []


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors on the CPU, only in this thread: training uses the others."""
    if not source.is_contiguous():
        target.copy_(source)
        return
    to, start = target.data_ptr(), source.data_ptr()
    for at in range(0, source.nbytes, _PIECE):
        ctypes.memmove(to + at, start + at, min(_PIECE, source.nbytes - at))


def copied(rows: torch.Tensor) -> torch.Tensor:
    """A copy; of a subclass, copies of what it wraps: its own ``clone`` may encode values again."""
    if not is_traceable_wrapper_subclass(rows):
        return rows.clone()
    names, about = rows.__tensor_flatten__()
    parts = {name: copied(getattr(rows, name)) for name in names}
    made: torch.Tensor = type(rows).__tensor_unflatten__(parts, about, rows.shape, rows.stride())
    return made


def _versions(counters: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int]:
    return counters[0]._version, counters[1]._version


def is_plain(rows: torch.Tensor) -> bool:
    """Whether its memory is its values, in its own layout."""
    return type(rows) in (torch.Tensor, nn.Parameter) and rows.layout is torch.strided


@functools.cache
def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _finish_copies(*_: object) -> None:
    if ShardReaders.waiting:
        ShardReaders.finish()


@functools.cache
def watch_optimizers() -> None:
    """From now on, let every optimizer of torch's wait for copies before it steps."""
    watch_steps()
    steps.add(_finish_copies)


_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch_loads(model: nn.Module) -> None:
    """From now on, let ``model.load_state_dict`` wait for copies; units see to theirs anyway."""
    if model not in _watched:
        _watched.add(model)
        model.register_load_state_dict_pre_hook(_finish_copies)
