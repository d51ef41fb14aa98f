"""What a step's kernels are, by kind: how many, and how long. Needs a CUDA device.

A sharding runtime's own kernels are the copies, casts, fills and small arithmetic that a step has
beyond those of the same step without sharding.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import stats

# The first pattern that a kernel's name matches, ignoring case, says its kind. Names as torch and
# its libraries give them: nvjet and cutlass are matrix products, fmha and flash are attention.
KINDS = {
    "memcpy, memset": r"^mem(cpy|set)",
    "attention": r"flash|fmha|attention|sdpa",
    "matmul": r"gemm|nvjet|cutlass|cublas|xmma|wgmma|splitk",
    "copy, cast, cat": r"copy|chunk_cat|CatArray|split_with_sizes",
    "fill": r"fill",
    "norm": r"norm",
    "loss, embedding": r"softmax|nll_loss|embedding|index|gather|scatter",
    "multi-tensor": r"multi_tensor|foreach",
    "reduction": r"reduce",
    "elementwise": r"elementwise",
}
OTHER = "other"

# kinds that a model without sharding spends its step on, and no runtime adds to
COMPUTE = ("attention", "matmul", "norm", "loss, embedding")


def kind_of(name: str) -> str:
    for kind, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return OTHER


def profile(step: Callable[[], object], steps: int) -> dict[str, dict[str, float]]:
    """Kernels of a step, by name: {"count": a step, "ms": a step}."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"count": 0.0, "ms": 0.0})
    for event in profiler.events() or []:
        if event.device_type != torch.autograd.DeviceType.CUDA or _is_annotation(event):
            continue
        kernel = found[event.name]
        kernel["count"] += 1 / steps
        kernel["ms"] += event.time_range.elapsed_us() / 1e3 / steps
    return dict(found)


def _is_annotation(event: Any) -> bool:
    """Whether it is a `record_function` range projected onto the device: it is no kernel."""
    by_flag = getattr(event, "is_user_annotation", False)
    return by_flag or event.name.startswith(("FSDP::", "fsdp2::", "ProfilerStep", "## "))


def by_kind(kernels: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Sums for every kind, in the order of `KINDS`."""
    sums = {kind: {"count": 0.0, "ms": 0.0} for kind in (*KINDS, OTHER)}
    for name, kernel in kernels.items():
        for key, value in kernel.items():
            sums[kind_of(name)][key] += value
    return sums


def runtimes_own(
    kernels: dict[str, dict[str, float]], none: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Count and ms of the kernels that are not the model's: those beyond the step of "none"."""
    mine, floor = by_kind(kernels), by_kind(none)
    kinds = [kind for kind in mine if kind not in COMPUTE]
    return {
        key: sum(mine[kind][key] - floor[kind][key] for kind in kinds) for key in ("count", "ms")
    }


def report(profiles: dict[str, dict[str, dict[str, float]]], top: int = 12) -> str:
    """Tables: kernels by kind for each variant, the runtime's own, and the names behind it."""
    sums = [by_kind(kernels) for kernels in profiles.values()]
    rows = [(kind, *(_cell(each[kind]) for each in sums)) for kind in (*KINDS, OTHER)]
    none = profiles.get("none")
    if none is not None:
        own = [_cell(runtimes_own(kernels, none)) for kernels in profiles.values()]
        rows.append(("runtime's own (beyond none)", *own))
    parts = ["kernels a step: count, ms", stats.table(("kind", *profiles), rows)]
    for label, kernels in profiles.items():
        if none is None or label == "none":
            continue
        beyond = {
            name: kernel["ms"] - (none[name]["ms"] if name in none else 0.0)
            for name, kernel in kernels.items()
        }
        rows = [
            (name[:90], f"{kernels[name]['count']:.0f}", f"{beyond[name]:.3f}", kind_of(name))
            for name in sorted(beyond, key=lambda name: beyond[name], reverse=True)[:top]
        ]
        parts.append(f"\n{label}: kernels with most time beyond none, ms a step")
        parts.append(stats.table(("kernel", "count", "ms beyond none", "kind"), rows))
    return "\n".join(parts)


def _cell(sums: dict[str, float]) -> str:
    return f"{sums['count']:.0f}  {sums['ms']:.2f}"
