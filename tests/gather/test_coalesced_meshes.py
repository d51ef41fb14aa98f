"""The zero-copy path on meshes of two dims, with smaller groups, and with offloading.

gloo has no coalesced collectives, so that all other tests of these take the packed path; here the
same steps are taken on the path of accelerators, and must end in the same place.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2 import CPUOffloadPolicy
from tests.common import meshes, models, parity
from tests.common.combinations import each_once
from tests.common.looped import coalescing
from tests.common.offloading import forced_offload
from tests.common.workers import ranks

WIDE = 32  # a rank's rows are whole 16 bytes on 4 ranks, in bf16 too


class Layers(nn.Module):
    """Even and aligned, even and not aligned, uneven."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [models.DIM, WIDE, 12, WIDE, 7]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        for layer in self.layers[1:]:
            layer.is_unit = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


BUILD = partial(models.seeded, Layers)

ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "copies": {"copies": 2},
    "only copies": {"copies": 4},
    "smaller groups": {"reshard_after_forward": 2},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "offloaded, copies": {"copies": 2, "offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "offloaded, smaller groups": {
        "reshard_after_forward": 2,
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    },
}


def _sharded(mixed: bool, copies: int = 1, **arguments: Any) -> Any:
    size = dist.get_world_size()
    where = meshes.hsdp_mesh(copies, size // copies)
    arguments["mesh"] = where if copies > 1 else where["shard"]
    with coalescing(), forced_offload():
        model = parity.shard(parity.OURS, BUILD(), mixed=mixed, **arguments)
    if copies < size:
        kinds = {kind for r in fsdp2.report(model).groups for kind in r.transport.split("+")}
        assert kinds == {"coalesced", "packed"}
    return model


@ranks(4)
@each_once(arrangement=[*ARRANGEMENTS], mixed={"fp32": False, "mixed": True})
def test_training(arrangement: str, mixed: bool) -> None:
    steps = meshes.micro_batches(models.DIM, 7, micro=2, steps=2)
    before = meshes.flags_in_turn(meshes.Flags(all_reduce=False), meshes.Flags())
    ours = meshes.train_micro(_sharded(mixed, **ARRANGEMENTS[arrangement]), steps, before=before)
    tolerance = parity.REORDERED_MIXED if mixed else parity.FP32
    parity.assert_close(
        ours, meshes.train_plain(BUILD(), steps, mixed=mixed), tolerance, "unsharded"
    )


@ranks(4)
def test_tensor_parallel() -> None:
    build = partial(models.seeded, partial(meshes.ParallelModel, hidden=WIDE))
    where = meshes.mesh("shard", "tp", shape=(2, 2))
    steps = [[batch] for batch in parity.language_batches(16, steps=2)]
    with coalescing():
        model = parity.shard(
            parity.OURS, meshes.parallelize(build(), where["tp"], "sequence"), mesh=where["shard"]
        )
    part = (where.get_local_rank("shard"), 2)
    ours = meshes.train_micro(model, steps, loss=meshes.parallel_loss, part=part)
    expected = meshes.train_plain(build(), steps, loss=meshes.parallel_loss, parts=2)
    parity.assert_close(ours, expected, parity.FP32, "unsharded")
