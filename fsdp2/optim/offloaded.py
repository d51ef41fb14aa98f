"""`FlatOptimizer(offload=True)`: the CPU steps units of a device, and keeps their states.

    unit         1            2            3
    OUT       parameters,  parameters,  parameters,              device to host, on a stream
              gradients    gradients    gradients
    host                   step 1       step 2       step 3      torch's kernels, in its threads
    BACK                        parameters   parameters   …      host to device, on a stream

While one unit is copied to the host, the unit before it is stepped, and the one before that is
copied back. The staging memory on the host is page-locked and holds three units. Parameters are
copied in every step together with their gradients, because code may have written them since the
last step without a trace (decision 25), so that an older copy on the host could differ. The same
holds for gradients (decision 30).

Shards in CPU memory (`CPUOffloadPolicy`, or a mesh of CPUs) are stepped in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set

import torch
from torch import nn

from fsdp2.core.facts import (
    COMPUTE,
    COPY_IN,
    REDUCE,
    Event,
    Kernels,
    Streams,
    kernels_for,
    make_streams,
    round_up,
)
from fsdp2.optim.runs import FlatRun, ParamGroupOptions, ParamState, Section

OUT, BACK = REDUCE, COPY_IN
"""Lanes of the optimizer's own streams: one for each direction of copies."""

SLOTS = 3
"""Units in staging memory: one is copied out, one is stepped, one is copied back."""

LEAVING = 2
"""Units that are stepped in backward, in addition to the one being reduced."""

ALIGNMENT = 64
"""Alignment of tensors in staging memory, in bytes, for the CPU's vector registers."""


def travels(device: torch.device) -> bool:
    """Whether shards on ``device`` are copied to the CPU to be stepped."""
    return device.type != "cpu"


class _Slot:
    """Host memory for one unit that is copied out, stepped and copied back."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.free: Event = None

    def reserve(self, nbytes: int, streams: Streams) -> None:
        """Grow the memory to this number of bytes."""
        if self.memory.numel() < nbytes:
            streams.synchronize(self.free, "host after copies back")
            self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=streams.asynchronous)


class Staging:
    """Copies of units to the host and back: two lanes, and memory for a few units."""

    def __init__(self, device: torch.device) -> None:
        self.streams: Streams = make_streams(device)
        self.kernels: Kernels = kernels_for(device, self.streams.asynchronous)
        self._slots = [_Slot() for _ in range(SLOTS)]
        self._next = 0
        self.back: Event = None  # recorded after the parameters that were copied back last

    def take(self, nbytes: int) -> _Slot:
        """The slot that was used longest ago; OUT waits for the copies that read it."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.reserve(nbytes, self.streams)
        self.streams.wait(OUT, slot.free, "copies out after copies back")
        return slot

    def begin_out(self) -> None:
        """Let OUT wait for the current lane."""
        event = self.streams.record(COMPUTE, "gradients there")
        self.streams.wait(OUT, event, "copies out after compute")

    def arrive(self) -> None:
        """Let COMPUTE wait for all copies back."""
        self.streams.wait(COMPUTE, self.back, "compute after copies back")


class HostSection(Section):
    """A unit's parameters, whose states are in CPU memory."""

    def __init__(
        self,
        make_inner: Callable[..., torch.optim.Optimizer],
        members: Set[torch.Tensor],
        staging: Staging,
    ) -> None:
        super().__init__(make_inner, members)
        self._staging = staging
        self._slot: _Slot | None = None  # the memory that it uses during a step
        self._left: Event = None

    def placed(self, run: FlatRun) -> FlatRun:
        """Represent the run by a parameter in CPU memory; a step gives it memory."""
        home = torch.empty(0, dtype=run.flat.dtype)
        run.stepped = nn.Parameter(home, requires_grad=run.flat.requires_grad)
        return run

    def kept(self, state: ParamState) -> ParamState:
        """Move loaded state to the CPU: it may be on the device."""
        return {
            key: value.cpu() if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }

    def leave(self) -> None:
        """Copy parameters and gradients to the host."""
        staging = self._staging
        runs = [run for run in self.runs if run.flat.grad is not None]
        self._slot = slot = staging.take(sum(map(_bytes_of, runs)))
        staging.begin_out()
        with staging.streams.on(OUT):
            for run, param, grad in _views(runs, slot.memory):
                staging.kernels.to_host(param, run.flat.detach())
                run.stepped.data = param
                assert run.flat.grad is not None
                staging.kernels.to_host(grad, run.flat.grad)
                if grad.dtype != run.stepped.dtype:
                    run.stepped.grad_dtype = grad.dtype
                run.stepped.grad = grad
        self._left = staging.streams.record(OUT, "unit on the host")

    def step(self, groups: Sequence[ParamGroupOptions]) -> None:
        """Step the copies on the host, and copy parameters back; `arrive` waits for them."""
        staging, slot, streams = self._staging, self._slot, self._staging.streams
        assert slot is not None
        streams.synchronize(self._left, "host after copies out")
        gone = [run for run in self.runs if run.stepped.grad is not None]
        super().step(groups)
        with streams.on(BACK):
            for run in gone:
                staging.kernels.from_host(run.flat.detach(), run.stepped.detach())
        slot.free = staging.back = streams.record(BACK, "unit back")
        for run in gone:
            run.stepped.grad = None
        self._slot = None

    def arrive(self) -> None:
        """Let COMPUTE wait for parameters of all sections that were stepped."""
        self._staging.arrive()


def step_all(sections: Sequence[HostSection], groups: Sequence[ParamGroupOptions]) -> None:
    """Step sections; each is copied out while the one before it is stepped.

    They are stepped in the order of backward: the last reduced gradients may still be in a copy.
    """
    section, *others = sections[::-1]
    section.leave()
    for following in others:
        following.leave()
        section.step(groups)
        section = following
    section.step(groups)
    section.arrive()


def _leaves(run: FlatRun) -> list[torch.Tensor]:
    """The tensors of a run to copy: the parameters and the gradient."""
    assert run.flat.grad is not None
    return [run.flat, run.flat.grad]


def _bytes_of(run: FlatRun) -> int:
    return sum(round_up(tensor.nbytes, ALIGNMENT) for tensor in _leaves(run))


def _views(
    runs: Sequence[FlatRun], memory: torch.Tensor
) -> Iterator[tuple[FlatRun, torch.Tensor, torch.Tensor]]:
    """Places in host memory of each run's parameters and gradient."""
    start = 0
    for run in runs:
        views = []
        for tensor in _leaves(run):
            flat = memory[start : start + tensor.nbytes].view(tensor.dtype)
            views.append(flat.view(tensor.shape))
            start = round_up(start + tensor.nbytes, ALIGNMENT)
        yield run, views[0], views[1]
