"""Ranks of a group of which one has healed, and one has not."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import elastic
from tests.common.workers import ranks
from tests.elastic.replica_groups import StandIn


@ranks(2)
def test_a_group_heals_as_a_whole() -> None:
    """One that all ranks have healed in stays, though the step is dropped."""
    model = fsdp2.fully_shard(nn.Linear(4, 4))
    manager = StandIn()
    steps = elastic.attach(model, manager)
    rank = dist.get_rank()
    for healed, expected in (([7, 0], 0), ([0, 7], 0), ([7, 7], 7), ([7, 5], 5)):
        manager.step = 0
        steps.begin()
        manager.step = healed[rank]
        model(torch.ones(2, 4)).sum().backward()
        steps.fail(RuntimeError("a rank has voted no"))
        assert not steps.commit()
        assert manager.step == expected
    manager.step = rank
    steps.begin()
    model(torch.ones(2, 4)).sum().backward()
    assert steps.commit()
    assert manager.step == rank + 1  # nothing is exchanged where a step counts
