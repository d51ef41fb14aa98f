"""Coalesced collectives for a backend that has none: one call a tensor.

The coalesced transport and the direct reduction need a backend with coalesced collectives, which
gloo is not. `coalescing()` gives fsdp2 one that loops over gloo's single ones, so that real data
takes the zero-copy path on CPU ranks, and on two ranks that share a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from fsdp2.core import assembly
from fsdp2.core.collectives import GroupCollectives, ReduceKind


class LoopedCollectives(GroupCollectives):
    """What NCCL does in one launch, in a loop. Counts the launches that NCCL would have made."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.coalesces = True
        self.launches = 0

    def bind_all_gather(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Callable[[], None]:
        def gather_many() -> None:
            self.launches += 1
            for output, input_ in zip(outputs, inputs, strict=True):
                work = self.all_gather(output, input_)
                if work is not None:
                    work.wait()

        return gather_many

    def reduce_scatter_many(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], kind: ReduceKind
    ) -> None:
        self.launches += 1
        for output, input_ in zip(outputs, inputs, strict=True):
            work = self.reduce_scatter(output, input_, kind)
            if work is not None:
                work.wait()


@contextmanager
def coalescing() -> Iterator[None]:
    """Groups that `fully_shard` makes inside have coalesced collectives."""
    with mock.patch.object(assembly, "GroupCollectives", LoopedCollectives):
        yield
