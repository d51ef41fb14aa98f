"""Checkpoints behind URLs: on a store that knows objects alone, and what a crash leaves there.

A save is recorded as puts and deletes. A crash keeps the first of them: after each, a step that
`steps` lists is whole, and the step before is there until the new one is.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp2 import checkpoint
from fsdp2.checkpoint import saving
from fsdp2.command.checkpoint import main
from fsdp2.core.errors import CheckpointError
from tests.checkpoint import object_store
from tests.checkpoint.shared import everything, save_by, trained
from tests.common.errors import raises

pytestmark = pytest.mark.alone

EXTRA = {"epoch": 3, "table": torch.arange(4)}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name], value) for name, value in theirs.items())


def loaded(folder: Any, **options: Any) -> dict[str, torch.Tensor]:
    model, optimizer = trained(seed=9)
    checkpoint.load(folder, model, optimizer, **options)
    return everything(model, optimizer)


@pytest.fixture(params=["objects", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "objects":
        yield f"{object_store.url_of(tmp_path)}/bucket/run"
    else:
        yield "memory://bucket/run"
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]


def test_all_calls(url: str) -> None:
    """Each of them, and what they leave is what a folder on a disk has."""
    assert checkpoint.steps(url) == checkpoint.unfinished(url) == checkpoint.remove(url) == []
    with raises("ckpt-none"):
        checkpoint.load(url, trained()[0])
    kept = {}
    for step in (1, 2, 3):
        model, optimizer = trained(seed=step)
        kept[step] = everything(model, optimizer)
        if step == 2:
            path = checkpoint.async_save(url, model, optimizer, step=step, extra=EXTRA).result()
        else:
            path = checkpoint.save(url, model, optimizer, step=step, extra=EXTRA, keep=2)
        assert str(path).startswith(f"{url}/step-{step:08d}/")
    assert checkpoint.steps(url) == [2, 3]
    assert checkpoint.unfinished(url) == []
    assert same(loaded(url, verify=True), kept[3])
    assert same(loaded(url, step=2), kept[2])
    extra = checkpoint.read_extra(url, 2)
    assert extra["epoch"] == 3
    assert torch.equal(extra["table"], EXTRA["table"])
    seen: list[tuple[int, int]] = []
    assert checkpoint.verify(url, progress=lambda done, total: seen.append((done, total))) == []
    assert seen[-1][0] == seen[-1][1] > 0
    with raises("ckpt-step-there"):
        checkpoint.save(url, model, optimizer, step=3)
    with raises("ckpt-unknown-step"):
        checkpoint.load(url, model, step=1)
    with raises("ckpt-is-file"):
        checkpoint.save(f"{url}/step-00000003/manifest.json", model, step=4)
    with raises("ckpt-remove"):
        checkpoint.remove(url, 1)
    assert checkpoint.remove(url, 3) == ["step-00000003"]
    assert checkpoint.steps(Path(url)) == [2]  # a `Path` has one slash of the two
    assert checkpoint.unfinished(url) == []


def test_dcp_alone_reads_it() -> None:
    model, optimizer = trained()
    path = checkpoint.save("memory://alone", model, optimizer, step=1)
    state = {"model": {name: torch.zeros_like(v) for name, v in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=str(path))
    assert same(state["model"], model.state_dict())
    checkpoint.remove("memory://alone", 1)


def test_steps_are_copied_there_and_back(tmp_path: Path) -> None:
    """A step is loaded from wherever its folder is copied to; exported and converted, too."""
    model, optimizer = trained()
    expected = everything(model, optimizer)
    url = "memory://copies"
    memory = fsspec.filesystem("memory")
    checkpoint.save(url, model, optimizer, step=1)
    memory.get(f"{url}/step-00000001", str(tmp_path / "run" / "step-00000001"), recursive=True)
    assert checkpoint.steps(tmp_path / "run") == [1]
    assert same(loaded(tmp_path / "run", verify=True), expected)
    checkpoint.convert(tmp_path / "run", tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=True)["model"]
    assert same(whole, model.state_dict())
    exported = {
        source: (checkpoint.export(tmp_path / name, source).folder / "model.safetensors")
        for name, source in (("a", url), ("b", str(tmp_path / "run")))
    }
    assert len({path.read_bytes() for path in exported.values()}) == 1
    checkpoint.remove(url, 1)
    local = checkpoint.save(tmp_path / "local", model, optimizer, step=2)
    memory.put(str(local), f"{url}/step-00000002", recursive=True)
    assert checkpoint.steps(url) == [2]
    assert checkpoint.unfinished(url) == []
    assert same(loaded(url, verify=True), expected)
    checkpoint.remove(url, 2)


def test_a_file_url_is_a_disk(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint.save(f"file://{tmp_path}/run", model, optimizer, step=1)
    assert path == tmp_path / "run" / "step-00000001"
    for url in (
        f"file://{tmp_path}/run",
        Path(f"file://{tmp_path}/run"),
        f"local://{tmp_path}/run",
    ):
        assert checkpoint.steps(url) == [1]
    assert checkpoint.export(f"file://{tmp_path}/out", model).folder == tmp_path / "out"


def test_the_command_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    path = checkpoint.save(url, model, optimizer, step=1)
    assert main(["ls", url]) == 0
    head, _, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["step", "size", "files", "ranks", "optimizer", "metric"]
    assert (row[0], row[-3:]) == ("1", ["1", "yes", "-"])
    assert main(["show", url]) == 0
    assert re.search(r"^model.0.weight +\(5, 3\) +float32$", capsys.readouterr().out, re.MULTILINE)
    assert main(["verify", url]) == 0
    fs, name = fsspec.core.url_to_fs(f"{path}/__0_0.distcp")
    data = bytearray(fs.cat_file(name))
    data[len(data) // 2] ^= 1
    fs.pipe_file(name, bytes(data))
    assert main(["verify", url]) == 1
    assert f"{path}/__0_0.distcp: its bytes have changed" in capsys.readouterr().out
    with raises("ckpt-file-changed"):
        loaded(url, verify=True)
    fs.pipe_file(name, bytes(data[:-1]))
    with raises("ckpt-file-short"):
        loaded(url)
    with raises("ckpt-file-short"):
        checkpoint.read_extra(url)
    fs.rm_file(name)
    with raises("ckpt-file-missing"):
        loaded(url)
    assert main(["verify", url]) == 1
    assert "__0_0.distcp: it is missing" in capsys.readouterr().out


# ---- what cannot be


def test_urls_that_are_refused(tmp_path: Path) -> None:
    model, _ = trained()
    with raises("ckpt-not-reached"):
        checkpoint.load("nowhere://bucket/run", model)
    with raises("ckpt-not-local"):
        checkpoint.export("memory://out", model)
    with raises("ckpt-not-local"):
        checkpoint.convert("memory://run", tmp_path / "one.pt")
    with mock.patch.dict(sys.modules, {"fsspec": None, "fsspec.core": None}):
        checkpoint.save(tmp_path / "run", model, step=1)
        for call in (
            functools.partial(checkpoint.save, "memory://run", model, step=1),
            functools.partial(checkpoint.load, "memory://run", model),
            functools.partial(checkpoint.steps, "memory://run"),
        ):
            with raises("ckpt-no-fsspec"):
                call()


# ---- crashes


Op = tuple[str, str, bytes]
RUN = "bucket/run"


def _recorded(root: Path) -> tuple[list[Op], list[int], dict[int, dict[str, torch.Tensor]]]:
    """Two saves, the second of which replaces the first, and a third beside; what each has saved.

    The second is asynchronous. Where each has returned is told, too.
    """
    url, kept, returned = f"{object_store.url_of(root)}/{RUN}", {}, []
    ops: list[Op] = []
    with mock.patch.object(object_store.ObjectStore, "ops", ops):
        for step, keep in ((1, None), (2, 1), (3, 2)):
            model, optimizer = trained(seed=step)
            kept[step] = everything(model, optimizer)
            call = "async_save" if step == 2 else "save"
            save_by(call, url, model, optimizer, step=step, keep=keep)
            returned.append(len(ops))
    begin = f"{quote(str(root), safe='')}/"
    return [(kind, name.removeprefix(begin), data) for kind, name, data in ops], returned, kept


def _replayed(ops: list[Op], root: Path) -> str:
    """The store after some of them."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for kind, name, data in ops:
        file = root / quote(name, safe="")
        if kind == "put":
            file.write_bytes(data)
        else:
            file.unlink()
    return f"{object_store.url_of(root)}/{RUN}"


def _broken(
    ops: list[Op], returned: list[int], kept: dict[int, dict[str, torch.Tensor]], root: Path
) -> Iterator[str]:
    """Promises that a crash breaks."""
    for length in range(len(ops) + 1):
        url = _replayed(ops[:length], root)
        steps = checkpoint.steps(url)
        done = sum(length >= at for at in returned)
        if done and not {*steps} & {*range(done, 4)}:
            yield f"{length}: step {done} is lost"
        for step in steps:
            try:
                if checkpoint.verify(url, step) or not same(loaded(url, step=step), kept[step]):
                    yield f"{length}: step {step} is torn"
            except CheckpointError as error:
                yield f"{length}: {error}"


def test_no_crash_breaks_a_promise(tmp_path: Path) -> None:
    """And each order of the last put and the first delete is needed."""
    (tmp_path / "a").mkdir()
    ops, returned, kept = _recorded(tmp_path / "a")
    assert [kind for kind, _, _ in ops] == ["put"] * 6 + ["delete"] * 3 + ["put"] * 3
    assert list(_broken(ops, returned, kept, tmp_path / "b")) == []
    for place in (2, 5, 11):  # manifests, before the index, before the file
        assert ops[place][1].endswith("/manifest.json")
        for earlier in (1, 2):
            moved = list(ops)
            moved.insert(place - earlier, moved.pop(place))
            assert any(_broken(moved, returned, kept, tmp_path / "b")), (place, earlier)
    assert ops[6][1].endswith("/manifest.json")
    moved = list(ops)
    moved.insert(7, moved.pop(6))
    assert any(_broken(moved, returned, kept, tmp_path / "b"))
    moved = list(ops)
    moved.insert(5, moved.pop(6))  # the old one goes before the new one is there
    assert any(_broken(moved, returned, kept, tmp_path / "b"))


def test_what_a_crash_leaves_is_named_and_removed(tmp_path: Path) -> None:
    """And the same step is saved again, beside what an earlier try has left."""
    (tmp_path / "a").mkdir()
    ops, _, _ = _recorded(tmp_path / "a")
    for length in range(len(ops)):
        url = _replayed(ops[:length], tmp_path / "b")
        before = checkpoint.steps(url)
        left = checkpoint.unfinished(url)
        step = next(step for step in (1, 2, 3, 4) if step not in before)
        model, optimizer = trained(seed=7)
        saving._process._plans.clear()  # as in a new process
        checkpoint.save(url, model, optimizer, step=step)
        beside = checkpoint.unfinished(url)
        assert len(beside) == len(left)  # the files of another try stay, and are not the step's
        assert checkpoint.remove(url) == beside
        assert checkpoint.unfinished(url) == []
        assert checkpoint.steps(url) == sorted([*before, step])
        assert same(loaded(url, step=step, verify=True), everything(model, optimizer))
        assert checkpoint.verify(url) == []


@pytest.mark.parametrize("deletes", [False, True])
def test_a_put_that_fails(tmp_path: Path, deletes: bool) -> None:
    """At any of them: one sentence, and the step before is whole; where deletes fail, too."""
    url = f"{object_store.url_of(tmp_path)}/{RUN}"
    model, optimizer = trained(seed=1)
    checkpoint.save(url, model, optimizer, step=1)
    kept = everything(model, optimizer)
    for at in (1, 2, 3):
        number = itertools.count(1)

        def fails(kind: str, _: str, at: int = at, number: Iterator[int] = number) -> bool:
            return next(number) == at or (deletes and kind == "delete")

        with object_store.refusing(fails), raises("ckpt-rank-failed"):
            checkpoint.save(url, *trained(seed=2), step=1 + at)
        assert checkpoint.steps(url) == [1]
        assert checkpoint.verify(url) == []
        assert same(loaded(url), kept)
        assert len(checkpoint.remove(url)) == (at > 1 and (deletes or at == 3))


@pytest.mark.parametrize("deletes", [False, True])
def test_a_manifest_that_is_put_without_an_answer(tmp_path: Path, deletes: bool) -> None:
    """And the manifest cannot be deleted, or can: the step is there and whole, or not there."""
    url = f"{object_store.url_of(tmp_path)}/{RUN}"
    put = object_store.ObjectStore.pipe_file

    def pipe_file(store: object_store.ObjectStore, path: str, value: bytes) -> None:
        put(store, path, value)
        if path.endswith("manifest.json"):
            raise ConnectionError("no answer")

    model, optimizer = trained(seed=1)
    with (
        object_store.refusing(lambda kind, _: deletes and kind == "delete"),
        mock.patch.object(object_store.ObjectStore, "pipe_file", pipe_file),
        raises("ckpt-rank-failed"),
    ):
        checkpoint.save(url, model, optimizer, step=1)
    assert checkpoint.steps(url) == ([1] if deletes else [])
    assert checkpoint.verify(url) == []
    assert len(checkpoint.unfinished(url)) == (not deletes)
    if deletes:
        assert same(loaded(url), everything(model, optimizer))
