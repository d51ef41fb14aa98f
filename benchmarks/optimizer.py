"""Host time of clipping and of an optimizer's step over sharded parameters.

    python benchmarks/optimizer.py                       # 32 blocks of 9 parameters, 8 ranks
    python benchmarks/optimizer.py --optimizer sgd --blocks 128
    python benchmarks/optimizer.py --instructions        # counted: the same at any load
    python benchmarks/optimizer.py --offload             # shards in CPU memory, of a size to step

The parameters' shards are tiny, so that a step's time is the host's. The variants are

    none    the optimizer of torch.optim over plain tensors of the shards' shapes; torch's clipping
    torch   the same over the DTensors of torch's FSDP2; torch's clipping
    fsdp2   the same over the DTensors of fsdp2; `fsdp2.clip_grad_norm_`
    flat    `fsdp2.optim.FlatOptimizer` of that class; `fsdp2.clip_grad_norm_`

    flat-offload   as flat with ``offload="cpu"``, on shards of `CPUOffloadPolicy`
    torch-offload  as torch, with `CPUOffloadPolicy`

The figure to watch is variant / none, the median over rounds of the ratio in each round. Gradients
are those of one backward and stay. Collectives are null: they return at once.

Instructions are counted of ``zero_grad`` as well, with the same gradients assigned again after it;
what to assign them takes is counted by itself and left out.

``--offload`` compares the last two with none and flat, on shards so large that a step's time is the
kernels', by both clocks. The figure to watch is flat-offload / flat, of the step alone. The mesh is
one of CPUs: nothing is copied to a device or from it, nor would it be in a step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import nn
from torch.distributed import fsdp as torchs

import fsdp2
from benchmarks import instructions, stats, variants, workers
from benchmarks import options as common
from fsdp2.testing.blocks import local, tiny_blocks

WARMUP_STEPS = 5
COUNTED_STEPS = 2
VARIANTS = ("none", "torch", "fsdp2", "flat")
OFFLOADED = {"flat-offload": fsdp2, "torch-offload": torchs}
OURS = ("fsdp2", "flat", "flat-offload")
SIZE = {"variants": ["none", "flat", *OFFLOADED], "blocks": 8, "dim": 1024, "steps": 10}
"""Of ``--offload``: 9.4 million parameters on each of 8 ranks."""
COUNTED = ("clip", "step", "zero", "give")
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-4, "fused": True}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 1e-4, "foreach": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9, "foreach": True}),
}


# ---------------------------------------------------------------------------------------------
# In a worker


def make_model(spec: dict[str, Any]) -> tuple[nn.Module, torch.device]:
    """A model with gradients: sharded, or with every parameter cut down to one rank's rows."""
    variant, world_size = spec["variant"], spec["world_size"]
    device = variants.prepare_process(spec["device"], world_size)
    with torch.device("meta"):
        model = tiny_blocks(spec["blocks"], spec["params_per_block"], spec["dim"])
    runtime = "fsdp2" if variant in OURS else variant.removesuffix("-offload")
    policy = {}
    if variant in OFFLOADED:
        policy["offload_policy"] = OFFLOADED[variant].CPUOffloadPolicy(pin_memory=False)
    model = variants.place(model, runtime, "fp32", world_size, device, **policy)
    x = torch.randn(4, spec["dim"], device=device, requires_grad=True)
    model(x).sum().backward()
    for param in model.parameters():
        if variant == "none":
            rows = param.shape[0] // world_size
            grad = param.grad
            param.data = param.data[:rows].clone()
            param.grad = grad[:rows].clone()
        local(param.grad).uniform_(-1e-4, 1e-4)
    return model, device


def make_parts(spec: dict[str, Any]) -> tuple[dict[str, Callable[[], Any]], torch.device]:
    """The model of `make_model`, its optimizer, and what is called of them, by name."""
    model, device = make_model(spec)
    params = list(model.parameters())
    optimizer_class, options = OPTIMIZERS[spec["optimizer"]]
    if spec["variant"] == "flat":
        optimizer = fsdp2.optim.FlatOptimizer(model, optimizer_class, **options)
    elif spec["variant"] == "flat-offload":
        optimizer = fsdp2.optim.FlatOptimizer(model, optimizer_class, offload="cpu", **options)
    else:
        optimizer = optimizer_class(params, **options)
    ours = spec["variant"] in OURS
    clip = fsdp2.clip_grad_norm_ if ours else nn.utils.clip_grad_norm_
    grads = [param.grad for param in params]

    def give() -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    def zero() -> None:
        optimizer.zero_grad()
        give()

    parts = {"clip": lambda: clip(params, 1.0), "step": optimizer.step, "zero": zero, "give": give}
    return parts, device


def make_step(spec: dict[str, Any]) -> tuple[Callable[[], None], torch.device]:
    """One part, for `benchmarks.instructions`."""
    parts, device = make_parts(spec)
    for part in parts.values():
        part()
    return parts[spec["part"]], device


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    parts, device = make_parts(spec)
    timed = {name: parts[name] for name in ("clip", "step")}
    for _ in range(WARMUP_STEPS):
        for part in timed.values():
            part()

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        return time_parts(timed, request["steps"], device, stats.CLOCKS[request["clock"]])

    return handle


def time_parts(
    parts: dict[str, Callable[[], Any]],
    steps: int,
    device: torch.device,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Median milliseconds until each part returns, and of both together."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    found: dict[str, list[float]] = {name: [] for name in (*parts, "both")}
    gc.collect()
    for _ in range(steps):
        total = 0.0
        for name, part in parts.items():
            synchronize()
            start = clock()
            part()
            found[name].append((clock() - start) * 1e3)
            total += found[name][-1]
        found["both"].append(total)
    return {name: statistics.median(values) for name, values in found.items()}


# ---------------------------------------------------------------------------------------------
# In the parent


def make_specs(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What a worker builds, by variant."""
    keys = ("blocks", "params_per_block", "dim", "world_size", "device", "optimizer")
    common = {key: getattr(options, key) for key in keys}
    return {variant: {**common, "variant": variant} for variant in options.variants}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One result, or with ``--offload`` one by each clock."""
    results = []
    with workers.pool("optimizer", make_specs(options)) as pool:
        for clock in stats.CLOCKS if options.offload else [options.clock]:
            answers = workers.take_turns(pool, options.rounds, steps=options.steps, clock=clock)
            rounds = {
                variant: {part: [each[part] for each in own] for part in ("clip", "step", "both")}
                for variant, own in answers.items()
            }
            found = {"optimizer": options.optimizer, "rounds": rounds, "clock": clock}
            base, part = ("flat", "step") if options.offload else ("none", "both")
            results.append({**found, "ratios": ratios(rounds, base, part)})
    return results


def count(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Instructions of each part, by variant."""
    specs = [
        {**spec, "benchmark": "optimizer", "part": part, "label": f"{variant} {part}", "steps": n}
        for variant, spec in make_specs(options).items()
        for part in COUNTED
        for n in ((0, COUNTED_STEPS) if part == COUNTED[0] else (COUNTED_STEPS,))
    ]
    counted = instructions.count(specs)[instructions.INSTRUCTIONS]
    found: dict[str, dict[str, float]] = {}
    for variant in options.variants:
        before = counted[f"{variant} {COUNTED[0]}", 0]
        each = {
            part: (counted[f"{variant} {part}", COUNTED_STEPS] - before) / COUNTED_STEPS
            for part in COUNTED
        }
        each["zero"] -= each.pop("give")
        found[variant] = each
    return found


def report_counts(options: argparse.Namespace, counts: dict[str, dict[str, float]]) -> None:
    print(f"\n{options.optimizer}: thousands of instructions")
    rows = [
        (variant, *(f"{value / 1e3:.0f}" for value in each.values()))
        for variant, each in counts.items()
    ]
    print(stats.table(("variant", "clip", "step", "zero"), rows))
    none = counts.get("none", {})
    for variant, each in counts.items() if none else ():
        both = (each["clip"] + each["step"]) / (none["clip"] + none["step"])
        everything = sum(each.values()) / sum(none.values())
        print(f"{variant} / none: {both:.3f}, with zero_grad {everything:.3f}")


def ratios(
    rounds: dict[str, dict[str, list[float]]], base: str, part: str
) -> dict[str, stats.Summary]:
    """A part of each variant over that of ``base``; "both" is clipping and step together."""
    if base not in rounds:
        return {}
    return {
        f"{variant} / {base}": stats.ratio(parts[part], rounds[base][part])
        for variant, parts in rounds.items()
        if variant != base
    }


def page_table(results: list[dict[str, Any]]) -> str:
    """Steps of offloaded shards by each clock, in Markdown."""
    tables = []
    for result in results:
        rows = [
            (variant, stats.summarize(parts["step"]), _ratio(result["ratios"], f"{variant} / flat"))
            for variant, parts in result["rounds"].items()
        ]
        header = ("variant", f"ms per step, {result['clock']} clock", "variant / flat")
        tables.append(stats.markdown(header, rows))
    return f"step of {results[0]['optimizer']}:\n\n" + "\n\n".join(tables)


def _ratio(found: dict[str, dict[str, float]], label: str) -> str:
    each = found.get(label)
    return f"{each['median']:.2f} [{each['min']:.2f} .. {each['max']:.2f}]" if each else ""


def report(options: argparse.Namespace, result: dict[str, Any]) -> None:
    values = f"ms ({result['clock']} clock), median [min .. max] of {options.rounds} rounds"
    print(f"\n{result['optimizer']}: {values}")
    rows = [
        (variant, *(stats.summarize(parts[part]) for part in ("clip", "step", "both")))
        for variant, parts in result["rounds"].items()
    ]
    print(stats.table(("variant", "clip", "step", "both"), rows))
    stats.print_ratios(result["ratios"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Host time of clipping and of an optimizer's step over sharded parameters."
    )
    common.add_tiny(parser, 32, 9)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    common.add_variants(parser, (*VARIANTS, *OFFLOADED), VARIANTS)
    parser.add_argument(
        "--instructions", action="store_true", help="count instructions, under valgrind"
    )
    parser.add_argument(
        "--offload", action="store_true", help="compare steps of offloaded shards, by both clocks"
    )
    common.add_timing(parser, 20)
    if parser.parse_known_args(arguments)[0].offload:
        parser.set_defaults(**SIZE)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    common.print_tiny(options)
    if options.instructions:
        counts = count(options)
        report_counts(options, counts)
        stats.write_json(options.json, options.device, [{"counts": counts}])
        return
    results = measure(options)
    for result in results:
        report(options, result)
    stats.write_json(options.json, options.device, results)


if __name__ == "__main__":
    main()
