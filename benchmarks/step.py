"""The step of a Llama-like model on one GPU, sharded over a world whose collectives cost nothing.

    python benchmarks/step.py --preset 1.1b            # 1 x 2048 tokens: bound by the host
    python benchmarks/step.py --preset 2.8b --kernels  # 1 x 8192 tokens: bound by the device
    python benchmarks/step.py --preset tiny --device cpu --rounds 2     # only to see it run

What remains of a sharding runtime when communication is free: its host time, its own kernels
(copies, casts), its memory. Rank 0 of 8 holds an eighth of the fp32 parameters and gathers, uses
and frees bf16 blocks as it would in a real run; gathered memory is filled with small numbers during
the warm-up, so that arithmetic sees ordinary values (a GPU draws less power on zeros and NaNs).
Without sharding ("none") the model is in bf16. A step is forward, cross entropy, backward and
`zero_grad(set_to_none=True)`; there is no optimizer.

Per variant:
  device   ms a step of a burst of steps, between two CUDA events
  wall     the same by the host's clock, up to a synchronisation at the burst's end
  host     ms until a step's Python returns, with a synchronisation before every step
  peak     largest allocated and reserved memory of such a burst, GB (10^9 bytes)
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F

from benchmarks import kernels, stats, variants, workers
from benchmarks import options as common
from benchmarks.models import PRESETS, Llama, LlamaConfig
from benchmarks.null_group import fill_gathered

WARMUP_STEPS = 5
PROFILED_STEPS = 3


# ---------------------------------------------------------------------------------------------
# In a worker


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    variant, precision, world_size = spec["variant"], spec["precision"], spec["world_size"]
    device = variants.prepare_process(spec["device"], world_size)
    config = LlamaConfig(**spec["config"])
    with torch.device("meta"):
        model = Llama(config)
    model = variants.place(model, variant, precision, world_size, device)
    step = make_step(model, config, device)

    variants.observe(model, fill_gathered)
    for _ in range(WARMUP_STEPS):
        step()
    variants.observe(model, None)
    for _ in range(WARMUP_STEPS):
        step()

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        if request.get("kernels"):
            return {"kernels": kernels.profile(step, PROFILED_STEPS)}
        return time_burst(step, request["steps"], device)

    return handle


def make_step(
    model: torch.nn.Module, config: LlamaConfig, device: torch.device
) -> Callable[[], None]:
    tokens, targets = torch.randint(config.vocab, (2, config.batch, config.seq), device=device)

    def step() -> None:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        model.zero_grad(set_to_none=True)

    return step


def time_burst(step: Callable[[], None], steps: int, device: torch.device) -> dict[str, Any]:
    """Times and peak memory of a burst; see the module's docstring for what each one is."""
    if device.type == "cpu":
        host = [_timed(step) for _ in range(steps)]
        return {"wall": sum(host) / steps, "host": statistics.median(host)}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) * 1e3 / steps
    host = []
    for _ in range(steps):
        host.append(_timed(step))
        torch.cuda.synchronize()
    return {
        "device": begin.elapsed_time(end) / steps,
        "wall": wall,
        "host": statistics.median(host),
        "allocated": torch.cuda.max_memory_allocated() / 1e9,
        "reserved": torch.cuda.max_memory_reserved() / 1e9,
    }


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


# ---------------------------------------------------------------------------------------------
# In the parent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = PRESETS[options.preset]
    if options.batch:
        config = dataclasses.replace(config, batch=options.batch)
    if options.seq:
        config = dataclasses.replace(config, seq=options.seq)
    print(
        f"{options.preset}: {config.parameters / 1e9:.2f} B parameters, {config.batch} x "
        f"{config.seq} tokens, world size {options.world_size}, {options.precision}\n"
        f"{stats.describe(stats.environment(options.device))}\n"
    )
    specs = {
        variant: {
            "variant": variant,
            "precision": options.precision,
            "world_size": options.world_size,
            "device": options.device,
            "config": dataclasses.asdict(config),
        }
        for variant in options.variants
    }
    result: dict[str, Any] = {"config": config, "options": vars(options)}
    on_gpu = options.device == "cuda"
    with workers.pool("step", specs, at_once=on_gpu) as pool:
        answers = workers.take_turns(pool, options.rounds, steps=options.steps)
        if options.kernels and on_gpu:
            profiles = workers.take_turns(pool, 1, kernels=True)
            result["kernels"] = {label: each[0]["kernels"] for label, each in profiles.items()}
    result["rounds"] = {
        label: {kind: [answer[kind] for answer in each] for kind in each[0]}
        for label, each in answers.items()
    }
    return result


def report(result: dict[str, Any]) -> None:
    rounds = result["rounds"]
    kinds = list(next(iter(rounds.values())))
    rows = [
        (label, *(stats.summarize(values[kind]) for kind in kinds))
        for label, values in rounds.items()
    ]
    print(stats.table(("variant", *kinds), rows))
    time_kind = "device" if "device" in kinds else "wall"
    for label, values in rounds.items():
        if label not in ("none", "torch") and "torch" in rounds:
            for kind in (time_kind, "host"):
                print(
                    f"{label} / torch, {kind}: {stats.ratio(values[kind], rounds['torch'][kind])}"
                )
    if "kernels" in result:
        print("\n" + kernels.report(result["kernels"]))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The step of a Llama-like model on one GPU, with free collectives."
    )
    parser.add_argument("--preset", choices=PRESETS, default="1.1b")
    parser.add_argument("--batch", type=int, help="instead of the preset's 1")
    parser.add_argument("--seq", type=int, help="instead of the preset's sequence length")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--precision", choices=variants.PRECISIONS, default="mixed")
    common.add_variants(parser, variants.VARIANTS, ("none", "torch", "fsdp2"))
    common.add_timing(parser, 8, rounds=5, device="cuda", clock=False)
    parser.add_argument(
        "--kernels", action="store_true", help="count and time kernels by kind (GPU only)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    result = measure(options)
    report(result)
    stats.write_json(options.json, options.device, result)


if __name__ == "__main__":
    main()
