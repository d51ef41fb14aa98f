"""Ranks as threads, and collectives between them that only move tensors: no process group.

results = run_ranks(4, lambda collectives: ...)                one result a rank
results = run_mesh(2, 4, lambda collectives, replicas: ...)    2 copies of 4 ranks, row by row
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from fsdp2.core.device.collectives import ReduceKind

T = TypeVar("T")

TIMEOUT = 60.0  # seconds after which a rank that waits for another gives up


class _Meeting:
    """Where ranks meet: each brings a value and leaves with all of them."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=TIMEOUT)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def leave(self) -> None:
        self._barrier.abort()


class ThreadCollectives:
    """Collectives of one rank."""

    def __init__(
        self, meeting: _Meeting, size: int, rank: int, coalesces: bool, premultiplies: bool
    ) -> None:
        self._meeting = meeting
        self.size = size
        self.rank = rank
        self.coalesces = coalesces
        self.premultiplies = premultiplies
        self.calls: list[str] = []

    def all_gather(self, output: torch.Tensor, input_: torch.Tensor) -> None:
        self.calls.append("all_gather")
        self._gather(output, input_)

    def bind_all_gather(self, output: torch.Tensor, input_: torch.Tensor) -> Callable[[], None]:
        return lambda: self.all_gather(output, input_)

    def bind_all_gather_many(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        def gather_many() -> None:
            self.calls.append("all_gather_many")
            for output, input_ in zip(outputs, inputs, strict=True):
                self._gather(output, input_)

        return gather_many

    def bind_all_to_all(self, output: torch.Tensor, input_: torch.Tensor) -> Callable[[], None]:
        def exchange() -> None:
            self.calls.append("all_to_all")
            assert output.shape == input_.shape
            assert output.shape[0] == self.size
            rows = self._meeting.exchange(self.rank, input_.clone())
            output.copy_(torch.stack([row[self.rank] for row in rows]))

        return exchange

    def bind_reduce_scatter(self, kind: ReduceKind) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def reduce_scatter(output: torch.Tensor, input_: torch.Tensor) -> None:
            self.calls.append("reduce_scatter")
            self._scatter(output, input_, kind)

        return reduce_scatter

    def bind_reduce_scatter_many(
        self, kind: ReduceKind
    ) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]:
        def reduce_scatter_many(
            outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
        ) -> None:
            self.calls.append("reduce_scatter_many")
            for output, input_ in zip(outputs, inputs, strict=True):
                self._scatter(output, input_, kind)

        return reduce_scatter_many

    def _gather(self, output: torch.Tensor, input_: torch.Tensor) -> None:
        assert output.numel() == self.size * input_.numel()
        output.view(-1).copy_(torch.cat(self._meeting.exchange(self.rank, input_.clone())))

    def _scatter(self, output: torch.Tensor, input_: torch.Tensor, kind: ReduceKind) -> None:
        assert input_.numel() == self.size * output.numel()
        assert input_.dtype == output.dtype
        inputs = self._meeting.exchange(self.rank, input_.reshape(self.size, -1).clone())
        if kind.factor is not None:
            inputs = [rows / kind.factor for rows in inputs]
        total = inputs[0][self.rank].clone()
        for rows in inputs[1:]:
            total += rows[self.rank]
        output.view(-1).copy_(total / self.size if kind.average else total)


class ThreadReplicas:
    """All-reduces of one rank among its copies."""

    def __init__(self, meeting: _Meeting, size: int, rank: int) -> None:
        self._meeting = meeting
        self.size = size
        self.rank = rank
        self.calls: list[str] = []

    def all_reduce(self, tensor: torch.Tensor, kind: ReduceKind) -> None:
        assert tensor.ndim == 1
        assert kind.factor is None
        self.calls.append("avg" if kind.average else "sum")
        values = self._meeting.exchange(self.rank, tensor.clone())
        total = values[0].clone()
        for value in values[1:]:
            total += value
        tensor.copy_(total / self.size if kind.average else total)


def run_mesh(
    copies: int,
    size: int,
    body: Callable[[ThreadCollectives, ThreadReplicas], T],
    coalesces: bool = True,
    premultiplies: bool = False,
) -> list[T]:
    """As `run_ranks`, for ``copies`` times ``size`` ranks."""
    rows = [_Meeting(size) for _ in range(copies)]
    columns = [_Meeting(copies) for _ in range(size)]

    def run(position: int) -> T:
        copy, rank = divmod(position, size)
        replicas = ThreadReplicas(columns[rank], copies, copy)
        collectives = ThreadCollectives(rows[copy], size, rank, coalesces, premultiplies)
        return body(collectives, replicas)

    return _run_threads(copies * size, run, [*rows, *columns])


def run_ranks(
    size: int,
    body: Callable[[ThreadCollectives], T],
    coalesces: bool = True,
    premultiplies: bool = False,
) -> list[T]:
    """Run ``body`` once a rank, all at a time; raises what the first rank to fail raised."""
    meeting = _Meeting(size)

    def run(rank: int) -> T:
        return body(ThreadCollectives(meeting, size, rank, coalesces, premultiplies))

    return _run_threads(size, run, [meeting])


def _run_threads(count: int, run: Callable[[int], T], meetings: Sequence[_Meeting]) -> list[T]:
    def attempt(position: int) -> T:
        try:
            return run(position)
        except BaseException:
            for meeting in meetings:
                meeting.leave()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(attempt, position) for position in range(count)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    broken = threading.BrokenBarrierError
    for error in sorted(errors, key=lambda error: isinstance(error, broken)):
        raise error
    return [future.result() for future in futures]
