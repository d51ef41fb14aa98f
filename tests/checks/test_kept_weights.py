"""`debug` names an unsharded parameter that is kept, and read after its memory is freed.

Without it, the process would end by a signal.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from tests.common import meshes, models
from tests.common.errors import raises
from tests.common.workers import ranks

READS: dict[str, Callable[[Tensor], object]] = {
    "method": lambda kept: kept.norm(),
    "operator": lambda kept: 1 + kept,
    "view": lambda kept: kept.detach(),
    "data": lambda kept: kept.data,
    "list": lambda kept: torch.stack([torch.ones_like(kept, device="meta"), kept]),
    "foreach": lambda kept: torch._foreach_norm([kept]),
    "function": lambda kept: nn.functional.linear(torch.ones(1, kept.shape[1]), weight=kept),
    "write": lambda kept: nn.init.zeros_(kept),
}


def _model(parallel: bool) -> tuple[nn.Module, list[nn.Parameter]]:
    """A model whose hook keeps the weight of its first layer."""
    model = models.seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    mesh = meshes.mesh("shard", "tp", shape=(2, 1))
    if parallel:
        parallelize_module(model[0], mesh["tp"], ColwiseParallel())
    kept: list[nn.Parameter] = []
    model[0].register_forward_hook(lambda module, *_: kept.append(module.weight))
    for layer in (*model, model):
        fsdp2.fully_shard(layer, mesh=mesh["shard"])
    return model, kept


@ranks(2)
@pytest.mark.parametrize("parallel", [False, True], ids=["plain", "tensor parallel"])
def test_a_weight_that_is_read_after_the_forward(parallel: bool) -> None:
    expected, held = _model(parallel)
    for _ in range(2):
        expected(torch.ones(2, 4)).square().sum().backward()
    kind = type(held[0])
    model, kept = _model(parallel)
    with fsdp2.debug(check_writes=True):
        for _ in range(2):
            kept.clear()
            loss = model(torch.ones(2, 4)).square().sum()
            for read in READS.values():
                with raises("read-freed") as caught:
                    read(kept[0])
                assert "parameter '0.weight' was read" in str(caught.value)
            assert kept[0].shape == (8, 4)  # reads no memory
            assert kept[0].requires_grad
            assert "'0.weight', freed" in repr(kept)
            loss.backward()
            with raises("read-freed"):
                kept[0].norm()
        model[0].unshard()
        assert type(kept[0]) is kind
        assert kept[0].norm().isfinite()
        model[0].reshard()
        with raises("read-freed"):
            kept[0].norm()
    assert type(kept[0]) is kind
    for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), its.grad.full_tensor())
