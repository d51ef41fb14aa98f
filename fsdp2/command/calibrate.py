"""`fsdp2 calibrate`: measure this machine, and write a file that plans take as ``--hardware``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdp2.command.options import DONE, Parser, complain
from fsdp2.command.output import ProgressLine, tell

PROG = "fsdp2 calibrate"

SUMMARY = "measure this machine, for fsdp2 plan --hardware FILE"

_DESCRIPTION = """Measure this machine: products, memory traffic, host time, and collectives.

  fsdp2 calibrate --output this_machine.json
  torchrun --nproc-per-node 8 -m fsdp2 calibrate --device cuda --output node.json

Run it on an idle machine, because other work changes the figures. Collectives inside a node are
measured if torchrun started several ranks; figures between nodes are taken from --base."""


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 measured, 2 wrong usage."""
    given = parser().parse_args(arguments)
    if not given.output.parent.is_dir():  # it is known before measuring
        return complain(
            PROG,
            f"'{given.output.parent}' is not a folder; --output takes a file in a folder",
        )
    from fsdp2.planning.calibrate import measure
    from fsdp2.planning.hardware import load, write

    try:
        with ProgressLine("calibrate") as line:
            line.say(given.device)
            base = given.base or ("epyc-2core" if given.device == "cpu" else "h100")
            found, is_first = measure(load(base), given.device)
    except (ValueError, RuntimeError) as error:
        return complain(PROG, error)
    if is_first:
        write(found, given.output)
        facts = {"file": given.output, "flops": found.flops, "bandwidth": found.bandwidth}
        rates = ", ".join(f"{rate / 1e12:.3g} TFLOP/s {name}" for name, rate in found.flops.items())
        text = f"{given.output}: {rates}, {found.bandwidth / 1e9:.3g} GB/s of memory"
        tell(given.json, facts, text)
    return DONE


def parser() -> Parser:
    """The options of `fsdp2 calibrate`."""
    made = Parser(PROG, _DESCRIPTION)
    add = made.add_argument
    text = "the file to write (this_machine.json)"
    default = Path("this_machine.json")
    add("-o", "--output", type=Path, default=default, metavar="FILE", help=text)
    add("--device", choices=["cpu", "cuda"], default="cpu", help="the device to measure (cpu)")
    add("--base", help="the machine that other figures are taken from (h100; for a CPU epyc-2core)")
    made.add_json()
    return made
