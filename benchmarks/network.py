"""The training step of `train_lm` on gloo ranks: torch's FSDP2, fsdp2, and formats of fewer bytes.

    python -m benchmarks.network                          # two ranks of this machine
    python -m benchmarks.network --mbit 200 --precision bf16 --variants all
    python -m benchmarks.network --mbit 200 --nodes 2 --ranks-per-node 2 --grad-accum 4

Model, text, batch and step are those of `fsdp2.examples.train_lm`: zero_grad, forward, backward,
clipping and AdamW (fused). The variant "one process" trains on the same batches by itself, and
sends nothing. With ``--mbit`` each node is a network namespace of this machine, whose link sends as
many bits per second in each direction (`benchmarks/namespaces.py`, which says what it needs); the
ranks of one node reach each other at the speed of memory.

Per variant: ms of a step of the slowest rank, bytes that a node's link sends per step (with
``--mbit``), the ratio to torch's FSDP2, and the loss after the last round. Real ranks wait for each
other: a machine with fewer free cores than ranks measures its own scheduling.
"""

from __future__ import annotations

import argparse
import gc
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import harness, namespaces, variants
from fsdp2.examples import data, parallel
from fsdp2.examples import options as example
from fsdp2.examples.model import PRESETS, parts, reset_parameters
from fsdp2.examples.train_lm import Run, build_model, make_optimizer, train_step, unsharded_model

ONE = "one process"
VARIANTS: dict[str, tuple[str, ...]] = {
    ONE: (),
    "torch": (),
    "fsdp2": (),
    "fp32 sums": ("--wire", "fp32-sums"),
    "bf16 sums": ("--wire", "bf16-sums"),
    "8 bit": ("--wire", "int8"),
    "4 bit": ("--wire", "int4"),
    "levels": ("--levels",),
    "levels and fp32 sums": ("--levels", "--wire", "fp32-sums"),
}
"""Options of `train_lm`, by variant."""
WARMUP = 3
SENT = Path(f"/sys/class/net/{namespaces.INTERFACE}/statistics/tx_bytes")


# ---------------------------------------------------------------------------------------------
# In a worker


def make_worker(spec: dict[str, Any]) -> harness.Handler:
    ranks = spec["ranks"]
    rank = harness.join_ranks(spec, ranks)
    run = make_run(spec["variant"], rank, spec["arguments"], ranks)
    done = 0
    for done in range(WARMUP):
        train_step(run, done)

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal done
        gc.collect()
        dist.barrier()
        sent, start = _sent(), time.perf_counter()
        for _ in range(request["steps"]):
            done += 1
            loss = train_step(run, done)
        taken = (time.perf_counter() - start) * 1e3
        figures = {"step": taken, "sent": _sent() - sent}
        return {k: v / request["steps"] for k, v in figures.items()} | {"loss": loss.item()}

    return handle


def _sent() -> int:
    """Bytes that this node's link has sent; 0 where it is no namespace."""
    return int(SENT.read_text()) if SENT.exists() else 0


def make_run(variant: str, rank: int, arguments: list[str], ranks: int) -> Run:
    """What `train_lm` sets up on this rank, by torch's or by fsdp2's `fully_shard`."""
    options = example.parse(arguments, example.GivenRanks(rank, ranks, rank, ranks))
    device = torch.device("cpu")
    corpus = data.load_corpus(options.data, min_bytes=options.seq_len + 1)
    if variant == "torch":
        model: Any = unsharded_model(options)
        for name, part in parts(model):
            reset_parameters(part, options.model, options.seed, prefix=name)
        fully_shard, policy = variants.fsdp2_api("torch")
        keywords: dict[str, Any] = {"mesh": init_device_mesh("cpu", (ranks,))}
        if options.precision == "bf16":
            keywords["mp_policy"] = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, **keywords)
    else:
        model = build_model(options, device, parallel.make_mesh(options))
    optimizer = make_optimizer(model.named_parameters(), options)
    return Run(options, device, corpus, model, optimizer)


# ---------------------------------------------------------------------------------------------
# In the parent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    arguments = ["--preset", options.preset, "--precision", options.precision, "--threads", "1"]
    arguments += ["--grad-accum", str(options.grad_accum)]
    arguments += ["--data", options.data] if options.data else []
    with ExitStack() as stack:
        places: list[dict[str, Any]] = [{} for _ in range(options.nodes)]
        if options.mbit:
            made = stack.enter_context(namespaces.network(options.nodes, options.mbit))
            variables = {"GLOO_SOCKET_IFNAME": namespaces.INTERFACE}
            places = [
                {"prefix": namespaces.inside(node), "environment": variables} for node in made.nodes
            ]
        specs = {}
        for name in options.variants:
            own = [*arguments, *VARIANTS[name]]
            own += ["--replicate", str(options.nodes)] if "--levels" in own else []
            where = [place for place in places for _ in range(options.ranks_per_node)]
            where = where[:1] if name == ONE else where
            specs[name] = {"variant": name, "arguments": own, "ranks": len(where), "where": where}
        rounds = harness.measure("network", specs, options.rounds, steps=options.steps)
    ratios = harness.over(rounds, "step", "torch")
    if options.mbit and "torch" in rounds:  # how many times as fast
        torchs = rounds["torch"]["step"]
        others = {name: each["step"] for name, each in rounds.items() if name != "torch"}
        ratios = {f"torch / {name}": harness.ratio(torchs, own) for name, own in others.items()}
    return {"options": vars(options), "rounds": rounds, "ratios": ratios}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__, steps=10)
    known = harness.among([*VARIANTS, "all"])
    parser.add_argument(
        "--variants", type=known, default="torch,fsdp2", help=f"{', '.join(VARIANTS)}, or all"
    )
    parser.add_argument("--mbit", type=float, help="per second, of each node's link")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--grad-accum", type=int, default=1, help="micro-batches")
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--data", metavar="PATH", help="text; default: Python's own")
    options = parser.parse_args(arguments)
    if options.variants == ["all"]:
        options.variants = list(VARIANTS)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    reason = namespaces.missing() if options.mbit else None
    if reason is not None:
        raise SystemExit(f"network: --mbit: {reason}")
    print(f"train_lm --preset {options.preset}, {options.precision}")
    print(harness.describe(harness.environment()))
    result = measure(options)
    harness.print_rounds(result["rounds"])
    harness.print_ratios(result["ratios"])
    harness.write_json(options.json, result)


if __name__ == "__main__":
    main()
