"""`export` and `load_pretrained`: the files of safetensors, from and into models sharded anyhow."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import checkpoint, errors, fully_shard
from fsdp2.checkpoint import files, tensors
from fsdp2.checkpoint.state import held_by
from fsdp2.command.checkpoint import main
from tests.checkpoint.shared import Failing, assert_same, everything, spread
from tests.common.errors import raises
from tests.common.observing import LargestMade
from tests.common.tensors import Wrapped
from tests.common.workers import ranks

pytest.importorskip("safetensors")
from safetensors.torch import load_file, load_model, save_file

pytestmark = pytest.mark.ranks

IN, HIDDEN = 6, 10


class Net(nn.Module):
    """Uneven and even parameters, bf16, an empty one, buffers of several dtypes and a scalar."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.last = nn.Linear(HIDDEN, IN)
        self.table = nn.Parameter(torch.randn(7, 3, 5).bfloat16())
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.arange(5) % 2 == 0)
        if tied:
            self.again = nn.Linear(IN, HIDDEN)
            self.again.weight = self.first.weight


def _columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 and param.numel() else None


def made(how: str, seed: int = 0, meta: bool = False, tied: bool = False) -> nn.Module:
    """A model with the same values on all ranks, sharded."""
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        model = Net(tied)
    if not meta:
        for buffer in (model.norm.running_mean, model.norm.running_var):
            buffer.copy_(torch.randn_like(buffer))
    spread(model, how, "first", "last")
    return model


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


# ---- there and back


def _into(moved: list[tuple[int, int]]) -> Callable[[int, int], object]:
    return lambda done, total: moved.append((done, total))


def _there_and_back(folder: Path, ways: list[str]) -> None:
    expected = everything(made("whole"))
    for way in ways:
        model = made(way)
        moved: list[tuple[int, int]] = []
        found = checkpoint.export(folder / way, model, progress=_into(moved))
        assert found.files == ["model.safetensors"]
        path = folder / way / "model.safetensors"
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_file(expected, folder / f"{way}.safetensors", {"format": "pt"})
        barrier()
        assert path.read_bytes() == (folder / f"{way}.safetensors").read_bytes(), way
        assert found.nbytes == path.stat().st_size
        written = [moved[-1][0] if moved else 0]
        if dist.is_initialized():
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, written[0])
            written = every
        assert sum(written) == sum(value.nbytes for value in expected.values())
        assert all(done == total for done, total in moved[-1:])
        if way == "hybrid":
            assert all(written)  # replicas share the work
        for meta in (False, True):
            other = made(way, seed=1, meta=meta)
            if not meta and way != "whole":
                other.unshard()
            assert not checkpoint.load_pretrained(other, folder / way)
            assert_same(everything(other), expected)
    barrier()


def test_one_process(tmp_path: Path) -> None:
    _there_and_back(tmp_path, ["whole"])


@ranks(1, 2, 4, extended=[3])
def test_ranks(tmp_path: Path, world_size: int) -> None:
    """Byte for byte what `save_file` makes of the whole tensors; loaded, also into meta models."""
    ways = {1: ["sharded"], 2: ["sharded", "dims"], 3: ["sharded"], 4: ["hybrid", "tp"]}
    _there_and_back(tmp_path, ways[world_size])


@pytest.mark.extended
@ranks(4)
def test_more_meshes(tmp_path: Path) -> None:
    _there_and_back(tmp_path, ["sharded", "dims", "tp dims"])


@ranks(2)
def test_tied_names(tmp_path: Path) -> None:
    """Written once, said where; loaded from the file, from all names, and from an untied model."""
    model = made("sharded", tied=True)
    found = checkpoint.export(tmp_path / "out", model)
    assert found.tied == {"again.weight": "first.weight"}
    path = tmp_path / "out" / "model.safetensors"
    assert "again.weight" not in load_file(path)
    expected = everything(model)
    plain = Net(tied=True)
    load_model(plain, path)
    assert_same(plain.state_dict(), expected)
    for meta in (False, True):
        other = made("sharded", seed=1, meta=meta, tied=True)
        checkpoint.load_pretrained(other, tmp_path / "out")
        assert other.again.weight is other.first.weight
        assert_same(everything(other), expected)
    untied = Net(tied=True)
    untied.again.weight = nn.Parameter(torch.zeros(HIDDEN, IN))
    fully_shard(untied)
    checkpoint.load_pretrained(untied, tmp_path / "out")
    assert_same(everything(untied), expected)
    every = {name: value.clone() for name, value in expected.items()}
    last = tmp_path / f"{dist.get_rank()}.safetensors"
    save_file(every, last)
    checkpoint.load_pretrained(made("sharded", seed=1, tied=True), tmp_path / "0.safetensors")
    dist.barrier()


def _renamed(name: str) -> str | None:
    return None if name.startswith("norm.") else f"model.{name}"


class Empty(nn.Module):
    """Parameters of one shape without elements; one is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(0, 4))
        self.b = nn.Parameter(torch.zeros(0, 4))
        self.last = nn.Parameter(torch.randn(2, 4))
        self.again = self.a


@ranks(4)
def test_parameters_without_elements_are_not_tied(tmp_path: Path) -> None:
    """What differs of one of them says nothing about the other."""
    model = Empty()
    fully_shard(model)
    found = checkpoint.export(tmp_path / "out", model)
    assert found.tied == {"again": "a"}
    content = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(content) == ["a", "b", "last"]
    if dist.get_rank() == 0:
        save_file({**content, "b": torch.zeros(3, 4)}, tmp_path / "b.safetensors")
    dist.barrier()
    left = checkpoint.load_pretrained(model, tmp_path / "b.safetensors", strict=False)
    assert left.reshaped == ["b"]
    checkpoint.save(tmp_path / "run", model, torch.optim.AdamW(model.parameters()), step=1)
    assert not checkpoint.load(tmp_path / "run", model).left


def test_empty_parts_of_a_users_own_storage_are_not_tied() -> None:
    """As on a rank that has no rows: all that is behind the end of a buffer is at one place."""
    flat = torch.zeros(8)
    model = nn.Module()
    for name in ("a", "b"):
        model.register_parameter(name, nn.Parameter(flat[8:].view(0, 4)))
    model.register_parameter("again", model.a)
    found, tied, _ = held_by(model, str)
    assert (sorted(found), tied) == (["a", "b"], {"again": "a"})


@ranks(2)
def test_names_dtypes_and_shards(tmp_path: Path) -> None:
    """Cast while they are written and read; left out where the name is None; many files."""
    model = made("sharded")
    expected = everything(model)
    found = checkpoint.export(
        tmp_path / "out", model, dtype=torch.float16, shard_size="0.15KB", names=_renamed
    )
    content = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(set(content["weight_map"].values())) == found.files
    assert len(found.files) > 2
    halves = {
        f"model.{name}": value.half() if value.is_floating_point() else value
        for name, value in expected.items()
        if not name.startswith("norm.")
    }
    read: dict[str, Tensor] = {}
    for file in found.files:
        read |= load_file(tmp_path / "out" / file)
    assert_same(read, halves)
    other = made("sharded", seed=1)
    before = everything(other)
    assert not checkpoint.load_pretrained(other, tmp_path / "out", names=_renamed)
    for name, value in everything(other).items():
        like = before[name] if name.startswith("norm.") else expected[name].half()
        assert torch.equal(value, like.to(value.dtype)), name


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = made("whole")
    run, out = str(tmp_path / "run"), tmp_path / "out"
    checkpoint.save(run, model, step=3)
    checkpoint.save(run, made("whole", seed=1), step=4)
    command = ["export", run, str(out), "--step", "3", "--dtype", "bfloat16"]
    assert main([*command, "--shard-size", "300"]) == 0
    assert "3 files" in capsys.readouterr().out
    read: dict[str, Tensor] = {}
    for path in out.glob("*.safetensors"):
        read |= load_file(path)
    halves = {n: v.bfloat16() if v.is_floating_point() else v for n, v in everything(model).items()}
    assert_same(read, halves)
    assert main(command) == 2
    assert "already exists" in capsys.readouterr().err


# ---- memory


@ranks(2)
def test_little_is_staged(tmp_path: Path) -> None:
    """A block at a time, of whatever size the model is, also where it is cast or cut in columns."""
    block = 2048
    with mock.patch.object(tensors, "BLOCK", block):
        for number, place in enumerate((None, _columns)):
            model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
            fully_shard(model, shard_placement_fn=place)
            with LargestMade() as largest:
                checkpoint.export(tmp_path / f"{number}", model, dtype=torch.bfloat16)
            assert 0 < largest.nbytes <= block
            checkpoint.load_pretrained(model, tmp_path / f"{number}")
    dist.barrier()


# ---- what is refused: by all ranks, and nothing has changed


class WithState(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        pass


def _holding(value: Tensor) -> nn.Module:
    model = nn.Module()
    model.it = nn.Parameter(value, requires_grad=False)
    return model


@ranks(2)
def test_a_mesh_in_another_order(tmp_path: Path) -> None:
    """Only `fully_shard` refuses such a mesh; `distribute_tensor` takes it."""
    rows = torch.arange(6.0).view(6, 1)
    mesh = DeviceMesh("cpu", [1, 0])
    checkpoint.export(tmp_path / "out", _holding(distribute_tensor(rows, mesh, [Shard(0)])))
    target = _holding(torch.zeros(6, 1))
    checkpoint.load_pretrained(target, tmp_path / "out")
    assert torch.equal(target.it, rows)


@ranks(2)
def test_names_leave_other_classes_out(tmp_path: Path) -> None:
    """As a base in 4 bits, beside what is exported and loaded."""
    model = nn.ModuleDict({"base": _holding(Wrapped(torch.zeros(2))), "it": nn.Linear(2, 2)})
    names = {"it.weight": "it.weight", "it.bias": "it.bias"}.get
    checkpoint.export(tmp_path / "out", model, names=names)
    kept = model["it"].weight.detach().clone()
    nn.init.zeros_(model["it"].weight)
    checkpoint.load_pretrained(model, tmp_path / "out", names=names)
    assert torch.equal(model["it"].weight, kept)


@ranks(2)
def test_export_refuses(tmp_path: Path) -> None:
    model, rank, mesh = made("sharded"), dist.get_rank(), init_device_mesh("cpu", (2,))
    out = tmp_path / "out"

    def refused(entry: Any, source: Any = model, **options: Any) -> None:
        with entry:
            checkpoint.export(out, source, **options)
        dist.barrier()  # rank 0 may still remove what it has begun
        assert os.listdir(tmp_path) == []
        dist.barrier()

    refused(raises("export-format"), format="gguf")
    refused(raises("export-dtype"), dtype=torch.int8)
    for size in (0, "5 apples", "0GB", "iB"):
        refused(raises("export-shard-size"), shard_size=size)
    refused(raises("export-step-of-model"), step=3)
    refused(raises("export-no-tensor"), WithState(2, 2))
    refused(raises("export-meta"), nn.Linear(2, 2, device="meta"))
    refused(raises("export-class"), _holding(Wrapped(torch.zeros(2))))
    broken = DTensor.from_local(
        torch.zeros(3, 3), mesh, [Shard(0)], shape=torch.Size((4, 3)), stride=(3, 1)
    )
    refused(raises("export-part"), _holding(broken))
    refused(raises("export-name"), names=lambda name: 3)
    refused(raises("export-clash"), names=lambda name: "x")
    named = nn.ModuleDict({f"it{rank}": nn.Linear(2, 2)})
    refused(raises("export-clash-on-ranks"), named, names=lambda name: name[4:])
    refused(raises("export-arguments"), shard_size=100 + rank)
    refused(raises("export-models"), nn.Linear(2, 2 + rank))
    half = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)])
    refused(raises("export-incomplete"), nn.Linear(2, 2) if rank else _with(half))
    refused(raises("tensors-dtype"), _holding(torch.zeros(2, dtype=torch.complex128)))
    with mock.patch.object(files, "free_bytes", return_value=10):
        refused(raises("export-disk"))
    with mock.patch.object(
        files, "DISK", Failing(errno.ENOSPC, "write_at", when=lambda *_: rank == 1)
    ):
        refused(raises("ckpt-rank-failed"))
    refused(raises("ckpt-none"), tmp_path / "run")
    if rank == 0:
        (tmp_path / ".exporting-out").mkdir()  # of a crash
        (tmp_path / ".exporting-out" / "model.safetensors").write_bytes(b"half")
    checkpoint.export(out, model)
    with raises("export-there"):
        checkpoint.export(out, model)
    assert os.listdir(tmp_path) == ["out"]
    dist.barrier()


def _with(value: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.it = nn.Parameter(value, requires_grad=False)
    return model


def _dropped(*names: str) -> Callable[[str], str | None]:
    return lambda name: None if name in names else name


class Rotary(nn.Module):
    """Has a buffer that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


class Resetting(Rotary):
    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(3.0))


class Around(nn.Module):
    """Initialises what is below, as transformers' models do; what it draws is not used."""

    def __init__(self, sets: bool = True) -> None:
        super().__init__()
        self.sets, self.inside = sets, Rotary()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            nn.init.normal_(module.weight)
            if self.sets:
                module.angles.copy_(torch.arange(3.0))


@ranks(2)
def test_buffers_that_no_file_has(tmp_path: Path) -> None:
    """On the meta device: initialised by the module around, without a touch of the parameters."""
    source = Around()
    nn.init.normal_(source.inside.weight, generator=torch.Generator().manual_seed(0))
    checkpoint.export(tmp_path / "out", source)
    with torch.device("meta"):
        model, other = Around(), Around(sets=False)
    for each in (model, other):
        fully_shard(each.inside)
        fully_shard(each)
    seed = torch.get_rng_state()
    checkpoint.load_pretrained(model, tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), seed)
    assert_same(everything(model), everything(source))
    assert torch.equal(model.inside.angles, source.inside.angles)
    with raises("pretrained-no-values"):
        checkpoint.load_pretrained(other, tmp_path / "out")
    assert other.inside.angles.is_meta
    Rotary.reset_parameters = lambda self: nn.init.zeros_(self.weight)  # as an Embedding's: it sets
    try:  # the parameter alone
        with raises("pretrained-no-values"):
            checkpoint.load_pretrained(other, tmp_path / "out")
    finally:
        del Rotary.reset_parameters
    dist.barrier()


@ranks(2)
def test_load_refuses(tmp_path: Path) -> None:
    """And lists all that differs; `strict=False` loads what is alike."""
    model, rank = made("sharded", tied=True), dist.get_rank()
    checkpoint.export(tmp_path / "out", model)
    saved = everything(model)
    other = made("sharded", seed=1)
    other.table = nn.Parameter(torch.zeros(7, 3, 6))
    other.mask = other.mask.float()
    other.added = nn.Parameter(torch.zeros(2))
    before = {name: value.clone() for name, value in everything(other).items()}
    with raises("pretrained-differs"):
        checkpoint.load_pretrained(other, tmp_path / "out")
    assert_same(everything(other), before)
    left = checkpoint.load_pretrained(other, tmp_path / "out", strict=False)
    expected = checkpoint.Differences(["added"], ["again.bias"], ["table"], ["mask"])
    assert left == expected
    for name, value in everything(other).items():
        assert torch.equal(value, before[name] if name in left.left() else saved[name]), name

    different = {name: value.clone() for name, value in saved.items()}
    different["again.weight"][-1] += 1  # of the last rank's rows alone
    if rank == 0:
        save_file(different, tmp_path / "different.safetensors")
    dist.barrier()
    other = made("sharded", seed=1, tied=True)
    before = everything(other)
    with raises("pretrained-tied"):
        checkpoint.load_pretrained(other, tmp_path / "different.safetensors")
    names = _dropped("again.weight")
    with raises("tensors-none"):
        checkpoint.load_pretrained(other, tmp_path / "nothing")
    assert_same(everything(other), before)
    left = checkpoint.load_pretrained(
        other, tmp_path / "different.safetensors", names=names, strict=False
    )
    assert left.unexpected == ["again.weight"]
    assert_same(everything(other), saved)

    checkpoint.export(tmp_path / "rotary", Rotary())
    with torch.device("meta"):
        bare, able = fully_shard(Rotary()), fully_shard(Resetting())
    with raises("pretrained-no-values"):
        checkpoint.load_pretrained(bare, tmp_path / "rotary")
    assert bare.weight.is_meta
    checkpoint.load_pretrained(able, tmp_path / "rotary")
    assert torch.equal(able.angles, torch.arange(3.0))
    with torch.device("meta"):
        bare = fully_shard(nn.Linear(2, 2))
    bare.reset_parameters = None
    with raises("pretrained-no-values"):
        checkpoint.load_pretrained(bare, tmp_path / "rotary", names=_dropped("bias"), strict=False)
    dist.barrier()


@ranks(2)
def test_not_during_a_forward(tmp_path: Path) -> None:
    model = made("sharded")
    checkpoint.export(tmp_path / "out", model)
    with (
        fsdp2.gathered(model),
        pytest.raises(errors.CheckpointError, match="gathered"),
    ):
        checkpoint.load_pretrained(model, tmp_path / "out")
    mesh = init_device_mesh("cpu", (2,))
    plain = _holding(DTensor.from_local(torch.ones(2), mesh, [Replicate()]))
    checkpoint.export(tmp_path / "plain", plain)  # a DTensor that nobody shards
    assert_same(load_file(tmp_path / "plain" / "model.safetensors"), {"it": torch.ones(2)})
    dist.barrier()
