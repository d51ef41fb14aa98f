"""Memory that a CPU's kernels allocate inside an operator, in addition to arguments and results.

Measured with torch 2.13's profiler, kernel by kernel (tests/planning/test_paper_scratch.py measures
them again). Kernels that are not listed allocate nothing, or some kB. GPUs' kernels allocate other
memory, cuDNN's and cuBLAS's workspaces, which a plan does not contain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp2.paper import recurrent

Arguments = Sequence[Any]


def on_cpu(name: str, args: Arguments, results: Sequence[torch.Tensor]) -> int:
    """Bytes.

    Args:
        name: the operator's, without its library's.
        args: what it is given.
        results: what it returns.
    """
    found = _KERNELS.get(name)
    return 0 if found is None else found(args, results)


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.nbytes)


def _convolution(args: Arguments, results: Sequence[torch.Tensor]) -> int:
    """The result and the weight in oneDNN's own format."""
    return _bytes(results[0]) + _bytes(args[1])


def _convolution_backward(args: Arguments, results: Sequence[torch.Tensor]) -> int:
    """The gradient and the input in oneDNN's format."""
    return _bytes(args[0]) + _bytes(args[1])


def _first(args: Arguments, results: Sequence[torch.Tensor]) -> int:
    return _bytes(args[0])


def _recurrent(name: str) -> Callable[[Arguments, Sequence[torch.Tensor]], int]:
    return lambda args, results: recurrent.scratch(name, args)


_KERNELS: dict[str, Callable[[Arguments, Sequence[torch.Tensor]], int]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_batch_norm_backward": _first,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _first,
    **{name: _recurrent(name) for name in (recurrent.FORWARD, recurrent.BACKWARD)},
}
