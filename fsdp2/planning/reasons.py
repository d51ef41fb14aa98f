"""Why a model cannot be rehearsed: one sentence, with the module and the line of its source.

    with explaining(model): model(batch)      values, devices, autocast, FlexAttention

Other exceptions propagate unchanged: a run would raise them, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.tracing.paper.devices import AutocastError

_OWN = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
"""Folders whose lines are not the user's."""


@contextmanager
def explaining(where: str, model: nn.Module | None = None) -> Iterator[None]:
    """Raise a sentence in place of torch's own words about ``meta``."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ShardingStateError):
            raise
        _explain(error, where, model)
        raise


def _explain(error: Exception, where: str, model: nn.Module | None) -> None:
    """Raise what ``error`` means; return where that is not known."""
    place, words = _place(error, where, model), str(error)
    if isinstance(error, AutocastError):
        raise coded(
            ValueError,
            "plan-autocast",
            f"{place} enters torch.autocast, which plan() does not support; leave it out there, "
            f"and pass precision=MixedPrecisionPolicy(…) to plan()",
        ) from None
    if "FlexAttention" in words or "flex_attention" in words:
        raise coded(
            ValueError,
            "plan-flex-attention",
            f"{place} calls flex_attention, which plan() cannot simulate; use "
            f"scaled_dot_product_attention for the plan (in transformers: "
            f"attn_implementation='sdpa')",
        ) from error
    if "not on the expected device" in words or "to be on the same device" in words:
        raise coded(
            ValueError,
            "plan-memory",
            f"{place} combines a tensor in CPU memory with tensors on the device, which fails on "
            f"a GPU too; create it on the device, for example with device=x.device, or register "
            f"it as a buffer",
        ) from error
    if "not compiled with CUDA" in words or "no NVIDIA driver" in words:
        raise coded(
            ValueError,
            "plan-cuda",
            f"{place} uses a GPU, but a plan has none: {_first(words)}; use the device of the "
            f"input instead of torch.cuda",
        ) from error
    if _is_about_values(error, words.lower()):
        raise coded(
            ValueError,
            "plan-values",
            f"{place} reads the values of a tensor, but a plan has only shapes: {_first(words)}; "
            f"pass a variant of the model whose shapes do not depend on values, for example with "
            f"equally many tokens per expert",
        ) from error


def _is_about_values(error: Exception, words: str) -> bool:
    known = "meta" in words or "data-dependent" in words
    return known and isinstance(error, NotImplementedError | RuntimeError | TypeError)


def _first(words: str) -> str:
    """The first sentence."""
    return words.partition("\n")[0].partition(". ")[0].rstrip(".!")


def _place(error: Exception, where: str, model: nn.Module | None) -> str:
    """Whose code it was, and the line: the innermost that is neither torch's nor fsdp2's."""
    names = {} if model is None else {id(m): name for name, m in model.named_modules()}
    module = line = ""
    trace = error.__traceback__
    while trace is not None:
        frame: FrameType = trace.tb_frame
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)) is not None:
            module = f"module '{names[id(owner)] or '(root)'}'"
        if not frame.f_code.co_filename.startswith(_OWN):
            line = f"{frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{module or where} ({line})" if line else module or where
