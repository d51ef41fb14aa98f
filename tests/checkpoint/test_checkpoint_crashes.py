"""A crash after every operation of a save, with what was not synced lost or torn: replayed.

A save is recorded as operations on inodes. A crash keeps the operations up to some point; of those
whose data or names no sync has covered by then, it keeps all, none, all but one, or one alone, and
of a file's data also a half, and zeros of its length. Whatever folder is left, each step in it is
whole, the one before the save is there until the new one is, and the new one is there once `save`
has returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp2 import checkpoint
from fsdp2.checkpoint.folder import MANIFEST

pytestmark = pytest.mark.alone

Op = tuple[Any, ...]


class Recorder(checkpoint.files.Disk):
    """Does what a disk does, and writes it down by inode."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ops: list[Op] = []
        self.inodes: dict[Path, int] = {root: 0}
        self._of_file: dict[int, int] = {}

    def _new(self, path: Path) -> int:
        number = self.inodes[path] = len(self.ops) + 1
        return number

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.ops.append(("folder", self.inodes[path.parent], path.name, self._new(path)))

    def create(self, path: Path) -> Any:
        file = super().create(path)
        self.ops.append(("file", self.inodes[path.parent], path.name, self._new(path)))
        self._of_file[id(file)] = self.inodes[path]
        return file

    def write(self, file: Any, data: bytes) -> None:
        super().write(file, data)
        data = bytes(data)  # a view is the writer's own again
        inode = self._of_file[id(file)]
        if self.ops[-1][:2] == ("write", inode):  # one after the other is one
            data = self.ops.pop()[2] + data
        self.ops.append(("write", inode, data))

    def open(self, path: Path) -> Any:
        file = super().open(path)
        self._of_file[id(file)] = self.inodes[path]
        return file

    def resize(self, file: Any, length: int) -> None:
        super().resize(file, length)
        self.ops.append(("write", self._of_file[id(file)], b"\0" * length))

    def write_at(self, file: Any, data: Any, offset: int) -> None:
        super().write_at(file, data, offset)
        self.ops.append(("write at", self._of_file[id(file)], bytes(data), offset))

    def sync(self, file: Any) -> None:
        super().sync(file)
        self.ops.append(("sync", self._of_file[id(file)]))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self.ops.append(("sync", self.inodes[path]))

    def rename(self, path: Path, other: Path) -> None:
        super().rename(path, other)
        self.ops.append(("rename", self.inodes[path.parent], path.name, other.name))
        for known in [p for p in self.inodes if p == path or path in p.parents]:
            self.inodes[other / known.relative_to(path)] = self.inodes.pop(known)

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.ops.append(("remove", self.inodes[path.parent], path.name))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self.ops.append(("remove", self.inodes[path.parent], path.name))


@dataclass
class Inode:
    """A file's bytes, or a folder's names: as they are, and as they are on the disk."""

    is_folder: bool
    data: bytes = b""
    synced: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)
    changes: list[Op] = field(default_factory=list)  # of names, not synced


def _apply(names: dict[str, int], change: Op) -> None:
    kind, *rest = change
    if kind == "add":
        names[rest[0]] = rest[1]
    elif kind == "rename":
        if rest[0] in names:
            names[rest[1]] = names.pop(rest[0])
    else:
        names.pop(rest[0], None)


def play(ops: list[Op]) -> dict[int, Inode]:
    """All inodes after some operations."""
    inodes = {0: Inode(True)}
    for op in ops:
        kind, number = op[:2]
        inode = inodes[number]
        if kind in ("folder", "file"):
            inodes[op[3]] = Inode(kind == "folder")
            change: Op = ("add", op[2], op[3])
        elif kind == "write":
            inode.data += op[2]
            continue
        elif kind == "write at":
            inode.data = inode.data[: op[3]] + op[2] + inode.data[op[3] + len(op[2]) :]
            continue
        elif kind == "sync":
            inode.synced, inode.durable, inode.changes = inode.data, dict(inode.names), []
            continue
        else:
            change = op[:1] + op[2:]
        _apply(inode.names, change)
        inode.changes.append(change)
    return inodes


Tree = dict[str, Any]


def crashes(ops: list[Op]) -> Iterator[Tree]:
    """What a crash behind these operations may leave."""
    inodes = play(ops)
    pending = [
        (number, place)
        for number, inode in inodes.items()
        for place in (
            range(len(inode.changes))
            if inode.is_folder
            else ([-1] if inode.data != inode.synced else [])
        )
    ]
    everything = set(pending)
    choices: list[tuple[set[Any], str]] = [(set(), "lost"), (everything, "lost")]
    for one in pending:
        choices += [({one}, "lost"), (everything - {one}, "lost")]
        if one[1] == -1:
            choices += [(everything - {one}, "half"), (everything - {one}, "zeros")]

    for kept, loss in choices:

        def tree(number: int, kept: set[Any] = kept, loss: str = loss) -> Any:
            inode = inodes[number]
            if not inode.is_folder:
                if (number, -1) in kept:
                    return inode.data
                if inode.data == inode.synced or loss == "lost":
                    return inode.synced
                half = len(inode.data) // 2
                return inode.data[:half] + (b"\0" * half if loss == "zeros" else b"")
            names = dict(inode.durable)
            for place, change in enumerate(inode.changes):
                if (number, place) in kept:
                    _apply(names, change)
            return {name: tree(other) for name, other in names.items()}

        yield tree(0)


def materialize(tree: Tree, root: Path) -> None:
    root.mkdir()
    for name, value in tree.items():
        if isinstance(value, dict):
            materialize(value, root / name)
        else:
            (root / name).write_bytes(value)


def whole_steps(tree: Tree) -> dict[str, bool]:
    """By name of each step that has a manifest, whether it is one of the states that were saved."""
    run = tree.get("run", {})
    return {
        name: content == WHOLE.get(name)
        for name, content in run.items()
        if name.startswith("step-") and MANIFEST in content
    }


WHOLE: dict[str, Tree] = {}
"""The steps that were saved, as they should be."""

NAMES = [f"step-{step:08d}" for step in (1, 2, 3)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Op], list[int]]:
    """Three saves, each of which replaces the one before; where each of them was durable.

    The second one is asynchronous: training has changed the model before it has begun to write.
    """
    root = tmp_path_factory.mktemp("recorded")
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(root)
    returned = []
    with mock.patch.object(checkpoint.files, "DISK", recorder):
        for step in (1, 2, 3):
            if step == 2:
                saving = checkpoint.async_save(root / "run", model, optimizer, step=step, keep=1)
                saving.wait_staged()
                model.weight.data += 1
                saving.result()
            else:
                checkpoint.save(root / "run", model, optimizer, step=step, keep=1)
                model.weight.data += 1
            returned.append(len(recorder.ops))
            (_, tree) = list(crashes(recorder.ops))[:2]  # all kept
            WHOLE[NAMES[step - 1]] = tree["run"][NAMES[step - 1]]
            for path in (root / "run" / NAMES[step - 1]).iterdir():  # what is replayed was written
                assert path.read_bytes() == WHOLE[NAMES[step - 1]][path.name]
    return recorder.ops, returned


def broken(ops: list[Op], returned: list[int]) -> list[str]:
    """Promises that some crash breaks."""
    found = []
    for length in range(len(ops) + 1):
        done = sum(length >= at for at in returned)
        for tree in crashes(ops[:length]):
            states = whole_steps(tree)
            if not all(states.values()):
                found.append(f"{length}: {[name for name, ok in states.items() if not ok]} torn")
            # The one that has returned last is there, or a newer one that has replaced it.
            if done and not states.keys() & {*NAMES[done - 1 :]}:
                found.append(f"{length}: {NAMES[done - 1]} lost")
    return found


def test_no_crash_breaks_a_promise(recorded: tuple[list[Op], list[int]]) -> None:
    ops, returned = recorded
    assert sum(len(list(crashes(ops[:n]))) for n in range(len(ops))) > 200
    assert broken(ops, returned) == []


def test_every_sync_is_needed(recorded: tuple[list[Op], list[int]]) -> None:
    """A save without one of them breaks a promise at some crash."""
    ops, returned = recorded
    syncs = [place for place, op in enumerate(ops) if op[0] == "sync"]
    assert len(syncs) == 1 + 3 * 5 + 2  # a made folder; files, folders; before a removal
    for place in syncs:
        without = ops[:place] + ops[place + 1 :]
        assert broken(without, [at - (at > place) for at in returned]), ops[place]


@pytest.mark.parametrize("save_", [0, 1, 2])
def test_the_rename_comes_last(recorded: tuple[list[Op], list[int]], save_: int) -> None:
    """One place earlier, a crash between the two breaks a promise."""
    ops, returned = recorded
    renames = [p for p, op in enumerate(ops) if op[0] == "rename" and op[3] in NAMES]
    place = renames[save_]
    for earlier in range(1, 4):  # before the folder's sync, the manifest's, its write
        moved = list(ops)
        moved.insert(place - earlier, moved.pop(place))
        assert broken(moved, returned), earlier


def test_the_order_of_a_removal(recorded: tuple[list[Op], list[int]]) -> None:
    """Files go after the rename is durable."""
    ops, returned = recorded
    place = next(p for p, op in enumerate(ops) if op[0] == "remove")
    assert ops[place - 1][0] == "sync"
    swapped = list(ops)
    swapped[place - 1], swapped[place] = swapped[place], swapped[place - 1]
    assert broken(swapped, returned)


def test_what_a_crash_leaves_is_loaded(
    recorded: tuple[list[Op], list[int]], tmp_path: Path
) -> None:
    """By `load` itself, from real folders; what is half-done is named and removed."""
    ops, returned = recorded
    seen = set()
    for length in range(returned[0], len(ops) + 1, 3):
        for number, tree in enumerate(crashes(ops[:length])):
            if number > 1:  # nothing that was not synced, and everything
                break
            root = tmp_path / f"{length}-{number}"
            materialize(tree, root)
            assert checkpoint.verify(root / "run") == []
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found = checkpoint.load(root / "run", model, optimizer).step
            assert found == checkpoint.steps(root / "run")[-1]
            left = checkpoint.unfinished(root / "run")
            seen.update(name.partition("step-")[0] for name in left)
            assert checkpoint.remove(root / "run") == left
            assert checkpoint.unfinished(root / "run") == []
            checkpoint.save(root / "run", model, optimizer, step=9)
            assert checkpoint.steps(root / "run")[-1] == 9
    assert {".saving-", ".removing-"} <= seen


@pytest.mark.parametrize("kind", ["export", "steps", "dcp", "torch", "safetensors"])
def test_what_is_exported_or_converted_is_whole_or_not_there(kind: str, tmp_path: Path) -> None:
    """After any crash; without one of the syncs, or with the rename earlier, it is torn by some."""
    recorder = Recorder(tmp_path)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    torch.save({"model": model.state_dict()}, tmp_path / "source.pt")
    target = tmp_path / "out"
    with mock.patch.object(checkpoint.files, "DISK", recorder):
        if kind == "export":
            checkpoint.export(target, model, shard_size=80)
        else:
            checkpoint.convert(tmp_path / "source.pt", target, to_kind=kind, step=1)
    ops = recorder.ops

    def made(tree: Tree) -> Any:
        return tree.get("out", {}).get(NAMES[0]) if kind == "steps" else tree.get("out")

    def torn(ops: list[Op]) -> list[str]:
        """Crashes that leave another one than the whole, or none behind the end."""
        return [
            f"{length}: {made(tree)}"
            for length in range(len(ops) + 1)
            for tree in crashes(ops[:length])
            if made(tree) not in (None, whole) or (made(tree) is None and length == len(ops))
        ]

    (_, tree) = list(crashes(ops))[:2]
    whole = made(tree)
    place = target / NAMES[0] if kind == "steps" else target
    parts = {path.name: path.read_bytes() for path in place.iterdir()} if place.is_dir() else {}
    assert whole == (parts or place.read_bytes())
    assert len(parts) == {"export": 3, "steps": 3, "dcp": 2}.get(kind, 0)
    assert torn(ops) == []
    syncs = [at for at, op in enumerate(ops) if op[0] == "sync"]
    assert syncs
    for at in syncs:
        assert torn(ops[:at] + ops[at + 1 :]), ops[at]
    rename = max(at for at, op in enumerate(ops) if op[0] == "rename")
    for earlier in (1, 2):
        moved = list(ops)
        moved.insert(rename - earlier, moved.pop(rename))
        assert torn(moved), earlier


def test_a_written_file_is_read_back() -> None:
    """Of the replay itself: names and bytes that no sync has covered may be lost or torn."""
    ops: list[Op] = [("file", 0, "a", 1), ("write", 1, b"1234")]
    left = [tree.get("a") for tree in crashes(ops)]
    assert {None, b"", b"12", b"12\0\0", b"1234"} == set(left)
    ops += [("sync", 1), ("sync", 0), ("rename", 0, "a", "b")]
    assert [*crashes(ops)][:2] == [{"a": b"1234"}, {"b": b"1234"}]
