"""The step of a Llama-like model on one GPU, sharded over a world whose collectives cost nothing.

    python benchmarks/step.py --preset 1.1b            # 1 x 2048 tokens: bound by the host
    python benchmarks/step.py --preset 2.8b --kernels  # 1 x 8192 tokens: bound by the device
    python benchmarks/step.py --preset moe --variants none,torch,fsdp2,fsdp1
    python benchmarks/step.py --preset 1.1b --variants fsdp2,window1,window2,window3
    python benchmarks/step.py --preset 1.1b --ranks 2  # real ranks over NCCL, a GPU each
    python benchmarks/step.py --preset tiny --device cpu --rounds 2     # only to see it run

What remains of a sharding runtime when communication is free: its host time, its own kernels
(copies, casts), its memory. Rank 0 of 8 holds an eighth of the fp32 parameters and gathers, uses
and frees bf16 blocks as it would in a real run. Without sharding ("none") the model is in bf16. A
step is forward, cross entropy, backward and `zero_grad(set_to_none=True)`; there is no optimizer.

Arithmetic should see a model's values: a GPU draws less power, and clocks higher, on zeros and
NaNs. So each burst is warmed up with gathers that copy rank 0's rows to all ranks' places; nobody
writes gathered memory while time is taken. Where something else did, the logits behind the burst
tell, and the variant is flagged; with `--fill` gathers then are filled in timed steps, too. That
costs sharding runtimes alike on the device, and "none" nothing: its ratio is an upper bound, and
host times have no meaning.

Each variant has a process, and all stay for rounds in turns. Behind its burst a process gives back
all memory but its model's, so that the device has room for the largest step and not for three.

Per variant:
  device     ms a step of a burst of steps, between two CUDA events
  wall       the same by the host's clock, up to a synchronisation at the burst's end
  host       ms until a step's Python returns, with a synchronisation before every step
  allocated  most memory at once in such a burst, GB (10^9 bytes); reserved: of the allocator
  logits     their standard deviation in a step behind the burst

With `--kernels` also a step's kernels by kind, and the bytes of fsdp2's own copies and casts. With
`--recompute` each block's activations are recomputed in backward.

A variant that fails or runs out of memory is left out of what follows; the others go on, and the
exit status is 1 in the end.

With `--ranks` collectives are real: NCCL on GPUs, gloo on a CPU. Each variant then has as many
processes, all of its figures are the slowest rank's, and nothing has to be filled.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F

from benchmarks import kernels, stats, variants, workers
from benchmarks import options as common
from benchmarks.models import PRESETS, Llama, LlamaConfig, recompute_blocks
from fsdp2.testing import counting
from fsdp2.testing.null_group import fill_gathered
from fsdp2.testing.stand_in import device as stand_in

WARMUP_STEPS = 5
PROFILED_STEPS = 3
APART = 2.0  # a factor that logits of sound variants stay within; garbage is off by thousands


# ---------------------------------------------------------------------------------------------
# In a worker


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    variant, precision, world_size = spec["variant"], spec["precision"], spec["world_size"]
    if spec["ranks"]:
        device, world_size = variants.prepare_rank(spec, spec["ranks"]), spec["ranks"]
    else:
        device = variants.prepare_process(spec["device"], world_size)
    config = LlamaConfig(**spec["config"])
    with torch.device("meta"):
        model = Llama(config)
    if spec["recompute"]:
        recompute_blocks(model)
    model = variants.place(model, variant, precision, world_size, device)
    step = make_step(model, config, device)

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        if request.get("coalesces"):
            return {"coalesces": variants.coalesces(device)}
        with prepared(model, step, device, spec["fill"]):
            if request.get("kernels"):
                copied = counting.copied_bytes(step)
                return {"kernels": kernels.profile(step, PROFILED_STEPS), "copied": copied}
            return time_burst(step, request["steps"], device)

    return handle


@contextmanager
def prepared(
    model: torch.nn.Module, step: Callable[[], object], device: torch.device, fill: bool = False
) -> Iterator[None]:
    """Steps are warm inside, and gathered memory holds a model's values; gives it back behind.

    Args:
        model: placed by `variants.place`.
        step: its step.
        device: where it is.
        fill: whether gathers are filled inside, too.
    """
    null = variants.is_null()
    if null:
        variants.observe(model, fill_gathered)
    for _ in range(WARMUP_STEPS):
        step()
    if null and not fill:
        variants.observe(model, None)
    for _ in range(WARMUP_STEPS):
        step()
    yield
    give_back(device)


def give_back(device: torch.device) -> None:
    """Let other processes have the memory that this one does not use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def make_step(
    model: torch.nn.Module, config: LlamaConfig, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A step, which returns the logits."""
    tokens, targets = torch.randint(config.vocab, (2, config.batch, config.seq)).to(device)

    def step() -> torch.Tensor:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        model.zero_grad(set_to_none=True)
        return logits.detach()

    return step


def time_burst(
    step: Callable[[], torch.Tensor], steps: int, device: torch.device
) -> dict[str, Any]:
    """Times and peak memory of a burst; see the module's docstring for what each one is."""
    figures = _time_on_gpu(step, steps) if device.type == "cuda" else _time_on_cpu(step, steps)
    if device.type == stand_in.NAME:
        stand_in.peak_bytes()
        step()
        figures["allocated"] = stand_in.peak_bytes() / 1e9
    return {**figures, "logits": step().std().item()}


def _time_on_cpu(step: Callable[[], object], steps: int) -> dict[str, float]:
    host = [_timed(step) for _ in range(steps)]
    return {"wall": sum(host) / steps, "host": statistics.median(host)}


def _time_on_gpu(step: Callable[[], object], steps: int) -> dict[str, float]:
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


def _timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


# ---------------------------------------------------------------------------------------------
# In the parent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.device == stand_in.NAME:
        stand_in.build()
    config = PRESETS[options.preset]
    if options.batch:
        config = dataclasses.replace(config, batch=options.batch)
    if options.seq:
        config = dataclasses.replace(config, seq=options.seq)
    print(
        f"{options.preset}: {config.parameters / 1e9:.2f} B parameters, {config.batch} x "
        f"{config.seq} tokens, {_ranks(options)}, {options.precision}\n"
        f"{stats.describe(stats.environment(options.device))}\n"
    )
    specs = {
        variant: {**spec_of(options, config), "variant": variant} for variant in options.variants
    }
    result: dict[str, Any] = {"config": config, "options": vars(options)}
    on_gpu = options.device == "cuda"
    ready: AbstractContextManager[Mapping[str, workers.Asked]]
    lost: dict[str, str] = {}
    if options.ranks:
        ready = workers.rank_pools("step", specs, options.ranks, lost)
    else:
        ready = workers.pool("step", specs, at_once=on_gpu, lost=lost)
    with ready as pool:
        answers = workers.take_turns(pool, options.rounds, lost, steps=options.steps)
        if options.kernels and on_gpu:
            profiles = workers.take_turns(pool, 1, lost, kernels=True)
            for kind in ("kernels", "copied"):
                result[kind] = {label: each[0][kind] for label, each in profiles.items()}
    result["lost"] = lost
    if not answers:
        raise SystemExit("no variant is left: " + "; ".join(lost.values()))
    result["rounds"] = {
        label: {kind: [answer[kind] for answer in each] for kind in each[0]}
        for label, each in answers.items()
    }
    result["ratios"] = ratios(result["rounds"])
    return result


def spec_of(options: argparse.Namespace, config: LlamaConfig) -> dict[str, Any]:
    """What a worker has to know besides its variant."""
    given = ("precision", "world_size", "device", "fill", "recompute", "ranks")
    return {**{name: getattr(options, name) for name in given}, "config": vars(config)}


def _ranks(options: argparse.Namespace) -> str:
    real = f"{options.ranks} ranks on {variants.backend_of(options.device)}"
    return real if options.ranks else f"world size {options.world_size}"


def ratios(rounds: dict[str, dict[str, list[float]]]) -> dict[str, stats.Summary]:
    """What the targets are stated in: time over none's, time and memory over torch's FSDP2's."""
    kinds = next(iter(rounds.values()))
    duration = "device" if "device" in kinds else "wall"
    memory = [kind for kind in ("allocated", "reserved") if kind in kinds]
    compared = [("none", duration), *(("torch", kind) for kind in (duration, "host", *memory))]
    return {
        f"{label} / {base}, {kind}": stats.ratio(values[kind], rounds[base][kind])
        for label, values in rounds.items()
        for base, kind in compared
        if base in rounds and label not in ("none", base)
    }


def unsound(rounds: dict[str, dict[str, list[float]]], sound: str = "none") -> list[str]:
    """A sentence for each variant that did not compute with a model's values, on a GPU.

    A CPU takes as long for NaNs, and denormal numbers are flushed.

    Args:
        rounds: figures by variant and kind.
        sound: the variant to compare logits with, if it was measured.
    """
    expected = statistics.median(rounds[sound]["logits"]) if sound in rounds else math.nan
    found = []
    for label, values in rounds.items():
        logits = values["logits"]
        off = [v for v in logits if "device" in values and not _alike(v, expected)]
        if off:
            found.append(
                f"UNSOUND: {label}'s logits had a standard deviation of {off[0]:.3g} behind "
                f"{len(off)} of {len(logits)} bursts (none's: {expected:.3g}), so that its power "
                f"and clock may have been others: see --fill"
            )
    return found


def _alike(value: float, expected: float) -> bool:
    """Of anything finite where nothing is known."""
    if math.isnan(expected):
        return math.isfinite(value)
    return expected / APART <= value <= expected * APART


def report(result: dict[str, Any]) -> None:
    rounds = result["rounds"]
    kinds = list(next(iter(rounds.values())))
    rows = [
        (label, *(stats.summarize(values[kind]) for kind in kinds))
        for label, values in rounds.items()
    ]
    print(stats.table(("variant", *kinds), rows))
    stats.print_ratios(result["ratios"])
    for variant, why in result["lost"].items():
        print(f"{variant}: {why}")
    for sentence in unsound(rounds):
        print(sentence)
    if "kernels" in result:
        print("\n" + kernels.report(result["kernels"]))
        for sentence in [*own_kernels(result), *copied(result)]:
            print(sentence)


def copied(result: dict[str, Any]) -> list[str]:
    """A sentence for each variant of fsdp2 about its own copies, where kernels were profiled."""
    return [
        f"{label}: {kernel} reads and writes {nbytes / 1e9:.3f} GB a step"
        for label, each in result.get("copied", {}).items()
        for kernel, nbytes in each.items()
    ]


def own_kernels(result: dict[str, Any]) -> list[str]:
    """A sentence for each variant about its kernels beyond the model's, if they were profiled."""
    profiles = result.get("kernels", {})
    if "none" not in profiles:
        return []
    found = []
    for label, profile in profiles.items():
        if label != "none":
            own = kernels.runtimes_own(profile, profiles["none"])
            found.append(f"{label}: {own['count']:.0f} kernels beyond none's, {own['ms']:.2f} ms")
    return found


def add_sharding(parser: argparse.ArgumentParser) -> None:
    """Among how many ranks, and in which dtypes."""
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--precision", choices=variants.PRECISIONS, default="mixed")
    parser.add_argument(
        "--ranks", type=int, default=0, help="real ranks, one GPU each (default: none are)"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The step of a Llama-like model on one GPU, with free collectives."
    )
    parser.add_argument("--preset", choices=PRESETS, default="1.1b")
    parser.add_argument("--batch", type=int, help="instead of the preset's 1")
    parser.add_argument("--seq", type=int, help="instead of the preset's sequence length")
    add_sharding(parser)
    common.add_variants(parser, variants.VARIANTS, ("none", "torch", "fsdp2"))
    common.add_timing(parser, 8, rounds=5, device="cuda", devices=variants.DEVICES, clock=False)
    common.add_fill(parser)
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument(
        "--kernels", action="store_true", help="count and time kernels by kind (GPU only)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    result = measure(options)
    report(result)
    conclude(options, result)


def conclude(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Keep the result, if that was asked for; exit with 1 if something was lost."""
    stats.write_json(options.json, options.device, result)
    if result["lost"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
