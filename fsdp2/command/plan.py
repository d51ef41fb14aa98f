"""`fsdp2 plan`: memory and time of a training step, of a known model or of a function of yours."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp2.command.options import CODES, DONE, PROBLEM, Parser, complain, count, positive
from fsdp2.command.output import ProgressLine, tell

if TYPE_CHECKING:
    from fsdp2.planning.planner import Fit, Plan

PROG = "fsdp2 plan"

SUMMARY = "plan memory and time of a training step, without a device"

_DESCRIPTION = """Plan a training step: whether it fits, where memory is at its peak, how long it
takes. Nothing is trained, and no device is needed.

  fsdp2 plan llama-70b --ranks 64 --hardware h100 --activation-checkpointing
  fsdp2 plan llama-8b --ranks 8 --batch-size 4 --fit
  fsdp2 plan my_project.training:plan_it
  fsdp2 plan --list"""

_OF_PRESETS = (
    *("ranks", "replicate", "hardware", "batch_size", "seq_len", "grad_accum", "precision"),
    *("reduce_each", "activation_checkpointing", "reshard_after_forward", "prefetch_window"),
    *("clip_grad_norm", "cpu_offload"),
)
"""Options that a function of the user's decides itself."""


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 planned, 1 it does not fit, 2 wrong usage."""
    given = parser().parse_args(arguments)
    if given.list:
        return _list(given.json)
    if given.model is None:
        return complain(PROG, "name a model, or module:function; --list has the models")
    try:
        with ProgressLine(f"plan {given.model}") as line:
            made = of_function(given) if ":" in given.model else of_preset(given)
            room = None if given.memory is None else given.memory * 1e9
            found = made.fit(room, progress=line.say) if given.fit else None
            # Printing may rehearse once more, to name the change that would fit.
            text = str(made if found is None else found)
            facts = _facts(made) if found is None else _facts_of_fit(found)
            files = _write(made if found is None else found.best or made, given)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        return complain(PROG, error)
    tell(given.json, facts, "\n\n".join([text, *(f"wrote {name}" for name in files)]))
    fits = made.fits if found is None else found.best is not None
    return DONE if fits else PROBLEM


def parser() -> Parser:
    """The options of `fsdp2 plan`."""
    codes = CODES.replace("1 a problem was found", "1 it does not fit")
    made = Parser(
        PROG, _DESCRIPTION, f"amounts of bytes are in powers of ten: 1 GB is 10**9\n{codes}"
    )
    add = made.add_argument
    number = functools.partial(add, type=count, metavar="N")
    add("model", nargs="?", help="one of --list; or module:function, which returns a Plan")
    add("--list", action="store_true", help="print the known models and machines, and exit")
    add("--hardware", default="h100", help="one of --list, or a file of fsdp2 calibrate (h100)")
    number("--ranks", default=8, help="total number of ranks (8)")
    number("--replicate", default=1, help="HSDP: groups that each hold all shards (1)")
    number("--batch-size", default=1, help="sequences per micro-batch and rank (1)")
    number("--seq-len", help="tokens per sequence (the model's)")
    number("--grad-accum", default=1, help="micro-batches per step (1)")
    add("--reduce-each", action="store_true", help="reduce gradients after every micro-batch")
    text = "recompute every N-th block in backward (N: 1)"
    number("--activation-checkpointing", nargs="?", const=1, help=text)
    text = "whether blocks are resharded between forward and backward (always)"
    add("--reshard-after-forward", choices=["always", "never"], default="always", help=text)
    number("--prefetch-window", default=1, help="units that are prefetched (1)")
    add("--precision", choices=["bf16", "fp32"], default="bf16", help="compute dtype (bf16)")
    add("--clip-grad-norm", type=positive, metavar="NORM", help="clip gradients to this norm")
    add("--cpu-offload", action="store_true", help="keep shards and optimizer in CPU memory")
    add("--fit", action="store_true", help="search for the fastest settings that fit")
    text = "memory of one rank, for --fit (the device's)"
    add("--memory", type=positive, metavar="GB", help=text)
    add("--trace", type=Path, metavar="FILE", help="write the step as a timeline")
    add("--show", type=Path, metavar="PAGE", help="write an HTML page that shows the step")
    made.add_json()
    return made


def of_preset(given: argparse.Namespace) -> Plan:
    """The plan of a known model."""
    import torch

    from fsdp2.core.errors import coded
    from fsdp2.interop import MixedPrecisionPolicy
    from fsdp2.planning import presets
    from fsdp2.planning.planner import plan

    shape = presets.PRESETS.get(given.model)
    if shape is None:
        raise coded(
            ValueError,
            "plan-preset",
            f"'{given.model}' is not a preset; choose one of {', '.join(presets.PRESETS)}, or "
            f"pass module:function",
        )
    if given.ranks % given.replicate:
        raise coded(
            ValueError,
            "plan-replicate",
            f"--replicate {given.replicate} does not divide --ranks {given.ranks}; "
            f"choose a divisor",
        )
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shards = given.ranks // given.replicate
    recomputed: int | None = given.activation_checkpointing
    return plan(
        lambda: presets.Model(shape),
        lambda size: presets.make_batch(shape, size, given.seq_len),
        units={presets.Block},
        loss=presets.loss,
        mesh=(shards,) if given.replicate == 1 else (given.replicate, shards),
        hardware=given.hardware,
        batch=given.batch_size,
        accumulate=given.grad_accum,
        reduce_each=given.reduce_each,
        checkpointing=recomputed == 1 if recomputed in (None, 1) else recomputed,
        reshard_after_forward=given.reshard_after_forward == "always",
        window=given.prefetch_window,
        precision=mixed if given.precision == "bf16" else None,
        offload=given.cpu_offload,
        clip=given.clip_grad_norm,
    )


def of_function(given: argparse.Namespace) -> Plan:
    """The plan that the user's function returns."""
    import importlib

    from fsdp2.core.errors import coded
    from fsdp2.planning.planner import Plan

    known = parser()
    for name in _OF_PRESETS:
        if getattr(given, name) != known.get_default(name):
            raise coded(
                ValueError,
                "plan-own-settings",
                f"--{name.replace('_', '-')} applies only to the models of --list, but "
                f"'{given.model}' calls fsdp2.plan itself; pass the setting to that call",
            )
    module, _, function = given.model.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: object = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports another that is not
        found = None
    finally:
        sys.path.remove(os.getcwd())
    made = found() if callable(found) else None
    if not isinstance(made, Plan):
        raise coded(
            ValueError,
            "plan-function",
            f"'{given.model}' is not a function that returns a Plan; let it return fsdp2.plan(…)",
        )
    return made


def _write(made: Plan, given: argparse.Namespace) -> list[Path]:
    """Files that are asked for."""
    files: list[Path] = []
    if given.show:
        files.append(made.show(given.show))
    if given.trace:
        made.trace(given.trace)
        files.append(given.trace)
    return files


def _list(as_json: bool) -> int:
    from fsdp2.planning import hardware, presets
    from fsdp2.tracing.summaries import table

    machines = {name: hardware.load(name) for name in hardware.names()}
    rows = [
        [name, f"{shape.dim:,}", f"{shape.layers}", f"{shape.seq:,}", f"{shape.experts or '-'}"]
        for name, shape in presets.PRESETS.items()
    ]
    lines = [*table(["model", "width", "blocks", "tokens", "experts"], rows), ""]
    rows = [
        [name, each.name, each.backend, f"{each.memory / 1e9:.1f} GB", f"{each.node}"]
        for name, each in machines.items()
    ]
    head = ["hardware", "device", "backend", "memory", "ranks per node"]
    lines += table(head, rows, left=3)
    facts = {"models": presets.PRESETS, "hardware": list(machines)}
    tell(as_json, facts, "\n".join(lines))
    return DONE


def _facts(made: Plan) -> dict[str, object]:
    peak = made.memory.peak
    return {
        "fits": made.fits,
        "verdict": made.verdict,
        "parameters": made.rehearsal.parameters,
        "hardware": made.hardware.name,
        "settings": made.settings,
        "room_bytes": made.room,
        "peak_bytes": peak.rounded,
        "peak_live_bytes": peak.live,
        "peak_at": peak.where,
        "peak_by_category": dict(peak.categories),
        "between_steps_bytes": made.memory.before.live,
        "cpu_bytes": made.memory.host,
        "seconds": made.time,
        "tokens_per_second": made.tokens_per_second,
        "mfu": made.mfu,
        "bytes_in_node": made.bytes_in_node,
        "bytes_between_nodes": made.bytes_between_nodes,
        "units": made.units,
    }


def _facts_of_fit(found: Fit) -> dict[str, object]:
    fitting = found.fitting
    return {
        "room_bytes": found.room,
        "tried": [
            {
                "settings": plan.settings,
                "peak_bytes": plan.memory.peak.rounded,
                "tokens_per_second": plan.tokens_per_second,
                "fits": plan in fitting,
            }
            for plan in found.tried
        ],
        "best": None if found.best is None else _facts(found.best),
        "code": None if found.best is None else found.best.code(),
    }
