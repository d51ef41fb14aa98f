"""The only module that touches c10d, and the one place for what differs between torch versions.

    Collectives ── all_gather(out, in), all_gather_many(outs, ins)
                ── reduce_scatter(out, in, op), reduce_scatter_many(outs, ins, op)

From torch 2.13 the process group's methods are ``all_gather_single`` and
``reduce_scatter_single`` (and ``…_coalesced``); before, ``_allgather_base``,
``_reduce_scatter_base`` and their coalesced forms. The methods of the group are called directly:
``torch.distributed``'s functions wrap them in argument checks and loggers that cost more host
time than the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    ReduceOp,
    ReduceScatterOptions,
    _make_nccl_premul_sum,
)

_GATHER = ("all_gather_single", "_allgather_base")
_GATHER_MANY = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_SCATTER = ("reduce_scatter_single", "_reduce_scatter_base")
_SCATTER_MANY = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


class ReduceKind:
    """How a reduction combines the ranks' values.

    Attributes:
        average: sum divided by the number of ranks, inside the collective.
        factor: where not ``None``, the collective divides by it (NCCL's premultiplied sum).
    """

    __slots__ = ("average", "factor", "options")

    def __init__(self, average: bool, factor: float | None = None) -> None:
        self.average = average
        self.factor = factor
        self.options = ReduceScatterOptions()
        if factor is not None:
            self.options.reduceOp = _make_nccl_premul_sum(1.0 / factor)
        else:
            self.options.reduceOp = ReduceOp(ReduceOp.AVG if average else ReduceOp.SUM)
        self.options.asyncOp = False


class Collectives(Protocol):
    """Collectives over one shard axis. Each returns what must be waited for, or ``None``."""

    size: int
    rank: int
    coalesces: bool
    premultiplies: bool

    def all_gather(self, output: Any, input_: Any) -> Any:
        """``output``: [size * n], ``input_``: [n]."""

    def all_gather_many(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """As ``all_gather`` for each pair, in one launch."""

    def reduce_scatter(self, output: Any, input_: Any, kind: ReduceKind) -> Any:
        """``output``: [n], ``input_``: [size * n]."""

    def reduce_scatter_many(
        self, outputs: Sequence[Any], inputs: Sequence[Any], kind: ReduceKind
    ) -> Any:
        """As ``reduce_scatter`` for each pair, in one launch."""


def _method(group: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        if hasattr(group, name):
            return getattr(group, name)
    raise TypeError(f"{type(group).__name__} has none of the collectives {names}")


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves ``device`` in ``group``, in lower case."""
    name = str(dist.get_backend(group)).lower()
    for part in name.split(","):
        kind, _, backend = part.rpartition(":")
        if kind == device.type:
            return backend
    return name


class GroupCollectives:
    """Collectives of a c10d process group.

    Args:
        group: the process group of the shard axis.
        device: the device of the tensors.
        asynchronous: whether the device has streams. Where it has, a work object that the
            backend returns is waited for at once, on the current stream, so that an event
            recorded behind the call is behind the collective. Where not (CPU), it is returned,
            and the collective runs while the host goes on.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, asynchronous: bool) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        backend = backend_name(group, device)
        # One gloo call a parameter costs more than one copy: the group's shards travel packed.
        self.coalesces = "gloo" not in backend
        self.premultiplies = "nccl" in backend
        self._asynchronous = asynchronous
        self._gather_options = AllgatherOptions()
        self._gather_options.asyncOp = False
        self._gather = _method(group, _GATHER)
        self._gather_many = _method(group, _GATHER_MANY)
        self._scatter = _method(group, _SCATTER)
        self._scatter_many = _method(group, _SCATTER_MANY)

    def all_gather(self, output: torch.Tensor, input_: torch.Tensor) -> Any:
        """Gather one flat tensor; ``output``: [size * n], ``input_``: [n]."""
        return self._deliver(self._gather(output, input_, self._gather_options))

    def all_gather_many(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Any:
        """Gather many flat tensors in one launch."""
        return self._deliver(self._gather_many(outputs, inputs, self._gather_options))

    def reduce_scatter(self, output: torch.Tensor, input_: torch.Tensor, kind: ReduceKind) -> Any:
        """Reduce and scatter one flat tensor; ``output``: [n], ``input_``: [size * n]."""
        return self._deliver(self._scatter(output, input_, kind.options))

    def reduce_scatter_many(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], kind: ReduceKind
    ) -> Any:
        """Reduce and scatter many tensors in one launch."""
        return self._deliver(self._scatter_many(outputs, inputs, kind.options))

    def _deliver(self, work: Any) -> Any:
        if work is not None and self._asynchronous:
            work.wait()
            return None
        return work


def sum_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``tensor`` over the ranks of ``group``, in place; the current stream waits for it."""
    dist.all_reduce(tensor, group=group)
