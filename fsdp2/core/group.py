"""One communication unit: a group of parameters that are gathered and reduced together.

    SHARDED ──start_unshard──> GATHERING ──finish_unshard──> UNSHARDED
       ^                           │                             │
       └──────────reshard──────────┴───────────reshard───────────┘

    _shard  FlatBuffer       [segment | segment …]    this rank's rows, for good
    _full   TransientBuffer  [segment | segment …]    the gathered rows, between acquire and release

The group owns this state and nothing else does; the scheduler decides when to move it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from fsdp2.core.collectives import Collectives
from fsdp2.core.config import MixedPrecisionPolicy, ShardingStateError
from fsdp2.core.kernels import Kernels
from fsdp2.core.layout import (
    COLLECTIVE_ALIGN_BYTES,
    GroupLayout,
    ParamShape,
    Slot,
    Transport,
    build_layout,
)
from fsdp2.core.param import ShardedParam, Swap, follow_requires_grad
from fsdp2.core.reduction import Job, SegmentReduction
from fsdp2.core.streams import Lane, Streams
from fsdp2.core.transport import TRANSPORTS, SegmentTransport

Observer = Callable[[str, str], None]
"""Called with (operation, group name); operations are listed in `ParamGroup.observer`."""


class OptimizerSteps:
    """Counts optimizer steps in this process; parameters gathered before one are out of date.

    The count is a fact that ranks share, so that all of them gather again or none does.
    """

    count = 0


class State(Enum):
    """Where a group's parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


_MOVES = {
    "start_unshard": {State.SHARDED: State.GATHERING},
    "finish_unshard": {State.GATHERING: State.UNSHARDED},
    "reshard": {State.GATHERING: State.SHARDED, State.UNSHARDED: State.SHARDED},
}


@dataclass(frozen=True)
class GroupOptions:
    """What a user may change about a group; replaced as a whole, and bound before the next use.

    Attributes:
        precision: the mixed-precision policy.
        divide_factor: gradients are divided by it; ``None`` averages over the shard axis.
    """

    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    divide_factor: float | None = None


@dataclass
class PendingReduction:
    """A reduction whose inputs must live until COMPUTE is behind ``event``."""

    event: Any
    jobs: list[tuple[SegmentReduction, Job]]


class ParamGroup:
    """Parameters that share collectives.

    Args:
        name: name of the unit, for messages.
        params: the parameters.
        collectives: of the shard axis.
        streams: lanes of the device.
        kernels: memory and copies of the device.
        options: what the user chose.
        device: where the group computes.

    Attributes:
        accumulates: whether gradients of backwards without sync are waiting.
        observer: called with "all_gather", "finish", "reshard" or "reduce" and the group's name.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[ShardedParam],
        collectives: Collectives,
        streams: Streams,
        kernels: Kernels,
        options: GroupOptions,
        device: Any,
    ) -> None:
        self.name = name
        self.params = list(params)
        self.collectives = collectives
        self.streams = streams
        self.kernels = kernels
        self.options = options
        self.device = device
        self.state = State.SHARDED
        self.observer: Observer | None = None
        self.layout: GroupLayout | None = None
        self.accumulates = False
        self._gathered_at = -1
        self._bound = False
        self._shard: Any = None
        self._full: Any = None
        self._transports: list[SegmentTransport] = []
        self._reductions: list[SegmentReduction] = []
        self._reduces_frozen = False
        self._gathered_event: Any = None
        self._works: list[Any] = []
        self._locals: list[tuple[Any, torch.Tensor]] = []  # sharded parameters and their rows
        self._to_sharded: list[Swap] = []
        self._to_unsharded: list[Swap] = []

    @property
    def is_unsharded(self) -> bool:
        """Whether the gathered parameters are registered."""
        return self.state is State.UNSHARDED

    # ---- layout and binding

    def shapes(self) -> list[ParamShape]:
        """What the layout needs of the parameters, from their present dtypes."""
        shapes = []
        for param in self.params:
            shard = param.dtype
            full = self.compute_dtype(shard)
            shapes.append(
                ParamShape(
                    param.name, param.shape, param.dim, shard, shard.itemsize, full, full.itemsize
                )
            )
        return shapes

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The gathered dtype of a parameter of ``dtype``; integers are gathered as they are."""
        chosen = self.options.precision.param_dtype
        return chosen if chosen is not None and dtype.is_floating_point else dtype

    def adopt(self) -> None:
        """Lay the group out and move every parameter's rows into one flat shard.

        Called when the group is made, and again when `.to()`, `load_state_dict(assign=True)` or
        the like gave a parameter other memory or another dtype (invariant I5).
        """
        self._require_sharded("adopt")
        layout = build_layout(self.shapes(), self.collectives.size, self.collectives.coalesces)
        on_meta = any(param.is_meta for param in self.params)
        shard = self.kernels.flat(layout.shard_bytes, on_meta)
        rank = self.collectives.rank
        for segment in layout.segments:
            for slot in segment.slots:
                param = self.params[slot.index]
                start = segment.shard_byte_offset + slot.shard_offset * param.dtype.itemsize
                param.adopt(slot, shard.view(param.dtype, start, slot.local_shape(rank)))
        self.layout = layout
        self._shard = shard
        self._bound = False

    def rebind(self) -> None:
        """Notice changed parameters at the next gather."""
        self._bound = False

    def set_options(self, options: GroupOptions) -> None:
        """Take new options: reductions follow now, transports at the next gather."""
        self.options = options
        if self._bound:
            self.bind_reductions()

    def reregister(self) -> None:
        """After a state dict was loaded: manage the parameters that are registered now."""
        for param in self.params:
            param.follow_registered()
        self.rebind()

    def bind(self) -> None:
        """Build transports, gathered parameters and reduction steps, if anything changed."""
        if self._bound and self._is_backed():
            return
        self._require_sharded("bind")
        for param in self.params:
            param.check_usable(self.device)
            follow_requires_grad(param)
        layout = build_layout(self.shapes(), self.collectives.size, self.collectives.coalesces)
        if layout != self.layout or not all(p.is_backed_by(self._shard) for p in self.params):
            self.adopt()
        self._bind_transports()
        self.bind_reductions()
        self._locals = [
            (p.sharded, p.local) for p in self.params if hasattr(p.sharded, "_local_tensor")
        ]
        self._bound = True

    def _is_backed(self) -> bool:
        """Whether parameters still hold the rows that they were given (`swap_tensors` …)."""
        for sharded, local in self._locals:  # noqa: SIM110  # four times faster than all()
            if sharded._local_tensor is not local:
                return False
        return True

    def _bind_transports(self) -> None:
        assert self.layout is not None
        self._full = self.kernels.transient(self.layout.full_bytes, f"gathered {self.name}")
        self._transports = []
        self._to_sharded, self._to_unsharded = [], []
        for segment in self.layout.segments:
            transport = TRANSPORTS[segment.transport](
                segment, self._shard, self._full, self.collectives, self.kernels
            )
            self._transports.append(transport)
            for slot in segment.slots:
                param = self.params[slot.index]
                param.materialize(transport.gathered(slot))
        for param in self.params:
            if param.unsharded is not None:
                self._to_sharded += param.swaps(param.sharded)
                self._to_unsharded += param.swaps(param.unsharded)
        self._full.release()
        self._casting = [t for t in self._transports if t.casts and t.communicates]
        self._gathering = [t for t in self._transports if t.communicates]
        self._early = any(t.early for t in self._transports)

    def bind_reductions(self) -> None:
        """Build the reduction steps of the parameters that require grad now.

        Those that were frozen while gradients of earlier backwards are waiting still belong to it.
        """
        assert self.layout is not None
        waiting = {m for r in self._reductions for m in r.members} if self.accumulates else set()
        self._reduces_frozen = False
        precision = self.options.precision
        families: dict[tuple[Any, ...], list[tuple[ShardedParam, Slot]]] = {}
        for segment in self.layout.segments:
            for slot in segment.slots:
                param = self.params[slot.index]
                if not param.sharded.requires_grad:
                    if param not in waiting:
                        continue
                    self._reduces_frozen = True
                grad = self.compute_dtype(param.dtype)
                reduce = precision.reduce_dtype or grad
                direct = segment.transport is Transport.COALESCED and self._is_direct(
                    slot, min(reduce.itemsize, grad.itemsize)
                )
                families.setdefault((direct, grad, reduce, param.dtype), []).append((param, slot))
        self._reductions = [
            SegmentReduction(
                [param for param, _ in members],
                [slot for _, slot in members],
                direct,
                grad,
                reduce,
                self.options.divide_factor,
                self.collectives,
                self.kernels,
            )
            for (direct, grad, reduce, _), members in families.items()
        ]

    @staticmethod
    def _is_direct(slot: Slot, itemsize: int) -> bool:
        return (
            slot.dim == 0
            and slot.even
            and slot.shard_numel * itemsize % COLLECTIVE_ALIGN_BYTES == 0
        )

    # ---- gather and free

    def start_unshard(self) -> None:
        """Issue the all-gather; returns while it may still run.

        The side lanes wait for COMPUTE as it is now: whatever used the memory that the gathered
        buffer is given was issued there before (invariant I2).
        """
        self._move("start_unshard")
        self._gathered_at = OptimizerSteps.count
        streams = self.streams
        if self._early:
            self._full.acquire()
        if self._gathering:
            for transport in self._gathering:
                transport.acquire()
            event = streams.record(Lane.COMPUTE, "buffers allocated")
            if self._casting:
                streams.wait(Lane.COPY_IN, event, "copy-in after compute")
                with streams.on(Lane.COPY_IN):
                    for transport in self._casting:
                        transport.copy_in()
                event = streams.record(Lane.COPY_IN, "copy-in done")
            streams.wait(Lane.ALL_GATHER, event, "all-gather after copy-in")
            with streams.on(Lane.ALL_GATHER):
                for transport in self._gathering:
                    work = transport.gather()
                    if work is not None:
                        self._works.append(work)
            self._gathered_event = streams.record(Lane.ALL_GATHER, "all-gather done")
            if self.observer is not None:
                self.observer("all_gather", self.name)

    def finish_unshard(self) -> None:
        """Make COMPUTE wait for the all-gather and register the gathered parameters."""
        self._move("finish_unshard")
        self._await_gather()
        if not self._early:
            self._full.acquire()
        for transport in self._transports:
            transport.copy_out()
            transport.release()
        for store, name, param in self._to_unsharded:
            store[name] = param
        if self.observer is not None:
            self.observer("finish", self.name)

    def reshard(self) -> None:
        """Free the gathered parameters and register the sharded ones; no-op if sharded."""
        if self.state is State.SHARDED:
            return
        gathering = self.state is State.GATHERING
        self._move("reshard")
        if gathering:  # a prefetch that nobody used: it must be over before its memory goes
            self._await_gather()
            for transport in self._transports:
                transport.release()
        for store, name, param in self._to_sharded:
            store[name] = param
        self._full.release()
        if self.observer is not None:
            self.observer("reshard", self.name)

    def free_if_outdated(self) -> None:
        """Free parameters that were gathered before an optimizer step: they have changed since."""
        if self.state is not State.SHARDED and self._gathered_at != OptimizerSteps.count:
            self.reshard()

    def _await_gather(self) -> None:
        if self._works:
            for work in self._works:
                work.wait()
            self._works.clear()
        if self._gathering:
            self.streams.wait(Lane.COMPUTE, self._gathered_event, "compute after all-gather")

    def refresh_requires_grad(self) -> None:
        """Carry ``requires_grad`` from one form of a parameter to the other, if it changed."""
        changed = False
        for param in self.params:
            if follow_requires_grad(param):
                changed = True
        if changed or (self._reduces_frozen and not self.accumulates):
            self.bind_reductions()

    # ---- gradients

    def accumulate(self) -> None:
        """Keep this backward's gradients, unreduced, in the reduce dtype."""
        self.accumulates = True
        for reduction in self._reductions:
            for member in reduction.members:
                member.accumulate(reduction.reduce_dtype)

    def collect(self, take_missing: bool = False) -> list[tuple[SegmentReduction, Job]]:
        """Take the gradients that are there; empty where no parameter has one.

        Args:
            take_missing: take zeros, which become gradients, where there is none. Default
                ``False``.
        """
        self.accumulates = False
        jobs = []
        for reduction in self._reductions:
            job = reduction.collect(take_missing)
            if job is not None:
                jobs.append((reduction, job))
        return jobs

    def reduce(self, jobs: list[tuple[SegmentReduction, Job]]) -> PendingReduction | None:
        """Reduce collected gradients into the sharded parameters' ``.grad``.

        Returns:
            What is on its way, or ``None`` if nothing is: one rank has nothing to communicate.
        """
        streams = self.streams
        pending = None
        with torch.no_grad():
            for reduction, job in jobs:
                for step in reduction.on_compute:
                    step(reduction, job)
            if self.collectives.size > 1:
                event = streams.record(Lane.COMPUTE, "gradients staged")
                streams.wait(Lane.REDUCE, event, "reduction after compute")
                with streams.on(Lane.REDUCE):
                    for reduction, job in jobs:
                        for step in reduction.on_reduce:
                            step(reduction, job)
                event = streams.record(Lane.REDUCE, "reduction done")
                pending = PendingReduction(event, jobs)
        if self.observer is not None:
            self.observer("reduce", self.name)
        return pending

    def discard_gradients(self) -> None:
        """Drop gradients that are not reduced yet."""
        self.accumulates = False
        for param in self.params:
            param.take_gradient()

    # ---- state

    def _move(self, action: str) -> None:
        target = _MOVES[action].get(self.state)
        if target is None:
            raise ShardingStateError(
                f"cannot {action} the parameters of '{self.name}', which are "
                f"{self.state.value}; after an exception in forward or backward, call "
                f"reset_iter_state() on the root module"
            )
        self.state = target

    def _require_sharded(self, action: str) -> None:
        if self.state is not State.SHARDED:
            raise ShardingStateError(
                f"cannot {action} '{self.name}' while its parameters are {self.state.value}; "
                f"call reshard() on it first"
            )
