"""What ranks tell each other apart from tensors: objects, and notes in the default store.

Members          the ranks of a process group; what each has, to all, over that group
SideChannel      objects to rank 0 and back, beside training, over a gloo group of its own
Vote             whether any rank has said yes, known a call later, over another one
StoreBoard       notes that ranks leave for each other; nobody waits: write, has, read, claim
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fsdp2.core.device.collectives import Work
from fsdp2.core.device.process_groups import current_world, rank_and_size, ranks_of

T = TypeVar("T")


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
        """The object of each of them, by rank; picklable. Not for steady steps."""
        if self.size == 1:
            return [value]
        found = [value] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found


def members_of(group: dist.ProcessGroup | None) -> Members | None:
    """The ranks of a process group; ``None`` if this rank is not in it.

    Args:
        group: the result of ``new_group``, also on ranks outside the group. ``None``: the default
            group, or only this process if there is none.
    """
    if group is None or (dist.is_initialized() and group is current_world()):
        rank, size = rank_and_size()
        return Members(rank, tuple(range(size)))
    if not isinstance(group, dist.ProcessGroup) or not dist.is_initialized():
        return None
    try:
        return Members(group.rank(), tuple(ranks_of(group)), group)
    except (KeyError, ValueError):  # it was destroyed
        return None


class _Peers(Protocol):
    """What sends and sums tensors: a process group, or a backend alone."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """To a rank of the group."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """From a rank of the group, in place."""

    def allreduce(self, tensors: list[torch.Tensor], /) -> Work:
        """The sum over its ranks, in place."""


def _beside_training(members: Members) -> _Peers | None:
    """A gloo group of its own; ``None`` for one rank. A collective of all ``members``.

    Where these are not all ranks, torch keeps no list of the group: it would name it by how many
    others each rank has, which may differ.
    """
    if members.size == 1:
        return None
    if members.ranks == tuple(range(dist.get_world_size())):
        return dist.new_group(backend="gloo")
    (name, *_) = members.gather(os.urandom(8).hex())
    notes = PrefixStore(f"fsdp2/side/{name}", default_store())
    # torch's stub leaves out the methods that move tensors.
    return dist.ProcessGroupGloo(  # type: ignore[return-value]
        notes, members.rank, members.size, dist.default_pg_timeout
    )


class LostRankError(Exception):
    """A rank cannot be reached any more."""


class SideChannel:
    """Objects to rank 0 and back, over a gloo group of its own, from any one thread at a time.

    Training's collectives may run at the same time. Rank 0 hears of a rank that has died, as its
    connection closes, and the others hear of it from rank 0: nobody waits for who is not there. A
    rank that lives and does not answer is waited for as long as the group's time-out says.

    To make one is a collective of all ``members``.
    """

    def __init__(self, members: Members) -> None:
        self.rank, self.size = members.rank, members.size
        self._group = _beside_training(members)

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
    world = current_world() if rank_and_size()[1] > 1 else None
    if _side_of[0] is not world:
        _side.clear()
        _side_of[0] = world
    if members.ranks not in _side:
        _side[members.ranks] = SideChannel(members)
    return _side[members.ranks]


class Vote:
    """Whether any rank has said yes, as all ranks hear in the same call: the one after.

    A call starts the sum of one number over a gloo group of its own, and looks at the sum that the
    call before has started: if calls are a step apart, no rank waits. To make one is a collective
    of all ``members``.
    """

    def __init__(self, members: Members) -> None:
        self._group = _beside_training(members)
        self._is_yes = False
        self._asked: tuple[torch.Tensor, Work] | None = None

    def ask(self, yes: bool) -> bool:
        """Whether any rank said yes in an earlier call; of one rank, in this one. It stays so.

        Raises:
            LostRankError: a rank is gone.
        """
        if self._group is None:
            self._is_yes |= yes
        elif not self._is_yes and not self._heard():
            number = torch.tensor([int(yes)])
            self._asked = (number, self._group.allreduce([number]))
        return self._is_yes

    def finish(self) -> None:
        """Wait for what the last call has started, so that the group may go."""
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
