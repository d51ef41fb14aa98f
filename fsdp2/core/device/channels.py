"""Outside of steps: objects and tensors that ranks exchange, and notes in the default store.

Objects go over a process group (`Members`), or beside training over a separate gloo group
(`SideChannel`, `Vote`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fsdp2.core.device.collectives import Work
from fsdp2.core.device.process_groups import backend_name, current_world, rank_and_size, ranks_of

T = TypeVar("T")


@dataclass(frozen=True)
class Members:
    """The ranks that take part in a call, and the position of this rank among them."""

    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def gather(self, value: T) -> list[T]:
        """The object of each rank, in their order; picklable. Too slow for every step."""
        if self.size == 1:
            return [value]
        found = [value] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found


def members_of(group: dist.ProcessGroup | None) -> Members | None:
    """The ranks of a process group; ``None`` if this rank is not in it."""
    if group is None or (dist.is_initialized() and group is current_world()):
        rank, size = rank_and_size()
        return Members(rank, tuple(range(size)))
    if not isinstance(group, dist.ProcessGroup) or not dist.is_initialized():
        return None
    try:
        return Members(group.rank(), tuple(ranks_of(group)), group)
    except (KeyError, ValueError):  # it was destroyed
        return None


def _beside_training(members: Members) -> dist.ProcessGroup | None:
    """A new gloo group; ``None`` for one rank. A collective of all ``members``.

    If these are not all ranks, the group is not registered with torch, which would name it by the
    number of groups that each rank has: that number may differ.
    """
    if members.size == 1:
        return None
    if members.ranks == tuple(range(dist.get_world_size())):
        return dist.new_group(backend="gloo")
    (name, *_) = members.gather(os.urandom(8).hex())
    notes = PrefixStore(f"fsdp2/side/{name}", default_store())
    # torch's stub lacks the methods that move tensors.
    return dist.ProcessGroupGloo(  # type: ignore[return-value]
        notes, members.rank, members.size, dist.default_pg_timeout
    )


class LostRankError(Exception):
    """A rank can no longer be reached."""


class SideChannel:
    """Objects to rank 0 and back, over a separate gloo group, from one thread at a time.

    Training's collectives may run at the same time. Rank 0 notices a rank that has died, because
    its connection closes, and the other ranks learn it from rank 0, so that no rank waits for a
    missing one. For a live rank that does not answer, ranks wait until the group's time-out.

    Creating one is a collective of all ``members``.
    """

    def __init__(self, members: Members) -> None:
        self.rank, self.size = members.rank, members.size
        self._group = _beside_training(members)

    def collect(self, value: T) -> list[T | LostRankError] | None:
        """The value of each rank, on rank 0; ``None`` on other ranks. Values must be picklable."""
        if self.rank:
            self._send(value, 0)
            return None
        return [value, *(self._receive_or_lost(rank) for rank in range(1, self.size))]

    def spread(self, values: Sequence[T] | None) -> T:
        """This rank's value of those that rank 0 passes; other ranks pass ``None``."""
        if values is None:
            received: T = self._receive(0)
            return received
        for rank, value in enumerate(values[1:], 1):
            with contextlib.suppress(LostRankError):  # the ranks that are left continue
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
_side_of: list[dist.ProcessGroup | None] = [None]  # the default group in which they were created


def side_channel(members: Members) -> SideChannel:
    """The side channel of these ranks; created again for another default process group."""
    world = current_world() if rank_and_size()[1] > 1 else None
    if _side_of[0] is not world:
        _side.clear()
        _side_of[0] = world
    if members.ranks not in _side:
        _side[members.ranks] = SideChannel(members)
    return _side[members.ranks]


class Vote:
    """Whether any rank has said yes: all ranks learn it in the same call, the next one.

    A call starts the sum of one number over a separate gloo group, and reads the sum that the last
    call started: if calls are a step apart, no rank waits. Creating one is a collective of all
    ``members``.
    """

    def __init__(self, members: Members) -> None:
        self._group = _beside_training(members)
        self._is_yes = False
        self._asked: tuple[torch.Tensor, Work] | None = None

    def ask(self, yes: bool) -> bool:
        """Whether any rank said yes in an earlier call, or the only rank in this one."""
        if self._group is None:
            self._is_yes |= yes
        elif not self._is_yes and not self._heard():
            number = torch.tensor([int(yes)])
            self._asked = (number, self._group.allreduce([number]))
        return self._is_yes

    def finish(self) -> None:
        """Wait for the sum that the last call started, so that the group can be destroyed."""
        self._heard()

    def _heard(self) -> bool:
        if self._asked is not None:
            number, work = self._asked
            self._asked = None
            try:
                work.wait()
            except RuntimeError as error:
                raise LostRankError(str(error)) from error
            self._is_yes = bool(number)
        return self._is_yes


class StoreBoard:
    """Notes that ranks leave for each other in the default store, without collectives.

    No method waits for another rank.
    """

    def __init__(self, prefix: str) -> None:
        self.rank = dist.get_rank()
        self.store = default_store()
        self._notes = PrefixStore(prefix, self.store)

    def write(self, key: str, text: str) -> None:
        """Write a note; it replaces an earlier one."""
        self._notes.set(key, text)

    def has(self, keys: list[str]) -> bool:
        """Whether all of these notes exist."""
        return bool(self._notes.check(keys))

    def read(self, keys: list[str]) -> list[str]:
        """Read notes that exist."""
        return [note.decode() for note in self._notes.multi_get(keys)]

    def claim(self, key: str, expected: str, text: str) -> str:
        """Write a note if ``expected`` is there ("": none); returns the resulting note."""
        return self._notes.compare_set(key, expected, text).decode()

    def erase(self, key: str) -> None:
        """Delete a note; no-op if there is none."""
        self._notes.delete_key(key)


def default_store() -> Store:
    """The default process group's store; another object after the group was created again."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


# ---- tensors: the host or the current stream waits


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
