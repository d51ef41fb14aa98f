"""The output of a run: lines of progress, and the figures in them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def say(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def step_line(step: int, steps: int, loss: float, tokens_per_second: float, peak_bytes: int) -> str:
    """One line of progress, after `step` of `steps`: the mean loss in nats, the speed of all ranks,
    this rank's peak.
    """
    return (
        f"step {step:{len(str(steps))}d}/{steps}  loss {loss:.4f}  {tokens_per_second:,.0f} "
        f"tokens/s  peak {amount(peak_bytes)}"
    )


def amount(nbytes: float) -> str:
    """Bytes in powers of ten."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def state_bytes(
    params: Iterable[torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[int, int]:
    """Bytes of parameters, gradients and optimizer state: on this rank, and unsharded.

    Counted on the tensors themselves: sharded `params`, frozen or trained, and what hangs on.
    """
    rank = unsharded = 0
    for param in params:
        for tensor in (param, param.grad, *optimizer.state.get(param, {}).values()):
            if isinstance(tensor, Tensor):
                rank += (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
                unsharded += tensor.nbytes
    return rank, unsharded


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
