"""What ranks tell each other apart from tensors: objects, and notes in the default store.

gather_objects   what each rank has, to all: a collective of the default process group
SideChannel      objects to rank 0 and back, beside training, over a gloo group of its own
StoreBoard       notes that ranks leave for each other; nobody waits: write, has, read, claim
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fsdp2.core.device.process_groups import current_world, rank_and_size

T = TypeVar("T")


def gather_objects(value: T) -> list[T]:
    """What each rank of the default process group has; picklable. Not for steady steps."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    found = [value] * size
    dist.all_gather_object(found, value)
    return found


class LostRankError(Exception):
    """A rank cannot be reached any more."""


class SideChannel:
    """Objects to rank 0 and back, over a gloo group of its own, from any one thread at a time.

    Training's collectives may run at the same time. Rank 0 hears of a rank that has died, as its
    connection closes, and the others hear of it from rank 0: nobody waits for who is not there. A
    rank that lives and does not answer is waited for as long as the group's time-out says.

    To make one is a collective of all ranks of the default process group.
    """

    def __init__(self) -> None:
        self.rank, self.size = rank_and_size()
        self._group = dist.new_group(backend="gloo") if self.size > 1 else None

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
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        try:
            dist.send(torch.tensor([len(data)]), rank, group=self._group)
            dist.send(data, rank, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise LostRankError(str(error)) from error

    def _receive(self, rank: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(length, rank, group=self._group)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(data, rank, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise LostRankError(str(error)) from error
        return pickle.loads(data.numpy().tobytes())

    def _receive_or_lost(self, rank: int) -> Any:
        try:
            return self._receive(rank)
        except LostRankError as lost:
            return LostRankError(str(lost))


_side: list[tuple[dist.ProcessGroup | None, SideChannel]] = []


def side_channel() -> SideChannel:
    """The one of this process; made again where the default process group is another one."""
    world = current_world() if rank_and_size()[1] > 1 else None
    if not _side or _side[0][0] is not world:
        _side[:] = [(world, SideChannel())]
    return _side[0][1]


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
