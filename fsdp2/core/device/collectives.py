"""The only module that touches c10d, and the one place for what differs between torch versions.

    Collectives ── all_gather(out, in), bind_all_gather(outs, ins)()         shard axis
                ── bind_reduce_scatter(kind)(out, in), …_many(kind)(outs, ins)
                ── the user's own of both; exchange(numbers)
    Replicas    ── all_reduce(tensor, op)                                   replicate axis
    Board       ── write, has, read, claim, erase      notes in the process group's store

From torch 2.13 the process group's methods are ``all_gather_single`` and
``reduce_scatter_single`` (and ``…_coalesced``); before, ``_allgather_base``,
``_reduce_scatter_base`` and their coalesced forms. The methods of the group are called directly:
``torch.distributed``'s functions wrap them in argument checks and loggers that cost more host
time than the call.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    PrefixStore,
    ReduceOp,
    ReduceScatterOptions,
    Store,
    _make_nccl_premul_sum,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _hash_ranks_to_str

from fsdp2.core.device.backends import backend_of, traits_of

P = ParamSpec("P")
T = TypeVar("T")

_GATHER = ("all_gather_single", "_allgather_base")
_GATHER_MANY = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_SCATTER = ("reduce_scatter_single", "_reduce_scatter_base")
_SCATTER_MANY = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


ProcessGroup = dist.ProcessGroup
"""For modules that name the type alone: only this one communicates."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Wait for it: the host on a CPU, the current stream elsewhere."""


Launch = Callable[[], Work | None]
"""Runs a collective that is bound to its tensors; returns what must be waited for."""


class ReduceKind:
    """How a reduction combines the ranks' values.

    Attributes:
        average: sum divided by the number of ranks, inside the collective.
        factor: where not ``None``, the collective divides by it (NCCL's premultiplied sum).
        op: what c10d calls it: a member of the enum where it has one.
    """

    __slots__ = ("all_reduce_options", "average", "factor", "op", "options")

    def __init__(self, average: bool, factor: float | None = None) -> None:
        self.average = average
        self.factor = factor
        self.op: dist.ReduceOp | dist.ReduceOp.RedOpType
        if factor is not None:
            self.op = made = _make_nccl_premul_sum(1.0 / factor)
        else:
            self.op = ReduceOp.AVG if average else ReduceOp.SUM
            made = ReduceOp(self.op)
        self.options = ReduceScatterOptions()
        self.options.reduceOp = made
        self.options.asyncOp = False
        self.all_reduce_options = AllreduceOptions()
        self.all_reduce_options.reduceOp = made
        self.all_reduce_options.asyncOp = False


class Comm(ABC):
    """A user's own collective: where its buffers come from, and what runs it.

    A buffer is in use from ``allocate`` until the collective's result has been copied out of it,
    and must not be given out again before. Memory from an allocator never is. An object that keeps
    its buffers should serve one unit, whose gathers follow each other; gradients of several dtypes
    and tensor subclasses with all-gather hooks have collectives of their own, and ask for the
    second's buffer before the first gives its own back.
    """

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer for the collective, new at each call or kept by this object.

        Args:
            size: its shape, one length; return a tensor of just that shape.
            dtype: its dtype.
            device: where it must be.
        """


class AllGather(Comm):
    """A user's all-gather, for `FSDPModule.set_custom_all_gather`.

    Example::

        class Logged(fsdp2.AllGather):
            def allocate(self, size, *, dtype, device):
                return torch.empty(*size, dtype=dtype, device=device)

            def __call__(self, output_tensor, input_tensor, group, async_op=False):
                print(f"gathering {output_tensor.nbytes} bytes")
                return dist.all_gather_into_tensor(
                    output_tensor, input_tensor, group=group, async_op=async_op)
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` [n] of all ranks into ``output_tensor`` [ranks * n].

        ``input_tensor`` may be this rank's part of ``output_tensor``. Runs with the all-gather
        stream current; a work object that is returned is waited for.
        """


class ReduceScatter(Comm):
    """A user's reduce-scatter, for `FSDPModule.set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` [ranks * n] with ``op`` and scatter into ``output_tensor`` [n].

        ``op`` is a ``torch.distributed.ReduceOp``: average, sum or a premultiplied sum. Runs with
        the reduction stream current; a work object that is returned is waited for.
        """


def checked_buffer(
    comm: Comm, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A buffer of the user's collective, on the current lane; checked."""
    with torch.inference_mode(False):
        buffer = comm.allocate((numel,), dtype=dtype, device=device)
    if tuple(buffer.shape) != (numel,) or buffer.dtype != dtype:
        raise ValueError(
            f"{type(comm).__name__}.allocate(({numel},), dtype={dtype}) returned a tensor of shape "
            f"{tuple(buffer.shape)} and {buffer.dtype}; return a 1-D tensor of the size and dtype "
            f"that it is asked for"
        )
    return buffer


class Collectives(Protocol):
    """Collectives over one shard axis. Each returns what must be waited for, or ``None``.

    Those that run in every step are bound: to their tensors, or to how they reduce.
    """

    size: int
    rank: int
    coalesces: bool
    premultiplies: bool

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; ``None`` where there is one rank."""

    def all_gather(self, output: torch.Tensor, input_: torch.Tensor) -> Work | None:
        """``output``: [size * n], ``input_``: [n]."""

    def bind_all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Launch:
        """What runs ``all_gather`` for each pair, in one launch, whenever it is called."""

    def bind_reduce_scatter(
        self, kind: ReduceKind
    ) -> Callable[[torch.Tensor, torch.Tensor], Work | None]:
        """What reduces as ``kind`` says: of an output [n] and an input [size * n]."""

    def bind_reduce_scatter_many(
        self, kind: ReduceKind
    ) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Work | None]:
        """The same of many outputs and inputs, in one launch."""

    def custom_all_gather(
        self, comm: AllGather, output: torch.Tensor, input_: torch.Tensor
    ) -> Work | None:
        """As ``all_gather``, by the user's collective."""

    def custom_reduce_scatter(
        self, comm: ReduceScatter, output: torch.Tensor, input_: torch.Tensor, kind: ReduceKind
    ) -> Work | None:
        """A reduce-scatter by the user's collective."""

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's ``numbers`` (64 bits, equally many), by rank; blocks the host."""


class Replicas(Protocol):
    """The replicate axis; there is one only where parameters have copies."""

    size: int

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""

    def all_reduce(self, tensor: torch.Tensor, kind: ReduceKind) -> Work | None:
        """Reduce a flat tensor in place; returns what must be waited for, or ``None``."""


def run_all_gather(
    group: dist.ProcessGroup, output: torch.Tensor, input_: torch.Tensor
) -> dist.Work | None:
    """One all-gather of a flat tensor over ``group``; for collectives in memory of their own."""
    options = AllgatherOptions()
    options.asyncOp = False
    work: dist.Work | None = _method(group, _GATHER)(output, input_, options)
    return work


def run_reduce_scatter(
    group: dist.ProcessGroup,
    output: torch.Tensor,
    input_: torch.Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
) -> dist.Work | None:
    """One reduce-scatter of a flat tensor over ``group``."""
    options = ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]  # either kind, says c10d's code
    options.asyncOp = False
    work: dist.Work | None = _method(group, _SCATTER)(output, input_, options)
    return work


def scatter_sums(output: torch.Tensor, input_: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``input_`` [ranks * n] over ``group``, and keep this rank's part in ``output`` [n]."""
    work = _method(group, _SCATTER)(output, input_, ReduceScatterOptions())
    if work is not None:
        work.wait()


def gather_numbers(
    group: dist.ProcessGroup, numbers: Sequence[int], device: torch.device
) -> list[list[int]]:
    """The numbers of each rank of ``group``, as many of each, in the order of its ranks."""
    return GroupCollectives(group, device, asynchronous=False).exchange(numbers)


def rank_and_size() -> tuple[int, int]:
    """This rank and their number in the default process group; (0, 1) where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


@dataclass(frozen=True)
class Members:
    """The ranks that take part in a call, and the number of this one among them.

    Attributes:
        rank: this process's number in the process group.
        ranks: their global ranks, in the order of the group.
        group: the process group; ``None``: the default one, or no other process.
    """

    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)

    def gather(self, value: T) -> list[T]:
        """What each of them has, by rank; picklable. Not for steady steps."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found


def members_of(group: dist.ProcessGroup | None) -> Members | None:
    """The ranks of a process group; ``None`` where this rank has no part in it.

    Args:
        group: what ``new_group`` returns, on ranks outside of the group, too. ``None``: the default
            group, or this process alone where there is none.
    """
    if group is None or (dist.is_initialized() and group is dist.group.WORLD):
        rank, size = rank_and_size()
        return Members(rank, tuple(range(size)))
    if not isinstance(group, dist.ProcessGroup) or not dist.is_initialized():
        return None
    try:
        return Members(group.rank(), tuple(ranks_of(group)), group)
    except (KeyError, ValueError):  # it was destroyed
        return None


class _Peers(Protocol):
    """What sends tensors from rank to rank: a process group, or a backend alone."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """To a rank of the group."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """From a rank of the group, in place."""


class LostRankError(Exception):
    """A rank cannot be reached any more."""


class SideChannel:
    """Objects to rank 0 and back, over a gloo group of its own, from any one thread at a time.

    Training's collectives may run at the same time. Rank 0 hears of a rank that has died, as its
    connection closes, and the others hear of it from rank 0: nobody waits for who is not there. A
    rank that lives and does not answer is waited for as long as the group's time-out says.

    To make one is a collective of all ``members``. Where these are not all ranks, torch keeps no
    list of its group: it would name the group by how many others each rank has, which may differ.
    """

    def __init__(self, members: Members) -> None:
        self.rank, self.size = members.rank, members.size
        self._group: _Peers | None = None
        if self.size == 1:
            return
        if members.ranks == tuple(range(dist.get_world_size())):
            self._group = dist.new_group(backend="gloo")
            return
        (name, *_) = members.gather(secrets.token_hex(8))
        notes = PrefixStore(f"fsdp2/side/{name}", default_store())
        gloo = dist.ProcessGroupGloo(notes, self.rank, self.size, dist.default_pg_timeout)
        self._group = gloo  # type: ignore[assignment]  # torch's stub leaves these two methods out

    def collect(self, value: T) -> list[T | LostRankError] | None:
        """What each rank has, on rank 0; elsewhere ``None``. Picklable.

        Raises:
            LostRankError: rank 0 is gone.
        """
        if self.rank:
            self._send(value, 0)
            return None
        return [value, *(self._receive_or_lost(rank) for rank in range(1, self.size))]

    def spread(self, values: Sequence[T] | None) -> T:
        """What rank 0 has for each rank; ``values`` is ``None`` elsewhere.

        Raises:
            LostRankError: rank 0 is gone.
        """
        if values is None:
            received: T = self._receive(0)
            return received
        for rank, value in enumerate(values[1:], 1):
            with contextlib.suppress(LostRankError):  # those that are there go on
                self._send(value, rank)
        return values[0]

    def _send(self, value: object, rank: int) -> None:
        assert self._group is not None
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        try:
            self._group.send([torch.tensor([len(data)])], rank, 0).wait()
            self._group.send([data], rank, 0).wait()
        except (RuntimeError, ValueError) as error:
            raise LostRankError(str(error)) from error

    def _receive(self, rank: int) -> Any:
        assert self._group is not None
        length = torch.zeros(1, dtype=torch.int64)
        try:
            self._group.recv([length], rank, 0).wait()
            data = torch.empty(int(length), dtype=torch.uint8)
            self._group.recv([data], rank, 0).wait()
        except (RuntimeError, ValueError) as error:
            raise LostRankError(str(error)) from error
        return pickle.loads(data.numpy().tobytes())

    def _receive_or_lost(self, rank: int) -> Any:
        try:
            return self._receive(rank)
        except LostRankError as lost:
            return LostRankError(str(lost))


_side: dict[tuple[int, ...], SideChannel] = {}
_side_of: list[dist.ProcessGroup | None] = [None]  # the default group that they were made in


def side_channel(members: Members) -> SideChannel:
    """The one of these ranks; made again where the default process group is another one."""
    world = dist.group.WORLD if rank_and_size()[1] > 1 else None
    if _side_of[0] is not world:
        _side.clear()
        _side_of[0] = world
    if members.ranks not in _side:
        _side[members.ranks] = SideChannel(members)
    return _side[members.ranks]


def default_group() -> dist.ProcessGroup:
    """The default process group, which is started from torchrun's environment if there is none."""
    if not dist.is_initialized():
        dist.init_process_group()
    group = dist.group.WORLD
    assert group is not None
    return group


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """The global ranks of a process group, in its order."""
    return list(dist.get_process_group_ranks(group))


def run_first_collective(group: dist.ProcessGroup, device: torch.device) -> None:
    """An all-reduce of one number, which makes the communicator of ``group`` for ``device``.

    Blocks the host until all ranks of ``group`` are here, where the backend makes it in its first
    collective.
    """
    ReplicaCollectives(group, asynchronous=True).all_reduce(
        torch.zeros(1, device=device), ReduceKind(average=False)
    )


def run_barrier(group: dist.ProcessGroup) -> None:
    """Block until all ranks of ``group`` are here, which makes its communicator."""
    dist.barrier(group)


def gather_to_first(
    group: dist.ProcessGroup, outputs: Sequence[torch.Tensor] | None, input_: torch.Tensor
) -> None:
    """Gather flat tensors of one size on the first rank of ``group``; no other receives any.

    Args:
        group: the process group.
        outputs: on its first rank, one tensor [n] for each rank; ``None`` elsewhere.
        input_: [n], this rank's.
    """
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


def _method(group: dist.ProcessGroup, names: tuple[str, ...]) -> Callable[..., Any]:
    for name in names:
        if hasattr(group, name):
            method: Callable[..., Any] = getattr(group, name)
            return method
    raise TypeError(
        f"{type(group).__name__} has none of the collectives {names}; use a "
        f"process group of a torch from 2.11 on"
    )


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves ``device`` in ``group``, in lower case."""
    backend = backend_of(group, device)
    if backend is not None:  # the name under which the group was started may be "undefined"
        return str(backend.name()).lower()
    name = str(dist.get_backend(group)).lower()
    for part in name.split(","):
        kind, _, backend = part.rpartition(":")
        if kind == device.type:
            return backend
    return name


def serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` has a backend for tensors of ``device``, as far as it says."""
    return backend_of(group, device) is not None or backend_of(group, torch.device("cpu")) is None


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

    __slots__ = (
        "_asynchronous",
        "_gather",
        "_gather_many",
        "_gather_options",
        "_scatter",
        "_scatter_many",
        "coalesces",
        "device",
        "group",
        "premultiplies",
        "rank",
        "size",
    )

    def __init__(self, group: dist.ProcessGroup, device: torch.device, asynchronous: bool) -> None:
        self.group = group
        self.device = device
        self.size = group.size()
        self.rank = group.rank()
        traits = traits_of(group, device)
        self.coalesces, self.premultiplies = traits.coalesces, traits.premultiplies
        self._asynchronous = asynchronous
        self._gather_options = AllgatherOptions()
        self._gather_options.asyncOp = False
        self._gather = _method(group, _GATHER)
        self._gather_many = _method(group, _GATHER_MANY)
        self._scatter = _method(group, _SCATTER)
        self._scatter_many = _method(group, _SCATTER_MANY)

    def separate(self) -> GroupCollectives:
        """The same over a new process group of the same ranks, all of which must call this."""
        ranks = dist.get_process_group_ranks(self.group)
        (group,) = new_groups([self.group], self.device, [ranks])
        return GroupCollectives(group, self.device, self._asynchronous)

    def all_gather(self, output: torch.Tensor, input_: torch.Tensor) -> Work | None:
        """Gather one flat tensor; ``output``: [size * n], ``input_``: [n]."""
        return self._ordered(self._gather(output, input_, self._gather_options))

    def bind_all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Launch:
        """Gather many flat tensors in one launch: the backend's own call, where no stream waits."""
        launch = functools.partial(self._gather_many, outputs, inputs, self._gather_options)
        return self._bound(launch)

    def bind_reduce_scatter(
        self, kind: ReduceKind
    ) -> Callable[[torch.Tensor, torch.Tensor], Work | None]:
        """Reduce and scatter one flat tensor; the backend's own call, where no stream waits."""
        return self._bound(functools.partial(self._scatter, opts=kind.options))

    def bind_reduce_scatter_many(
        self, kind: ReduceKind
    ) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Work | None]:
        """Reduce and scatter many tensors in one launch; as `bind_reduce_scatter`."""
        return self._bound(functools.partial(self._scatter_many, opts=kind.options))

    def custom_all_gather(
        self, comm: AllGather, output: torch.Tensor, input_: torch.Tensor
    ) -> Work | None:
        """Let ``comm`` gather one flat tensor."""
        return self._ordered(comm(output_tensor=output, input_tensor=input_, group=self.group))

    def custom_reduce_scatter(
        self, comm: ReduceScatter, output: torch.Tensor, input_: torch.Tensor, kind: ReduceKind
    ) -> Work | None:
        """Let ``comm`` reduce and scatter one flat tensor."""
        work = comm(output_tensor=output, input_tensor=input_, group=self.group, op=kind.op)
        return self._ordered(work)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """One small all-gather, waited for."""
        device = "cpu" if self.device.type == "meta" else self.device  # numbers need memory
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        everyones = own.repeat(self.size)  # for groups that only look like many ranks
        work = self._gather(everyones, own, self._gather_options)
        if work is not None:
            work.wait()
        found: list[list[int]] = everyones.view(self.size, len(numbers)).tolist()
        return found

    def _ordered(self, work: Work | None) -> Work | None:
        """Where lanes are streams, let the current one wait; the host need not then."""
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


def new_groups(
    around: Sequence[dist.ProcessGroup], device: torch.device, lines: Sequence[Sequence[int]]
) -> list[dist.ProcessGroup]:
    """Process groups that this rank is in, made without the ranks that are in none like them.

    They are like the first of ``around``: of its backend, with its time-out, and over NCCL with its
    options (`_options_like`).

    torch names such a group by its ranks and by how many groups the process is in (2.11 to 2.13)
    or has made (2.15): ranks with more groups than others would wait for them under another name.
    Where the default group is bound to a device, torch would split its communicator, which takes
    all ranks that it has, and hangs without them: groups are made without a split (`_unsplit`).

    Args:
        around: groups that together reach all ranks which make such groups now, an axis each.
        device: of their collectives.
        lines: ranks of each new group.

    Raises:
        ValueError: ranks would give a group different names; on all of them.
    """
    least = most = int(_hash_ranks_to_str([0])[:15], 16)  # of the number in the name, and no more
    for group in around:
        found = GroupCollectives(group, device, asynchronous=False).exchange([least, most])
        least, most = min(each[0] for each in found), max(each[1] for each in found)
    if least != most:
        raise ValueError(
            "process groups of some ranks are to be made, but some ranks have made more process "
            "groups than others, so that torch would give one of them two names; let all ranks "
            "make equally many before, for example with init_device_mesh"
        )
    made = []
    for line in lines:
        options = _options_like(around[0])
        with _unsplit(options):
            group = dist.new_group(
                list(line),
                timeout=_chosen_timeout(around[0], device),
                backend=dist.get_backend(around[0]),
                pg_options=options,
                use_local_synchronization=True,
            )
        assert isinstance(group, dist.ProcessGroup)
        made.append(group)
    return made


_CONFIG = ("blocking", "cga_cluster_size", "min_ctas", "max_ctas")
"""Numbers of NCCL's configuration that all versions of torch have."""


def _options_like(group: dist.ProcessGroup) -> Any:
    """Options for a group like ``group``; ``None`` where it has no part over NCCL.

    They carry over ``is_high_priority_stream`` and numbers of ``config``. Not the split.
    """
    for device in getattr(group, "_device_types", ()):
        given: Any = getattr(_inside(backend_of(group, device)), "options", None)
        if not hasattr(given, "is_high_priority_stream"):
            continue
        options = type(given)()
        options._timeout = given._timeout
        options.is_high_priority_stream = given.is_high_priority_stream
        for name in _CONFIG:
            setattr(options.config, name, getattr(given.config, name))
        if hasattr(options, "lazy_init"):  # 2.15: made in the first collective, not by a split
            options.lazy_init = True
        return options
    return None


@contextlib.contextmanager
def _unsplit(options: Any) -> Iterator[None]:
    """Groups that are made inside are not split off from the default group.

    Before torch 2.15 there is no option for that. torch splits if the default group is bound to a
    device (`init_process_group(device_id=…)`), so it is not while a group is made.
    """
    world = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if world is None or bound is None or hasattr(options, "lazy_init"):
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _inside(backend: Any) -> Any:
    """What TORCH_DISTRIBUTED_DEBUG=DETAIL has wrapped; anything else as it is."""
    return getattr(backend, "wrapped_pg", backend)


class SoloCollectives:
    """The shard axis of parameters that are not sharded: one rank, which never communicates."""

    size = 1
    rank = 0
    coalesces = False
    premultiplies = False
    group = None

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("one rank has nobody to communicate with")

    all_gather = bind_all_gather = bind_reduce_scatter = bind_reduce_scatter_many = _refuse
    custom_all_gather = custom_reduce_scatter = exchange = _refuse


class ComplexCollectives:
    """Collectives of complex tensors, as the pairs of real numbers that backends know.

    Args:
        collectives: what runs them.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._real = collectives
        self.size, self.rank, self.group = collectives.size, collectives.rank, collectives.group
        self.coalesces, self.premultiplies = collectives.coalesces, collectives.premultiplies
        self.custom_all_gather = collectives.custom_all_gather
        self.custom_reduce_scatter = collectives.custom_reduce_scatter
        self.exchange = collectives.exchange

    def all_gather(self, output: torch.Tensor, input_: torch.Tensor) -> Work | None:
        """As `Collectives.all_gather`."""
        return self._real.all_gather(*_as_real((output, input_)))

    def bind_all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Launch:
        """As `Collectives.bind_all_gather`."""
        return self._real.bind_all_gather(_as_real(outputs), _as_real(inputs))

    def bind_reduce_scatter(
        self, kind: ReduceKind
    ) -> Callable[[torch.Tensor, torch.Tensor], Work | None]:
        """As `Collectives.bind_reduce_scatter`."""
        reduce = self._real.bind_reduce_scatter(kind)
        return lambda output, input_: reduce(*_as_real((output, input_)))

    def bind_reduce_scatter_many(
        self, kind: ReduceKind
    ) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Work | None]:
        """As `Collectives.bind_reduce_scatter_many`."""
        reduce = self._real.bind_reduce_scatter_many(kind)
        return lambda outputs, inputs: reduce(_as_real(outputs), _as_real(inputs))


class ComplexReplicas:
    """The same for the replicate axis."""

    def __init__(self, replicas: Replicas) -> None:
        self._real = replicas
        self.size, self.group = replicas.size, replicas.group

    def all_reduce(self, tensor: torch.Tensor, kind: ReduceKind) -> Work | None:
        """As `Replicas.all_reduce`."""
        return self._real.all_reduce(torch.view_as_real(tensor), kind)


def collectives_of(dtype: torch.dtype, collectives: Collectives) -> Collectives:
    """``collectives``, for tensors of this dtype."""
    return ComplexCollectives(collectives) if dtype.is_complex else collectives


def replicas_of(dtype: torch.dtype, replicas: Replicas) -> Replicas:
    """``replicas``, for tensors of this dtype."""
    return ComplexReplicas(replicas) if dtype.is_complex else replicas


def _as_real(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.view_as_real(tensor.resolve_conj()) for tensor in tensors]


class ReplicaCollectives:
    """All-reduces of a c10d process group.

    Args:
        group: the process group of the replicate axis.
        asynchronous: as for `GroupCollectives`.
    """

    def __init__(self, group: dist.ProcessGroup, asynchronous: bool) -> None:
        self.group = group
        self.size = group.size()
        self._asynchronous = asynchronous

    def all_reduce(self, tensor: torch.Tensor, kind: ReduceKind) -> Work | None:
        """Reduce one flat tensor in place."""
        work = self.group.allreduce([tensor], kind.all_reduce_options)
        if work is not None and self._asynchronous:
            work.wait()
            return None
        return work


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, waited for; any other tensor as it is."""
    if isinstance(tensor, AsyncCollectiveTensor):
        result: torch.Tensor = tensor.wait()
        return result
    return tensor


def sum_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``tensor`` over the ranks of ``group``, in place; the current stream waits for it."""
    dist.all_reduce(tensor, group=group)


class StoreBoard:
    """Notes that ranks leave for each other, apart from collectives: in the default store.

    Nothing here waits for another rank.

    Args:
        prefix: in front of every key.

    Attributes:
        rank: this process's global rank.
        store: the default process group's store.
    """

    def __init__(self, prefix: str) -> None:
        self.rank = dist.get_rank()
        self.store = default_store()
        self._notes = PrefixStore(prefix, self.store)

    def write(self, key: str, text: str) -> None:
        """Leave a note, in place of one that is there."""
        self._notes.set(key, text)

    def has(self, keys: list[str]) -> bool:
        """Whether all of these notes are there."""
        return bool(self._notes.check(keys))

    def read(self, keys: list[str]) -> list[str]:
        """Notes that are there."""
        return [note.decode() for note in self._notes.multi_get(keys)]

    def claim(self, key: str, expected: str, text: str) -> str:
        """Leave a note if there is ``expected`` ("": none); returns what is there then."""
        return self._notes.compare_set(key, expected, text).decode()

    def erase(self, key: str) -> None:
        """Take a note away; no-op where there is none."""
        self._notes.delete_key(key)


def default_store() -> Store:
    """The default process group's store; another object once it was made anew."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def global_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The global ranks of a process group, in ascending order."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that a collective of ``group`` waits for other ranks."""
    timeout = _chosen_timeout(group, device) or dist.default_pg_timeout
    return float(timeout.total_seconds())


def _chosen_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The time-out that ``group`` was made with, where its backend tells."""
    options = getattr(_inside(backend_of(group, device)), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
