"""One rank that communicates with itself, on the stand-in: what tests/gpu/test_nccl.py does."""

from __future__ import annotations

import pytest
import torch

from fsdp2.testing.stand_in import device, group
from tests.accelerator import test_lanes as lanes
from tests.common import alone, workers
from tests.common.parity import assert_equal


def _no_pause() -> None:
    """Nothing is late here: the device reports what is out of order."""


@workers.ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_collectives_in_lanes(dtype: torch.dtype) -> None:
    mesh, on = lanes._mesh(device.NAME, group.COALESCING, (1,)), torch.device(device.NAME, 0)
    own = mesh.get_group()
    device.races()
    alone.check_gathers(own, on, dtype, _no_pause)
    if dtype.is_floating_point:
        alone.check_reductions(own, on, dtype, _no_pause)
    assert not device.races()


@workers.ranks(1)
@pytest.mark.parametrize("case", alone.CASES)
def test_a_model_trains_as_if_it_were_not_sharded(case: str) -> None:
    mesh = lanes._mesh(device.NAME, group.COALESCING, alone.mesh_shape(case))
    on = torch.device(device.NAME, 0)
    expected = alone.train(case, on, None, _no_pause)
    before = device.count_of("wait")
    device.races()
    with alone.late_lanes(_no_pause):
        assert_equal(alone.train(case, on, mesh, _no_pause), expected)
    assert not device.races()
    assert device.count_of("wait") > before
