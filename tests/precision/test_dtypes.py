"""Parameters of several dtypes in one group: adapters on a frozen base, quantised or not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2.core.layout.layout import SLOT_ALIGN_BYTES
from tests.common import backends, models, parity
from tests.common.cases import in_turn
from tests.common.gradients import assert_like_unsharded
from tests.common.meshes import TORCH_VERSION
from tests.common.workers import ranks

OUT = 7  # rows of a layer: uneven on 2 and on 4 ranks
RANK = 3
QUANTISED = (torch.uint8, torch.int8, torch.bool)


class AdaptedLinear(nn.Module):
    """`dequantised(base) + second @ first`: a frozen base of any dtype, and two small matrices."""

    is_unit = True

    def __init__(
        self, inputs: int, base: torch.dtype, first: torch.dtype, second: torch.dtype
    ) -> None:
        super().__init__()
        whole = torch.randn(OUT, inputs) / 3
        if not base.is_floating_point:
            whole = (whole * 20 + (60 if base == torch.uint8 else 0)).round()
        self.base = nn.Parameter(whole.to(base), requires_grad=False)
        self.first = nn.Parameter(torch.randn(RANK, inputs).to(first) / 3)
        self.second = nn.Parameter(torch.randn(OUT, RANK).to(second) / 3)
        self.bias = nn.Parameter(torch.zeros(OUT, dtype=first))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: param.dtype for name, param in self.named_parameters()}
        weight = self.base.to(x.dtype)
        if not self.base.dtype.is_floating_point:
            weight = (weight - (60 if self.base.dtype == torch.uint8 else 0)) / 20
        adapted = (x.to(self.first.dtype) @ self.first.t()).to(self.second.dtype)
        return x @ weight.t() + (adapted @ self.second.t() + self.bias).to(x.dtype)


class Adapted(nn.Module):
    """Two adapted layers, each a unit, between plain ones of the root's group."""

    def __init__(self, base: torch.dtype, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            AdaptedLinear(inputs, base, first, second) for inputs in (models.DIM, OUT)
        )
        self.head = nn.Linear(OUT, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def build(
    base: torch.dtype, first: torch.dtype = torch.float32, second: torch.dtype = torch.float32
) -> nn.Module:
    return models.seeded(partial(Adapted, base, first, second))


batches = partial(parity.regression_batches, models.DIM, 2, steps=3)


def _torch_takes(base: torch.dtype) -> bool:
    """torch's `fully_shard` fails on integer parameters before 2.13; unsharded is the measure."""
    return base.is_floating_point or TORCH_VERSION >= (2, 13)


def _train(make: Any, torch_too: bool) -> list[parity.Step]:
    """Ours, the same bits as torch's and as one process that takes the ranks' slices in turn.

    On two ranks only: a sum of four bf16 values depends on its order.
    """

    def run(api: Any) -> list[parity.Step]:
        model = parity.shard(api, make(), reshard_after_forward=True)
        return parity.train_sharded(model, parity.adamw, parity.regression_loss, batches())

    steps = parity.same_as_torch(run) if torch_too else run(parity.OURS)
    plain = parity.train_unsharded(
        make(), parity.adamw, parity.regression_loss, batches(), slices=True
    )
    parity.assert_equal(steps, plain, "unsharded, by slices")
    return steps


BASES: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    f"{base}, {first}, {second}": (base, first, second)
    for base, first, second in (
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.bfloat16),
        *((base, torch.float32, torch.float32) for base in QUANTISED),
        (torch.int8, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.uint8, torch.float32, torch.bfloat16),
    )
}
"""Dtypes of a base and of its adapters' two matrices."""


@ranks(2)
def test_adapters_on_a_frozen_base() -> None:
    """Only the adapters train; the base is neither changed nor upcast on the way.

    Each dtype is reduced on its own. torch's FSDP2 wants one trainable dtype a group.
    """

    def check(dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> None:
        base, first, second = dtypes
        steps = _train(partial(build, *dtypes), first == second and _torch_takes(base))
        before = dict(build(*dtypes).named_parameters())
        for name, grad in steps[-1].grads.items():
            assert (grad is None) == name.endswith(".base"), name
            assert grad is None or grad.dtype == before[name].dtype, name
        for name, value in steps[-1].params.items():
            assert value.dtype == before[name].dtype, name
            assert torch.equal(value, before[name]) == name.endswith(".base"), name

    in_turn(BASES, check)


@ranks(2)
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, *QUANTISED], ids=str)
def test_base_is_gathered_as_it_is(base: torch.dtype) -> None:
    """Bytes of the shard and of the all-gather are those of the parameters' own dtypes."""
    model = parity.shard(parity.OURS, build(base), reshard_after_forward=True)
    layer: Any = model.layers[0]
    (report,) = (r for r in fsdp2.report(layer).groups if r.name)
    numel = {
        name: -(-p.shape[0] // 2) * p[0].numel()
        for name, p in build(base).layers[0].named_parameters()
    }
    payload = sum(n * (base.itemsize if name == "base" else 4) for name, n in numel.items())
    assert 0 <= report.shard_bytes - payload < 2 * SLOT_ALIGN_BYTES, "alignment of two segments"
    model(parity.my_part(batches()[0])[0])
    assert layer.seen["base"] == base
    assert layer.base.to_local().dtype == base
    model = parity.shard(parity.OURS, build(base), mixed=True)
    model(parity.my_part(batches()[0])[0])
    expected = torch.bfloat16 if base.is_floating_point else base
    assert model.layers[0].seen == {
        "base": expected,
        "first": torch.bfloat16,
        "second": torch.bfloat16,
        "bias": torch.bfloat16,
    }
    assert model.layers[0].first.dtype == torch.float32


OTHERS = [torch.bool, torch.int32, torch.int64, torch.float64]
if not backends.known(backends.pretended()).coalesces:  # gloo, which stands in, coalesces none
    OTHERS.append(torch.float8_e4m3fn)


@ranks(1, 2, 4)
def test_frozen_parameters_of_other_dtypes() -> None:
    """Every rank sees the whole parameter, bit by bit."""

    def check(dtype: torch.dtype) -> None:
        model = nn.Linear(models.DIM, 5)
        whole = torch.arange(21).reshape(7, 3).to(dtype)
        model.extra = nn.Parameter(whole.clone(), requires_grad=False)
        fsdp2.fully_shard(model, mesh=parity.world_mesh())
        seen = []
        model.register_forward_pre_hook(lambda m, _: seen.append(m.extra.clone()))
        model(torch.randn(2, models.DIM)).sum().backward()
        assert seen[0].dtype == dtype
        assert torch.equal(seen[0].view(torch.uint8), whole.view(torch.uint8))
        model.reshard()
        local: Any = model.extra
        rows = whole.chunk(dist.get_world_size())[dist.get_rank()]
        assert local.to_local().dtype == dtype
        assert torch.equal(local.to_local().view(torch.uint8), rows.view(torch.uint8))

    in_turn({str(dtype): dtype for dtype in OTHERS}, check)


class _Branches(nn.Module):
    """One group of three adapters of different dtypes; `active` says which are used."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float64)
        self.frozen = nn.Parameter(
            torch.randn(5, models.DIM).to(torch.bfloat16), requires_grad=False
        )
        self.weights = nn.ParameterList(
            torch.randn(5, models.DIM).to(dtype) / 3 for dtype in dtypes
        )
        self.active: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.frozen.float().t()
        for i in self.active:
            y = y + (x.to(self.weights[i].dtype) @ self.weights[i].t()).float()
        return y


@ranks(2)
def test_ranks_that_use_parameters_of_different_dtypes() -> None:
    """They run the same collectives; each gets its rows of what any has used (I10)."""
    batch = parity.regression_batches(models.DIM, 5, steps=1)[0]
    rank = dist.get_rank()
    expected = []
    for other in range(2):
        plain = models.seeded(_Branches)
        plain.active = (other,)
        parity.regression_loss(plain, parity.my_part(batch, other)).backward()
        expected.append(plain.weights[other].grad / 2)
    model = models.seeded(_Branches)
    fsdp2.fully_shard(model, mesh=parity.world_mesh())
    model.active = (rank,)
    with parity.CountCollectives() as counted:
        parity.regression_loss(model, parity.my_part(batch)).backward()
    assert counted.reduce_scatters == 3
    for other in range(2):
        gradient: Any = model.weights[other].grad
        rows = expected[other].tensor_split([3])[rank]
        assert torch.equal(gradient.to_local(), rows)
    assert model.weights[2].grad is None


@ranks(2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=str)
def test_unused_parameters_with_accumulation(reduce_dtype: torch.dtype | None) -> None:
    """Each microbatch uses other dtypes; the group is reduced once a dtype, at the sync: all."""
    used = [(0,), (1,), (0, 1)]
    data = parity.regression_batches(models.DIM, 5, steps=len(used))
    model = models.seeded(_Branches)
    policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    fsdp2.fully_shard(model, mesh=parity.world_mesh(), mp_policy=policy, reshard_after_forward=True)
    for i, batch in enumerate(data):
        model.active = used[i]
        model.set_requires_gradient_sync(i == len(used) - 1)
        with parity.CountCollectives() as counted:
            parity.regression_loss(model, parity.my_part(batch)).backward()
        assert counted.reduce_scatters == (3 if i == len(used) - 1 else 0)

    def compute(plain: Any, rank: int) -> None:
        for i, batch in enumerate(data):
            plain.active = used[i]
            parity.regression_loss(plain, parity.my_part(batch, rank)).backward()

    grads = parity.full_grads(model)
    assert grads["weights.2"] is None
    assert grads["frozen"] is None
    assert {n: g.dtype for n, g in grads.items() if g is not None} == {
        "weights.0": torch.float32,
        "weights.1": torch.bfloat16,
    }
    if reduce_dtype is None:
        assert_like_unsharded(grads, models.seeded(_Branches), compute)
    else:  # bf16 gradients are summed in fp32: closer to the truth than the unsharded bf16 sum
        wide = models.seeded(_Branches).float()
        total = []
        for rank in range(2):
            wide.zero_grad()
            compute(wide, rank)
            total.append(wide.weights[0].grad.clone())
        torch.testing.assert_close(grads["weights.0"], sum(total) / 2, rtol=2**-7, atol=2**-7)
