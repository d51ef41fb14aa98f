"""What a step does, counted exactly: operators, Python functions and built-in ones."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

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
