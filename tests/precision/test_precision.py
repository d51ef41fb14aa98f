"""Mixed precision: dtypes of compute, reduction, gradients and outputs, unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from tests.common import meshes, models, parity
from tests.common.backends import packs
from tests.common.combinations import each_once
from tests.common.running import TORCHS_TAKES_DATACLASSES
from tests.common.workers import ranks

BF16, FP16, FP32_, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OWN_DTYPE = meshes.TORCH_VERSION >= (
    2,
    15,
)  # torch's reduce_dtype=None then means the parameter's dtype

# Two roundings to the dtype for a sum over ranks, relative to gradients of up to 1.
ROUNDED = {BF16: parity.Tolerance(2**-7, 2**-8), FP16: parity.Tolerance(2**-10, 2**-11)}


def _policy(api: Any, param: Any, reduce: Any, *, own: torch.dtype = FP32_, **more: Any) -> Any:
    """A policy; older torch is told the dtype that `reduce_dtype=None` means to us."""
    if reduce is None and api is parity.TORCH and not OWN_DTYPE:
        reduce = own
    return api.MixedPrecisionPolicy(param, reduce, **more)


def _sync_last(model: Any, number: int, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def _same(scenario: Callable[[Any], Any]) -> Any:
    """As torch: to the bit on one and two ranks; on four, a sum's order may differ."""
    return meshes.like_torch(
        scenario, parity.REORDERED_MIXED if dist.get_world_size() > 2 else None
    )


# -- policies -------------------------------------------------------------------------------------

POLICIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bf16, fp32": (BF16, FP32_, {}),
    "bf16": (BF16, None, {}),
    "bf16 all through": (BF16, BF16, {}),
    "bf16, fp32 out": (BF16, None, {"output_dtype": FP32_}),
    "reduce bf16": (None, BF16, {}),
    "reduce fp64": (None, FP64, {}),
    "fp64, fp32": (FP64, FP32_, {}),
    "fp16, fp32": (FP16, FP32_, {}),
    "fp16 all through": (FP16, FP16, {}),
}


@ranks(2, extended=(1,))
@pytest.mark.parametrize("name", POLICIES)
def test_policies(name: str) -> None:
    param, reduce, more = POLICIES[name]
    steps = meshes.micro_batches(models.DIM, 3, micro=2)

    def scenario(api: Any) -> Any:
        policy, root = _policy(api, param, reduce), _policy(api, param, reduce, **more)
        model = models.seeded(partial(models.MLP, out=3))
        parity.shard(api, model, mp_policy=policy, root={"mp_policy": root})
        return meshes.train_micro(model, steps, before=_sync_last)

    # torch rounds to the reduce dtype where nothing is communicated, ours does not. And since 2.15
    # it rounds what a backward adds to sums kept without sync, ours (as 2.13) only the new sum.
    alone = dist.get_world_size() == 1 and reduce in ROUNDED
    adds = OWN_DTYPE and reduce is not None and reduce not in (FP64, param) and param != BF16
    if alone or adds:
        ours, torchs = scenario(parity.OURS), scenario(parity.TORCH)
        parity.assert_close(
            ours[0].grads, torchs[0].grads, ROUNDED.get(reduce, parity.FP32), "torch"
        )
    else:
        ours = _same(scenario)
    assert all(grad.dtype == FP32_ for step in ours for grad in step.grads.values())


@packs
@ranks(1, 2)
@pytest.mark.parametrize("own", [FP32_, BF16, FP64], ids=str)
@pytest.mark.parametrize("param", [None, BF16], ids=str)
def test_reduction_is_in_the_parameters_own_dtype_by_default(param: Any, own: Any) -> None:
    """Whatever it computes in. The hook sees the tensors that were reduced."""
    seen: list[torch.dtype] = []

    def scenario(api: Any) -> Any:
        model: Any = models.seeded(partial(nn.Linear, models.DIM, 4)).to(own)
        api.fully_shard(
            model, mesh=parity.world_mesh(), mp_policy=_policy(api, param, None, own=own)
        )
        model.set_all_reduce_hook(lambda flat: seen.append(flat.dtype))
        inputs, targets = parity.my_part(parity.regression_batches(models.DIM, 4, steps=1)[0])
        parity.regression_loss(model, (inputs.to(own), targets)).backward()
        return parity.full_grads(model)

    grads = _same(scenario)
    assert seen == [own, own]
    assert {grad.dtype for grad in grads.values()} == {own}


# -- different policies in one model --------------------------------------------------------------


@ranks(1, 2)
def test_other_policies_for_nested_units() -> None:
    """An fp32 unit inside a bf16 one, and inside an fp32 one: each casts what it gets."""
    batches = meshes.micro_batches(models.DIM, 3)

    def scenario(api: Any) -> Any:
        model = models.seeded(models.Nested)
        for pair, dtype in zip(model.pairs, (BF16, FP32_), strict=True):
            inner = _policy(api, FP32_, FP32_, output_dtype=dtype)
            api.fully_shard(pair.inner, mesh=parity.world_mesh(), mp_policy=inner)
            policy = _policy(api, dtype, FP32_, output_dtype=BF16)
            api.fully_shard(pair, mesh=parity.world_mesh(), mp_policy=policy)
        api.fully_shard(model, mesh=parity.world_mesh(), mp_policy=_policy(api, BF16, None))
        return meshes.train_micro(model, batches)

    _same(scenario)


@ranks(1, 2)
@each_once(mode=["tuple", "dict", "dataclass"], cast=[True, False])
def test_casts_between_units_that_pass_containers(mode: str, cast: bool) -> None:
    batches = meshes.micro_batches(models.DIM, 2)

    def scenario(api: Any, mode: str = mode) -> Any:
        policy = _policy(api, BF16, None, cast_forward_inputs=cast, output_dtype=BF16)
        model = parity.shard(api, models.seeded(partial(models.Forked, mode)), mp_policy=policy)

        def loss(model: nn.Module, part: Any) -> Tensor:
            return parity.regression_loss(model, (part[0].bfloat16(), part[1]))

        return meshes.train_micro(model, batches, loss=loss)

    torch_too = mode != "dataclass" or TORCHS_TAKES_DATACLASSES
    ours = _same(scenario) if torch_too else scenario(parity.OURS)
    parity.assert_equal(ours, scenario(parity.OURS, "tuple"), "whatever the container")


@ranks(2)
def test_uncast_inputs_meet_cast_parameters() -> None:
    """Without input casts the user is to cast: an fp32 input to a bf16 layer is an error."""
    policy = parity.OURS.MixedPrecisionPolicy(BF16, cast_forward_inputs=False)
    model: Any = parity.shard(parity.OURS, models.seeded(models.MLP), mp_policy=policy)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.ones(1, models.DIM))
    model.reset_iter_state()
    assert model(torch.ones(1, models.DIM, dtype=BF16)).dtype == BF16


# -- exceptions for single parameters -------------------------------------------------------------


class _Normed(nn.Module):
    """A linear and a norm, which notes the dtypes that it computes in."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, models.DIM)
        self.norm = nn.LayerNorm(models.DIM)
        self.seen: tuple[torch.dtype, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        self.seen = (self.linear.weight.dtype, norm.weight.dtype)
        x = self.linear(x.to(self.linear.weight.dtype))
        y = nn.functional.layer_norm(x.to(norm.weight.dtype), (models.DIM,), norm.weight, norm.bias)
        return torch.tanh(y).to(x.dtype)


def _two_normed() -> nn.Module:
    return nn.Sequential(_Normed(), _Normed(), nn.Linear(models.DIM, 3))


def _loss_in_bf16(plain: nn.Module, part: Any) -> Tensor:
    """The loss of a plain fp32 model with parameters cast through autograd, but for norms."""
    named = plain.named_parameters()
    cast = {name: param if "norm" in name else param.to(BF16) for name, param in named}
    inputs, targets = part
    output = functional_call(plain, cast, inputs.to(BF16))
    return (output.float() - targets).square().mean()


def _overridden(api: Any, model: nn.Module, reduce: Any) -> Any:
    kept = {p for n, p in model.named_parameters() if "norm" in n}

    def override(param: nn.Parameter) -> torch.dtype | None:
        return param.dtype if param in kept else None

    policy = _policy(api, BF16, reduce, param_dtype_override_fn=override)
    return parity.shard(api, model, mp_policy=policy)


@ranks(1, 2)
@pytest.mark.parametrize("reduce", [None, FP32_, BF16], ids=str)
def test_param_dtype_override(reduce: Any) -> None:
    batches = meshes.micro_batches(models.DIM, 3, micro=2)

    def scenario(api: Any) -> Any:
        model = _overridden(api, models.seeded(_two_normed), reduce)
        steps = meshes.train_micro(model, batches, before=_sync_last)
        assert model[0].seen == (BF16, FP32_)
        return steps

    ours = scenario(parity.OURS)
    if OWN_DTYPE and reduce != BF16:
        parity.assert_equal(ours, scenario(parity.TORCH), "torch")
    elif OWN_DTYPE:  # it rounds the norms' fp32 gradients before it adds them, ours only the sum
        parity.assert_close(ours[0].grads, scenario(parity.TORCH)[0].grads, ROUNDED[BF16], "torch")
    plain = models.seeded(_two_normed)
    size = dist.get_world_size()
    for batch in batches[0]:
        for rank in range(size):
            part = parity.my_part(batch, rank, size)
            (_loss_in_bf16(plain, part) / size).backward()
    parity.assert_close(ours[0].grads, parity.full_grads(plain), ROUNDED[BF16], "plain")


@ranks(2)
def test_override_is_asked_once_for_each_parameter() -> None:
    model = models.seeded(partial(models.Transformer, blocks=1, tied=True))
    asked: list[nn.Parameter] = []
    policy = parity.OURS.MixedPrecisionPolicy(
        BF16, param_dtype_override_fn=lambda param: asked.append(param)
    )
    params = list(model.parameters())
    parity.shard(parity.OURS, model, mp_policy=policy)
    model(parity.language_batches(13, steps=1)[0]).float().sum().backward()
    assert len(asked) == len(params)
    assert set(asked) == set(params)


# -- the gradient's dtype -------------------------------------------------------------------------


@ranks(1, 2)
@pytest.mark.parametrize(
    ("own", "grad"), [(FP32_, BF16), (BF16, FP32_), (FP32_, FP64)], ids=lambda dtype: str(dtype)
)
@pytest.mark.parametrize("param", [None, BF16], ids=str)
def test_grad_dtype_that_was_set_before_sharding(param: Any, own: Any, grad: Any) -> None:
    """`.grad` is of that dtype, and the reduction too; backwards add up in it."""
    batch = parity.my_part(parity.regression_batches(models.DIM, 4, steps=1)[0])

    def run(api: Any, set_dtype: bool) -> dict[str, Tensor | None]:
        layer: Any = models.seeded(partial(nn.Linear, models.DIM, 4)).to(own)
        if set_dtype:
            for p in layer.parameters():
                p.grad_dtype = grad
        policy = api.MixedPrecisionPolicy(param, None if api is parity.TORCH or set_dtype else grad)
        api.fully_shard(layer, mesh=parity.world_mesh(), mp_policy=policy)
        for _ in range(2):
            parity.regression_loss(layer, (batch[0].to(own), batch[1])).backward()
        if set_dtype:
            assert all(p.grad_dtype == grad for p in layer.parameters())
        return parity.full_grads(layer)

    ours = run(parity.OURS, True)
    assert {g.dtype for g in ours.values()} == {grad}
    if OWN_DTYPE:
        parity.assert_equal(ours, run(parity.TORCH, True), "torch")
    low = BF16 if BF16 in (own, grad, param) else None
    expected = {name: g.to(grad) for name, g in run(parity.OURS, False).items()}
    parity.assert_close(
        ours, expected, ROUNDED[low] if low else parity.FP32, "reduced in that dtype"
    )


# -- recasting ------------------------------------------------------------------------------------


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [BF16, FP64], ids=str)
@pytest.mark.parametrize("when", ["before", "after"])
def test_recast_after_sharding(when: str, dtype: torch.dtype) -> None:
    """Before the first forward, or after an iteration, where torch's FSDP2 breaks."""
    first, second = (
        parity.my_part(batch) for batch in parity.regression_batches(models.DIM, 3, steps=2)
    )

    def loss(model: nn.Module, part: Any) -> Tensor:
        return parity.regression_loss(model, (part[0].to(dtype), part[1]))

    model = parity.shard(parity.OURS, models.seeded(models.Nested))
    fresh = parity.shard(parity.OURS, models.seeded(models.Nested).to(dtype))
    if when == "after":
        parity.regression_loss(model, first).backward()
        model.zero_grad()
    model.to(dtype)
    for _ in range(2):
        loss(model, second).backward()
        loss(fresh, second).backward()
    parity.assert_equal(parity.full_params(model), parity.full_params(fresh), "parameters")
    parity.assert_equal(parity.full_grads(model), parity.full_grads(fresh), "gradients")
    assert {grad.dtype for grad in parity.full_grads(model).values()} == {dtype}
