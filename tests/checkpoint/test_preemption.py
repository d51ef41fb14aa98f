"""A signal to one rank, and all ranks that leave at the end of the same step."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest
import torch.distributed as dist

from fsdp2 import checkpoint
from tests.common.errors import raises
from tests.common.workers import ranks


def _steps_until_agreed(told: dict[int, int], steps: int = 6) -> int | None:
    """After which step ranks leave, where rank R gets SIGTERM in step ``told[R]``."""
    with checkpoint.Preemption() as preemption:
        for step in range(steps):
            if told.get(dist.get_rank()) == step:
                signal.raise_signal(signal.SIGTERM)  # to this thread: heard at once
            if preemption.agreed():
                return step
    return None


@ranks(2, 4)
@pytest.mark.parametrize(
    ("told", "left"), [({}, None), ({1: 2}, 3), ({0: 2}, 3), ({0: 1, 1: 4}, 2), ({0: 5}, None)]
)
def test_ranks_leave_at_the_same_step(told: dict[int, int], left: int | None) -> None:
    found: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _steps_until_agreed(told))
    assert found == [left] * dist.get_world_size()


@ranks(2)
def test_what_was_agreed_stays() -> None:
    with checkpoint.Preemption() as preemption:
        preemption.request()
        assert [preemption.agreed() for _ in range(4)] == [False, True, True, True]


@ranks(4)
def test_some_of_the_ranks() -> None:
    """A replica is preempted, and the other is not."""
    halves = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    mine = dist.get_rank() // 2
    with checkpoint.Preemption(process_group=halves[mine]) as preemption:
        if dist.get_rank() == 3:
            preemption.request()
        assert [preemption.agreed() for _ in range(3)] == [False, mine == 1, mine == 1]
    with raises("ckpt-not-in-group"):
        checkpoint.Preemption(process_group=halves[1 - mine])


@pytest.mark.alone
def test_one_process() -> None:
    """Without a process group nobody has to be asked, so that nothing is a call late."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    with checkpoint.Preemption() as preemption:
        assert not preemption.agreed()
        assert not preemption.requested
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert preemption.requested
        assert preemption.agreed()
    assert before == {number: signal.getsignal(number) for number in before}


@pytest.mark.alone
def test_signals_are_given_back_after_an_exception() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with contextlib.suppress(KeyError), checkpoint.Preemption([signal.SIGUSR2]):
        signal.raise_signal(signal.SIGUSR2)
        raise KeyError
    assert signal.getsignal(signal.SIGUSR2) is before


@pytest.mark.alone
def test_another_thread_takes_no_signals() -> None:
    """As where Ray Train calls the script: Python has them in the main thread alone."""
    agreed = []

    def work() -> None:
        with checkpoint.Preemption() as preemption:
            agreed.append(preemption.agreed())
            preemption.request()
            agreed.append(preemption.agreed())

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert agreed == [False, True]
    assert signal.getsignal(signal.SIGTERM) is before
