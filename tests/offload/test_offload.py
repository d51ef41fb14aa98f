"""CPUOffloadPolicy. On a CPU mesh it changes nothing, so most tests force the path of accelerators:
shards and gradients in memory of their own, copied to and from the "device", which here is the CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import CPUOffloadPolicy
from fsdp2.core.modules.registry import require_record
from tests.common import meshes, models, parity
from tests.common.combinations import each_once
from tests.common.offloading import forced_offload
from tests.common.workers import ranks

POLICY = CPUOffloadPolicy(pin_memory=False)  # no accelerator to lock pages for


def _offloaded(model: nn.Module, **arguments: Any) -> Any:
    with forced_offload():
        parity.shard(parity.OURS, model, offload_policy=POLICY, **arguments)
    return model


# -- on a CPU mesh --------------------------------------------------------------------------------


@ranks(1, 2)
@pytest.mark.parametrize("pin_memory", [True, False])
def test_nothing_changes_on_a_cpu_mesh(pin_memory: bool) -> None:
    """torch's FSDP2 raises where there is no accelerator to pin for."""
    steps = meshes.micro_batches(models.DIM, 4)
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    ours = meshes.train_micro(
        parity.shard(parity.OURS, models.seeded(models.MLP), offload_policy=policy), steps
    )
    parity.assert_equal(
        ours,
        meshes.train_micro(parity.shard(parity.OURS, models.seeded(models.MLP)), steps),
        "without the policy",
    )


@ranks(2)
def test_torchs_own_policy_is_taken() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy as Torchs
    from torch.distributed.fsdp import OffloadPolicy

    steps = meshes.micro_batches(models.DIM, 4, steps=1)
    expected = meshes.train_micro(parity.shard(parity.OURS, models.seeded(models.MLP)), steps)
    for policy in (Torchs(pin_memory=False), OffloadPolicy()):
        ours = meshes.train_micro(
            parity.shard(parity.OURS, models.seeded(models.MLP), offload_policy=policy), steps
        )
        parity.assert_equal(ours, expected, str(policy))


# -- the path of accelerators ---------------------------------------------------------------------


@ranks(1, 2, 4)
@each_once(mixed={"fp32": False, "mixed": True}, reshard_after_forward=[None, False])
def test_training(mixed: bool, reshard_after_forward: bool | None) -> None:
    """The same bits as without offloading: only where things are is different."""
    build = partial(models.seeded, partial(models.Transformer, blocks=1, tied=True))
    steps = [[batch] for batch in parity.language_batches(13, steps=3)]
    arguments = {"mixed": mixed, "reshard_after_forward": reshard_after_forward}
    ours = meshes.train_micro(_offloaded(build(), **arguments), steps, loss=parity.language_loss)
    kept = meshes.train_micro(
        parity.shard(parity.OURS, build(), **arguments), steps, loss=parity.language_loss
    )
    parity.assert_equal(ours, kept, "not offloaded")
    plain = meshes.train_plain(build(), steps, loss=parity.language_loss, mixed=mixed)
    parity.assert_close(ours, plain, parity.REORDERED_MIXED if mixed else parity.FP32, "unsharded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reduce", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_reduce_dtypes(reduce: torch.dtype) -> None:
    steps = meshes.micro_batches(models.DIM, 3, steps=2)
    policy = parity.OURS.MixedPrecisionPolicy(torch.bfloat16, reduce)
    ours = meshes.train_micro(_offloaded(models.seeded(models.Nested), mp_policy=policy), steps)
    kept = meshes.train_micro(
        parity.shard(parity.OURS, models.seeded(models.Nested), mp_policy=policy), steps
    )
    parity.assert_equal(ours, kept, "not offloaded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize(
    "build", [models.OddMLP, models.Repeated], ids=lambda build: build.__name__
)
def test_other_models(build: Any) -> None:
    steps = meshes.micro_batches(models.DIM, 1 if build is models.OddMLP else 2, steps=2)
    ours = meshes.train_micro(_offloaded(models.seeded(build)), steps)
    parity.assert_close(
        ours, meshes.train_plain(models.seeded(build), steps), parity.FP32, "unsharded"
    )


@ranks(2, extended=(4,))
@pytest.mark.parametrize("sync", ["at the end", "every time"])
def test_accumulation(sync: str) -> None:
    """Added up on the device without sync, or in CPU memory by each backward."""
    steps = meshes.micro_batches(models.DIM, 4, micro=3, steps=2)
    no = meshes.Flags(sync=sync == "every time")
    before = meshes.flags_in_turn(no, no, meshes.Flags())
    ours = meshes.train_micro(_offloaded(models.seeded(models.MLP)), steps, before=before)
    parity.assert_close(
        ours, meshes.train_plain(models.seeded(models.MLP), steps), parity.FP32, "unsharded"
    )


@ranks(2, extended=(4,))
@pytest.mark.parametrize("shape", ["both", "copies only"])
def test_hsdp(shape: str) -> None:
    size = dist.get_world_size()
    mesh = meshes.hsdp_mesh(2, size // 2) if shape == "both" else meshes.hsdp_mesh(size, 1)
    steps = meshes.micro_batches(models.DIM, 4, micro=2, steps=2)
    before = meshes.flags_in_turn(meshes.Flags(all_reduce=False), meshes.Flags())
    ours = meshes.train_micro(
        _offloaded(models.seeded(models.MLP), mesh=mesh), steps, before=before
    )
    parity.assert_close(
        ours, meshes.train_plain(models.seeded(models.MLP), steps), parity.FP32, "unsharded"
    )


@ranks(4)
def test_smaller_groups_after_forward() -> None:
    steps = meshes.micro_batches(models.DIM, 4, steps=2)
    ours = meshes.train_micro(_offloaded(models.seeded(models.MLP), reshard_after_forward=2), steps)
    parity.assert_close(
        ours, meshes.train_plain(models.seeded(models.MLP), steps), parity.FP32, "unsharded"
    )


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
def test_gradients_wait_for_the_last_backward() -> None:
    """With reductions left in flight by `set_is_last_backward(False)`, all arrive at the end."""
    batches = parity.regression_batches(models.DIM, 4, steps=2)
    model, plain = _offloaded(models.seeded(models.MLP)), models.seeded(models.MLP)
    for number, batch in enumerate(batches):
        model.set_is_last_backward(number == 1)
        parity.regression_loss(model, parity.my_part(batch)).backward()
        parity.regression_loss(plain, batch).backward()
    parity.assert_close(
        parity.full_grads(model), parity.full_grads(plain), parity.FP32, "unsharded"
    )


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
