"""Time that all-gathers take from compute, by the window of units gathered ahead. No processes.

    python benchmarks/window.py                      # three kinds of models, windows of 1, 2, 3
    python benchmarks/window.py --json FILE

fsdp2's own schedule runs on paper (`fsdp2.testing.simulation`), and is replayed with a duration for
each gather, compute and reduce-scatter (`fsdp2.testing.timeline`). torch's FSDP2 is a model of its
rule, in the same replay (`torchs`). Durations are arithmetic: bytes over a bus bandwidth, FLOPs
over a rate. So this says what a schedule allows where the host is far ahead, and nothing of a real
machine.

What is shown is exposed time: how long compute is idle in a steady forward and in a backward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks import stats
from fsdp2.core.device.streams import Lane
from fsdp2.record.notes import Operation
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.timeline import idle, replay
from fsdp2.testing.virtual import VirtualDevice

WINDOWS = (1, 2, 3)

BUS = 360e9
"""Bytes a second that an all-gather moves: eight H100s on NVLink, as an estimate."""

RATE = 400e12
"""FLOPs a second in bf16: an H100, as an estimate."""


# ---------------------------------------------------------------------------------------------
# What units take


@dataclass(frozen=True)
class Unit:
    """What a unit takes, in milliseconds.

    Attributes:
        gather: its all-gather.
        forward: its compute in forward.
        backward: in backward.
        reduce: its reduce-scatter.
    """

    gather: float
    forward: float
    backward: float
    reduce: float = 0.0


def unit_of(params: float, used: float, tokens: int) -> Unit:
    """A unit of ``params`` parameters, of which each token uses ``used``; bf16, reduced in fp32."""
    forward = 2 * used * tokens / RATE * 1e3
    gather = 2 * params / BUS * 1e3
    return Unit(gather, forward, 2 * forward, 2 * gather)


def repeated(block: Sequence[Unit], blocks: int) -> list[Unit]:
    """A model of alike blocks, each of these units in turn."""
    return list(block) * blocks


def models(blocks: int, tokens: int) -> dict[str, list[Unit]]:
    """The models that are compared.

    Mixtral-8x7B has 42 M parameters of attention a block, and 8 experts of 176 M, of which a token
    uses two; Llama-3-8B has 218 M a block. The third has a router and a shared expert as units of
    their own: two small ones in front of a large one.
    """
    attention = unit_of(42e6, 42e6, tokens)
    experts = unit_of(8 * 176e6, 2 * 176e6, tokens)
    shared = unit_of(44e6, 44e6, tokens)
    return {
        "Llama-3-8B, a unit a block": repeated([unit_of(218e6, 218e6, tokens)], blocks),
        "Mixtral-8x7B, attention and experts": repeated([attention, experts], blocks),
        "attention, shared expert, experts": repeated([attention, shared, experts], blocks),
    }


# ---------------------------------------------------------------------------------------------
# Schedules


@dataclass(frozen=True)
class Exposed:
    """Milliseconds for which compute is idle.

    Attributes:
        forward: in a forward.
        backward: in a backward.
    """

    forward: float
    backward: float


def ours(units: Sequence[Unit], window: int, buffers: int = 1, separate: bool = False) -> Exposed:
    """Of fsdp2's own schedule, once it knows the order of units.

    Args:
        units: in the order in which they run.
        window: how many are gathered ahead.
        buffers: of how many units reductions may hold their inputs.
        separate: whether reduce-scatters have a process group of their own.
    """
    names = [f"u{i}" for i in range(len(units))]
    times = dict(zip(names, units, strict=True))
    leaves = [Node(name, shapes=((8, 8),)) for name in names]
    device = VirtualDevice()
    simulation = Simulation(
        Node("root", leaves, list(range(len(leaves))), shapes=()), device, window=window
    )
    simulation.scheduler.units[0].input_buffers = buffers
    simulation.scheduler.refresh()
    simulation.iteration()
    return _exposed(device, simulation.forward, simulation.backward, times, separate)


def torchs(units: Sequence[Unit]) -> Exposed:
    """Of torch's FSDP2 by its rule (2.13, `_fsdp_param_group.py`), copies taking no time.

    In forward a unit's gather is issued when it is entered, by a host that is far ahead. Its stream
    then waits for the copy-out of the unit two before it: `wait_for_unshard` lets the streams wait
    for the event of the unit before (`all_gather_state`), behind its own gather. In backward each
    unit issues the gather of the next, whose stream waits for its own copy-out
    (`_wait_all_gather_streams_on_event`, `_backward_prefetch`).
    """
    device = VirtualDevice()
    names = [f"u{i}" for i in range(len(units))]
    full = [device.zeros((1,), torch.float32, f"gathered {name}") for name in names]
    grads = [device.zeros((1,), torch.float32, f"gradient {name}.0") for name in names]

    def gather(i: int) -> Any:
        with device.on(Lane.ALL_GATHER):
            device.run("all_gather", [], [full[i]])
        return device.record(Lane.ALL_GATHER, "gathered")

    def forward() -> None:
        before = None  # the event behind the copy-out of the unit before
        for i, name in enumerate(names):
            gathered = gather(i)
            if before is not None:
                device.wait(Lane.ALL_GATHER, before, "the next gather after copy-out")
            device.wait(Lane.COMPUTE, gathered, "compute after gather")
            before = device.record(Lane.COMPUTE, "copied out")
            device.run(f"forward {name}", [full[i]], [])

    def backward() -> None:
        gathered, reduced = gather(len(names) - 1), None
        for i in reversed(range(len(names))):
            device.wait(Lane.COMPUTE, gathered, "compute after gather")
            copied = device.record(Lane.COMPUTE, "copied out")
            device.wait(Lane.ALL_GATHER, copied, "the next gather after copy-out")
            if i:
                gathered = gather(i - 1)
            device.run(f"backward {names[i]}", [full[i]], [grads[i]])
            if reduced is not None:
                device.wait(Lane.COMPUTE, reduced, "staging after the reduction before")
            device.wait(Lane.REDUCE, device.record(Lane.COMPUTE, "staged"), "reduce")
            with device.on(Lane.REDUCE):
                device.run("reduce_scatter", [grads[i]], [])
            reduced = device.record(Lane.REDUCE, "reduced")
        assert reduced is not None
        device.wait(Lane.COMPUTE, reduced, "the end of backward")

    return _exposed(device, forward, backward, dict(zip(names, units, strict=True)))


def _exposed(
    device: VirtualDevice,
    forward: Callable[[], None],
    backward: Callable[[], None],
    times: Mapping[str, Unit],
    separate: bool = False,
) -> Exposed:
    channel = () if separate else ("all_gather", "reduce_scatter")
    found = []
    for run in (forward, backward):
        start = len(device.trace)
        run()
        spans = replay(device.trace[start:], lambda op: _duration(op, times), channel)
        found.append(idle(spans, Lane.COMPUTE))
    return Exposed(*found)


def _duration(op: Operation, times: Mapping[str, Unit]) -> float:
    """What an operation of either schedule takes; nothing, of those that are not looked at."""
    kind, _, name = op.kind.partition(" ")
    if kind in ("forward", "backward"):
        unit = times.get(name)
        return 0.0 if unit is None else getattr(unit, kind)
    if kind == "all_gather":
        return times[op.writes[0].name.split()[1]].gather
    if kind == "reduce_scatter":
        return times[op.reads[0].name.split()[1].partition(".")[0]].reduce
    return 0.0


# ---------------------------------------------------------------------------------------------
# Report


def measure(blocks: int, tokens: int) -> list[dict[str, Any]]:
    """A row for each model and rule."""
    rows: list[dict[str, Any]] = []
    for model, units in models(blocks, tokens).items():
        found = {"torch": torchs(units)}
        found |= {f"window {window}": ours(units, window) for window in WINDOWS}
        found["window 3, 2 input buffers"] = ours(units, 3, buffers=2)
        rows += [{"model": model, "rule": rule, **asdict(one)} for rule, one in found.items()]
    return rows


def report(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): exposed milliseconds in forward and backward, a row a model."""
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    cells = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = {row["rule"]: row for row in rows if row["model"] == model}
        found = [f"{own[rule]['forward']:.1f} / {own[rule]['backward']:.1f}" for rule in rules]
        cells.append([model, *found])
    return ["exposed ms, forward / backward", *rules], cells


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The same as Markdown."""
    header, cells = report(rows)
    lines = [f"| {' | '.join(line)} |" for line in (header, *cells)]
    return [lines[0], "|---" * len(header) + "|", *lines[1:]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; write it, if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192, help="of one rank, in a step")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    rows = measure(options.blocks, options.tokens)
    print("\n".join(table(rows)))
    if options.json:
        stats.write_json(options.json, "cpu", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
