"""Parameters that travel as differences to what was gathered last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsdp2.core.device.kernels import Kernels
from fsdp2.core.gather import coded
from fsdp2.core.gather.keeping import make_gathers
from fsdp2.core.layout.layout import ROWS, Cut, ParamShape, build_layout
from tests.common import thread_ranks

pytestmark = pytest.mark.alone

CPU, BF16, F32 = torch.device("cpu"), torch.bfloat16, torch.float32
KERNELS = Kernels(CPU)
CUTS = (((40, 4), ROWS), ((25, 3), ROWS), ((3, 64), Cut(1)))
FORMATS = ("int8", "int4")
OFF = {"int8": 1 / 254 * 1.0001, "int4": 1 / 14 * 1.01}  # of a block's largest magnitude
SIZE = 3


class Rank:
    """One rank's shard, and its all-gather of differences."""

    def __init__(
        self, collectives: thread_ranks.ThreadCollectives, name: str, computed: torch.dtype
    ) -> None:
        params = [ParamShape("p", shape, cut, F32, computed, coded=True) for shape, cut in CUTS]
        layout = build_layout(params, collectives.size, False, 0)
        self.collectives = collectives
        self.shard = KERNELS.flat(layout.shard_bytes, on_meta=False)
        self.weights = self.shard.view(F32, 0, (layout.shard_bytes // 4,))
        self.rows = torch.zeros_like(self.weights)  # 1 where no padding is
        for start, shape in layout.rows_of(collectives.rank)[0]:
            self.rows[start : start + torch.Size(shape).numel()] = 1
        self.generator = torch.Generator().manual_seed(collectives.rank)
        self.step(1.0)
        self.full = KERNELS.transient(layout.full_bytes, "gathered")
        (self.operations,) = make_gathers(
            layout.segments, self.shard, self.full, collectives, KERNELS, None, CPU, name, True
        )
        assert isinstance(self.operations.kept, coded.ReferenceRows)
        self.kept = self.operations.kept

    def step(self, size: float = 0.01) -> None:
        change = torch.randn(self.weights.shape, generator=self.generator)
        self.weights.add_(size * change * self.rows)

    def gather(self, used: bool = True) -> list[Tensor]:
        found = self.operations
        for run in (*found.acquire, *found.copy_in):
            run()
        assert {launch() for launch in found.collectives} == {None}
        for run in found.finish if used else found.release:
            run()
        return [parameter.clone() for _, parameter in found.parameters]

    @property
    def reference(self) -> Tensor:
        return self.kept.rows.output.view(self.collectives.size, -1).clone()

    def error(self) -> Tensor:
        return (self.reference[self.collectives.rank].float() - self.weights).abs()


def on_ranks(body: Callable[[Rank], None], name: str = "int8", dtype: torch.dtype = F32) -> None:
    thread_ranks.run_ranks(SIZE, lambda c: body(Rank(c, name, dtype)))


def everyones(rank: Rank, tensor: Tensor) -> list[Tensor]:
    output = tensor.new_empty(rank.collectives.size * tensor.numel())
    rank.collectives.all_gather(output, tensor.flatten().contiguous())
    return list(output.chunk(rank.collectives.size))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", FORMATS)
def test_errors_are_those_of_the_last_difference(name: str, dtype: torch.dtype) -> None:
    """After any number of steps; the first gather is exact."""

    def body(rank: Rank) -> None:
        rank.gather()
        assert torch.equal(rank.reference[rank.collectives.rank], rank.weights.to(dtype))
        for _ in range(12):
            before = rank.reference[rank.collectives.rank].float()
            rank.step()
            largest = (rank.weights - before).abs().max()
            rank.gather()
            rounding = rank.weights.abs() / 256 if dtype is BF16 else 1e-6
            assert (rank.error() <= OFF[name] * largest + rounding).all()
            for other in everyones(rank, rank.reference)[1:]:  # equal bits on all ranks
                assert torch.equal(other, rank.reference.flatten())
        while dtype is F32 and rank.error().max() > 1e-6:  # weights that rest are reached
            before = rank.error().max()
            rank.gather()
            assert rank.error().max() < before / 2

    on_ranks(body, name, dtype)


def test_parameters_are_those_of_the_reference() -> None:
    def body(rank: Rank) -> None:
        rank.gather()
        rank.step()
        found = rank.gather()
        rows = rank.reference
        for (slot, _), parameter in zip(rank.operations.parameters, found, strict=True):
            own = slot.part(parameter, rank.collectives.rank)
            start = slot.shard_offset
            expected = rows[rank.collectives.rank, start : start + own.numel()]
            assert torch.equal(own.flatten(), expected)

    on_ranks(body)


def test_the_first_gather_and_those_after_it_are_one_collective_each() -> None:
    def body(rank: Rank) -> None:
        for _ in range(3):
            rank.collectives.calls.clear()
            rank.gather()
            assert rank.collectives.calls == ["all_gather"]

    on_ranks(body)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_is_seen_and_then_over(name: str, value: float) -> None:
    def body(rank: Rank) -> None:
        rank.gather()
        kept = rank.weights[7].item()
        if rank.collectives.rank == 1:
            rank.weights[7] = value
        for _ in range(2):
            rank.gather()
            assert not rank.reference[1, 7].isfinite()
            assert rank.reference[[0, 2]].isfinite().all()
        rank.weights[7] = kept
        for _ in range(12):
            rank.gather()
        assert rank.error().max() < 1e-6

    on_ranks(body, name)


def test_a_message_that_nobody_uses_counts() -> None:
    """As a prefetch was wrong: all ranks have received it, those too that did use it."""

    def body(rank: Rank) -> None:
        rank.gather(used=rank.collectives.rank == 0)
        rank.step()
        rank.gather(used=rank.collectives.rank == 0)
        for other in everyones(rank, rank.reference)[1:]:
            assert torch.equal(other, rank.reference.flatten())
        assert rank.error().max() < 0.01

    on_ranks(body)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_are_restored_to_the_bit(dtype: torch.dtype) -> None:
    def body(rank: Rank) -> None:
        for _ in range(3):
            rank.gather()
            rank.step()
        saved = [(slot, rows.clone()) for slot, rows in rank.kept.own_rows()]
        other = Rank(rank.collectives, "int8", dtype)
        assert other.kept.own_rows() == []
        other.weights.copy_(rank.weights)
        other.kept.restore(saved)
        again = other.kept.own_rows()
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(saved, again, strict=True))
        rank.collectives.calls.clear()
        other.gather()
        assert rank.collectives.calls == ["all_gather", "all_gather"]
        rank.gather()
        for (_, mine), (_, its) in zip(
            rank.operations.parameters, other.operations.parameters, strict=True
        ):
            assert torch.equal(mine, its)

    on_ranks(body, dtype=dtype)


def test_rows_are_added_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, list[Tensor]] = {}

    def body(rank: Rank, at_a_time: int) -> None:
        for _ in range(3):
            rank.gather()
            rank.step()
        if rank.collectives.rank == 0:
            found[at_a_time] = rank.gather()
        else:
            rank.gather()

    for at_a_time in (1 << 22, 1, 2 * 256):
        monkeypatch.setattr(coded, "AT_A_TIME", at_a_time)
        on_ranks(lambda rank, number=at_a_time: body(rank, number))  # type: ignore[misc]
    first, *others = found.values()
    assert len(others) == 2
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_what_was_lost_is_gathered_exactly() -> None:
    def body(rank: Rank) -> None:
        rank.gather()
        rank.step()
        rank.gather()
        assert rank.error().any()
        rank.kept.lose()
        rank.gather()
        assert not rank.error().any()

    on_ranks(body)
