"""Tensors to and from the first rank of a process group, messages among all of its ranks, and sums:
collectives of no step of the schedule.

They go through ``torch.distributed``'s functions, whose checks cost nothing here, and block the
host or the current stream until they are done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp2.core.device.process_groups import backend_name


def sum_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``tensor`` over the ranks of ``group``, in place; the current stream waits for it."""
    dist.all_reduce(tensor, group=group)


def exchange_messages(
    output: torch.Tensor,
    input_: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group: dist.ProcessGroup,
) -> dist.Work | None:
    """Start an all-to-all of messages, one after the other in flat tensors; wait before reading."""
    return dist.all_to_all_single(
        output, input_, list(received), list(sent), group=group, async_op=True
    )


def gather_to_first(
    group: dist.ProcessGroup, outputs: Sequence[torch.Tensor] | None, input_: torch.Tensor
) -> None:
    """Gather flat tensors of one size on the first rank of ``group``; no other receives any."""
    own = _reachable(group, input_)
    if outputs is None:
        dist.gather(own, None, group=group, group_dst=0)
        return
    received = [_reachable(group, output) for output in outputs]
    dist.gather(own, received, group=group, group_dst=0)
    _give(received, outputs)


def scatter_from_first(
    group: dist.ProcessGroup, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None
) -> None:
    """The way back of `gather_to_first`: ``inputs`` on the first rank, ``output`` [n] on each."""
    sent = None if inputs is None else [_reachable(group, input_) for input_ in inputs]
    received = _reachable(group, output)
    dist.scatter(received, sent, group=group, group_src=0)
    _give([received], [output])


def broadcast_from_first(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Give every rank of ``group`` the first one's values of a contiguous tensor, in place."""
    sent = _reachable(group, tensor)
    dist.broadcast(sent, group=group, group_src=0)
    _give([sent], [tensor])


def _reachable(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its copy in CPU memory: gloo gathers and scatters no other."""
    if tensor.device.type == "cpu" or backend_name(group, tensor.device) != "gloo":
        return tensor
    return tensor.cpu()


def _give(received: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    for source, target in zip(received, outputs, strict=True):
        if source is not target:
            target.copy_(source)
