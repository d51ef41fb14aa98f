"""The page about DeepSpeed: what it converts has the bits that DeepSpeed had, on any ranks."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import checkpoint, fully_shard
from tests.clients.launch import SCRIPTS, output_of
from tests.common.jobs import ROOT
from tests.common.workers import run_on_ranks

pytestmark = pytest.mark.clients

PAGE = ROOT / "docs" / "migration" / "deepspeed.md"

MODEL = """
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(6, 51), nn.Tanh(), nn.BatchNorm1d(51), nn.Linear(51, 7))
"""


def _run(folder: Path, *arguments: str) -> None:
    path = os.pathsep.join([str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    output_of(*arguments, folder=folder, DS_ACCELERATOR="cpu", PYTHONPATH=path)


def _made() -> nn.Sequential:
    names: dict[str, object] = {}
    exec(MODEL, names)
    made = names["make_model"]
    assert callable(made)
    return made()


def _loads(folder: Path, step: int, ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(5)
    model = _made()
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    checkpoint.load(folder, model, optimizer if step else None, step=step)
    found = dict(model.state_dict())
    for name, param in model.named_parameters():
        found |= {f"{name}:{key}": value for key, value in optimizer.state.get(param, {}).items()}
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in found.items()}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of ZeRO-3 on two ranks."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    folder = tmp_path_factory.mktemp("zero")
    (folder / "train.py").write_text(MODEL)
    script = str(SCRIPTS / "with_deepspeed.py")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    _run(folder, *launcher, script, str(folder))
    return folder


@pytest.mark.parametrize("options", [(), ("--max_shard_size", "1KB"), ("--safe_serialization",)])
def test_weights(old: Path, options: tuple[str, ...], tmp_path: Path) -> None:
    """One file, several with an index, and safetensors."""
    weights = tmp_path / "weights"
    _run(old / "old_checkpoint", "zero_to_fp32.py", ".", str(weights), *options)
    assert (weights / "pytorch_model.bin.index.json").is_file() == ("1KB" in options)
    checkpoint.convert(weights, tmp_path / "run", to_kind="steps", step=0)
    expected = torch.load(old / "expected.pt")
    for found in run_on_ranks(3, _loads, tmp_path / "run", 0, 3):
        for name in _made().state_dict():
            assert torch.equal(found[name], expected[name]), name


def test_the_states_of_the_optimizer(old: Path) -> None:
    """By DeepSpeed's universal checkpoint, and by the page's script."""
    _run(old / "old_checkpoint", "zero_to_fp32.py", ".", str(old / "weights"))
    tool = ("-m", "deepspeed.checkpoint.ds_to_universal")
    folders = ("--input_folder", "old_checkpoint/global_step2")
    _run(old, *tool, *folders, "--output_folder", "universal/global_step2")
    (code,) = re.findall(r"^```python\n(import torch\n.*?)^```$", PAGE.read_text(), re.M | re.S)
    (old / "convert.py").write_text(code.replace("STEP = 1000", "STEP = 2"))
    _run(old, "convert.py")
    expected = torch.load(old / "expected.pt")
    for found in run_on_ranks(3, _loads, old / "run", 2, 3):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
