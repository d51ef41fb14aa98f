"""One job at a time: locks, file systems without them, and folders that cannot be synced."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from fsdp2 import checkpoint
from fsdp2.checkpoint import files, owning
from tests.common.errors import raises

pytestmark = pytest.mark.alone


@pytest.fixture(params=["ENOSYS", "ENOLCK", "EOPNOTSUPP", "no fcntl"])
def without_locks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A file system that refuses locks in one of the ways that are seen."""
    if request.param == "no fcntl":
        with mock.patch.object(owning, "fcntl", None):
            yield
        return
    code = getattr(errno, request.param)

    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with mock.patch.object(owning.fcntl, "flock", flock):
        yield


def _clock(happens: Callable[[int], object] = lambda beat: None) -> Any:
    """Time passes at once; ``happens`` is told how many waits there were."""
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        happens(len(waited))

    return mock.patch.object(owning, "sleep", sleep)


@pytest.mark.usefixtures("without_locks")
def test_saves_without_locks(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, nn.Linear(2, 2), step=step)
    checkpoint.async_save(tmp_path, nn.Linear(2, 2), step=3).result()
    assert checkpoint.steps(tmp_path) == [1, 2, 3]
    assert not (tmp_path / ".owner").exists()


@pytest.mark.usefixtures("without_locks")
def test_what_a_job_that_died_has_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The restarted job waits for a lease, and takes over."""
    (tmp_path / ".owner").write_text("process 7 on old\n12")
    with _clock():
        checkpoint.save(tmp_path, nn.Linear(2, 2), step=1)
    assert checkpoint.steps(tmp_path) == [1]
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert "waiting 30 seconds" in caplog.messages[0]
    assert "process 7 on old has not been seen for 30 seconds" in caplog.messages[1]


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("ends", ["beats", "is done", "is taken over by another"])
def test_a_holder_that_lives(tmp_path: Path, ends: str) -> None:
    owner = tmp_path / ".owner"
    owner.write_text("process 7 on old\n12")

    def happens(beat: int) -> None:
        if beat != 6:
            return
        if ends == "is done":
            owner.unlink()
        else:
            owner.write_text("process 7 on old\n13" if ends == "beats" else "process 8 on new")

    def save() -> None:
        with _clock(happens):
            checkpoint.save(tmp_path, nn.Linear(2, 2), step=1)

    if ends == "is done":
        save()
        assert checkpoint.steps(tmp_path) == [1]
    else:
        with raises("ckpt-other-job"):
            save()
        assert checkpoint.steps(tmp_path) == []
        assert owner.exists()


@pytest.mark.usefixtures("without_locks")
def test_one_that_was_quicker_keeps_it(tmp_path: Path) -> None:
    """Two take over at once: the slower one gives back what it has renamed."""
    owner = tmp_path / ".owner"
    owner.write_text("process 7 on old")
    rename = os.rename

    def late(source: Any, target: Any) -> None:
        if str(source) == str(owner):
            owner.write_text("process 8 on new")
        rename(source, target)

    with _clock(), mock.patch.object(owning.os, "rename", late), raises("ckpt-other-job"):
        checkpoint.save(tmp_path, nn.Linear(2, 2), step=1)
    assert os.listdir(tmp_path) == [".owner"]
    assert owner.read_text() == "process 8 on new"


@pytest.mark.usefixtures("without_locks")
def test_a_holder_that_stood_still(tmp_path: Path) -> None:
    """It was taken over meanwhile: it commits nothing, and leaves the other's file alone."""
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, model, step=1)

    class Slow(files.Disk):
        def create(self, path: Path) -> Any:
            (tmp_path / ".owner").unlink()
            (tmp_path / ".owner").write_text("process 8 on new")
            return super().create(path)

    with mock.patch.object(files, "DISK", Slow()), raises("ckpt-taken-over"):
        checkpoint.save(tmp_path, model, step=2)
    assert checkpoint.steps(tmp_path) == [1]
    assert (tmp_path / ".owner").read_text() == "process 8 on new"


@pytest.mark.usefixtures("without_locks")
def test_a_lease_beats(tmp_path: Path) -> None:
    owner, seen = tmp_path / ".owner", set()
    with mock.patch.object(owning, "BEAT", 0.001), owning.owned(owner, "process 1") as is_ours:
        while len(seen) < 3:
            seen.add(owner.read_text())
        assert is_ours()
    assert not owner.exists()
    assert all(text.partition("\n")[0] in ("process 1", "") for text in seen)


def _refuses_folders(code: int) -> Any:
    fsync = os.fsync

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(handle)

    return mock.patch.object(files.os, "fsync", refuse)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EIO])
def test_folders_that_cannot_be_synced(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves, exports and conversions go on, with one warning; an error of the disk stays one."""
    model = nn.Linear(2, 2)
    with mock.patch.object(files, "_unsynced", set()), _refuses_folders(code):
        if code == errno.EIO:
            with raises("ckpt-rank-failed"):
                checkpoint.save(tmp_path / "run", model, step=1)
            return
        for step in (1, 2, 3):
            checkpoint.save(tmp_path / "run", model, step=step, keep=2)
        checkpoint.export(tmp_path / "out", model)
        checkpoint.convert(tmp_path / "run", tmp_path / "one.pt")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "their names may not be" in record.getMessage()
    assert checkpoint.steps(tmp_path / "run") == [2, 3]
