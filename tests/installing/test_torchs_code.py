"""What of torch's FSDP package runs while a model that fsdp2 sharded trains: nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn

import fsdp2
from fsdp2.testing.null_group import init_null_group, null_mesh

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    init_null_group(2)
    yield
    dist.destroy_process_group()


def _calls_into_torchs_fsdp(run: Callable[[], None]) -> set[str]:
    """Functions of torch's FSDP package that ``run`` calls, on the CPU, where backward is here."""
    seen = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            path = code.co_filename.replace("\\", "/")
            if "torch/distributed/fsdp/" in path or "torch/distributed/_composable/" in path:
                seen.add(f"{path.rpartition('/')[2]}:{code.co_name}")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return seen


def _sharded(api: ModuleType) -> Any:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for block in model:
        api.fully_shard(block, mesh=null_mesh(2), mp_policy=policy)
    return api.fully_shard(model, mesh=null_mesh(2), mp_policy=policy)


def _train(model: Any) -> None:
    """Accumulation, clipping, an optimizer, evaluation, and what users call in between."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model(torch.ones(2, 8)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(torch.ones(2, 8))
    model.unshard()
    model.reshard()
    model.state_dict()


def test_nothing_of_torchs_runs_in_a_step() -> None:
    model = _sharded(fsdp2)
    assert _calls_into_torchs_fsdp(lambda: _train(model)) == set()


def test_the_same_step_of_torchs_would_be_noticed() -> None:
    model = _sharded(torchs)
    found = _calls_into_torchs_fsdp(lambda: _train(model))
    assert any(name.startswith("_fully_shard.py:") for name in found)
    assert any(name.startswith("_fsdp_param_group.py:") for name in found)
