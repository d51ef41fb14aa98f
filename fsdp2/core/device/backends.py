"""The known behavior of backends, with the source of each fact (decision 22).

    process group ── the backend that serves the device ──> its class ──> Traits, or UNKNOWN

Backends are identified by the class of the object that runs their collectives, not by names: from
torch 2.15 a group that was started as ``nccl`` is a ``ProcessGroupNCCL2``, or a
``ProcessGroupNCCL`` with ``TORCH_DIST_USE_NCCL2=0``. A backend that has the coalesced methods need
not coalesce: nccl2 loops over the single ones. A backend outside the table is therefore assumed to
support only the collectives of one tensor, which every backend has.

Ranks decide alike (invariant I1): each leaves a note with the `Traits.name` of its backend, and the
first use of a process group compares them (`fsdp2.checks.presence`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

_TORCH = "pytorch, torch/csrc/distributed/c10d/"


@dataclass(frozen=True)
class Traits:
    """The properties of one kind of backend, as read in ``source``; ranks compare ``name``.

    Attributes:
        coalesces: whether coalesced collectives are one launch for all tensors. If not, groups are
            packed.
        premultiplies: whether reductions may divide in the collective (``_make_nccl_premul_sum``).
        connects_late: whether a process group makes its communicator in its first collective, so
            that fsdp2 runs one before the first gather (`fsdp2.core.schedule.connections`).
    """

    name: str
    coalesces: bool = False
    premultiplies: bool = False
    connects_late: bool = False
    source: str = ""


UNKNOWN = Traits("unknown")
"""The traits of a backend whose sources we have not read: ucc, xccl, hccl, ncclx and others."""

_KNOWN: dict[str, Traits] = {
    # collectiveCoalesced() is one ncclGroupStart … ncclGroupEnd around all tensors;
    # getNcclReduceOp() knows PREMUL_SUM; getNCCLComm() makes communicators in collectives.
    "ProcessGroupNCCL": Traits(
        "nccl-legacy", True, True, True, f"{_TORCH}ProcessGroupNCCL.cpp, 2.11 to 2.15"
    ),
    # allgather_into_tensor_coalesced() and reduce_scatter_tensor_coalesced() are a loop of
    # launches, each with a Work of two events; startCoalescing() batches sends and receives alone.
    # getNcclReduceOp() knows PREMUL_SUM. Communicators are made when the device is bound, or
    # with Options.lazy_init, as `new_groups` sets it, in the first collective.
    "ProcessGroupNCCL2": Traits(
        "nccl2",
        False,
        True,
        True,
        f"{_TORCH}nccl2/ProcessGroupNCCLBackend.cpp and ProcessGroupNCCLUtils.cpp, 2.14.1 and 2.15",
    ),
    # The same engine behind a wrapper that gives sends and receives communicators of their own.
    "ProcessGroupNCCLLazy": Traits(
        "nccl-lazy", False, True, True, f"{_TORCH}nccl2/ProcessGroupNCCLLazy.hpp, 2.15"
    ),
    # Has coalesced calls, but one of them costs more than one copy: measured, docs/benchmarks.md.
    "ProcessGroupGloo": Traits(
        "gloo", source=f"{_TORCH}ProcessGroupGloo.cpp, 2.11 to 2.15"
    ),
    # Moves nothing, and stands for whatever trains later.
    "FakeProcessGroup": Traits(
        "fake", True, source=f"{_TORCH}FakeProcessGroup.hpp, 2.11 to 2.15"
    ),
}  # fmt: skip

_WRAPPER = "_ProcessGroupWrapper"
"""The wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL adds around each backend."""


def know(kind: str, traits: Traits) -> None:
    """Add a backend by the name of the class of its object, or of its process group in Python."""
    _KNOWN[kind] = traits


def traits_of(group: dist.ProcessGroup, device: torch.device) -> Traits:
    """A backend's traits; a wrapper does not coalesce (torch 2.11, ProcessGroupWrapper.cpp)."""
    served_by = backend_of(group, device)
    kind = type(group if served_by is None else served_by).__name__
    if kind == _WRAPPER:
        inside = type(getattr(served_by, "wrapped_pg", None)).__name__
        known = _KNOWN.get(inside, UNKNOWN)
        return replace(known, name=f"{known.name}, wrapped", coalesces=False)
    return _KNOWN.get(kind) or replace(UNKNOWN, name=f"unknown ({kind})")


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The object that serves ``device`` in ``group``; ``None`` in one written in Python."""
    try:
        return group._get_backend(device)
    except (RuntimeError, AttributeError):
        return None
