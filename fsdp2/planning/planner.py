"""A planned step: its memory, its time, and the effect of other settings.

plan(make_model, make_batch, units={Block}, mesh=(64,), hardware="h100")  ──>  Plan
Plan.with_(checkpointing=True)  ──>  Plan         Plan.fit(memory=80e9)  ──>  Fit

A search tries meshes, micro-batches, checkpointing and resharding; then the best of them with a
larger window, units kept in part, …; offload last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2.core.errors import coded
from fsdp2.planning.hardware import Hardware, load
from fsdp2.planning.memory import Memory, follow
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
from fsdp2.planning.timing import Times, drawn, schedule
from fsdp2.tracing import Timeline, UnitTimes, show, summary
from fsdp2.tracing.record.categories import CATEGORIES
from fsdp2.tracing.record.replay import Replay
from fsdp2.tracing.summaries import COLUMNS, amount, cells, table
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
    def _schedule(self) -> tuple[Replay, Times]:
        return schedule(self.rehearsal.recording, self.hardware, self.settings.world)

    @property
    def time(self) -> Times:
        """The time of a step by purpose."""
        return self._schedule[1]

    @cached_property
    def units(self) -> tuple[UnitTimes, ...]:
        """One row per unit, in the order in which they first run, as of a real step's timeline."""
        return summary(self._schedule[0].timeline([], {})).units

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
                machine has streams and a backend of the same kind. Settings that were planned a
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
        return self._of(settings, hardware)

    def _of(self, settings: Settings, hardware: Hardware) -> Plan:
        """The same model with these settings, rehearsed again if they or the lanes differ."""
        rehearsal = self.rehearsal
        if settings != self.settings or _kind(hardware) != _kind(self.hardware):
            rehearsal = _rehearsed(self._subject, settings, _kind(hardware))
        return Plan(self._subject, settings, hardware, rehearsal)

    def fit(
        self,
        memory: float | None = None,
        limit: int = 30,
        low_precision: bool = False,
        progress: Callable[[str], object] | None = None,
    ) -> Fit:
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
        found = Fit(self.room if memory is None else int(memory), [])
        found._search(self, max(limit, 1), low_precision, progress or (lambda _: None))
        return found

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
        return drawn(self.rehearsal.recording, self._schedule[0], facts)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the step to a file that Perfetto opens, and `fsdp2.trace` reads.

        Args:
            path: the file, which is replaced.

        Example::

            plan.trace("plan.json")
        """
        self.timeline().write(path)

    def show(self, path: str | os.PathLike[str] = "plan.html") -> Path:
        """Write an HTML page: streams over time, memory below, units as a table.

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
        optimizer: called with local shards as plain parameters. Default: AdamW.
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


# ---- other settings: which fit, and which of those is the fastest

REFINEMENTS = 6
"""Rehearsals reserved for settings that are tried only with the best ones."""

ALIKE = 0.995
"""Relative difference in speed within which plans count as equally fast, and less memory wins."""


class Fit:
    """The plans that `Plan.fit` tried.

    Attributes:
        room: the allowed bytes.
        tried: all plans.
    """

    def __init__(self, room: int, tried: list[Plan]) -> None:
        self.room = room
        self.tried = tried

    @property
    def fitting(self) -> list[Plan]:
        """The plans that fit, the fastest first; of those within 0.5 % of it, the one with least
        memory comes first.
        """
        found = [plan for plan in self.tried if _peak(plan) <= self.room]
        most = max((plan.tokens_per_second for plan in found), default=0.0)

        def order(plan: Plan) -> tuple[float, int]:
            speed = plan.tokens_per_second
            return (-most if speed >= ALIKE * most else -speed), _peak(plan)

        return sorted(found, key=order)

    @property
    def best(self) -> Plan | None:
        """The first of `fitting`; ``None`` if none fits."""
        found = self.fitting
        return found[0] if found else None

    def __str__(self) -> str:
        return render_fit(self.fitting, self.tried, self.room)

    def _search(
        self, plan: Plan, limit: int, low_precision: bool, progress: Callable[[str], object]
    ) -> None:
        """See `Plan.fit`."""

        def run(settings: Settings) -> None:
            """Plan these settings within the limit, unless they were tried, and tell about it."""
            if len(self.tried) >= limit or any(settings == p.settings for p in self.tried):
                return
            made = plan._of(settings, plan.hardware)
            self.tried.append(made)
            fits = "fits" if _peak(made) <= self.room else "does not fit"
            progress(
                f"{len(self.tried)} of at most {limit}: {told(settings)}: "
                f"{amount(_peak(made))} {fits}, {made.tokens_per_second:,.0f} tokens/s"
            )

        for settings in _candidates(plan):
            if len(self.tried) + REFINEMENTS >= max(limit, REFINEMENTS + 1):
                break
            if not self._is_hopeless(settings):
                run(settings)
        if self.best is None:
            run(replace(min(self.tried, key=_peak).settings, offload=True))
        best = self.best
        for settings in () if best is None else _refinements(best, self.room):
            run(settings)
        best = self.best
        if best is not None and low_precision and best.settings.precision is not None:
            halves = replace(best.settings.precision, reduce_dtype=torch.bfloat16)
            run(replace(best.settings, precision=halves))

    def _is_hopeless(self, settings: Settings) -> bool:
        """Whether other settings of this micro-batch that need less memory do not fit.

        Keeping units unsharded after forward takes more memory. So does less recomputation, unless
        activations are small: then the recomputed tensors may take more than checkpointing saves.
        """
        for made in self.tried:
            now = made.settings
            if (now.mesh, now.batch) != (settings.mesh, settings.batch):
                continue
            same = now.checkpointing == settings.checkpointing
            frees = now.reshard_after_forward is True
            if same and frees and _peak(made) > self.room:
                return True
            less = _recomputed(now) > _recomputed(settings) and (
                frees or now.reshard_after_forward == settings.reshard_after_forward
            )
            if less and _peak(made) > 1.25 * self.room:
                return True
        return False


def _recomputed(settings: Settings) -> float:
    """The part of units that are computed again."""
    every = int(settings.checkpointing)
    return 1 / every if every else 0.0


def _refinements(best: Plan, room: int) -> list[Settings]:
    """Further changes to try with settings that fit."""
    now = best.settings
    found = [replace(now, window=now.window + 1)]
    if now.reshard_after_forward is not False:
        kept = _kept(best, room - _peak(best))
        if kept:
            found.append(replace(now, kept=kept))
        if now.accumulate > 1:
            found.append(replace(now, reshard_after_backward=False))
    if now.accumulate > 1:
        found.append(replace(now, reduce_each=not now.reduce_each))
    return found


def _kept(plan: Plan, spare: float) -> tuple[str, ...]:
    """The last units, whose backward begins first, as many as there is spare memory for."""
    kept: list[str] = []
    for group in reversed(plan.rehearsal.reports):
        spare -= group.unsharded_bytes
        if spare < 0:
            break
        if group.name != "(root)":
            kept.append(group.name)
    return tuple(reversed(kept))


def advice(plan: Plan) -> str:
    """The first change for a plan that does not fit: a part of a sentence, "" for nothing."""
    room = plan.room
    for settings, words in _changes_of(plan):
        made = plan._of(settings, plan.hardware)
        if _peak(made) <= room:
            slower = plan.tokens_per_second / made.tokens_per_second - 1
            pace = f"{abs(slower):.0%} {'slower' if slower > 0 else 'faster'}"
            return f"with {words} it does, {pace if abs(slower) >= 0.005 else 'no slower'}"
    return ""


def _changes_of(plan: Plan) -> Iterator[tuple[Settings, str]]:
    """One change after another, those that cost least first."""
    now = plan.settings
    if plan.is_own:
        return
    blocks = [group for group in plan.rehearsal.reports if group.name != "(root)"]
    if now.reshard_after_forward is False and blocks:
        over, freed = _peak(plan) - plan.room, 0
        for group in blocks:
            freed, over = freed + 1, over - group.unsharded_bytes
            if over <= 0:
                break
        for count in dict.fromkeys((freed, len(blocks))):
            kept = tuple(group.name for group in blocks[count:])
            where = f" on {blocks[0].name} to {blocks[count - 1].name}" if kept else ""
            yield (
                replace(now, reshard_after_forward=True, kept=kept),
                f"reshard_after_forward=True{where}",
            )
        now = replace(now, reshard_after_forward=True)
    if now.batch > 1 and plan.is_resizable:
        accumulate = now.accumulate * now.batch
        yield (
            replace(now, batch=1, accumulate=accumulate, reduce_each=_is_large(plan)),
            f"batch=1 and accumulate={accumulate}",
        )
    if now.accumulate > 1 and not now.reduce_each:
        yield replace(now, reduce_each=True), "reduce_each"
    if now.checkpointing is not True:
        yield replace(now, checkpointing=True), "checkpointing"
    if not now.offload:
        yield replace(now, checkpointing=True, offload=True), "checkpointing and offload"


def _peak(plan: Plan) -> int:
    return plan.memory.peak.rounded


def _candidates(plan: Plan) -> Iterator[Settings]:
    """The thriftiest of a micro-batch first: where that does not fit, none does."""
    now = plan.settings
    samples = now.batch * now.accumulate
    sizes = [size for size in range(samples, 0, -1) if samples % size == 0][:4]
    if not plan.is_resizable:
        sizes = [now.batch]
    for mesh in _meshes(now, plan.hardware.node):
        for size in sizes:
            for reshard in (True, False):
                for checkpointing in (True, 2, False):
                    yield replace(
                        now,
                        mesh=mesh,
                        batch=size,
                        accumulate=samples // size if plan.is_resizable else now.accumulate,
                        reduce_each=now.reduce_each or _is_large(plan),
                        reshard_after_forward=reshard,
                        checkpointing=checkpointing,
                    )


def _is_large(plan: Plan) -> bool:
    """Whether whole gradients, which stay between micro-batches, take a quarter of the device."""
    return sum(group.unsharded_bytes for group in plan.rehearsal.reports) > plan.room / 4


def _meshes(now: Settings, node: int) -> list[tuple[int, ...]]:
    """As it is; over several nodes also all ranks, and shards within one node, or within two."""
    world, found = now.world, [now.mesh]
    if world > node and world % node == 0:
        found.append((world,))
        found += [(world // size, size) for size in (node, 2 * node) if world % size == 0]
    return [mesh for mesh in dict.fromkeys(found) if mesh[0] > 1 or len(mesh) == 1]


# ---- plans in print: tables for people, and settings as code

MOST_UNITS = 12


def render(plan: Plan) -> str:
    """A plan as a page of text."""
    settings, hardware, peak = plan.settings, plan.hardware, plan.memory.peak
    time = plan.time
    shape = " x ".join(map(str, settings.mesh))
    batches = "micro-batch" if settings.accumulate == 1 else "micro-batches"
    lines = [
        f"{_number(plan.rehearsal.parameters)} parameters on {shape} x {hardware.name}, "
        f"{settings.accumulate} {batches} of {plan.rehearsal.tokens:,} tokens per rank",
        plan.verdict,
        "",
        f"Memory of one rank at its peak: {peak.where}",
    ]
    categories = [name for name in CATEGORIES if name in peak.categories]
    rows = [[name, amount(peak.categories[name])] for name in categories]
    rows += [
        ["live", amount(peak.live)],
        ["rounded by the allocator", amount(peak.rounded)],
        ["between steps", amount(plan.memory.before.live)],
    ]
    if plan.memory.host:
        rows.append(["in CPU memory", amount(plan.memory.host)])
    lines += [*table(["", "bytes"], rows), "", "Time of a step, in ms"]
    rows = [
        ["step", _ms(time.step)],
        ["compute: forward", _ms(time.forward)],
        ["compute: backward", _ms(time.backward)],
        ["compute: optimizer", _ms(time.optimizer)],
        ["the engine's copies", _ms(time.copies)],
        ["communication, hidden or not", _ms(time.communication)],
        ["communication, exposed", _ms(time.exposed)],
        ["waiting for the host", _ms(time.host)],
        ["waiting for slower ranks", _ms(time.stragglers)],
    ]
    lines += [*table(["", "ms"], rows), ""]
    lines.append(
        f"{plan.tokens_per_second:,.0f} tokens/s, MFU {plan.mfu:.1%}; per step, a rank sends "
        f"{amount(plan.bytes_in_node)} within its node and {amount(plan.bytes_between_nodes)} "
        f"to other nodes"
    )
    lines += ["", *_units(plan.units)]
    return "\n".join(lines)


def _units(units: Sequence[UnitTimes]) -> list[str]:
    shown = list(units)
    left = ""
    if len(shown) > MOST_UNITS:
        worst = sorted(units, key=lambda unit: -unit.exposed)[:MOST_UNITS]
        shown = [unit for unit in units if unit in worst]
        left = f"(the {MOST_UNITS} of {len(units)} with most exposed communication)"
    rows = [[unit.unit, *cells(unit)] for unit in shown]
    return [f"Units {left}".rstrip(), *table(["unit", *COLUMNS], rows)]


def render_fit(fitting: Sequence[Plan], tried: Sequence[Plan], room: int) -> str:
    """The plans that were tried, the fastest that fits first, and the best as code."""
    header = ["mesh", "batch", "accumulate", "reshard", "checkpointing", "other", "peak"]
    header += ["tokens/s", "fits"]
    rest = [plan for plan in tried if plan not in fitting]
    rest.sort(key=_peak)
    rows = []
    for plan in (*fitting, *rest):
        speed, fits = f"{plan.tokens_per_second:,.0f}", "yes" if plan in fitting else "no"
        rows.append([*_columns(plan.settings).values(), amount(_peak(plan)), speed, fits])
    lines = table(header, rows)
    if not fitting:
        return "\n".join([*lines, "", f"nothing that was tried fits {amount(room)}"])
    best = fitting[0]
    peak = best.memory.peak
    lines += ["", f"the fastest takes {amount(peak.rounded)} of {amount(room)}, at {peak.where}: "]
    lines[-1] += f"{told(best.settings)}; {best.time.step:.3g} s per step, "
    lines[-1] += f"{best.tokens_per_second:,.0f} tokens/s"
    return "\n".join([*lines, "", best.code()])


def told(settings: Settings) -> str:
    """Settings in a line, those that `Plan.fit` changes."""
    columns = _columns(settings)
    other = columns.pop("")
    parts = [f"{name} {value}" for name, value in columns.items()]
    return ", ".join(parts if other == "-" else [*parts, other])


def _columns(settings: Settings) -> dict[str, str]:
    """Those that `Plan.fit` changes, by name; under "" others that differ from the default."""
    found = []
    if settings.kept:
        found.append(f"{len(settings.kept)} kept")
    if settings.window != 1:
        found.append(f"window {settings.window}")
    if not settings.reshard_after_backward:
        found.append("gathered once")
    if settings.accumulate > 1 and settings.reduce_each:
        found.append("reduced each time")
    if settings.offload:
        found.append("offload")
    names = ("batch", "accumulate", "reshard_after_forward", "checkpointing")
    return {
        "mesh": " x ".join(map(str, settings.mesh)),
        **{name: str(getattr(settings, name)) for name in names},
        "": ", ".join(found) or "-",
    }


def code(settings: Settings, hardware: Hardware, policy: str) -> str:
    """Settings as lines to paste; ``policy`` stands for what chooses units."""
    names = ("replicate", "shard")[-len(settings.mesh) :]
    lines = []
    if settings.checkpointing:
        lines += ["import functools", "from torch.utils.checkpoint import checkpoint"]
    if settings.precision is not None:
        lines += ["import torch"]
    lines += [
        "from torch.distributed.device_mesh import init_device_mesh",
        f"from fsdp2 import {', '.join(_used(settings))}",
        "from fsdp2.wrap import chosen_modules",
        "",
        f'mesh = init_device_mesh("{hardware.device}", {settings.mesh}, mesh_dim_names={names})',
        'options = {"mesh": mesh}',
    ]
    if settings.precision is not None:
        mixed = settings.precision
        lines.append(
            f'options["mp_policy"] = MixedPrecisionPolicy(param_dtype={mixed.param_dtype}, '
            f"reduce_dtype={mixed.reduce_dtype})"
        )
    if settings.offload:
        lines.append('options["offload_policy"] = CPUOffloadPolicy()')
    lines.append(f"for number, choice in enumerate(chosen_modules(model, {policy})):")
    if settings.checkpointing:
        lines.append(f"    if number % {int(settings.checkpointing)} == 0:")
        lines.append(
            "        choice.module.forward = functools.partial(\n"
            "            checkpoint, choice.module.forward, use_reentrant=False)"
        )
    freed = settings.reshard_after_forward if settings.reshard_after_backward else False
    value = f"{freed}"
    if settings.kept and freed is not False:
        value = f"False if choice.name in {sorted(settings.kept)} else {freed}"
    lines.append(f'    own = {{"reshard_after_forward": {value}, **choice.options}}')
    lines.append("    fully_shard(choice.module, **{**options, **own})")
    lines.append("fully_shard(model, **options, reshard_after_forward=False)")
    if settings.window != 1:
        lines.append(f"model.set_tuning(prefetch_window={settings.window})")
    if not settings.reshard_after_backward:
        lines.append("model.set_reshard_after_backward(False)")
    return "\n".join([*lines, "", *_step(settings)])


def _used(settings: Settings) -> list[str]:
    """The names of fsdp2 that the lines use."""
    wanted = {
        "CPUOffloadPolicy": settings.offload,
        "MixedPrecisionPolicy": settings.precision is not None,
        "clip_grad_norm_": settings.clip is not None,
        "fully_shard": True,
    }
    return [name for name, used in wanted.items() if used]


def _step(settings: Settings) -> list[str]:
    """A step as a function: its micro-batches, when gradients are reduced, clipping."""
    lines = [
        f"BATCH = {settings.batch}  # samples of a micro-batch",
        f"ACCUMULATE = {settings.accumulate}  # micro-batches of a step",
        "",
        "def train_step(micro_batches, loss, optimizer):",
    ]
    if settings.accumulate == 1:
        lines += ["    (batch,) = micro_batches", "    loss(model, batch).backward()"]
    else:
        lines += ["    for number, batch in enumerate(micro_batches):"]
        lines += ["        is_last = number == ACCUMULATE - 1"]
        if not settings.reduce_each:
            lines += ["        model.set_requires_gradient_sync(is_last)"]
        lines += ["        model.set_is_last_backward(is_last)"]
        lines += ["        (loss(model, batch) / ACCUMULATE).backward()"]
    if settings.clip is not None:
        lines += [f"    clip_grad_norm_(model.parameters(), {settings.clip})"]
    return [*lines, "    optimizer.step()", "    optimizer.zero_grad()"]


def _number(count: int) -> str:
    """A number of elements, for people, such as "1.24 million"."""
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:,.2f} {name}"
    return f"{count:,}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
