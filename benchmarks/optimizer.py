"""Clipping, optimizer steps, EMA and Muon over sharded parameters.

    python -m benchmarks.optimizer                       # host time: 32 blocks of 9 parameters
    python -m benchmarks.optimizer --blocks 8 --dim 1024 --steps 10 \\
        --variants none,flat,flat-offload,torch-offload  # kernels' time: shards in CPU memory
    python -m benchmarks.optimizer --muon                # two gloo ranks, 3 units of width 512

The variants of AdamW (fused), over a null group of 8 ranks; gradients are those of one backward:

    none    ``torch.optim.AdamW`` over plain tensors of the shards' shapes; torch's clipping
    torch   the same over the DTensors of torch's FSDP2; torch's clipping
    fsdp2   the same over the DTensors of fsdp2; `fsdp2.clip_grad_norm_`
    flat    `fsdp2.optim.FlatOptimizer`; `fsdp2.clip_grad_norm_`
    flat-offload, torch-offload   on shards of `CPUOffloadPolicy`

    ema, ema-10  `fsdp2.optim.EMA` of fsdp2's shards, which averages in each call, or in one of ten

The figures are ms of clipping, of the step (of the update, for EMA) and of both; the ratio to watch
is variant / none, of both. With ``--muon`` a unit has the matrices of a transformer's block, and

    everywhere   each rank gathers each matrix's momentum, and orthogonalizes all of them
    torch-muon   ``torch.optim.Muon`` over the DTensors
    muon         `fsdp2.optim.Muon`: each matrix on one rank
    unbatched    the same, one matrix at a time
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from benchmarks import harness, variants
from fsdp2.optim.matrices.newton_schulz import COEFFICIENTS, EPS, STEPS, orthogonalized
from fsdp2.testing.blocks import local, tiny_blocks

WARMUP = 5
RANKS = 8
OFFLOADED = {"flat-offload": fsdp2, "torch-offload": torchs}
EMAS = {"ema": 1, "ema-10": 10}
VARIANTS = ("none", "torch", "fsdp2", "flat", *OFFLOADED, *EMAS)
DEFAULT = ("none", "torch", "fsdp2", "flat", *EMAS)
MUON = ("everywhere", "torch-muon", "muon", "unbatched")
ADAMW = {"lr": 1e-4, "fused": True}

Parts = dict[str, Callable[[], object]]


# ---------------------------------------------------------------------------------------------
# In a worker


def adamw_parts(spec: dict[str, Any]) -> Parts:
    """Clipping and the step, over a sharded model, or one of parameters cut to a rank's rows."""
    variant = spec["variant"]
    device = variants.prepare_process(spec["device"], RANKS)
    with torch.device("meta"):
        model: nn.Module = tiny_blocks(spec["blocks"], 9, spec["dim"])
    torchs_own = variant.startswith(("none", "torch"))
    runtime = variant.removesuffix("-offload") if torchs_own else "fsdp2"
    policy = {}
    if variant in OFFLOADED:
        policy["offload_policy"] = OFFLOADED[variant].CPUOffloadPolicy(pin_memory=False)
    model = variants.place(model, runtime, "fp32", RANKS, device, **policy)
    x = torch.randn(4, spec["dim"], device=device, requires_grad=True)
    model(x).sum().backward()
    for param in model.parameters():
        grad = param.grad
        assert grad is not None
        if variant == "none":
            rows = param.shape[0] // RANKS
            param.data = param.data[:rows].clone()
            param.grad = grad = grad[:rows].clone()
        local(grad).uniform_(-1e-4, 1e-4)
    params = list(model.parameters())
    if variant in EMAS:
        return {"step": fsdp2.optim.EMA(model, 0.999, every=EMAS[variant]).update}
    if variant.startswith("flat"):
        offload = {"offload": True} if variant in OFFLOADED else {}
        flat = fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, **offload, **ADAMW)
        step: Callable[[], object] = flat.step
    else:
        optimizer = torch.optim.AdamW(params, **ADAMW)
        step = optimizer.step
    clip = nn.utils.clip_grad_norm_ if torchs_own else fsdp2.clip_grad_norm_
    return {"clip": lambda: clip(params, 1.0), "step": step}


class Unit(nn.Module):
    """The matrices of a transformer's block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = dim * 11 // 4
        shapes = [(dim, dim)] * 4 + [(hidden, dim)] * 2 + [(dim, hidden)]
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)


class Everywhere:
    """Each rank gathers each matrix's momentum, and orthogonalizes all of them."""

    def __init__(self, params: list[Any], lr: float = 1e-3, momentum: float = 0.95) -> None:
        self.params, self.lr, self.momentum = params, lr, momentum
        self.buffers = [torch.zeros_like(local(param)) for param in params]

    @torch.no_grad()
    def step(self) -> None:
        for param, buffer in zip(self.params, self.buffers, strict=True):
            grad = local(param.grad)
            buffer.lerp_(grad, 1 - self.momentum)
            rows = grad.lerp(buffer, self.momentum).bfloat16()
            whole = DTensor.from_local(
                rows, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
            ).full_tensor()
            update = orthogonalized(whole[None], COEFFICIENTS, STEPS, EPS)[0]
            own = update.narrow(0, dist.get_rank() * rows.shape[0], rows.shape[0])
            local(param).mul_(1 - self.lr * 0.1)
            scale = max(1, param.shape[0] / param.shape[1]) ** 0.5
            local(param).add_(own, alpha=-self.lr * scale)


def muon_parts(spec: dict[str, Any]) -> Parts:
    harness.join_ranks(spec, spec["ranks"])
    torch.manual_seed(0)
    model = nn.Sequential(*(Unit(spec["dim"]) for _ in range(spec["blocks"])))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for module in (*model, model):
        fsdp2.fully_shard(module, mesh=mesh)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    if spec["variant"] == "everywhere":
        return {"step": Everywhere(list(model.parameters())).step}
    if spec["variant"] == "torch-muon":
        return {"step": torch.optim.Muon(model.parameters()).step}
    return {"step": fsdp2.optim.Muon(model, batched=spec["variant"] == "muon").step}


def make_worker(spec: dict[str, Any]) -> harness.Handler:
    is_muon = spec["variant"] in MUON
    parts = (muon_parts if is_muon else adamw_parts)(spec)
    for part in parts.values():
        for _ in range(2 if is_muon else WARMUP):
            part()
    on_gpu = spec["device"] == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else (lambda: None)

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        """Milliseconds of each part: the median, or the mean of calls that differ (EMA)."""
        found: dict[str, list[float]] = {"clip": [0.0], "step": []}
        gc.collect()
        clock = harness.CLOCKS[request["clock"]]
        for _ in range(request["steps"]):
            for name, part in parts.items():
                synchronize()
                if is_muon:
                    dist.barrier()
                start = clock()
                part()
                found[name].append((clock() - start) * 1e3)
        middle = statistics.fmean if spec["variant"] in EMAS else statistics.median
        clip, step = (middle(found[name][-request["steps"] :]) for name in ("clip", "step"))
        return {"clip": clip, "step": step, "both": clip + step}

    return handle


# ---------------------------------------------------------------------------------------------
# In the parent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    names = MUON if options.muon else options.variants
    ranks = options.ranks if options.muon else 0
    given = {name: getattr(options, name) for name in ("blocks", "dim", "device", "ranks")}
    specs = {name: {**given, "variant": name} for name in names}
    request = {"steps": options.steps, "clock": options.clock}
    rounds = harness.measure("optimizer", specs, options.rounds, ranks, **request)
    ratios = {**harness.over(rounds, "both", "none"), **harness.over(rounds, "step", "everywhere")}
    if "flat-offload" in rounds:
        ratios |= harness.over(rounds, "step", "flat")
    for name in EMAS:
        if {name, "fsdp2"} <= rounds.keys():
            ratios[f"{name} / fsdp2"] = harness.ratio(rounds[name]["step"], rounds["fsdp2"]["step"])
            ratios.pop(f"{name} / none", None)
    return {"options": vars(options), "rounds": rounds, "ratios": ratios}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    devices = ("cpu", "cuda")
    parser = harness.make_parser(__doc__, variants=VARIANTS, default=DEFAULT, devices=devices)
    parser.add_argument("--muon", action="store_true", help="Muon, in place of the variants")
    parser.add_argument("--steps", type=int, help="of a burst: 20, with --muon 2")
    parser.add_argument("--blocks", type=int, help="32, with --muon 3")
    parser.add_argument("--dim", type=int, help="width of a block: 16, with --muon 512")
    parser.add_argument("--ranks", type=int, default=2, help="of --muon")
    parser.add_argument("--clock", choices=harness.CLOCKS, default="wall")
    options = parser.parse_args(arguments)
    sizes = {"steps": 2, "blocks": 3, "dim": 512} if options.muon else {}
    for name, size in {"steps": 20, "blocks": 32, "dim": 16, **sizes}.items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(f"{options.blocks} blocks of width {options.dim}")
    print(harness.describe(harness.environment(options.device)))
    result = measure(options)
    harness.print_rounds(result["rounds"], ("step",) if options.muon else None)
    harness.print_ratios(result["ratios"])
    harness.write_json(options.json, result, options.device)


if __name__ == "__main__":
    main()
