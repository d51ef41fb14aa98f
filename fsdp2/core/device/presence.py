"""Every rank of a process group runs fsdp2, or none communicates.

    fully_shard      announce   <group>/<rank> ──> its backend   by each rank
    the first bind   meet       all are there, and alike?
                                               ──> <group>/all   by the first rank of the group
                                it is there?   ──> go on         by the others
    the first forward  connect  meet, and one small collective   where the backend makes its
                                                                 communicator in the first one

A rank that runs torch's `fully_shard` in its place never announces itself. Its collectives may well
be of the sizes that ours are, and both would read each other's bytes as their own. So would ranks
whose backends differ, of which one coalesces and the other does not: environment variables
of one process may choose that.

Each process group is met once, and connected once; nothing here runs in a step.

Why `connect` cannot deadlock. A first collective blocks the host until all ranks of the group
are in theirs. All ranks take their groups in one order: by global ranks, then by name, which all
members of a group agree on. So of all groups that some rank waits in, the least is completed:
its other members wait for none that comes before it, and come to it. That holds where ranks are in
different groups, as in HSDP, or in pipeline stages, whose groups do not meet. It takes what
gathers take anyway: the members of a group run the same roots in the same order (invariant
I11). Groups of reductions are left out of a forward without backward, which one replica may run
alone.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch

from fsdp2.core.config import CommunicationError, RankMismatchError
from fsdp2.core.device.backends import traits_of
from fsdp2.core.device.channels import StoreBoard, default_store
from fsdp2.core.device.one_off import run_first_collective
from fsdp2.core.device.process_groups import ProcessGroup, backend_name, global_ranks, timeout_of
from fsdp2.core.progress import communication_error

SHORTEST_PAUSE = 0.0002  # seconds between looks, at first
LONGEST_PAUSE = 0.02
PATIENCE = 60.0  # seconds until a rank that waits says so

_IMAGINED = ("fake", "null")
"""Backends of one process that claims to be many ranks."""

_announced: WeakSet[ProcessGroup] = WeakSet()
_met: WeakSet[ProcessGroup] = WeakSet()
_connected: WeakSet[ProcessGroup] = WeakSet()

_ALIKE = "fsdp2"
"""What the first rank leaves for the others if all ranks' backends are alike."""


@dataclass(frozen=True)
class Link:
    """A process group that a unit communicates over.

    Attributes:
        group: the process group.
        device: of its collectives.
        unit: name of the unit, for messages.
    """

    group: ProcessGroup
    device: torch.device
    unit: str


def announce(group: ProcessGroup | None, device: torch.device) -> None:
    """Leave a note that this rank of ``group`` runs fsdp2; waits for nobody."""
    if group is None or group in _announced:
        return
    _announced.add(group)
    if group.size() == 1 or default_store() is None or backend_name(group, device) in _IMAGINED:
        _met.add(group)
        return
    board = _board()
    board.write(_key(group, board.rank), traits_of(group, device).name)


def meet(group: ProcessGroup | None, device: torch.device, unit: str) -> None:
    """Return when every rank of ``group`` has announced itself; at once after the first time.

    Args:
        group: a process group that this rank has announced itself in.
        device: of its collectives.
        unit: name of the unit that is about to use it, for messages.

    Raises:
        RankMismatchError: a rank has not within the group's time-out, or has another backend.
        CommunicationError: the store has gone.
    """
    if group is None or group in _met:
        return
    announce(group, device)
    if group in _met:
        return
    try:
        _wait(group, unit, timeout_of(group, device))
    except RankMismatchError:
        raise
    except RuntimeError as error:
        what = f"the first gather of unit '{unit}'"
        raise CommunicationError(
            f"the process group's store could not be reached before {what}, so the rank "
            f"that holds it has probably ended; start all ranks again: {error}"
        ) from error
    _met.add(group)


def unconnected(links: Sequence[Link]) -> list[Link]:
    """Those whose backends make communicators in the first collective, which did not run yet."""
    return [link for link in links if _connects_late(link)]


def connect(links: Sequence[Link]) -> None:
    """Run the first collective of process groups, each once in a process.

    Args:
        links: `unconnected` ones; all ranks of each connect it before they wait for anything else.

    Raises:
        RankMismatchError: as `meet`.
        CommunicationError: as `meet`; or the first collective of a group failed.
    """
    in_order = sorted(links, key=lambda link: (global_ranks(link.group), link.group.group_name))
    for link in in_order:
        meet(link.group, link.device, link.unit)
    for link in in_order:
        if link.group in _connected:  # it was twice in the list
            continue
        try:
            run_first_collective(link.group, link.device)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise communication_error("first collective", link.unit, error) from error
        _connected.add(link.group)


def _connects_late(link: Link) -> bool:
    if link.group in _connected or link.group.size() == 1:
        return False
    return traits_of(link.group, link.device).connects_late


def _wait(group: ProcessGroup, unit: str, timeout: float) -> None:
    board, ranks = _board(), global_ranks(group)
    everyone = _key(group, "all")
    leads = board.rank == ranks[0]
    awaited = [_key(group, rank) for rank in ranks] if leads else [everyone]
    start = time.monotonic()
    pause = SHORTEST_PAUSE
    warned = False
    while not board.has(awaited):
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)
        waited = time.monotonic() - start
        if waited > (timeout if warned else min(PATIENCE, timeout / 2)):
            missing = [rank for rank in ranks if not board.has([_key(group, rank)])] or ranks[:1]
            names = ", ".join(map(str, missing))
            if waited > timeout:
                raise RankMismatchError(
                    f"ranks {names} have not called fsdp2's fully_shard for {timeout:g} s, while "
                    f"this rank waits to gather unit '{unit}', so that they are late or run "
                    f"torch's; start every rank through python -m fsdp2.run, or call "
                    f"fsdp2.install() on each"
                )
            warned = True
            warnings.warn(
                f"unit '{unit}' waits for ranks {names}, which have not called fsdp2's fully_shard "
                f"yet; if they run torch's, start every rank through python -m fsdp2.run",
                stacklevel=2,
            )
    notes = board.read(awaited)
    found = _differences(ranks, notes) if leads else notes[0]
    if leads:
        board.write(everyone, found)
    if found != _ALIKE:
        raise RankMismatchError(
            f"the backends of a process group differ: {found}; start every rank with the same "
            f"version of torch and the same environment, TORCH_DIST_USE_NCCL2 and "
            f"TORCH_DISTRIBUTED_DEBUG included"
        )


def _differences(ranks: Sequence[int], kinds: Sequence[str]) -> str:
    """Which ranks have which kind of backend, if they do not all have the same."""
    if len(set(kinds)) == 1:
        return _ALIKE
    return ", ".join(f"{kind} on rank {rank}" for rank, kind in zip(ranks, kinds, strict=True))


def _board() -> StoreBoard:
    return StoreBoard("fsdp2/present")


def _key(group: ProcessGroup, part: int | str) -> str:
    return f"{group.group_name}/{part}"
