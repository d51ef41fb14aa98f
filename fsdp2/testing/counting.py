"""Exact counts of what code does: operators, calls of Python functions, copied bytes.

    python, built_in = called(step)        # calls, by the function's name
    operators(step)["aten.copy_.default"]  # operators that torch dispatches
    collectives(step)["all_gather"]        # collectives of all process groups
    copied_bytes(step).total()             # what fsdp2's own copies and casts read and write

Counts are the same on every machine, so a test can compare them. Run a step twice before you count
it: the first two steps allocate buffers and learn the order of units.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp2.core.device.kernels import TorchKernels


class Operators(TorchDispatchMode):
    """Counts operators while it is entered.

    Attributes:
        counts: how often each operator was dispatched, by its name.
        on_dtensors: how many operators a DTensor took part in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.on_dtensors = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Count one operator and run it."""
        self.counts[str(func)] += 1
        self.on_dtensors += any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


def operators(run: Callable[[], object]) -> Counter[str]:
    """The operators that ``run`` dispatches, by name."""
    with Operators() as found:
        run()
    return found.counts


def called(run: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """The functions that ``run`` calls on this thread, and how often.

    The garbage collector is off meanwhile: it would call what older objects call at their end.

    Returns:
        Python functions by module and name, as ``fsdp2.core.device.buffers.acquire``; and built-in
        ones by qualified name.
    """
    python: Counter[str] = Counter()
    built_in: Counter[str] = Counter()

    def count(frame: FrameType, event: str, function: object) -> None:
        if event == "call":
            python[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            built_in[getattr(function, "__qualname__", "?")] += 1

    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return python, built_in


_COLLECTIVES = {
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
}
"""Names in `collectives`, by a part of the names of c10d's operators."""


def collectives(run: Callable[[], object]) -> Counter[str]:
    """The collectives that ``run`` calls on this rank, by kind.

    They are counted where c10d dispatches them, whatever called them, on whatever thread. A
    coalesced collective is one.

    Returns:
        Counts of "all_gather", "reduce_scatter" and "all_reduce"; of others by the name of c10d's
        operator.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    names = [event.name for event in profiled.events() or ()]
    found: Counter[str] = Counter()
    for name in (name.removeprefix("c10d::") for name in names if name.startswith("c10d::")):
        kind = (known for part, known in _COLLECTIVES.items() if part in name)
        found[next(kind, name.strip("_"))] += 1
    return found


COPIES = ("copy", "copy_many", "copy_strided", "split_copy", "chunk_cat", "to_host")
"""The functions of `fsdp2.core.device.kernels.TorchKernels` that copy or cast."""


def copied_bytes(run: Callable[[], object]) -> Counter[str]:
    """Bytes that fsdp2's own copies and casts read and write in ``run``, by the tensors' sizes.

    By the name of the kernel; nothing where another runtime runs.
    """
    found: Counter[str] = Counter()

    def counted(name: str) -> object:
        kernel = getattr(TorchKernels, name)

        def call(*args: object, **kwargs: object) -> None:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            found[name] += sum(tensor.nbytes for tensor in tensors)
            kernel(*args, **kwargs)

        # Some are torch's own functions, called without the object.
        return staticmethod(call) if isinstance(vars(TorchKernels)[name], staticmethod) else call

    with ExitStack() as stack:
        for name in COPIES:
            stack.enter_context(mock.patch.object(TorchKernels, name, counted(name)))
        run()
    return found
