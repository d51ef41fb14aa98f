"""The training step of `train_lm` on real gloo ranks, sharded by fsdp2 and by torch's FSDP2.

    python benchmarks/gloo.py                         # --preset small, two CPU ranks
    python benchmarks/gloo.py --preset tiny --rounds 3 --steps 5
    python benchmarks/gloo.py --precision bf16

Model, text, batch and step are those of `fsdp2.examples.train_lm`: zero_grad, forward, backward,
clipping by torch and AdamW (fused); only `fully_shard` differs. Each variant is two processes of
one thread that are kept alive; the variants run short bursts in turn, and those that wait use no
processor. A step's time is that of the slower rank, from one barrier to the end of the burst.

The figure to watch is fsdp2 / torch, the median over rounds of the ratio in each round. Real ranks
wait for each other, so a machine with fewer free cores than ranks measures its own scheduling.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import options as common
from benchmarks import stats, variants, workers
from fsdp2.examples import data, parallel
from fsdp2.examples import options as example
from fsdp2.examples.model import PRESETS, Transformer, reset_parameters
from fsdp2.examples.train_lm import Run, build_model, make_optimizer, train_step

RANKS = 2
WARMUP_STEPS = 5
VARIANTS = ("torch", "fsdp2")
TIMEOUT = datetime.timedelta(minutes=2)  # of a collective, should the other rank have died


# ---------------------------------------------------------------------------------------------
# In a worker


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    rank = workers.join_ranks(spec, RANKS, TIMEOUT)
    return bursts(make_run(spec["variant"], rank, spec["arguments"]), WARMUP_STEPS)


def bursts(run: Run, warmup: int) -> workers.Handler:
    """Warm up; what runs a burst of the request's steps from then on."""
    done = 0
    for _ in range(warmup):
        train_step(run, done)
        done += 1

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal done
        steps = request["steps"]
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            loss = train_step(run, done)
            done += 1
        return {"step": (time.perf_counter() - start) * 1e3 / steps, "loss": loss.item()}

    return handle


def make_run(variant: str, rank: int, arguments: list[str], ranks: int = RANKS) -> Run:
    """What `train_lm` sets up on this rank, by ``variant``'s `fully_shard`.

    Args:
        variant: "fsdp2" or "torch".
        rank: of this process.
        arguments: of `train_lm`. torch's `fully_shard` takes the precision of them alone.
        ranks: how many there are.
    """
    options = example.parse(arguments, example.GivenRanks(rank, ranks, rank, ranks))
    device = torch.device("cpu")
    corpus = data.load_corpus(options.data, min_bytes=options.seq_len + 1)
    if variant == "fsdp2":
        model = build_model(options, device, parallel.make_mesh(options))
    else:
        model = Transformer(options.model)
        for name, part in model.parts():
            reset_parameters(part, options.model, options.seed, prefix=name)
        _shard_by_torch(model, options)
    params = list(model.parameters())
    optimizer = make_optimizer(model, options)
    return Run(options, rank, rank, device, corpus, model, params, optimizer)


def _shard_by_torch(model: Transformer, options: example.Options) -> None:
    fully_shard, policy = variants.fsdp2_api("torch")
    keywords: dict[str, Any] = {"mesh": init_device_mesh("cpu", (options.world_size,))}
    if options.precision == "bf16":
        keywords["mp_policy"] = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, **keywords)


# ---------------------------------------------------------------------------------------------
# In the parent


class Pair:
    """The two ranks of one variant: both get every request, the slower one's time counts."""

    def __init__(self, ranks: list[workers.Worker]) -> None:
        self._ranks = ranks

    def ask(self, **request: Any) -> dict[str, Any]:
        for rank in self._ranks:
            rank.send(**request)
        answers = [rank.receive() for rank in self._ranks]
        return {
            "step": max(answer["step"] for answer in answers),
            "loss": sum(answer["loss"] for answer in answers) / len(answers),
        }


@contextmanager
def pairs(options: argparse.Namespace) -> Iterator[dict[str, Pair]]:
    """The ranks of every variant, warmed up one variant after another."""
    found: dict[str, Pair] = {}
    arguments = ["--preset", options.preset, "--precision", options.precision, "--threads", "1"]
    arguments += ["--data", options.data] if options.data else []
    with tempfile.TemporaryDirectory(prefix="fsdp2-gloo-") as folder, ExitStack() as stack:
        for variant in options.variants:
            common = {"variant": variant, "arguments": arguments}
            common["store"] = os.path.join(folder, variant)
            specs = {f"{variant}, rank {r}": {**common, "rank": r} for r in range(RANKS)}
            both = stack.enter_context(workers.pool("gloo", specs, at_once=True))
            found[variant] = Pair(list(both.values()))
        yield found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with pairs(options) as found:
        answers = workers.take_turns(found, options.rounds, steps=options.steps)
    rounds = {
        variant: {kind: [answer[kind] for answer in each] for kind in ("step", "loss")}
        for variant, each in answers.items()
    }
    return {"options": vars(options), "rounds": rounds, "ratios": ratios(rounds)}


def ratios(rounds: dict[str, dict[str, list[float]]]) -> dict[str, stats.Summary]:
    if not {"torch", "fsdp2"} <= rounds.keys():
        return {}
    return {"fsdp2 / torch": stats.ratio(rounds["fsdp2"]["step"], rounds["torch"]["step"])}


def report(result: dict[str, Any]) -> None:
    options = result["options"]
    print(f"\nms a step, median [min .. max] of {options['rounds']} rounds; loss of the last")
    rows = [
        (variant, stats.summarize(values["step"]), f"{values['loss'][-1]:.4f}")
        for variant, values in result["rounds"].items()
    ]
    print(stats.table(("variant", "step", "loss"), rows))
    stats.print_ratios(result["ratios"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The training step of train_lm on two gloo ranks of one CPU thread each."
    )
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--data", metavar="PATH", help="text (default: Python's own)")
    common.add_variants(parser, VARIANTS)
    common.add_timing(parser, 10, device=None, clock=False)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    config, training = PRESETS[options.preset], options.preset
    print(
        f"train_lm --preset {training} ({config.num_layers} blocks of dim {config.dim}), "
        f"{options.precision}, {RANKS} gloo ranks of one thread\n"
        f"{stats.describe(stats.environment('cpu'))}"
    )
    result = measure(options)
    report(result)
    stats.write_json(options.json, "cpu", result)


if __name__ == "__main__":
    main()
