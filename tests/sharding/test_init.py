"""Before the first step: meta construction, casts, loading, ignored and late parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2 import FSDPModule, Levels, fully_shard, gathered
from fsdp2.core.modules.registry import require_record
from fsdp2.errors import ShardingStateError
from tests.common import gradients, meshes, models, parity
from tests.common.combinations import each_once
from tests.common.workers import ranks

Change = Callable[[Any], Any]


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM))


@contextmanager
def _converting(swap: bool) -> Iterator[None]:
    """Whether torch swaps parameters in conversions, or sets their data."""
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _trains_like_plain(model: nn.Module) -> None:
    batches = gradients.mlp_batches()
    steps = parity.train_sharded(model, parity.adamw, parity.regression_loss, batches)
    plain = parity.train_unsharded(
        gradients.mlp(), parity.adamw, parity.regression_loss, batches, slices=True
    )
    parity.assert_equal(steps, plain, "unsharded")


def reset_parameters(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


# -- meta -----------------------------------------------------------------------------------------


MESHES: dict[str, Callable[[], Any]] = {
    "shard": parity.world_mesh,
    "copies": lambda: meshes.hsdp_mesh(dist.get_world_size(), 1),
    "both": lambda: meshes.hsdp_mesh(2, dist.get_world_size() // 2),
    "levels": lambda: Levels(meshes.hsdp_mesh(2, dist.get_world_size() // 2)),
}


def _noise(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.rand_like(param)).add_(torch.randn_like(param)).bernoulli_(0.3)
            param += torch.empty_like(param).normal_()


def _truncated(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    for param in model.parameters():
        nn.init.trunc_normal_(param.data, std=0.02, generator=generator)


@ranks(4, extended=(2,))
@pytest.mark.parametrize("is_seed_shared", [True, False], ids=["one seed", "a seed per rank"])
@pytest.mark.parametrize("fill", [reset_parameters, _noise, _truncated])
@pytest.mark.parametrize("mesh", MESHES)
def test_meta_construction(
    mesh: str, fill: Callable[[nn.Module], None], is_seed_shared: bool
) -> None:
    """Each rank fills its own rows only: from one seed, with the values of the unsharded model.

    From a seed per rank, with those of the first rank.
    """

    def made() -> nn.Module:
        return nn.Sequential(models.OddMLP(), models.Transformer(vocab=13))

    with torch.device("meta"):
        model = made()
    places = {
        "shard_placement_fn": lambda p: Shard(p.ndim - 1) if p.shape[0] == models.DIM else None
    }
    fully_shard(model[0], mesh=MESHES[mesh]())
    fully_shard(model, mesh=MESHES[mesh](), **places)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    plain = made()
    for both in (model, plain):
        for param in both.parameters():
            nn.init.zeros_(param)
    torch.manual_seed(7 if is_seed_shared else 7 + dist.get_rank())
    fill(model)
    after = torch.rand(1)
    torch.manual_seed(7)
    fill(plain)
    assert not is_seed_shared or torch.equal(after, torch.rand(1))
    for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), wanted)


@ranks(2)
def test_filled_in_gathered() -> None:
    """As the guide does: operators that DTensor has not, and writes to a row, are right too."""
    made = partial(nn.Embedding, 5, 4, padding_idx=1)
    with torch.device("meta"):
        model = fully_shard(made(), mesh=parity.world_mesh())
    model.to_empty(device="cpu")
    plain = made()
    for each in (model, plain):
        torch.manual_seed(3)
        with gathered(each, recurse=False) if each is model else nullcontext():
            each.reset_parameters()
            nn.init.orthogonal_(each.weight[2:])
    assert torch.equal(parity.full_params(model)["weight"], plain.weight)


@ranks(2)
@pytest.mark.parametrize("after", ["meta", "a step"])
def test_dtensors_put_in_place_of_parameters(after: str) -> None:
    """As loaders do that fill a model from a checkpoint, a parameter at a time."""
    with torch.device("meta" if after == "meta" else "cpu"):
        model = models.MLP()
    parity.shard(parity.OURS, model)
    if after == "a step":
        parity.regression_loss(model, gradients.part(0)).backward()
        model.zero_grad()
    values = {n: p.detach() for n, p in gradients.mlp().named_parameters()}
    put = {}
    for name, param in list(model.named_parameters()):
        owner, _, key = name.rpartition(".")
        new = nn.Parameter(distribute_tensor(values[name], parity.world_mesh(), param.placements))
        setattr(model.get_submodule(owner), key, new)
        put[name] = new
    model(gradients.part(0)[0]).sum().backward()
    model.zero_grad()
    assert all(param is put[name] for name, param in model.named_parameters())
    _trains_like_plain(model)


# -- casts and moves ------------------------------------------------------------------------------


def _by_submodule(model: Any) -> None:
    """`.to()` on a module inside a unit, which is no unit itself."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not isinstance(module, FSDPModule):
            module.to(torch.float64)
            module.to(torch.float32)


def _swap(model: Any) -> None:
    for param in model.parameters():
        if isinstance(param, DTensor):  # what torch's own conversions do
            other = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
            torch.utils.swap_tensors(param, other)


def _set_data(model: Any) -> None:
    for param in model.parameters():
        if isinstance(param, DTensor):
            param.data = param.detach().clone()


CASTS: dict[str, tuple[Change, torch.dtype]] = {
    "to_dtype": (lambda m: m.to(torch.float64), torch.float64),
    "double": (lambda m: m.double(), torch.float64),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "cpu": (lambda m: m.cpu(), torch.float32),
    "to_device": (lambda m: m.to("cpu"), torch.float32),
    "to_both": (lambda m: m.to("cpu", torch.float64), torch.float64),
    "there_and_back": (lambda m: m.double().float(), torch.float32),
    "by_submodule": (_by_submodule, torch.float32),
    "swap_tensors": (_swap, torch.float32),
    "set_data": (_set_data, torch.float32),
}
PLAIN = {"by_submodule", "swap_tensors", "set_data"}  # change nothing without sharding

# The optimizer's vectorized kernel ends elsewhere, as a shard is shorter than the whole, and rounds
# an update once instead of twice: a unit in the last place, fed back through one more step. fp16
# also divides before the sum, which costs 2**-25 where values are subnormal.
ROUNDED = {
    torch.bfloat16: parity.Tolerance(rtol=2**-7, atol=2**-8),
    torch.float16: parity.Tolerance(rtol=2**-10, atol=2**-11),
}


def _train(model: Any, dtype: torch.dtype, change: Change, when: str, slices: bool) -> Any:
    """A step in fp32 (before a late change), then the change, then two steps in `dtype`."""

    def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        used = next(iter(model.parameters())).dtype
        return (model(part[0].to(used)) - part[1].to(used)).square().mean()

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, foreach=True)

    train = partial(parity.train_unsharded, slices=True) if slices else parity.train_sharded
    steps = []
    if when == "late":
        steps += train(model, sgd, loss, gradients.mlp_batches()[:1])
        with torch.no_grad():
            model(gradients.part(0)[0])  # leaves the root gathered
        if hasattr(model, "reshard") and change in (_by_submodule, _swap, _set_data):
            model.reshard()
    change(model)
    steps += train(model, sgd, loss, gradients.mlp_batches()[1:])
    return [[list(s.grads.values()), list(s.params.values())] for s in steps]


@ranks(2)
@each_once(cast=[*CASTS], when=["early", "late"], swap={"set": False, "swap": True})
def test_casts_and_moves(cast: str, when: str, swap: bool) -> None:
    """Before the first iteration and after it, whichever way torch converts parameters."""
    change, dtype = CASTS[cast]
    with _converting(swap):
        ours = _train(
            parity.shard(parity.OURS, models.seeded(Nested4)), dtype, change, when, slices=False
        )
        plain_change = (lambda _: None) if cast in PLAIN else change
        plain = _train(models.seeded(Nested4), dtype, plain_change, when, slices=True)
    assert {p.dtype for p in ours[-1][1]} == {dtype}
    if dtype in ROUNDED:
        parity.assert_close(ours, plain, ROUNDED[dtype], "unsharded")
    else:
        parity.assert_equal(ours, plain, "unsharded")


class Nested4(models.Nested):
    """`Nested` for the batches of `mlp_batches`."""

    def __init__(self) -> None:
        super().__init__(pairs=1)
        self.last = nn.Linear(models.DIM, 4)


@ranks(2)
@pytest.mark.parametrize("swap", [False, True], ids=["set", "swap"])
def test_optimizer_steps_count_after_a_cast(swap: bool) -> None:
    """An optimizer of converted parameters still makes kept gathered parameters out of date."""
    with _converting(swap):
        model = parity.shard(parity.OURS, gradients.mlp()).double().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = gradients.mlp()
    x = gradients.part(0)[0]
    for trained, opt in ((model, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=0.1))):
        trained(gradients.mlp_batches()[0][0]).square().sum().backward()
        with torch.no_grad():
            trained(x)  # the root stays gathered
        opt.step()
    parity.assert_equal(model(x).detach(), plain(x).detach(), "after the step")


# -- loading --------------------------------------------------------------------------------------


@ranks(2)
@each_once(
    when=["early", "late", "gathered"],
    assign={"copy": False, "assign": True},
    swap={"set": False, "swap": True},
)
def test_loading_a_state_dict(when: str, assign: bool, swap: bool) -> None:
    """Before the first iteration, after one, and while the root is gathered; then training."""
    source = parity.shard(parity.OURS, gradients.mlp())
    state = {name: value.clone() for name, value in source.state_dict().items()}
    model = parity.shard(parity.OURS, models.seeded(models.MLP, seed=7))
    if when != "early":
        parity.regression_loss(model, gradients.part(0)).backward()
        model.zero_grad()
    if when == "gathered":
        with torch.no_grad():
            model(gradients.part(0)[0])
    with _converting(swap):
        model.load_state_dict(state, assign=assign)
    _trains_like_plain(model)
    parity.assert_equal(
        parity.full_params(source), parity.full_params(gradients.mlp()), "the source"
    )


# -- ignored parameters ---------------------------------------------------------------------------


@ranks(2)
def test_ignored_parameters_through_every_conversion() -> None:
    """They are cast, loaded and left unsharded as in any module, and are never taken for late."""
    model = gradients.mlp()
    ignored = {model.layers[0].weight, model.head.bias}
    for unit in models.units(model):
        fully_shard(unit, mesh=parity.world_mesh(), ignored_params=ignored)
    fully_shard(model, mesh=parity.world_mesh(), ignored_params=ignored)
    for change in (
        lambda: None,
        lambda: model.double(),
        lambda: model.float(),
        lambda: model.load_state_dict(
            {k: v.clone() for k, v in model.state_dict().items()}, assign=True
        ),
    ):
        change()
        x = gradients.part(0)[0].to(model.head.bias.dtype)
        with parity.CountCollectives() as counted:
            model(x).sum().backward()
        assert counted.reduce_scatters == 4
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor) is (name not in ("layers.0.weight", "head.bias"))
            assert param.grad is not None
        model.zero_grad()


# -- parameters and modules that come later -------------------------------------------------------


class _Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(models.DIM, 3)
        self.up = nn.Linear(3, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.tanh(self.down(x)))


class _Adaptable(nn.Module):
    """A linear that a user may give an adapter."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, models.DIM)
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.adapter is None else y + self.adapter(x)


def _adaptable() -> nn.Module:
    return models.seeded(
        lambda: nn.Sequential(_Adaptable(), nn.Tanh(), _Adaptable(), nn.Linear(models.DIM, 4))
    )


def _add_adapters(model: Any) -> None:
    for i in (0, 2):
        model[i].adapter = models.seeded(_Adapter, seed=i)


@ranks(2, extended=(4,))
@each_once(
    when=["before the first forward", "after a step"],
    how=["shard_new_parameters", "fully_shard", "root"],
)
def test_adapters_added_after_sharding(when: str, how: str) -> None:
    """Refused by name until a documented call takes them over; then trained as if always there."""
    model: Any = parity.shard(parity.OURS, _adaptable())
    plain: Any = _adaptable()
    sgd = partial(torch.optim.SGD, lr=0.1)
    batches = gradients.mlp_batches()
    if when == "after a step":
        parity.train_sharded(model, sgd, parity.regression_loss, batches[:1])
        parity.train_unsharded(plain, sgd, parity.regression_loss, batches[:1], slices=True)
    _add_adapters(model)
    _add_adapters(plain)
    match = r"'0.adapter.down.weight' was added after fully_shard.*shard_new_parameters\(\)"
    for _ in range(2):
        with parity.CountCollectives() as counted, pytest.raises(ShardingStateError, match=match):
            model(parity.my_part(batches[1])[0])
        assert counted.total == 0
    for i in (0, 2):
        if how == "fully_shard":
            fully_shard(model[i].adapter, mesh=parity.world_mesh())
        elif how == "shard_new_parameters":
            model[i].shard_new_parameters()
    if how == "root":  # of the units below, each takes its own
        model.shard_new_parameters()
        with pytest.raises(ShardingStateError, match=match):
            model(parity.my_part(batches[1])[0])
        return
    assert all(isinstance(param, DTensor) for param in model.parameters())
    ours = parity.train_sharded(model, sgd, parity.regression_loss, batches[1:])
    expected = parity.train_unsharded(plain, sgd, parity.regression_loss, batches[1:], slices=True)
    if dist.get_world_size() == 2:
        parity.assert_equal(ours, expected, "unsharded")
    else:
        parity.assert_close(ours, expected, parity.Tolerance(1e-5, 1e-6), "unsharded")


@ranks(2)
def test_a_parameter_added_to_the_root_while_it_is_gathered() -> None:
    model: Any = parity.shard(parity.OURS, gradients.mlp())
    with torch.no_grad():
        model(gradients.part(0)[0])
    model.extra = nn.Parameter(torch.ones(5))
    model.shard_new_parameters()
    model.register_forward_hook(lambda m, _, output: output * m.extra.sum())
    assert "extra" in dict(model.named_parameters())
    parity.regression_loss(model, gradients.part(0)).backward()

    def compute(plain: Any, rank: int) -> None:
        handle = plain.register_forward_hook(lambda m, _, output: output * m.extra.sum())
        parity.regression_loss(plain, gradients.part(0, rank)).backward()
        handle.remove()

    plain: Any = gradients.mlp()
    plain.extra = nn.Parameter(torch.ones(5))
    gradients.assert_like_unsharded(parity.full_grads(model), plain, compute)
    state = model.state_dict()
    assert isinstance(state["extra"], DTensor)
    parity.assert_equal(parity.full_all([state["extra"]])[0], torch.ones(5), "extra")


@ranks(2)
@pytest.mark.parametrize("empty", [False, True], ids=["with parameters", "without"])
def test_new_parameters_follow_what_methods_have_changed(empty: bool) -> None:
    """Also where the unit had no parameters to change it for."""
    model: Any = models.seeded(_two_layers)
    fully_shard(model[0], mesh=parity.world_mesh())
    if empty:
        fully_shard(model[1], mesh=parity.world_mesh())
    fully_shard(model, mesh=parity.world_mesh(), reshard_after_forward=1)
    model.set_gradient_divide_factor(1.0)
    model.set_reshard_after_forward(True)
    model.set_separate_reduce_scatter_group()
    seen: list[torch.Size] = []
    model.set_all_reduce_hook(lambda flat: seen.append(flat.shape))
    model.extra = nn.Parameter(torch.ones(6))
    model.shard_new_parameters()
    groups = require_record(model).unit.own_groups
    assert len(groups) == 1 if empty else 2
    reducers: Any = groups[-1].reducers
    assert reducers is require_record(model[0]).unit.own_groups[0].reducers
    assert reducers is not groups[-1].collectives
    assert groups[-1].smaller_group is None
    model.register_forward_pre_hook(lambda m, args: (args[0] * m.extra.mean(),))
    model(torch.ones(1, models.DIM)).sum().backward()
    assert len(seen) == len(groups)
    plain = models.seeded(_two_layers)
    extra = torch.ones(6, requires_grad=True)
    plain(torch.ones(1, models.DIM) * extra.mean()).sum().backward()
    assert extra.grad is not None
    parity.assert_close(
        parity.full_all([model.extra.grad])[0], 2 * extra.grad, parity.Tolerance(1e-6, 0), "summed"
    )


@ranks(2)
def test_a_part_called_before_the_root_is_part_of_its_backward() -> None:
    """Its calls were counted by a scheduler that the root's first forward replaced."""
    model: Any = models.seeded(_two_layers)
    plain = copy.deepcopy(model)
    for module in (*model, model):
        fully_shard(module, mesh=parity.world_mesh())

    def compute(model: Any, rank: int) -> None:
        x = gradients.part(0, rank)[0].clone().requires_grad_()  # each call has an end in backward
        early = [model[0](i * x) for i in range(1, 4)]
        (model(x).square().sum() + sum(h.square().sum() for h in early)).backward()

    compute(model, dist.get_rank())
    gradients.assert_like_unsharded(parity.full_grads(model), plain, compute)


@ranks(2)
def test_a_unit_that_is_removed_is_forgotten() -> None:
    model: Any = parity.shard(
        parity.OURS, models.seeded(lambda: nn.Sequential(*[_Adaptable() for _ in range(3)]))
    )
    x = torch.randn(2, models.DIM)
    model(x).sum().backward()
    model[1] = nn.Identity()
    with parity.CountCollectives() as counted:
        model(x)
    assert counted.all_gathers == 2


@ranks(2)
@each_once(
    build=["in inference mode", "outside"],
    then=["trained", "cast", "given a parameter"],
)
def test_sharded_in_inference_mode(build: str, then: str) -> None:
    """Shards are none of its tensors: an optimizer writes them."""

    def made(module: Any, shard: bool) -> Any:
        with torch.inference_mode(shard and build == "in inference mode"):
            model = models.seeded(module)
        with torch.inference_mode(shard):
            if shard:
                fully_shard(model[0], mesh=parity.world_mesh())
                fully_shard(model, mesh=parity.world_mesh())
            model.double() if then == "cast" else None
            if then == "given a parameter":
                model.bias = nn.Parameter(torch.ones(models.DIM))
                model.shard_new_parameters() if shard else None
            model(torch.ones(2, models.DIM, dtype=model[0].weight.dtype))
        return model

    pair = [made(_two_layers, shard) for shard in (False, True)]
    for model in pair:
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for _ in range(2):
            x = torch.ones(2, models.DIM, dtype=model[0].weight.dtype)
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    plain, sharded = pair
    found = parity.full_params(sharded)
    parity.assert_close(found, dict(plain.named_parameters()), parity.FP32)
