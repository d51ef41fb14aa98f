"""Process groups: the existing ones, their properties, and new ones made next to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _hash_ranks_to_str

from fsdp2.core.device.backends import backend_of
from fsdp2.core.device.collectives import Collectives, GroupCollectives, largest_over
from fsdp2.core.errors import coded
from fsdp2.core.notices import Notice

ProcessGroup = dist.ProcessGroup
"""For modules that only name the type: they do not use c10d."""


def default_group() -> dist.ProcessGroup:
    """The default process group, which is started from torchrun's environment if there is none."""
    if not dist.is_initialized():
        dist.init_process_group()
    group = dist.group.WORLD
    assert group is not None
    return group


def current_world() -> dist.ProcessGroup | None:
    """The present default process group; ``None`` if there is none."""
    return dist.group.WORLD


def rank_and_size() -> tuple[int, int]:
    """This rank, and the number of ranks in the default process group; (0, 1) if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """The global ranks of a process group, in its order."""
    return list(dist.get_process_group_ranks(group))


def global_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The global ranks of a process group, in ascending order."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def new_groups(
    around: Sequence[dist.ProcessGroup], device: torch.device, lines: Sequence[Sequence[int]]
) -> list[dist.ProcessGroup]:
    """Process groups that this rank is in, made without the ranks that are in none of them.

    ``around`` are groups that together reach all ranks that make such groups now, one per axis;
    ``lines`` are the ranks of each new group. They have the properties of the first of ``around``:
    its backend, its time-out, and over NCCL its options (`_options_like`).

    torch names such a group by its ranks and by how many groups the process is in (2.11 to 2.13) or
    has made (2.15): ranks with more groups than others would wait for them under another name, and
    raise here, all of them. If the default group is bound to a device, torch would split its
    communicator, and hang without the other ranks: groups are made without a split (`_unsplit`).
    """
    own = int(_hash_ranks_to_str([0])[:15], 16)  # of the number in the name, and no more
    axes = (GroupCollectives(group, device, asynchronous=False) for group in around)
    most, least = largest_over(axes, [own, -own])
    if -least != most:
        raise coded(
            ValueError,
            "group-counts",
            "fsdp2 needs new process groups, but some ranks have created more process groups "
            "than others, so torch would give one group two names; create the same number on all "
            "ranks before, for example with init_device_mesh",
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
                # Without it, all ranks of the world would have to make this call.
                use_local_synchronization=True,
            )
        assert isinstance(group, dist.ProcessGroup)
        made.append(group)
    return made


def with_own_group(collectives: Collectives, device: torch.device) -> Collectives:
    """The same over a new process group of the same ranks, all of which must call this."""
    assert collectives.group is not None
    ranks = ranks_of(collectives.group)
    (group,) = new_groups([collectives.group], device, [ranks])
    return collectives.over(group)


_CONFIG = ("blocking", "cga_cluster_size", "min_ctas", "max_ctas")
"""Numbers of NCCL's configuration that all versions of torch have."""


def _options_like(group: dist.ProcessGroup) -> object:
    """Options for a group like ``group``, but for the split; ``None`` if it has no NCCL part."""
    for device in getattr(group, "_device_types", ()):
        given: Any = getattr(_inside(backend_of(group, device)), "options", None)
        # Only options of NCCL have it; those of gloo need nothing but the time-out.
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
def _unsplit(options: object) -> Iterator[None]:
    """Groups that are made inside are not split off from the default group.

    Before torch 2.15 there is no option for that. torch splits if the default group is bound to a
    device (`init_process_group(device_id=…)`), so it is not while a group is made.
    """
    world = current_world()
    bound = getattr(world, "bound_device_id", None)
    if world is None or bound is None or hasattr(options, "lazy_init"):
        yield
        return
    # `new_group` reads it when it is called, and splits only if it is set.
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


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
    # A group without a backend for the CPU either is written in Python, and has none to ask.
    return backend_of(group, device) is not None or backend_of(group, torch.device("cpu")) is None


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that a collective of ``group`` waits for other ranks."""
    timeout = _chosen_timeout(group, device) or dist.default_pg_timeout
    return float(timeout.total_seconds())


def _chosen_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The time-out of ``group``, if its backend has it as an attribute."""
    options = getattr(_inside(backend_of(group, device)), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def _inside(backend: object) -> object:
    """The object that TORCH_DISTRIBUTED_DEBUG=DETAIL has wrapped; anything else unchanged."""
    return getattr(backend, "wrapped_pg", backend)


# ---- whether all ranks are there: asked once, before a unit uses a group first

first_use: Notice[[ProcessGroup, torch.device, str]] = Notice()
"""Called before the first use of a process group, with its device and the unit's name."""

# Weak: a destroyed group, and what its backend holds, would stay alive otherwise.
_met: WeakSet[ProcessGroup] = WeakSet()


def meet(group: ProcessGroup | None, device: torch.device, unit: str) -> None:
    """Wait for every rank of ``group``, once; raise if one does not come or has another backend."""
    if group is not None and group not in _met:
        first_use(group, device, unit)
        # Last: if a rank does not come, the next use asks again.
        _met.add(group)
