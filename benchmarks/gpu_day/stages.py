"""What to run, in the order of its worth. Each stage is one command line that anybody could type.

A GPU gets the models that targets are stated for. A CPU and the stand-in get the smallest, once or
twice: that shows that all of it runs, and its figures mean nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.gpu_day.machine import Machine
from fsdp2.testing.stand_in import device as stand_in

PYTHON = "python"  # in a command: the interpreter that runs this
PYTEST = "pytest"
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
PEERS = "none,torch,fsdp2,fsdp1"


@dataclass(frozen=True)
class Stage:
    """One command.

    Attributes:
        name: of its file.
        title: what it shows.
        command: a line's words behind ``python -m``: a module and its arguments.
        seconds: that it takes about; its time-out is a multiple.
        environment: variables in front of the command.
        absent: why it cannot run here; "" where it can.
    """

    name: str
    title: str
    command: tuple[str, ...]
    seconds: int
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: str = ""

    @property
    def line(self) -> str:
        """What a person would type."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join([PYTHON, "-m", *self.command])])

    @property
    def is_tests(self) -> bool:
        """Whether it is a run of pytest, which writes another kind of file."""
        return self.command[0] == PYTEST


@dataclass(frozen=True)
class Scale:
    """What models stages run, and how often.

    Attributes:
        device: what the benchmarks call it.
        dense, large, experts: presets: two models and one with experts.
        widths: of the block whose collectives run.
        often: rounds and steps of models; ``calls``: of collectives.
        small: further arguments that make host times and compiled blocks short.
    """

    device: str
    dense: str
    large: str
    experts: str
    widths: str
    often: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


_ONCE = ("--rounds", "2", "--steps", "2")
_SCALES = {
    "cuda": Scale("cuda", "1.1b", "2.8b", "moe", "1024,2048,4096,8192"),
    "cpu": Scale("cpu", "tiny", "", "tiny-moe", "64,128", _ONCE, _ONCE, ("--blocks", "2")),
    "stand-in": Scale(
        stand_in.NAME, "tiny", "", "tiny-moe", "64,128", _ONCE, _ONCE, ("--blocks", "2")
    ),
}
_SECONDS = {"cpu": 30, "stand-in": 30}
"""Of any stage there."""


def stages_for(machine: Machine) -> list[Stage]:
    """All stages of a machine, those that it cannot run with the reason."""
    scale = _SCALES[machine.kind]
    missing = stand_in.missing_tool() if machine.kind == "stand-in" else None
    found = []
    for stage in (*_tests(machine), *_measurements(machine, scale)):
        changes: dict[str, Any] = {}
        if machine.kind in _SECONDS:
            changes["seconds"] = _SECONDS[machine.kind]
        if missing is not None and not stage.absent:
            changes["absent"] = f"the stand-in is compiled and needs {missing}"
        found.append(replace(stage, **changes))
    return found


def _tests(machine: Machine) -> Iterator[Stage]:
    """First of all: where results are wrong, times mean nothing."""
    where = "tests/accelerator/test_alone.py" if machine.kind == "stand-in" else "tests/gpu"
    yield Stage("tests", "Tests", (PYTEST, where, "-n", "0"), 150)
    extended = "" if machine.kind == "cuda" else "they are for a GPU"
    command = (PYTEST, where, "-n", "0", "-m", "extended")
    yield Stage("tests-extended", "Extended tests", command, 100, absent=extended)


def _measurements(machine: Machine, scale: Scale) -> Iterator[Stage]:
    kernels = ("--kernels",) if machine.kind == "cuda" else ()
    on = ("--device", scale.device, *scale.often)
    yield Stage(
        "collectives",
        "The collectives of one Llama block",
        (
            *("benchmarks.block_collectives", "--device", scale.device),
            *("--widths", scale.widths, *scale.calls, *kernels),
        ),
        90 * max(1, len(machine.backends)),
    )
    models = [preset for preset in (scale.dense, scale.large, scale.experts) if preset]
    for preset in models:
        yield Stage(
            f"step-{preset}",
            f"The step of the {preset} model",
            ("benchmarks.step", "--preset", preset, "--variants", PEERS, *on, *kernels),
            110,
        )
    for preset in models:
        yield Stage(
            f"step-{preset}-expandable",
            f"The step of the {preset} model, expandable segments",
            ("benchmarks.step", "--preset", preset, "--variants", PEERS, *on),
            80,
            EXPANDABLE,
            absent="" if machine.kind == "cuda" else "segments are those of CUDA's allocator",
        )
    yield Stage(
        "host_cost",
        "Host time that sharding adds",
        ("benchmarks.host_cost", "--no-scaling", *on, *scale.small),
        100,
    )
    yield from _features(machine, scale, on)
    yield from _on_real_ranks(machine, scale, on)
    yield from _allocations(machine, scale)
    yield from _plans(machine, scale, on)


def _features(machine: Machine, scale: Scale, on: tuple[str, ...]) -> Iterator[Stage]:
    no_inductor = "torch's inductor writes no code for it" if machine.kind == "stand-in" else ""
    small = ("--layers", "1", "--backend", "aot_eager") if scale.small else ()
    yield Stage(
        "compile",
        "Compiled blocks",
        ("benchmarks.compile", "--preset", scale.dense, *on, *small),
        150,
        absent=no_inductor,
    )
    yield Stage(
        "recompute",
        "Activation checkpointing",
        (
            *("benchmarks.step", "--preset", scale.large or scale.dense, "--recompute"),
            *("--variants", "none,torch,fsdp2", *on),
        ),
        110,
    )
    yield Stage(
        "windows",
        "Prefetch windows of one, two and three units",
        (
            *("benchmarks.step", "--preset", scale.dense),
            *("--variants", "none,torch,fsdp2,window1,window2,window3", *on),
        ),
        110,
    )


def _real_ranks(machine: Machine) -> tuple[str, str]:
    """How many there are, and why there cannot be any."""
    ranks = machine.gpus if machine.kind == "cuda" else 2
    one = "NCCL gives each rank a GPU of its own, and there is one" if ranks == 1 else ""
    return str(max(2, ranks)), one


def _on_real_ranks(machine: Machine, scale: Scale, on: tuple[str, ...]) -> Iterator[Stage]:
    """NCCL needs a GPU a rank; other devices have as many ranks as one likes."""
    ranks, one = _real_ranks(machine)
    sharded = "torch,fsdp2,fsdp1,window1,window2,window3" if scale.large else "torch,fsdp2"
    for preset in (scale.dense, scale.experts):
        yield Stage(
            f"ranks-{preset}",
            f"The step of the {preset} model on real ranks",
            (
                *("benchmarks.step", "--preset", preset, "--ranks", ranks),
                *("--variants", sharded, *on),
            ),
            150,
            absent=one,
        )


def _allocations(machine: Machine, scale: Scale) -> Iterator[Stage]:
    shrunk = () if machine.kind == "cuda" else ("--shrink", "1")
    no_device = "a CPU's memory is not counted" if machine.kind == "cpu" else ""
    yield Stage(
        "memory",
        "Memory of a step, by setting",
        ("benchmarks.memory", "--preset", scale.dense, "--device", scale.device, *shrunk),
        150,
        absent=no_device,
    )
    yield Stage(
        "collective_cost",
        "Host time of a real collective",
        ("benchmarks.collective_cost",),
        20,
        absent="it runs on a GPU or a CPU" if machine.kind == "stand-in" else "",
    )


def _plans(machine: Machine, scale: Scale, on: tuple[str, ...]) -> Iterator[Stage]:
    ranks, one = _real_ranks(machine)
    presets = ",".join(preset for preset in (scale.dense, scale.large, scale.experts) if preset)
    recomputed = scale.large or scale.dense
    yield Stage(
        "plan",
        "Planned and measured steps",
        ("benchmarks.planned_steps", "--presets", presets, "--recomputed", recomputed, *on),
        180,
    )
    few = f"{scale.dense},{scale.experts}"
    yield Stage(
        "plan-ranks",
        "Planned and measured steps on real ranks",
        ("benchmarks.planned_steps", "--presets", few, "--ranks", ranks, *on),
        150,
        absent=one,
    )
