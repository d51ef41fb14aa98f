"""One rank on NCCL that communicates with itself: real lanes, events and collectives, none early.

Lanes are made late, or compute is, so that whatever is not waited for is read too early. The same
on a device that reports such reads: tests/accelerator/test_alone.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2.core.collectives import GroupCollectives
from fsdp2.core.streams import DeviceStreams
from tests.common import alone
from tests.common.parity import REORDERED_MIXED, Tolerance, assert_close
from tests.common.workers import ranks

CYCLES = 1_000_000  # half a millisecond; a step of the model has some twenty of them

# The same kernels on the same shapes, but cuBLAS may choose others when streams change.
FP32 = Tolerance(rtol=1e-4, atol=1e-5)


def _pause() -> None:
    torch.cuda._sleep(CYCLES)


def _no_pause() -> None:
    """Not late."""


@cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    torch.cuda.set_device(0)
    backend = dict.fromkeys(names, "nccl")
    return init_device_mesh("cuda", shape, mesh_dim_names=names, backend_override=backend)


@ranks(1)
def test_what_is_not_asynchronous_leaves_nothing_to_wait_for() -> None:
    """So that an event behind the call is behind the collective."""
    collectives = GroupCollectives(_mesh((1,)).get_group(), torch.device("cuda", 0), False)
    assert collectives.coalesces
    assert collectives.premultiplies
    output, input_ = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
    assert collectives.all_gather(output, input_) is None
    assert collectives.bind_all_gather([output], [input_])() is None


@ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_collectives_in_lanes(dtype: torch.dtype) -> None:
    group, device = _mesh((1,)).get_group(), torch.device("cuda", 0)
    alone.check_gathers(group, device, dtype, _pause)
    if dtype.is_floating_point:
        alone.check_reductions(group, device, dtype, _pause)


@ranks(1)
@pytest.mark.parametrize("late", ["lanes", "compute"])
@pytest.mark.parametrize("case", alone.CASES)
def test_a_model_trains_as_if_it_were_not_sharded(case: str, late: str) -> None:
    mesh, device = _mesh(alone.mesh_shape(case)), torch.device("cuda", 0)
    expected = alone.train(case, device, None, _no_pause)
    with alone.late_lanes(_pause) if late == "lanes" else nullcontext():
        seen = alone.train(case, device, mesh, _pause if late == "compute" else _no_pause)
    assert_close(seen, expected, REORDERED_MIXED if case == "mixed" else FP32)


@ranks(1)
def test_a_missing_wait_would_be_seen() -> None:
    mesh, device = _mesh((1,)), torch.device("cuda", 0)
    expected = alone.train("fp32", device, None, _no_pause)
    with alone.late_lanes(_pause), mock.patch.object(DeviceStreams, "wait", return_value=None):
        seen = alone.train("fp32", device, mesh, _no_pause)
    torch.cuda.synchronize()
    with pytest.raises(AssertionError, match="elements differ"):
        assert_close(seen, expected, FP32)
