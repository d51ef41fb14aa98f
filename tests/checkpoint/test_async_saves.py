"""`async_save` and `snapshot`: what was there at the call, beside training, on all ranks alike."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import checkpoint
from fsdp2.checkpoint import files, owning, staging
from fsdp2.checkpoint import saving as saving_module
from fsdp2.checkpoint.stores import saving_folder
from fsdp2.core.progress import ShardReaders
from tests.checkpoint.shared import Failing, assert_same, everything, train
from tests.checkpoint.test_checkpoints import IN, made
from tests.common.errors import raises
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks


@contextmanager
def held() -> Iterator[tuple[list[str], threading.Event]]:
    """Copies wait until somebody waits for them: the first write has come. The order of both."""
    order: list[str] = []
    asked = threading.Event()
    copy, wait = staging.copy_rows, staging.Copy.wait

    def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
        assert asked.wait(60)
        order.append("copied")
        copy(target, source)

    def waits(one: staging.Copy) -> None:
        order.append("asked")
        asked.set()
        wait(one)
        order.append("written")

    with (
        mock.patch.object(staging, "copy_rows", copy_rows),
        mock.patch.object(staging.Copy, "wait", waits),
        mock.patch.object(staging, "_AT_ONCE", 0),
    ):
        try:
            yield order, asked
        finally:
            asked.set()


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("fsdp2")}


@pytest.mark.parametrize("flat", [False, True])
@ranks(2)
def test_what_is_saved_is_what_was_there(tmp_path: Path, flat: bool) -> None:
    """Not what a forward did to buffers, nor a step to shards, which waits for the copy."""
    model, optimizer = made(flat=flat)
    train(model, optimizer, seed=0, steps=1)
    before = everything(model, optimizer)
    with held() as (order, _):
        extra = {"table": torch.zeros(3)}
        saving = checkpoint.async_save(tmp_path, model, optimizer, step=1, extra=extra)
        extra["table"] += 1
        with raises("ckpt-not-yet"):
            saving.result(timeout=0)
        model(torch.randn(4, IN)).sum().backward()
        assert not saving.staged
        assert order == []
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.step()
        copied = order.index("written")
        assert set(order[1:copied]) == {"copied"}
        assert saving.staged
    assert saving.result() == tmp_path / "step-00000001"
    assert saving.durable
    assert ShardReaders.waiting == []
    assert _threads() == set()
    other, optimizer = made(seed=3, flat=flat)
    found = checkpoint.load(tmp_path, other, optimizer)
    assert torch.equal(found.extra["table"], torch.zeros(3))
    assert_same(everything(other, optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 0.1


@ranks(2)
def test_a_load_waits_for_the_copy(tmp_path: Path) -> None:
    model, _ = made()
    before = everything(model, torch.optim.SGD(model.parameters()))
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    with held() as (order, _):
        saving = checkpoint.async_save(tmp_path, model, step=1)
        model.load_state_dict(zeros)
        assert order[0] == "asked"
    saving.result()
    checkpoint.load(tmp_path, model)
    assert_same(everything(model, torch.optim.SGD(model.parameters())), before)


@ranks(2)
def test_a_write_that_does_not_wait_fails_the_save(tmp_path: Path) -> None:
    """On rank 1 alone; all raise, at the next save, and once."""
    model, _ = made()
    with held() as (_, asked):
        saving = checkpoint.async_save(tmp_path, model, step=1)
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(model.parameters()).mul_(2)
        asked.set()
        with raises("ckpt-written-while-copied"):
            checkpoint.save(tmp_path, model, step=2)
    assert not saving.durable
    assert checkpoint.steps(tmp_path) == []
    checkpoint.save(tmp_path, model, step=2)
    assert checkpoint.steps(tmp_path) == [2]


def full(*steps: int) -> Failing:
    """A disk that has no space left for some steps, or any, on rank 1."""

    def fails(path: Path) -> bool:
        of = any(saving_folder(Path(), step, "").name in str(path) for step in steps)
        return dist.get_rank() == 1 and (of or not steps)

    return Failing(errno.ENOSPC, "create", when=fails)


@ranks(2)
def test_ranks_that_asked_and_ranks_that_did_not_stay_in_step(tmp_path: Path) -> None:
    """Rank 0 has been told of the failure, rank 1 hears of it in its next save, and so do all.

    What is saved beside training is saved nevertheless, and says so.
    """
    model, _ = made()
    for call, entry in (
        (checkpoint.save, "ckpt-rank-failed"),
        (checkpoint.async_save, "ckpt-before-failed"),
    ):
        with mock.patch.object(files, "DISK", full()):
            saving = checkpoint.async_save(tmp_path, model, step=2)
            saving._wait()
        if dist.get_rank() == 0:
            with raises("ckpt-rank-failed"):
                saving.result()
        assert checkpoint.steps(tmp_path) == []
        with raises(entry):
            found = call(tmp_path, model, step=3)
            assert isinstance(found, checkpoint.Saving)
            found.result()
    assert found.result() == tmp_path / "step-00000003"
    assert checkpoint.steps(tmp_path) == [3]
    checkpoint.save(tmp_path, model, step=4)
    assert checkpoint.steps(tmp_path) == [3, 4]


class Gate(files.Disk):
    """Lets no file be made before it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def create(self, path: Path) -> Any:
        assert self.opened.wait(60)
        return super().create(path)


@pytest.mark.parametrize("slow", [0, 1])
@ranks(2)
def test_the_next_save_does_not_wait_and_the_third_does(tmp_path: Path, slow: int) -> None:
    """For a slow disk, here of one rank; each step holds what was there at its call."""
    model, optimizer = made()
    before, savings = [], []
    gate = Gate()
    wait = checkpoint.Saving._wait

    def asked(saving: checkpoint.Saving, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and saving in savings:
            waited.append(saving.step)
            gate.opened.set()
        return wait(saving, timeout)

    waited: list[int] = []
    held = mock.patch.object(files, "DISK", gate) if dist.get_rank() == slow else nullcontext()
    with held, mock.patch.object(checkpoint.Saving, "_wait", asked):
        with mock.patch.object(staging, "_AT_ONCE", 0):
            for step in (1, 2, 3):
                train(model, optimizer, seed=step, steps=1)
                before.append(everything(model, optimizer))
                savings.append(checkpoint.async_save(tmp_path, model, optimizer, step=step))
                if step == 2:
                    assert waited == []
                    assert not savings[0].durable
                    train(
                        model, optimizer, seed=9, steps=1
                    )  # both copies are waited for, no disk is
                    assert all(saving.staged for saving in savings)
                    assert not gate.opened.is_set()
        assert waited == [1]
        assert savings[0].durable
        savings[2].result()
    assert checkpoint.steps(tmp_path) == [1, 2, 3]
    assert savings[1].durable
    for step in (1, 2, 3):
        checkpoint.load(tmp_path, model, optimizer, step=step)
        assert_same(everything(model, optimizer), before[step - 1])


@contextmanager
def two_saves(
    folder: Path, late: int, *failing: int
) -> Iterator[tuple[nn.Module, checkpoint.Saving, checkpoint.Saving]]:
    """Steps 1 and 2, of which some fail; the first is over before the call of the second.

    On the late rank, it is over when it is asked for.
    """
    model, _ = made()
    is_late, asked = dist.get_rank() == late, threading.Event()
    finish, wait = checkpoint.Saving._finish, checkpoint.Saving._wait

    def finishes(saving: checkpoint.Saving) -> None:
        assert not is_late or asked.wait(60)
        finish(saving)

    def waits(saving: checkpoint.Saving, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            asked.set()
        return wait(saving, timeout)

    with (
        mock.patch.object(files, "DISK", full(*failing)),
        mock.patch.object(checkpoint.Saving, "_finish", finishes),
        mock.patch.object(checkpoint.Saving, "_wait", waits),
    ):
        try:
            first = checkpoint.async_save(folder, model, step=1)
            assert is_late or first._ended.wait(60)
            yield model, first, checkpoint.async_save(folder, model, step=2)
        finally:
            asked.set()


@pytest.mark.parametrize("late", [0, 1])
@ranks(2)
def test_a_failure_is_raised_alike_whoever_is_faster(tmp_path: Path, late: int) -> None:
    """By the next save, or by the call after it, if nobody has asked; two are told together."""
    with (
        two_saves(tmp_path / "next", late, 1) as (model, first, second),
        raises("ckpt-before-failed"),
    ):
        second.result()
    assert second.result() == tmp_path / "next" / "step-00000002"
    assert not first.durable
    checkpoint.async_save(tmp_path / "next", model, step=3).result()  # all know
    with two_saves(tmp_path / "after", late, 1) as (model, _, second):
        with raises("ckpt-rank-failed"):
            checkpoint.async_save(tmp_path / "after", model, step=3)
        assert second.durable
        checkpoint.async_save(tmp_path / "after", model, step=4).result()
    with two_saves(tmp_path / "both", late, 1, 2) as (_, _, second):
        with raises("ckpt-both-failed"):
            second.result()
        with raises("ckpt-rank-failed"):
            second.result()
    dist.barrier()
    for name, there in (("next", [2, 3]), ("after", [2, 4]), ("both", [])):
        assert checkpoint.steps(tmp_path / name) == there
        assert checkpoint.unfinished(tmp_path / name) == []


@ranks(2)
def test_no_memory_for_a_second_copy(tmp_path: Path) -> None:
    """On rank 1 alone: its call waits for the first save, and uses that one's memory."""
    model, _ = made()
    gate = Gate()
    wait = checkpoint.Saving._wait

    def asked(saving: checkpoint.Saving, timeout: float | None = None) -> bool:
        gate.opened.set()
        return wait(saving, timeout)

    with (
        mock.patch.object(files, "DISK", gate),
        mock.patch.object(staging, "_AT_ONCE", 0),
        mock.patch.object(saving_module, "_process", saving_module._Process()),
    ):
        first = checkpoint.async_save(tmp_path, model, step=1)
        none = mock.patch.object(staging, "FlatBuffer", side_effect=RuntimeError("no memory"))
        if dist.get_rank() == 1:
            with none, mock.patch.object(checkpoint.Saving, "_wait", asked):
                second = checkpoint.async_save(tmp_path, model, step=2)
            assert first.durable
        else:
            gate.opened.set()
            second = checkpoint.async_save(tmp_path, model, step=2)
        second.result()
        first.result()
    assert checkpoint.steps(tmp_path) == [1, 2]
    assert checkpoint.verify(tmp_path) == []


@ranks(2)
def test_no_thread_left_in_the_system(tmp_path: Path) -> None:
    """On rank 1 alone: its call writes before it returns, and nobody waits for ever."""
    model, _ = made()
    none = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start"))
    with none if dist.get_rank() == 1 else nullcontext():
        saving = checkpoint.async_save(tmp_path, model, step=1)
    saving.result()
    assert checkpoint.verify(tmp_path) == []
    assert ShardReaders.waiting == []


@ranks(2)
def test_one_job_at_a_time(tmp_path: Path) -> None:
    """All ranks refuse while another one saves; what one that died has left holds nobody up."""
    model, _ = made()
    owner = tmp_path / ".owner"
    if dist.get_rank() == 0:
        with owning.owned(owner, "process 1 on another"), raises("ckpt-other-job") as caught:
            checkpoint.save(tmp_path, model, step=1)
        assert "process 1 on another" in str(caught.value)
        assert not owner.exists()
        owner.write_text("process 2, which has died")
    else:
        with raises("ckpt-other-job"):
            checkpoint.save(tmp_path, model, step=1)
    dist.barrier()
    checkpoint.save(tmp_path, model, step=1)
    dist.barrier()  # rank 0 lets go of the folder after it has told the others
    assert sorted(os.listdir(tmp_path)) == ["step-00000001"]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of torch's functions that communicate, by name."""
    calls = Counter[str]()
    collectives = ("all_gather_object", "new_group", "barrier", "broadcast", "all_gather")

    def counting(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return original(*args, **options)

        return mock.patch.object(owner, name, call)

    with ExitStack() as patches:
        for name in (*collectives, "all_reduce"):
            patches.enter_context(counting(dist, name))
        for name in ("send", "recv"):
            patches.enter_context(counting(dist.ProcessGroup, name))
        yield calls


@ranks(2)
def test_a_later_save_only_agrees(tmp_path: Path) -> None:
    """No collective, no plan: this rank and rank 0 exchange one object each, in two messages.

    Also over a group of all, which has no side channel of its own.
    """
    model, optimizer = made()
    train(model, optimizer, seed=0, steps=1)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    groups = (None, dist.group.WORLD, model.first.weight.device_mesh.get_group())
    for step, group in enumerate(groups, 2):
        with counted() as calls:
            checkpoint.async_save(
                tmp_path, model, optimizer, step=step, process_group=group
            ).result()
        assert calls.keys() == {"recv", "send"}
        assert calls.total() == 4 or group  # a group plans in its first save
        with counted() as calls:
            checkpoint.load(tmp_path, model, optimizer, process_group=group)
        assert calls == {"all_gather_object": 3}
    if dist.get_rank() == 1:  # another layout, on this rank alone
        model.register_buffer("more", torch.ones(2))
    with counted() as calls:
        checkpoint.save(tmp_path, model, optimizer, step=5)
    assert calls == {"recv": 6, "send": 6}  # say so; all plan; write
    dist.barrier()
    assert checkpoint.verify(tmp_path) == []


@ranks(2)
def test_memory_is_flat(tmp_path: Path) -> None:
    """Host memory is made once, for two saves; nothing stays of a save but its step."""
    model, optimizer = made()
    train(model, optimizer, seed=0, steps=1)
    with mock.patch.object(staging, "_AT_ONCE", 0):
        for memory in saving_module._process._memories:  # who is slow needs the second
            memory.places([torch.empty(1 << 20)])
        checkpoint.async_save(tmp_path, model, optimizer, step=0, keep=1).result()
        made_once = mock.patch.object(staging, "FlatBuffer", side_effect=AssertionError)
        with made_once:
            for step in range(1, 6):
                checkpoint.async_save(tmp_path, model, optimizer, step=step, keep=1)
                train(model, optimizer, seed=step, steps=1)
            checkpoint.save(tmp_path, model, optimizer, step=6, keep=1)
    assert ShardReaders.waiting == []
    assert _threads() == set()
    dist.barrier()
    assert checkpoint.steps(tmp_path) == [6]


class Looking(nn.Module):
    """Its forward lets another thread take a snapshot half way."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self._look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=self._look)
        thread.start()
        thread.join()
        return x.tanh()


@ranks(2)
def test_a_snapshot_changes_nothing(tmp_path: Path) -> None:
    """Taken by another thread, in the middle of a forward: bits, gathers and names are the same."""
    seen: list[checkpoint.Snapshot] = []
    ends = []
    for looks in (False, True):
        model, optimizer = made()
        model.last = nn.Sequential(Looking(lambda: None), model.last)

        def look(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            registered = [id(p) for m in model.modules() for p in m._parameters.values()]
            seen.append(checkpoint.snapshot(model, optimizer))
            assert registered == [id(p) for m in model.modules() for p in m._parameters.values()]

        if looks:
            model.last[0]._look = look
        train(model, optimizer, seed=1, steps=3)
        ends.append(everything(model, optimizer))
    assert_same(ends[1], ends[0])
    assert len(seen) == 3
    state = model.state_dict()
    assert seen[-1].model.keys() == state.keys()
    for name, value in state.items():
        rows = staging.plain(seen[-1].model[name])
        assert isinstance(rows, torch.Tensor)
        own = staging.plain(value)
        assert isinstance(own, torch.Tensor)
        assert rows.data_ptr() == own.data_ptr(), name
    assert seen[-1].optimizer is not None
    assert "first.weight" in seen[-1].optimizer["state"]
    assert all(flat.dtype == torch.uint8 for flat in seen[-1].shards.values())
