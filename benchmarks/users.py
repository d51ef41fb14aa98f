"""The calls that users of FSDP2 make: fsdp2 over torch's FSDP2, on gloo ranks.

    python -m benchmarks.users                      # all rows, two ranks (HSDP: four): four minutes
    python -m benchmarks.users --rows training,evaluation --rounds 3

Each rank is one process of one thread, and has both models of a row: a Llama-like one with the same
weights, sharded by `fsdp2.fully_shard` and by torch's. In each round both run one burst of the same
number of repetitions, in turn; a burst's time is that of the slowest rank. The figure to watch is
fsdp2 / torch, the median over rounds of the ratio in each round.

The table also has the collectives of one steady repetition, by kind, counted where c10d dispatches
them: the same way for both.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from benchmarks import harness, models, step
from fsdp2.planning.presets import Shape
from fsdp2.testing.blocks import LoraLinear
from fsdp2.testing.counting import collectives

APIS: dict[str, ModuleType] = {"fsdp2": fsdp2, "torch": torch.distributed.fsdp}
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
WARMUP = 3
BATCHES, TOKENS = 3, 4  # of an evaluation; that are generated
SHAPE, BATCH = Shape(128, 6, 384, 4, 2, 512, 64), 2

Call = Callable[[], object]


@dataclass
class Subject:
    """One of the two models of a row, and the input of a repetition."""

    model: Any
    optimizer: torch.optim.Optimizer
    tokens: Tensor
    targets: Tensor

    def backward(self) -> None:
        """Forward, cross entropy, backward."""
        logits = self.model(self.tokens)
        F.cross_entropy(logits.flatten(0, 1), self.targets.flatten()).backward()


# ---- what is repeated: from a subject to its call


def _training(subject: Subject) -> Call:
    def run() -> None:
        subject.backward()
        subject.optimizer.step()
        subject.optimizer.zero_grad()

    return run


def _evaluation(subject: Subject) -> Call:
    subject.model.eval()

    @torch.no_grad()
    def run() -> None:
        for _ in range(BATCHES):
            subject.model(subject.tokens)

    return run


def _generation(subject: Subject) -> Call:
    subject.model.eval()

    @torch.no_grad()
    def run() -> None:
        text = subject.tokens
        for _ in range(TOKENS):
            logits = subject.model(text[:, -subject.tokens.shape[1] :])
            text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)

    return run


def _accumulation(control: str, subject: Subject) -> Call:
    """Two micro-batches; ``control`` is set to ``False`` for the first."""

    def run() -> None:
        for last in (False, True):
            if control:
                getattr(subject.model, control)(last)
            subject.backward()
        subject.optimizer.zero_grad()

    return run


def _clipping(of_fsdp2: bool, subject: Subject) -> Call:
    subject.backward()
    own = of_fsdp2 and isinstance(subject.model, fsdp2.FSDPModule)
    clip: Callable[..., Tensor] = fsdp2.clip_grad_norm_ if own else nn.utils.clip_grad_norm_

    def run() -> None:
        norm = clip(subject.model.parameters(), 1.0)
        float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    return run


def _optimizer(subject: Subject) -> Call:
    subject.backward()
    return subject.optimizer.step


def _state_dict(cpu_offload: bool, subject: Subject) -> Call:
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    return lambda: get_model_state_dict(subject.model, options=options)


def _full_parameters(rank0_only: bool, subject: Subject) -> Call:
    """Ours; torch has only `get_model_state_dict` for it."""
    if not isinstance(subject.model, fsdp2.FSDPModule):
        return _state_dict(rank0_only, subject)
    give = partial(fsdp2.full_parameters, rank0_only=rank0_only, offload_to_cpu=rank0_only)
    return lambda: dict(give(subject.model))


def _full_tensor(subject: Subject) -> Call:
    return lambda: [param.full_tensor() for param in subject.model.parameters()]


@dataclass(frozen=True)
class Row:
    """A line of the table: from a subject to what is timed, and what the model has.

    Attributes:
        sharded: arguments of `fully_shard`.
        by_hand: each unit is unsharded by the user, before.
        asks: torch's model makes the small all-reduce of each root forward with which fsdp2's
            ranks agree that no shard was written: the cost of the agreement, whoever makes it.
        ranks: four are two replicas of two shards.
    """

    repeated: Callable[[Subject], Call]
    sharded: Mapping[str, Any] = field(default_factory=dict)
    mixed: bool = False
    offload: bool = False
    recompute: bool = False
    lora: bool = False
    compiled: bool = False
    by_hand: bool = False
    asks: bool = False
    ranks: int = 2


BY_TORCH, BY_FSDP2 = "`get_model_state_dict`", "`fsdp2.full_parameters`"
KEPT, ASKING = "`reshard_after_forward=False`", "torch's with an all-reduce per forward"
_KEPT = {"reshard_after_forward": False}
ROWS: dict[str, Row] = {
    "training": Row(_training),
    "training, mixed precision": Row(_training, mixed=True),
    "training, activation checkpointing": Row(_training, recompute=True),
    "training, HSDP of 2 x 2 ranks": Row(_training, ranks=4),
    f"training, {KEPT}": Row(_training, _KEPT),
    "training, CPU offload": Row(_training, offload=True),
    "training, LoRA": Row(_training, lora=True),
    "training, compiled blocks": Row(_training, compiled=True),
    "evaluation, 3 batches": Row(_evaluation),
    f"evaluation, {KEPT}": Row(_evaluation, _KEPT),
    f"evaluation, {KEPT} / {ASKING}": Row(_evaluation, _KEPT, asks=True),
    "evaluation, mixed precision": Row(_evaluation, mixed=True),
    "generation, 4 tokens": Row(_generation),
    f"generation, {KEPT}": Row(_generation, _KEPT),
    f"generation, {KEPT} / {ASKING}": Row(_generation, _KEPT, asks=True),
    f"generation, {KEPT}, unsharded by hand": Row(_generation, _KEPT, by_hand=True),
    "generation, mixed precision": Row(_generation, mixed=True),
    "accumulation, two backwards": Row(partial(_accumulation, "")),
    "accumulation, `set_requires_gradient_sync(False)`": Row(
        partial(_accumulation, "set_requires_gradient_sync")
    ),
    "accumulation, `set_reshard_after_backward(False)`": Row(
        partial(_accumulation, "set_reshard_after_backward")
    ),
    "clipping, `torch.nn.utils.clip_grad_norm_`": Row(partial(_clipping, False)),
    "clipping, `fsdp2.clip_grad_norm_` / torch's": Row(partial(_clipping, True)),
    "AdamW (fused)": Row(_optimizer),
    "`full_tensor()` of each parameter": Row(_full_tensor),
    f"full state dict, {BY_TORCH}": Row(partial(_state_dict, False)),
    f"full state dict on rank 0, {BY_TORCH}": Row(partial(_state_dict, True)),
    f"full state dict, {BY_FSDP2} / torch's": Row(partial(_full_parameters, False)),
    f"full state dict on rank 0, {BY_FSDP2} / torch's": Row(partial(_full_parameters, True)),
}


# ---------------------------------------------------------------------------------------------
# In a worker


def make_worker(spec: dict[str, Any]) -> harness.Handler:
    harness.join_ranks(spec, spec["ranks"])
    torch.set_flush_denormal(True)
    shape = Shape(**spec["shape"])

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        row = ROWS[request["row"]]
        built = {name: _subject(api, row, shape, spec["compiler"]) for name, api in APIS.items()}
        calls = {name: row.repeated(subject) for name, subject in built.items()}
        for _ in range(WARMUP):
            for call in calls.values():
                call()
        counts = {name: dict(collectives(call)) for name, call in calls.items()}
        times = _bursts(calls, request["rounds"], request["seconds"])
        return {"collectives": counts, "rounds": times}

    return handle


def _subject(api: ModuleType, row: Row, shape: Shape, compiler: str) -> Subject:
    torch.manual_seed(0)
    model: Any = models.Decoder(shape)
    model.reset_parameters()
    if row.lora:
        model.requires_grad_(False)
        for block in model.blocks:
            for name in ("wq", "wk", "wv", "wo"):
                setattr(block.attention, name, LoraLinear(getattr(block.attention, name), 8))
    if row.recompute:
        models.recompute_blocks(model)
    if row.compiled:
        for block in model.blocks:
            block.compile(backend=compiler)
    arguments: dict[str, Any] = {**row.sharded}
    if row.ranks == 4:
        arguments["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    if row.mixed:
        arguments["mp_policy"] = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if row.offload:
        arguments["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
    for module in (*model.blocks, model):
        api.fully_shard(module, **arguments)
    if row.by_hand:
        for module in (*model.blocks, model):
            module.unshard()
    if row.asks and api is torch.distributed.fsdp:
        model.register_forward_pre_hook(_agreeing(len(model.blocks) + 1))
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    torch.manual_seed(1 + dist.get_rank())
    tokens, targets = models.tokens_of(shape, BATCH)
    return Subject(model, optimizer, tokens, targets)


def _agreeing(units: int) -> Callable[..., None]:
    """A hook by which the ranks of a root forward agree on one number per unit."""
    numbers = torch.zeros(units, dtype=torch.int64)

    def agree(*_: object) -> None:
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        numbers.tolist()

    return agree


def _bursts(calls: dict[str, Call], rounds: int, seconds: float) -> dict[str, list[float]]:
    """ms a repetition in each round, on the slowest rank; the variants take turns to be first."""
    times: dict[str, list[float]] = {name: [] for name in calls}

    def burst(name: str, repetitions: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repetitions):
            calls[name]()
        return (time.perf_counter() - start) * 1e3 / repetitions

    longest = _slowest([max(burst(name, 1) for name in calls)])[0]
    repetitions = max(1, math.ceil(seconds * 1e3 / longest))
    for number in range(rounds):
        gc.collect()
        for name in sorted(calls, reverse=bool(number % 2)):
            times[name].append(burst(name, repetitions))
    return {name: _slowest(own) for name, own in times.items()}


def _slowest(times: Sequence[float]) -> list[float]:
    """The largest of each over the ranks."""
    found = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(each) for each in found]


# ---------------------------------------------------------------------------------------------
# In the parent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    shape = replace(SHAPE, **dict(zip(("dim", "layers", "seq"), options.size, strict=True)))
    request = {"rounds": options.rounds, "seconds": options.seconds}
    found: dict[str, dict[str, Any]] = {}
    for ranks in sorted({ROWS[name].ranks for name in options.rows}):
        spec = {"ranks": ranks, "shape": asdict(shape), "compiler": options.compiler}
        with harness.pool("users", {"ranks": spec}, ranks, at_once=True) as pool:
            for name in (name for name in options.rows if ROWS[name].ranks == ranks):
                found[name] = pool["ranks"].ask(row=name, **request)
                print(f"{name}: {_ratio(found[name])}", flush=True)
    rows = {name: found[name] for name in options.rows}
    ratios = {name: _ratio(row) for name, row in rows.items()}
    return {"options": {**vars(options), **asdict(shape)}, "rows": rows, "ratios": ratios}


def worst(prefixes: Sequence[str], result: dict[str, Any]) -> harness.Summary:
    """The ratio that is the largest of the rows that begin with one of some words."""
    rows = [row for name, row in result["rows"].items() if name.startswith(tuple(prefixes))]
    return max(map(_ratio, rows), key=lambda found: found.median)


def _ratio(row: dict[str, Any]) -> harness.Summary:
    return harness.ratio(*(row["rounds"][name] for name in APIS))


def table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Header and rows."""
    rows: list[tuple[object, ...]] = []
    for name, row in result["rows"].items():
        ours, torchs = (harness.summarize(row["rounds"][api]).median for api in APIS)
        shown = (f"{ours:.1f}", f"{torchs:.1f}", _ratio(row))
        rows.append((name, *shown, *_counts(row["collectives"])))
    header = ("call", "ms", "torch's ms", "time / torch's")
    return (*header, "all-gathers", "reduce-scatters", "all-reduces", "others"), rows


def _counts(found: dict[str, dict[str, int]]) -> list[str]:
    """Counts of each kind, torch's in parentheses; other kinds with their names."""
    ours, torchs = (found[api] for api in APIS)
    cells = [f"{ours.get(kind, 0)} ({torchs.get(kind, 0)})" for kind in KINDS]
    others = sorted({*ours, *torchs} - {*KINDS})
    return [*cells, ", ".join(f"{k}: {ours.get(k, 0)} ({torchs.get(k, 0)})" for k in others)]


def page_table(result: dict[str, Any]) -> str:
    """The model, and the table in Markdown."""
    options = result["options"]
    header = ("call", "time / torch's", "all-gathers", "reduce-scatters", "all-reduces, others")
    shown = [
        (name, ratio, gathers, scatters, ", ".join(filter(None, others)))
        for name, _, _, ratio, gathers, scatters, *others in table(result)[1]
    ]
    what = f"{options['layers']} blocks of width {options['dim']}, collectives of one repetition"
    return f"{what} (torch FSDP2's in parentheses):\n\n{harness.markdown(header, shown)}"


_WAYS = ("full state dict, {}", "full state dict on rank 0, {}")
WHOLE = {
    "`full_tensor()` of each parameter": ("`full_tensor()`",),
    "full state dict by `get_model_state_dict`": tuple(w.format(BY_TORCH) for w in _WAYS),
    "full state dict by `fsdp2.full_parameters`": tuple(w.format(BY_FSDP2) for w in _WAYS),
}
"""Ways to whole tensors, and how their rows begin."""
SPOKEN_OF = {
    "training": ("training",),
    "evaluation": ("evaluation", "generation"),
    "accumulation": ("accumulation",),
    "whole": WHOLE["full state dict by `fsdp2.full_parameters`"],
}
"""Figures of pages' sentences, and how their rows begin."""


def extremes(prefixes: Sequence[str], result: dict[str, Any]) -> str:
    """The smallest and the largest median of the rows that begin with one of some words."""
    rows = [row for name, row in result["rows"].items() if name.startswith(tuple(prefixes))]
    medians = [_ratio(row).median for row in rows]
    return f"{min(medians):.2f} to {max(medians):.2f}"


def _rows(text: str) -> list[str]:
    """The rows that begin with one of some words."""
    words = tuple(text.split(","))
    found = [name for name in ROWS if name.startswith(words)]
    if not found:
        raise argparse.ArgumentTypeError(f"no row begins with {text!r}; rows: {', '.join(ROWS)}")
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__, rounds=9)
    parser.add_argument(
        "--rows", type=_rows, default=list(ROWS), help="comma list of words that rows begin with"
    )
    size = ",".join(map(str, (SHAPE.dim, SHAPE.layers, SHAPE.seq)))
    parser.add_argument(
        "--size", type=harness.integers, default=size, help="width, blocks and tokens"
    )
    parser.add_argument("--compiler", default=step.default_compiler())
    parser.add_argument("--seconds", type=float, default=0.3, help="of a burst (default 0.3)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(f"{harness.describe(harness.environment())}\n")
    result = measure(options)
    print("\n" + harness.table(*table(result)))
    harness.write_json(options.json, result)


if __name__ == "__main__":
    main()
