"""`load_pretrained` of pytorch_model*.bin: equal to safetensors, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import checkpoint
from tests.checkpoint.shared import Evil
from tests.common.errors import raises

pytestmark = pytest.mark.alone


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("empty", torch.zeros(0, 3))


def made(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Tied()


def write_bins(folder: Path, state: dict[str, Any], files: int) -> None:
    """As ``save_pretrained(safe_serialization=False)`` does."""
    folder.mkdir()
    if files == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    weight_map = {}
    for number in range(files):
        part = dict(list(state.items())[number::files])
        name = f"pytorch_model-{number + 1:05d}-of-{files:05d}.bin"
        torch.save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder(tmp_path: Path, files: int, dtype: torch.dtype) -> None:
    """With an index, without, and by the file; cast, tied, with buffers and empty tensors."""
    model = made().to(dtype)
    write_bins(tmp_path / "out", dict(model.state_dict()), files)
    paths = [tmp_path / "out"]
    paths.append(
        next(iter(sorted(paths[0].glob("*.json")))) if files > 1 else paths[0] / "pytorch_model.bin"
    )
    for path in paths:
        other = made(seed=1)
        assert not checkpoint.load_pretrained(other, path)
        assert other.head.weight is other.embed.weight
        for name, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[name].to(value.dtype), value), name


def test_safetensors_come_first(tmp_path: Path) -> None:
    model = made()
    checkpoint.export(tmp_path / "out", model)
    torch.save({}, tmp_path / "out" / "pytorch_model.bin")
    other = made(seed=1)
    checkpoint.load_pretrained(other, tmp_path / "out")
    assert torch.equal(other.embed.weight, model.embed.weight)


def _untied(name: str) -> str | None:
    return None if name == "head.weight" else name


def test_what_is_refused(tmp_path: Path) -> None:
    model = made()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {"embed.weight": torch.zeros(3, 7).t(), "evil": Evil()}
    torch.save(state, tmp_path / "code.bin")
    with raises("ckpt-file-code"):
        checkpoint.load_pretrained(model, tmp_path / "code.bin")
    assert not Path("evil").exists()
    state.pop("evil")
    torch.save({**model.state_dict(), **state}, tmp_path / "view.bin")
    viewed = made(seed=1)
    checkpoint.load_pretrained(viewed, tmp_path / "view.bin", names=_untied, strict=False)
    assert torch.equal(viewed.embed.weight, torch.zeros(7, 3))
    write_bins(tmp_path / "out", dict(model.state_dict()), 2)
    (tmp_path / "out" / "pytorch_model-00002-of-00002.bin").unlink()
    with raises("tensors-missing"):
        checkpoint.load_pretrained(model, tmp_path / "out")
    index = tmp_path / "out" / "pytorch_model.bin.index.json"
    for text in ("{", json.dumps({"weight_map": {"a": "../code.bin"}}), '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        with raises("tensors-index"):
            checkpoint.load_pretrained(model, tmp_path / "out")
    with raises("ckpt-not-local"):
        checkpoint.load_pretrained(model, "memory://hf/pytorch_model.bin")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
