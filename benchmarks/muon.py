"""A step of Muon over shards: matrices on their owners, against all matrices on every rank.

    python benchmarks/muon.py                              # 2 gloo ranks, 3 units of width 512
    python benchmarks/muon.py --variants everywhere,fsdp2 --dim 1024 --ranks 4
    python benchmarks/muon.py --losses --seeds 0,1,2       # held-out losses of train_lm: no times

A unit has the matrices of a transformer's block: four of [dim, dim] and three between dim and
11/4 dim. Gradients are given, and stay. The variants are

    everywhere   each rank gathers each matrix's momentum, and orthogonalizes all of them
    torch        ``torch.optim.Muon`` over the DTensors, as it is
    fsdp2        `fsdp2.optim.Muon`
    unbatched    the same, one matrix at a time
    torchtitan   its DistMuon, if it is installed (`benchmarks.torchtitan_muon`)

Per variant: ms per step, and the ratio everywhere / variant. Of ours and torchtitan's besides: MB
that a rank sends to others per step. Of ours: the largest sum of matrices in bf16 that are whole at
a time on a rank (from where a wave starts to where it is written) over those of a unit, and FLOPs
of the busiest owner over the mean.

With ``--losses``, `train_lm` trains to its end with each optimizer and seed, and its held-out loss
is the figure; a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import statistics
import sys
from pathlib import Path
from typing import Any
from unittest import mock

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from benchmarks import accuracy, stats, torchtitan_muon, workers
from benchmarks import options as common
from fsdp2.optim.matrices import exchange
from fsdp2.optim.matrices import muon as steps
from fsdp2.optim.matrices.newton_schulz import COEFFICIENTS, EPS, STEPS, orthogonalized

VARIANTS = ("everywhere", "torch", "fsdp2", "unbatched", "torchtitan")
OURS = ("fsdp2", "unbatched")
OPTIMIZERS = ("adamw", "muon")
TIMEOUT = datetime.timedelta(minutes=5)
WARMUP_STEPS = 2


# ---------------------------------------------------------------------------------------------
# In a worker


class Unit(nn.Module):
    """The matrices of a transformer's block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = dim * 11 // 4
        shapes = [(dim, dim)] * 4 + [(hidden, dim)] * 2 + [(dim, hidden)]
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)


class Everywhere:
    """Each rank gathers each matrix's momentum, and orthogonalizes all of them."""

    def __init__(self, params: list[DTensor], lr: float = 1e-3, momentum: float = 0.95) -> None:
        self.params, self.lr, self.momentum = params, lr, momentum
        self.buffers = [torch.zeros_like(param._local_tensor) for param in params]

    @torch.no_grad()
    def step(self) -> None:
        for param, buffer in zip(self.params, self.buffers, strict=True):
            grad = param.grad._local_tensor
            buffer.lerp_(grad, 1 - self.momentum)
            rows = grad.lerp(buffer, self.momentum).bfloat16()
            whole = DTensor.from_local(
                rows, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
            ).full_tensor()
            update = orthogonalized(whole[None], COEFFICIENTS, STEPS, EPS)[0]
            own = update.narrow(0, dist.get_rank() * rows.shape[0], rows.shape[0])
            local = param._local_tensor
            local.mul_(1 - self.lr * 0.1)
            local.add_(own, alpha=-self.lr * max(1, param.shape[0] / param.shape[1]) ** 0.5)


def make_model(spec: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Unit(spec["dim"]) for _ in range(spec["units"])))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for unit in model:
        fsdp2.fully_shard(unit, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return model


def make_optimizer(variant: str, model: nn.Module) -> Any:
    if variant == "everywhere":
        return Everywhere(list(model.parameters()))  # type: ignore[arg-type]  # DTensors by now
    if variant == "torch":
        return torch.optim.Muon(model.parameters())
    if variant == "torchtitan":
        return torchtitan_muon.make(model)
    return fsdp2.optim.Muon(model, batched=variant == "fsdp2")


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    workers.join_ranks(spec, spec["ranks"], TIMEOUT)
    model = make_model(spec)
    optimizer = make_optimizer(spec["variant"], model)
    for _ in range(WARMUP_STEPS):
        optimizer.step()
    facts: dict[str, float] = {}
    if spec["variant"] in OURS:
        facts = facts_of(optimizer)
    elif spec["variant"] == "torchtitan":
        facts = {"sent": sent_of(optimizer)}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        gc.collect()
        dist.barrier()
        clock = stats.CLOCKS[request["clock"]]
        start = clock()
        for _ in range(request["steps"]):
            optimizer.step()
        return {"step": (clock() - start) * 1e3 / request["steps"], **facts}

    return handle


def facts_of(optimizer: fsdp2.optim.Muon) -> dict[str, float]:
    """What a step sends and has whole, and how even owners are: no times."""
    sent = whole = most = unit = 0
    start, finish, send = exchange.Wave.start, steps._finished, exchange.exchange_messages

    def started(wave: exchange.Wave, rows: Any) -> Any:
        nonlocal whole, most, unit
        whole += wave.nbytes
        most, unit = max(most, whole), max(unit, wave.all_nbytes)
        return start(wave, rows)

    def finished(outgoing: Any, step: Any) -> None:
        nonlocal whole
        finish(outgoing, step)
        if outgoing is not None:
            whole -= outgoing[0].nbytes

    def counted(output: Any, input_: Any, received: Any, own: Any, group: Any) -> Any:
        nonlocal sent
        sent += (sum(own) - own[dist.get_rank()]) * input_.itemsize
        return send(output, input_, received, own, group)

    with (
        mock.patch.object(exchange.Wave, "start", started),
        mock.patch.object(steps, "_finished", finished),
        mock.patch.object(exchange, "exchange_messages", counted),
    ):
        optimizer.step()
    (owners,) = optimizer.owners()
    return {"sent": sent, "whole": most / unit, "balance": owners.busiest_over_mean}


def sent_of(optimizer: torch.optim.Optimizer) -> float:
    """Bytes that a step of one that calls torch's ``all_to_all_single`` sends to other ranks."""
    sent = 0
    send = dist.all_to_all_single

    def counted(output: Any, input: Any, *args: Any, input_split_sizes: Any, **kwargs: Any) -> Any:
        nonlocal sent
        own = input_split_sizes[dist.get_rank()]
        sent += (sum(input_split_sizes) - own) * input.itemsize
        return send(output, input, *args, input_split_sizes=input_split_sizes, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counted):
        optimizer.step()
    return sent


# ---------------------------------------------------------------------------------------------
# In the parent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    specs = {
        variant: {
            "variant": variant,
            "dim": options.dim,
            "units": options.units,
            "ranks": options.ranks,
        }
        for variant in options.variants
    }
    with workers.rank_pools("muon", specs, options.ranks) as pools:
        answers = workers.take_turns(
            pools, options.rounds, steps=options.steps, clock=options.clock
        )
    rounds = {variant: [each["step"] for each in found] for variant, found in answers.items()}
    facts = {
        variant: {key: value for key, value in found[0].items() if key != "step"}
        for variant, found in answers.items()
        if len(found[0]) > 1
    }
    ratios = {}
    if "everywhere" in rounds:
        ratios = {
            f"everywhere / {variant}": stats.ratio(rounds["everywhere"], found)
            for variant, found in rounds.items()
            if variant != "everywhere"
        }
    return {"options": vars(options), "rounds": rounds, "facts": facts, "ratios": ratios}


def table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Header and rows, of steps or of losses."""
    if "losses" in result:
        rows: list[tuple[object, ...]] = [
            (name, *(f"{loss:.4f}" for loss in found.values()), f"{_mean(found):.4f}")
            for name, found in result["losses"].items()
        ]
        seeds = next(iter(result["losses"].values()))
        return ("optimizer", *(f"seed {seed}" for seed in seeds), "mean"), rows
    rows = []
    for variant, found in result["rounds"].items():
        facts = result["facts"].get(variant, {})
        sent = f"{facts['sent'] / 1e6:.1f}" if "sent" in facts else ""
        whole = f"{facts['whole']:.2f}" if "whole" in facts else ""
        balance = f"{facts['balance']:.3f}" if "balance" in facts else ""
        rows.append((variant, stats.summarize(found), sent, whole, balance))
    return ("variant", "ms per step", "MB sent", "whole units", "busiest / mean"), rows


def page_table(result: dict[str, Any]) -> str:
    """What ran, and the table in Markdown."""
    options = result["options"]
    if "losses" in result:
        ran = f"held-out loss of `train_lm --preset {options['preset']}`, nats per byte"
    else:
        ran = f"{options['units']} units of width {options['dim']}, {options['ranks']} ranks"
    ratios = stats.in_line(result.get("ratios", {}))
    return f"{ran}:\n\n{stats.markdown(*table(result))}" + (f"\n\n{ratios}" if ratios else "")


def _mean(losses: dict[str, float]) -> float:
    return statistics.fmean(losses.values())


def train(options: argparse.Namespace, optimizer: str, seed: int) -> float:
    """The held-out loss of one run of `train_lm`."""
    arguments = ["--preset", options.preset, "--optimizer", optimizer, "--seed", str(seed)]
    arguments += ["--steps", str(options.train_steps)] if options.train_steps else []
    return accuracy.trained(arguments, options.ranks)["loss"]


def measure_losses(options: argparse.Namespace) -> dict[str, Any]:
    losses: dict[str, dict[str, float]] = {name: {} for name in OPTIMIZERS}
    for seed in options.seeds:
        for name, found in losses.items():
            found[str(seed)] = train(options, name, seed)
            print(f"{name}, seed {seed}: {found[str(seed)]:.4f}", flush=True)
    return {"options": vars(options), "losses": losses}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A step of Muon over shards.")
    parser.add_argument("--dim", type=int, default=512, help="width of a unit (default 512)")
    parser.add_argument("--units", type=int, default=3, help="default 3")
    parser.add_argument("--ranks", type=int, default=2, help="of one thread each (default 2)")
    parser.add_argument("--losses", action="store_true", help="of train_lm, in place of times")
    parser.add_argument("--preset", default="tiny", help="of train_lm (default tiny)")
    parser.add_argument("--train-steps", type=int, help="default: the preset's")
    parser.add_argument("--seeds", type=common.integers, default="0,1,2", help="comma list")
    common.add_variants(parser, VARIANTS, ("everywhere", "fsdp2", "unbatched"))
    common.add_timing(parser, 2, rounds=5, device=None)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if "torchtitan" in options.variants and importlib.util.find_spec("torchtitan") is None:
        raise SystemExit(
            "muon.py: --variants torchtitan needs the package torchtitan, 0.3 or later"
        )
    shown = stats.describe(stats.environment("cpu"))
    if options.losses:
        print(f"train_lm --preset {options.preset}, {options.ranks} gloo ranks\n{shown}\n")
        result = measure_losses(options)
    else:
        print(
            f"{options.units} units of width {options.dim}, {options.ranks} gloo ranks of one "
            f"thread\n{shown}\n"
        )
        result = measure(options)
    print(stats.table(*table(result)))
    stats.print_ratios(result.get("ratios", {}))
    stats.write_json(options.json, "cpu", result, timed=not options.losses)


if __name__ == "__main__":
    main()
