"""Memory: of a step beside torch's FSDP2, of whole tensors beside their bounds, and as planned.

    python -m benchmarks.memory                              # both models, all settings
    python -m benchmarks.memory --presets 2.8b --device cuda
    python -m benchmarks.memory --whole                      # full_parameters and the like, 2 ranks
    python -m benchmarks.memory --strategies                 # ZeRO's stages, planned

**A step.** Collectives move nothing; rank 0 of 8; each figure is of a process of its own. On the
stand-in device (`fsdp2/testing/stand_in`, needs a C++ compiler and ninja) fsdp2 and torch's FSDP2
use streams and storages as on a GPU, and every allocation is counted at the requested size. On a
GPU figures are the allocator's, which rounds. The models are those of `benchmarks.step` with every
width and the tokens divided by ``--shrink``: weights, activations and logits all are products of
two of these, so bytes shrink by its square, and are printed multiplied by it.

    forward, backward   the most at once until the loss is there, and after it
    eval                the most at once in a forward under no_grad
    loss                the rest when the loss is there
    reserved            GPU: the most that the allocator holds, from an empty cache on

**Whole tensors** (``--whole``). Each of two gloo ranks counts the bytes of all storages that are
alive, at every operator. Its bound is what the documentation promises.

**Strategies** (``--strategies``). A plan of a Llama of 1.5 billion parameters on 8 ranks of an H100
node, one sequence of 1,024 tokens each: fp32 shards and AdamW, bf16 compute. Of each of `SAMPLES`
equal parts of the step the fullest moment counts.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp2.planning
from benchmarks import harness, models, variants
from fsdp2.core.config import PACK_BELOW
from fsdp2.planning import presets
from fsdp2.planning.presets import Shape
from fsdp2.testing.blocks import LlamaBlock, llama_blocks
from fsdp2.testing.stand_in import device as stand_in
from fsdp2.tracing.record import categories

KINDS = ("forward", "backward", "eval", "loss", "reserved")
STEPS = 3  # the order of units is known after the first
RESHARD = {"default": None, "always": True, "never": False}
VARIANTS = ("none", "torch", "fsdp2", "packed")
WORLD_SIZE = 8
MIB = 2**20


# ---------------------------------------------------------------------------------------------
# A step


def make_worker(spec: dict[str, Any]) -> harness.Handler:
    return _whole_worker(spec) if "cases" in spec else _step_worker(spec)


def _step_worker(spec: dict[str, Any]) -> harness.Handler:
    on_gpu = spec["device"] == "cuda"
    device = variants.prepare_process(spec["device"], WORLD_SIZE)
    shape = Shape(**spec["shape"])
    with torch.device("meta"):
        model: nn.Module = models.Decoder(shape)
    if not on_gpu:  # RMSNorm is one operator on CUDA alone; LayerNorm saves as much
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.RMSNorm):
                    norm = nn.LayerNorm(child.normalized_shape, bias=False, device="meta")
                    setattr(module, name, norm)
    if spec["checkpoints"]:
        models.recompute_blocks(model)
    reshard = RESHARD[spec["reshard"]]
    arguments = {} if reshard is None else {"reshard_after_forward": reshard}
    model = variants.place(model, spec["variant"], "mixed", WORLD_SIZE, device, **arguments)
    if spec["variant"] == "fsdp2":  # which parameters are small goes by their full scale
        model.set_tuning(pack_below=PACK_BELOW // spec["scale"])  # type: ignore[operator]
    tokens, targets = models.tokens_of(shape, 1, device)

    def live() -> int:
        return torch.cuda.memory_allocated() if on_gpu else stand_in.live_bytes()

    def peak() -> int:
        """The most bytes since the last call."""
        if not on_gpu:
            return stand_in.peak_bytes()
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if on_gpu:
            torch.cuda.empty_cache()
        for _ in range(STEPS):
            peak()
            loss = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
            found["loss"], found["forward"] = live(), peak()
            loss.backward()
            del loss
            found["backward"] = peak()
            model.zero_grad(set_to_none=True)
        if on_gpu:
            found["reserved"] = torch.cuda.memory_reserved()
        with torch.no_grad():
            model(tokens)
        found["eval"] = peak()
        return {name: nbytes * spec["scale"] for name, nbytes in found.items()}

    return handle


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of bytes at full scale for each model, setting and variant."""
    if options.device == stand_in.NAME:
        stand_in.build()
    rows = []
    settings = itertools.product(options.presets, (False, True), RESHARD, options.variants)
    for preset, checkpoints, reshard, variant in settings:
        if variant == "none" and reshard != "default":  # it has nothing to reshard
            continue
        by, full = options.shrink, models.PRESETS[preset]
        smaller = {name: getattr(full, name) // by for name in ("dim", "ffn", "vocab", "seq")}
        setting = {"variant": variant, "reshard": reshard, "checkpoints": checkpoints}
        shape = asdict(replace(full, **smaller))
        spec = {**setting, "device": options.device, "shape": shape, "scale": by**2}
        found = harness.measure("memory", {variant: spec}, 1)[variant]
        rows.append({"preset": preset, **setting, "bytes": {k: v[0] for k, v in found.items()}})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """GB of each row, and the step's peak over that of torch's FSDP2."""
    kinds = [kind for kind in KINDS if kind in rows[0]["bytes"]]
    names = ("preset", "checkpoints", "reshard")

    def most(row: dict[str, Any]) -> int:
        return max(row["bytes"]["forward"], row["bytes"]["backward"])

    torchs = {tuple(r[n] for n in names): most(r) for r in rows if r["variant"] == "torch"}
    shown = []
    for row in rows:
        base = torchs.get(tuple(row[name] for name in names))
        ratio = f"{most(row) / base:.3f}" if base else ""
        sizes = [f"{row['bytes'][kind] / 1e9:.3f}" for kind in kinds]
        shown.append((*(row[name] for name in names), row["variant"], *sizes, ratio))
    header = ("model", "recomputes", "reshard", "variant", *kinds, "step / torch's")
    return harness.table(header, shown)


# ---------------------------------------------------------------------------------------------
# Whole tensors

SLACK = 0.02
"""By how much of the bound small tensors may exceed it: norms, indices, padding."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators return, until they are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._ranges: dict[int, int] = {}  # begin and end of each storage's memory

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage once; shards are storages over parts of a group's."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
        if not size or any(b <= begin < end for b, end in self._ranges.items()):
            return
        self._ranges[begin] = begin + size
        weakref.finalize(storage, self._gone, begin)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, begin: int) -> None:
        self.live -= self._ranges.pop(begin) - begin

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is Tensor:
                self.add(leaf)
        return result


def _bounds(ranks: int, blocks: int, dim: int) -> dict[str, tuple[int, int]]:
    """Bytes that each function may hold on rank 0, and on the others."""
    sizes = [param.numel() * 4 for param in llama_blocks(1, dim).parameters()]
    block, tensor = sum(sizes), max(sizes)
    model, piece = blocks * block, tensor // ranks
    shards = model // ranks
    return {
        "whole": (model + block,) * 2,
        "deferred": (shards + block + tensor,) * 2,
        "load_from_rank0": (tensor + shards + model, tensor + shards),
        "full_parameters": (shards + block + tensor,) * 2,
        "full_parameters rank0_only": (shards + block + tensor, shards + piece),
        "gathered": (shards + model,) * 2,
        "gathered rank0_only": (2 * piece + shards + model, 2 * piece + shards),
    }


def _whole_worker(spec: dict[str, Any]) -> harness.Handler:
    ranks = spec["ranks"]
    rank = harness.join_ranks(spec, ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    def make() -> Any:
        return llama_blocks(spec["blocks"], spec["dim"])

    def sharded(model: Any) -> Any:
        for block in model.blocks:
            fsdp2.fully_shard(block, mesh=mesh)
        return fsdp2.fully_shard(model, mesh=mesh)

    def deferred() -> Any:
        with fsdp2.wrap.deferred(mesh, {LlamaBlock}):
            return make()

    def load() -> Any:
        with torch.device("meta"):
            model = make()
        weights = make().state_dict() if rank == 0 else None
        return fsdp2.load_from_rank0(sharded(model), weights)

    def run(case: str, count: LiveBytes) -> Any:
        made = {"whole": lambda: sharded(make()), "deferred": deferred, "load_from_rank0": load}
        if case in made:
            return made[case]()
        name, _, rank0_only = case.partition(" ")
        model = deferred()
        count.peak = count.live
        if name == "gathered":
            with fsdp2.gathered(model, rank0_only=bool(rank0_only)):
                return model
        for _ in fsdp2.full_parameters(model, rank0_only=bool(rank0_only)):
            pass
        return model

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        with LiveBytes() as count:
            model = run(request["case"], count)
        del model
        by_rank: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(by_rank, count.peak)
        return {"peaks": by_rank}

    return handle


def measure_whole(ranks: int, blocks: int, dim: int) -> list[dict[str, Any]]:
    """The peak of each rank beside its bound, in bytes, for each function."""
    spec = {"ranks": ranks, "blocks": blocks, "dim": dim, "cases": True}
    rows = []
    with harness.pool("memory", {"ranks": spec}, ranks, at_once=True) as pool:
        for case, (first, other) in _bounds(ranks, blocks, dim).items():
            peaks = pool["ranks"].ask(case=case)["peaks"]
            rows.append({"case": case, "peaks": peaks, "bounds": [first] + [other] * (ranks - 1)})
    return rows


def print_whole(rows: list[dict[str, Any]]) -> bool:
    """Print peaks and bounds; whether all are within."""
    within = True
    for row in rows:
        pairs = list(zip(row["peaks"], row["bounds"], strict=True))
        shown = "   ".join(f"{peak / MIB:7.2f} / {bound / MIB:7.2f}" for peak, bound in pairs)
        is_within = all(peak <= bound * (1 + SLACK) for peak, bound in pairs)
        print(f"{row['case']:28s} {shown}{'' if is_within else '   OVER'}")
        within = within and is_within
    return within


# ---------------------------------------------------------------------------------------------
# Strategies, planned

PRESET, SEQ, SAMPLES = "llama-1b", 1024, 160
STRATEGIES = ("replicated", "zero1", "zero2", "zero3")
PARAMETERS, STATES, GRADIENTS = "parameters", "optimizer states", "gradients"
UNSHARDED, ACTIVATIONS, TEMPORARY = "unsharded units", "activations", "temporary results"
SHOWN = {
    **{categories.SHARDS: PARAMETERS, categories.OPTIMIZER: STATES},
    **{categories.GRADIENTS: GRADIENTS, categories.REDUCTIONS: GRADIENTS},
    **{categories.GATHERED: UNSHARDED, categories.KEPT: UNSHARDED},
    **{categories.ACTIVATIONS: ACTIVATIONS},
    **{categories.TEMPORARY: TEMPORARY, categories.MODEL: TEMPORARY},
}
"""The categories of a plan, by the names that a newcomer knows."""


def planned(strategy: Any) -> fsdp2.planning.Plan:
    """A step with this strategy."""
    shape = replace(presets.PRESETS[PRESET], seq=SEQ)
    precision = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        fsdp2.shard_model(model, {presets.Block}, strategy=strategy, mesh=mesh, mp_policy=precision)

    return fsdp2.plan(
        lambda: presets.Model(shape),
        lambda: presets.make_batch(shape, 1),
        shard=shard,
        loss=presets.loss,
        mesh=(WORLD_SIZE, 1) if strategy == "replicated" else WORLD_SIZE,
        hardware="h100",
    )


def course(plan: fsdp2.planning.Plan) -> dict[str, Any]:
    """Milliseconds and megabytes of a plan: its end, phases, peak, and moments."""
    end = plan.time.step * 1e3
    fullest: list[Counter[str]] = [Counter() for _ in range(SAMPLES)]
    last, reached = Counter[str](), 0
    for moment in plan.timeline().memory:
        part = min(int(moment.time / 1e3 / end * SAMPLES), SAMPLES - 1)
        for between in range(reached, part + 1):
            fullest[between] = max(fullest[between], last, key=Counter.total)
        last, reached = _shown(moment.bytes), part
        fullest[part] = max(fullest[part], last, key=Counter.total)
    fullest[reached + 1 :] = [last] * (SAMPLES - 1 - reached)
    moments = [[round(n * end / SAMPLES, 2), _megabytes(each)] for n, each in enumerate(fullest)]
    begins: dict[str, float] = {}
    for each in plan.timeline().slices:
        if each.operation in ("forward", "backward", "optimizer"):
            begins.setdefault(each.operation, each.start / 1e3)
    changed = [n for n, each in enumerate(moments) if not n or each[1] != moments[n - 1][1]]
    return {
        "end": round(end, 2),
        "phases": {phase: round(when, 2) for phase, when in begins.items()},
        "peak": _megabytes(_shown(plan.memory.peak.categories)),
        "before": _megabytes(_shown(plan.memory.before.categories)),
        "moments": [moments[n] for n in changed],
    }


def _shown(found: Mapping[str, int]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for category, nbytes in found.items():
        totals[SHOWN[category]] += nbytes
    return totals


def _megabytes(found: Mapping[str, int]) -> dict[str, int]:
    return {name: round(nbytes / 1e6) for name, nbytes in found.items() if nbytes > 5e5}


# ---------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    devices = (stand_in.NAME, "cuda")
    parser = harness.make_parser(__doc__, variants=VARIANTS, rounds=None, devices=devices)
    known = harness.among(models.PRESETS)
    parser.add_argument("--presets", type=known, default="1.1b,2.8b", help="comma list")
    parser.add_argument("--shrink", type=int, help="divides widths: 8, on a GPU 1")
    parser.add_argument("--whole", action="store_true", help="whole tensors, in place of a step")
    parser.add_argument("--ranks", type=int, default=2, help="of --whole")
    parser.add_argument("--blocks", type=int, default=16, help="of --whole")
    parser.add_argument("--dim", type=int, default=256, help="width of a block, of --whole")
    parser.add_argument("--strategies", action="store_true", help="plans, in place of a step")
    options = parser.parse_args(arguments)
    options.shrink = options.shrink or (1 if options.device == "cuda" else 8)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    within, results = True, None
    if options.whole:
        print(f"{options.ranks} ranks, {options.blocks} blocks; MiB, peak / bound")
        results = measure_whole(options.ranks, options.blocks, options.dim)
        within = print_whole(results)
    elif options.strategies:
        results = {strategy: course(planned(strategy)) for strategy in STRATEGIES}
        kinds = tuple(dict.fromkeys(SHOWN.values()))
        rows = [
            (name, *(found["peak"].get(kind, 0) for kind in kinds), sum(found["peak"].values()))
            for name, found in results.items()
        ]
        print(harness.table(("at the peak, MB", *kinds, "all"), rows))
    else:
        missing = stand_in.missing_tool() if options.device == stand_in.NAME else None
        if missing is not None:
            raise SystemExit(f"memory: the stand-in is compiled and needs {missing}")
        results = measure(options)
        print(table(results))
    harness.write_json(options.json, results, options.device, timed=False)
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
