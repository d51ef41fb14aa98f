"""Plans in print: tables for people, and settings as code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fsdp2.planning.hardware import Hardware
from fsdp2.planning.memory import Memory
from fsdp2.planning.rehearsal import Rehearsal, Settings
from fsdp2.planning.timing import Times, UnitTimes
from fsdp2.record.categories import CATEGORIES
from fsdp2.tracing.summaries import amount, table

MOST_UNITS = 12


class Planned(Protocol):
    """The printed properties of a plan."""

    settings: Settings
    hardware: Hardware
    rehearsal: Rehearsal

    @property
    def memory(self) -> Memory:
        """The allocated memory."""

    @property
    def time(self) -> Times:
        """The time of a step by purpose."""

    @property
    def units(self) -> list[UnitTimes]:
        """A row for each unit."""

    @property
    def verdict(self) -> str:
        """A sentence."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all ranks."""

    @property
    def mfu(self) -> float:
        """The part of the peak that is used."""

    @property
    def bytes_in_node(self) -> float:
        """Sent in a step."""

    @property
    def bytes_between_nodes(self) -> float:
        """Sent in a step."""

    def code(self) -> str:
        """The settings as code."""


def render(plan: Planned) -> str:
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
    header = ["unit", "compute", "gathers", "gather", "exposed", "reduction", "exposed", "MB moved"]
    shown = list(units)
    left = ""
    if len(shown) > MOST_UNITS:
        worst = sorted(units, key=lambda u: -(u.gather_exposed + u.reduction_exposed))[:MOST_UNITS]
        shown = [unit for unit in units if unit in worst]
        left = f"(the {MOST_UNITS} of {len(units)} units with most exposed communication)"
    rows = [
        [
            unit.name,
            _ms(unit.compute),
            str(unit.gathers),
            _ms(unit.gather),
            _ms(unit.gather_exposed),
            _ms(unit.reduction),
            _ms(unit.reduction_exposed),
            f"{unit.nbytes / 1e6:,.1f}",
        ]
        for unit in shown
    ]
    return [f"Units, in ms {left}".rstrip(), *table(header, rows)]


def render_fit(fitting: Sequence[Planned], tried: Sequence[Planned], room: int) -> str:
    """The plans that were tried, the fastest that fits first, and the best as code."""
    header = ["mesh", "batch", "accumulate", "reshard", "checkpointing", "other", "peak"]
    header += ["tokens/s", "fits"]
    rest = [plan for plan in tried if plan not in fitting]
    rest.sort(key=lambda plan: plan.memory.peak.rounded)
    rows = []
    for plan in (*fitting, *rest):
        settings = plan.settings
        rows.append(
            [
                " x ".join(map(str, settings.mesh)),
                str(settings.batch),
                str(settings.accumulate),
                str(settings.reshard_after_forward),
                str(settings.checkpointing),
                _others(settings),
                amount(plan.memory.peak.rounded),
                f"{plan.tokens_per_second:,.0f}",
                "yes" if plan in fitting else "no",
            ]
        )
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
    parts = [
        f"mesh {' x '.join(map(str, settings.mesh))}",
        f"batch {settings.batch}",
        f"accumulate {settings.accumulate}",
        f"reshard_after_forward {settings.reshard_after_forward}",
        f"checkpointing {settings.checkpointing}",
    ]
    others = _others(settings)
    return ", ".join(parts if others == "-" else [*parts, others])


def _others(settings: Settings) -> str:
    """Settings without a column that differ from the default."""
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
    return ", ".join(found) or "-"


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
        lines.append(f"model.set_prefetch_window({settings.window})")
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
