"""Collectives of a step: bound once to their tensors, and called by the backend's own methods.

From torch 2.13 the process group's methods are ``all_gather_single`` and ``reduce_scatter_single``
(and ``…_coalesced``); before, ``_allgather_base`` and ``_reduce_scatter_base``. The functions of
``torch.distributed`` wrap them in checks and loggers that cost more host time than the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, ParamSpec, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceOp,
    ReduceScatterOptions,
    _make_nccl_premul_sum,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from fsdp2.core.custom_collectives import AllGather, ReduceScatter
from fsdp2.core.device.backends import traits_of
from fsdp2.core.errors import coded

P = ParamSpec("P")


_GATHER = ("all_gather_single", "_allgather_base")
_GATHER_MANY = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_EXCHANGE = ("all_to_all_single", "alltoall_base")
_SCATTER = ("reduce_scatter_single", "_reduce_scatter_base")
_SCATTER_MANY = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

_GATHER_OPTIONS = AllgatherOptions()
# NCCL then runs on the current stream, which is a lane, not on one of its own (docs/nccl.md).
_GATHER_OPTIONS.asyncOp = False
_GATHER_BEHIND = AllgatherOptions()  # on a stream of its own


class Work(Protocol):
    """A running collective."""

    def wait(self) -> object:
        """Wait for it: the host on a CPU, the current stream elsewhere."""


Launch = Callable[[], Work | None]
"""Runs a collective that is bound to its tensors; returns what must be waited for."""


class ReduceKind:
    """How values are combined: summed; averaged, or divided by ``factor``, in the collective."""

    def __init__(self, average: bool, factor: float | None = None) -> None:
        self.average = average
        self.factor = factor
        self.op: dist.ReduceOp | dist.ReduceOp.RedOpType
        if factor is not None:
            self.op = made = _make_nccl_premul_sum(1.0 / factor)
        else:
            self.op = ReduceOp.AVG if average else ReduceOp.SUM
            # Options take a `ReduceOp`; a user's collective gets the member of the enum, as from
            # torch.
            made = ReduceOp(self.op)
        self.options, self.behind = ReduceScatterOptions(), ReduceScatterOptions()
        self.options.reduceOp = self.behind.reduceOp = made
        self.options.asyncOp = False  # on the lane, as all-gathers
        self.all_reduce_options = AllreduceOptions()
        self.all_reduce_options.reduceOp = made
        self.all_reduce_options.asyncOp = False


def run_all_gather(
    group: dist.ProcessGroup, output: torch.Tensor, input_: torch.Tensor
) -> dist.Work | None:
    """An all-gather of a flat tensor over ``group``, for collectives in separate memory."""
    return _method(group, _GATHER)(output, input_, _GATHER_OPTIONS)


def run_reduce_scatter(
    group: dist.ProcessGroup,
    output: torch.Tensor,
    input_: torch.Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
) -> dist.Work | None:
    """A reduce-scatter of a flat tensor over ``group``, for collectives in separate memory."""
    options = ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]  # either kind, says c10d's code
    options.asyncOp = False
    return _method(group, _SCATTER)(output, input_, options)


def _method(group: dist.ProcessGroup, names: tuple[str, ...]) -> Callable[..., Any]:
    for name in names:
        if hasattr(group, name):
            method: Callable[..., object] = getattr(group, name)
            return method
    raise coded(
        TypeError,
        "no-collectives",
        f"{type(group).__name__} has none of the collectives {names}; use a process group of "
        f"torch 2.11 or later",
    )


class GroupCollectives:
    """Collectives over one axis, a c10d process group; each returns the work to wait for.

    If ``asynchronous``, the device has streams: a work object that the backend returns is waited
    for at once, on the current stream, so that an event recorded after the call is after the
    collective. If not (CPU), it is returned, and the collective runs while the host continues.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, asynchronous: bool) -> None:
        self.group = group
        self.device = device
        self.size = group.size()
        self.rank = group.rank()
        traits = traits_of(group, device)
        self.coalesces, self.premultiplies = traits.coalesces, traits.premultiplies
        self._asynchronous = asynchronous
        # Looked up once: `hasattr` and `getattr` in each launch would be host time of every step.
        self._gather = _method(group, _GATHER)
        self._gather_many = _method(group, _GATHER_MANY)
        self._scatter = _method(group, _SCATTER)
        self._scatter_many = _method(group, _SCATTER_MANY)

    def over(self, group: dist.ProcessGroup) -> GroupCollectives:
        """The same over another process group of the same ranks."""
        return GroupCollectives(group, self.device, self._asynchronous)

    def all_gather(self, output: torch.Tensor, input_: torch.Tensor) -> Work | None:
        """``output``: [size * n], ``input_``: [n]."""
        return self._ordered(self._gather(output, input_, _GATHER_OPTIONS))

    def bind_all_gather(self, output: torch.Tensor, input_: torch.Tensor) -> Launch:
        """A function that runs ``all_gather`` of these tensors."""
        return self._bound(functools.partial(self._gather, output, input_, _GATHER_OPTIONS))

    def bind_all_gather_many(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Launch:
        """A function that runs ``all_gather`` for each pair, in one launch: the backend's own call,
        where no stream waits.
        """
        launch = functools.partial(self._gather_many, outputs, inputs, _GATHER_OPTIONS)
        return self._bound(launch)

    def launch_behind(
        self, unit: str, kind: ReduceKind | None, *moved: list[torch.Tensor]
    ) -> Work | None:
        """An all-gather, or with a ``kind`` a reduce-scatter, of each of the outputs and inputs, in
        a graph: on a stream of the backend's, for which ``wait()`` lets the current one wait.
        """
        many = len(moved[0]) > 1
        given = moved if many else [tensors[0] for tensors in moved]
        if kind is None:
            return (self._gather_many if many else self._gather)(*given, _GATHER_BEHIND)
        return (self._scatter_many if many else self._scatter)(*given, kind.behind)

    def bind_all_to_all(self, output: torch.Tensor, input_: torch.Tensor) -> Launch:
        """A launch that gives each rank its row of ``input_`` and takes one of each; [size, n]."""
        options = AllToAllOptions()
        options.asyncOp = False
        exchange = _method(self.group, _EXCHANGE)
        return self._bound(functools.partial(exchange, output, input_, [], [], options))

    def bind_reduce_scatter(
        self, kind: ReduceKind
    ) -> Callable[[torch.Tensor, torch.Tensor], Work | None]:
        """A function that reduces as ``kind`` says, from an input [size * n] to an output [n]."""
        return self._bound(functools.partial(self._scatter, opts=kind.options))

    def bind_reduce_scatter_many(
        self, kind: ReduceKind
    ) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Work | None]:
        """The same of many outputs and inputs, in one launch."""
        return self._bound(functools.partial(self._scatter_many, opts=kind.options))

    def custom_all_gather(
        self, comm: AllGather, output: torch.Tensor, input_: torch.Tensor
    ) -> Work | None:
        """As ``all_gather``, by the user's collective."""
        return self._ordered(comm(output_tensor=output, input_tensor=input_, group=self.group))

    def custom_reduce_scatter(
        self, comm: ReduceScatter, output: torch.Tensor, input_: torch.Tensor, kind: ReduceKind
    ) -> Work | None:
        work = comm(output_tensor=output, input_tensor=input_, group=self.group, op=kind.op)
        return self._ordered(work)

    def all_reduce(self, tensor: torch.Tensor, kind: ReduceKind) -> Work | None:
        """Reduce a flat tensor in place."""
        return self._ordered(self.group.allreduce([tensor], kind.all_reduce_options))

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's ``numbers`` (64 bits, equally many), by rank; blocks the host."""
        device = "cpu" if self.device.type == "meta" else self.device  # numbers need memory
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        everyones = own.repeat(self.size)  # for groups that only look like many ranks
        work = self._gather(everyones, own, _GATHER_OPTIONS)
        if work is not None:
            work.wait()
        found: list[list[int]] = everyones.view(self.size, len(numbers)).tolist()
        return found

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each of the ranks' ``numbers`` (64 bits); blocks the host."""
        device = "cpu" if self.device.type == "meta" else self.device  # numbers need memory
        found = torch.tensor(numbers, dtype=torch.int64, device=device)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MAX)
        work = self.group.allreduce([found], options)
        if work is not None:
            work.wait()
        largest: list[int] = found.tolist()
        return largest

    def _ordered(self, work: Work | None) -> Work | None:
        """If lanes are streams, make the current one wait; the host need not then."""
        if work is not None and self._asynchronous:
            work.wait()
            return None
        return work

    def _bound(self, launch: Callable[P, Work | None]) -> Callable[P, Work | None]:
        if not self._asynchronous:
            return launch

        def launch_in_order(*args: P.args, **kwargs: P.kwargs) -> None:
            work = launch(*args, **kwargs)
            if work is not None:  # nccl2 returns one of what is not asynchronous, too
                work.wait()

        return launch_in_order


class SoloCollectives:
    """The shard axis of parameters that are not sharded: one rank, which never communicates."""

    size = 1
    rank = 0
    coalesces = False
    premultiplies = False
    group = None

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("one rank has nobody to communicate with")

    over = all_gather = bind_all_gather = bind_all_gather_many = launch_behind = _refuse
    bind_reduce_scatter = bind_reduce_scatter_many = bind_all_to_all = _refuse
    custom_all_gather = custom_reduce_scatter = all_reduce = exchange = largest = _refuse


class ComplexCollectives:
    """Collectives of complex tensors, as the pairs of real numbers that backends know."""

    def __init__(self, collectives: GroupCollectives | SoloCollectives) -> None:
        self._real = collectives
        self.size, self.rank, self.group = collectives.size, collectives.rank, collectives.group
        self.coalesces, self.premultiplies = collectives.coalesces, collectives.premultiplies
        # Without conversion: users' collectives get complex tensors, the others only integers, and
        # graphs convert.
        self.custom_all_gather = collectives.custom_all_gather
        self.custom_reduce_scatter = collectives.custom_reduce_scatter
        self.exchange, self.largest = collectives.exchange, collectives.largest
        self.over, self.launch_behind = collectives.over, collectives.launch_behind

    def all_gather(self, output: torch.Tensor, input_: torch.Tensor) -> Work | None:
        return self._real.all_gather(*_as_real((output, input_)))

    def bind_all_gather(self, output: torch.Tensor, input_: torch.Tensor) -> Launch:
        return self._real.bind_all_gather(*_as_real((output, input_)))

    def bind_all_gather_many(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Launch:
        return self._real.bind_all_gather_many(_as_real(outputs), _as_real(inputs))

    def bind_all_to_all(self, output: torch.Tensor, input_: torch.Tensor) -> Launch:
        return self._real.bind_all_to_all(*_as_real((output, input_)))

    def bind_reduce_scatter(
        self, kind: ReduceKind
    ) -> Callable[[torch.Tensor, torch.Tensor], Work | None]:
        reduce = self._real.bind_reduce_scatter(kind)
        return lambda output, input_: reduce(*_as_real((output, input_)))

    def bind_reduce_scatter_many(
        self, kind: ReduceKind
    ) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Work | None]:
        reduce = self._real.bind_reduce_scatter_many(kind)
        return lambda outputs, inputs: reduce(_as_real(outputs), _as_real(inputs))

    def all_reduce(self, tensor: torch.Tensor, kind: ReduceKind) -> Work | None:
        return self._real.all_reduce(torch.view_as_real(tensor), kind)


Collectives = GroupCollectives | SoloCollectives | ComplexCollectives
"""Those of an axis."""


def collectives_of(dtype: torch.dtype, collectives: Collectives) -> Collectives:
    """``collectives``, for tensors of this dtype."""
    if not dtype.is_complex or isinstance(collectives, ComplexCollectives):
        return collectives
    return ComplexCollectives(collectives)


def _as_real(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Autograd conjugates lazily, and a tensor with a conjugate bit has no view of real numbers.
    return [torch.view_as_real(tensor.resolve_conj()) for tensor in tensors]


# ---- outside of steps: the host or the current stream waits


def gather_numbers(
    group: dist.ProcessGroup, numbers: Sequence[int], device: torch.device
) -> list[list[int]]:
    """The numbers of each rank of ``group``, as many of each, in the order of its ranks."""
    return GroupCollectives(group, device, asynchronous=False).exchange(numbers)


def largest_over(lines: Iterable[Collectives], numbers: Sequence[int]) -> list[int]:
    """The largest of each number over all ranks of ``lines``, so that all of them raise alike."""
    found = list(numbers)
    # One axis after the other: the second passes on what the first has found on its ranks.
    for line in lines if found else ():
        found = line.largest(found)
    return found


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a functional collective; return any other tensor unchanged."""
    if isinstance(tensor, AsyncCollectiveTensor):
        result: torch.Tensor = tensor.wait()
        return result
    return tensor


def run_barrier(group: dist.ProcessGroup) -> None:
    """Block until all ranks of ``group`` are here, which makes its communicator."""
    dist.barrier(group)


def run_first_collective(group: dist.ProcessGroup, device: torch.device) -> None:
    """An all-reduce of one number, which makes the communicator of ``group``; blocks the host."""
    # As for lanes: the current stream waits for it, the host only for the communicator.
    GroupCollectives(group, device, asynchronous=True).all_reduce(
        torch.zeros(1, device=device), ReduceKind(average=False)
    )
