"""Files of ranks become one. Those that are wrong are named, and nothing is written."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.xla import consolidate_sharded_model_checkpoints, consolidate_sharded_state_dicts
from fsdp2.xla.consolidate import main
from fsdp2.xla.shards import FORMAT, local_shape, piece_of
from tests.common.errors import raises

pytestmark = pytest.mark.alone

SUFFIX = "_rank-*-of-*.pth"
SHAPES = {"weight": ([5, 4], 0), "wide": ([3, 7], 1), "few": ([1, 2], 0)}


def full() -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        for name, (shape, _) in SHAPES.items()
    }


def checkpoint(rank: int, size: int = 4) -> dict[str, Any]:
    """What a rank saves."""
    model = {}
    for name, (shape, dim) in SHAPES.items():
        start, rows = piece_of(shape[dim], size, rank)
        model[name] = full()[name].narrow(dim, start, rows).clone()
    model["mean"] = torch.full((2,), float(rank), dtype=torch.bfloat16)
    metadata = {
        "format": FORMAT,
        "rank": rank,
        "world_size": size,
        "shard_info": {n: {"shape": shape, "dim": dim} for n, (shape, dim) in SHAPES.items()},
        "buffer_info": {"mean": "float32"},
        "flatten_info": {},
    }
    return {"model": model, "shard_metadata": metadata, "epoch": 3}


def save(folder: Path, size: int = 4) -> str:
    for rank in range(size):
        torch.save(checkpoint(rank, size), folder / f"ckpt_rank-{rank}-of-{size}.pth")
    return str(folder / "ckpt")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_all_numbers_of_ranks(size: int, tmp_path: Path) -> None:
    found, path = consolidate_sharded_model_checkpoints(save(tmp_path, size), SUFFIX)
    assert path == str(tmp_path / "ckpt_consolidated.pth")
    saved = torch.load(path, weights_only=True)["model"]
    expected = {**full(), "mean": torch.zeros(2)}  # rank 0's
    for each in (found, saved):
        assert each.keys() == expected.keys()
        assert all(torch.equal(each[name], value) for name, value in expected.items())
        assert all(each[name].dtype == torch.float32 for name in each)
    shapes = [local_shape({"shape": [5, 4], "dim": 0}, size, rank) for rank in range(size)]
    assert sum(shape[0] for shape in shapes) == 5


def test_the_full_file_is_no_ranks_file_the_next_time(tmp_path: Path) -> None:
    """The default suffix finds it, too."""
    prefix = save(tmp_path)
    for _ in range(2):
        _, path = consolidate_sharded_model_checkpoints(prefix)
        assert path == f"{prefix}_consolidated.pth"


def test_state_dicts_in_memory() -> None:
    saved = [checkpoint(rank) for rank in range(4)]
    found = consolidate_sharded_state_dicts(
        [each["model"] for each in saved], saved[2]["shard_metadata"]
    )
    assert all(torch.equal(found[name], value) for name, value in full().items())


def test_files_of_the_older_format(tmp_path: Path) -> None:
    prefix = save(tmp_path, 2)
    path = f"{prefix}_rank-1-of-2.pth"
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
    found, _ = consolidate_sharded_model_checkpoints(prefix, SUFFIX)
    assert torch.equal(found["weight"], full()["weight"])


# ---- what is wrong


Change = Callable[[Path], object]


def _edit(folder: Path, rank: int, change: Callable[[dict[str, Any]], object]) -> None:
    found = checkpoint(rank)
    change(found)
    torch.save(found, folder / f"ckpt_rank-{rank}-of-4.pth")


def _add(folder: Path, saved: object) -> None:
    torch.save(saved, folder / "ckpt_rank-9-of-4.pth")


def _cut(folder: Path, length: Callable[[int], int]) -> None:
    path = folder / "ckpt_rank-3-of-4.pth"
    path.write_bytes(path.read_bytes()[: length(path.stat().st_size)])


def _infos(saved: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = saved["shard_metadata"]["shard_info"]
    return found


WRONG: list[tuple[str, Change]] = [
    ("xla-no-files", lambda folder: [path.unlink() for path in folder.iterdir()]),
    ("xla-missing", lambda folder: (folder / "ckpt_rank-2-of-4.pth").unlink()),
    ("xla-unreadable", lambda folder: _cut(folder, lambda size: size - 100)),
    ("xla-unreadable", lambda folder: _cut(folder, lambda size: size // 2)),
    ("xla-unreadable", lambda folder: _cut(folder, lambda size: 0)),
    ("xla-unreadable", lambda folder: _add(folder, {"model": {}, "config": io.StringIO})),
    ("xla-no-model", lambda folder: _add(folder, {"state": 1})),
    ("xla-no-model", lambda folder: _add(folder, [1])),
    ("xla-no-model", lambda folder: _edit(folder, 1, lambda c: c.update(model=3))),
    (
        "xla-foreign",
        lambda folder: _add(folder, {"model": {}, "shard_metadata": {"world_size": 4, "rank": 9}}),
    ),
    ("xla-foreign", lambda folder: _edit(folder, 0, lambda c: c.pop("shard_metadata"))),
    ("xla-rank-twice", lambda folder: _add(folder, checkpoint(1))),
    ("xla-world-sizes", lambda folder: _add(folder, checkpoint(1, 2))),
    ("xla-other-model", lambda folder: _edit(folder, 2, lambda c: _infos(c).pop("wide"))),
    (
        "xla-other-model",
        lambda folder: _edit(
            folder, 1, lambda c: _infos(c).update(few={"shape": [1, 2], "dim": 1})
        ),
    ),
    ("xla-names", lambda folder: _edit(folder, 3, lambda c: c["model"].pop("weight"))),
    ("xla-names", lambda folder: _edit(folder, 0, lambda c: c["model"].pop("mean"))),
    (
        "xla-piece",
        lambda folder: _edit(folder, 1, lambda c: c["model"].update(weight=full()["weight"])),
    ),
    (
        "xla-dtypes",
        lambda folder: _edit(folder, 2, lambda c: c["model"].update(few=torch.zeros(0, 2).half())),
    ),
]


@pytest.mark.parametrize(("entry", "change"), WRONG, ids=[entry for entry, _ in WRONG])
def test_wrong_files(
    entry: str, change: Change, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are named, by the function and by the command, and nothing is written."""
    prefix = save(tmp_path)
    change(tmp_path)
    before = sorted(tmp_path.iterdir())
    with raises(entry) as caught:
        consolidate_sharded_model_checkpoints(prefix, SUFFIX)
    assert prefix in str(caught.value)
    assert main(["--ckpt_prefix", prefix, "--ckpt_suffix", SUFFIX]) == 1
    assert capsys.readouterr().err.strip() == str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_wrong_state_dicts() -> None:
    saved = [checkpoint(rank) for rank in range(4)]
    models, metadata = [each["model"] for each in saved], saved[0]["shard_metadata"]
    with raises("xla-number"):
        consolidate_sharded_state_dicts(models[:3], metadata)
    with raises("xla-piece"):
        consolidate_sharded_state_dicts(models[::-1], metadata)
    with raises("xla-foreign"):
        consolidate_sharded_state_dicts(models, {"world_size": 4})  # type: ignore[typeddict-item]


def test_what_was_there_stays_until_the_new_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = save(tmp_path)
    target = tmp_path / "full.pth"
    target.write_bytes(b"before")
    before = sorted(tmp_path.iterdir())

    def fail(value: object, file: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", fail)
        with pytest.raises(OSError, match="disk full"):
            consolidate_sharded_model_checkpoints(prefix, SUFFIX, str(target))
    assert target.read_bytes() == b"before"
    assert sorted(tmp_path.iterdir()) == before
    consolidate_sharded_model_checkpoints(prefix, SUFFIX, str(target))
    assert torch.equal(torch.load(target)["model"]["weight"], full()["weight"])


LIMITED = """
import os, resource, sys
from fsdp2.xla import consolidate_sharded_model_checkpoints
ended = []
for writes in (False, True):
    child = os.fork()
    if not child:
        pages = int(open('/proc/self/statm').read().split()[5])
        limit = pages * resource.getpagesize() + int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        consolidate_sharded_model_checkpoints(sys.argv[1], save_model=writes)
        os._exit(0)
    ended.append(os.waitpid(child, 0)[1] == 0)
print(ended)
"""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_memory_is_pages_of_files(tmp_path: Path) -> None:
    """A process that may not hold the model writes it; one that is to return it fails.

    torch maps the ranks' files so that they count against the limit, though no page is copied.
    """
    rows, params = 1 << 20, 12  # of 2 ranks, 4 MiB each a rank: 96 MiB in all
    for rank in range(2):
        model = {f"p{i}": torch.full((rows,), float(i + rank)) for i in range(params)}
        info = {name: {"shape": [2 * rows], "dim": 0} for name in model}
        metadata = {**checkpoint(0)["shard_metadata"], "rank": rank, "world_size": 2}
        torch.save(
            {"model": model, "shard_metadata": {**metadata, "shard_info": info}},
            tmp_path / f"ckpt_rank-{rank}-of-2.pth",
        )
    limit = str((96 + 64) << 20)
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "ckpt"), limit]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["[False, True]"], done.stderr
    found = torch.load(tmp_path / "ckpt_consolidated.pth", mmap=True)["model"]
    assert (found["p3"][0], found["p3"][-1]) == (3, 4)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the document calls it."""
    prefix, target = save(tmp_path, 2), tmp_path / "full.pth"
    arguments = ["--ckpt_prefix", prefix, "--ckpt_suffix", SUFFIX, "--save_path", str(target)]
    monkeypatch.setattr(sys, "argv", ["python -m fsdp2.xla.consolidate", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fsdp2.xla.consolidate", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr() == (f"saved 4 tensors to {target}\n", "")
    assert torch.equal(torch.load(target)["model"]["wide"], full()["wide"])
