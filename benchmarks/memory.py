"""Memory that a step allocates, on a GPU or without one: the same model under each runtime.

    python benchmarks/memory.py                            # both models, four variants, 6 settings
    python benchmarks/memory.py --preset 2.8b --holders    # and what is alive at each peak
    python benchmarks/memory.py --preset 2.8b --device cuda

Collectives move nothing; rank 0 of 8. Each figure is of a process of its own, one at a time.

On the stand-in device (`fsdp2/testing/stand_in`, needs a C++ compiler and ninja) fsdp2 and torch's
FSDP2 use streams, events and transient storages as on a GPU, and every allocation is counted at the
size that was asked for. ``reserved`` is what torch's caching allocator would hold for the same
allocations, streams and frees at full scale (`benchmarks/caching.py`). On a GPU all figures are the
allocator's, which rounds. "packed" is fsdp2 over an engine that does not coalesce, where a unit's
parameters travel in one buffer.

The models are those of `benchmarks/step.py` with every width and the number of tokens divided by
``--shrink``, on a GPU by 1 (heads keep their number). Weights, activations and logits all are
products of two of these, so bytes shrink by its square, and are printed multiplied by it. RMSNorm
is one operator on CUDA alone; on the stand-in LayerNorm without bias takes its place, which saves
as much.

    forward   the most at once until the loss is there, GB (10^9 bytes)
    backward  the most at once from there on
    eval      the most at once in a forward under no_grad
    loss      what is left when the loss is there
    reserved  the most of steps that begin with an empty cache: rounding, fragments, streams' pools
    reserved, loss    GPU: until the first step's loss
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any, Protocol

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F
from torch import nn

import fsdp2
from benchmarks import options as common
from benchmarks import stats, variants, workers
from benchmarks.caching import CachingAllocator
from benchmarks.models import PRESETS, Llama, LlamaConfig, recompute_blocks
from fsdp2.core.config import PACK_BELOW
from fsdp2.testing.stand_in import device as stand_in

KINDS = ("forward", "backward", "eval", "loss")
RESERVED_LOSS, RESERVED = "reserved, loss", "reserved"
COMPARED = {  # with torch's FSDP2: the largest of these
    "forward / torch's": ("forward",),
    "step / torch's": ("forward", "backward"),
    "reserved / torch's": (RESERVED,),
}
STEPS = 3  # the order of units is known after the first
RESHARD = {"default": None, "always": True, "never": False}
VARIANTS = ("none", "torch", "fsdp2", "packed")
WORLD_SIZE = 8
SHOWN = 6  # of those that hold memory at a peak


# ---------------------------------------------------------------------------------------------
# In a worker


class Meter(Protocol):
    """A device's account of its memory, in bytes."""

    def live(self) -> int:
        """What is allocated."""

    def peak(self) -> int:
        """The most that was allocated at once since the last call."""

    def holders(self) -> dict[str, int]:
        """What held it, where that is known."""


class StandInMeter:
    """Of the stand-in."""

    live = staticmethod(stand_in.live_bytes)
    peak = staticmethod(stand_in.peak_bytes)
    holders = staticmethod(stand_in.at_peak)


class GpuMeter:
    """Of torch's caching allocator."""

    def live(self) -> int:
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found

    def holders(self) -> dict[str, int]:
        return {}


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    on_gpu = spec["device"] == "cuda"
    device = variants.prepare_process(spec["device"], WORLD_SIZE)
    config = LlamaConfig(**spec["config"])
    with torch.device("meta"):
        model = Llama(config)
    if not on_gpu:
        _replace_norms(model)
    if spec["checkpoints"]:
        recompute_blocks(model)
    reshard = RESHARD[spec["reshard"]]
    arguments = {} if reshard is None else {"reshard_after_forward": reshard}
    model = variants.place(model, spec["variant"], "mixed", WORLD_SIZE, device, **arguments)
    if isinstance(model, fsdp2.FSDPModule):  # which parameters are small goes by their full scale
        packed = spec["variant"] == "packed"
        threshold = variants.ALL_PACKED if packed else PACK_BELOW // spec["scale"]
        model.set_packing_threshold(threshold)
    tokens, targets = torch.randint(config.vocab, (2, config.batch, config.seq)).to(device)
    meter: Meter = GpuMeter() if on_gpu else StandInMeter()

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        for _ in range(STEPS):
            found = measure_step(model, tokens, targets, meter)
        measured = measure_reserved if on_gpu else replay_reserved
        found.update(measured(model, tokens, targets, spec["scale"]))
        meter.peak()
        with torch.no_grad():
            model(tokens)
        found["eval"] = meter.peak()
        return found

    return handle


def _replace_norms(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.RMSNorm):
                norm = nn.LayerNorm(child.normalized_shape, bias=False, device="meta")
                setattr(module, name, norm)


def _loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def measure_step(
    model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, meter: Meter
) -> dict[str, Any]:
    """Bytes at each peak of one step, and what held them."""
    meter.peak()
    loss = _loss(model, tokens, targets)
    found: dict[str, Any] = {"holders": {"forward": meter.holders()}}
    found["loss"], found["forward"] = meter.live(), meter.peak()
    loss.backward()
    found["holders"]["backward"] = meter.holders()
    found["backward"] = meter.peak()
    model.zero_grad(set_to_none=True)
    return found


def replay_reserved(
    model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, scale: int
) -> dict[str, int]:
    """What a GPU's allocator would come to hold, for sizes that are ``scale`` times as large."""
    stand_in.start_log()
    for _ in range(STEPS):
        _loss(model, tokens, targets).backward()
        model.zero_grad(set_to_none=True)
    allocator = CachingAllocator(scale)
    allocator.replay(stand_in.end_log())
    return {RESERVED: allocator.reserved // scale}


def measure_reserved(
    model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, scale: int
) -> dict[str, int]:
    """What a GPU's allocator comes to hold, when it begins with what is alive between steps."""
    assert scale == 1
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    found = {}
    for _ in range(STEPS):
        loss = _loss(model, tokens, targets)
        found.setdefault(RESERVED_LOSS, torch.cuda.max_memory_reserved())
        loss.backward()
        model.zero_grad(set_to_none=True)
    found[RESERVED] = torch.cuda.max_memory_reserved()
    return found


# ---------------------------------------------------------------------------------------------
# In the parent


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.device == stand_in.NAME:
        stand_in.build()
    settings = itertools.product(options.presets, (False, True), RESHARD, options.variants)
    return [
        measure_one(options.device, preset, checkpoints, reshard, variant, options.shrink)
        for preset, checkpoints, reshard, variant in settings
        if variant != "none" or reshard == "default"  # it has nothing to reshard
    ]


def measure_one(
    device: str, preset: str, checkpoints: bool, reshard: str, variant: str, shrink: int
) -> dict[str, Any]:
    """Bytes of one variant and setting at full scale, and who holds them."""
    spec = {
        "device": device,
        "variant": variant,
        "reshard": reshard,
        "checkpoints": checkpoints,
        "config": dataclasses.asdict(shrunk(PRESETS[preset], shrink)),
        "scale": shrink**2,
    }
    with workers.pool("memory", {variant: spec}) as pool:
        found = pool[variant].ask()
    holders = {phase: _scaled(each, shrink) for phase, each in found.pop("holders").items()}
    return {**spec, "preset": preset, "bytes": _scaled(found, shrink), "holders": holders}


def _scaled(sizes: dict[str, int], shrink: int) -> dict[str, int]:
    return {name: nbytes * shrink**2 for name, nbytes in sizes.items()}


def shrunk(config: LlamaConfig, by: int) -> LlamaConfig:
    """With widths, vocabulary and tokens divided by ``by``."""
    smaller = {name: getattr(config, name) // by for name in ("dim", "ffn", "vocab", "seq")}
    return dataclasses.replace(config, **smaller)


def report(results: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Header and rows of the table."""
    kinds = [kind for kind in (*KINDS, RESERVED_LOSS, RESERVED) if kind in results[0]["bytes"]]
    compared = [label for label, each in COMPARED.items() if set(each) <= set(kinds)]
    torchs = {_setting(each): each["bytes"] for each in results if each["variant"] == "torch"}
    rows = []
    for each in results:
        base = torchs.get(_setting(each)) if each["variant"] in variants.OURS else None
        rows.append(
            (
                *_setting(each),
                each["variant"],
                *(f"{each['bytes'][kind] / 1e9:.3f}" for kind in kinds),
                *("" if base is None else _over(each["bytes"], base, label) for label in compared),
            )
        )
    return ("model", "recomputes", "reshard", "variant", *kinds, *compared), rows


def _setting(result: dict[str, Any]) -> tuple[str, str, str]:
    return (
        result["preset"],
        "yes" if result["checkpoints"] else "no",
        result["reshard"] if result["variant"] != "none" else "",
    )


def _over(sizes: dict[str, int], base: dict[str, int], label: str) -> str:
    mine, other = (max(each[kind] for kind in COMPARED[label]) for each in (sizes, base))
    return f"{mine / other:.3f}"


def print_holders(results: list[dict[str, Any]]) -> None:
    """For each peak, the operators whose results take most of it."""
    for each in results:
        setting = f"recomputes {each['checkpoints']}, reshard {each['reshard']}"
        print(f"\n{each['preset']}, {each['variant']}, {setting}")
        for phase, holders in each["holders"].items():
            largest = sorted(holders.items(), key=lambda item: -item[1])[:SHOWN]
            parts = ", ".join(f"{what} {nbytes / 1e9:.2f}" for what, nbytes in largest)
            print(f"  {phase}: {parts}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory that a step allocates.")
    parser.add_argument("--preset", type=common.among(PRESETS), dest="presets", default="1.1b,2.8b")
    parser.add_argument("--device", choices=(stand_in.NAME, "cuda"), default=stand_in.NAME)
    parser.add_argument("--shrink", type=int, help="divide widths (default 8, on a GPU 1)")
    common.add_variants(parser, VARIANTS)
    parser.add_argument("--holders", action="store_true", help="what is alive at each peak")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    options.shrink = options.shrink or (1 if options.device == "cuda" else 8)
    if options.holders and options.device == "cuda":
        parser.error("--holders: a GPU's allocator does not say what holds its memory")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    missing = stand_in.missing_tool()
    if options.device == stand_in.NAME and missing is not None:
        raise SystemExit(f"benchmarks/memory.py compiles a device and needs {missing}")
    print(stats.describe(stats.environment(options.device)) + "\n")
    results = measure(options)
    print(stats.table(*report(results)))
    if options.holders:
        print_holders(results)
    stats.write_json(options.json, options.device, results)


if __name__ == "__main__":
    main()
