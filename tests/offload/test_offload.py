"""CPUOffloadPolicy. On a CPU mesh it changes nothing, so most tests force the path of accelerators:
shards and gradients in memory of their own, copied to and from the "device", which here is the CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import CPUOffloadPolicy
from fsdp2.core.modules.registry import require_record
from tests.common.combinations import each_once
from tests.common.meshes import (
    Flags,
    flags_in_turn,
    hsdp_mesh,
    micro_batches,
    train_micro,
    train_plain,
)
from tests.common.models import DIM, MLP, Nested, OddMLP, Repeated, Transformer, seeded
from tests.common.offloading import forced_offload
from tests.common.parity import (
    FP32,
    OURS,
    REORDERED_MIXED,
    CountCollectives,
    adamw,
    assert_close,
    assert_equal,
    full_all,
    full_grads,
    full_params,
    language_batches,
    language_loss,
    my_part,
    regression_batches,
    regression_loss,
    shard,
    world_mesh,
)
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

POLICY = CPUOffloadPolicy(pin_memory=False)  # no accelerator to lock pages for


def _offloaded(model: nn.Module, **arguments: Any) -> Any:
    with forced_offload():
        shard(OURS, model, offload_policy=POLICY, **arguments)
    return model


# -- on a CPU mesh --------------------------------------------------------------------------------


@ranks(1, 2)
@pytest.mark.parametrize("pin_memory", [True, False])
def test_nothing_changes_on_a_cpu_mesh(pin_memory: bool) -> None:
    """torch's FSDP2 raises where there is no accelerator to pin for."""
    steps = micro_batches(DIM, 4)
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    ours = train_micro(shard(OURS, seeded(MLP), offload_policy=policy), steps)
    assert_equal(ours, train_micro(shard(OURS, seeded(MLP)), steps), "without the policy")


@ranks(2)
def test_torchs_own_policy_is_taken() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy as Torchs
    from torch.distributed.fsdp import OffloadPolicy

    steps = micro_batches(DIM, 4, steps=1)
    expected = train_micro(shard(OURS, seeded(MLP)), steps)
    for policy in (Torchs(pin_memory=False), OffloadPolicy()):
        ours = train_micro(shard(OURS, seeded(MLP), offload_policy=policy), steps)
        assert_equal(ours, expected, str(policy))


# -- the path of accelerators ---------------------------------------------------------------------


@ranks(1, 2, 4)
@each_once(mixed={"fp32": False, "mixed": True}, reshard_after_forward=[None, False])
def test_training(mixed: bool, reshard_after_forward: bool | None) -> None:
    """The same bits as without offloading: only where things are is different."""
    build = partial(seeded, partial(Transformer, blocks=1, tied=True))
    steps = [[batch] for batch in language_batches(13, steps=3)]
    arguments = {"mixed": mixed, "reshard_after_forward": reshard_after_forward}
    ours = train_micro(_offloaded(build(), **arguments), steps, loss=language_loss)
    kept = train_micro(shard(OURS, build(), **arguments), steps, loss=language_loss)
    assert_equal(ours, kept, "not offloaded")
    plain = train_plain(build(), steps, loss=language_loss, mixed=mixed)
    assert_close(ours, plain, REORDERED_MIXED if mixed else FP32, "unsharded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reduce", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_reduce_dtypes(reduce: torch.dtype) -> None:
    steps = micro_batches(DIM, 3, steps=2)
    policy = OURS.MixedPrecisionPolicy(torch.bfloat16, reduce)
    ours = train_micro(_offloaded(seeded(Nested), mp_policy=policy), steps)
    kept = train_micro(shard(OURS, seeded(Nested), mp_policy=policy), steps)
    assert_equal(ours, kept, "not offloaded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("build", [OddMLP, Repeated], ids=lambda build: build.__name__)
def test_other_models(build: Any) -> None:
    steps = micro_batches(DIM, 1 if build is OddMLP else 2, steps=2)
    ours = train_micro(_offloaded(seeded(build)), steps)
    assert_close(ours, train_plain(seeded(build), steps), FP32, "unsharded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("sync", ["at the end", "every time"])
def test_accumulation(sync: str) -> None:
    """Added up on the device without sync, or in CPU memory by each backward."""
    steps = micro_batches(DIM, 4, micro=3, steps=2)
    no = Flags(sync=sync == "every time")
    before = flags_in_turn(no, no, Flags())
    ours = train_micro(_offloaded(seeded(MLP)), steps, before=before)
    assert_close(ours, train_plain(seeded(MLP), steps), FP32, "unsharded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("shape", ["both", "copies only"])
def test_hsdp(shape: str) -> None:
    size = dist.get_world_size()
    mesh = hsdp_mesh(2, size // 2) if shape == "both" else hsdp_mesh(size, 1)
    steps = micro_batches(DIM, 4, micro=2, steps=2)
    before = flags_in_turn(Flags(all_reduce=False), Flags())
    ours = train_micro(_offloaded(seeded(MLP), mesh=mesh), steps, before=before)
    assert_close(ours, train_plain(seeded(MLP), steps), FP32, "unsharded")


@ranks(4)
def test_smaller_groups_after_forward() -> None:
    steps = micro_batches(DIM, 4, steps=2)
    ours = train_micro(_offloaded(seeded(MLP), reshard_after_forward=2), steps)
    assert_close(ours, train_plain(seeded(MLP), steps), FP32, "unsharded")


@ranks(2)
def test_where_things_are() -> None:
    """Shards are not what gathers read: the device has a copy, between gather and free only."""
    model = _offloaded(seeded(MLP))
    batch = my_part(regression_batches(DIM, 4, steps=1)[0])
    regression_loss(model, batch).backward()
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
    model = _offloaded(seeded(MLP))
    storages = {param.to_local().untyped_storage()._cdata for param in model.parameters()}
    seen: list[int] = []
    layer = model.layers[0]
    layer.register_forward_pre_hook(
        lambda module, args: seen.append(module.weight.untyped_storage()._cdata)
    )
    with CountCollectives() as count:
        model(torch.ones(1, DIM)).sum().backward()
    assert count.total == 0
    assert len(seen) == 1
    assert seen[0] not in storages


@ranks(1, 2)
def test_hooks_see_gradients_that_have_arrived() -> None:
    """An optimizer step in a post-accumulate hook, with gradients added up over two backwards."""
    steps = micro_batches(DIM, 4, micro=2)
    model = _offloaded(seeded(MLP))
    optimizers = {param: adamw([param]) for param in model.parameters()}
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
            regression_loss(model, my_part(batch)).backward()
    assert len(fired) == len(optimizers) * len(steps)
    expected = train_plain(seeded(MLP), steps)[-1].params
    actual = dict(zip(expected, full_all(model.parameters()), strict=True))
    assert_close(actual, expected, FP32, "unsharded")


@ranks(1, 2)
def test_clip_grad_norm() -> None:
    batch = regression_batches(DIM, 4, steps=1)[0]
    model, plain = _offloaded(seeded(MLP)), seeded(MLP)
    regression_loss(model, my_part(batch)).backward()
    regression_loss(plain, batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert isinstance(norm, DTensor)
    assert_close(norm.full_tensor(), expected, FP32, "norm")
    assert_close(full_grads(model), full_grads(plain), FP32, "clipped")


@ranks(2)
def test_gradients_wait_for_the_last_backward() -> None:
    """With reductions left in flight by `set_is_last_backward(False)`, all arrive at the end."""
    batches = regression_batches(DIM, 4, steps=2)
    model, plain = _offloaded(seeded(MLP)), seeded(MLP)
    for number, batch in enumerate(batches):
        model.set_is_last_backward(number == 1)
        regression_loss(model, my_part(batch)).backward()
        regression_loss(plain, batch).backward()
    assert_close(full_grads(model), full_grads(plain), FP32, "unsharded")


@ranks(2)
def test_recovery_from_an_exception() -> None:
    model = _offloaded(seeded(MLP))
    steps = micro_batches(DIM, 4, steps=2)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, DIM + 1))
    model.reset_iter_state()
    assert_close(train_micro(model, steps), train_plain(seeded(MLP), steps), FP32, "unsharded")


# -- states, devices and memory -------------------------------------------------------------------


@ranks(1, 2)
def test_state_dict_and_load() -> None:
    model, other = _offloaded(seeded(MLP)), _offloaded(seeded(MLP, seed=1))
    steps = micro_batches(DIM, 4, steps=2)
    train_micro(other, steps)
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    for name, param in model.named_parameters():
        assert state[name].to_local().data_ptr() == param.to_local().data_ptr()
    other.load_state_dict(state)
    assert_equal(full_params(other), full_params(seeded(MLP)), "loaded")
    assert_close(train_micro(other, steps), train_plain(seeded(MLP), steps), FP32, "and trained")


@ranks(1, 2)
@pytest.mark.parametrize("assign", [False, True])
def test_meta_initialisation(assign: bool) -> None:
    with torch.device("meta"):
        model: Any = MLP()
    _offloaded(model)
    whole = seeded(MLP).state_dict()
    source = _offloaded(seeded(MLP))
    if assign:
        model.load_state_dict(source.state_dict(), assign=True)
    else:
        model.to_empty(device="cpu")
        model.load_state_dict(source.state_dict())
    assert all(param.device.type == "cpu" for param in model.parameters())
    assert_equal(full_params(model), {n: t.detach() for n, t in whole.items()}, "loaded")
    steps = micro_batches(DIM, 4, steps=2)
    assert_close(train_micro(model, steps), train_plain(seeded(MLP), steps), FP32, "unsharded")


@ranks(1, 2)
def test_recast_and_moved() -> None:
    """`.to()` gives the parameters other memory; the group follows."""
    model = _offloaded(seeded(MLP))
    batch = my_part(regression_batches(DIM, 4, steps=1)[0])
    regression_loss(model, batch).backward()
    model.zero_grad()
    model.to(torch.float64).to("cpu")
    kept = shard(OURS, seeded(MLP).double())
    for each in (model, kept):
        regression_loss(each, (batch[0].double(), batch[1])).backward()
    assert_equal(full_grads(model), full_grads(kept), "not offloaded")


@ranks(2)
def test_still_on_the_meta_device() -> None:
    with torch.device("meta"):
        model: Any = nn.Linear(DIM, DIM)
    _offloaded(model)
    with pytest.raises(RuntimeError, match=r"to_empty\(device='cpu'\)"):
        model(torch.ones(1, DIM))


class _Elsewhere:
    """A local tensor on a device that this machine does not have."""

    device = torch.device("cuda", 0)
    is_meta = False


@ranks(2)
def test_parameters_that_were_moved_to_the_device() -> None:
    model = _offloaded(seeded(partial(nn.Linear, DIM, DIM)))
    param = require_record(model).unit.own_groups[0].params[0]
    with (
        mock.patch.object(type(param), "local", _Elsewhere()),
        pytest.raises(RuntimeError, match=r"'weight' is on cuda:0.*CPUOffloadPolicy.*to\('cpu'\)"),
    ):
        model(torch.ones(1, DIM))


@ranks(2)
def test_policies_that_are_refused() -> None:
    layer = nn.Linear(DIM, DIM)
    with pytest.raises(TypeError, match="offload_policy"):
        OURS.fully_shard(layer, mesh=world_mesh(), offload_policy="cpu")
    assert type(layer) is nn.Linear
