"""The harness itself: what a failing test reports, and that the next test starts clean."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.common import workers

pytestmark = pytest.mark.ranks

# A world size of its own, so that a failure here costs no other test its pool.
SIZE = 3


@pytest.fixture(scope="module", autouse=True)
def _close_the_pool() -> object:
    yield
    if SIZE in workers._pools:
        workers._pools[SIZE].close(ask=True)


def _rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def _raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        print("rank 1 says so")
        raise ZeroDivisionError("on purpose")
    dist.barrier()


def _stay_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(3600)


def _abort_on_rank_2() -> None:
    if dist.get_rank() == 2:
        os.abort()


def _leave_a_mess() -> None:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)


def _state() -> tuple[bool, torch.dtype, int, int]:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.initial_seed(),
        torch.get_num_threads(),
    )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@workers.ranks(SIZE)
@pytest.mark.parametrize("value", [1, 3])
def test_body_runs_on_every_rank(value: int, world_size: int, tmp_path: Path) -> None:
    total = torch.tensor(value)
    dist.all_reduce(total)
    assert total.item() == value * world_size == value * dist.get_world_size()
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world_size


def test_processes_and_process_group_are_kept_between_calls() -> None:
    first, second = (workers.run_on_ranks(SIZE, _rank_and_pid) for _ in range(2))
    assert first == second
    assert [rank for rank, _ in first] == list(range(SIZE))
    assert len({pid for _, pid in first} | {os.getpid()}) == SIZE + 1


def test_every_call_starts_from_the_same_state() -> None:
    workers.run_on_ranks(SIZE, _leave_a_mess)
    expected = (True, torch.float32, workers.SEED, 1)
    assert workers.run_on_ranks(SIZE, _state) == [expected] * SIZE


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (_raise_on_rank_1, ["rank 1 raised", "ZeroDivisionError: on purpose", "rank 1 says so"]),
        (_stay_on_rank_0, ["no answer from ranks [0, 1, 2]", "in _stay_on_rank_0", "in barrier"]),
        (_abort_on_rank_2, ["rank 2 died", "exit code -6", "in _abort_on_rank_2"]),
    ],
)
def test_failure_shows_every_rank_and_ends_the_pool(
    body: object, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [pid for _, pid in workers.run_on_ranks(SIZE, _rank_and_pid)]
    monkeypatch.setattr(workers, "GRACE", 1.0)
    with pytest.raises(workers.RankError) as failure:
        workers.run_on_ranks(SIZE, body, timeout=3.0)  # type: ignore[arg-type]
    message = str(failure.value)
    for text in expected:
        assert text in message
    for rank in range(SIZE):
        assert f"---- rank {rank} " in message
    assert not any(_alive(pid) for pid in before)


def test_only_module_level_functions_are_sent() -> None:
    with pytest.raises(ValueError, match="module-level"):
        workers.run_on_ranks(SIZE, lambda: None)
