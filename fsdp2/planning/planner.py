"""A planned step: its memory, its time, and the effect of other settings.

plan(make_model, make_batch, units={Block}, mesh=(64,), hardware="h100")  ──>  Plan
Plan.with_(checkpointing=True)  ──>  Plan         Plan.fit(memory=80e9)  ──>  Fit
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from fsdp2.core.device.streams import Lane
from fsdp2.core.errors import coded
from fsdp2.planning.hardware import Hardware, load
from fsdp2.planning.memory import Memory, follow
from fsdp2.planning.picture import drawn
from fsdp2.planning.printing import code, render
from fsdp2.planning.rehearsal import (
    Loss,
    MakeModel,
    MakeOptimizer,
    Rehearsal,
    Settings,
    Shard,
    Subject,
    default_loss,
    default_optimizer,
    on_meta,
    policy_of,
    rehearse,
    takes_count,
)
from fsdp2.planning.search import Fit, advice, search
from fsdp2.planning.timing import Times, Timing, UnitTimes, schedule
from fsdp2.tracing import Timeline, show
from fsdp2.tracing.summaries import amount
from fsdp2.wrap.choices import Policy

REMEMBERED = 4
"""The number of rehearsals that a model keeps."""


class Plan:
    """A planned step of one rank; see `plan`.

    Args:
        subject: the model, and the work of one step.
        settings: how it is trained.
        hardware: the machine.
        rehearsal: the recorded step.

    Attributes:
        settings: how it is trained.
        hardware: the machine.
        rehearsal: the recorded step.
    """

    def __init__(
        self, subject: Subject, settings: Settings, hardware: Hardware, rehearsal: Rehearsal
    ) -> None:
        self._subject = subject
        self.settings = settings
        self.hardware = hardware
        self.rehearsal = rehearsal

    # ---- results

    @cached_property
    def memory(self) -> Memory:
        """The allocated memory."""
        return follow(self.rehearsal.recording, self.hardware.rounding)

    @cached_property
    def timing(self) -> Timing:
        """When each operation runs."""
        return schedule(self.rehearsal.recording, self.hardware, self.settings.world)

    @cached_property
    def time(self) -> Times:
        """The time of a step by purpose."""
        spans, world = self.timing.spans, self.timing
        by_phase = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        copies = communication = inline = 0.0
        for span in spans:
            seconds = span.end - span.start
            if span.operation.kind == "collective":
                communication += seconds
                inline += seconds if span.operation.lane is Lane.COMPUTE else 0.0
            elif span.operation.kind == "copy":
                copies += seconds if span.operation.lane is Lane.COMPUTE else 0.0
            else:
                by_phase[span.operation.phase] += seconds
        compute = sum(by_phase.values())
        waited = inline + sum(s.end - s.start for s in world.stalls if s.lane is Lane.COMPUTE)
        host = max(world.step - world.stragglers - compute - copies - waited, 0.0)
        return Times(
            step=world.step,
            compute=compute,
            copies=copies,
            communication=communication,
            exposed=waited,
            host=host,
            stragglers=world.stragglers,
            **by_phase,
        )

    @cached_property
    def units(self) -> list[UnitTimes]:
        """One row per unit, in the order of the modules."""
        rows = {name: _Row() for name in self.rehearsal.units}
        spans = self.timing.spans
        for span in spans:
            row, seconds = rows.get(span.operation.unit), span.end - span.start
            if row is None:
                continue
            inline = seconds if span.operation.lane is Lane.COMPUTE else 0.0
            if span.operation.kind != "collective":
                row.compute += inline if span.operation.kind == "compute" else 0.0
                continue
            row.nbytes += span.operation.nbytes
            if span.operation.name == "all-gather":
                row.gathers += 1
                row.gather += seconds
                row.gather_exposed += inline
            else:
                row.reduction += seconds
                row.reduction_exposed += inline
        for stall in self.timing.stalls:
            if stall.lane is not Lane.COMPUTE or stall.behind < 0:
                continue
            row = rows.get(spans[stall.behind].operation.unit)
            if row is not None and stall.on in (Lane.ALL_GATHER, Lane.COPY_IN):
                row.gather_exposed += stall.end - stall.start
            elif row is not None:
                row.reduction_exposed += stall.end - stall.start
        return [UnitTimes(name, **vars(row)) for name, row in rows.items()]

    @cached_property
    def traffic(self) -> tuple[float, float]:
        """Bytes that a rank sends per step, on average: within its node, and to others."""
        recording = self.rehearsal.recording
        inside = between = 0.0
        for note in recording.operations:
            if note.kind == "collective":
                ranks = recording.groups[note.group]
                within, beyond = self.hardware.traffic(note.name, note.nbytes, ranks)
                inside, between = inside + within, between + beyond
        return inside, between

    @property
    def bytes_in_node(self) -> float:
        """Bytes that a rank sends to others of its node per step."""
        return self.traffic[0]

    @property
    def bytes_between_nodes(self) -> float:
        """Bytes that a rank sends to other nodes per step, on average over its node."""
        return self.traffic[1]

    @property
    def tokens(self) -> int:
        """Tokens (or samples) per step, over all ranks."""
        return self.rehearsal.tokens * self.settings.accumulate * self.settings.world

    @property
    def tokens_per_second(self) -> float:
        """Tokens (or samples) per second, over all ranks."""
        return self.tokens / self.time.step

    @cached_property
    def flops(self) -> int:
        """FLOPs of a rank's step without recomputation: three times those of forward."""
        operations = self.rehearsal.recording.operations
        return 3 * sum(note.flops for note in operations if note.phase == "forward")

    @property
    def mfu(self) -> float:
        """The fraction of the device's peak FLOPs that the model uses."""
        dtypes = [note.dtype for note in self.rehearsal.recording.operations if note.flops]
        peak = self.hardware.peak_flops
        name = str(max(set(dtypes), key=dtypes.count)).removeprefix("torch.") if dtypes else ""
        sharers = min(self.settings.world, self.hardware.node) if self.hardware.shared else 1
        return self.flops / self.time.step / (peak.get(name) or max(peak.values())) * sharers

    @property
    def room(self) -> int:
        """Bytes of the device that are available to tensors."""
        return self.hardware.memory - self.hardware.reserved

    @property
    def fits(self) -> bool:
        """Whether the peak, as the allocator rounds it, is within `room`."""
        return self.memory.peak.rounded <= self.room

    @cached_property
    def verdict(self) -> str:
        """One sentence: whether the model fits, where memory peaks, how fast it is; and a change
        that fits.

        The last part takes at least one rehearsal, once.
        """
        better = "" if self.fits else advice(self)
        return f"{self._summary}; {better}" if better else self._summary

    @property
    def _summary(self) -> str:
        peak = self.memory.peak
        what = "fits" if self.fits else "does not fit"
        return (
            f"{what}: {amount(peak.rounded)} of {amount(self.room)} at {peak.where}; "
            f"{self.time.step:.3g} s per step, {self.tokens_per_second:,.0f} tokens/s"
        )

    @property
    def is_own(self) -> bool:
        """Whether the plan uses the user's own calls of `fully_shard`, which no setting changes."""
        return self._subject.shard is not None

    @property
    def is_resizable(self) -> bool:
        """Whether ``make_batch`` takes a number of samples."""
        return takes_count(self._subject.make_batch)

    # ---- other settings

    def with_(self, **changes: Any) -> Plan:
        """Plan the same model with other settings, or on another machine.

        Args:
            changes: fields of `Settings`; or ``hardware``, which needs no new rehearsal if the new
                machine has lanes and a backend of the same kind. Settings that were planned a
                moment ago need none either.

        Raises:
            TypeError: there is no such setting.

        Example::

            plan.with_(checkpointing=True).verdict
        """
        hardware = load(changes.pop("hardware", self.hardware))
        known = {each.name for each in fields(Settings)}
        for name in changes:
            if name not in known:
                raise coded(
                    TypeError,
                    "plan-with-setting",
                    f"Plan.with_() has no setting '{name}'; pass some of "
                    f"{', '.join(sorted(known))} or hardware",
                )
        settings = replace(self.settings, **changes)
        if "mesh" in changes:
            settings = replace(settings, mesh=_shape(settings.mesh))
        rehearsal = self.rehearsal
        alike = _kind(hardware) == _kind(self.hardware)
        if settings != self.settings or not alike:
            rehearsal = _rehearsed(self._subject, settings, _kind(hardware))
        return Plan(self._subject, settings, hardware, rehearsal)

    def fit(
        self,
        memory: float | None = None,
        limit: int = 30,
        low_precision: bool = False,
        progress: Callable[[str], object] | None = None,
    ) -> Fit[Plan]:
        """Search for the fastest settings that fit.

        It tries checkpointing, resharding after forward, micro-batches with the same number of
        samples per step, and, over several nodes, shards within one or two nodes with replication
        across. With the best of them it tries a larger prefetch window, some units kept unsharded
        after forward, and with several micro-batches all of them kept after backward. If nothing
        fits, it tries offload.

        Args:
            memory: bytes per rank; default: `room`.
            limit: maximum number of rehearsals.
            low_precision: whether gradients may be reduced in bf16, with mixed precision.
            progress: called with a line for each rehearsal, such as ``print``. Default: no call.

        Returns:
            The plans that were tried; printed, a table, the best and the code that trains with it.

        Raises:
            ValueError: the plan uses the user's own calls of `fully_shard`, which cannot be varied.
        """
        if self._subject.shard is not None:
            raise coded(
                ValueError,
                "plan-own-calls",
                "fit() varies settings, but it cannot change the calls in shard=… of plan(); "
                "pass units=… instead",
            )
        room = self.room if memory is None else int(memory)
        return search(self, room, limit, low_precision, progress)

    # ---- as a picture and in print

    def __str__(self) -> str:
        return render(self)

    def timeline(self) -> Timeline:
        """The step as a timeline: the same data as for a real run."""
        facts: dict[str, str | int] = {
            "title": f"plan of {self.settings.world} x {self.hardware.name}",
            "note": self.verdict,
            "source": "paper",
            "clock": "paper",
            "rank": 0,
            "world_size": self.settings.world,
            "device": self.hardware.name,
        }
        return drawn(self.rehearsal.recording, self.timing, facts)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the step to a file that Perfetto opens, and `fsdp2.trace` reads.

        Args:
            path: the file, which is replaced.

        Example::

            plan.trace("plan.json")
        """
        self.timeline().write(path)

    def show(self, path: str | os.PathLike[str] = "plan.html") -> Path:
        """Write an HTML page: lanes over time, memory below, units as a table.

        Args:
            path: the HTML file, which is replaced.

        Returns:
            Its path.

        Example::

            plan.show("plan.html")
        """
        return show(self.timeline(), to=path)

    def __repr__(self) -> str:
        return f"Plan({self._summary!r})"

    def code(self, policy: str = "policy") -> str:
        """Code with these settings, to paste."""
        return code(self.settings, self.hardware, policy)


@dataclass
class _Row:
    compute: float = 0.0
    gathers: int = 0
    gather: float = 0.0
    gather_exposed: float = 0.0
    reduction: float = 0.0
    reduction_exposed: float = 0.0
    nbytes: int = 0


def _kind(hardware: Hardware) -> tuple[str, str]:
    return hardware.device if hardware.device == "cpu" else "cuda", hardware.backend


def _rehearsed(subject: Subject, settings: Settings, kind: tuple[str, str]) -> Rehearsal:
    """A rehearsal, or the same one again: of the last few of a model."""
    key = (settings, kind)
    found = subject.rehearsals.pop(key, None)
    if found is None:
        found = rehearse(subject, settings, *kind)
    subject.rehearsals[key] = found
    while len(subject.rehearsals) > REMEMBERED:
        subject.rehearsals.pop(next(iter(subject.rehearsals)))
    return found


def _shape(mesh: int | Iterable[int]) -> tuple[int, ...]:
    shape = (mesh,) if isinstance(mesh, int) else tuple(mesh)
    known = len(shape) in (1, 2) and all(isinstance(size, int) and size > 0 for size in shape)
    if not known:
        raise coded(
            ValueError,
            "plan-mesh",
            f"mesh={mesh!r} is not a shape of ranks; pass a number, (shard,) or (replicate, shard)",
        )
    return shape


def plan(
    model: nn.Module | MakeModel,
    make_batch: Callable[..., object],
    *,
    units: Policy | Iterable[str] | None = None,
    shard: Shard | None = None,
    mesh: int | tuple[int, ...] = 8,
    hardware: str | Path | Hardware = "h100",
    loss: Loss = default_loss,
    optimizer: MakeOptimizer = default_optimizer,
    tokens: int | None = None,
    **settings: Any,
) -> Plan:
    """Plan a training step: its memory and its time, without a device, a process group or weights.

    The model's forward, backward and optimizer step run once on tensors without memory, under
    fsdp2's real scheduler, as rank 0 of any number of ranks. The rates of a machine then give the
    times of the recorded operations.

    Args:
        model: a function that creates the model, called with ``meta`` as the default device; or a
            model, of which only the shapes are used.
        make_batch: a function that creates a rank's micro-batch on ``meta``; it may take one
            argument, ``batch`` of `Settings`.
        units: the modules that become units besides the model: classes, their names, or a policy as
            for `shard_model`. Default: the model is one unit.
        shard: called with the model and a mesh, instead of ``units``: your own calls of
            `fully_shard`.
        mesh: ranks: a number, ``(shard,)`` or ``(replicate, shard)``. Default: 8.
        hardware: a name that `fsdp2.planning.hardware.load` knows, a file, or a `Hardware`.
        loss: called with the model and a micro-batch, returns a scalar. Default: the model's output
            if it is a scalar, its ``loss``, or its mean.
        optimizer: called with this rank's rows as plain parameters. Default: AdamW.
        tokens: number of tokens of a micro-batch. Default: elements of its first tensor if they are
            integers, otherwise its length.
        **settings: further fields of `Settings`, such as ``checkpointing=True``.

    Returns:
        The plan.

    Raises:
        RuntimeError: this process has a process group.
        ValueError: the model reads values, or an argument is invalid.
        TypeError: there is no such setting, or ``model`` is not a model.

    Example::

        plan = fsdp2.plan(make_model, make_batch, units={Block}, mesh=64, hardware="h100")
        print(plan.verdict)
    """
    known = {each.name for each in fields(Settings)}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise coded(
            TypeError,
            "plan-setting",
            f"plan() has no setting '{unknown[0]}'; pass some of {', '.join(sorted(known))}",
        )
    machine = load(hardware)
    chosen = Settings(mesh=_shape(mesh), **settings)
    if not callable(model):
        raise coded(
            TypeError,
            "plan-model",
            f"plan() takes a model or a function that returns one, not {type(model).__name__}",
        )
    make = (lambda: on_meta(model)) if isinstance(model, nn.Module) else model
    subject = Subject(make, make_batch, policy_of(units), shard, loss, optimizer, tokens)
    return Plan(subject, chosen, machine, _rehearsed(subject, chosen, _kind(machine)))
