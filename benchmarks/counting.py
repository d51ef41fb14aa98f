"""What a step does, counted exactly: operators, Python functions and built-in ones, bytes."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import variants

STEADY = 3  # steps until buffers are made and the order of units is known


class Operators(TorchDispatchMode):
    """Counts operators, by name, and those that a DTensor takes part in."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.on_dtensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        self.on_dtensors += any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


def operators(run: Callable[[], Any]) -> Counter[str]:
    """The operators that ``run`` dispatches, by name."""
    with Operators() as found:
        run()
    return found.counts


def called(run: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
    """What ``run`` calls: Python functions as module.name, and built-in ones by name.

    The garbage collector would call what objects of before call at their end.
    """
    python: Counter[str] = Counter()
    built_in: Counter[str] = Counter()

    def count(frame: FrameType, event: str, function: Any) -> None:
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


COPIES = ("copy", "copy_many", "split_copy", "chunk_cat", "to_host")
"""Of `fsdp2.core.kernels.TorchKernels`: those that copy or cast."""


def copied_bytes(run: Callable[[], Any]) -> Counter[str]:
    """Bytes that fsdp2's own copies and casts read and write in ``run``, by the tensors' sizes.

    By the name of the kernel; nothing where another runtime runs.
    """
    from fsdp2.core.kernels import TorchKernels  # not at the top: other variants are without fsdp2

    found: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., None]:
        kernel = getattr(TorchKernels, name)

        def call(self: TorchKernels, *args: Any, **kwargs: Any) -> None:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            found[name] += sum(tensor.nbytes for tensor in tensors)
            kernel(self, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in COPIES:
            stack.enter_context(mock.patch.object(TorchKernels, name, counted(name)))
        run()
    return found


def steady_step(
    model: nn.Module, variant: str, precision: str, world_size: int
) -> tuple[nn.Module, Callable[[], None]]:
    """A model of blocks, placed on the CPU, and its step, which has been run until it is steady."""
    model = variants.place(model, variant, precision, world_size, torch.device("cpu"))
    dtype = variants.input_dtype(variant, precision)
    x = torch.randn(4, model.width, dtype=dtype, requires_grad=True)
    step = variants.step_of(model, x)
    for _ in range(STEADY):
        step()
    return model, step
