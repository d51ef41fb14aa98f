"""Measurements by a process of the machine that it runs on: operators, its own host time, gloo.

    measure_products, measure_operators  ──> tables of `Measured`
    measure_host   ──> its host times and excess: small models, planned and run
    measure_gloo   ──> curves of collectives, in processes that have a process group
    measure_steps  ──> seconds of sharded steps of the same models, there as well
    contention_of  ──> their time beyond the plans from tables and curves

A figure is the median of the faster half of repeated runs, so that other work on the machine has
little influence. A rank with one thread reads its own CPU time, which excludes waiting for a core.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from fsdp2.core.device.collectives import (
    GroupCollectives,
    ReduceKind,
    Work,
    run_all_gather,
    scatter_sums,
)
from fsdp2.core.device.one_off import run_barrier
from fsdp2.core.device.process_groups import default_group
from fsdp2.paper.null_group import null_world
from fsdp2.paper.stage import GlooOnPaper
from fsdp2.planning.hardware import Contention, Curve, Hardware, Measured
from fsdp2.planning.planner import Plan, plan
from fsdp2.planning.presets import Batch, Block, Model, Shape, loss, make_batch
from fsdp2.planning.rehearsal import Settings, shard_as_planned
from fsdp2.record.notes import Operation

Clock = Callable[[], float]
ENOUGH = 0.03
"""Seconds that one figure is measured for, or `RUNS` runs if those take longer."""
RUNS = 6
ROWS = (64, 512, 2048)
WIDTHS = (64, 128, 384, 512, 1408)
MOST_FLOPS = 3e9
NUMELS = (2**6, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22)
AROUND = 2**23
"""Bytes that are taken turns over."""
SENT = (2**10, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)


def seconds(run: Callable[[], object], clock: Clock) -> float:
    """Seconds of a run: the median of the faster half."""
    run()
    found: list[float] = []
    while len(found) < RUNS or (sum(found) < ENOUGH and len(found) < 400):
        start = clock()
        run()
        found.append(clock() - start)
    return fast(found)


def fast(found: Sequence[float]) -> float:
    """The median of the faster half."""
    return statistics.median(sorted(found)[: max(len(found) // 2, 1)])


def clock_of(threads: int) -> Clock:
    """This thread's CPU time, if it is the only one that computes."""
    return time.thread_time if threads == 1 else time.perf_counter


# ---- operators


Products = dict[str, list[tuple[float, float, float]]]


def measure_products(clock: Clock, dtype: torch.dtype = torch.float32) -> Products:
    """FLOPs, bytes, and FLOPs a second of products and of attention."""
    found: Products = {"mm": []}
    for rows in ROWS:
        for inner in WIDTHS:
            for outer in WIDTHS:
                flops = 2 * rows * inner * outer
                if flops > MOST_FLOPS or inner > outer:
                    continue
                x, y = torch.randn(rows, inner).to(dtype), torch.randn(rows, outer).to(dtype)
                weight = torch.randn(outer, inner).to(dtype)
                # Those of a linear layer: forward, of its input and of its weight.
                took = seconds(lambda x=x, w=weight: x @ w.t(), clock)  # type: ignore[misc]
                took += seconds(lambda y=y, w=weight: y @ w, clock)  # type: ignore[misc]
                took += seconds(lambda x=x, y=y: y.t() @ x, clock)  # type: ignore[misc]
                nbytes = x.nbytes + y.nbytes + weight.nbytes
                found["mm"].append((flops, nbytes, 3 * flops / took))
    for seq in (32, 128, 512):
        for heads, head_dim in ((8, 16), (16, 64)):
            for name, point in _attention(clock, heads, seq, head_dim):
                found.setdefault(name, []).append(point)
    return found


def _attention(
    clock: Clock, heads: int, seq: int, head_dim: int
) -> Iterator[tuple[str, tuple[float, float, float]]]:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    q, k, v = (torch.randn(2, heads, seq, head_dim, requires_grad=True) for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    grad = torch.randn_like(out)
    pairs = 2 * heads * seq * seq
    with torch.no_grad():
        took = seconds(forward, clock)
    yield name, (2 * pairs * 2 * head_dim, 4 * q.nbytes, 2 * pairs * 2 * head_dim / took)
    took = seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), clock)
    flops = 2 * pairs * 5 * head_dim
    yield f"{name}_backward", (flops, 8 * q.nbytes, flops / took)


def measure_operators(clock: Clock) -> dict[str, Curve]:
    """Bytes and seconds of each operator, without what the smallest takes.

    As in a step, what is read was written a while ago, and what is written is new memory: turns are
    taken over tensors that together are larger than a core's own cache.
    """
    found: dict[str, Curve] = {}
    for numel in NUMELS:
        turns = max(1, min(24, AROUND // (4 * numel)))
        tables = [_operators(numel) for _ in range(turns)]
        for name, (_, nbytes) in tables[0].items():
            run = _in_turns([table[name][0] for table in tables])
            found.setdefault(name, []).append((nbytes, seconds(run, clock)))
    return {name: _without_floor(curve) for name, curve in found.items()}


def _in_turns(runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Each of them in turn, of which the results live for a round."""
    kept: deque[object] = deque(maxlen=len(runs))
    turn = cycle(runs)

    def run() -> None:
        kept.append(next(turn)())

    return run


def _without_floor(curve: Curve) -> Curve:
    floor = min(took for _, took in curve)
    least = 0.0
    found = []
    for nbytes, took in sorted(curve):
        least = max(least, took - floor)  # noise is no reason to be faster with more
        found.append((float(nbytes), least))
    return found


def _operators(numel: int) -> dict[str, tuple[Callable[[], object], int]]:
    """By name, something to run and the bytes that it reads and writes."""
    aten: Any = torch.ops.aten
    shape = (max(numel // 128, 1), min(numel, 128))
    x, y, z = (torch.rand(shape) + 0.5 for _ in range(3))
    index = torch.zeros(shape[0], dtype=torch.int64)
    logs, one = torch.log_softmax(x, -1), x.nbytes
    half = torch.empty(shape, dtype=torch.bfloat16)
    halves = x.chunk(2, -1)
    weight = torch.rand(shape[1])
    steps = torch.ones(())
    table: dict[str, tuple[Callable[[], object], int]] = {
        "add": (lambda: x + y, 3 * one),
        "mul": (lambda: x * y, 3 * one),
        "div": (lambda: x / 3.0, 2 * one),
        "neg": (lambda: -x, 2 * one),
        "pow": (lambda: x**2, 2 * one),
        "rsqrt": (lambda: torch.rsqrt(x), 2 * one),
        "sqrt": (lambda: torch.sqrt(x), 2 * one),
        "exp": (lambda: torch.exp(x), 2 * one),
        "tanh": (lambda: torch.tanh(x), 2 * one),
        "silu": (lambda: F.silu(x), 2 * one),
        "silu_backward": (lambda: aten.silu_backward(y, x), 3 * one),
        "gelu": (lambda: F.gelu(x), 2 * one),
        "gelu_backward": (lambda: aten.gelu_backward(y, x), 3 * one),
        "threshold_backward": (lambda: aten.threshold_backward(y, x, 0.0), 3 * one),
        "mean": (lambda: x.mean(-1, keepdim=True), one),
        "sum": (lambda: x.sum(0, keepdim=True), one),
        "linalg_vector_norm": (lambda: torch.linalg.vector_norm(x), one),
        "cat": (lambda: torch.cat(halves, -1), 2 * one),
        "clone": (lambda: x.clone(), 2 * one),
        "copy": (lambda: z.copy_(x), 2 * one),
        "_to_copy": (lambda: x.to(torch.bfloat16), one + half.nbytes),
        "_log_softmax": (lambda: torch.log_softmax(x, -1), 2 * one),
        "_log_softmax_backward_data": (
            lambda: aten._log_softmax_backward_data(y, logs, -1, torch.float32),
            3 * one,
        ),
        "embedding": (lambda: F.embedding(index, x), 2 * one),
        "embedding_dense_backward": (
            lambda: aten.embedding_dense_backward(y, index, 256, -1, False),
            one + 256 * y.shape[1] * 4,
        ),
        "native_layer_norm": (lambda: F.layer_norm(x, x.shape[1:], weight), 2 * one),
        "_fused_adamw": (
            lambda: torch._fused_adamw_(
                *([x], [y], [z], [z], [], [steps]),
                lr=0.0,
                beta1=0.9,
                beta2=0.9,
                weight_decay=0.0,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            ),
            5 * one,
        ),
    }
    return table


# ---- the host


Size = tuple[Shape, int]
"""A model, and how many sequences a rank takes."""

SMALL = (Shape(dim=16, layers=6, ffn=32, heads=2, kv_heads=2, vocab=32, seq=8), 1)
"""A size at which only the host takes time."""
LARGER = (
    (Shape(dim=64, layers=3, ffn=160, heads=4, kv_heads=4, vocab=256, seq=64), 4),
    (Shape(dim=96, layers=3, ffn=256, heads=4, kv_heads=4, vocab=256, seq=96), 8),
    (Shape(dim=192, layers=2, ffn=512, heads=4, kv_heads=4, vocab=256, seq=128), 12),
)
PHASES = ("forward", "backward")


def measure_host(base: Hardware, table: Measured) -> Measured:
    """The additional time of small models beyond their plans.

    Args:
        base: the machine, as far as it is known.
        table: its operators.

    Returns:
        ``table`` with ``host`` and ``excess``.
    """
    plain, alone, pair = _times(SMALL, 0), _planned(base, SMALL, 1), _planned(base, SMALL, 2)
    counts = _count(alone)
    host = {name: plain[name] / counts[name] for name in PHASES}
    rest = _rest(host, counts, _times(SMALL, 1))
    host["unit"] = max(rest, 0.0) / counts["unit"]
    counts, seen = _count(pair), _times(SMALL, 2)
    rest = _rest(host, counts, seen) - host["unit"] * counts["unit"]
    host["collective"] = max(rest, 0.0) / counts["collective"]
    host["optimizer"] = seen["optimizer"] / counts["optimizer"]
    excess: dict[str, Curve] = {name: [(0.0, 0.0)] for name in PHASES}
    for size in LARGER:
        made, seen = _planned(base, size, 1), _times(size, 0)
        for name in PHASES:
            excess[name].append(_excess(made, name, seen[name] - _count(made)[name] * host[name]))
    return replace(table, host=host, excess=excess)


def _rest(host: Mapping[str, float], counts: Mapping[str, int], seen: Mapping[str, float]) -> float:
    return sum(seen[name] - host[name] * counts[name] for name in PHASES)


def _excess(made: Plan, phase: str, seen: float) -> tuple[float, float]:
    """Bytes of an operator, and what it takes more than the plan's tables say; on average."""
    spans = [span for span in made.timing.spans if span.operation.phase == phase]
    planned = sum(span.end - span.start for span in spans)
    nbytes = sum(span.operation.nbytes for span in spans)
    return nbytes / len(spans), max(seen - planned, 0.0) / len(spans)


def _planned(base: Hardware, size: Size, mesh: int | tuple[int, ...]) -> Plan:
    shape, batch = size
    return plan(
        lambda: Model(shape),
        lambda: make_batch(shape, batch),
        units={Block},
        loss=loss,
        optimizer=_optimizer,
        mesh=mesh,
        hardware=base,
        clip=1.0,
    )


def _optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-6, fused=True)


def _count(made: Plan) -> dict[str, int]:
    """How often a plan has what `Measured.host` has a figure of."""
    found = dict.fromkeys((*PHASES, "optimizer", "collective"), 0)
    operations: list[Operation] = list(made.rehearsal.recording.operations)
    for note in operations:
        if note.phase == "optimizer":
            found["optimizer"] += note.tensors
        else:
            found["collective" if note.kind == "collective" else note.phase] += 1
    found["unit"] = 1 + sum(a.unit != b.unit for a, b in pairwise(operations))
    return found


def _times(size: Size, ranks: int) -> dict[str, float]:
    """Seconds of the phases of a step: 0 ranks means without the engine, others on null groups."""
    shape, count = size
    model = Model(shape)
    clock = clock_of(torch.get_num_threads())
    with ExitStack() as stack:
        if ranks:
            stack.enter_context(null_world(ranks, kind=GlooOnPaper))
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
            shard_as_planned(model, mesh, Settings(mesh=(ranks,)), {Block})
        rows = list(_steps(model, make_batch(shape, count), clock, 30 if size is SMALL else 14))
    columns = zip(*rows[3:], strict=True)
    return {n: fast(c) for n, c in zip((*PHASES, "optimizer"), columns, strict=True)}


def _steps(model: nn.Module, batch: Batch, clock: Clock, count: int) -> Iterator[list[float]]:
    """Seconds of forward, backward and the rest of each step."""
    optimizer = _optimizer(model.parameters())
    for _ in range(count):
        marks = [clock()]
        made = loss(model, batch)
        marks.append(clock())
        made.backward()
        marks.append(clock())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        marks.append(clock())
        yield [end - start for start, end in pairwise(marks)]


# ---- gloo


def _meshes(device: torch.device) -> Iterator[DeviceMesh]:
    """Meshes over all ranks; for an even number above two also over pairs."""
    world = default_group().size()
    yield init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    if world > 2 and world % 2 == 0:
        names = ("replicate", "shard")
        yield init_device_mesh(device.type, (world // 2, 2), mesh_dim_names=names)


def measure_gloo(device: torch.device) -> dict[str, list[tuple[int, int, Curve]]]:
    """Curves of collectives over all ranks, and over pairs that all communicate at a time."""
    found: dict[str, list[tuple[int, int, Curve]]] = {}
    for whole in _meshes(device):
        mesh = whole["shard"]
        for kind in ("all-gather", "reduce-scatter", "all-reduce"):
            curve = [(float(nbytes), _collective(mesh, kind, nbytes, device)) for nbytes in SENT]
            found.setdefault(kind, []).append((whole.size(), mesh.size(), curve))
    return found


def _collective(mesh: DeviceMesh, kind: str, nbytes: int, device: torch.device) -> float:
    """Seconds of one, of batches that all ranks begin together."""
    group = mesh.get_group()
    whole = torch.zeros(nbytes // 4, device=device)
    own = whole[: whole.numel() // group.size()].clone()
    replicas, total = GroupCollectives(group, device, asynchronous=False), ReduceKind(average=False)

    def run() -> None:
        if kind == "reduce-scatter":
            scatter_sums(own, whole, group)
            return
        gathers = kind == "all-gather"
        work: Work | None
        work = run_all_gather(group, whole, own) if gathers else replicas.all_reduce(whole, total)
        if work is not None:
            work.wait()

    many = 4 if nbytes > 2**20 else 12
    found = []
    for _ in range(8):
        run_barrier(group)
        start = time.perf_counter()
        for _ in range(many):
            run()
        found.append((time.perf_counter() - start) / many)
    return fast(found)


# ---- sharded steps


Steps = list[tuple[tuple[int, ...], int, float]]
"""For each mesh and each of `SIZES`: seconds per step."""

SIZES = (SMALL, *LARGER)
WARM, GROUPS, IN_GROUP = 4, 4, 4
"""Steps that are left out, and those whose means' median counts: a run's rate is a mean, too."""


def measure_steps(device: torch.device) -> Steps:
    """Measure models sharded over all ranks; with more than two, also over pairs of replicas."""
    found: Steps = []
    for mesh in _meshes(device):
        shape = tuple(mesh.shape)
        for number, (model_shape, count) in enumerate(SIZES):
            model = Model(model_shape)
            shard_as_planned(model, mesh, Settings(mesh=shape), {Block})
            batch, many = make_batch(model_shape, count), WARM + GROUPS * IN_GROUP
            took = [sum(phases) for phases in _steps(model, batch, time.perf_counter, many)]
            means = [
                statistics.mean(took[start : start + IN_GROUP])
                for start in range(WARM, many, IN_GROUP)
            ]
            found.append((shape, number, statistics.median(means)))
    return found


def contention_of(base: Hardware, steps: Steps) -> tuple[Contention, ...]:
    """The additional time of sharded steps beyond their plans.

    A step is fitted by ``slower * rest + collectives + wait * number of collectives``, over the
    sizes of a mesh, with least squares of the relative errors.

    Args:
        base: the machine, with tables and curves.
        steps: of `measure_steps`, of all numbers of ranks.
    """
    found = []
    for mesh in dict.fromkeys(tuple(shape) for shape, _, _ in steps):
        points = []
        for shape, number, seconds in steps:
            if tuple(shape) == mesh:
                made = _planned(base, SIZES[number], mesh)
                sent = made.time.communication
                count = collectives_of(made)
                points.append((made.time.step - sent, count, seconds - sent, seconds))
        slower, wait = _fitted(points)
        found.append(Contention(math.prod(mesh), mesh[-1], slower, wait))
    return tuple(found)


def collectives_of(made: Plan) -> int:
    """How many a step has, that of clipping too."""
    return sum(note.kind == "collective" for note in made.rehearsal.recording.operations)


def _fitted(points: Iterable[tuple[float, int, float, float]]) -> tuple[float, float]:
    """The two factors for (rest, count, collectives, total); no factor is negative."""
    rows = [(rest / whole, count / whole, both / whole) for rest, count, both, whole in points]
    xx, xy, yy = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    xz, yz = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        slower, wait = (xz * yy - yz * xy) / determinant, (yz * xx - xz * xy) / determinant
        if slower >= 0 and wait >= 0:
            return slower, wait
        if slower < 0:
            return 0.0, yz / yy
    return max(xz / xx, 0.0), 0.0
