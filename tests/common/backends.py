"""Kinds of backends: what stands in for each of them, and gloo taken for one.

    Recorded groups        one process claims to be rank 0 of some; launches are written down
    FSDP2_TEST_BACKEND     rank processes of the suite take their gloo groups for that kind

    FSDP2_TEST_BACKEND=nccl-legacy pytest tests/reduce/test_gradients.py

A backend is known by the class of what runs its collectives (`fsdp2.core.device.backends`). So an
object of a class with the right name is all that a stand-in needs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.checks.presence import _announced
from fsdp2.core.device.backends import Traits, know, traits_of
from fsdp2.core.device.process_groups import _met
from fsdp2.tracing.paper.null_group import COLLECTIVES, NullGroup, init_null_group

VARIABLE = "FSDP2_TEST_BACKEND"

# kind -> class of the backend, and what its name() says
KINDS = {
    "nccl-legacy": ("ProcessGroupNCCL", "nccl"),
    "nccl2": ("ProcessGroupNCCL2", "nccl2"),
    "gloo": ("ProcessGroupGloo", "gloo"),
    "unknown": ("ProcessGroupXCCL", "xccl"),
}


class Config:
    """As `ProcessGroupNCCL.NCCLConfig`."""

    def __init__(self) -> None:
        self.blocking = self.cga_cluster_size = self.min_ctas = self.max_ctas = -(2**31)


class Options:
    """As `ProcessGroupNCCL.Options` before torch 2.15."""

    def __init__(self) -> None:
        self._timeout = timedelta(seconds=600)
        self.is_high_priority_stream = False
        self.config = Config()


class LazyOptions(Options):
    """As those of torch 2.15."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy_init = False


def stand_in(kind: str, options: object = None) -> Any:
    """A backend object of ``kind``."""
    name, said = KINDS[kind]
    made: Any = type(name, (), {"name": lambda self: said})()
    if options is not None:
        made.options = options
    return made


class Served:
    """As a process group that has one backend."""

    def __init__(self, backend: object) -> None:
        self._backend = backend

    def _get_backend(self, device: torch.device) -> object:
        return self._backend


def known(kind: str) -> Traits:
    """What the table says of ``kind``."""
    return traits_of(Served(stand_in(kind)), torch.device("cpu"))


# ---- gloo, taken for another kind


def pretend() -> None:
    """Take gloo for what the environment says: rank processes call this when they start.

    Gloo has no premultiplied sums, whatever it is taken for.
    """
    kind = os.environ.get(VARIABLE)
    if kind is not None:
        know("ProcessGroupGloo", replace(known(kind), premultiplies=False))


def pretended() -> str:
    """The kind that rank processes take gloo for."""
    return os.environ.get(VARIABLE, "gloo")


packs = pytest.mark.skipif(
    known(pretended()).coalesces,
    reason="counts launches: uneven parameters travel apart where even ones are coalesced",
)
"""For tests that say how often something is launched, or that it travels packed."""


# ---- launches, written down


@dataclass(frozen=True)
class Launch:
    """One collective of a step."""

    phase: str
    unit: str
    collective: str
    tensors: int
    nbytes: int
    group: str

    def __str__(self) -> str:
        what = f"{self.phase:<9}{self.unit:<10}{self.collective:<32}"
        return f"{what}{self.tensors:>3} tensors{self.nbytes:>7} bytes  {self.group}"


class Recorder:
    """Writes down the launches of recorded groups."""

    def __init__(self) -> None:
        self.kind = "gloo"
        self.phase = self.unit = "-"
        self.launches: list[Launch] = []

    def note(
        self, group: Any, collective: str, outputs: list[Tensor], inputs: list[Tensor]
    ) -> None:
        given = outputs if collective == "allreduce" else inputs
        nbytes = sum(tensor.nbytes for tensor in given)
        about = (len(given), nbytes, group.label)
        self.launches.append(Launch(self.phase, self.unit, collective, *about))


RECORDER = Recorder()


class RecordedGroup(NullGroup):
    """A null group that is of a kind."""

    def __init__(self, rank: int, size: int, observer: Any) -> None:
        super().__init__(rank, size, observer)
        self.label = f"{size} ranks"
        kind = RECORDER.kind
        self.served_by = stand_in(kind, LazyOptions() if "nccl" in kind else None)
        if kind == "nccl-legacy":
            for name in COLLECTIVES:
                setattr(self, name, self._without_work(getattr(self, name)))
        _announced.add(self)  # this process is all of its ranks
        _met.add(self)

    @staticmethod
    def _without_work(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            method(*args, **kwargs)

        return call

    def _get_backend(self, device: torch.device) -> Any:
        return self.served_by


def init_recorded(kind: str, size: int) -> None:
    """Make a recorded group of ``kind`` the default process group."""
    RECORDER.__init__()  # type: ignore[misc]  # from the start
    RECORDER.kind = kind
    init_null_group(size, observer=RECORDER.note, kind=RecordedGroup)
