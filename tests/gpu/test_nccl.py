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

from fsdp2.core.device.backends import traits_of
from fsdp2.core.device.collectives import GroupCollectives
from fsdp2.core.device.streams import DeviceStreams
from tests.common import alone, parity
from tests.common.workers import ranks

CYCLES = 1_000_000  # half a millisecond; a step of the model has some twenty of them

# The same kernels on the same shapes, but cuBLAS may choose others when streams change.
FP32 = parity.Tolerance(rtol=1e-4, atol=1e-5)


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
def test_nccl_is_known() -> None:
    """Either implementation: from torch 2.15 "nccl" is nccl2, without TORCH_DIST_USE_NCCL2=0."""
    group, device = _mesh((1,)).get_group(), torch.device("cuda", 0)
    name = traits_of(group, device).name
    assert name in ("nccl-legacy", "nccl2")
    collectives = GroupCollectives(group, device, True)
    assert collectives.coalesces is (name == "nccl-legacy")
    assert collectives.premultiplies


@ranks(1)
def test_what_is_not_asynchronous_is_ordered_on_the_current_stream() -> None:
    """So that an event behind the call is behind the collective.

    Legacy NCCL returns nothing; nccl2 returns a Work, whose wait() makes the current stream wait.
    """
    group, device = _mesh((1,)).get_group(), torch.device("cuda", 0)
    legacy = traits_of(group, device).name == "nccl-legacy"
    for asynchronous in (False, True):
        collectives = GroupCollectives(group, device, asynchronous)
        input_ = torch.ones(64, device=device)
        one, many = torch.zeros_like(input_), torch.zeros_like(input_)
        _pause()
        works = [
            collectives.all_gather(one, input_),
            collectives.bind_all_gather_many([many], [input_])(),
        ]
        for work in works:
            assert (work is None) is (legacy or asynchronous)
            if work is not None:
                work.wait()
        assert torch.equal(one, input_)
        assert torch.equal(many, input_)


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
    parity.assert_close(seen, expected, parity.REORDERED_MIXED if case == "mixed" else FP32)


@ranks(1)
def test_a_missing_wait_would_be_seen() -> None:
    mesh, device = _mesh((1,)), torch.device("cuda", 0)
    expected = alone.train("fp32", device, None, _no_pause)
    with alone.late_lanes(_pause), mock.patch.object(DeviceStreams, "wait", return_value=None):
        seen = alone.train("fp32", device, mesh, _no_pause)
    torch.cuda.synchronize()
    with pytest.raises(AssertionError, match="elements differ"):
        parity.assert_close(seen, expected, FP32)
