"""A process group whose collectives do nothing: of as many ranks as you like, in one process.

One process claims to be rank 0 of 8 (or 1024, or 16384); every collective returns at once, with a
completed `Work` and with its output tensors as they were. Plans run on it, and measurements of what
surrounds collectives (`fsdp2.testing.null_group`). torch's `fake` backend copies the input once per
rank, so its cost grows with the world size.

Gathered tensors hold whatever was in that memory, with one exception: int64 tensors, and a uint8
tensor gathered just after one, are copied to every rank's place. Those are the sizes and bytes of
object collectives, which so give each rank its own object back, and the parameter shapes that
DistributedDataParallel compares. A `scatter` from this rank gives it its own tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.core.facts import Traits, know
from fsdp2.tracing.paper.values import tensors_in

BACKEND = "null"


class NullWork(dist.Work):
    """A `Work` that is always complete. `tensors` is what its future holds, for DDP's reducer."""

    def __init__(self, tensors: list[Tensor] | None = None) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


_DONE = NullWork()

# told of the group, of the collective (torch 2.13's names), of its outputs and of its inputs (none
# in place); returns the collective's work, if the null group's is not to be it
Observer = Callable[["NullGroup", str, list[Tensor], list[Tensor]], NullWork | None]


def _renamed(name: str) -> Callable[..., dist.Work]:
    """The name of a collective until torch 2.12."""

    def call(group: PythonGroup, *args: object, **kwargs: object) -> dist.Work:
        done: dist.Work = getattr(group, name)(*args, **kwargs)
        return done

    return call


class PythonGroup(dist.ProcessGroup):
    """The names that c10d requires of a process group that is written in Python."""

    backend = ""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = self._desc = ""

    # c10d calls these, from C++ too.
    def getBackendName(self) -> str:  # noqa: N802
        return self.backend

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    _allgather_base = _renamed("all_gather_single")
    allgather_into_tensor_coalesced = _renamed("all_gather_single_coalesced")
    _reduce_scatter_base = _renamed("reduce_scatter_single")
    reduce_scatter_tensor_coalesced = _renamed("reduce_scatter_single_coalesced")
    alltoall_base = _renamed("all_to_all_single")


COLLECTIVES = (
    *("all_gather_single", "all_gather_single_coalesced", "allgather", "allgather_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter", "reduce"),
    *("all_to_all_single", "alltoall", "allreduce", "allreduce_coalesced", "broadcast"),
    *("gather", "scatter", "barrier", "monitored_barrier", "send", "recv", "recv_anysource"),
)
"""The methods of `NullGroup` that observers are told."""


class NullGroup(PythonGroup):
    """Rank `rank` of `size`; every collective is a no-op, of which an observer is told."""

    backend = BACKEND

    def __init__(self, rank: int, size: int, observer: Observer | None = None) -> None:
        super().__init__(rank, size)
        self.observer = observer
        self._bytes_come_next = False  # an object's size was gathered, its pickle comes next

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> NullWork:
        return _DONE

    def all_gather_single(self, output: Tensor, input: Tensor, opts: object = None) -> NullWork:
        if not input.dtype.is_floating_point and self._belongs_to_an_object(input):
            output.view(-1, *input.shape).copy_(input)
        return _DONE

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> NullWork:
        return NullWork(tensors)

    allreduce_coalesced = allreduce

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None
    ) -> NullWork:
        if outputs and self._belongs_to_an_object(inputs[0]):
            for output in outputs[0]:
                output.copy_(inputs[0])
        return _DONE

    gather = allgather  # with no outputs on other ranks than the destination

    def _belongs_to_an_object(self, tensor: Tensor) -> bool:
        is_size = tensor.dtype is torch.int64
        is_pickle = tensor.dtype is torch.uint8 and self._bytes_come_next
        self._bytes_come_next = is_size
        return is_size or is_pickle

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: object = None
    ) -> NullWork:
        if inputs:
            outputs[0].copy_(inputs[0][self.rank()])
        return _DONE


def _told(name: str) -> Callable[..., NullWork]:
    """A collective of `NullGroup`, of which it tells its observer first."""
    method = vars(NullGroup).get(name, lambda *_args, **_kwargs: _DONE)

    def call(group: NullGroup, *args: object, **kwargs: object) -> NullWork:
        if group.observer is None:
            return method(group, *args, **kwargs)
        work = group.observer(group, name, tensors_in(args[:1]), tensors_in(args[1:]))
        done = method(group, *args, **kwargs)
        return done if work is None else work

    return call


for _name, _method in [(name, _told(name)) for name in COLLECTIVES]:
    setattr(NullGroup, _name, _method)

know("NullGroup", Traits("null", coalesces=True))  # to be measured as NCCL would be

_make: Callable[[int, int], NullGroup] = NullGroup
"""Makes the groups yet to be made: a mesh makes its own subgroups, through the backend."""


def init_null_group(
    world_size: int,
    rank: int = 0,
    *,
    observer: Observer | None = None,
    device_type: str = "cpu",
    kind: Callable[..., NullGroup] = NullGroup,
) -> NullGroup:
    """Make a null group the default process group, and return it.

    It serves the CPU, CUDA and ``device_type``. `observer` is given to this group and to every null
    group made after it, such as a mesh's; all of them are of ``kind``.
    """
    global _make
    if BACKEND not in dist.Backend.backend_list:
        devices = list(dict.fromkeys(("cpu", "cuda", "meta", device_type)))
        dist.Backend.register_backend(
            BACKEND, lambda store, rank, size, timeout: _make(rank, size), devices=devices
        )
    _make = functools.partial(kind, observer=observer)
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert isinstance(group, NullGroup)
    return group


@contextmanager
def null_world(world_size: int, rank: int = 0, **options: object) -> Iterator[NullGroup]:
    """The default process group is that of `init_null_group` inside, and none afterwards."""
    global _make
    group = init_null_group(world_size, rank, **options)
    try:
        yield group
    finally:
        dist.destroy_process_group()
        _make = NullGroup
