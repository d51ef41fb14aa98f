"""CPUOffloadPolicy. On a CPU mesh it changes nothing, so most tests force the path of accelerators:
shards and gradients in memory of their own, copied to and from the "device", which here is the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdp2.core.modules.registry import require_record
from tests.common import meshes, models, parity
from tests.common.cases import in_turn
from tests.common.offloading import forced_offload
from tests.common.workers import ranks

POLICY = CPUOffloadPolicy(pin_memory=False)  # no accelerator to lock pages for


def _offloaded(model: nn.Module, **arguments: Any) -> Any:
    with forced_offload():
        parity.shard(parity.OURS, model, offload_policy=POLICY, **arguments)
    return model


# -- on a CPU mesh --------------------------------------------------------------------------------


def _assert_nothing_changes(*policies: OffloadPolicy) -> None:
    steps = meshes.micro_batches(models.DIM, 4)
    expected = meshes.train_micro(parity.shard(parity.OURS, models.seeded(models.MLP)), steps)
    for policy in policies:
        model = parity.shard(parity.OURS, models.seeded(models.MLP), offload_policy=policy)
        parity.assert_equal(meshes.train_micro(model, steps), expected, str(policy))


@ranks(1, 2)
def test_nothing_changes_on_a_cpu_mesh() -> None:
    """torch's FSDP2 raises where there is no accelerator to pin for."""
    _assert_nothing_changes(CPUOffloadPolicy(pin_memory=True), CPUOffloadPolicy(pin_memory=False))


@ranks(2)
def test_torchs_own_policy_is_taken() -> None:
    _assert_nothing_changes(
        torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False),
        torch.distributed.fsdp.OffloadPolicy(),
    )


# -- the path of accelerators ---------------------------------------------------------------------


class Case(NamedTuple):
    """What is trained, how it is sharded, and what is set before each micro-batch."""

    build: Callable[[], nn.Module]
    arguments: dict[str, Any] = {}  # noqa: RUF012  # nobody writes it
    micro: int = 1
    before: meshes.Before | None = None
    shape: Callable[[int], tuple[int, int]] | None = None


def _evaluate(model: Any, number: int, last: bool) -> None:
    if last:
        with torch.no_grad():
            model(torch.ones(1, models.DIM))


def _leave_in_flight(model: Any, number: int, last: bool) -> None:
    model.set_is_last_backward(last)


def _reduced_in(dtype: torch.dtype) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, dtype)}


TIED = partial(models.Transformer, blocks=1, tied=True)
SYNC, NO_SYNC, NO_ALL_REDUCE = meshes.Flags(), meshes.Flags(False), meshes.Flags(all_reduce=False)
CASES = {
    "tied": Case(TIED),
    "tied, mixed": Case(TIED, {"mixed": True}),
    "tied, kept": Case(TIED, {"reshard_after_forward": False}),
    "tied, mixed, kept": Case(TIED, {"mixed": True, "reshard_after_forward": False}),
    "reduced in bf16": Case(models.Nested, _reduced_in(torch.bfloat16)),
    "odd": Case(models.OddMLP),
    "repeated": Case(models.Repeated),
    "evaluated": Case(models.MLP, micro=2, before=_evaluate),
    # Added up on the device without sync, or in CPU memory by each backward.
    "accumulated": Case(models.MLP, micro=3, before=meshes.flags_in_turn(NO_SYNC, NO_SYNC, SYNC)),
    "reduced every time": Case(models.MLP, micro=3),
    # Reductions are left in flight: all arrive at the end.
    "left in flight": Case(models.MLP, micro=2, before=_leave_in_flight),
}
ON_SEVERAL = {
    "reduced in fp16": Case(models.Nested, _reduced_in(torch.float16)),
    "reduced in fp64": Case(models.Nested, _reduced_in(torch.float64)),
    "replicated": Case(
        models.MLP,
        micro=2,
        before=meshes.flags_in_turn(NO_ALL_REDUCE, SYNC),
        shape=lambda size: (2, size // 2),
    ),
    "copies only": Case(
        models.MLP,
        micro=2,
        before=meshes.flags_in_turn(NO_ALL_REDUCE, SYNC),
        shape=lambda size: (size, 1),
    ),
}
ON_FOUR = {"smaller groups after forward": Case(models.MLP, {"reshard_after_forward": 2})}


def _check(case: Case) -> None:
    """The same bits as without offloading: only where things are is different."""
    size = dist.get_world_size()
    arguments = dict(case.arguments)
    if case.shape is not None:
        arguments["mesh"] = meshes.hsdp_mesh(*case.shape(size))
    model, mixed = models.seeded(case.build), arguments.get("mixed", False)
    if case.build is TIED:
        loss = parity.language_loss
        steps: Any = [[batch] for batch in parity.language_batches(13, steps=2)]
    else:
        loss = parity.regression_loss
        (outputs,) = model(torch.ones(1, models.DIM)).shape[1:]
        steps = meshes.micro_batches(models.DIM, outputs, micro=case.micro, steps=2)
    train = partial(meshes.train_micro, steps=steps, loss=loss, before=case.before)
    ours = train(_offloaded(models.seeded(case.build), **arguments))
    kept = train(parity.shard(parity.OURS, models.seeded(case.build), **arguments))
    parity.assert_equal(ours, kept, "not offloaded")
    if "mp_policy" not in arguments:
        plain = meshes.train_plain(model, steps, loss=loss, mixed=mixed)
        parity.assert_close(
            ours, plain, parity.REORDERED_MIXED if mixed else parity.FP32, "unsharded"
        )


@ranks(1, 4, extended=(2,))
def test_training() -> None:
    size = dist.get_world_size()
    more = (ON_SEVERAL if size > 1 else {}) | (ON_FOUR if size == 4 else {})
    in_turn({**CASES, **more}, _check)


@ranks(2)
def test_where_things_are() -> None:
    """Shards are not what gathers read: the device has a copy, between gather and free only."""
    model = _offloaded(models.seeded(models.MLP))
    batch = parity.my_part(parity.regression_batches(models.DIM, 4, steps=1)[0])
    parity.regression_loss(model, batch).backward()
    group = require_record(model.layers[0]).unit.own_groups[0]
    assert group.bound.mirror is not None
    assert not group.bound.mirror.allocated
    start = group.shard.storage.data_ptr()
    end = start + group.shard.nbytes
    for param in model.layers[0].parameters():
        assert start <= param.to_local().data_ptr() < end
        assert param.grad.to_local().device.type == "cpu"
    model.layers[0].unshard()
    assert not start <= model.layers[0].weight.data_ptr() < end
    model.layers[0].reshard()
    assert not group.bound.mirror.allocated


@ranks(1)
def test_one_rank_computes_in_the_copy() -> None:
    """Where nothing is gathered or cast, what the forward reads is the copy, not the shard."""
    model = _offloaded(models.seeded(models.MLP))
    storages = {param.to_local().untyped_storage()._cdata for param in model.parameters()}
    seen: list[int] = []
    layer = model.layers[0]
    layer.register_forward_pre_hook(
        lambda module, args: seen.append(module.weight.untyped_storage()._cdata)
    )
    with parity.CountCollectives() as count:
        model(torch.ones(1, models.DIM)).sum().backward()
    assert count.total == 0
    assert len(seen) == 1
    assert seen[0] not in storages


@ranks(1, 2)
def test_hooks_see_gradients_that_have_arrived() -> None:
    """An optimizer step in a post-accumulate hook, with gradients added up over two backwards."""
    steps = meshes.micro_batches(models.DIM, 4, micro=2)
    model = _offloaded(models.seeded(models.MLP))
    optimizers = {param: parity.adamw([param]) for param in model.parameters()}
    fired: list[nn.Parameter] = []

    def step(param: nn.Parameter) -> None:
        fired.append(param)
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for micros in steps:
        for number, batch in enumerate(micros):
            model.set_requires_gradient_sync(number == 1)
            parity.regression_loss(model, parity.my_part(batch)).backward()
    assert len(fired) == len(optimizers) * len(steps)
    expected = meshes.train_plain(models.seeded(models.MLP), steps)[-1].params
    actual = dict(zip(expected, parity.full_all(model.parameters()), strict=True))
    parity.assert_close(actual, expected, parity.FP32, "unsharded")


@ranks(2)
def test_recovery_from_an_exception() -> None:
    model = _offloaded(models.seeded(models.MLP))
    steps = meshes.micro_batches(models.DIM, 4, steps=2)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, models.DIM + 1))
    model.reset_iter_state()
    parity.assert_close(
        meshes.train_micro(model, steps),
        meshes.train_plain(models.seeded(models.MLP), steps),
        parity.FP32,
        "unsharded",
    )


# -- states, devices and memory -------------------------------------------------------------------


@ranks(1, 2)
@pytest.mark.parametrize("assign", [False, True])
def test_meta_initialisation(assign: bool) -> None:
    with torch.device("meta"):
        model: Any = models.MLP()
    _offloaded(model)
    whole = models.seeded(models.MLP).state_dict()
    source = _offloaded(models.seeded(models.MLP))
    if assign:
        model.load_state_dict(source.state_dict(), assign=True)
    else:
        model.to_empty(device="cpu")
        model.load_state_dict(source.state_dict())
    assert all(param.device.type == "cpu" for param in model.parameters())
    parity.assert_equal(
        parity.full_params(model), {n: t.detach() for n, t in whole.items()}, "loaded"
    )
    steps = meshes.micro_batches(models.DIM, 4, steps=2)
    parity.assert_close(
        meshes.train_micro(model, steps),
        meshes.train_plain(models.seeded(models.MLP), steps),
        parity.FP32,
        "unsharded",
    )


@ranks(1, 2)
def test_recast_and_moved() -> None:
    """`.to()` gives the parameters other memory; the group follows."""
    model = _offloaded(models.seeded(models.MLP))
    batch = parity.my_part(parity.regression_batches(models.DIM, 4, steps=1)[0])
    parity.regression_loss(model, batch).backward()
    model.zero_grad()
    model.to(torch.float64).to("cpu")
    kept = parity.shard(parity.OURS, models.seeded(models.MLP).double())
    for each in (model, kept):
        parity.regression_loss(each, (batch[0].double(), batch[1])).backward()
    parity.assert_equal(parity.full_grads(model), parity.full_grads(kept), "not offloaded")
