"""fsdp2.checkpoint: bits between numbers of ranks, DCP's own reader, and what all refuse."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import checkpoint, fully_shard
from fsdp2.checkpoint import files
from fsdp2.command.checkpoint import main
from fsdp2.core.device.channels import Members
from fsdp2.core.errors import CheckpointError
from fsdp2.optim import FlatOptimizer
from fsdp2.tracing.summaries import amount
from tests.checkpoint.shared import (
    EXTRA,
    Evil,
    Failing,
    assert_same,
    everything,
    flip,
    save_by,
    train,
)
from tests.common import combinations, workers
from tests.common.errors import raises

pytestmark = pytest.mark.ranks

IN, HIDDEN, OUT = 5, 7, 3


class Net(nn.Module):
    """Uneven parameters, one without a gradient, buffers of two dtypes."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.first = nn.Linear(IN, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, OUT)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def made(
    seed: int = 0, flat: bool = False, mesh: DeviceMesh | None = None, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded where there are ranks."""
    torch.manual_seed(seed)
    model = Net(**options)
    if dist.is_initialized():
        mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in (model.first, model):
            fully_shard(unit, mesh=mesh)
    if flat:
        return model, FlatOptimizer(model, torch.optim.AdamW, lr=0.1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _saves(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Train, save, train on: what was saved, what came of it, and numbers drawn behind the save."""
    model, optimizer = made()
    train(model, optimizer, seed=1, steps=2)
    torch.manual_seed(100 + dist.get_rank())
    place = checkpoint.save(folder, model, optimizer, step=2, extra=EXTRA, rng=True)
    assert place.name == "step-00000002"
    drawn = torch.rand(3)
    saved = everything(model, optimizer)
    train(model, optimizer, seed=2, steps=2)
    return saved, everything(model, optimizer), drawn


def _continues(folder: Path, flat: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    model, optimizer = made(seed=5, flat=flat)
    if not flat:  # into an optimizer that has a state of its own
        train(model, optimizer, seed=9, steps=1)
    found = checkpoint.load(folder, model, optimizer, rng=True)
    assert found.step == 2
    assert found.extra["schedule"] == [1, (2.5, None)]
    assert torch.equal(found.extra["table"], torch.arange(4))
    assert not found.left
    drawn = torch.rand(3)
    loaded = everything(model, optimizer)
    train(model, optimizer, seed=2, steps=2)
    return loaded, everything(model, optimizer), drawn


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("saved") / "run"
    return folder, workers.run_on_ranks(2, _saves, folder)


@pytest.mark.parametrize("flat", [False, True])
def test_two_ranks_continue_as_if_never_interrupted(
    saved: tuple[Path, list[Any]], flat: bool
) -> None:
    """Bit for bit, with the same random numbers; also in a `FlatOptimizer`."""
    folder, before = saved
    after = workers.run_on_ranks(2, _continues, folder, flat)
    for (kept, came, drawn), (loaded, comes, draws) in zip(before, after, strict=True):
        assert_same(loaded, kept)
        assert_same(comes, came)
        assert torch.equal(drawn, draws)
    assert not torch.equal(before[0][2], before[1][2])


def test_one_process_loads_what_two_ranks_saved(saved: tuple[Path, list[Any]]) -> None:
    """Neither sharded nor in a process group; and saves what it then loads."""
    folder, before = saved
    loaded, _, _ = _continues(folder, False)
    assert_same(loaded, before[0][0])


def test_dcp_reads_it_alone(saved: tuple[Path, list[Any]]) -> None:
    """torch's functions, with torch's names, find the parameters and the optimizer's state."""
    folder, before = saved
    model, optimizer = made(seed=5)
    train(model, optimizer, seed=9, steps=1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder / "step-00000002")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),  # of a parameter that never had a gradient
    )
    assert_same(everything(model, optimizer), before[0][0])


@pytest.mark.parametrize("kind", ["fresh", "sgd"])
def test_an_optimizer_without_state(tmp_path: Path, kind: str) -> None:
    """It has none when it is loaded, whatever it had; and saving makes none."""
    model, optimizer = made()
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.save(tmp_path, model, optimizer, step=0)
    assert not optimizer.state
    optimizer.param_groups[0]["lr"] = 7.0
    train(model, optimizer, seed=0, steps=1)
    checkpoint.load(tmp_path, model, optimizer)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_keep_and_remove(tmp_path: Path) -> None:
    """Of older steps; never the newest, nor what was just saved; by hand any that is there."""
    model, _ = made()
    for step in (5, 10, 15, 20):
        checkpoint.save(tmp_path, model, step=step, keep=2)
    assert checkpoint.steps(tmp_path) == [15, 20]
    checkpoint.save(tmp_path, model, step=7, keep=1)
    assert checkpoint.steps(tmp_path) == [7, 20]
    assert checkpoint.remove(tmp_path, 7) == ["step-00000007"]
    assert checkpoint.unfinished(tmp_path) == []
    assert os.listdir(tmp_path) == ["step-00000020"]
    with raises("ckpt-remove"):
        checkpoint.remove(tmp_path, 7)
    shutil.rmtree(tmp_path / "step-00000020")
    assert checkpoint.steps(tmp_path) == []


def test_buffers_that_are_not_persistent(tmp_path: Path) -> None:
    """Saved and loaded on request; a load without it does not mind them."""
    model = nn.Linear(2, 2)
    model.register_buffer("scratch", torch.arange(3.0), persistent=False)
    checkpoint.save(tmp_path, model, step=1, buffers=True)
    for asked in (False, True):
        model.scratch += 1
        checkpoint.load(tmp_path, model, buffers=asked)
        assert torch.equal(model.scratch, torch.arange(3.0) + (not asked))


def test_what_differs_is_listed_and_left(tmp_path: Path) -> None:
    """All kinds at once; `strict=False` loads the others and says which it left."""
    model, optimizer = made()
    train(model, optimizer, seed=0, steps=1)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    other, _ = made(seed=3)
    other.last = nn.Linear(HIDDEN, OUT + 1)
    other.first.bias = nn.Parameter(other.first.bias.detach().double())
    other.added = nn.Parameter(torch.zeros(2))
    del other.norm.running_mean
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with raises("ckpt-differs") as caught:
        checkpoint.load(tmp_path, other)
    expected = checkpoint.Differences(
        ["model.added"],
        ["model.norm.running_mean"],
        ["model.last.bias", "model.last.weight"],
        ["model.first.bias"],
    )
    for names in vars(expected).values():
        assert str(names) in str(caught.value)
    assert_same(dict(other.state_dict()), before)
    assert checkpoint.load(tmp_path, other, strict=False).left == expected
    left = {name.removeprefix("model.") for name in expected.left()}
    saved = model.state_dict()
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[name] if name in left else saved[name]), name


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = made()
    checkpoint.save(tmp_path, model, optimizer, step=4)
    (tmp_path / ".saving-step-00000005").mkdir()
    assert main(["ls", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    size = sum(p.stat().st_size for p in (tmp_path / "step-00000004").iterdir())
    size -= (tmp_path / "step-00000004" / "manifest.json").stat().st_size
    assert re.search(rf"^4 +{re.escape(amount(size))} +2 +1 +yes +-$", said, re.MULTILINE)
    assert "unfinished: .saving-step-00000005" in said
    assert main(["ls", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unfinished"] == [".saving-step-00000005"]
    (step,) = found["steps"]
    assert (step["step"], step["bytes"], step["optimizer"]) == (4, size, True)
    assert main(["show", str(tmp_path)]) == 0
    row = rf"^model.first.weight +\({HIDDEN}, {IN}\) +float32$"
    assert re.search(row, capsys.readouterr().out, re.MULTILINE)
    assert main(["show", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    shape = {"shape": [HIDDEN, IN], "dtype": "float32"}
    assert found["tensors"]["model.first.weight"] == shape
    assert main(["verify", str(tmp_path)]) == 0
    seen: list[tuple[int, int]] = []
    assert checkpoint.verify(tmp_path, progress=lambda done, of: seen.append((done, of))) == []
    sizes = sorted(p.stat().st_size for p in (tmp_path / "step-00000004").iterdir())
    total = sum(sizes) - (tmp_path / "step-00000004" / "manifest.json").stat().st_size
    assert seen == sorted(seen)
    assert len(seen) == 2  # a file, the index
    assert seen[-1] == (total, total)
    capsys.readouterr()
    assert main(["verify", str(tmp_path), "--step", "3"]) == 2
    assert "has no complete step 3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_a_flipped_bit_names_its_file(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = made()
    path = checkpoint.save(tmp_path, model, step=4) / name
    checkpoint.save(tmp_path, model, step=5)
    flip(path)
    (line,) = checkpoint.verify(tmp_path)
    assert line.startswith(str(path))
    assert main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out == line + "\n"
    assert checkpoint.verify(tmp_path, 5) == []


# ---- what is refused: by all ranks, and nothing has changed


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@workers.ranks(2)
def test_save_refuses(tmp_path: Path) -> None:
    model, optimizer = made()
    run, rank = tmp_path / "run", dist.get_rank()
    save = functools.partial(checkpoint.save, run, model, optimizer)
    save(step=1)
    before = _tree(run)
    with raises("ckpt-step"):
        save(step=-1)
    with raises("ckpt-not-reached"):
        checkpoint.save("nowhere://bucket/run", model, step=1)
    with raises("ckpt-keep"):
        save(step=2, keep=0)
    with raises("ckpt-extra"):
        save(step=2, extra={"it": object() if rank else 1})  # on rank 1 alone
    with raises("ckpt-ranks-differ"):
        save(step=2 + rank)
    layers = [*model.children()]
    stage = torch.optim.AdamW([p for p in layers[-rank].parameters() if p.requires_grad])
    for wrong in (stage, None if rank else optimizer):
        with raises("ckpt-optimizers-differ"):
            checkpoint.save(run, model, wrong, step=2)
    with raises("ckpt-step-there"):
        save(step=1)
    with raises("ckpt-is-file"):
        checkpoint.save(run / "step-00000001" / "manifest.json", model, step=2)
    with raises("ckpt-foreign-parameter"):
        checkpoint.save(run, model, torch.optim.SGD([torch.zeros(2)]), step=2)
    for code, operation in (
        (errno.EROFS, "make_folder"),
        (errno.EACCES, "create"),
        (errno.EIO, "sync"),
        (errno.EACCES, "rename"),
        (errno.ENOSPC, "write"),
        (errno.EDQUOT, "write"),
    ):
        disk = Failing(code, operation, when=lambda *_: rank == 1 or operation != "write")  # noqa: B023  # used here
        with mock.patch.object(files, "DISK", disk), raises("ckpt-rank-failed") as caught:
            save(step=2)
        assert os.strerror(code) in str(caught.value)
    assert checkpoint.steps(run) == [1]
    dist.barrier()
    if rank == 0:
        assert checkpoint.unfinished(run) == []  # who fails removes what it has written
        assert _tree(run) == before
    dist.barrier()
    save(step=2)
    assert checkpoint.steps(run) == [1, 2]


class Late(files.Disk):
    """Rank 1 clears what has failed in the middle of rank 0's next try."""

    def __init__(self, moments: Path) -> None:
        self._moments = moments
        self.fails = True

    def _note(self, moment: str) -> None:
        (self._moments / moment).touch()

    def _wait_for(self, moment: str) -> None:
        """Return when the other rank is there, or when it has had all the time it needs."""
        for _ in range(100):
            if (self._moments / moment).exists():
                return
            time.sleep(0.01)

    def make_folder(self, path: Path) -> None:
        if dist.get_rank() == 1 and not self.fails:
            self._wait_for("rank 0 has created its file, or not")
        super().make_folder(path)

    def create(self, path: Path) -> Any:
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if not path.name.startswith("__0_"):
            return super().create(path)
        self._note("rank 0 tries again")
        self._wait_for("rank 1 has cleared")
        try:
            return super().create(path)
        finally:
            self._note("rank 0 has created its file, or not")

    def remove_folder(self, path: Path) -> None:
        if dist.get_rank() == 0:
            return super().remove_folder(path)
        self._wait_for("rank 0 tries again")
        try:
            return super().remove_folder(path)
        finally:
            self._note("rank 1 has cleared")


@workers.ranks(2)
def test_a_save_after_one_that_failed_has_its_own_folder(tmp_path: Path) -> None:
    model, optimizer = made()
    run, moments = tmp_path / "run", tmp_path / "moments"
    checkpoint.save(run, model, optimizer, step=1)  # all know who writes what
    moments.mkdir(exist_ok=True)
    dist.barrier()
    with mock.patch.object(files, "DISK", disk := Late(moments)):
        with raises("ckpt-rank-failed"):
            checkpoint.save(run, model, optimizer, step=2)
        disk.fails = False
        checkpoint.save(run, model, optimizer, step=2)
    assert checkpoint.steps(run) == [1, 2]
    assert checkpoint.verify(run) == []


@pytest.mark.parametrize("call", combinations.often(["async_save", "save"]))
@workers.ranks(2)
def test_wherever_the_disk_fails(tmp_path: Path, call: str) -> None:
    """At any operation of either rank: all raise, each step there is whole, and saving goes on."""
    model, _ = made()
    run, rank = tmp_path / "run", dist.get_rank()
    operations = [name for name in vars(files.Disk) if name[0] != "_" and name != "start_writing"]
    checkpoint.save(run, model, step=1)
    for victim in (0, 1):
        for at in range(100):
            number, raised, written = itertools.count(), None, list[Any]()

            def fails(
                *given: Any,
                at: int = at,
                number: Iterator[int] = number,
                written: list[Any] = written,
            ) -> bool:
                if isinstance(given[-1], memoryview | bytes):  # of the writes to a file the first
                    if given[0] in written:
                        return False
                    written.append(given[0])
                return rank == victim and next(number) == at  # noqa: B023  # used here

            with mock.patch.object(files, "DISK", Failing(errno.EIO, *operations, when=fails)):
                try:
                    save_by(call, run, model, step=2 + at, keep=2)
                except CheckpointError as error:
                    raised = str(error)
            dist.barrier()
            told: list[Any] = [None, None]
            dist.all_gather_object(told, (raised, next(number) > at))
            assert told[0][0] == told[1][0]
            assert checkpoint.verify(run) == []
            assert checkpoint.steps(run)
            dist.barrier()
            if not told[victim][1]:  # there is no such operation: it saved undisturbed
                assert raised is None
                assert checkpoint.steps(run)[-1] == 2 + at
                break
        assert 3 < at < 99
        dist.barrier()
        if rank == 0:
            checkpoint.remove(run)
            for step in checkpoint.steps(run)[1:]:
                checkpoint.remove(run, step)
        dist.barrier()


@contextmanager
def _changed(path: Path, content: bytes | None) -> Iterator[None]:
    """A file with other bytes, or without it; on all ranks while inside."""
    dist.barrier()
    before = path.read_bytes()
    dist.barrier()
    if dist.get_rank() == 0:
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_bytes(before)
    dist.barrier()


@workers.ranks(2)
def test_load_refuses(tmp_path: Path) -> None:
    model, optimizer = made()
    train(model, optimizer, seed=0, steps=1)
    run = tmp_path / "run"
    with raises("ckpt-none"):
        checkpoint.load(run, model)
    with raises("ckpt-not-reached"):
        checkpoint.load("nowhere://bucket/run", model)
    checkpoint.save(run, model, optimizer, step=1)
    place = checkpoint.save(run, model, step=2)
    model, optimizer = made(seed=1)
    before = everything(model, optimizer)

    with raises("ckpt-unknown-step"):
        checkpoint.load(run, model, step=3)
    with raises("ckpt-no-optimizer"):
        checkpoint.load(run, model, optimizer)
    with raises("ckpt-differs"):
        checkpoint.load(run, made(hidden=HIDDEN + 1)[0])
    with raises("ckpt-differs"):
        checkpoint.load(run, model, torch.optim.AdamW([model.unused]), step=1)

    with raises("ckpt-load-ranks-differ"):
        checkpoint.load(run, model, step=1 + dist.get_rank())
    own = tmp_path / str(dist.get_rank())
    own.mkdir()
    if dist.get_rank() == 0:
        shutil.copytree(run, own / "run")
    before_it = Path.cwd()
    os.chdir(own)
    with raises("ckpt-not-shared"):
        checkpoint.load("run", model)
    os.chdir(before_it)

    manifest, data, index = place / "manifest.json", place / "__1_0.distcp", place / ".metadata"
    content = json.loads(manifest.read_text())
    newer = json.dumps({**content, "format": 2}).encode()
    other = json.dumps({**content, "ranks": 3}).encode()
    evil = pickle.dumps(Evil()).ljust(index.stat().st_size, b"\0")
    for path, bytes_, refusal in (
        (manifest, b"{", raises("ckpt-no-manifest")),
        (manifest, newer, raises("ckpt-format")),
        (manifest, other, raises("ckpt-manifest-changed")),
        (data, None, raises("ckpt-file-missing")),
        (data, data.read_bytes()[:-1], raises("ckpt-file-short")),
        (index, evil, raises("ckpt-index-code")),
        (index, b"\0" * index.stat().st_size, raises("ckpt-index-broken")),
    ):
        with _changed(path, bytes_), refusal:
            checkpoint.load(run, model)
    assert not Path("evil").exists()
    gone = mock.patch.object(Members, "gather", side_effect=RuntimeError("closed"))
    with gone, raises("ckpt-lost-rank"):
        checkpoint.load(run, model)
    assert_same(everything(model, optimizer), before)
    assert not optimizer.state
    checkpoint.load(run, model)


@workers.ranks(2)
def test_all_parts_are_compared_before_any_is_written(tmp_path: Path) -> None:
    model, optimizer = made()
    train(model, optimizer, seed=0, steps=1)
    mesh, weight = model.first.weight.device_mesh, torch.ones(HIDDEN, IN)
    given: dict[str, Any] = {"rng": True, "states": {"ema": {"weight": weight}}}
    checkpoint.save(tmp_path, model, optimizer, step=1, extra=EXTRA, **given)
    model, optimizer = made(seed=1)
    train(model, optimizer, seed=1, steps=1)
    before, drawn = everything(model, optimizer), torch.get_rng_state()
    place = [Shard(0)]  # of which a rank has 4 rows at most
    wrong = DTensor.from_local(weight, mesh, place, shape=weight.shape, stride=weight.stride())
    held = optimizer.state[model.first.weight]
    loading = "fsdp2.checkpoint.loading."
    few, wire = {"cpu": drawn[:9]}, mock.Mock()
    wire.state_dict.return_value = {"it": wrong}
    for part, name in (
        (mock.patch.dict(given, states={"ema": {"weight": wrong}}), "states.ema.weight"),
        (mock.patch.dict(held, exp_avg=wrong), "optimizer.state.first.weight.exp_avg"),
        (mock.patch(loading + "WireState", return_value=wire), "wire.it"),
        (mock.patch(loading + "rng_states", return_value=few), f"rng.{dist.get_rank()}.cpu"),
    ):
        with part, raises("ckpt-differs") as refused:
            checkpoint.load(tmp_path, model, optimizer, **given)
        assert f"'{name}'" in str(refused.value)
    broken = mock.patch(loading + "unpacked", side_effect=ValueError("broken"))
    with broken, raises("ckpt-rank-failed"):
        checkpoint.load(tmp_path, model, optimizer, **given)
    assert_same(everything(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    checkpoint.load(tmp_path, model, optimizer, **given)
