"""Items of a step are read where they lie, as long as they are what `save` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties

from fsdp2 import checkpoint
from fsdp2.checkpoint import reading
from fsdp2.checkpoint.tensors import DTYPES

pytestmark = pytest.mark.alone


class Net(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((3, 5), fill))
        self.b = nn.Parameter(torch.full((7,), fill, dtype=torch.bfloat16))
        self.register_buffer("c", torch.full((), int(fill)))
        self.register_buffer("d", torch.zeros(0, 4))
        self.e = nn.Parameter(torch.full((2, 3, 4, 5), fill).to(memory_format=torch.channels_last))
        for dtype in (*DTYPES.values(), torch.complex128):
            name = str(dtype).replace(".", "_")
            self.register_buffer(name, torch.full((7, 9), fill, dtype=torch.float32).to(dtype))


def _counted() -> tuple[Any, list[bool]]:
    found: list[bool] = []
    original = reading.Reader._read_framed

    def read(*args: Any) -> bool:
        found.append(original(*args))
        return found[-1]

    return mock.patch.object(reading.Reader, "_read_framed", read), found


def test_who_reads_what(tmp_path: Path) -> None:
    """All that `save` has written without DCP's reader, in any dtype; what DCP has, with it."""
    model = Net(3.0)
    checkpoint.save(tmp_path / "run", model, step=1)
    patch, found = _counted()
    other = Net(0.0)
    with patch:
        checkpoint.load(tmp_path / "run", other)
    assert found.count(True) == 4 + len(DTYPES) + 1  # nothing of d; bytes say how it was saved
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert other.e.is_contiguous(memory_format=torch.channels_last)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    step = tmp_path / "run" / "step-00000001"
    for path in (tmp_path / "dcp").iterdir():
        (step / path.name).write_bytes(path.read_bytes())
    manifest = mock.patch("fsdp2.checkpoint.loading.check_files")
    patch, found = _counted()
    other = Net(0.0)
    with patch, manifest:
        checkpoint.load(tmp_path / "run", other)
    assert len(found) == 4 + len(DTYPES) + 1
    assert not any(found)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize("strides", [None, (5, 1)])
def test_an_index_of_torch_2_15_tells_strides(
    tmp_path: Path, strides: tuple[int, ...] | None
) -> None:
    """Which a load does not need: it reads into the tensors that are there."""
    plain = TensorProperties.__getstate__
    with mock.patch.object(
        TensorProperties, "__getstate__", lambda self: (*plain(self)[:5], strides)
    ):
        checkpoint.save(tmp_path, Net(3.0), step=1)
    model = Net(0.0)
    checkpoint.load(tmp_path, model)
    assert torch.equal(model.a, Net(3.0).a)
