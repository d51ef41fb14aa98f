"""Devices that a model names itself, and contexts that belong to a device.

x.to("cuda"), torch.ones(8, device="cuda:0"), x.cuda()    on paper, as all the rest
torch.tensor([1, 2], device="meta")                       by way of the CPU, so that it is known
torch.autocast("cuda", torch.bfloat16)                    refused: paper does not follow it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fsdp2.tracing.record.notes import replaced

_META = torch.device("meta")
_CPU = torch.device("cpu")
_OF_DATA = (torch.tensor, torch.as_tensor)


class AutocastError(RuntimeError):
    """A model entered autocast."""


class NamedDevices(TorchFunctionMode):
    """An accelerator that is named inside is paper; the CPU stays the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.backward:
            with self:  # forwards may run in it again
                return _backward(*args, **given)
        if func is torch.Tensor.cuda:
            return args[0].to(_META)
        if _is_named(given.get("device")):
            given["device"] = _META
        if func in _OF_DATA and torch.device(given.get("device") or _CPU) == _META:
            # torch drops the numbers, and no mode hears of them
            trains = given.pop("requires_grad", False)
            return func(*args, **{**given, "device": _CPU}).to(_META).requires_grad_(trains)
        if func is torch.Tensor.to and len(args) > 1 and _is_named(args[1]):
            args = (args[0], _META, *args[2:])
        return func(*args, **given)


def _backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """As the method, which would ask modes again."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _is_named(device: object) -> bool:
    """Whether it is an accelerator; ``x.to(torch.bool)`` has no device."""
    if isinstance(device, str):
        return not device.startswith(("cpu", "meta"))
    if isinstance(device, torch.device):
        return device.type not in ("cpu", "meta")
    return isinstance(device, int) and not isinstance(device, bool)


@contextmanager
def no_autocast() -> Iterator[None]:
    """Let who makes or enters an autocast inside get an `AutocastError`.

    Autocast casts by device, below what paper sees; without a GPU torch would switch it off, with a
    warning, and the plan would be of another dtype. If it is off, ``meta`` passes for a device
    that has it, which torch denies.
    """
    kind = torch.amp.autocast_mode.autocast
    make, enter = kind.__init__, kind.__enter__

    def __init__(self: Any, device_type: str, *args: Any, **given: Any) -> None:  # noqa: N807
        enabled = given.get("enabled", args[1] if len(args) > 1 else True)
        if enabled:
            raise AutocastError
        make(self, _known(device_type), *args, **given)

    def __enter__(self: Any) -> object:  # noqa: N807
        if self._enabled:
            raise AutocastError
        return enter(self)

    is_on, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    asked = {
        "is_autocast_enabled": lambda *device: is_on(*map(_known, device)),
        "get_autocast_dtype": lambda device_type: dtype(_known(device_type)),
    }
    with replaced(torch, **asked), replaced(kind, __init__=__init__, __enter__=__enter__):
        yield


def _known(device_type: str) -> str:
    return "cpu" if device_type == "meta" else device_type
