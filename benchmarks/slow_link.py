"""The training step of `train_lm` over a slow network: torch's FSDP2, fsdp2, and fewer bytes.

    python benchmarks/slow_link.py                        # 2 nodes of one rank, 200 Mbit/s
    python benchmarks/slow_link.py --mbit 1000 --nodes 4
    python benchmarks/slow_link.py --ranks-per-node 2 --grad-accum 4
    python benchmarks/slow_link.py --precision fp32 --json FILE

The nodes are network namespaces of this machine, joined by a bridge in another one. Their links
send as many bits per second as ``--mbit`` says, in each direction; the ranks of one node reach each
other at the speed of memory (`benchmarks/namespaces.py`, which says what it needs).

    ranks 0, 1 in a namespace ── link of 200 Mbit/s ──┐
                                                      ├── bridge
    ranks 2, 3 in a namespace ── link of 200 Mbit/s ──┘

Model, text, batch and step are those of `benchmarks/gloo.py`; "one process" trains on the same
batches by itself, and sends nothing. Per variant: ms per step, bytes that a node sends per step (as
its link counts them, headers included), the ratio to torch's FSDP2, and the loss after the last
round. Variants take turns; those that wait send nothing.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import gloo, namespaces, stats, workers
from benchmarks import options as common

ONE = "one process"
VARIANTS: dict[str, tuple[str, ...]] = {
    ONE: (),
    "torch": (),
    "fsdp2": (),
    "fp32 sums": ("--wire", "fp32-sums"),
    "bf16 sums": ("--wire", "bf16-sums"),
    "8-bit sums": ("--wire", "int8-sums"),
    "8-bit weights and bf16 sums": ("--wire", "int8-weights"),
    "8 bit": ("--wire", "int8"),
    "8-bit differences and 8-bit sums": ("--wire", "int8-differences"),
    "4-bit differences and 8-bit sums": ("--wire", "int4-differences"),
    "4 bit": ("--wire", "int4"),
    "levels": ("--levels",),
    "levels and fp32 sums": ("--levels", "--wire", "fp32-sums"),
    "levels and 8-bit sums": ("--levels", "--wire", "int8-sums"),
}
"""Options of `train_lm` by variant; torch's has none of ours."""
TIMEOUT = datetime.timedelta(minutes=3)
WARMUP_STEPS = 2
SENT = Path(f"/sys/class/net/{namespaces.INTERFACE}/statistics/tx_bytes")


# ---------------------------------------------------------------------------------------------
# In a worker


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    ranks, variant = spec["ranks"], spec["variant"]
    rank = workers.join_ranks(spec, ranks, TIMEOUT)
    sharded_by = "torch" if variant == "torch" else "fsdp2"
    run = gloo.make_run(sharded_by, rank, spec["arguments"], ranks)
    burst = gloo.bursts(run, WARMUP_STEPS)

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        before = int(SENT.read_text())
        answer = burst(request)
        sent = int(SENT.read_text()) - before
        return {**answer, "sent": sent / request["steps"]}

    return handle


# ---------------------------------------------------------------------------------------------
# In the parent


@contextmanager
def pools(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The ranks of every variant, each in its node."""
    arguments = ["--preset", options.preset, "--precision", options.precision, "--threads", "1"]
    arguments += ["--grad-accum", str(options.grad_accum)]
    with ExitStack() as stack:
        nodes = stack.enter_context(namespaces.network(options.nodes, options.mbit)).nodes
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp2-slow-")))
        found = {}
        for number, variant in enumerate(options.variants):
            where = [node for node in nodes for _ in range(options.ranks_per_node)]
            if variant == ONE:
                where = where[:1]
            own_arguments = [*arguments, *VARIANTS[variant]]
            if "--levels" in own_arguments:
                own_arguments += ["--replicate", str(options.nodes)]
            common = {"variant": variant, "arguments": own_arguments}
            specs = {
                f"{variant}, rank {rank}": {
                    **common,
                    "ranks": len(where),
                    "rank": rank,
                    "store": str(folder / str(number)),
                    "prefix": namespaces.inside(node),
                    "environment": {"GLOO_SOCKET_IFNAME": namespaces.INTERFACE},
                }
                for rank, node in enumerate(where)
            }
            own = stack.enter_context(workers.pool("slow_link", specs, at_once=True))
            found[variant] = workers.Ranks(list(own.values()))
        yield found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with pools(options) as found:
        answers = workers.take_turns(found, options.rounds, steps=options.steps)
    rounds = {
        variant: {kind: [answer[kind] for answer in each] for kind in ("step", "sent", "loss")}
        for variant, each in answers.items()
    }
    return {"options": vars(options), "rounds": rounds, "ratios": ratios(rounds)}


def ratios(rounds: dict[str, dict[str, list[float]]]) -> dict[str, stats.Summary]:
    """How many times as fast as torch's FSDP2."""
    if "torch" not in rounds:
        return {}
    torchs = rounds["torch"]["step"]
    return {
        f"torch / {variant}": stats.ratio(torchs, values["step"])
        for variant, values in rounds.items()
        if variant != "torch"
    }


def table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Header and rows."""
    rows: list[tuple[object, ...]] = []
    for variant, values in result["rounds"].items():
        sent = stats.summarize([each / 1e6 for each in values["sent"]])
        times = result["ratios"].get(f"torch / {variant}")
        median = times["median"] if isinstance(times, dict) else times and times.median
        rows.append(
            (
                variant,
                stats.summarize(values["step"]),
                f"{sent.median:.1f}",
                "" if median is None else f"{median:.2f}",
                f"{values['loss'][-1]:.4f}",
            )
        )
    return ("variant", "ms per step", "MB sent per node", "times torch's speed", "loss"), rows


def where(options: dict[str, Any]) -> str:
    """How many nodes, ranks and micro-batches, and how fast links are."""
    ranks, batches = options["ranks_per_node"], options["grad_accum"]
    return (
        f"{options['nodes']} nodes of {ranks} rank{'s' if ranks > 1 else ''}, links of "
        f"{options['mbit']:g} Mbit/s, {batches} micro-batch{'es' if batches > 1 else ''} per step"
    )


def page_table(results: dict[str, Any]) -> str:
    """Where it ran, and the table in Markdown."""
    return f"{where(results['options'])}:\n\n{stats.markdown(*table(results))}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The training step of train_lm, slow network.")
    parser.add_argument("--nodes", type=int, default=2, help="default 2")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="default 1")
    parser.add_argument("--grad-accum", type=int, default=1, help="micro-batches (default 1)")
    parser.add_argument("--mbit", type=float, default=200.0, help="per second (default 200)")
    parser.add_argument("--preset", choices=gloo.PRESETS, default="small")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    common.add_variants(parser, list(VARIANTS))
    common.add_timing(parser, 3, rounds=5, device=None, clock=False)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    reason = namespaces.missing()
    if reason is not None:
        raise SystemExit(f"slow_link: {reason}")
    print(
        f"train_lm --preset {options.preset}, {options.precision}, {where(vars(options))}\n"
        f"{stats.describe(stats.environment('cpu'))}\n"
    )
    result = measure(options)
    print(stats.table(*table(result)))
    stats.print_ratios(result["ratios"])
    stats.write_json(options.json, "cpu", result)


if __name__ == "__main__":
    main()
