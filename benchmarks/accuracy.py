"""What formats of fewer bytes cost in accuracy: `train_lm` to its end, per format and seed.

    python benchmarks/accuracy.py --json FILE           # --preset small, 2000 steps, three seeds
    python benchmarks/accuracy.py --formats exact,int8 --seeds 0 --steps 100
    python benchmarks/accuracy.py --formats int4 --json FILE --add    # keeps what FILE has

Two gloo ranks of one thread per run, one run after the other. Model, text, batches and optimizer
are those of `fsdp2.examples.train_lm`; a seed fixes the first weights and the order of the text.
The figure is the loss on held-out text after the last step, in nats per byte; to compare with is
the spread of the seeds without a format. Training gets used to the errors of a format, so weights
that were trained exactly are evaluated once more with weights sent in 8 and in 4 bits. No time is
measured, so a busy machine changes nothing.

    format    loss per seed, their mean    its ratio to the mean of "exact"
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import gloo, stats, workers
from benchmarks import options as common
from fsdp2.examples.train_lm import held_out_loss, train_step
from fsdp2.examples.wire import FORMATS

RANKS = 2
TIMEOUT = datetime.timedelta(minutes=2)  # of a collective, should the other rank have died

EXACT = "exact"
SENT = {
    "int8": "exact, then weights sent in 8 bits",
    "int4": "exact, then weights sent in 4 bits",
}
"""What weights that were trained exactly are evaluated with besides: no format saw them before."""

Losses = dict[str, dict[str, float]]
"""Held-out losses by format and seed."""


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    rank = workers.join_ranks(spec, spec["ranks"], TIMEOUT)
    run = gloo.make_run("fsdp2", rank, spec["arguments"], spec["ranks"])

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        for step in range(run.options.steps):
            train_step(run, step)
        losses = {"loss": held_out_loss(run)}
        for gather in request["evaluate"]:
            run.fsdp.set_wire_format(gather=gather)
            losses[gather] = held_out_loss(run)
        return losses

    return handle


def trained(
    arguments: Sequence[str], ranks: int = RANKS, evaluate: Sequence[str] = ()
) -> dict[str, float]:
    """Held-out losses of one run of `train_lm`.

    Args:
        arguments: of `train_lm`.
        ranks: gloo ranks of one thread.
        evaluate: formats that weights are sent in for more losses, which have their names.

    Returns:
        The loss after the last step, as "loss", and these.
    """
    spec = {"arguments": [*arguments, "--threads", "1"], "ranks": ranks}
    with workers.rank_pools("accuracy", {"run": spec}, ranks) as pools:
        return pools["run"].ask(evaluate=list(evaluate))


def train(options: argparse.Namespace, wire: str, seed: int) -> dict[str, float]:
    """The held-out losses of one run, by the column that they are of."""
    arguments = ["--preset", options.preset, "--steps", str(options.steps)]
    arguments += ["--precision", options.precision, "--seed", str(seed), "--wire", wire]
    arguments += ["--batch-size", str(options.batch_size)]
    arguments += ["--data", options.data] if options.data else []
    answer = trained(arguments, evaluate=list(SENT) if wire == EXACT else ())
    found = {wire: answer["loss"]}
    if wire == EXACT:
        found.update({name: answer[gather] for gather, name in SENT.items()})
    return found


def measure(options: argparse.Namespace) -> Losses:
    """All runs, each written as soon as it is over."""
    losses: Losses = {}
    if options.add and options.json and Path(options.json).exists():
        losses = json.loads(Path(options.json).read_text())["results"]["losses"]
    for seed in options.seeds:
        for wire in options.formats:
            if str(seed) not in losses.get(wire, {}):
                for name, loss in train(options, wire, seed).items():
                    losses.setdefault(name, {})[str(seed)] = loss
                    print(f"{name}, seed {seed}: {loss:.4f}", flush=True)
                write(options, losses)
    return losses


def write(options: argparse.Namespace, losses: Losses) -> None:
    stats.write_json(options.json, "cpu", {"options": vars(options), "losses": losses}, timed=False)


def page_table(results: dict[str, Any]) -> str:
    """What ran, and the table in Markdown."""
    options = results["options"]
    ran = f"`train_lm --preset {options['preset']}`, {options['steps']} steps, {RANKS} ranks"
    return f"{ran}:\n\n{stats.markdown(*table(results['losses']))}"


def table(losses: Losses) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Header and rows."""
    rows: list[tuple[object, ...]] = []
    for wire, found in losses.items():
        mean = statistics.fmean(found.values())
        spread = f"{min(found.values()):.4f} .. {max(found.values()):.4f}"
        by_exact = ratio(losses, wire)
        rows.append(
            (wire, f"{mean:.4f}", spread, len(found), "" if by_exact is None else f"{by_exact:.4f}")
        )
    return ("format", "mean loss", "of seeds", "seeds", "by exact"), rows


def ratio(losses: Losses, wire: str) -> float | None:
    """The mean loss of a format by that of exact runs, over the seeds that both have."""
    base, found = losses.get(EXACT, {}), losses.get(wire, {})
    shared = base.keys() & found.keys()
    if not shared:
        return None
    means = [statistics.fmean(each[seed] for seed in shared) for each in (found, base)]
    return means[0] / means[1]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Held-out loss of train_lm by wire format.")
    parser.add_argument("--preset", choices=gloo.PRESETS, default="small")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step (default 8)")
    parser.add_argument("--seeds", type=common.integers, default="0,1,2", help="comma list")
    known = list(FORMATS)
    parser.add_argument("--formats", type=common.among(known), default=",".join(known))
    parser.add_argument("--data", metavar="PATH", help="text (default: Python's own)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--add", action="store_true", help="run what FILE does not have yet")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(
        f"train_lm --preset {options.preset}, {options.precision}, {options.steps} steps, {RANKS} "
        f"gloo ranks\n{stats.describe(stats.environment('cpu'))}\n"
    )
    losses = measure(options)
    print(stats.table(*table(losses)))


if __name__ == "__main__":
    main()
