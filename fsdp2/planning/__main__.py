"""Plan a preset or a function of yours, or measure this machine.

python -m fsdp2.planning llama-70b --ranks 64 --hardware h100 --checkpointing
python -m fsdp2.planning llama-8b --ranks 8 --batch 4 --fit
python -m fsdp2.planning my_project.training:plan_it
python -m fsdp2.planning calibrate -o this_machine.json
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fsdp2.core.errors import coded
from fsdp2.interop import MixedPrecisionPolicy
from fsdp2.planning import hardware, presets
from fsdp2.planning.planner import Plan, plan


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 planned, 1 it does not fit, 2 wrong usage."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["calibrate"]:
        from fsdp2.planning.calibrate import main as calibrate  # it starts processes

        return calibrate(given[1:])
    args = _parser().parse_args(given)
    try:
        made = _of_function(args.what) if ":" in args.what else _of_preset(args)
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"fsdp2.plan: {error}", file=sys.stderr)
        return 2
    fits = made.fits
    if args.fit:
        found = made.fit(args.memory * 1e9 if args.memory else None, progress=_progress)
        print(found)
        made, fits = found.best or made, found.best is not None
    else:
        print(made)
    if args.show:
        print(f"\nwrote {made.show(args.show)}")
    if args.trace:
        made.trace(args.trace)
        print(f"\nwrote {args.trace}")
    return 0 if fits else 1


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fsdp2.planning", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    names = ", ".join(presets.PRESETS)
    add("what", help=f"{names}; module:function, which returns a Plan; or calibrate")
    add("--ranks", type=int, default=8, help="ranks in all (default: 8)")
    add("--replicate", type=int, default=1, help="copies of the shards, as in HSDP (default: 1)")
    add("--hardware", default="h100", help=f"{', '.join(hardware.names())} or a file")
    add("--batch", type=int, default=1, help="sequences of a micro-batch of a rank")
    add("--seq", type=int, help="tokens of a sequence (default: the preset's)")
    add("--accumulate", type=int, default=1, help="micro-batches in a step")
    add("--reduce-each", action="store_true", help="reduce gradients in every micro-batch")
    add("--checkpointing", type=int, nargs="?", const=1, default=0, help="every n-th block")
    add("--keep", action="store_true", help="keep blocks gathered from forward to backward")
    add("--window", type=int, default=1, help="units gathered ahead")
    add("--precision", choices=["bf16", "fp32"], default="bf16")
    add("--clip", type=float, help="the largest norm of gradients (default: they are not clipped)")
    add("--offload", action="store_true", help="shards and optimizer in CPU memory")
    add("--fit", action="store_true", help="search for the fastest settings that fit")
    add("--memory", type=float, help="GB of a rank, of --fit (default: the device's)")
    add("--trace", type=Path, metavar="FILE", help="write the step as a timeline")
    add("--show", type=Path, metavar="FILE", help="write a page that shows the step")
    return parser


def _of_preset(args: argparse.Namespace) -> Plan:
    shape = presets.PRESETS.get(args.what)
    if shape is None:
        raise coded(
            ValueError,
            "plan-preset",
            f"'{args.what}' is no preset; choose one of {', '.join(presets.PRESETS)}, or pass "
            f"module:function",
        )
    if args.ranks < 1 or args.replicate < 1 or args.ranks % args.replicate:
        raise coded(
            ValueError,
            "plan-replicate",
            f"--replicate {args.replicate} does not divide --ranks {args.ranks}; choose a divisor",
        )
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shards = args.ranks // args.replicate
    return plan(
        lambda: presets.Model(shape),
        lambda count: presets.make_batch(shape, count, args.seq),
        units={presets.Block},
        loss=presets.loss,
        mesh=(shards,) if args.replicate == 1 else (args.replicate, shards),
        hardware=args.hardware,
        batch=args.batch,
        accumulate=args.accumulate,
        reduce_each=args.reduce_each,
        checkpointing=True if args.checkpointing == 1 else args.checkpointing,
        reshard_after_forward=not args.keep,
        window=args.window,
        precision=mixed if args.precision == "bf16" else None,
        offload=args.offload,
        clip=args.clip,
    )


def _of_function(what: str) -> Plan:
    module, _, name = what.partition(":")
    sys.path.insert(0, os.getcwd())
    found: object = getattr(importlib.import_module(module), name, None)
    made = found() if callable(found) else None
    if not isinstance(made, Plan):
        raise coded(
            ValueError,
            "plan-function",
            f"'{what}' names no function that returns a Plan; let it return fsdp2.plan(…)",
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
