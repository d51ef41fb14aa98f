"""Two groups of two ranks: the same bits as one mesh of two copies of two shards (HSDP)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp2
from fsdp2 import elastic
from tests.common import combinations, meshes, models, parallelisms, parity
from tests.common.workers import ranks
from tests.elastic import replica_groups

STEPS, MICRO = 3, 2

WHOLE: Any = lambda param: Replicate() if param.dim() == 1 else None  # noqa: E731

OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "mixed": {"mp_policy": fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "fp16": {"mp_policy": fsdp2.MixedPrecisionPolicy(torch.float16, torch.float16)},
    "offloaded": {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)},
    "some whole": {"shard_placement_fn": WHOLE},
}


def _train(between: bool, case: str, setter: str, flat: bool) -> Any:
    """With replica groups, or with the copies of one mesh.

    Args:
        between: whether copies are groups, which a manager connects.
        case: of `OPTIONS`.
        setter: what says that a micro-batch is not the last.
        flat: whether units are stepped flat.
    """
    both = meshes.hsdp_mesh(2, 2)
    own = both["shard"] if between else both
    model: Any = models.seeded(partial(models.Transformer, blocks=1))
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=own, **OPTIONS[case])
    fsdp2.fully_shard(model, mesh=own, **OPTIONS[case])
    optimizer = (
        fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, lr=0.01)
        if flat
        else torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    manager = replica_groups.across(both["replicate"].get_group())
    steps = elastic.attach(model, manager, optimizer) if between else None
    batches = parity.language_batches(13, steps=STEPS * MICRO)
    norms = []
    for step in range(STEPS):
        if steps is not None:
            steps.begin()
        for micro in range(MICRO):
            getattr(model, setter)(micro == MICRO - 1)
            batch = batches[MICRO * step + micro]
            parity.language_loss(model, parity.my_part(batch)).backward()
        norms.append(fsdp2.clip_grad_norm_(model.parameters(), 0.1))
        if steps is not None:
            assert steps.commit()
        else:
            optimizer.step()
            optimizer.zero_grad()
    return [getattr(n, "full_tensor", lambda n=n: n)() for n in norms], parity.full_params(model)


@combinations.each_once(
    case=[*OPTIONS],
    setter=["set_requires_gradient_sync", "set_requires_all_reduce"],
    flat=[False, True],
)
@ranks(4)
def test_as_copies_of_one_mesh(case: str, setter: str, flat: bool) -> None:
    ours, copies = (_train(between, case, setter, flat) for between in (True, False))
    if case == "fp16":  # copies are summed before the second division
        parity.assert_close(ours, copies, parity.REORDERED_MIXED)
    elif case == "some whole":  # copies sum gradients of those over four ranks at once
        parity.assert_close(ours, copies, parity.REORDERED_FP32)
    else:
        parity.assert_equal(ours, copies)


def _inside(names: tuple[str, ...], shape: tuple[int, ...], steps_between: bool) -> Any:
    """A model over ``names`` inside each of two groups, or over all ranks in one mesh."""
    mesh = meshes.mesh("between", *names, shape=(2, *shape))
    tensor_parallel = "tp" in names
    model: Any = models.seeded(parallelisms.Ladder)
    if tensor_parallel:
        for block in models.units(model):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
    own = mesh["shard"] if tensor_parallel else mesh["replicate", "shard"]
    if not steps_between:
        own = mesh["between", "shard"] if tensor_parallel else meshes.hsdp_mesh(4, 1)
    for module in (*models.units(model), model):
        fsdp2.fully_shard(module, mesh=own)
    optimizer = fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, lr=0.01)
    manager = replica_groups.across(mesh["between"].get_group())
    steps = elastic.attach(model, manager, optimizer) if steps_between else None
    parts = 2 if tensor_parallel else 4
    part = dist.get_rank() * parts // 4
    for number in range(STEPS):
        if steps is not None:
            steps.begin()
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, models.DIM, generator=generator).chunk(parts)[part]
        model(x).square().mean().backward()
        if steps is not None:
            assert steps.commit()
        else:
            optimizer.step()
            optimizer.zero_grad()
    return parity.full_params(model)


@ranks(4)
def test_replicas_inside_a_group() -> None:
    """Copies are summed in two steps in place of one."""
    ours, copies = (_inside(("replicate", "shard"), (2, 1), between) for between in (True, False))
    parity.assert_close(ours, copies, parity.REORDERED_FP32)


@ranks(4)
def test_tensor_parallel_ranks_inside_a_group() -> None:
    ours, copies = (_inside(("shard", "tp"), (1, 2), between) for between in (True, False))
    parity.assert_equal(ours, copies)
