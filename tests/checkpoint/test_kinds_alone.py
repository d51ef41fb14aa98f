"""fsdp2.checkpoint.convert on one process: kinds there and back, in little memory."""

from __future__ import annotations

import collections
import errno
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fsdp2 import checkpoint
from fsdp2.checkpoint import files
from fsdp2.checkpoint.archives import read_file, write_archive
from fsdp2.checkpoint.converting import KINDS, kind_of
from fsdp2.command.checkpoint import main
from tests.checkpoint import shared
from tests.checkpoint.test_checkpoint_binaries import write_bins
from tests.common.errors import raises

pytestmark = pytest.mark.alone


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Tensor], Tensor]:
    """A step; what it holds, what comes of it, and numbers drawn behind it."""
    model, optimizer = shared.small(groups=True)
    shared.train(model, optimizer, seed=1)
    checkpoint.save(tmp_path / "run", model, optimizer, step=3, extra=shared.EXTRA, rng=True)
    drawn = torch.rand(3)
    kept = shared.everything(model, optimizer)
    shared.train(model, optimizer, seed=2)
    return tmp_path / "run", kept, shared.everything(model, optimizer), drawn


# ---- there and back


@pytest.mark.parametrize("kind", ["steps", "dcp", "torch", "fsdp1"])
def test_there_and_back(saved: Any, kind: str, tmp_path: Path) -> None:
    """Parameters, buffers, optimizer, groups, random numbers and extra: training goes on."""
    run, kept, came, drawn = saved
    there = tmp_path / "there"
    found = checkpoint.convert(run, there, to_kind=kind)
    assert (found.from_kind, found.to_kind, found.step, found.left) == ("steps", kind, 3, [])
    assert kind_of(there) == ("torch" if kind == "fsdp1" else kind)
    back = checkpoint.convert(there, tmp_path / "back", to_kind="steps", step=3)
    assert back.step == 3
    assert checkpoint.verify(tmp_path / "back") == []
    model, optimizer = shared.small(seed=5, groups=True)
    loaded = checkpoint.load(tmp_path / "back", model, optimizer, rng=True, verify=True)
    assert loaded.extra["schedule"] == shared.EXTRA["schedule"]
    assert torch.equal(loaded.extra["table"], torch.arange(4))
    assert torch.equal(torch.rand(3), drawn)
    shared.assert_same(shared.everything(model, optimizer), kept)
    shared.train(model, optimizer, seed=2)
    shared.assert_same(shared.everything(model, optimizer), came)


@pytest.mark.parametrize("name", ["there.safetensors", "a-blob"])
def test_models_alone(saved: Any, name: str, tmp_path: Path) -> None:
    """What safetensors do not have is named; a file is read by what it contains."""
    run, kept, _, _ = saved
    there = tmp_path / name
    found = checkpoint.convert(run, there, to_kind="safetensors")
    assert found.left == ["optimizer", "rng", "extra"]
    assert kind_of(there) == "safetensors"
    assert checkpoint.convert(there, tmp_path / "back.pt").from_kind == "safetensors"
    model, _ = shared.small(seed=5)
    content = torch.load(tmp_path / "back.pt", weights_only=True)
    assert list(content) == ["model"]
    model.load_state_dict(content["model"])
    shared.assert_same(dict(model.state_dict()), shared.weights(kept))


@pytest.mark.parametrize("mmap", [False, True])
def test_an_unsharded_model_takes_the_file(saved: Any, mmap: bool, tmp_path: Path) -> None:
    """torch alone: the optimizer's parameters are numbered in its order."""
    run, _, came, _ = saved
    checkpoint.convert(run, tmp_path / "one.pt")
    content = torch.load(tmp_path / "one.pt", weights_only=True, mmap=mmap)
    model, optimizer = shared.small(seed=5, groups=True)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    shared.train(model, optimizer, seed=2)
    shared.assert_same(shared.everything(model, optimizer), came)


def test_dcp_reads_what_is_written(saved: Any, tmp_path: Path) -> None:
    run, kept, _, _ = saved
    checkpoint.convert(run, tmp_path / "plain", to_kind="dcp")
    model, _ = shared.small(seed=5)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "plain")
    shared.assert_same(state["model"], shared.weights(kept))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("how", ["torch.save", "dcp.save"])
def test_state_dicts_as_users_save_them(nested: bool, how: str, tmp_path: Path) -> None:
    """A model alone at the top; or below "app", beside a count of epochs."""
    model, _ = shared.small()
    state: dict[str, Any] = dict(model.state_dict())
    if nested:
        state = {"app": {"state_dict": state, "epoch": 4}}
    if how == "torch.save":
        torch.save(state, tmp_path / "source")
    else:
        dcp.save(state, checkpoint_id=tmp_path / "source")
    checkpoint.convert(tmp_path / "source", tmp_path / "run", to_kind="steps", step=0)
    other, _ = shared.small(seed=1)
    found = checkpoint.load(tmp_path / "run", other)
    shared.assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert found.extra == ({"epoch": 4} if nested else None)


@pytest.mark.parametrize("named", [False, True])
def test_a_numbered_optimizer(named: bool, tmp_path: Path) -> None:
    """Told by its names; else by the order of a model without buffers, in one group."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    params = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    shared.train(model, optimizer, seed=0)
    state = {"model_state_dict": model.state_dict(), "optim": optimizer.state_dict()}
    torch.save(state, tmp_path / "one.pt")
    checkpoint.convert(tmp_path / "one.pt", tmp_path / "run", to_kind="steps", step=0)
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    found = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    shared.train(other, found, seed=9)
    checkpoint.load(tmp_path / "run", other, found)
    shared.assert_same(shared.everything(other, found), shared.everything(model, optimizer))


@pytest.mark.parametrize("named", [False, True])
def test_a_file_of_ddp(named: bool, tmp_path: Path) -> None:
    """Names without "module."; also those of the optimizer, if it has any, beside buffers."""

    def made(seed: int) -> nn.Module:
        return shared.small(seed)[0] if named else nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    model, other = made(0), made(1)
    wrapped = nn.ModuleDict({"module": model})  # has the names of DistributedDataParallel
    params = wrapped.named_parameters() if named else wrapped.parameters()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    shared.train(model, optimizer, seed=0)
    state = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4}
    torch.save(state, tmp_path / "one.pt")
    run = ["convert", str(tmp_path / "one.pt"), str(tmp_path / "run"), "--to", "steps"]
    assert main([*run, "--step", "7", "--strip-prefix", "module."]) == 0
    found = torch.optim.AdamW(other.parameters(), lr=0.5)
    assert checkpoint.load(tmp_path / "run", other, found).extra == {"epoch": 4}
    shared.assert_same(shared.everything(other, found), shared.everything(model, optimizer))
    assert found.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("files", [1, 2])
def test_weights_in_several_files(files: int, tmp_path: Path) -> None:
    """As DeepSpeed's zero_to_fp32.py and ``save_pretrained`` write them; among other files."""
    model, _ = shared.small()
    write_bins(tmp_path / "weights", dict(model.state_dict()), files)
    if files > 1:
        torch.save({"lr": 0.1}, tmp_path / "weights" / "training_args.bin")
        assert kind_of(tmp_path / "weights") == "torch"
    checkpoint.convert(tmp_path / "weights", tmp_path / "run", to_kind="steps", step=0)
    other, _ = shared.small(seed=1)
    checkpoint.load(tmp_path / "run", other)
    shared.assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_files_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and optimizer apart, joined as the page about FSDP1 does: two files, or two folders."""
    page = Path(__file__).parents[2] / "docs" / "migration" / "fsdp1.md"
    text = page.read_text(encoding="utf-8")
    code = text[text.index("import torch\nfrom torch.distributed.checkpoint.format_utils") :]
    imports, full, sharded = re.split(r"^# [A-Z]+_STATE_DICT.*$", code.split("```")[0], flags=re.M)
    model, optimizer = shared.small()
    shared.train(model, optimizer, seed=0)
    states = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    monkeypatch.chdir(tmp_path)
    Path("old").mkdir()
    torch.save(states["model"], "old/pytorch_model_fsdp.bin")
    torch.save(states["optimizer"], "old/optimizer.bin")
    dcp.save({"model": states["model"]}, checkpoint_id="old/pytorch_model_fsdp_0")
    dcp.save({"optimizer": states["optimizer"]}, checkpoint_id="old/optimizer_0")
    for step, part in enumerate((full, sharded)):
        exec(imports + part, {})
        checkpoint.convert("full.pt", "run", to_kind="steps", step=step)
        Path("full.pt").unlink()
        other, others = shared.small(seed=5)
        checkpoint.load("run", other, others, step=step)
        shared.assert_same(shared.everything(other, others), shared.everything(model, optimizer))


def test_a_step_by_its_path_and_by_its_number(saved: Any, tmp_path: Path) -> None:
    run = saved[0]
    model, _ = shared.small(seed=7)
    checkpoint.save(run, model, step=8)
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    assert checkpoint.convert(run / "step-00000003", one).step == 3
    assert checkpoint.convert(run, two, step=3).step == 3
    assert one.read_bytes() == two.read_bytes()
    assert checkpoint.convert(run, tmp_path / "new.pt").step == 8
    assert checkpoint.convert(one, run, step=9).to_kind == "steps"  # it has steps already
    assert checkpoint.steps(run) == [3, 8, 9]


def test_the_command(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, there = str(saved[0]), str(tmp_path / "there.safetensors")
    assert main(["convert", run, there, "--step", "3"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"steps -> safetensors: {there}", "not in safetensors: optimizer, rng, extra"]
    assert main(["convert", run, there]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["convert", there, str(tmp_path / "x"), "--to", "dcp"]) == 0
    assert kind_of(tmp_path / "x") == "dcp"


# ---- tensors in files


def tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    weight, large = torch.randn(5, 4), torch.randn(600, 700)
    found = {
        "weight": weight,
        "tied": weight,
        "turned": weight.t(),
        "columns": large[:, 3:7],
        "large": large,
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(torch.ones(2)),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.randn(3).bfloat16(),
        "uint16": torch.arange(4).to(torch.uint16),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "values": [1, (2.5, None, "x"), b"\xff1", torch.float16, torch.Size([2])],
    }
    return collections.OrderedDict(found)


def test_files_of_torch_save(tmp_path: Path) -> None:
    """Every stride and dtype, read without copying and written as `torch.load` reads it."""
    before = tensors()
    torch.save(before, tmp_path / "a")
    read = read_file(tmp_path / "a")
    assert read["weight"] is read["tied"]
    with (tmp_path / "b").open("wb") as file:
        write_archive(file.write, read)
    assert zipfile.ZipFile(tmp_path / "b").testzip() is None
    for mmap in (False, True):
        after = torch.load(tmp_path / "b", weights_only=True, mmap=mmap)
        assert after.keys() == before.keys()
        for name, value in before.items():
            if isinstance(value, Tensor):
                assert after[name].dtype == value.dtype
                bits = [each.detach().contiguous().resolve_conj() for each in (after[name], value)]
                one, other = (b.view(torch.uint8) if b.dim() else b for b in bits)
                assert torch.equal(one, other), name
            else:
                assert after[name] == value
        assert after["weight"].data_ptr() == after["tied"].data_ptr()


_PEAK = """
import sys, threading, torch
from fsdp2.checkpoint import convert
def held():
    (line,) = [l for l in open("/proc/self/status") if l.startswith("RssAnon")]
    return int(line.split()[1]) * 1024
jobs = [line.split() for line in sys.stdin]
small = [(source + "-small", target + "-small", kind) for source, target, kind in jobs]
for number, (source, target, kind) in enumerate(small + jobs):
    before, seen, ended = held(), [], threading.Event()
    def watch():
        while not ended.wait(0.001):
            seen.append(held())
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        convert(source, target, to_kind=kind, step=1 if kind == "steps" else None)
    finally:
        ended.set()
        thread.join()
    if number >= len(jobs):
        print(max(seen) - before)
"""


@pytest.mark.extended
@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    """Of four tensors of 32 MiB: one at a time, besides mapped pages.

    torch's reader of its own DCP folders holds a saved chunk beside the tensor that it belongs to:
    here all of it.
    """
    chain = [("a", "b", "torch"), ("b", "c", "safetensors"), ("c", "d", "steps"), ("d", "e", "dcp")]
    for name, rows in (("a", 8192), ("a-small", 8)):
        tensors = {f"w{n}": torch.full((rows, 1024), float(n)) for n in range(4)}
        dcp.save({"model": tensors}, checkpoint_id=tmp_path / name)
    jobs = "\n".join(f"{tmp_path / s} {tmp_path / t} {kind}" for s, t, kind in chain)
    run = subprocess.run(
        [sys.executable, "-c", _PEAK],
        input=jobs,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    largest = 8192 * 1024 * 4
    peaks = [int(line) for line in run.stdout.split()]
    assert len(peaks) == len(chain)
    bounds = [2.2, 1.2, 1.2, 1.2]
    found = [peak / largest for peak in peaks]
    assert all(peak <= bound for peak, bound in zip(found, bounds, strict=True)), found
    assert found[0] > 1.9  # so that it is seen


# ---- what is refused


def full(code: int, room: int) -> shared.Failing:
    """A disk that takes so many bytes, and no more."""

    def fails(_: Any, data: bytes) -> bool:
        nonlocal room
        room -= len(data)
        return room < 0

    return shared.Failing(code, "write", when=fails)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("kind", ["steps", "dcp", "torch", "safetensors"])
def test_a_full_disk(kind: str, code: int, tmp_path: Path) -> None:
    """Named; nothing is left, and the next try succeeds."""
    torch.save({"model": {"w": torch.randn(300, 2)}}, tmp_path / "source.pt")
    there = tmp_path / "there" / "target"
    there.parent.mkdir()
    for room in (0, 500, 2000):
        with mock.patch.object(files, "DISK", full(code, room)), raises("ckpt-convert-failed") as e:
            checkpoint.convert(tmp_path / "source.pt", there, to_kind=kind, step=1)
        assert os.strerror(code) in str(e.value)
        assert [p for p in there.parent.rglob("*") if p.is_file()] == []
    checkpoint.convert(tmp_path / "source.pt", there, to_kind=kind, step=1)


def _several(source: Path) -> None:
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=source)
    (source / "model.safetensors").write_bytes(b"")


def _cut(source: Path) -> None:
    torch.save({"w": torch.zeros(200)}, source)
    source.write_bytes(source.read_bytes()[:-30])


def _index_of_nothing(source: Path) -> None:
    source.mkdir()
    (source / "pytorch_model.bin.index.json").write_text("{}")


def _numbers(source: Path) -> None:
    """Of a model with buffers, and in groups."""
    model, optimizer = shared.small(groups=True)
    shared.train(model, optimizer, seed=0)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)


def _one_tensor_twice(source: Path) -> None:
    """As torch's FSDP1 writes it on a CPU, with ``offload_to_cpu``."""
    model, optimizer = shared.trained()
    state = optimizer.state_dict()
    state["state"][3]["exp_avg"] = state["state"][3]["exp_avg_sq"]
    names = [name for name, _ in model.named_parameters()]
    state["param_groups"][0]["param_names"] = names
    torch.save({"model": model.state_dict(), "optimizer": state}, source)


def _dcp(source: Path, change: Callable[[Any], None] = lambda _: None) -> None:
    """A folder of DCP, whose index is changed."""
    dcp.save({"w": torch.zeros(4, 2)}, checkpoint_id=source)
    metadata = pickle.loads((source / ".metadata").read_bytes())
    change(metadata)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))


def _larger(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([5, 2])


def _compressed(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


def _missing(source: Path) -> None:
    _dcp(source)
    next(source.glob("*.distcp")).unlink()


Make = Callable[[Path], object]


def _saves(value: object, **options: Any) -> Make:
    return lambda source: torch.save(value, source, **options)


ONE, OTHER = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
PREFIXED = {"module.w": torch.zeros(2), "w": torch.zeros(2)}
OLDER = _saves(ONE, _use_new_zipfile_serialization=False)
TORCH = {"from_kind": "torch"}
MODULE = {"strip_prefix": "module."}
WRONG: list[tuple[str, str, Make, dict[str, str]]] = [
    ("nothing", "ckpt-kind-none", lambda source: None, {}),
    ("foreign", "ckpt-kind-none", lambda source: source.write_text("weights"), {}),
    ("several", "ckpt-kind-several", _several, {}),
    ("unknown kind", "ckpt-kind", lambda source: None, {"from_kind": "tensorflow"}),
    ("no files", "tensors-none", lambda source: source.mkdir(), TORCH),
    ("empty", "ckpt-file-cut", lambda source: source.write_bytes(b""), TORCH),
    ("cut", "ckpt-file-cut", _cut, {}),
    ("code", "ckpt-file-code", _saves({**ONE, "evil": shared.Evil()}), {}),
    ("older", "ckpt-file-cut", OLDER, TORCH),
    ("shards of XLA", "ckpt-file-xla", _saves({"model": ONE, "shard_metadata": {}}), {}),
    ("no model", "ckpt-no-model", _saves({"generator": ONE, "critic": ONE}), {}),
    ("two models", "ckpt-no-model", _saves({"model": ONE, "state_dict": OTHER}), {}),
    ("clash", "ckpt-names-clash", _saves({"_orig_mod.w": torch.zeros(2), **ONE}), {}),
    ("clash without the prefix", "ckpt-names-clash", _saves(PREFIXED), MODULE),
    ("no prefix", "ckpt-no-prefix", _saves(ONE), MODULE),
    ("index of nothing", "tensors-index", _index_of_nothing, {}),
    ("numbers", "ckpt-optimizer-numbers", _numbers, {}),
    ("one tensor twice", "ckpt-states-aliased", _one_tensor_twice, {}),
    ("part of a DCP", "ckpt-parts-missing", lambda source: _dcp(source, _larger), {}),
    ("missing", "ckpt-convert-failed", _missing, {}),
    ("compressed", "ckpt-value-broken", lambda source: _dcp(source, _compressed), {}),
    ("store", "ckpt-not-local", lambda source: None, {"source": "s3://bucket/run"}),
]


@pytest.mark.parametrize(
    ("entry", "make", "options"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG]
)
def test_wrong_sources(
    entry: str,
    make: Make,
    options: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is written, and no code is run."""
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    make(source)
    with raises(entry):
        checkpoint.convert(**{"source": source, "target": "made", "to_kind": "torch", **options})
    assert not {"made", "evil", ".saving-made"} & {*os.listdir()}


def test_wrong_targets(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    with raises("ckpt-target-there"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "a.pt")
    with raises("ckpt-kind-to-be"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "b")
    with raises("ckpt-convert-step"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "b", to_kind="steps")
    with raises("ckpt-not-local"):
        checkpoint.convert(tmp_path / "a.pt", "memory://b", to_kind="dcp")
    with raises("ckpt-is-file"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "a.pt", to_kind="steps", step=1)
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "run", to_kind="steps", step=1)
    with raises("ckpt-step-there"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "run", step=1)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "run"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_flipped_bit_is_refused(saved: Any, name: str, tmp_path: Path) -> None:
    """By `convert` and by `load(verify=True)`, before anything is changed."""
    path = saved[0] / "step-00000003" / name
    shared.flip(path)
    with raises("ckpt-file-changed") as caught:
        checkpoint.convert(saved[0], tmp_path / "one.pt")
    assert str(path) in str(caught.value)
    assert not (tmp_path / "one.pt").exists()
    model, optimizer = shared.small(seed=5, groups=True)
    before = shared.everything(model, optimizer)
    with raises("ckpt-file-changed"):
        checkpoint.load(saved[0], model, optimizer, verify=True)
    shared.assert_same(shared.everything(model, optimizer), before)


def test_kinds_are_documented() -> None:
    assert checkpoint.convert.__doc__ is not None
    assert all(f'"{kind}"' in checkpoint.convert.__doc__ for kind in KINDS)
    assert json.dumps(KINDS)
