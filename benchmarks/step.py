"""Time and memory of a step: not sharded, sharded by torch's FSDP2, sharded by fsdp2.

    python -m benchmarks.step                                   # 32 blocks of nine parameters
    python -m benchmarks.step --models llama,moe,lora --precision fp32,mixed
    python -m benchmarks.step --models 32x9+128x9,32x100        # "+": these take turns
    python -m benchmarks.step --models tall --world-size 8,1024,16384
    python -m benchmarks.step --models tiny,tiny-wide --compiled
    python -m benchmarks.step --models 1.1b --device cuda --kernels
    python -m benchmarks.step --models 1.1b --device cuda --ranks 2     # a GPU each, over NCCL
    python -m benchmarks.step --profile fsdp2                   # where the host's time goes

A step is forward, backward and ``zero_grad(set_to_none=True)``, without an optimizer. Collectives
are null: they return at once. What remains of a sharding runtime is its host time, its own copies
and casts, and its memory. Rank 0 of 8 holds an eighth of the parameters. Each variant has a process
of its own; all of one model take turns.

Models of many small blocks show the host's time. The figure to watch is

    (fsdp2 - none) / (torch - none)

what fsdp2 adds to the unsharded step, as a part of what torch's FSDP2 adds: the median over rounds
of the ratio in each round. Decoders (1.1b, 2.8b, 1.9b-moe) show a GPU's time and memory, over those
of torch and of none.

    host       ms until a step's Python returns; on a GPU with a synchronisation before each step
    wall       ms of a step in a burst of steps, up to a synchronisation at the burst's end
    device     GPU: the same between two CUDA events
    allocated  the most memory at once in such a burst, GB (10^9 bytes); reserved: of the allocator
    logits     decoders: their standard deviation in a step after the burst

Arithmetic should see a model's values: a GPU draws less power, and clocks higher, on zeros and
NaNs. So before each burst of a decoder, gathers copy rank 0's rows to all ranks' places. Nobody
writes gathered memory in timed steps, unless you pass ``--fill``; logits that are not as those of
none flag a variant as UNSOUND. With ``--fill`` host times have no meaning.

``--clock cpu`` takes this process's CPU time, which does not count the time that others run. A
variant that fails or runs out of memory is left out of what follows; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import math
import pstats
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import harness, models, variants
from fsdp2 import graph_mode
from fsdp2.planning.presets import Shape
from fsdp2.testing import blocks, counting
from fsdp2.testing.stand_in import device as stand_in

WARMUP = 5
STEADY = 5
APART = 2.0  # a factor that logits of sound variants stay within; garbage is off by thousands
BATCH, DIM, ROWS = 4, 16, 16384
MODES = ("eager", "compiled")
LOGITS = "logits"


@dataclass(frozen=True)
class Stack:
    """A model of blocks: how many, the numbers of parameters that they have in turn, of what."""

    blocks: int
    params: tuple[int, ...]
    kind: str = "tiny"

    @property
    def parameters(self) -> int:
        return sum(self.params[i % len(self.params)] for i in range(self.blocks))


STACKS = {
    "32x9": Stack(32, (9,)),
    "128x9": Stack(128, (9,)),
    "32x100": Stack(32, (100,)),
    "300x1-3": Stack(300, (1, 2, 3)),
    "100x10": Stack(100, (10,)),
    "llama": Stack(32, (9,), "llama"),
    "moe": Stack(32, (9,), "moe"),
    "lora": Stack(32, (13,), "lora"),
    "tall": Stack(8, (9,), "tall"),
}
"""Blocks x parameters of a block, of [16, 16]; the parameters of real blocks of width 64; and
[16384, 8], which shard evenly among many ranks."""
REAL: dict[str, Callable[[int], Any]] = {
    **{"llama": blocks.llama_blocks, "moe": blocks.moe_blocks, "lora": blocks.lora_blocks}
}
MODELS = (*STACKS, *models.PRESETS)


# ---------------------------------------------------------------------------------------------
# In a worker


def make_stack(name: str, shrink: int) -> Any:
    """A stack with 1 / ``shrink`` of its blocks; its ``width`` is that of the input."""
    stack = STACKS[name]
    count = max(stack.blocks // shrink, 1)
    if stack.kind in REAL:
        return REAL[stack.kind](count)
    if stack.kind == "tall":
        return blocks.tall_blocks(count, stack.params[0], rows=ROWS)
    return blocks.tiny_blocks(count, stack.params, DIM)


class Subject:
    """A model that is placed, and its step."""

    def __init__(self, spec: dict[str, Any]) -> None:
        variant, precision, world_size = spec["variant"], spec["precision"], spec["world_size"]
        self.is_stack = spec["model"] in STACKS
        self._filling = variants.Filling()
        self._fill: bool = spec.get("fill", False)
        if spec.get("ranks"):
            self.device, world_size = variants.prepare_rank(spec, spec["ranks"]), spec["ranks"]
        else:
            observer = None if self.is_stack else self._filling
            self.device = variants.prepare_process(spec["device"], world_size, observer)
        with torch.device("meta"):
            if self.is_stack:
                model = make_stack(spec["model"], spec["shrink"])
                width = model.width
            else:
                shape = Shape(**spec["shape"])
                model = models.Decoder(shape)
        if spec.get("recompute"):
            models.recompute_blocks(model)
        compiler, whole = spec.get("compiler"), variant == "graph"
        for block in model.blocks if compiler and not whole else ():
            block.compile(backend=compiler, fullgraph=True)
        self.model = variants.place(model, variant, precision, world_size, self.device)
        if compiler and whole:
            graph_mode(self.model, compile={"options": {"compiler": compiler}})
        if self.is_stack:
            # Like an embedding's output, the input needs a gradient: so do all blocks' inputs.
            dtype = variants.input_dtype(variant, precision)
            x = torch.randn(BATCH, width, device=self.device, dtype=dtype, requires_grad=True)
            self.step: Callable[[], Any] = variants.step_of(self.model, x)
        else:
            self.step = decoder_step(self.model, models.tokens_of(shape, 1, self.device))

    def warm_up(self) -> None:
        """Steps until buffers are made, the order of units is known, and memory has values."""
        self._filling.on = True
        for _ in range(WARMUP):
            self.step()
        self._filling.on = self._fill
        for _ in range(0 if self.is_stack else STEADY):
            self.step()


def decoder_step(model: nn.Module, batch: Tensor) -> Callable[[], Tensor]:
    """A step, which returns the logits."""
    tokens, targets = batch

    def step() -> Tensor:
        logits = model(tokens).float()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        model.zero_grad(set_to_none=True)
        return logits.detach()

    return step


def make_step(spec: dict[str, Any]) -> Callable[[], object]:
    """A step, for `benchmarks.instructions`."""
    return Subject(spec).step


def make_worker(spec: dict[str, Any]) -> harness.Handler:
    subject = Subject(spec)
    if subject.is_stack:
        subject.warm_up()

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        if not subject.is_stack:
            subject.warm_up()
        if request.get("kernels"):
            return {"kernels": kernels_of(subject.step)}
        found = burst(subject, request["steps"], harness.CLOCKS[request["clock"]])
        if subject.device.type == "cuda":
            torch.cuda.empty_cache()  # for the other processes
        return found

    return handle


def burst(subject: Subject, steps: int, clock: Callable[[], float]) -> dict[str, Any]:
    """The figures of a burst; see the module's docstring."""
    step, device = subject.step, subject.device
    gc.collect()
    found: dict[str, Any] = {}
    on_gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else (lambda: None)
    if on_gpu:
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        synchronize()
        found["device"] = begin.elapsed_time(end) / steps
        found["wall"] = (time.perf_counter() - start) * 1e3 / steps
    host = []
    for _ in range(steps):
        start = clock()
        step()
        host.append((clock() - start) * 1e3)
        synchronize()
    found["host"] = statistics.median(host)
    found.setdefault("wall", sum(host) / steps)
    if on_gpu:
        found["allocated"] = torch.cuda.max_memory_allocated() / 1e9
        found["reserved"] = torch.cuda.max_memory_reserved() / 1e9
    elif device.type == stand_in.NAME:
        stand_in.peak_bytes()
        step()
        found["allocated"] = stand_in.peak_bytes() / 1e9
    if not subject.is_stack:
        found[LOGITS] = step().std().item()
    return found


def kernels_of(step: Callable[[], object]) -> str:
    """torch's table of a step's kernels, and the bytes of fsdp2's own copies."""
    with torch.profiler.profile() as profiler:
        step()
        torch.cuda.synchronize()
    events: Any = profiler.key_averages()
    table: str = events.table(sort_by="self_cuda_time_total", row_limit=25)
    copied = counting.copied_bytes(step)
    said = (f"{kernel}: {nbytes / 1e9:.3f} GB" for kernel, nbytes in copied.items())
    return "\n".join([table, *said])


def profile(spec: dict[str, Any], steps: int) -> None:
    """Print the functions that take most of a step's host time, by their own time."""
    subject = Subject(spec)
    subject.warm_up()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        subject.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


# ---------------------------------------------------------------------------------------------
# In the parent


def specs_of(options: argparse.Namespace, names: list[str], precision: str) -> dict[str, Any]:
    """Specs of all variants of some models, by "model, precision, variant[@ranks][, compiled]"."""
    found = {}
    several = len(options.world_size) > 1
    for name in names:
        for size in options.world_size:
            for variant in options.variants:
                for mode in MODES if options.compiled else MODES[:1]:
                    label = f"{name}, {precision}, {variant}"
                    label += f"@{size}" if several and variant != "none" else ""
                    label += ", compiled" if mode == MODES[1] else ""
                    spec = {
                        **{"model": name, "variant": variant, "precision": precision},
                        **{"world_size": size, "device": options.device, "ranks": options.ranks},
                        **{"shrink": options.shrink, "fill": options.fill},
                        **{"recompute": options.recompute},
                    }
                    if name not in STACKS:
                        shape = models.PRESETS[name]
                        seq = options.seq or shape.seq
                        spec["shape"] = asdict(replace(shape, seq=seq))
                    if mode == MODES[1]:
                        spec["compiler"] = options.compiler
                    found[label] = spec
    return found


def default_compiler() -> str:
    """Inductor where it can generate code: on a GPU, or with a C++ compiler."""
    compilers = any(map(shutil.which, ("c++", "g++", "clang++")))
    return "inductor" if compilers or torch.cuda.is_available() else "aot_eager"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.device == stand_in.NAME:
        stand_in.build()
    rounds: harness.Rounds = {}
    ratios: dict[str, harness.Summary] = {}
    lost: dict[str, str] = {}
    for names in options.models:
        for precision in options.precision:
            specs = specs_of(options, names, precision)
            request = {"steps": options.steps, "clock": options.clock}
            at_once = options.device == "cuda"
            with harness.pool("step", specs, options.ranks, at_once=at_once, lost=lost) as pool:
                own = harness.take_turns(pool, options.rounds, lost, **request)
                if options.kernels:
                    left = {label: each for label, each in pool.items() if label not in lost}
                    for label, each in left.items():
                        print(f"\n{label}, one step:\n{each.ask(kernels=True)['kernels']}")
            if own:
                print()
                harness.print_rounds(own)
                found = ratios_of(own)
                harness.print_ratios(found)
                ratios |= found
                rounds |= own
            print(*unsound(own), sep="\n", end="")
    for label, why in lost.items():
        print(f"{label}: {why}")
    return {"options": vars(options), "rounds": rounds, "ratios": ratios, "lost": lost}


def ratios_of(rounds: harness.Rounds) -> dict[str, harness.Summary]:
    """What runtimes add over what torch's adds; and decoders' figures over torch's and none's."""
    found: dict[str, harness.Summary] = {}

    def over(label: str, own: str, base: str, kind: str) -> None:
        if base in rounds and own != base:
            found[label] = harness.ratio(rounds[own][kind], rounds[base][kind])

    for label, figures in rounds.items():
        name, precision, variant, *mode = label.split(", ")
        variant, _, size = variant.partition("@")
        if variant == "none":
            continue
        at, end = f"@{size}" if size else "", "".join(f", {each}" for each in mode)
        none, torchs = f"{name}, {precision}, none{end}", f"{name}, {precision}, torch{at}{end}"
        if name not in STACKS:
            timed = "device" if "device" in figures else "wall"
            over(f"{label} / none, {timed}", label, none, timed)
            for kind in (timed, "host", "allocated", "reserved"):
                if kind in figures:
                    over(f"{label} / torch, {kind}", label, torchs, kind)
        elif {none, torchs} <= rounds.keys() and variant != "torch":
            mine, theirs = (_added(rounds, each, none) for each in (label, torchs))
            words = f"{name}, {precision}: ({variant} - none) / (torch - none){at}"
            found[words] = harness.ratio(mine, theirs)
    return {**found, **_growth(rounds)}


def _added(rounds: harness.Rounds, label: str, none: str) -> list[float]:
    return harness.added(rounds[label]["host"], rounds[none]["host"])


def _growth(rounds: harness.Rounds) -> dict[str, harness.Summary]:
    """What a block adds among 128 over what one adds among 32; and steps of more ranks."""
    found = {}
    for label, figures in rounds.items():
        name, precision, variant, *_ = label.split(", ")
        few = f"32x9, {precision}, {variant}"
        none = f"{name}, {precision}, none"
        if name == "128x9" and few in rounds and variant != "none" and none in rounds:
            base = _added(rounds, few, f"32x9, {precision}, none")
            times = STACKS["128x9"].blocks / STACKS["32x9"].blocks
            words = f"{precision}, {variant}: added a block, 128x9 / 32x9"
            more = _added(rounds, label, none)
            found[words] = harness.ratio(more, [value * times for value in base])
        runtime, at, size = variant.partition("@")
        first = f"{name}, {precision}, {runtime}@8"
        if at and first in rounds and first != label:
            words = f"{name}, {precision}, {runtime}: {size} ranks / 8"
            found[words] = harness.ratio(figures["host"], rounds[first]["host"])
    return found


def unsound(rounds: harness.Rounds) -> list[str]:
    """A sentence for each variant that did not compute with a model's values, on a GPU.

    A CPU takes as long for NaNs, and denormal numbers are flushed.
    """
    found = []
    for label, figures in rounds.items():
        name, precision, *_ = label.split(", ")
        sound = rounds.get(f"{name}, {precision}, none", {}).get(LOGITS, [math.nan])
        expected = statistics.median(sound)
        seen = figures.get(LOGITS, ()) if "device" in figures else ()
        off = [value for value in seen if not _alike(value, expected)]
        if off:
            found.append(
                f"UNSOUND: {label}: logits had a standard deviation of {off[0]:.3g} after "
                f"{len(off)} of {len(seen)} bursts (none's: {expected:.3g}); pass --fill"
            )
    return found


def _alike(value: float, expected: float) -> bool:
    if math.isnan(expected):
        return math.isfinite(value)
    return expected / APART <= value <= expected * APART


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    default = ("none", "torch", "fsdp2", "packed")
    parser = harness.make_parser(
        __doc__, variants=variants.VARIANTS, default=default, steps=20, devices=variants.DEVICES
    )
    parser.add_argument(
        "--models",
        type=lambda text: [harness.among(MODELS, "+")(part) for part in text.split(",")],
        default="32x9",
        help=f"comma list of {', '.join(MODELS)}",
    )
    known = harness.among(variants.PRECISIONS)
    parser.add_argument("--precision", type=known, help="default: fp32, on a GPU mixed")
    parser.add_argument("--world-size", type=harness.integers, default="8", help="comma list")
    parser.add_argument("--ranks", type=int, default=0, help="real ones; default: none are")
    parser.add_argument("--clock", choices=harness.CLOCKS, default="wall")
    parser.add_argument("--shrink", type=int, default=1, help="divides the number of blocks")
    parser.add_argument("--seq", type=int, help="tokens, instead of the preset's")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--compiled", action="store_true", help="compiled blocks, too")
    parser.add_argument("--compiler", default=default_compiler(), help="backend of torch.compile")
    parser.add_argument("--fill", action="store_true", help="fill gathers in timed steps, too")
    parser.add_argument("--kernels", action="store_true", help="list kernels of a step; GPU only")
    parser.add_argument("--profile", choices=variants.VARIANTS, help="cProfile it, measure nothing")
    options = parser.parse_args(arguments)
    if options.precision is None:
        options.precision = ["mixed" if options.device == "cuda" else "fp32"]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.profile:
        options.variants = [options.profile]
        specs = specs_of(options, options.models[0][:1], options.precision[0])
        profile(next(iter(specs.values())), options.steps)
        return
    print(harness.describe(harness.environment(options.device)))
    result = measure(options)
    harness.write_json(options.json, result, options.device)
    if result["lost"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
