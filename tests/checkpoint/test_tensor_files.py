"""Files of `fsdp2.checkpoint.tensors` against those of the package safetensors, byte for byte."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsdp2.checkpoint import contents, files, tensors
from fsdp2.checkpoint.contents import TensorFolder
from fsdp2.checkpoint.tensors import About, Reader, Writer, plan
from tests.checkpoint.shared import Unsynced
from tests.common.errors import raises

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.alone


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits; of bool, those that mean something."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def _same(one: Tensor, other: Tensor) -> bool:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def _written(folder: Path, given: dict[str, Tensor], **options: Any) -> tensors.Layout:
    layout = plan({n: About(tuple(t.shape), t.dtype) for n, t in given.items()}, **options)
    writer = Writer(folder, layout)
    writer.create()
    for name, tensor in given.items():
        writer.write(name, tensor)
    writer.close()
    return layout


EVERY = {
    **{f"t.{name}": ((3, 5), dtype) for name, dtype in tensors.DTYPES.items()},
    "scalar": ((), torch.float32),
    "empty": ((0, 3), torch.bfloat16),
    'é "quoted" \\ \n': ((2,), torch.float16),
    "deep": ((2, 3, 4, 5), torch.float32),
}


@pytest.mark.parametrize("names", [list(EVERY), ["scalar"], ["empty"], []])
def test_a_file_is_the_packages(tmp_path: Path, names: list[str]) -> None:
    """Of every dtype that the format knows, scalars, empty tensors, odd names, nothing."""
    given = {name: _values(*EVERY[name]) for name in names}
    layout = _written(tmp_path, given)
    save_file(given, tmp_path / "theirs.safetensors", {"format": "pt"})
    ours = (tmp_path / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes()
    assert layout.total == len(ours)
    assert layout.index is None
    found = TensorFolder(tmp_path / "theirs.safetensors")
    assert set(found.abouts) == set(given)
    for name, tensor in given.items():
        out = torch.empty_like(tensor)
        found.read(name, out, (0,) * tensor.dim())
        assert _same(out, tensor), name


def _box(shape: tuple[int, ...], draw: random.Random) -> tuple[slice, ...]:
    """Any part, also all, also none."""
    ends = (sorted((draw.randint(0, n), draw.randint(0, n))) for n in shape)
    return tuple(
        slice(0, n) if draw.random() < 0.4 else slice(*end)
        for n, end in zip(shape, ends, strict=True)
    )


@pytest.mark.parametrize("block", [16, 200, tensors.BLOCK])
@pytest.mark.parametrize("small", [0, 40, tensors._SMALL])
def test_boxes(tmp_path: Path, block: int, small: int) -> None:
    """Any box is written and read; nothing beside it is touched; in blocks of any size."""
    draw = random.Random(block + small)
    given = {
        "a": _values((7, 6, 5), torch.int16),
        "b": _values((40, 9), torch.int64),
        "c": _values((1, 3, 1, 4), torch.uint8),
    }
    _written(tmp_path, given)
    layout = plan({n: About(tuple(t.shape), t.dtype) for n, t in given.items()})
    with (
        mock.patch.object(tensors, "BLOCK", block),
        mock.patch.object(tensors, "_SMALL", small),
        mock.patch.object(files, "DISK", Unsynced()),
        Reader(tmp_path) as reader,
    ):
        for turn in range(40):
            name = draw.choice(sorted(given))
            box = _box(tuple(given[name].shape), draw)
            first = tuple(part.start for part in box)
            out = torch.empty_like(given[name][box])
            if turn % 3 == 0:
                out = out.movedim(0, -1).contiguous().movedim(-1, 0)  # another order in memory
            elif turn % 3 == 1:
                out = out.double()
            if out.numel():
                reader.read_box(layout.places[name], out, first)
            assert torch.equal(out, given[name][box].to(out.dtype)), (name, box)
            TensorFolder(tmp_path).read(name, out.zero_(), first)
            assert torch.equal(out, given[name][box].to(out.dtype)), (name, box)
            values = _values(tuple(out.shape), given[name].dtype)
            given[name][box] = values
            writer = Writer(tmp_path, layout)
            writer.write(name, values.movedim(0, -1).contiguous().movedim(-1, 0), first)
            writer.close()
            writer.close()
            for key, tensor in load_file(tmp_path / "model.safetensors").items():
                assert _same(tensor, given[key]), (name, box)


def test_no_more_than_a_block_is_read_or_written_at_once(tmp_path: Path) -> None:
    given = {"a": _values((1000, 50), torch.float32)}
    sizes = []

    class Watched(files.Disk):
        def write_at(self, file: Any, data: Any, offset: int) -> None:
            sizes.append(len(data))
            super().write_at(file, data, offset)

    def read_at(file: Any, into: memoryview, offset: int) -> int:
        sizes.append(len(into))
        return read(file, into, offset)

    read = files.read_at
    with (
        mock.patch.object(tensors, "BLOCK", 4096),
        mock.patch.object(files, "DISK", Watched()),
        mock.patch.object(files, "read_at", read_at),
    ):
        layout = _written(tmp_path, given)
        written = sum(sizes)
        with Reader(tmp_path) as reader:
            reader.read_box(layout.places["a"], torch.empty(1000, 10), (0, 20))
            reader.read_box(layout.places["a"], torch.empty(100, 50), (700, 0))
    assert max(sizes) <= 4096
    assert written == (tmp_path / "model.safetensors").stat().st_size
    assert sum(sizes) - written <= 1000 * 50 * 4 + 100 * 50 * 4  # short runs with what is between


def test_shards_are_those_of_save_pretrained(tmp_path: Path) -> None:
    """A tensor of more than the limit has a file of its own; the index says where each is."""
    sizes = {"a": 10, "b": 50, "c": 30, "d": 15, "e": 30, "f": 0}
    given = {name: _values((size,), torch.uint8) for name, size in sizes.items()}
    layout = _written(tmp_path, given, shard_bytes=40)
    shards = [["b"], ["a", "c"], ["d"], ["e", "f"]]  # a and c are 40, d and e 45
    content = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert content["metadata"] == {"total_size": 135}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-00004.safetensors"
        assert load_file(tmp_path / file).keys() == set(names)
        assert {n for n, where in content["weight_map"].items() if where == file} == set(names)
    assert layout.total == sum(path.stat().st_size for path in tmp_path.iterdir())
    hub = pytest.importorskip("huggingface_hub")
    theirs = hub.split_torch_state_dict_into_shards(given, max_shard_size=40)
    assert theirs.tensor_to_filename == content["weight_map"]
    assert theirs.metadata == content["metadata"]


def test_tied_names_are_told_as_the_package_does(tmp_path: Path) -> None:
    given = {"a": _values((3,), torch.float32), "b": _values((4,), torch.float32)}
    _written(tmp_path, given, shard_bytes=12, tied={"z": "a"})
    with safe_open(tmp_path / "model-00002-of-00002.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "z": "a"}
    assert TensorFolder(tmp_path).tied == {"z": "a"}


def test_which_files_a_path_means(tmp_path: Path) -> None:
    """A file, its index, a folder with an index, with ``model.safetensors``, with others."""
    one, other = _values((3,), torch.float32), _values((4,), torch.float32)
    save_file({"a": one}, tmp_path / "x.safetensors")
    save_file({"b": other}, tmp_path / "y.safetensors")
    assert TensorFolder(tmp_path).abouts.keys() == {"a", "b"}
    assert TensorFolder(tmp_path / "x.safetensors").abouts.keys() == {"a"}
    index = tmp_path / "it.json"
    index.write_text(json.dumps({"weight_map": {"b": "y.safetensors"}}))
    assert TensorFolder(index).abouts.keys() == {"b"}
    save_file({"c": other}, tmp_path / "model.safetensors")
    assert TensorFolder(tmp_path).abouts.keys() == {"c"}
    save_file({"a": other, "b": other.clone()}, tmp_path / "z.safetensors")
    where = {"a": "x.safetensors", "b": "z.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    found = TensorFolder(tmp_path)
    for name, expected in (("a", one), ("b", other)):  # bit by bit: some are not numbers
        assert torch.equal(found.values(name).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("at", [(0, 0, 1), (-1, 0, 0), (0, 0)])
def test_a_box_beside_its_tensor_is_refused(tmp_path: Path, at: tuple[int, ...]) -> None:
    """It would be another tensor's bytes."""
    layout = _written(tmp_path, {"a": _values((2, 3, 4), torch.float32)})
    with pytest.raises((AssertionError, ValueError)):
        Writer(tmp_path, layout).write("a", torch.zeros(2, 3, 4), at)


# ---- what is refused


def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dtype of a later version, a file that is truncated meanwhile, a missing package."""
    layout = _written(tmp_path, {"a": torch.ones(2, 3)})
    with monkeypatch.context() as patch:
        patch.delitem(contents.DTYPES, "F32")
        with raises("tensors-unknown-dtype"):
            TensorFolder(tmp_path)
    with monkeypatch.context() as patch, Reader(tmp_path) as reader:
        patch.setattr(files, "read_at", lambda *_: 0)
        with raises("tensors-shorter"):
            reader.read_box(layout.places["a"], torch.empty(2, 3), (0, 0))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with raises("tensors-package"):
        TensorFolder(tmp_path)


def test_what_the_format_does_not_know() -> None:
    with raises("tensors-dtype"):
        plan({"a": About((2,), torch.complex128)})
    with raises("tensors-name"):
        plan({"__metadata__": About((2,), torch.float32)})


def _one(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({"a": _one(), "b": _one(offsets=(12, 20))}, 20),  # a hole
        ({"a": _one(), "b": _one(offsets=(0, 8))}, 8),  # one place twice
        ({"a": _one(), "b": _one(offsets=(4, 12))}, 12),
        ({"a": _one(offsets=(4, 12))}, 12),  # a hole before
        ({"a": _one()}, 12),  # behind
        ({"a": _one(shape="2")}, 8),
        ({"a": _one(shape=["2"])}, 8),
        ({"a": _one(shape=[2.0])}, 8),
        ({"a": _one(shape=[True, 2])}, 8),
        ({"a": _one(shape=[-1, -2])}, 8),
        ({"a": _one(offsets="08")}, 8),
        ({"a": _one(offsets=[0, 8, 9])}, 8),
        ({"a": _one(dtype=["F32"])}, 8),
        ({"__metadata__": {"a": 1}, "b": _one()}, 8),
        ({"__metadata__": ["a"], "b": _one()}, 8),
        (b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8),
        (json.dumps({"a": _one()}).encode("utf-16"), 8),
        (b"[" * 100_000, 8),
        (b"{", 8),
        ({"a": _one(dtype="F99")}, 8),
        ({"a": _one(shape=(4,))}, 8),
        ({"a": {"dtype": "F32", "shade": [2], "data_offsets": [0, 8]}}, 8),
        ({"a": _one()}, 7),  # cut off
        (b"[]", 0),
        (b'"a"', 0),
        (b"", -8),
        (b"", -3),
        (json.dumps({"a": _one()}).encode(), -10),
    ],
)
def test_broken_files(tmp_path: Path, header: Any, length: int) -> None:
    """Each is named; where ``length`` is negative, so many bytes of the header are cut off."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    whole = len(text).to_bytes(8, "little") + text
    path.write_bytes(whole + bytes(length) if length >= 0 else whole[:length])
    with raises("tensors-header") as caught:
        TensorFolder(tmp_path)
    assert str(path) in str(caught.value)


def test_broken_indexes(tmp_path: Path) -> None:
    with raises("tensors-none"):
        TensorFolder(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "y.safetensors")
    with raises("tensors-twice"):
        TensorFolder(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for content in ("{", "{}", '{"weight_map": ["x"]}', '{"weight_map": {"a": 1}}'):
        index.write_text(content)
        with raises("tensors-index"):
            TensorFolder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
    with raises("tensors-not-there"):
        TensorFolder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "w.safetensors"}}))
    with raises("tensors-missing"):
        TensorFolder(tmp_path)
