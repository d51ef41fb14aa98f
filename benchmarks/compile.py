"""The step of a Llama-like model with its blocks compiled, against the same blocks in eager mode.

    python benchmarks/compile.py                          # on the CPU; inductor, if there is a C++
    python benchmarks/compile.py --backend aot_eager      # compiler, else aot_eager
    python benchmarks/compile.py --preset 1.1b --device cuda
    python benchmarks/compile.py --dim 256 --layers 8 --seq 64 --json result.json

Each variant (no sharding, torch's FSDP2, fsdp2) runs eagerly and with every block compiled in place
(``block.compile(fullgraph=True)``, before `fully_shard`), in a process of its own; all take turns.
The process group is null: collectives return at once, so that a step's time is the model's own
plus the runtime's host time. A step is forward, cross entropy, backward and `zero_grad`.

Per variant: ms a step, that over the same variant's eager step, and over torch's FSDP2 compiled.
`compile` is the seconds of the first step, when nothing is cached. Between bursts a process keeps
its model alone on a GPU (`step.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks import options as common
from benchmarks import stats, step, variants, workers
from benchmarks.models import PRESETS, Llama, LlamaConfig
from fsdp2.testing.null_group import fill_gathered

EAGER = "eager"
BACKENDS = ("inductor", "aot_eager", "eager")
SHAPES = ("dim", "layers", "ffn", "vocab", "heads", "kv_heads", "batch", "seq")


# ---------------------------------------------------------------------------------------------
# In a worker


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    variant, precision, world_size = spec["variant"], spec["precision"], spec["world_size"]
    device = variants.prepare_process(spec["device"], world_size)
    config = LlamaConfig(**spec["config"])
    with torch.device("meta"):
        model = Llama(config)
    if spec["backend"] is not None:
        for block in model.blocks:
            block.compile(backend=spec["backend"], fullgraph=True)
    model = variants.place(model, variant, precision, world_size, device)
    run = step.make_step(model, config, device)
    variants.observe(model, fill_gathered)
    start = time.perf_counter()
    run()
    first = time.perf_counter() - start
    step.give_back(device)

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        with step.prepared(model, run, device, spec["fill"]):
            graphs = _graphs()
            figures = step.time_burst(run, request["steps"], device)
            assert _graphs() == graphs, "something was compiled again while it was timed"
            return {**figures, "first": first, "graphs": graphs}

    return handle


def _graphs() -> int:
    """Graphs compiled so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


# ---------------------------------------------------------------------------------------------
# In the parent


def default_backend(device: str) -> str:
    """Inductor where it can generate code: on a GPU, or with a C++ compiler."""
    compilers = ("c++", "g++", "clang++")
    return BACKENDS[0 if device == "cuda" or any(map(shutil.which, compilers)) else 1]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = PRESETS[options.preset]
    chosen = {name: getattr(options, name) for name in SHAPES if getattr(options, name)}
    config = dataclasses.replace(config, **chosen)
    backend = options.backend or default_backend(options.device)
    print(
        f"{config.parameters / 1e6:.2f} M parameters in {config.layers} blocks, {config.batch} x "
        f"{config.seq} tokens, world size {options.world_size}, {options.precision}, {backend}\n"
        f"{stats.describe(stats.environment(options.device))}\n"
    )
    specs = {
        label(variant, mode): {
            "variant": variant,
            "backend": mode,
            "precision": options.precision,
            "world_size": options.world_size,
            "device": options.device,
            "fill": options.fill,
            "config": dataclasses.asdict(config),
        }
        for variant in options.variants
        for mode in (None, backend)
    }
    with workers.pool("compile", specs) as pool:
        answers = workers.take_turns(pool, options.rounds, steps=options.steps)
    return {
        "config": config,
        "options": {**vars(options), "backend": backend},
        "rounds": {
            name: {kind: [answer[kind] for answer in each] for kind in each[0]}
            for name, each in answers.items()
        },
    }


def label(variant: str, backend: str | None) -> str:
    return f"{variant} {EAGER if backend is None else 'compiled'}"


def report(result: dict[str, Any]) -> None:
    rounds = result["rounds"]
    some = next(iter(rounds.values()))
    kind = "device" if "device" in some else "wall"
    torchs = rounds.get("torch compiled")
    rows = []
    for name, values in rounds.items():
        own = rounds[label(name.split()[0], None)]
        compiled = name.endswith("compiled")
        rows.append(
            (
                name,
                stats.summarize(values[kind]),
                stats.summarize(values["host"]),
                stats.ratio(values[kind], own[kind]) if compiled else "",
                stats.ratio(values[kind], torchs[kind]) if compiled and torchs else "",
                f"{values['first'][0]:.1f}" if compiled else "",
                values["graphs"][0],
            )
        )
    header = ("variant", kind, "host", "/ eager", "/ torch compiled", "compile, s", "graphs")
    print(stats.table(header, rows))
    for sentence in step.unsound(rounds, label("none", None)):
        print(sentence)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compiled blocks against eager ones.")
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    for name in SHAPES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of the preset's")
    parser.add_argument("--backend", choices=BACKENDS, help="default: inductor, if it can be used")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument(
        "--precision", choices=variants.PRECISIONS, help="default: fp32, on a GPU mixed"
    )
    parser.add_argument(
        "--variants",
        type=common.among(variants.VARIANTS),
        default="none,torch,fsdp2",
        help="comma list of none, torch, fsdp2",
    )
    common.add_fill(parser)
    common.add_timing(parser, 20, rounds=5, clock=False)
    options = parser.parse_args(arguments)
    options.precision = options.precision or ("mixed" if options.device == "cuda" else "fp32")
    unknown = set(options.variants) - {"none", "torch", "fsdp2"}
    if unknown:
        parser.error(f"--variants: {', '.join(sorted(unknown))} has no blocks to compile")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    result = measure(options)
    report(result)
    stats.write_json(options.json, options.device, result)


if __name__ == "__main__":
    main()
