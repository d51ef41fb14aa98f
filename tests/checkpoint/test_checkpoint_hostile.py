"""Files that mean harm, and files that are mutated: refused, and nothing of the process is touched.

python -m pytest -m extended tests/checkpoint/test_checkpoint_hostile.py  # 500 files of each kind
"""

from __future__ import annotations

import collections
import json
import os
import pickle
import random
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fsdp2 import checkpoint
from fsdp2.checkpoint import items
from fsdp2.checkpoint.archives import mapped, read_file, values_of
from fsdp2.checkpoint.contents import TensorFolder
from fsdp2.checkpoint.folder import Manifest
from fsdp2.checkpoint.tensors import cover
from fsdp2.core.errors import CheckpointError
from tests.checkpoint.shared import trained
from tests.common import combinations
from tests.common.errors import raises

pytestmark = pytest.mark.alone

EXTRA = {"epoch": 3, "table": torch.arange(4), "names": ["a", ("b", 1.5)], "none": None}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    return Path(checkpoint.save(folder / "run", *trained(), step=1, extra=EXTRA, rng=True))


# ---- crafted pickles

PROTO, STOP = b"\x80\x02", b"."


def _name(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _slots(key: str) -> bytes:
    """The state (None, {key: 7}), which BUILD would set as attributes."""
    return b"N}" + _text(key) + b"K\x07s\x86"


REACHED = (
    ("collections", "Counter"),
    ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.tensor", "DTensor"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch", "float32"),
    ("torch.nn.parameter", "Parameter"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("pathlib", "PosixPath"),
    ("builtins", "getattr"),
    ("_codecs", "encode"),
)


def _attacks() -> list[bytes]:
    found = []
    for module, name in REACHED:
        for state in (_slots("most_common"), b"}" + _text("most_common") + b"K\x07s"):
            found.append(PROTO + _name(module, name) + state + b"b" + STOP)
        found.append(PROTO + _name(module, name) + _text("x") + b"a" + STOP)
        found.append(PROTO + _name(module, name) + _text("x") + b"K\x01s" + STOP)
    return [
        *found,
        PROTO + _name("os", "mkdir") + _text("evil") + b"\x85R" + STOP,
        PROTO + _name("torch", "_dynamo") + STOP,
        PROTO + _name("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85R" + STOP,
        PROTO + _name("_codecs", "encode") + _text("x") + _text("zip") + b"\x86R" + STOP,
        PROTO + b"]r\xff\xff\xff\x7f" + b"]" * 5 + STOP,  # a memo of 64 GB in Python's own
        PROTO + b"]" + b"q\x00h\x00a" + STOP,  # a list in itself
        PROTO + b"]" * 100_000 + b"a" * 99_999 + STOP,
        PROTO + b"}" + b")" + b"\x85" * 1_000_000 + b"K\x01s" + STOP,  # a key that nobody can hash
        PROTO + b"]" + b"".join(b"q%c(" % n + b"h%c" % n * 9 + b"l" for n in range(20)) + STOP,
        PROTO
        + b"]"
        + b"".join(b"q%c]" % n + b"(" + b"h%c" % n * 9 + b"e" for n in range(40))
        + STOP,
        b"",
        PROTO,
        PROTO + STOP,
        PROTO + b"\x82\x01" + STOP,  # the registry of extensions
        PROTO + b"(K\x01i" + b"os\nmkdir\n" + STOP,
    ]


def _touched() -> list[Any]:
    """What the attacks are after."""
    classes = (collections.Counter, Metadata, MetadataIndex, dcp_metadata.StorageMeta)
    own = (items._Draft, items._Plain)
    functions = (torch.serialization._get_layout, torch._utils._rebuild_tensor_v2)
    return [dict(vars(each)) for each in (*classes, *own, *functions, Path)]


def _archive(path: Path, text: bytes) -> Path:
    """A file of torch.save with this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", text)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", bytes(64))
    return path


@pytest.mark.parametrize("reader", ["index", "archive"])
def test_no_opcode_touches_anything(tmp_path: Path, reader: str) -> None:
    """Whatever a pickle says, classes and functions of the process are as they were."""
    before, refused = _touched(), 0
    for text in _attacks():
        try:
            if reader == "index":
                (tmp_path / ".metadata").write_bytes(text)
                items.read_index(tmp_path)
            else:
                read_file(_archive(tmp_path / "a.pt", text))
        except CheckpointError:
            refused += 1
        assert _touched() == before
    assert refused >= len(_attacks()) - 1 - 4 * (reader == "archive")
    assert not Path("evil").exists()


def _index_with(step: Path, folder: Path, change: Callable[[Metadata], Metadata | None]) -> Path:
    """A step whose index says something else, with a manifest that knows it."""
    shutil.copytree(step.parent, folder)
    place = folder / step.name
    found = pickle.loads((place / ".metadata").read_bytes())
    found = change(found) or found
    _put(place, ".metadata", pickle.dumps(found))
    return folder


def _put(place: Path, name: str, data: bytes) -> None:
    """Other bytes of a file, and a manifest that agrees."""
    (place / name).write_bytes(data)
    content = json.loads((place / "manifest.json").read_text())
    facts = {each: tuple(fact) for each, fact in content["files"].items()}
    facts[name] = (len(data), checkpoint.files.fact_of(data)[1])
    manifest = Manifest(**{**content, "files": facts})
    (place / "manifest.json").write_bytes(manifest.encoded())


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "", "a\0b"]
)
def test_files_elsewhere(step: Path, tmp_path: Path, name: str) -> None:
    """Of an index of DCP, by every reader of it; a manifest that names them; safetensors."""

    def change(found: Metadata) -> None:
        for info in found.storage_data.values():
            info.relative_path = name

    run = _index_with(step, tmp_path / "run", change)
    with raises("ckpt-index-path"):
        checkpoint.load(run, trained()[0])
    with raises("ckpt-index-path"):
        checkpoint.read_extra(run)
    with raises("ckpt-index-path"):
        checkpoint.convert(run, tmp_path / "one.pt")
    with raises("ckpt-index-path"):
        checkpoint.convert(run / step.name, tmp_path / "one.pt", from_kind="dcp")
    place = run / step.name
    content = json.loads((place / "manifest.json").read_text())
    facts = {**{each: tuple(fact) for each, fact in content["files"].items()}, name: (3, "0")}
    (place / "manifest.json").write_bytes(Manifest(**{**content, "files": facts}).encoded())
    with raises("ckpt-manifest-changed"):
        checkpoint.load(run, trained()[0])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with raises("tensors-index"):
        TensorFolder(tmp_path)


def _holes(found: Metadata) -> None:
    """A chunk less than the tensor."""
    about = found.state_dict_metadata["model.0.weight"]
    about.chunks[0].sizes = torch.Size([2, 3])


def _negative(found: Metadata) -> None:
    next(iter(found.storage_data.values())).offset = -5


def _unstored(found: Metadata) -> None:
    found.storage_data.popitem()


def _long_list(found: Metadata) -> None:
    found.planner_data["model.0.weight"] = ("model", 1 << 40)


@pytest.mark.parametrize("change", [_holes, _negative, _unstored, _long_list])
def test_an_index_that_says_what_none_does(
    step: Path, tmp_path: Path, change: Callable[[Metadata], None]
) -> None:
    run = _index_with(step, tmp_path / "run", change)
    entry = "ckpt-parts-missing" if change is _holes else "ckpt-index-broken"
    with raises(entry):
        checkpoint.load(run, trained()[0])
    with raises(entry):
        checkpoint.convert(run, tmp_path / "one.pt")


def test_values_that_no_save_writes(step: Path, tmp_path: Path) -> None:
    """An ``extra`` without its tensor; items of other classes than the index says."""
    shutil.copytree(step.parent, tmp_path / "run")
    place = tmp_path / "run" / step.name
    content = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_bytes(Manifest(**{**content, "extra": {"tensor": 9}}).encoded())
    with raises("ckpt-value-broken"):
        checkpoint.read_extra(tmp_path / "run")
    with raises("ckpt-value-broken"):
        checkpoint.convert(tmp_path / "run", tmp_path / "one.pt")

    def swap(found: Metadata) -> None:
        names = {key.fqn: key for key in found.storage_data}
        one, other = names["model.0.weight"], names["optimizer.param_groups.0.lr"]
        stored = found.storage_data
        stored[one], stored[other] = stored[other], stored[one]

    run = _index_with(step, tmp_path / "swapped", swap)
    with raises("ckpt-value-broken"):
        checkpoint.convert(run / step.name, tmp_path / "one.pt", from_kind="dcp")
    with pytest.raises(CheckpointError):
        checkpoint.load(run, *trained())


def test_boxes_that_cover() -> None:
    """Against a count of each element, at random."""
    rng = random.Random(0)
    seen = collections.Counter[bool]()
    for _ in range(3000):
        shape = tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 3)))
        boxes = []
        for _ in range(rng.randint(1, 3)):
            first = tuple(rng.randint(0, n) * rng.randint(0, 1) for n in shape)
            boxes.append((first, tuple(rng.randint(0, n) for n in shape)))
        if rng.random() < 0.5 and shape:  # a cut, so that some do
            at = rng.randint(0, shape[0])
            zeros = (0,) * (len(shape) - 1)
            boxes = [((0, *zeros), (at, *shape[1:])), ((at, *zeros), (shape[0] - at, *shape[1:]))]
        count = torch.zeros(shape)
        inside = True
        for first, sizes in boxes:
            if 0 in sizes:
                continue
            inside &= all(a + n <= s for a, n, s in zip(first, sizes, shape, strict=True))
            count[tuple(slice(a, a + n) for a, n in zip(first, sizes, strict=True))] += 1
        expected = inside and bool((count == 1).all())
        assert cover(shape, boxes) == expected, (shape, boxes)
        seen[expected] += 1
    assert min(seen.values()) > 200


# ---- mutated files


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Some bits, bytes, numbers or pieces of it changed, moved, doubled, or cut off."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 2:
            out[at : at + rng.randrange(1, 9)] = b""
        elif kind == 3:
            out[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
        elif kind == 4:
            start = rng.randrange(len(out) + 1)
            out[at:at] = out[start : start + rng.randrange(1, 65)]
        elif kind == 5:
            wide = rng.choice((b"\xff" * 4, b"\xff" * 8, b"\0" * 8, b"\x7f", b"-1", b"9" * 20))
            out[at : at + len(wide)] = wide
        elif rng.random() < 0.3:
            del out[at:]
        if not out:
            break
    return bytes(out)


Reader = Callable[[bytes, Path], object]


def _reads_index(data: bytes, folder: Path) -> object:
    (folder / ".metadata").write_bytes(data)
    return items.read_index(folder)


def _reads_manifest(data: bytes, folder: Path) -> object:
    """As it is, and with a hash that agrees."""
    place = folder / "step-00000001"
    place.mkdir(exist_ok=True)
    for text in (data, _signed(data)):
        (place / "manifest.json").write_bytes(text)
        with_error = None
        try:
            checkpoint.read_extra(folder)
            checkpoint.verify(folder)
        except CheckpointError as error:
            with_error = error
    if with_error is not None:
        raise with_error
    return None


def _signed(data: bytes) -> bytes:
    try:
        content = json.loads(data)
        return Manifest(**{**content, "digest": ""}).encoded()
    except (ValueError, TypeError, AttributeError, RecursionError, KeyError):
        return data


def _reads_safetensors(data: bytes, folder: Path) -> object:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    found = TensorFolder(path)
    for name, about in found.abouts.items():
        found.read(name, torch.empty(about.shape, dtype=about.dtype), (0,) * len(about.shape))
    return found


def _reads_archive(data: bytes, folder: Path) -> object:
    path = folder / "a.pt"
    path.write_bytes(data)
    tree = read_file(path)
    mapped(tree, values_of)
    return tree


def _reads_items(data: bytes, folder: Path) -> object:
    """All that a step holds, with an index that is whole."""
    place = folder / "step-00000001"
    (place / "__0_0.distcp").write_bytes(data.ljust(_lengths[place], b"\0")[: _lengths[place]])
    model, optimizer = trained()
    checkpoint.load(folder, model, optimizer, rng=False)
    return checkpoint.read_extra(folder)


_lengths: dict[Path, int] = {}


def _originals(step: Path, folder: Path) -> dict[str, tuple[bytes, Reader]]:
    model, optimizer = trained()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "set": {1, 2},
            "bytes": b"abc",
            "counter": collections.Counter("aab"),
            "complex": 1j,
            "view": torch.arange(12).view(3, 4).t()[1:],
        },
        folder / "plain.pt",
    )
    checkpoint.export(folder / "out", model)
    return {
        "index": ((step / ".metadata").read_bytes(), _reads_index),
        "manifest": ((step / "manifest.json").read_bytes(), _reads_manifest),
        "safetensors": ((folder / "out/model.safetensors").read_bytes(), _reads_safetensors),
        "archive": ((folder / "plain.pt").read_bytes(), _reads_archive),
        "items": ((step / "__0_0.distcp").read_bytes(), _reads_items),
    }


KINDS = ("index", "manifest", "safetensors", "archive", "items")


def fuzz(step: Path, folder: Path, kind: str, count: int) -> collections.Counter[str]:
    """How many files were refused, and how many read; anything but `CheckpointError` is raised."""
    data, read = _originals(step, folder)[kind]
    work, found = folder / "work", collections.Counter[str]()
    shutil.copytree(step.parent, work)
    _lengths[work / step.name] = (step / "__0_0.distcp").stat().st_size
    before = _touched()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read(data, work)
        rng = random.Random(f"{kind} {count}")
        for number in range(count):
            changed = mutated(data, rng)
            if kind == "safetensors" and rng.random() < 0.8:  # of the header, not of the values
                size = int.from_bytes(data[:8], "little") + 8
                head = mutated(data[8:size], rng)
                changed = struct.pack("<Q", len(head)) + head + data[size:]
            try:
                read(changed, work)
                found["read"] += 1
            except CheckpointError:
                found["refused"] += 1
            except BaseException as error:
                raise AssertionError(f"{kind}, file {number} of {count}: {error!r}") from error
    assert _touched() == before
    return found


@pytest.mark.parametrize("many", combinations.often([False, True]))
@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files(step: Path, tmp_path: Path, kind: str, many: bool) -> None:
    few = 20 if kind == "items" else 150
    found = fuzz(step, tmp_path, kind, int(os.environ.get("FSDP2_FUZZ", "500")) if many else few)
    assert found["refused"] > 0
