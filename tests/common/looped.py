"""Coalesced collectives for a backend that has none: one call a tensor.

The coalesced transport and the direct reduction need a backend with coalesced collectives, which
gloo is not. `coalescing()` gives fsdp2 one that loops over gloo's single ones, so that real data
takes the zero-copy path on CPU ranks, and on two ranks that share a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor

from fsdp2.core.config import GroupOptions
from fsdp2.core.device.collectives import GroupCollectives, ReduceKind
from fsdp2.sharding import api, assembly


class LoopedCollectives(GroupCollectives):
    """What NCCL does in one launch, in a loop. Counts the launches that NCCL would have made."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.coalesces = True
        self.launches = 0

    def bind_all_gather_many(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Callable[[], None]:
        def gather_many() -> None:
            self.launches += 1
            for output, input_ in zip(outputs, inputs, strict=True):
                work = self.all_gather(output, input_)
                if work is not None:
                    work.wait()

        return gather_many

    def bind_reduce_scatter_many(
        self, kind: ReduceKind
    ) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
        reduce_scatter = self.bind_reduce_scatter(kind)

        def reduce_scatter_many(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
            self.launches += 1
            for output, input_ in zip(outputs, inputs, strict=True):
                work = reduce_scatter(output, input_)
                if work is not None:
                    work.wait()

        return reduce_scatter_many

    def launch_behind(
        self, unit: str, kind: ReduceKind | None, outputs: list[Tensor], inputs: list[Tensor]
    ) -> None:
        for output, input_ in zip(outputs, inputs, strict=True):
            work = super().launch_behind(unit, kind, [output], [input_])
            if work is not None:
                work.wait()


@contextmanager
def coalescing(pack_below: int = 0) -> Iterator[None]:
    """Groups that `fully_shard` makes inside have coalesced collectives."""
    options = partial(GroupOptions, pack_below=pack_below)
    with (
        mock.patch.object(assembly, "GroupCollectives", LoopedCollectives),
        mock.patch.object(api, "GroupOptions", options),
    ):
        yield
