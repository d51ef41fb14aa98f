"""`FlatOptimizer(offload="cpu")`: units on a device are stepped by the CPU, where the states are.

    unit         1            2            3
    OUT       parameters,  parameters,  parameters,              device to host, on a stream
              gradients    gradients    gradients
    host                   step 1       step 2       step 3      torch's kernels, in its threads
    BACK                        parameters   parameters   …      host to device, on a stream

A unit is on its way out while the one before it is stepped and the one before that goes back. Host
memory for what travels is page-locked and holds two units at a time. Parameters leave in every step
together with their gradients: they may have been written by any route since the last one (decision
25), so that a copy on the host would not be theirs.

Shards in CPU memory (`CPUOffloadPolicy`, or a mesh of CPUs) are stepped where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set

import torch
from torch import nn

from fsdp2.core.device.kernels import Kernels, kernels_for
from fsdp2.core.device.streams import (
    COMPUTE,
    COPY_IN,
    REDUCE,
    Event,
    Streams,
    make_streams,
)
from fsdp2.core.pieces import round_up
from fsdp2.optim.runs import FlatRun, ParamGroupOptions, ParamState, Section

OUT, BACK = REDUCE, COPY_IN
"""Lanes of streams that are the optimizer's own: one for each direction of copies."""

ALIGNMENT = 64
"""Bytes; of what lies in staging memory, for the CPU's vector registers."""


class _Slot:
    """Host memory for one unit on its way.

    Attributes:
        memory: its bytes.
        free: behind the copies that read it last.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.free: Event = None

    def reserve(self, nbytes: int, streams: Streams) -> None:
        """Have so many bytes."""
        if self.memory.numel() < nbytes:
            streams.synchronize(self.free, "host after copies back")
            self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=streams.asynchronous)


class Staging:
    """The way of units to the host and back: two directions, and memory for two units.

    Args:
        device: where the shards are.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams: Streams = make_streams(device)
        self.kernels: Kernels = kernels_for(device, self.streams.asynchronous)
        self._slots = [_Slot(), _Slot()]
        self._next = 0

    def take(self, nbytes: int) -> _Slot:
        """The slot that was used longest ago; OUT is behind the copies that read it."""
        slot = self._slots[self._next]
        self._next = 1 - self._next
        slot.reserve(nbytes, self.streams)
        self.streams.wait(OUT, slot.free, "copies out after copies back")
        return slot


class HostSection(Section):
    """A unit's parameters, whose states are in CPU memory.

    Args:
        make_inner: as for `Section`.
        members: the parameters.
        staging: what they travel through.
    """

    def __init__(
        self,
        make_inner: Callable[..., torch.optim.Optimizer],
        members: Set[torch.Tensor],
        staging: Staging,
    ) -> None:
        super().__init__(make_inner, members)
        self._staging = staging
        self._slot: _Slot | None = None  # where it is while it is under way
        self._left: Event = None

    def placed(self, run: FlatRun) -> FlatRun:
        """Let a parameter in CPU memory stand for the run; a step gives it memory."""
        home = torch.empty(0, dtype=run.flat.dtype)
        run.stepped = nn.Parameter(home, requires_grad=run.flat.requires_grad)
        return run

    def kept(self, state: ParamState) -> ParamState:
        """State that was loaded may be on the device."""
        return {
            key: value.cpu() if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }

    def leave(self) -> None:
        """Let parameters and gradients go to the host."""
        staging, runs = self._staging, [run for run in self.runs if run.flat.grad is not None]
        streams = staging.streams
        self._slot = slot = staging.take(sum(_bytes_of(run) for run in runs))
        streams.wait(OUT, streams.record(COMPUTE, "gradients there"), "copies out after compute")
        with streams.on(OUT):
            for run, param, grad in _views(runs, slot.memory):
                assert run.flat.grad is not None
                staging.kernels.to_host(param, run.flat.detach())
                staging.kernels.to_host(grad, run.flat.grad)
                run.stepped.data = param
                if grad.dtype != param.dtype:
                    run.stepped.grad_dtype = grad.dtype
                run.stepped.grad = grad
        self._left = streams.record(OUT, "unit on the host")

    def step(self, groups: Sequence[ParamGroupOptions]) -> None:
        """Step on the host, and let parameters go back; COMPUTE waits for them."""
        if self._slot is None:
            self.leave()
        staging, slot = self._staging, self._slot
        assert slot is not None
        streams = staging.streams
        streams.synchronize(self._left, "host after copies out")
        gone = [run for run in self.runs if run.stepped.grad is not None]
        super().step(groups)
        with streams.on(BACK):
            for run in gone:
                staging.kernels.from_host(run.flat.detach(), run.stepped.detach())
        slot.free = streams.record(BACK, "unit back")
        streams.wait(COMPUTE, slot.free, "compute after copies back")
        for run in gone:
            run.stepped.grad = None
        self._slot = None


def step_all(sections: Sequence[HostSection], groups: Sequence[ParamGroupOptions]) -> None:
    """Step sections, each on its way out while the one before it is stepped."""
    if sections:
        sections[0].leave()
    for index, section in enumerate(sections):
        if index + 1 < len(sections):
            sections[index + 1].leave()
        section.step(groups)


def _bytes_of(run: FlatRun) -> int:
    grad = run.flat.grad
    assert grad is not None
    return round_up(run.flat.nbytes, ALIGNMENT) + round_up(grad.nbytes, ALIGNMENT)


def _views(
    runs: Sequence[FlatRun], memory: torch.Tensor
) -> Iterator[tuple[FlatRun, torch.Tensor, torch.Tensor]]:
    """Places in host memory of each run's parameters and gradient."""
    start = 0
    for run in runs:
        grad = run.flat.grad
        assert grad is not None
        views = []
        for tensor in (run.flat, grad):
            flat = memory[start : start + tensor.nbytes].view(tensor.dtype)
            views.append(flat.view(tensor.shape))
            start = round_up(start + tensor.nbytes, ALIGNMENT)
        yield run, views[0], views[1]
