"""All-gather extensions: like torch's FSDP2, like no sharding, and what torch has not."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2.core.modules.registry import record_of
from tests.common import meshes, models, parity
from tests.common import tensors as common_tensors
from tests.common.backends import packs
from tests.common.errors import raises
from tests.common.offloading import forced_offload
from tests.common.workers import ranks

KINDS = [
    common_tensors.Bf16Weight,
    common_tensors.ReleasingWeight,
    common_tensors.Scaled,
    common_tensors.Aliased,
    common_tensors.Twofold,
]
EVEN = (8, 16, 8)
ODD = (7, 3, 5, 1)


def _build(kind: type, dims: tuple[int, ...] = EVEN, **options: Any) -> nn.Module:
    return common_tensors.extend(models.seeded(partial(models.OddMLP, dims)), kind, **options)


def _steps(model: nn.Module, outputs: int, steps: int = 4, lr: float = 0.05) -> list[Any]:
    """Trains, and returns this rank's losses, gradients and rows after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    found = []
    for batch in parity.regression_batches(models.DIM, outputs, steps=steps):
        loss = parity.regression_loss(model, parity.my_part(batch))
        loss.backward()
        grads = [common_tensors.plain(param.grad) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found.append(
            [loss.detach(), grads, [common_tensors.plain(param) for param in model.parameters()]]
        )
    return found


def _same_as_torch(build: Any, outputs: int, **arguments: Any) -> nn.Module:
    """Trains with both; returns our model."""
    runs = {}
    for api in (parity.OURS, parity.TORCH):
        model = parity.shard(api, build(), **arguments)
        runs[api] = _steps(model, outputs)
        if api is parity.OURS:
            ours = model
    if dist.get_world_size() == 2:
        parity.assert_equal(runs[parity.OURS], runs[parity.TORCH], "torch")
    else:
        tolerance = parity.REORDERED_MIXED if arguments.get("mixed") else parity.REORDERED_FP32
        parity.assert_close(runs[parity.OURS], runs[parity.TORCH], tolerance, "torch")
    return ours


@pytest.mark.parametrize("mixed", [pytest.param(False, id="fp32"), pytest.param(True, id="mixed")])
@pytest.mark.parametrize("kind", KINDS)
@ranks(2, extended=(4,))
def test_trains_like_torch(kind: type, mixed: bool) -> None:
    """What travels as it is computes in fp32, whatever the policy."""
    mixed = mixed and kind not in (common_tensors.Aliased, common_tensors.Twofold)
    _same_as_torch(partial(_build, kind), EVEN[-1], mixed=mixed)


@ranks(2, extended=(4,))
def test_uneven_rows() -> None:
    """torch takes padded inputs of the shard's shape only: not the scales of `Scaled`."""
    _same_as_torch(partial(_build, common_tensors.Bf16Weight, ODD), ODD[-1])
    _steps(parity.shard(parity.OURS, _build(common_tensors.Scaled, ODD)), ODD[-1])


@ranks(2, extended=(4,))
def test_hooks_are_called_like_torchs() -> None:
    heard = {}
    for api in (parity.OURS, parity.TORCH):
        model = parity.shard(api, _build(common_tensors.Bf16Weight, ODD))
        common_tensors.CALLS.clear()
        _steps(model, ODD[-1], steps=2)
        heard[api] = sorted(map(repr, common_tensors.CALLS))
    assert heard[parity.OURS] == heard[parity.TORCH]
    posts = [call for call in heard[parity.OURS] if call.startswith("('post'")]
    assert len([call for call in posts if "False" in call]) == len(ODD)  # the first of each


@ranks(2)
def test_one_collective_of_bytes_beside_the_plain_ones() -> None:
    for api, gathers in ((parity.OURS, 2), (parity.TORCH, 1)):
        layer = parity.shard(
            api,
            models.seeded(lambda: common_tensors.extend(nn.Linear(8, 8), common_tensors.Scaled)),
        )
        layer(torch.zeros(1, 8))
        layer.reshard()
        with parity.CountCollectives() as counted:
            layer.unshard()
        assert counted.all_gathers == gathers  # ours: the weight's bytes; the bias as it is
    weight_bytes = 8 * 8 + 8 * 4
    layer = fsdp2.fully_shard(
        models.seeded(
            lambda: common_tensors.extend(nn.Linear(8, 8, bias=False), common_tensors.Scaled)
        )
    )
    layer(torch.zeros(1, 8))
    layer.reshard()
    with parity.CountCollectives() as counted:
        layer.unshard()
    assert counted.all_gathers == 1
    assert counted.elements["all_gather"] == weight_bytes + weight_bytes // 2


# ---- shards


@packs
@ranks(2, extended=(4,))
def test_shards_are_of_the_subclass() -> None:
    model = parity.shard(parity.OURS, _build(common_tensors.Bf16Weight, ODD))
    whole = dict(models.seeded(partial(models.OddMLP, ODD)).named_parameters())
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert param.shape == whole[name].shape
        assert param.stride() == whole[name].stride()
        assert "_data" not in param.__dict__  # the whole tensor is not kept alive
        local = param.to_local()
        assert (type(local) is common_tensors.Bf16Weight) == (param.ndim == 2)
        rows = whole[name].detach().chunk(size)
        mine = rows[rank] if rank < len(rows) else whole[name].detach()[:0]
        parity.assert_equal(common_tensors.plain(param), mine)
    kinds = {report.transport for report in fsdp2.report(model).groups if report.num_params}
    assert kinds == {"extension+packed"}


@ranks(2)
def test_meta_init() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    common_tensors.extend(model, common_tensors.Bf16Weight)
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    with pytest.raises(fsdp2.errors.ShardingStateError, match=r"'0.weight' is still on the meta"):
        model(torch.ones(2, 8))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
    assert type(model[0].weight.to_local()) is common_tensors.Bf16Weight
    parity.assert_equal(
        model(torch.ones(2, 8)).detach(), torch.full((2, 8), (8 * 0.25 + 0.25) * 2 + 0.25)
    )


@ranks(2)
def test_extended_after_sharding() -> None:
    """Hooks are read from the local tensor at first use, and again when it was replaced."""
    torch.manual_seed(0)
    layer = fsdp2.fully_shard(nn.Linear(8, 8))
    expected = layer(torch.ones(1, 8)).detach()
    layer.reshard()
    state = layer.state_dict()
    local = common_tensors.Bf16Weight(state["weight"].to_local().clone())
    state["weight"] = DTensor.from_local(local, parity.world_mesh(), [Shard(0)])
    layer.load_state_dict(state, assign=True)
    common_tensors.CALLS.clear()
    output = layer(torch.ones(1, 8))
    assert common_tensors.CALLS
    assert type(layer.weight.data) is torch.Tensor  # gathered
    parity.assert_close(output.detach(), expected, parity.REORDERED_MIXED)
    layer.reshard()
    plain_state = {name: value.clone() for name, value in layer.state_dict().items()}
    rows = common_tensors.plain(plain_state["weight"])
    assert rows is not None
    plain_state["weight"] = DTensor.from_local(rows, parity.world_mesh(), [Shard(0)])
    layer.load_state_dict(plain_state, assign=True)
    common_tensors.CALLS.clear()
    parity.assert_equal(layer(torch.ones(1, 8)).detach(), expected)
    assert not common_tensors.CALLS


@ranks(2)
def test_to_dtype_and_load_state_dict() -> None:
    torch.manual_seed(0)
    layer = fsdp2.fully_shard(common_tensors.extend(nn.Linear(8, 8), common_tensors.Scaled))
    x = torch.randn(2, 8)
    layer(x).sum().backward()
    layer.reshard()
    layer.double()
    assert type(layer.weight.to_local()) is common_tensors.Scaled
    assert layer(x.double()).dtype == torch.float64
    layer.float()
    before = layer(x).detach()
    layer.reshard()
    saved = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        for param in layer.parameters():
            param.mul_(3)
    assert not torch.equal(layer(x), before)
    layer.reshard()
    layer.load_state_dict(saved)
    assert type(layer.weight.to_local()) is common_tensors.Scaled
    parity.assert_equal(layer(x).detach(), before)


# ---- memory and versions


@pytest.mark.parametrize("kind", [*KINDS, common_tensors.Careless])
@ranks(2)
def test_memory_comes_and_goes_in_place(kind: type) -> None:
    layer = fsdp2.fully_shard(
        models.seeded(lambda: common_tensors.extend(nn.Linear(8, 8, bias=False), kind))
    )
    x = torch.ones(1, 8, requires_grad=True)
    output = layer(x)
    layer.unshard()
    weight = layer.weight
    version = weight._version
    assert (type(weight.detach()) is common_tensors.Twofold) == (kind is common_tensors.Twofold)
    saved = common_tensors.plain(weight)
    storages = [t.untyped_storage() for t in _tensors_of(layer)]
    storages.append(getattr(weight, "_data", weight).untyped_storage())
    assert storages[-1].size() > 0
    layer.reshard()
    assert [storage.size() for storage in storages] == [0] * len(storages)
    layer.unshard()
    assert layer.weight is weight
    assert weight._version == version
    parity.assert_equal(common_tensors.plain(weight), saved)
    output.sum().backward()  # autograd saved the weight for the input's gradient
    parity.assert_equal(x.grad, torch.ones(1, 8) @ saved)


def _tensors_of(layer: nn.Module) -> list[torch.Tensor]:
    (group,) = record_of(layer).unit.own_groups  # type: ignore[union-attr]  # it is sharded
    assert group.bound.extension is not None
    return [output for member in group.bound.extension._members for output in member._outputs]


@ranks(2)
def test_outputs_are_released_on_request() -> None:
    for kind, kept in ((common_tensors.Bf16Weight, True), (common_tensors.ReleasingWeight, False)):
        layer = fsdp2.fully_shard(common_tensors.extend(nn.Linear(8, 8), kind))
        layer.unshard()
        for _ in range(2):
            sizes = [output.untyped_storage().size() for output in _tensors_of(layer)]
            assert all(bool(size) == kept for size in sizes)
            layer.reshard()
            layer.unshard()


# ---- other meshes, frozen weights, offload


class Lora(nn.Module):
    """A frozen quantised weight, and a trainable product of two thin ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False)
        self.base.weight = nn.Parameter(
            common_tensors.Quantized.of(self.base.weight.detach()), False
        )
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        self.is_unit = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("mixed", [pytest.param(False, id="fp32"), pytest.param(True, id="mixed")])
@ranks(2, extended=(4,))
def test_frozen_quantised_weights_with_lora(mixed: bool) -> None:
    def build() -> nn.Module:
        return models.seeded(lambda: nn.Sequential(Lora(), nn.Tanh(), Lora()))

    runs = {}
    for api in (parity.OURS, parity.TORCH):
        model = parity.shard(api, build(), mixed=mixed)
        trained = nn.ParameterList(p for p in model.parameters() if p.requires_grad)
        assert len(trained) == 4
        optimizer = torch.optim.SGD(trained, lr=0.05)
        losses = []
        for batch in parity.regression_batches(8, 8, steps=4):
            loss = parity.regression_loss(model, parity.my_part(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        runs[api] = [losses, [common_tensors.plain(param) for param in trained]]
        bases = [layer.base.weight for layer in (model[0], model[2])]
        assert all(
            type(base.to_local()) is common_tensors.Quantized and base.grad is None
            for base in bases
        )
    if dist.get_world_size() == 2:
        parity.assert_equal(runs[parity.OURS], runs[parity.TORCH])
    else:
        parity.assert_close(runs[parity.OURS], runs[parity.TORCH], parity.REORDERED_MIXED)


@ranks(4)
def test_hsdp_and_tensor_parallel() -> None:
    mesh = meshes.mesh("outer", "inner", shape=(2, 2))
    _same_as_torch(partial(_build, common_tensors.Bf16Weight), EVEN[-1], mesh=mesh)

    def build() -> nn.Module:
        """tp ranks hold rows of the weights; both see all of the input and of the output."""
        return nn.Sequential(RowsOfTp(mesh["inner"]), RowsOfTp(mesh["inner"]))

    _same_as_torch(build, models.DIM, mesh=mesh["outer"])


class RowsOfTp(nn.Module):
    """A linear layer whose weight is a DTensor over an extended tensor."""

    is_unit = True

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(models.DIM, models.DIM, generator=generator) / 4
        local = common_tensors.Bf16Weight(whole.chunk(mesh.size())[mesh.get_local_rank()].clone())
        self.mesh = mesh
        self.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = DTensor.from_local(x, self.mesh, run_check=False)
        return nn.functional.linear(x, self.weight).full_tensor()


@ranks(2)
def test_offloaded_shards_are_copied_before_the_hook() -> None:
    """On a CPU mesh there is nothing to offload; here it is made to believe that there is."""
    expected = _steps(parity.shard(parity.OURS, _build(common_tensors.Scaled)), EVEN[-1])
    with forced_offload():
        policy = fsdp2.CPUOffloadPolicy(pin_memory=False)
        model = parity.shard(parity.OURS, _build(common_tensors.Scaled), offload_policy=policy)
    parity.assert_equal(_steps(model, EVEN[-1]), expected)


# ---- mistakes


@ranks(2, extended=(4,))
def test_unpadded_inputs_raise_on_all_ranks() -> None:
    model = parity.shard(
        parity.OURS,
        common_tensors.extend(nn.Sequential(nn.Linear(8, 5)), common_tensors.Bf16Weight, pad=False),
    )
    for _ in range(2):
        with raises("hooks-differ-over-ranks") as error:
            model(torch.ones(1, 8))
        assert "parameter '0.weight'" in str(error.value)
        model.reset_iter_state()


@ranks(2)
def test_a_hook_that_fails_on_one_rank_raises_on_all() -> None:
    model = parity.shard(
        parity.OURS,
        common_tensors.extend(nn.Sequential(nn.Linear(8, 8)), common_tensors.Bf16Weight),
    )
    local = model[0].weight._local_tensor
    local._options = {"fails": dist.get_rank() == 1}
    own = pytest.raises(RuntimeError, match="the hook failed")
    with own if dist.get_rank() == 1 else raises("hooks-failed-elsewhere") as error:
        model(torch.ones(1, 8))
    assert dist.get_rank() == 1 or "'0.weight' failed on ranks [1]" in str(error.value)
    model.set_requires_gradient_sync(False)  # there is no gathered parameter yet
    model.reset_iter_state()
    local._options = {}
    model(torch.ones(1, 8)).sum().backward()
    assert model[0].weight.grad is None
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 8)).sum().backward()
    assert common_tensors.plain(model[0].weight.grad).eq(2).all()


class Changing(common_tensors.Aliased):
    """Returns other shapes from the second call on."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        common_tensors.CALLS.append(("pre", None))
        return (self._data if len(common_tensors.CALLS) < 2 else self._data[:1],), ("metadata", 0)


class NoTuple(common_tensors.Aliased):
    def fsdp_post_all_gather(self, *_: Any, **__: Any) -> Any:
        return None


@ranks(2)
def test_hooks_that_return_something_else() -> None:
    common_tensors.CALLS.clear()
    layer = fsdp2.fully_shard(common_tensors.extend(nn.Linear(8, 8), Changing))
    layer(torch.ones(1, 8))
    layer.reshard()
    with raises("hooks-changing"):
        layer(torch.ones(1, 8))
    layer = fsdp2.fully_shard(common_tensors.extend(nn.Linear(8, 8), NoTuple))
    with pytest.raises(TypeError, match=r"fsdp_post_all_gather of parameter 'weight' must return"):
        layer(torch.ones(1, 8))


@ranks(2)
def test_hooks_that_nemo_puts_on_a_shard() -> None:
    """So that one parameter of a unit is gathered in a dtype of its own.

    nemo_automodel/components/distributed/fsdp2_extensions/compute_dtype.py of NVIDIA-NeMo/Automodel
    at 15ac53072a5cb81c516ff2c47441c0281320fc88 does.
    """

    def before(local: Any, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        return (local,), local.dtype

    def after(local: Any, outputs: Any, dtype: Any, *_: Any, out: Any = None) -> Any:
        assert dtype == torch.float32
        return None if out is not None else (outputs[0].view(4, 4), outputs)

    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    model: Any = fsdp2.fully_shard(nn.Linear(4, 4), mp_policy=policy)
    for param in model._get_fsdp_state()._fsdp_param_group.fsdp_params:
        assert param._module_info.module is model
        if param._module_info.param_name == "weight":
            local = param._sharded_local_tensor
            local.fsdp_pre_all_gather = MethodType(before, local)
            local.fsdp_post_all_gather = MethodType(after, local)
            param._init_extensions()
    whole = model.weight.full_tensor()
    model.unshard()
    assert torch.equal(model.weight, whole)
    assert (model.weight.dtype, model.bias.dtype) == (torch.float32, torch.bfloat16)
