"""Buffers on the meta device that are in no state dict: the modules' own code computes their
values.

    rotary.inv_freq, persistent=False
      rotary.reset_parameters()      if it sets the buffer; that of `nn.Embedding` sets no scale
                                     of a subclass
      model._init_weights(rotary)    of the nearest module around it, as transformers' models have
    neither sets it                  it would have no values: refused

Both run on a copy of the module with memory only for buffers: no parameter is initialized or
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def unsaved(model: nn.Module) -> list[str]:
    """Names of buffers on the meta device that no state dict has."""
    return [
        f"{prefix}.{key}" if prefix else key
        for prefix, member in model.named_modules()
        for key in sorted(member._non_persistent_buffers_set)
        if (buffer := member._buffers.get(key)) is not None and buffer.is_meta
    ]


def recomputed(model: nn.Module, name: str) -> Tensor | None:
    """The value that its module's initialization gives a buffer; changes nothing."""
    prefix, _, key = name.rpartition(".")
    owner = model.get_submodule(prefix)
    for initialise in _initialisers(model, prefix):
        twin = _twin(owner)
        before = twin._buffers[key]
        assert before is not None
        version = before._version
        with torch.no_grad():
            initialise(twin)
        value = twin._buffers[key]
        # `.data` counts no version, but leaves other numbers than the zeros that were there.
        if value is not None and (
            value is not before or value._version != version or bool(value.any())
        ):
            return value
    return None


def _initialisers(model: nn.Module, prefix: str) -> Iterator[Callable[[Any], object]]:
    """A module's own initializer, then ``_init_weights`` of modules around it, from inside."""
    if callable(getattr(model.get_submodule(prefix), "reset_parameters", None)):
        yield lambda twin: twin.reset_parameters()
    parts = prefix.split(".") if prefix else []
    for depth in range(len(parts), -1, -1):
        found = getattr(model.get_submodule(".".join(parts[:depth])), "_init_weights", None)
        if callable(found):
            yield found


def _twin(module: nn.Module) -> nn.Module:
    """A module of the same class and attributes: its buffers have memory, its parameters none."""
    kind = getattr(type(module), "_fsdp2_original", type(module))
    twin: Any = object.__new__(kind)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = {
        key: param if param is None else nn.Parameter(_meta(param), param.requires_grad)
        for key, param in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        key: buffer if buffer is None else torch.zeros_like(buffer, device="cpu")
        for key, buffer in module._buffers.items()
    }
    found: nn.Module = twin
    return found


def _meta(param: Tensor) -> Tensor:
    return torch.empty(param.shape, dtype=param.dtype, device="meta")
