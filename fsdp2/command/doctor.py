"""`fsdp2 doctor`: what is installed, what is visible, and whether a first step works here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import fsdp2
from fsdp2.command.options import CODES, DONE, PROBLEM, Parser, count, positive
from fsdp2.command.output import ProgressLine, paint, tell

if TYPE_CHECKING:
    from fsdp2.command.selftest import SelfTest

PROG = "fsdp2 doctor"

SUMMARY = "show versions, devices and backends, and try a first step on them"

PYTHON, TORCH = (3, 10), (2, 11)
"""The oldest ones that fsdp2 runs on, as pyproject.toml has them."""

OPTIONAL = ("numpy", "safetensors", "fsspec")
"""Packages that some parts of fsdp2 use."""

VARIABLES = ("FSDP2_", "NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_VISIBLE", "OMP_")
"""Beginnings of environment variables that change what a run does."""

_DESCRIPTION = """Show what is installed and visible. Then try a first step on each kind of device:
one process per rank trains a tiny model for one step, sharded, and compares it with the same step
unsharded. That is 2 ranks on the CPU, and one rank per visible accelerator. It takes about 10
seconds."""


@dataclass(frozen=True)
class Check:
    """A row of the table."""

    name: str
    result: str  # "pass", "fail", or "-" where nothing can be wrong
    detail: str


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 all is well, 1 something is not, 2 wrong usage."""
    given = parser().parse_args(arguments)
    from fsdp2.tracing.summaries import table

    with ProgressLine("doctor") as line:
        line.say("import torch")
        checks = [*installed(), *visible()]
        outcomes = []
        if not given.skip_self_test and all(check.result != "fail" for check in checks):
            for device, backend, ranks in _first_steps(given.ranks):
                line.say(f"train on {device}")
                from fsdp2.command import selftest

                outcomes.append(selftest.run(device, backend, ranks, given.timeout))
    checks += [_check_of(outcome) for outcome in outcomes]
    is_well = all(check.result != "fail" for check in checks)
    facts = {"ok": is_well, "checks": checks, "first_steps": outcomes}
    widest = max(len(check.result) for check in checks)
    rows = [[c.name, _painted(c.result, widest), c.detail] for c in checks]
    lines = table(["check", "result".ljust(widest), "detail"], rows, left=3)
    for outcome in outcomes:
        if not outcome.problem:
            lines += ["", told(outcome)]
    tell(given.json, facts, "\n".join(lines))
    return DONE if is_well else PROBLEM


def parser() -> Parser:
    """The options of `fsdp2 doctor`."""
    made = Parser(PROG, _DESCRIPTION, CODES)
    add = made.add_argument
    add("--skip-self-test", action="store_true", help="start no processes")
    add("--ranks", type=count, default=2, metavar="N", help="ranks of the self-test on the CPU (2)")
    text = "time after which a self-test fails (60)"
    add("--timeout", type=positive, default=60.0, metavar="SECONDS", help=text)
    made.add_json()
    return made


# ---- what is there


def installed() -> Iterator[Check]:
    """Versions."""
    found = sys.version_info[:2]
    yield Check("python", _judged(found >= PYTHON), platform.python_version())
    yield Check("fsdp2", "-", f"{fsdp2.__version__}, {os.path.dirname(fsdp2.__file__)}")
    if importlib.util.find_spec("torch") is None:
        yield Check("torch", "fail", "it is not installed; pip install torch")
        return
    import torch

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    needed = "" if version >= TORCH else f"; fsdp2 needs {TORCH[0]}.{TORCH[1]} or newer"
    yield Check("torch", _judged(version >= TORCH), f"{torch.__version__}{needed}")
    told = []
    for name in OPTIONAL:
        missing = importlib.util.find_spec(name) is None
        told.append(f"{name} {'not installed' if missing else importlib.metadata.version(name)}")
    yield Check("optional packages", "-", ", ".join(told))


def visible() -> Iterator[Check]:
    """Devices, backends, and what the environment sets."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch
    import torch.distributed as dist

    is_there = dist.is_available()
    yield Check("torch.distributed", _judged(is_there), "built in" if is_there else "not built in")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Check("cpu", "-", f"{cores} cores, {memory / 1e9:.1f} GB")
    kind = _accelerator()
    if kind is None:
        yield Check("accelerator", "-", "none is visible to torch")
    else:
        devices = torch.accelerator.device_count()
        name = torch.cuda.get_device_name(0) if kind == "cuda" else kind
        yield Check("accelerator", "-", f"{devices} x {name}")
    if is_there:
        for device in ["cpu", *([] if kind is None else [kind])]:
            backend = dist.get_default_backend_for_device(device)
            works = dist.is_backend_available(backend)
            detail = backend if works else f"{backend} is not built into this torch"
            yield Check(f"backend of {device}", _judged(works), detail)
    told = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)]
    yield Check("environment", "-", ", ".join(told) or "no variable of fsdp2, NCCL or gloo is set")


def _accelerator() -> str | None:
    """The type of the accelerators that are visible."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


def _judged(is_well: bool) -> str:
    return "pass" if is_well else "fail"


def _painted(result: str, width: int) -> str:
    """Padded first: codes of colours have no width."""
    padded = result.ljust(width)
    return padded if result == "-" else paint(padded, result)


# ---- a first step


def _first_steps(cpu_ranks: int) -> list[tuple[str, str, int]]:
    """Device, backend and number of ranks of each self-test."""
    import torch
    import torch.distributed as dist

    found = [("cpu", dist.get_default_backend_for_device("cpu"), cpu_ranks)]
    kind = _accelerator()
    if kind is not None:
        backend = dist.get_default_backend_for_device(kind)
        found.append((kind, backend, torch.accelerator.device_count()))
    return found


def _check_of(outcome: SelfTest) -> Check:
    well = f"parameters differ by {outcome.difference:.1g} from unsharded ones"
    detail = outcome.problem or well
    return Check(outcome.title, _judged(not outcome.problem), detail)


def told(outcome: SelfTest) -> str:
    """A first step on such devices, in sentences."""
    from fsdp2.tracing.summaries import amount

    how = {
        "packed": "parameters are packed: each unit takes one all-gather and one copy",
        "coalesced": "parameters are coalesced: each all-gather writes them into place",
        "local": "one rank holds all parameters: nothing is sent",
    }.get(outcome.transport, f"parameters are gathered {outcome.transport}")
    beside = "on separate streams, at the same time as compute"
    if outcome.device == "cpu":
        beside = "in threads of the backend, because a CPU has no streams"
    return (
        f"A first step with {outcome.title}\n"
        f"  {how}\n"
        f"  communication runs {beside}\n"
        f"  the tiny model's step gathered {amount(outcome.gathered_bytes)} and reduced "
        f"{amount(outcome.reduced_bytes)} per rank\n"
        f"  start a script with: torchrun --nproc-per-node {outcome.ranks} train.py"
    )
