"""Memory that a step allocates, without a GPU: the same model under each runtime, byte by byte.

    python benchmarks/memory.py                            # both models, three runtimes, 6 settings
    python benchmarks/memory.py --preset 2.8b --holders    # and what is alive at each peak

On the stand-in device (`benchmarks/stand_in`, needs a C++ compiler and ninja) fsdp2 and torch's
FSDP2 use streams, events and transient storages as on a GPU, and every allocation is counted at the
size that was asked for. What a caching allocator adds by rounding and fragmentation is not.
Collectives move nothing; rank 0 of 8.

The models are those of `benchmarks/step.py` with every width and the number of tokens divided by
``--shrink`` (heads keep their number). Weights, activations and logits all are products of two of
these, so bytes shrink by its square, and are printed multiplied by it. RMSNorm is one operator on
CUDA alone; here LayerNorm without bias takes its place, which saves as much.

    forward   the most at once until the loss is there, GB (10^9 bytes)
    backward  the most at once from there on
    eval      the most at once in a forward under no_grad
    loss      what is left when the loss is there
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import options as common
from benchmarks import stats, variants, workers
from benchmarks.models import PRESETS, Llama, LlamaConfig
from benchmarks.stand_in import device as stand_in

KINDS = ("forward", "backward", "eval", "loss")
RESHARD = {"default": None, "always": True, "never": False}
VARIANTS = ("none", "torch", "fsdp2")
WORLD_SIZE = 8
SHOWN = 6  # of those that hold memory at a peak


# ---------------------------------------------------------------------------------------------
# In a worker


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    device = variants.prepare_process(stand_in.NAME, WORLD_SIZE)
    config = LlamaConfig(**spec["config"])
    with torch.device("meta"):
        model = Llama(config)
    _replace_norms(model)
    if spec["checkpoints"]:
        for block in model.blocks:
            _checkpoint(block)
    reshard = RESHARD[spec["reshard"]]
    arguments = {} if reshard is None else {"reshard_after_forward": reshard}
    model = variants.place(model, spec["variant"], "mixed", WORLD_SIZE, device, **arguments)
    tokens, targets = torch.randint(config.vocab, (2, config.batch, config.seq)).to(device)

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        for _ in range(3):  # the order of units is known after the first
            found = measure_step(model, tokens, targets)
        stand_in.peak_bytes()
        with torch.no_grad():
            model(tokens)
        found["eval"] = stand_in.peak_bytes()
        return found

    return handle


def _replace_norms(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.RMSNorm):
                norm = nn.LayerNorm(child.normalized_shape, bias=False, device="meta")
                setattr(module, name, norm)


def _checkpoint(block: nn.Module) -> None:
    run = block.forward
    block.forward = lambda *args: checkpoint(run, *args, use_reentrant=False)


def measure_step(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Bytes at each peak of one step, and what held them."""
    stand_in.peak_bytes()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    found: dict[str, Any] = {"holders": {"forward": stand_in.at_peak()}}
    found["loss"], found["forward"] = stand_in.live_bytes(), stand_in.peak_bytes()
    loss.backward()
    found["holders"]["backward"] = stand_in.at_peak()
    found["backward"] = stand_in.peak_bytes()
    model.zero_grad(set_to_none=True)
    return found


# ---------------------------------------------------------------------------------------------
# In the parent


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    stand_in.build()
    settings = itertools.product(options.presets, (False, True), RESHARD, options.variants)
    return [
        measure_one(preset, checkpoints, reshard, variant, options.shrink)
        for preset, checkpoints, reshard, variant in settings
        if variant != "none" or reshard == "default"  # it has nothing to reshard
    ]


def measure_one(
    preset: str, checkpoints: bool, reshard: str, variant: str, shrink: int
) -> dict[str, Any]:
    """Bytes of one variant and setting at full scale, and who holds them."""
    spec = {
        "variant": variant,
        "reshard": reshard,
        "checkpoints": checkpoints,
        "config": dataclasses.asdict(shrunk(PRESETS[preset], shrink)),
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
    rows = [
        (
            each["preset"],
            "yes" if each["checkpoints"] else "no",
            each["reshard"] if each["variant"] != "none" else "",
            each["variant"],
            *(f"{each['bytes'][kind] / 1e9:.3f}" for kind in KINDS),
        )
        for each in results
    ]
    return ("model", "recomputes", "reshard", "variant", *KINDS), rows


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
    parser.add_argument("--shrink", type=int, default=8, help="divide widths (default 8)")
    common.add_variants(parser, VARIANTS)
    parser.add_argument("--holders", action="store_true", help="what is alive at each peak")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    missing = stand_in.missing_tool()
    if missing is not None:
        raise SystemExit(f"benchmarks/memory.py compiles a device and needs {missing}")
    results = measure(options)
    print(stats.table(*report(results)))
    if options.holders:
        print_holders(results)
    stats.write_json(options.json, "cpu", results)


if __name__ == "__main__":
    main()
