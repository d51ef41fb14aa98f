"""`fsdp2.xla` on real ranks: trains as the unsharded model, saves a file a rank, consolidates.

Two ranks, slices run separately and summed in rank order: the same arithmetic as without sharding,
so the same bits (`tests.common.parity`).
"""

from __future__ import annotations

import functools
import gc
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchsPolicy
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.wrap import ModuleWrapPolicy
from fsdp2.xla import XlaFullyShardedDataParallel as FSDP  # noqa: N814
from fsdp2.xla import (
    checkpoint_module,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)
from fsdp2.xla.consolidate import main
from tests.common import models, parity
from tests.common.workers import ranks

STEPS = 3


def wrap_units(model: nn.Module, **arguments: Any) -> nn.Module:
    """Bottom-up, as the document nests them: each marked module, then the model."""
    for name, child in list(model.named_children()):
        setattr(model, name, _wrap_below(child, **arguments))
    return FSDP(model, **arguments)


def _wrap_below(module: nn.Module, **arguments: Any) -> nn.Module:
    for name, child in list(module.named_children()):
        setattr(module, name, _wrap_below(child, **arguments))
    return FSDP(module, **arguments) if getattr(module, "is_unit", False) else module


def _batch(outputs: int) -> Any:
    """This rank's part of one."""
    return parity.my_part(parity.regression_batches(models.DIM, outputs, steps=1)[0])


def _language(
    wrap: Any, tied: bool = False, mixed: bool = False
) -> tuple[list[parity.Step], list[parity.Step]]:
    """Steps of a wrapped transformer, and of one that is not."""
    build, *job = _transformer(tied)
    return parity.train_sharded(wrap(build()), *job), _unwrapped(tied, mixed)


@functools.cache
def _unwrapped(tied: bool, mixed: bool) -> list[parity.Step]:
    build, *job = _transformer(tied)
    return parity.train_unsharded(build(), *job, slices=True, mixed=mixed)


def _transformer(tied: bool) -> Any:
    build = partial(models.seeded, partial(models.Transformer, tied=tied))
    return build, parity.adamw, parity.language_loss, parity.language_batches(13, steps=STEPS)


WRAPS: dict[str, Any] = {
    "plain": FSDP,
    "nested": wrap_units,
    "kept": partial(wrap_units, reshard_after_forward=False),
    "root too": partial(wrap_units, disable_reshard_on_root=False),
    "flat": partial(wrap_units, flatten_parameters=True),
    "packed": partial(wrap_units, reduce_scatter_bucket_size_mb=1.5, coalesce_all_gather_ops=True),
    "dim 0": partial(wrap_units, shard_param_on_dim_0=True),
    "deferred": partial(wrap_units, execute_sharding_on_init=False),
    "groups": partial(
        wrap_units, sharding_groups=[[0, 1]], sharding_rank=None, sharding_world_size=2
    ),
    "for a compiler": partial(
        wrap_units,
        optimization_barrier_in_forward=False,
        optimization_barrier_in_backward=False,
        sync_on_finalization=True,
        pin_layout_in_collective_ops=False,
    ),
}


@pytest.mark.parametrize("how", WRAPS)
@pytest.mark.filterwarnings("ignore:.*changes nothing")
@ranks(2)
def test_trains_as_the_unsharded_model(how: str) -> None:
    ours, expected = _language(WRAPS[how])
    parity.assert_equal(ours, expected)


class Grown(nn.Module):
    """Each layer is wrapped before the next is made."""

    def __init__(self, wrap: Any = lambda layer: layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(3):
            self.layers.append(wrap(nn.Linear(models.DIM, models.DIM)))
        self.head = nn.Linear(models.DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


@ranks(2)
def test_other_models_train_as_unsharded() -> None:
    """Units in units, uneven rows, tied parameters; construction and wrapping in turns."""
    for wrapped, plain, outputs in (
        (lambda: wrap_units(models.seeded(models.Nested)), models.Nested, 3),
        (lambda: wrap_units(models.seeded(models.OddMLP)), models.OddMLP, 1),
        (lambda: FSDP(models.seeded(partial(Grown, FSDP))), Grown, 3),
    ):
        batches = parity.regression_batches(models.DIM, outputs, steps=STEPS)
        job: Any = (parity.adamw, parity.regression_loss, batches)
        expected = parity.train_unsharded(models.seeded(plain), *job, slices=True)
        parity.assert_equal(parity.train_sharded(wrapped(), *job), expected)
    parity.assert_equal(*_language(wrap_units, tied=True))


@ranks(2)
def test_compute_dtype() -> None:
    """Computes in bf16; float32 reductions round as the unsharded sums do."""
    wrap = partial(wrap_units, compute_dtype=torch.bfloat16, fp32_reduce_scatter=True)
    ours, expected = _language(wrap, mixed=True)
    parity.assert_equal(ours, expected)


@ranks(2)
def test_gradients_are_reduced_in_the_compute_dtype() -> None:
    """Unless they are to be float32: then they have bits that bf16 has not."""
    batch = _batch(1)
    for fp32, rounded in ((False, True), (True, False)):
        model = FSDP(
            models.seeded(models.OddMLP), compute_dtype=torch.bfloat16, fp32_reduce_scatter=fp32
        )
        parity.regression_loss(model, batch).backward()
        grads = [p.grad.to_local() for p in model.parameters()]
        assert all(grad.dtype == torch.float32 for grad in grads)
        assert all(torch.equal(g, g.bfloat16().float()) for g in grads) is rounded


@ranks(2)
def test_buffers() -> None:
    def norm() -> Any:
        return nn.Sequential(nn.Linear(models.DIM, 4), nn.BatchNorm1d(4))

    model: Any = FSDP(norm(), compute_dtype=torch.bfloat16)
    buffers = dict(model[1].named_buffers())
    assert buffers["running_mean"].dtype == torch.bfloat16
    assert buffers["num_batches_tracked"].dtype == torch.int64
    model(torch.randn(6, models.DIM)).sum().backward()
    assert model[1].running_mean.any()
    full = consolidate_sharded_state_dicts(_everyones(model), model.get_shard_metadata())
    assert full["1.running_mean"].dtype == torch.float32
    assert torch.equal(full["1.running_mean"], _of_rank_0(model[1].running_mean).float())
    nested = norm()
    nested[1] = FSDP(nested[1], buffer_dtype=torch.bfloat16)
    info = FSDP(nested).get_shard_metadata()["buffer_info"]
    assert info == {"1.running_mean": "float32", "1.running_var": "float32"}
    other: Any = FSDP(norm(), compute_dtype=torch.bfloat16, buffer_dtype=torch.float32)
    assert other[1].running_mean.dtype == torch.float32
    assert "running_mean" not in str(other.get_shard_metadata()["buffer_info"])


@ranks(2)
def test_no_sync_and_clipping() -> None:
    batches = parity.regression_batches(models.DIM, 3, steps=4)
    model: Any = wrap_units(models.seeded(models.Nested))
    plain = models.seeded(models.Nested)
    with parity.CountCollectives() as counted, model.no_sync():
        for batch in batches[:3]:
            parity.regression_loss(model, parity.my_part(batch)).backward()
        assert not model.params_with_grad
    assert counted.all_gathers
    assert not counted.reduce_scatters + counted.counts["all_reduce"]
    parity.regression_loss(model, parity.my_part(batches[3])).backward()
    assert len(model.params_with_grad) == len(list(model.parameters()))
    for rank in range(2):
        for batch in batches:
            parity.regression_loss(plain, parity.my_part(batch, rank)).backward()
    for param in plain.parameters():
        param.grad /= 2
    torch.testing.assert_close(
        parity.full_grads(model), parity.full_grads(plain), rtol=1e-5, atol=1e-6
    )
    norm = model.clip_grad_norm_(0.01, groups=[[0, 1]])
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(
        parity.full_grads(model), parity.full_grads(plain), rtol=1e-5, atol=1e-8
    )


@ranks(2)
def test_no_sync_leaves_flags_as_they_were() -> None:
    model: Any = wrap_units(models.seeded(models.Nested))
    model.pairs[0].set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="mine"), model.no_sync():
        raise RuntimeError("mine")
    parity.regression_loss(model, _batch(3)).backward()
    without = {name for name, param in model.named_parameters() if param.grad is None}
    assert without == {n for n, _ in model.named_parameters() if n.startswith("pairs.0.")}


@ranks(2)
def test_divide_factors() -> None:
    batch = _batch(3)
    grads = []
    for pre, post in ((1.0, 2.0), (2.0, 4.0)):
        model: Any = wrap_units(models.seeded(models.Nested))
        model.set_gradient_divide_factors(pre, post, recursive=True)
        parity.regression_loss(model, batch).backward()
        grads.append(parity.full_grads(model))
    parity.assert_equal(grads[0], {name: grad * 4 for name, grad in grads[1].items()})
    model.set_gradient_divide_factors(1.0, 2.0, recursive=False)
    model.zero_grad()
    parity.regression_loss(model, batch).backward()
    for name, grad in parity.full_grads(model).items():
        factor = 4 if name.startswith("pairs.") else 1
        parity.assert_equal(grad * factor, grads[0][name], name)


# ---- what the documents show


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.left(x).tanh() * self.right(y)


@ranks(2)
def test_the_first_example() -> None:
    """A module of two inputs, Adam, one step; between the passes it is whole, as with ZeRO-2."""
    my_module = models.seeded(TwoInputs)
    plain = models.seeded(TwoInputs)
    x, y = (
        torch.randn(4, models.DIM, generator=torch.Generator().manual_seed(i)) for i in range(2)
    )
    model: Any = FSDP(my_module)
    optim = torch.optim.Adam(model.parameters(), lr=0.0001)
    output = model(x, y)
    assert not isinstance(model.left.weight, DTensor)
    loss = output.sum()
    loss.backward()
    assert isinstance(model.left.weight, DTensor)
    optim.step()
    expected = torch.optim.Adam(plain.parameters(), lr=0.0001)
    out = plain(x, y)
    assert torch.equal(out, output)
    out.sum().backward()
    expected.step()
    parity.assert_equal(
        parity.full_all(model.parameters()), [p.detach() for p in plain.parameters()]
    )


# ---- checkpoints of activations


@pytest.mark.parametrize("where", ["inside", "outside"])
@ranks(2)
def test_checkpoint_module(where: str) -> None:
    """The same bits, and each block runs twice."""

    def wrap(model: Any) -> nn.Module:
        for i, block in enumerate(model.blocks):
            calls.append([])
            block.norm1.register_forward_hook(lambda *_, seen=calls[-1]: seen.append(1))
            if where == "inside":
                model.blocks[i] = FSDP(checkpoint_module(block))
            else:
                model.blocks[i] = checkpoint_module(FSDP(block))
        return FSDP(model)

    calls: list[list[int]] = []
    ours, expected = _language(wrap)
    parity.assert_equal(ours, expected)
    assert [len(seen) for seen in calls] == [2 * STEPS] * 2


@ranks(2)
def test_a_checkpointed_module_goes_when_nobody_has_it() -> None:
    module = checkpoint_module(nn.Linear(models.DIM, models.DIM))
    assert module(torch.ones(2, models.DIM)).requires_grad
    with torch.no_grad():
        module(torch.ones(2, models.DIM))
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()


# ---- wrapping by a policy, on meta, in groups, late


@ranks(2)
def test_auto_wrap_policy() -> None:
    def policy(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        return recurse or isinstance(module, fsdp2_block)

    fsdp2_block = type(models.Transformer().blocks[0])
    seen: list[dict[str, Any]] = []

    def wrapper(module: nn.Module, **arguments: Any) -> nn.Module:
        seen.append(arguments)
        return FSDP(checkpoint_module(module), **arguments)

    policies: list[Any] = [policy, ModuleWrapPolicy({fsdp2_block}), TorchsPolicy({fsdp2_block})]
    for make, chosen in zip((wrapper, None, None), policies, strict=True):
        wrap = partial(
            FSDP, auto_wrap_policy=chosen, auto_wrapper_callable=make, reshard_after_forward=False
        )
        model = wrap(models.seeded(models.Transformer))
        kinds = [type(m.module).__name__ for m in model.modules() if isinstance(m, FSDP)]
        assert kinds == ["FSDPTransformer", "FSDPBlock", "FSDPBlock"]
        ours, expected = _language(wrap)
        parity.assert_equal(ours, expected)
    assert all(each["reshard_after_forward"] is False for each in seen)
    assert len(seen) == 4  # two blocks, twice


@ranks(2)
def test_modules_on_meta() -> None:
    def fill(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        for param in module.parameters():
            nn.init.constant_(param, 0.5)

    with torch.device("meta"):
        mine: Any = wrap_units(
            nn.Sequential(nn.Linear(models.DIM, 3), nn.Linear(3, 1)), param_init_fn=fill
        )
        given: Any = nn.Sequential(nn.Linear(models.DIM, 3), nn.BatchNorm1d(3))
    assert all(bool((param.to_local() == 0.5).all()) for param in mine.parameters())
    torch.manual_seed(3)
    model: Any = FSDP(given)
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(models.DIM, 3), nn.BatchNorm1d(3)).state_dict()
    found = consolidate_sharded_state_dicts(_everyones(model), model.get_shard_metadata())
    parity.assert_equal(found, dict(expected))


@ranks(4)
def test_groups_know_nothing_of_each_other() -> None:
    """Each of two groups trains as two ranks do alone."""
    model: Any = FSDP(models.seeded(models.OddMLP), sharding_groups=[[0, 2], [3, 1]])
    first = dist.get_rank() in (0, 2)
    assert (model.rank, model.world_size) == (dist.get_rank() // 2, 2)
    batch = parity.regression_batches(models.DIM, 1, steps=1)[0]
    part = parity.my_part(batch, 0 if first else 1, 2)
    loss = parity.regression_loss(model, parity.my_part(part, model.rank, 2))
    loss.backward()
    plain = models.seeded(models.OddMLP)
    for rank in range(2):
        parity.regression_loss(plain, parity.my_part(part, rank, 2)).backward()
    for (name, mine), param in zip(model.named_parameters(), plain.parameters(), strict=True):
        whole = param.grad / 2
        piece = -(-len(whole) // 2)
        rows = whole[model.rank * piece : (model.rank + 1) * piece]
        parity.assert_equal(mine.grad.to_local(), rows, name)
    norm = model.clip_grad_norm_(1.0)
    grads = [param.grad / 2 for param in plain.parameters()]
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(grads), rtol=1e-5, atol=0.0)


@ranks(2)
def test_sharding_may_come_later() -> None:
    """What is loaded before is the unwrapped model's; whoever looks for parameters gets shards."""
    full = models.seeded(models.OddMLP, seed=5).state_dict()
    model: Any = wrap_units(models.seeded(models.OddMLP), execute_sharding_on_init=False)
    assert not isinstance(model.module, fsdp2.FSDPModule)
    model.load_state_dict(full)
    assert not isinstance(model.module, fsdp2.FSDPModule)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    model.execute_sharding()
    found = consolidate_sharded_state_dicts(_everyones(model), model.get_shard_metadata())
    parity.assert_equal(found, dict(full))


@ranks(2)
def test_a_wrapper_put_inside_later() -> None:
    """torch's ``checkpoint_wrapper`` around the module: it is not sharded again."""

    def wrap(model: nn.Module) -> nn.Module:
        wrapped: Any = FSDP(model)
        wrapped._fsdp_wrapped_module = checkpoint_wrapper(wrapped._fsdp_wrapped_module)
        with wrapped.no_sync():
            wrapped.set_gradient_divide_factors(1.0, 2.0)
        return wrapped

    found, expected = ([step.loss for step in steps] for steps in _language(wrap))
    parity.assert_equal(found, expected)


# ---- what the wrapper is


@ranks(2)
def test_names_and_attributes() -> None:
    model: Any = wrap_units(models.seeded(models.Nested))
    names = [name for name, _ in models.seeded(models.Nested).named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    pairs = model.get_original_names_and_sharded_parameters()
    assert [name for name, _ in pairs] == names
    assert all(isinstance(param, DTensor) for _, param in pairs)
    assert model.first.weight is dict(pairs)["first.weight"]
    assert isinstance(model.module, models.Nested)
    assert model.pairs[0].module.inner is model.pairs[0].inner
    assert list(model.state_dict()) == names
    assert all(type(rows) is Tensor for rows in model.state_dict().values())
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is param for name, param in pairs)
    listed: Any = FSDP(nn.Sequential(nn.Linear(models.DIM, models.DIM), nn.ReLU()))
    assert isinstance(listed[1], nn.ReLU)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.no_such_thing


# ---- files


def _everyones(model: Any) -> list[dict[str, Tensor]]:
    """The state dicts of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {k: v.clone() for k, v in model.state_dict().items()})
    return found


def _of_rank_0(value: Tensor) -> Tensor:
    found = value.clone()
    dist.broadcast(found, src=0)
    return found


def _save(model: Any, optimizer: Any, folder: Path) -> Path:
    ckpt = {
        "model": model.state_dict(),
        "shard_metadata": model.get_shard_metadata(),
        "optimizer": optimizer.state_dict(),
    }
    path = folder / f"final_ckpt_rank-{model.rank}-of-{model.world_size}.pth"
    torch.save(ckpt, path)
    dist.barrier()
    return path


@ranks(2)
def test_each_rank_saves_and_resumes(tmp_path: Path) -> None:
    batches = parity.language_batches(13, steps=4)

    def steps(model: Any, optimizer: Any, some: Any) -> list[Tensor]:
        losses = []
        for batch in some:
            loss = parity.language_loss(model, parity.my_part(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    model = wrap_units(models.seeded(models.Transformer))
    optimizer = parity.adamw(model.parameters())
    steps(model, optimizer, batches[:2])
    path = _save(model, optimizer, tmp_path)
    expected = steps(model, optimizer, batches[2:])
    again = wrap_units(models.seeded(models.Transformer, seed=7))
    optimizer = parity.adamw(again.parameters())
    ckpt = torch.load(path, weights_only=True)
    assert not again.load_state_dict(ckpt["model"]).missing_keys
    optimizer.load_state_dict(ckpt["optimizer"])
    parity.assert_equal(steps(again, optimizer, batches[2:]), expected)
    parity.assert_equal(parity.full_all(again.parameters()), parity.full_all(model.parameters()))


@ranks(2)
@pytest.mark.parametrize("strategy", ["zero2", "replicated", "hybrid"])
def test_a_model_that_is_sharded_already_is_saved_and_loaded(strategy: Any) -> None:
    expected = models.seeded(models.OddMLP).state_dict()
    model = models.seeded(models.OddMLP)
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        per_copy = fsdp2.shard_model(model, {nn.Linear}, strategy=strategy).groups[0].ranks
    groups = torch.arange(2).view(-1, per_copy).tolist()
    wrapper = FSDP(model, sharding_groups=groups)
    assert wrapper.world_size == per_copy
    rows = {name: value.clone() for name, value in wrapper.state_dict().items()}
    metadata = wrapper.get_shard_metadata()
    both: list[Any] = [None, None]
    dist.all_gather_object(both, rows)
    mine = groups[dist.get_rank() // per_copy]
    full = consolidate_sharded_state_dicts([both[rank] for rank in mine], metadata)
    assert full.keys() == expected.keys()
    for name, value in expected.items():
        parity.assert_equal(full[name], value)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    wrapper.load_state_dict(rows)
    for name, value in wrapper.state_dict().items():
        parity.assert_equal(value, rows[name])


@pytest.mark.parametrize("tied", [False, True])
@ranks(2)
def test_consolidated_files_load_into_the_unwrapped_model(tied: bool, tmp_path: Path) -> None:
    model: Any = wrap_units(models.seeded(partial(models.Transformer, tied=tied)))
    optimizer = parity.adamw(model.parameters())
    batch = parity.language_batches(13, steps=1)[0]
    parity.language_loss(model, parity.my_part(batch)).backward()
    optimizer.step()
    _save(model, optimizer, tmp_path)
    prefix, suffix = str(tmp_path / "final_ckpt"), "_rank-*-of-*.pth"
    expected = dict(zip(model.state_dict(), _full(model), strict=True))
    if dist.get_rank() == 0:
        assert main(["--ckpt_prefix", prefix, "--ckpt_suffix", suffix]) == 0
        found = torch.load(f"{prefix}_consolidated.pth", weights_only=True)["model"]
        parity.assert_equal(dict(found), expected)
        plain = partial(models.Transformer, tied=tied)()
        plain.load_state_dict(found)
        parity.assert_equal(dict(plain.state_dict()), expected)
        same = found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
        assert same is tied
        full, path = consolidate_sharded_model_checkpoints(prefix, suffix, save_model=False)
        assert path is None
        parity.assert_equal(full, expected)
        assert len(list(tmp_path.iterdir())) == 3  # nothing else was left there
    dist.barrier()


def _full(model: Any) -> list[Any]:
    values = model.state_dict(keep_vars=True).values()
    return parity.full_all(v.detach() for v in values)


@ranks(2)
def test_a_wrapper_in_a_model_that_is_not_wrapped() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = FSDP(models.seeded(models.OddMLP))
            self.scale = nn.Parameter(torch.ones(2))

    outer = Outer()
    state = outer.state_dict()
    assert list(state) == [
        "scale",
        *(f"inner.{n}" for n, _ in models.seeded(models.OddMLP).named_parameters()),
    ]
    assert all(type(value.data) is Tensor for value in state.values())
    again = Outer()
    again.load_state_dict({name: value.clone() for name, value in state.items()})
    parity.assert_equal(dict(again.state_dict()), dict(state))
