"""Which steps stay: links, removals that fail, branches, the best; on a disk and on a store."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp2 import checkpoint
from fsdp2.checkpoint import files
from fsdp2.command.checkpoint import main
from fsdp2.core.errors import CheckpointError
from tests.checkpoint import object_store
from tests.checkpoint.shared import Failing, save_by
from tests.checkpoint.test_checkpoint_crashes import Recorder, crashes
from tests.common.errors import raises

pytestmark = pytest.mark.alone


@pytest.fixture(params=["disk", "store"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        str(tmp_path / "run")
        if request.param == "disk"
        else f"{object_store.url_of(tmp_path)}/bucket/run"
    )


def made(value: float = 0.0) -> nn.Module:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def saved(run: Any, step: int, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """A step whose weights say its number."""
    model = made() if model is None else model
    with torch.no_grad():
        model.weight.fill_(step)
    checkpoint.save(run, model, step=step, **options)
    return model


def loaded(run: Any, **options: Any) -> int:
    model = made()
    found = checkpoint.load(run, model, **options).step
    assert model.weight.eq(found).all()
    return found


# ---- links


def _archived(tmp_path: Path) -> tuple[Path, Path, dict[str, bytes]]:
    """A folder whose step 1 is a link to an archive elsewhere."""
    run, archive = tmp_path / "run", tmp_path / "archive"
    saved(run, 1)
    archive.mkdir()
    (run / "step-00000001").rename(archive / "step-00000001")
    (run / "step-00000001").symlink_to(archive / "step-00000001")
    kept = {path.name: path.read_bytes() for path in (archive / "step-00000001").iterdir()}
    return run, archive / "step-00000001", kept


@pytest.mark.parametrize("how", ["keep", "remove"])
def test_a_removal_never_follows_a_link(tmp_path: Path, how: str) -> None:
    """The link goes, the archive stays; also where links stand in a step that goes."""
    run, archive, kept = _archived(tmp_path)
    assert loaded(run) == 1
    saved(run, 2)
    inside = run / "step-00000002"
    (inside / "folder").symlink_to(archive)
    (inside / "file").symlink_to(archive / "manifest.json")
    (inside / "nowhere").symlink_to(tmp_path / "nothing")
    if how == "keep":
        saved(run, 3, keep=1)
    else:
        checkpoint.remove(run, 1)
        checkpoint.remove(run, 2)
        saved(run, 3)
    assert os.listdir(run) == ["step-00000003"]
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == kept


def test_half_done_links(tmp_path: Path) -> None:
    """What crashes leave, or a hand, as links: they go, and what is behind them stays."""
    run, archive, kept = _archived(tmp_path)
    (archive / "manifest.json").unlink()
    kept.pop("manifest.json")
    for name in (".removing-step-00000007", ".saving-step-00000008-abc"):
        (run / name).symlink_to(archive)
    assert "step-00000001" in checkpoint.unfinished(run)
    saved(run, 8)  # sweeps what an older try has left
    saved(run, 1)  # a headless step
    (run / "step-00000009").symlink_to(tmp_path / "unmounted")  # leads nowhere
    saved(run, 9, keep=3)
    checkpoint.remove(run)
    assert sorted(os.listdir(run)) == [f"step-0000000{n}" for n in (1, 8, 9)]
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == kept


@pytest.mark.parametrize("beside", [".saving-one.pt", ".exporting-out"])
def test_targets_beside_which_is_a_link(tmp_path: Path, beside: str) -> None:
    run, archive, kept = _archived(tmp_path)
    (tmp_path / beside).symlink_to(archive)
    if "export" in beside:
        checkpoint.export(tmp_path / "out", run)
    else:
        checkpoint.convert(run, tmp_path / "one.pt")
    assert not os.path.lexists(tmp_path / beside)
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == kept


@pytest.mark.parametrize(
    "name", ["step-2", "step-0000000\u0662", "step-0000000002", "step-00000002.old"]
)
def test_other_names_are_no_steps(tmp_path: Path, name: str) -> None:
    """Copies by hand: they are not loaded, and no removal looks for them."""
    saved(tmp_path, 2)
    (tmp_path / "step-00000002").rename(tmp_path / name)
    saved(tmp_path, 1, keep=1)
    assert checkpoint.steps(tmp_path) == [1]
    assert (tmp_path / name / "manifest.json").exists()


# ---- removals that fail


def busy(at: str) -> Failing:
    """Somebody reads a step that is removed: its folder is not empty, or its name cannot change."""
    code = errno.ENOTEMPTY if at == "remove_folder" else errno.EBUSY

    def fails(path: Path, *_: Path) -> bool:
        return path.name == "step-00000001" if at == "rename" else ".removing-" in str(path)

    return Failing(code, at, when=fails)


@pytest.mark.parametrize("call", ["save", "async_save"])
@pytest.mark.parametrize("at", ["rename", "remove", "remove_folder"])
def test_a_step_that_cannot_be_removed(
    tmp_path: Path, at: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The save succeeds, says so, and the next one removes it."""
    model = saved(tmp_path, 1)
    for step in (2, 3):
        caplog.clear()
        with mock.patch.object(files, "DISK", busy(at)):
            found = save_by(call, tmp_path, model, step=step, keep=1)
        assert found == tmp_path / f"step-0000000{step}"
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert f"step {step} of '{tmp_path}' is durable" in record.getMessage()
        assert checkpoint.steps(tmp_path)[-1] == step
        assert checkpoint.verify(tmp_path) == []
    assert checkpoint.steps(tmp_path)[1:] == ([3] if at == "rename" else [])  # others went
    caplog.clear()
    checkpoint.save(tmp_path, model, step=4, keep=1)
    assert os.listdir(tmp_path) == ["step-00000004"]
    assert not caplog.records


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp", ""])
def test_an_object_that_cannot_be_deleted(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Or none can: the save is durable, and each step that is there is whole."""
    run = f"{object_store.url_of(tmp_path)}/run"
    model = saved(run, 1)

    def refuses(kind: str, path: str) -> bool:
        return kind == "delete" and "step-00000001" in path and path.endswith(name)

    with object_store.refusing(refuses):
        saved(run, 2, model, keep=1)
    assert "Access Denied" in caplog.text
    assert checkpoint.steps(run) == ([2] if "distcp" in name else [1, 2])
    assert checkpoint.verify(run) == []
    assert len(checkpoint.unfinished(run)) == ("distcp" in name)
    assert loaded(run) == 2
    checkpoint.save(run, model, step=3, keep=1)
    assert checkpoint.steps(run) == [3]
    assert checkpoint.unfinished(run) == []


def test_a_step_whose_name_cannot_be_durable_is_taken_back(tmp_path: Path) -> None:
    """The folder's sync fails behind the rename: as told, nothing has changed, and again works."""
    model = saved(tmp_path, 1)
    unsynced = Failing(errno.EIO, "sync_folder", when=lambda p: (p / "step-00000002").exists())
    with mock.patch.object(files, "DISK", unsynced), raises("ckpt-rank-failed"):
        checkpoint.save(tmp_path, model, step=2, keep=1)
    assert os.listdir(tmp_path) == ["step-00000001"]
    checkpoint.save(tmp_path, model, step=2, keep=1)
    assert checkpoint.steps(tmp_path) == [2]


# ---- branches


def _rolled_back(run: str, **options: Any) -> nn.Module:
    """100, 200, 300, then back to 200, and a model that goes on from there."""
    for step in (100, 200, 300):
        saved(run, step, **options)
    model = made()
    assert checkpoint.load(run, model, step=200).step == 200
    assert checkpoint.steps(run)[-1] == 300  # a load alone changes nothing
    return model


def test_a_branch_wins(
    run: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _rolled_back(run)
    saved(run, 230, model)
    assert "step 230 of" in caplog.text
    assert "goes on from step 200 and replaces [300]" in caplog.text
    assert checkpoint.steps(run) == [100, 200, 230]
    assert checkpoint.replaced(run) == {300: "by step 230, which continues from step 200"}
    main(["ls", run])
    said = capsys.readouterr().out
    assert "replaced: step 300, by step 230, which continues from step 200" in said
    assert checkpoint.unfinished(run) == []
    assert loaded(run) == 230
    assert loaded(run, step=300) == 300
    caplog.clear()
    saved(run, 260, model)
    assert checkpoint.steps(run) == [100, 200, 230, 260]
    assert not caplog.records


def test_keep_removes_first_what_a_branch_replaced(run: str) -> None:
    model = _rolled_back(run)
    saved(run, 230, model, keep=4)
    assert checkpoint.steps(run) == [100, 200, 230]
    assert list(checkpoint.replaced(run)) == [300]
    saved(run, 260, model, keep=4)
    assert checkpoint.steps(run) == [100, 200, 230, 260]
    assert checkpoint.replaced(run) == {}
    saved(run, 290, model, keep=2)
    assert checkpoint.steps(run) == [260, 290]
    assert checkpoint.unfinished(run) == []
    saved(run, 300)  # no mark is left over
    assert loaded(run) == 300


def test_a_branch_reaches_the_numbers_that_it_replaced(run: str) -> None:
    """Of the branch's first save, and of a later one, also behind a restart."""
    model = _rolled_back(run)
    with raises("ckpt-step-there"):
        saved(run, 200, model)
    with raises("ckpt-step-there"):
        saved(run, 300)  # of a model that has not been there
    with torch.no_grad():
        model.weight.fill_(300)
        model.bias.fill_(7)
    checkpoint.save(run, model, step=300)
    assert checkpoint.steps(run) == [100, 200, 300]
    assert checkpoint.replaced(run) == {}
    other = made()
    checkpoint.load(run, other, verify=True)
    assert other.bias.eq(7).all()
    checkpoint.load(run, other, step=100)
    saved(run, 150, other)
    assert list(checkpoint.replaced(run)) == [200, 300]
    again = made()
    assert checkpoint.load(run, again).step == 150
    saved(run, 200, again)
    assert checkpoint.steps(run) == [100, 150, 200]
    assert list(checkpoint.replaced(run)) == [300]
    assert checkpoint.unfinished(run) == []
    assert checkpoint.verify(run) == []


def test_what_is_no_branch(run: str) -> None:
    """A teacher from an older step, models in turn in one folder, a look at an older step."""
    for step in (1, 2, 3):
        saved(run, step)
    student, teacher = made(), made()
    checkpoint.load(run, student)
    checkpoint.load(run, teacher, step=1)
    saved(run, 4, student)
    checkpoint.load(run, made(), step=2)
    saved(run, 5, student)
    one, other = made(), made()
    checkpoint.load(run, one, step=4)
    checkpoint.load(run, other, step=5)
    saved(run, 6, one)
    saved(run, 7, other)
    saved(run, 8, one)
    assert checkpoint.steps(run) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert checkpoint.replaced(run) == {}


def test_back_in_the_same_process(run: str) -> None:
    """A loss spike: the run loads what it has saved itself, twice."""
    model = saved(run, 1)
    for step in (2, 3):
        saved(run, step, model)
    for origin, step in ((2, 4), (1, 5)):
        checkpoint.load(run, model, step=origin)
        saved(run, step, model)
    assert checkpoint.steps(run) == [1, 5]
    assert sorted(checkpoint.replaced(run)) == [2, 3, 4]


def test_two_saves_of_a_branch(tmp_path: Path) -> None:
    """The second is under way before the first is there."""
    model = _rolled_back(str(tmp_path))
    checkpoint.async_save(tmp_path, model, step=210)
    checkpoint.async_save(tmp_path, model, step=220).result()
    assert checkpoint.steps(tmp_path) == [100, 200, 210, 220]


def test_a_branch_that_fails_replaces_nothing(tmp_path: Path) -> None:
    model = _rolled_back(str(tmp_path))
    with (
        mock.patch.object(files, "DISK", Failing(errno.ENOSPC, "rename")),
        raises("ckpt-rank-failed"),
    ):
        checkpoint.save(tmp_path, model, step=230)
    assert checkpoint.steps(tmp_path) == [100, 200, 300]
    saved(tmp_path, 230, model)
    assert checkpoint.steps(tmp_path) == [100, 200, 230]


def test_a_save_beside_newer_steps_says_so(run: str, caplog: pytest.LogCaptureFixture) -> None:
    """A run that begins anew in an old folder: `load` would take the old run's step."""
    saved(run, 300)
    saved(run, 10)
    assert "is saved beside [300], of which load() takes the newest" in caplog.text
    assert loaded(run) == 300


@pytest.mark.parametrize("number", [230, 300])
def test_a_crash_in_a_branch(tmp_path: Path, number: int) -> None:
    """After any operation, what is newest is of the branch, or what it goes on from; and whole."""
    recorder = Recorder(tmp_path)
    run = tmp_path / "run"
    with mock.patch.object(files, "DISK", recorder):
        model = made()
        for step in (200, 300):
            saved(run, step, model)
        before = len(recorder.ops)
        checkpoint.load(run, model, step=200)
        model.bias.data.fill_(number)
        checkpoint.save(run, model, step=number)
    seen = set()
    for length in range(before, len(recorder.ops) + 1):
        for tree in crashes(recorder.ops[:length]):
            names, found = tree["run"], []
            for name, content in names.items():
                if name.startswith("step-") and "manifest.json" in content:
                    assert all(content.values()), name
                    found += [name] * (f".replaced-{name}" not in names)
            newest = max(found)
            old = newest == "step-00000300" and names[newest] == _old(recorder.ops[:before])
            seen.add("old" if old else newest)
            if length == len(recorder.ops):
                assert newest == f"step-{number:08d}"
                assert not old
    assert seen == {"old", "step-00000200", f"step-{number:08d}"}


def _old(ops: list[Any]) -> dict[str, bytes]:
    return next(iter(itertools.islice(crashes(ops), 1, 2)))["run"]["step-00000300"]


# ---- the best


def test_the_best_stay(run: str) -> None:
    losses = {1: 5.0, 2: 3.0, 3: float("nan"), 4: 4.0, 5: None, 6: 3.0, 7: float("-inf"), 8: 6.0}
    keep = checkpoint.Keep(newest=2, best=2)
    for step, metric in losses.items():
        saved(run, step, keep=keep, metric=metric)
    assert checkpoint.steps(run) == [2, 6, 7, 8]
    assert checkpoint.best_step(run) == 6  # of equal ones the newest
    assert checkpoint.best_step(run, highest=True) == 8
    assert loaded(run, step=checkpoint.best_step(run)) == 6
    saved(run, 9, keep=checkpoint.Keep(1, 1, highest=True), metric=torch.tensor(2.0))
    assert checkpoint.steps(run) == [8, 9]


def test_none_has_a_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, 1)
    with raises("ckpt-no-metric"):
        checkpoint.best_step(tmp_path)
    with raises("ckpt-keep"):
        saved(tmp_path, 2, keep=checkpoint.Keep(1, best=-1))
    with raises("ckpt-keep"):
        saved(tmp_path, 2, keep=True)
    with raises("ckpt-keep"):
        saved(tmp_path, 2, keep="all")
    content = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
    assert "metric" not in content  # such a step is read by older versions
    saved(tmp_path, 2, metric=0.25)
    main(["ls", str(tmp_path)])
    head, _, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (head[-1], first[-1], second[-1]) == ("metric", "-", "0.25")


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp", "a flipped bit"])
def test_the_newest_readable_step(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`fallback=True` warns of what is broken, and the branch from there wins."""
    for step in (1, 2, 3):
        saved(tmp_path, step)
    for step in (2, 3):
        path = tmp_path / f"step-0000000{step}" / name.replace("a flipped bit", "__0_0.distcp")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content if name == "a flipped bit" else content[:9])
    flipped = name == "a flipped bit"
    options = {"verify": True} if flipped else {}
    with pytest.raises(CheckpointError):
        loaded(tmp_path, **options)
    assert loaded(tmp_path, fallback=True, **options) == 1
    assert [record.args[0] for record in caplog.records] == [3, 2]
    with pytest.raises(CheckpointError):
        loaded(tmp_path, step=3, fallback=True, **options)
    model = made()
    checkpoint.load(tmp_path, model, fallback=True, **options)
    saved(tmp_path, 4, model)
    assert checkpoint.steps(tmp_path) == [1, 4]
    for step in (1, 4):
        (tmp_path / f"step-0000000{step}" / "__0_0.distcp").unlink()
    if not flipped:
        with raises("ckpt-none-readable"):
            loaded(tmp_path, fallback=True)
