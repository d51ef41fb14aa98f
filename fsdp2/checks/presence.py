"""Every rank of a process group runs fsdp2, or none communicates.

    fully_shard      announce   <group>/<rank> ──> its backend   by each rank
    the first bind   meet       all are there, and alike?
                                               ──> <group>/all   by the first rank of the group
                                it is there?   ──> go on         by the others

A rank that runs torch's `fully_shard` in its place never announces itself. Its collectives may well
be of the sizes that ours are, and both would read each other's bytes as their own. So would ranks
whose backends differ, of which one coalesces and the other does not: environment variables
of one process may choose that.

Each process group is met once; nothing here runs in a step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from weakref import WeakSet

import torch

from fsdp2.core.device import process_groups
from fsdp2.core.device.backends import traits_of
from fsdp2.core.device.channels import StoreBoard, default_store
from fsdp2.core.device.process_groups import ProcessGroup, backend_name, global_ranks, timeout_of
from fsdp2.core.errors import CommunicationError, RankMismatchError, coded

SHORTEST_PAUSE = 0.0002  # seconds between looks, at first
LONGEST_PAUSE = 0.02
PATIENCE = 60.0  # seconds until a rank that waits says so

_IMAGINED = ("fake", "null")
"""Backends of one process that claims to be many ranks."""

_announced: WeakSet[ProcessGroup] = WeakSet()

_ALIKE = "fsdp2"
"""The first rank's note for the others if all ranks' backends are equal."""


def announce(group: ProcessGroup | None, device: torch.device) -> None:
    """Leave a note that this rank of ``group`` runs fsdp2; does not wait."""
    if group is None or group in _announced:
        return
    _announced.add(group)
    if not _is_alone(group, device):
        board = _board()
        board.write(_key(group, board.rank), traits_of(group, device).name)


def _is_alone(group: ProcessGroup, device: torch.device) -> bool:
    """Whether there is no other process to wait for."""
    imagined = backend_name(group, device) in _IMAGINED
    return group.size() == 1 or default_store() is None or imagined


def _meet(group: ProcessGroup, device: torch.device, unit: str) -> None:
    """Return when every rank of ``group`` has announced itself."""
    announce(group, device)
    if _is_alone(group, device):
        return
    try:
        _wait(group, unit, timeout_of(group, device))
    except RankMismatchError:
        raise
    except RuntimeError as error:
        raise store_gone(f"the first gather of unit '{unit}'", error) from error


def store_gone(what: str, error: RuntimeError) -> CommunicationError:
    """For an ``error`` of the store before ``what``."""
    return coded(
        CommunicationError,
        "store-gone",
        f"the process group's store could not be reached before {what}, so the rank that holds it "
        f"has probably ended; start all ranks again: {error}",
    )


def looks(board: StoreBoard, keys: list[str]) -> Iterator[float]:
    """Look until all of these notes are there; yields the seconds so far after each look."""
    start, pause = time.monotonic(), SHORTEST_PAUSE
    while not board.has(keys):
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)
        yield time.monotonic() - start


def _wait(group: ProcessGroup, unit: str, timeout: float) -> None:
    board, ranks = _board(), global_ranks(group)
    everyone = _key(group, "all")
    leads = board.rank == ranks[0]
    awaited = [_key(group, rank) for rank in ranks] if leads else [everyone]
    warned = False
    for waited in looks(board, awaited):
        if waited > (timeout if warned else min(PATIENCE, timeout / 2)):
            missing = [rank for rank in ranks if not board.has([_key(group, rank)])] or ranks[:1]
            names = ", ".join(map(str, missing))
            if waited > timeout:
                raise coded(
                    RankMismatchError,
                    "other-implementation",
                    f"ranks {names} have not called fsdp2's fully_shard for {timeout:g} s, while "
                    f"this rank waits to gather unit '{unit}', so they are late or use torch's "
                    f"fully_shard; start every rank with python -m fsdp2.run, or call "
                    f"fsdp2.install() on each",
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
        raise coded(
            RankMismatchError,
            "backends-differ",
            f"the backends of a process group differ: {found}; start every rank with the same "
            f"version of torch and the same environment, TORCH_DIST_USE_NCCL2 and "
            f"TORCH_DISTRIBUTED_DEBUG included",
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


process_groups.first_use.add(_meet)
