"""The checks of `fsdp2.debug` on the GPU, where steps run behind the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, errors
from tests.common import models, parity
from tests.common.workers import ranks

DIM = models.DIM


def _model(offload: OffloadPolicy | None = None) -> nn.Module:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = models.seeded(models.MLP)
    for unit in [*models.units(model), model]:
        fsdp2.fully_shard(
            unit, mesh=mesh, mp_policy=policy, offload_policy=offload or OffloadPolicy()
        )
    return model


@ranks(2)
@pytest.mark.parametrize("offload", [None, CPUOffloadPolicy(pin_memory=False)])
def test_ranks_that_agree_train_as_without_the_checks(offload: OffloadPolicy | None) -> None:
    found = []
    x = torch.ones(4, DIM, device="cuda")
    for on in (False, True):
        with fsdp2.debug(check_ranks=on, check_nan=on):
            model = _model(offload)
            for _ in range(2):
                model(x).sum().backward()
            found.append(parity.full_grads(model))
    parity.assert_equal(found[1], found[0])


@ranks(2)
def test_ranks_that_disagree_raise() -> None:
    with fsdp2.debug(check_ranks=True):
        model = _model()
        if dist.get_rank() == 1:
            model.layers[1].set_requires_gradient_sync(False)
        with pytest.raises(errors.RankMismatchError, match="rank 0 is at the reduce-scatter of 'l"):
            model(torch.ones(4, DIM, device="cuda")).sum().backward()


@ranks(2)
def test_nan_on_one_rank_raises_on_both() -> None:
    with fsdp2.debug(check_nan=True):
        model = _model()
        x = torch.full((4, DIM), float("nan") if dist.get_rank() else 1.0, device="cuda")
        with pytest.raises(errors.NonFiniteGradientError, match=r"'head.weight' .on 1 of 2 ranks"):
            model(x).sum().backward()
