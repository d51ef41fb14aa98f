"""What happens between two collectives: hooks, modes, accumulation, prefetch, recovery.

Most tests are a scenario that runs with torch's FSDP2 and with ours and must give the same bits.
Where torch's FSDP2 cannot do it, the unsharded model is the only judge, and the test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method
from fsdp2.communication import hooks_on
from tests.common.meshes import TORCH_VERSION
from tests.common.models import (
    DIM,
    MLP,
    Block,
    Choosy,
    Fork,
    Forked,
    Halves,
    Nested,
    Repeated,
    halves,
    seeded,
    units,
)
from tests.common.parity import (
    FP32,
    OURS,
    REORDERED_FP32,
    Bf16,
    CountCollectives,
    adamw,
    assert_close,
    assert_equal,
    check_training,
    full,
    full_grads,
    full_params,
    language_batches,
    my_part,
    regression_batches,
    regression_loss,
    same_as_torch,
    shard,
    train_sharded,
    train_unsharded,
    world_mesh,
)
from tests.common.workers import ranks

TORCHS_TAKES_DATACLASSES = TORCH_VERSION >= (2, 13)
"""Before, its hooks do not look into them: it fails, or trains something else."""

STEPS = 4

mlp = partial(seeded, MLP)
mlp_batches = partial(regression_batches, DIM, 4, steps=STEPS)


def one_batch(outputs: int = 4) -> Any:
    return regression_batches(DIM, outputs, steps=1)[0]


def fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


def own_params(unit: nn.Module) -> list[nn.Parameter]:
    """The parameters now registered to a unit, without those of the units inside it."""
    params = list(unit.parameters(recurse=False))
    for child in unit.children():
        if not hasattr(child, "set_requires_gradient_sync"):
            params += own_params(child)
    return params


def is_sharded(unit: nn.Module) -> bool:
    """Whether the parameters registered to a unit are its shards; they never are in part."""
    kinds = {isinstance(param, DTensor) for param in own_params(unit)}
    assert len(kinds) == 1, f"{unit} registers shards and whole parameters at once"
    return kinds.pop()


def unsharded_grads(
    model: nn.Module, compute: Callable[[nn.Module, int], None]
) -> dict[str, Tensor | None]:
    """The ranks' average gradients from one process: runs `compute(model, rank)` for each rank."""
    for rank in range(dist.get_world_size()):
        compute(model, rank)
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= dist.get_world_size()
    return full_grads(model)


# -- outputs and inputs ---------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("mode", ["tuple", "dict", "dataclass"])
@pytest.mark.parametrize("used", ["both", "left", "right"])
def test_outputs_in_containers_some_of_them_unused(mode: str, used: str) -> None:
    build = partial(seeded, partial(Forked, mode, used))
    batches = regression_batches(DIM, 2, steps=2)
    torch_too = mode != "dataclass" or TORCHS_TAKES_DATACLASSES
    steps = check_training(build, batches, torch_too=torch_too, reshard_after_forward=True)
    unused = {"both": "none", "left": "right", "right": "left"}[used]
    for name, grad in steps[0].grads.items():
        assert (grad is None) == (f".{unused}." in name), name


@ranks(2)
@pytest.mark.parametrize("mode", ["tuple", "dict", "dataclass"])
def test_root_returns_a_container(mode: str) -> None:
    """The hook that starts backward hangs on whichever tensors are inside."""

    def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        left, right = halves(model(part[0]))
        return (left - part[1]).square().mean() + right.mean()

    batches = regression_batches(DIM, DIM, steps=STEPS)
    build = partial(seeded, partial(Fork, mode))
    torch_too = mode != "dataclass" or TORCHS_TAKES_DATACLASSES
    check_training(build, batches, loss=loss, torch_too=torch_too, reshard_after_forward=True)


class _Carrier(nn.Module):
    """Takes and returns its tensors inside a dataclass, with more than tensors beside them."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, halves: Halves, *, options: dict[str, Any]) -> Halves:
        left = torch.tanh(self.linear(halves.left)) * options["factor"]
        return Halves(left, {"right": halves.rest["right"] + left, "nothing": None})


class _Carriers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.carriers = nn.ModuleList(_Carrier() for _ in range(3))
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        carried = Halves(self.first(x), {"right": x, "nothing": None})
        options = {"factor": torch.full((1,), 0.5), "name": "half"}
        for carrier in self.carriers:
            carried = carrier(carried, options=options)
        assert carried.rest["right"] is not None
        return self.head(carried.left + carried.rest["right"])


@ranks(2)
def test_units_that_pass_dataclasses_to_each_other() -> None:
    check_training(
        partial(seeded, _Carriers),
        mlp_batches(),
        torch_too=TORCHS_TAKES_DATACLASSES,
        reshard_after_forward=True,
    )


@ranks(2)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_gradient_of_the_input(requires_grad: bool) -> None:
    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=True)
        x = my_part(one_batch())[0].requires_grad_(requires_grad)
        model(x).square().sum().backward()
        return [x.grad, full_grads(model)]

    ours = same_as_torch(run)
    plain = mlp()
    x = my_part(one_batch())[0].requires_grad_(requires_grad)
    plain(x).square().sum().backward()
    assert_equal(ours[0], x.grad, "unsharded")
    assert (ours[0] is not None) == requires_grad


class _SavesViews(nn.Module):
    """Autograd saves views of its parameters, which must be valid again in backward."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * DIM, DIM) / 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.weight.view(2, DIM, DIM).unbind(0)
        return torch.tanh(x @ left.t()) * (x @ right) + x * self.weight[0].detach()


@ranks(2, extended=(4,))
def test_views_of_parameters_saved_for_backward() -> None:
    def build() -> nn.Module:
        return nn.Sequential(_SavesViews(), _SavesViews(), nn.Linear(DIM, 4))

    check_training(partial(seeded, build), mlp_batches(), reshard_after_forward=True)


@ranks(2)
def test_user_hooks_around_ours() -> None:
    """A user's pre-hook sees whole parameters whenever it was registered; a post-hook registered
    after sharding sees shards."""
    model = mlp()
    seen = []
    model.layers[0].register_forward_pre_hook(lambda m, _: seen.append(type(m.weight.data)))
    shard(OURS, model)
    model.layers[0].register_forward_pre_hook(lambda m, _: seen.append(type(m.weight.data)))
    model.layers[0].register_forward_hook(lambda m, *_: seen.append(type(m.weight.data)))
    model(torch.randn(2, DIM))
    assert seen == [Tensor, Tensor, DTensor]


# -- how often a unit runs ------------------------------------------------------------------------


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_unit_called_several_times_in_a_forward(reshard_after_forward: bool | None) -> None:
    build = partial(seeded, Repeated)
    batches = regression_batches(DIM, 2, steps=STEPS)
    check_training(build, batches, reshard_after_forward=reshard_after_forward)


@ranks(2)
def test_unit_called_several_times_mixed() -> None:
    batches = regression_batches(DIM, 2, steps=STEPS)
    check_training(partial(seeded, Repeated), batches, mixed=True, reshard_after_forward=True)


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_two_forwards_before_one_backward(reshard_after_forward: bool | None) -> None:
    """Each group is reduced once, when both contributions are there."""

    def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        x, y = part
        return (model(x) * model(x.flip(1)) - y).square().mean()

    arguments = {"reshard_after_forward": reshard_after_forward}
    check_training(mlp, mlp_batches(), loss=loss, **arguments)
    model = shard(OURS, mlp(), **arguments)
    value = loss(model, my_part(one_batch()))
    with CountCollectives() as backward:
        value.backward()
    assert backward.reduce_scatters == len(fsdp_modules(model)) == 4


@ranks(2)
def test_two_backwards_after_two_forwards() -> None:
    """The first backward frees parameters that the second needs again; gradients add up."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=True)
        x, y = my_part(one_batch())
        first, second = model(x), model(x.flip(1))
        (first - y).square().mean().backward()
        (second + y).square().mean().backward()
        return full_grads(model)

    ours = same_as_torch(run)

    def compute(plain: nn.Module, rank: int) -> None:
        x, y = my_part(one_batch(), rank)
        (plain(x) - y).square().mean().backward()
        (plain(x.flip(1)) + y).square().mean().backward()

    assert_close(ours, unsharded_grads(mlp(), compute), FP32, "unsharded")


@ranks(2)
def test_backward_twice_through_one_forward() -> None:
    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=True)
        loss = regression_loss(model, my_part(one_batch()))
        loss.backward(retain_graph=True)
        loss.backward()
        return full_grads(model)

    ours = same_as_torch(run)
    once = unsharded_grads(
        mlp(), lambda m, rank: regression_loss(m, my_part(one_batch(), rank)).backward()
    )
    doubled = {name: None if grad is None else 2 * grad for name, grad in once.items()}
    assert_close(ours, doubled, FP32, "unsharded")


# -- modes of autograd ----------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_no_grad_evaluation_between_training_steps(reshard_after_forward: bool | None) -> None:
    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=reshard_after_forward)
        outputs = []

        def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
            with torch.no_grad():
                outputs.append(model(part[0]))
                outputs.append(model(part[0].flip(0)))
            assert not outputs[-1].requires_grad
            return regression_loss(model, part)

        return [train_sharded(model, adamw, loss, mlp_batches()), outputs]

    steps, outputs = same_as_torch(run)
    unsharded = train_unsharded(mlp(), adamw, regression_loss, mlp_batches())
    assert_close(steps, unsharded, FP32, "unsharded")
    assert_close(outputs[0], mlp()(my_part(mlp_batches()[0])[0]).detach(), FP32, "evaluation")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_inference_mode_then_training(reshard_after_forward: bool | None) -> None:
    """The very first gather happens in inference mode, and no inference tensor may survive it.

    The unsharded model is the judge: it trains after an evaluation like that.
    """
    model = shard(OURS, mlp(), reshard_after_forward=reshard_after_forward)
    optimizer = adamw(model.parameters())  # before an evaluation can leave whole parameters behind
    plain = mlp()
    for x, _ in mlp_batches()[:2]:
        with torch.inference_mode():
            assert_close(model(x).clone(), plain(x), FP32, "evaluation")
    steps = train_sharded(model, lambda _: optimizer, regression_loss, mlp_batches())
    unsharded = train_unsharded(plain, adamw, regression_loss, mlp_batches())
    assert_close(steps, unsharded, FP32, "training")
    with torch.inference_mode():
        assert_close(model(x).clone(), plain(x), FP32, "evaluation after training")


# -- activation checkpointing ---------------------------------------------------------------------


class _Checkpointed(nn.Module):
    """Two blocks; `where` recomputes nothing (None), whole units ("outside"), or a unit's parts."""

    def __init__(self, where: str | None, reentrant: bool) -> None:
        super().__init__()
        self.where, self.reentrant = where, reentrant
        self.embed = nn.Embedding(13, DIM)
        self.blocks = nn.ModuleList(_PartlyCheckpointed(self) for _ in range(2))
        self.head = nn.Linear(DIM, 13, bias=False)

    def maybe(self, where: str, function: Any, x: Tensor) -> Tensor:
        if self.where == where:
            return checkpoint(function, x, use_reentrant=self.reentrant)
        return function(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.maybe("outside", block, x)
        return self.head(x)


class _PartlyCheckpointed(Block):
    def __init__(self, model: _Checkpointed) -> None:
        super().__init__()
        self.maybe = model.maybe  # a bound method, so that the model is not registered as a child

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.maybe("inside", self.attention, self.norm1(x))
        return x + self.maybe("inside", self.mlp, self.norm2(x))


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "nonreentrant"])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_activation_checkpointing(where: str, reentrant: bool, reshard_after_forward: bool) -> None:
    """The same gradients as without, and no gather more than without."""

    def run(api: Any, where: str | None) -> Any:
        build = partial(_Checkpointed, where, reentrant)
        model = shard(api, seeded(build), reshard_after_forward=reshard_after_forward)
        results = []
        for ids in map(my_part, language_batches(13, steps=2)):
            with CountCollectives() as forward:
                loss = model(ids).float().square().mean()
            with CountCollectives() as backward:
                loss.backward()
            assert forward.all_gathers == len(fsdp_modules(model))
            assert backward.reduce_scatters == len(fsdp_modules(model))
            results.append([loss.detach(), full_grads(model), backward.all_gathers])
            model.zero_grad()
        return results

    with_checkpoints = same_as_torch(partial(run, where=where))
    assert_equal(with_checkpoints, run(OURS, None), "without recomputation")


# -- what gets a gradient -------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize(
    "frozen",
    [
        ("layers.1.weight",),
        ("layers.0.weight", "layers.1.bias", "head.bias"),
        ("layers.0.weight", "layers.0.bias"),
        ("layers.1.weight", "layers.1.bias"),
        ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "head.weight"),
    ],
    ids=["one", "one-of-each", "first-unit", "middle-unit", "most"],
)
def test_frozen_parameters(frozen: tuple[str, ...], reshard_after_forward: bool) -> None:
    def build() -> nn.Module:
        model = mlp()
        for name, param in model.named_parameters():
            param.requires_grad_(name not in frozen)
        return model

    batches = mlp_batches()[:2]
    steps = check_training(build, batches, reshard_after_forward=reshard_after_forward)
    assert {name for name, grad in steps[-1].grads.items() if grad is None} == set(frozen)
    before = full_params(build())
    for name in frozen:
        assert_equal(steps[-1].params[name], before[name], name)


@ranks(2)
def test_frozen_parameters_are_not_reduced() -> None:
    """What is frozen adds nothing to the bytes of a reduction."""

    def reduced(*frozen: str) -> int:
        model = mlp()
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        shard(OURS, model)
        with CountCollectives() as counted:
            regression_loss(model, my_part(one_batch())).backward()
        return counted.elements["reduce_scatter"]

    weight = DIM * DIM + DIM * DIM // 2  # the input of the collective and a rank's half of it
    assert reduced() - reduced("layers.0.weight") == weight
    assert reduced() - reduced("layers.0.weight", "layers.2.weight") == 2 * weight


@ranks(2)
def test_freezing_and_thawing_between_steps() -> None:
    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=True)
        results = []
        for frozen in (False, True, False):
            model.layers[1].weight.requires_grad_(not frozen)
            regression_loss(model, my_part(one_batch())).backward()
            assert (model.layers[1].weight.grad is None) == frozen
            results.append(full_grads(model))
            model.zero_grad()
        return results

    plain = mlp()
    regression_loss(plain, one_batch()).backward()
    ours = run(OURS)
    expected = full_grads(plain)
    for grads, frozen in zip(ours, (False, True, False), strict=True):
        want = {n: None if frozen and n == "layers.1.weight" else g for n, g in expected.items()}
        assert_close(grads, want, FP32, f"frozen={frozen}")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_unused_units_and_parameters(reshard_after_forward: bool) -> None:
    """Another choice of units runs in every step; what did not run has no gradient."""
    choices = [("a", "c"), ("b",), ("c", "a"), ("a", "b", "c"), ()]

    def loss(choosing: Any, model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        model.active = next(choosing)
        return regression_loss(model, part)

    def train(api: Any) -> Any:
        model = shard(api, seeded(Choosy), reshard_after_forward=reshard_after_forward)
        return train_sharded(model, adamw, partial(loss, iter(choices)), batches)

    batches = regression_batches(DIM, 2, steps=len(choices))
    ours = same_as_torch(train)
    plain = train_unsharded(seeded(Choosy), adamw, partial(loss, iter(choices)), batches)
    assert_close(ours, plain, FP32, "unsharded")
    for active, step in zip(choices, ours, strict=True):
        without = {name for name, grad in step.grads.items() if grad is None}
        expected = {
            f"choices.{c}.{p}" for c in "abc" if c not in active for p in ("weight", "bias")
        }
        assert without == expected | {"spare.weight", "spare.bias"}


# -- lists of modules -----------------------------------------------------------------------------


class _Grouped(nn.Module):
    """`norm` and `head` are one group; `skip` leaves the head to whoever calls the model."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.skip = skip
        self.first = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.middle = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.norm(torch.tanh(self.first(x)))))
        return x if self.skip else self.head(x)


def _shard_grouped(api: Any, model: Any, **arguments: Any) -> Any:
    mesh = world_mesh()
    returned = api.fully_shard([model.norm, model.head], mesh=mesh, **arguments)
    assert returned == [model.norm, model.head]
    api.fully_shard(model.middle, mesh=mesh, **arguments)
    return api.fully_shard(model, mesh=mesh)


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_list_of_modules_is_one_group(reshard_after_forward: bool) -> None:
    def run(api: Any) -> Any:
        model = _shard_grouped(api, seeded(_Grouped), reshard_after_forward=reshard_after_forward)
        with CountCollectives() as counted:
            regression_loss(model, my_part(one_batch())).backward()
        model.zero_grad()
        return [train_sharded(model, adamw, regression_loss, mlp_batches()), counted.counts]

    steps, counts = same_as_torch(run)
    # Three groups: the root, [norm, head], middle. In backward, resharded ones are gathered again.
    assert counts["reduce_scatter"] == 3
    assert counts["all_gather"] == (5 if reshard_after_forward else 3)
    unsharded = train_unsharded(seeded(_Grouped), adamw, regression_loss, mlp_batches())
    assert_close(steps, unsharded, FP32, "unsharded")


@ranks(2)
def test_list_of_modules_stays_gathered_from_first_to_last() -> None:
    model = _shard_grouped(OURS, seeded(_Grouped))
    seen = []
    for name in ("norm", "middle", "head"):
        getattr(model, name).register_forward_hook(
            lambda *_: seen.append((is_sharded(model.norm), is_sharded(model.head)))
        )
    model(torch.randn(2, DIM))
    assert seen == [(False, False), (False, False), (True, True)]


@ranks(2)
def test_list_member_that_never_runs() -> None:
    """The root's forward completes the group: it is resharded, and what ran is trained.

    torch's, before 2.13, leaves it gathered.
    """

    def run(api: Any) -> Any:
        model = _shard_grouped(api, seeded(partial(_Grouped, skip=True)))
        results = []
        for x, _ in mlp_batches():
            output = model(my_part(x))
            assert is_sharded(model.norm)
            assert is_sharded(model.head)
            output.square().mean().backward()
            results.append(full_grads(model))
            model.zero_grad()
        return results

    ours = same_as_torch(run) if TORCH_VERSION >= (2, 13) else run(OURS)
    for (x, _), grads in zip(mlp_batches(), ours, strict=True):
        plain = seeded(partial(_Grouped, skip=True))
        plain(x).square().mean().backward()
        assert_close(grads, full_grads(plain), FP32, "unsharded")
        assert grads["head.weight"] is None


@ranks(2)
def test_list_member_that_runs_after_the_root() -> None:
    """The model ends before the head; the head then runs on chunks of its output (chunked loss)."""

    def loss(model: Any, part: tuple[Tensor, Tensor]) -> Tensor:
        hidden = model(part[0])
        chunks = zip(hidden.chunk(2), part[1].chunk(2), strict=True)
        return torch.stack([(model.head(h) - y).square().mean() for h, y in chunks]).mean()

    def run(api: Any) -> Any:
        model = _shard_grouped(api, seeded(partial(_Grouped, skip=True)))
        return train_sharded(model, adamw, loss, mlp_batches())

    ours = same_as_torch(run)
    plain = train_unsharded(seeded(partial(_Grouped, skip=True)), adamw, loss, mlp_batches())
    assert_close(ours, plain, FP32, "unsharded")


# -- gradient accumulation ------------------------------------------------------------------------

MICROBATCHES = 3


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, False])
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
@pytest.mark.parametrize("sync_every", [False, True], ids=["sync-last", "sync-every"])
def test_gradient_accumulation(
    sync_every: bool, mixed: bool, reshard_after_forward: bool | None
) -> None:
    """Without sync, gradients add up on each rank, in the reduce dtype, and nothing is reduced."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), mixed=mixed, reshard_after_forward=reshard_after_forward)
        results = []
        for batches in (mlp_batches(), mlp_batches()[::-1]):
            for i, batch in enumerate(batches[:MICROBATCHES]):
                last = i == MICROBATCHES - 1
                model.set_requires_gradient_sync(sync_every or last)
                loss = regression_loss(model, my_part(batch))
                with CountCollectives() as backward:
                    loss.backward()
                assert backward.reduce_scatters == (4 if sync_every or last else 0)
            results.append(full_grads(model))
            model.zero_grad()
        return results

    ours = same_as_torch(run, mixed=mixed)

    def compute(plain: nn.Module, rank: int) -> None:
        for batch in mlp_batches()[:MICROBATCHES]:
            used = Bf16(plain) if mixed else plain
            regression_loss(used, my_part(batch, rank)).backward()

    # Only the order of the sum differs. A sum taken in bf16 would be off by 2**-9 of a gradient.
    assert_close(ours[0], unsharded_grads(mlp(), compute), REORDERED_FP32, "unsharded")


@ranks(2)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_zero_grad_clears_what_was_not_reduced_yet(mixed: bool) -> None:
    """With torch's FSDP2, gradients of before zero_grad() appear at the next sync."""
    model, fresh = shard(OURS, mlp(), mixed=mixed), shard(OURS, mlp(), mixed=mixed)
    first, second = mlp_batches()[:2]
    model.set_requires_gradient_sync(False)
    regression_loss(model, my_part(first)).backward()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    for trained in (model, fresh):
        regression_loss(trained, my_part(second)).backward()
    assert_equal(full_grads(model), full_grads(fresh), "the second batch alone")


@ranks(2)
def test_gradient_sync_of_one_unit_only() -> None:
    """`recurse=False` holds back the unit it is called on, and its children reduce."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=True)
        model.set_requires_gradient_sync(False, recurse=False)
        regression_loss(model, my_part(one_batch())).backward()
        first = full_grads(model)
        model.set_requires_gradient_sync(True)
        regression_loss(model, my_part(one_batch())).backward()
        return [first, full_grads(model)]

    first, second = same_as_torch(run)
    assert {name for name, grad in first.items() if grad is None} == {"head.weight", "head.bias"}
    plain = mlp()
    regression_loss(plain, one_batch()).backward()
    doubled = {name: 2 * param.grad for name, param in plain.named_parameters()}
    assert_close(second, doubled, FP32, "unsharded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_set_reshard_after_backward(mixed: bool, sync: bool) -> None:
    """Parameters stay whole between microbatches: the next forward and backward gather nothing."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), mixed=mixed)
        results = []
        for i, batch in enumerate(mlp_batches()[:MICROBATCHES]):
            last = i == MICROBATCHES - 1
            model.set_requires_gradient_sync(sync or last)
            model.set_reshard_after_backward(last)
            model.set_reshard_after_forward(False)
            with CountCollectives() as forward:
                loss = regression_loss(model, my_part(batch))
            with CountCollectives() as backward:
                loss.backward()
            assert [is_sharded(module) for module in fsdp_modules(model)] == [last] * 4
            assert (forward.all_gathers > 0) == (i == 0)
            assert backward.all_gathers == 0
            results.append(loss.detach())
            if sync and not last:
                # The gradients lie on the shards, which are not what the module registers now.
                assert all(param.grad is None for param in model.parameters())
        return [results, full_grads(model)]

    same_as_torch(run, mixed=mixed)


@ranks(2)
def test_gradients_on_shards_while_parameters_are_whole() -> None:
    model = shard(OURS, mlp())
    shards = dict(model.named_parameters())
    model.set_reshard_after_backward(False)
    regression_loss(model, my_part(one_batch())).backward()
    for name, param in model.named_parameters():
        assert param is not shards[name]
        assert param.grad is None, name
        assert isinstance(shards[name].grad, DTensor), name
    for module in fsdp_modules(model):
        module.reshard()
    for name, param in model.named_parameters():
        assert param is shards[name]
    plain = mlp()
    regression_loss(plain, one_batch()).backward()
    assert_close(full_grads(model), full_grads(plain), FP32, "unsharded")


@ranks(2)
@pytest.mark.parametrize("sync_every", [False, True])
def test_set_is_last_backward(sync_every: bool) -> None:
    def run(api: Any) -> Any:
        model = shard(api, mlp())
        results = []
        for _ in range(2):
            for i, batch in enumerate(mlp_batches()[:MICROBATCHES]):
                last = i == MICROBATCHES - 1
                model.set_is_last_backward(last)
                model.set_requires_gradient_sync(sync_every or last)
                regression_loss(model, my_part(batch)).backward()
            results.append(full_grads(model))
            model.zero_grad()
        return results

    first, second = same_as_torch(run)
    assert_equal(first, second, "the second round, with what the first one left behind")

    def compute(plain: nn.Module, rank: int) -> None:
        for batch in mlp_batches()[:MICROBATCHES]:
            regression_loss(plain, my_part(batch, rank)).backward()

    assert_close(first, unsharded_grads(mlp(), compute), FP32, "unsharded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
@pytest.mark.parametrize("factor", [1.0, 3.0, "world size"])
def test_set_gradient_divide_factor(factor: float | str, mixed: bool) -> None:
    """The sum over ranks, divided by the factor. torch's FSDP2 knows gloo only the world size."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), mixed=mixed)
        for module in fsdp_modules(model):
            module.set_gradient_divide_factor(divide)
        regression_loss(model, my_part(one_batch())).backward()
        return full_grads(model)

    divide = float(dist.get_world_size()) if isinstance(factor, str) else factor
    ours = same_as_torch(run, mixed=mixed) if isinstance(factor, str) else run(OURS)

    def compute(plain: nn.Module, rank: int) -> None:
        part = my_part(one_batch(), rank)
        regression_loss(Bf16(plain) if mixed else plain, part).backward()

    mean = unsharded_grads(mlp(), compute)
    scale = dist.get_world_size() / divide
    expected = {name: None if grad is None else grad * scale for name, grad in mean.items()}
    assert_close(ours, expected, REORDERED_FP32, "sum / factor")


@ranks(2)
def test_gradient_divide_factor_is_not_recursive() -> None:
    model = shard(OURS, mlp())
    model.set_gradient_divide_factor(1.0)
    regression_loss(model, my_part(one_batch())).backward()
    plain = mlp()
    regression_loss(plain, one_batch()).backward()
    expected = {
        name: param.grad * (2 if name.startswith("head") else 1)
        for name, param in plain.named_parameters()
    }
    assert_close(full_grads(model), expected, FP32, "the root sums, its children average")


# -- resharding after forward ---------------------------------------------------------------------


@ranks(2, extended=(4,))
@pytest.mark.parametrize(
    ("argument", "children", "root"),
    [
        (None, True, False),
        (True, True, True),
        (False, False, False),
        ("world size", True, True),
        (1, False, False),
    ],
)
def test_registered_parameters_after_forward(
    argument: bool | int | str | None, children: bool, root: bool
) -> None:
    """Shards where the forward reshards, whole parameters where it does not; under no_grad too.

    An int is the size of the group that keeps the parameters: all ranks, or each for itself.
    """
    if argument == "world size":
        argument = dist.get_world_size()
    model = shard(OURS, mlp(), reshard_after_forward=argument)
    x = torch.randn(2, DIM)
    for _ in range(2):
        for module in fsdp_modules(model):
            module.reshard()
        loss = model(x).sum()
        assert [is_sharded(m) for m in fsdp_modules(model)] == [root] + [children] * 3
        loss.backward()
        assert [is_sharded(m) for m in fsdp_modules(model)] == [True] * 4
        with torch.no_grad():
            model(x)
        assert [is_sharded(m) for m in fsdp_modules(model)] == [root] + [children] * 3
    whole = model.head.weight
    assert isinstance(whole, nn.Parameter)
    assert whole.requires_grad
    assert whole.shape == (4, DIM)


@ranks(2, extended=(4,))
def test_set_reshard_after_forward() -> None:
    def run(api: Any) -> Any:
        model = shard(api, mlp())
        results = []
        for value, recurse in ((True, True), (False, True), (True, False), (False, False)):
            model.set_reshard_after_forward(value, recurse=recurse)
            with CountCollectives() as forward:
                loss = regression_loss(model, my_part(one_batch()))
            states = [is_sharded(module) for module in fsdp_modules(model)]
            with CountCollectives() as backward:
                loss.backward()
            results.append([states, full_grads(model), forward.counts, backward.counts])
        return results

    states = [result[0] for result in same_as_torch(run)]
    assert states == [[True] * 4, [False] * 4, [True, False, False, False], [False] * 4]


@ranks(2)
def test_set_reshard_after_forward_wants_a_bool() -> None:
    model = shard(OURS, mlp())
    with pytest.raises(ValueError, match="bool"):
        model.set_reshard_after_forward(2)


# -- prefetch -------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_explicit_prefetch(ahead: int, mixed: bool) -> None:
    """Whatever is prefetched, the results and the number of collectives stay the same.

    Lists are lists, or slices of the model's own.
    """

    def run(api: Any, prefetch: bool) -> Any:
        model = shard(api, seeded(partial(MLP, depth=4)), mixed=mixed)
        layers = list(model.layers)
        if prefetch:
            for i, layer in enumerate(layers):
                layer.set_modules_to_forward_prefetch(model.layers[i + 1 : i + 1 + ahead])
                layer.set_modules_to_backward_prefetch(layers[max(0, i - ahead) : i][::-1])
            model.set_modules_to_forward_prefetch(layers[:ahead])
            model.set_modules_to_backward_prefetch(layers[::-1][:ahead])
        counts = []

        def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
            with CountCollectives() as forward:
                value = regression_loss(model, part)
            counts.append(forward.counts)
            return value

        return [train_sharded(model, adamw, loss, mlp_batches()), counts]

    ours = same_as_torch(partial(run, prefetch=True), mixed=mixed)
    assert_equal(ours, run(OURS, prefetch=False), "without explicit prefetch")


@ranks(2)
def test_prefetch_of_units_that_do_not_run() -> None:
    """A wrong guess costs a gather, never a wrong result, and the next iteration starts clean."""

    def loss(choosing: Any, model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        model.active = next(choosing)
        return regression_loss(model, part)

    choices = [("a",), ("a", "b", "c"), ("c",), ("b", "a")]
    batches = regression_batches(DIM, 2, steps=len(choices))
    model = shard(OURS, seeded(Choosy))
    units_by_name = dict(model.choices.items())
    for unit in units_by_name.values():
        others = [other for other in units_by_name.values() if other is not unit]
        unit.set_modules_to_forward_prefetch(others)
        unit.set_modules_to_backward_prefetch(others)
    ours = train_sharded(model, adamw, partial(loss, iter(choices)), batches)
    plain = train_unsharded(seeded(Choosy), adamw, partial(loss, iter(choices)), batches)
    assert_close(ours, plain, FP32, "unsharded")


@ranks(2)
def test_order_of_units_changes_between_iterations() -> None:
    """The recorded order of one iteration is a wrong prediction of the next."""
    orders = [("a", "b", "c"), ("c", "b", "a"), ("b", "c"), ("a", "b", "c"), ("a", "c", "b")]

    def loss(choosing: Any, model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        model.active = next(choosing)
        return regression_loss(model, part)

    def train(api: Any) -> Any:
        model = shard(api, seeded(Choosy))
        return train_sharded(model, adamw, partial(loss, iter(orders)), batches)

    batches = regression_batches(DIM, 2, steps=len(orders))
    ours = same_as_torch(train)
    plain = train_unsharded(seeded(Choosy), adamw, partial(loss, iter(orders)), batches)
    assert_close(ours, plain, FP32, "unsharded")


@ranks(2)
def test_prefetch_lists_hold_sharded_modules_only() -> None:
    model = shard(OURS, mlp())
    with pytest.raises(ValueError, match="Linear"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="Linear"):
        model.set_modules_to_backward_prefetch([nn.Linear(2, 2)])
    model.set_modules_to_forward_prefetch(layer for layer in model.layers[:2])
    targets = [hooks_on(layer).unit for layer in model.layers[:2]]
    assert hooks_on(model).unit.forward_prefetch == targets
    several = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2))))
    for one in (model.layers[0], several, "layers"):
        with pytest.raises(TypeError, match=r"are lists of sharded modules, not .*; pass \[module"):
            model.set_modules_to_forward_prefetch(one)


# -- unshard and reshard by hand ------------------------------------------------------------------


@ranks(2, extended=(4,))
@pytest.mark.parametrize("async_op", [True, False])
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_unshard_and_reshard(mixed: bool, async_op: bool) -> None:
    """Not recursive; gathers in the compute dtype; works before the first forward and after it."""
    plain = mlp()
    model = shard(OURS, mlp(), mixed=mixed)
    dtype = torch.bfloat16 if mixed else torch.float32
    for _ in range(2):
        shards = [model.head.weight, model.head.bias]
        handle = model.unshard(async_op=async_op)
        if async_op:
            assert isinstance(handle, UnshardHandle)
            handle.wait()
            handle.wait()  # a second wait has nothing to do
        else:
            assert handle is None
        assert [is_sharded(module) for module in fsdp_modules(model)] == [False, True, True, True]
        assert_equal(model.head.weight.detach(), plain.head.weight.detach().to(dtype), "whole")
        assert_equal(model.head.bias.detach(), plain.head.bias.detach().to(dtype), "whole")
        with CountCollectives() as counted:
            model.unshard()
        assert counted.all_gathers == 0, "it is unsharded already"
        model.reshard()
        model.reshard()
        assert is_sharded(model)
        assert model.head.weight is shards[0]
        assert model.head.bias is shards[1]
    steps = train_sharded(model, adamw, regression_loss, mlp_batches())
    unsharded = train_unsharded(
        mlp(), adamw, regression_loss, mlp_batches(), slices=True, mixed=mixed
    )
    if dist.get_world_size() == 2:
        assert_equal(steps, unsharded, "training after that")
    assert_close(steps[0].grads, unsharded[0].grads, REORDERED_FP32, "training after that")


@ranks(2)
def test_unshard_ahead_of_forward_is_not_repeated() -> None:
    def run(api: Any) -> Any:
        model = shard(api, mlp())
        results = []
        for batch in mlp_batches():
            handles = [module.unshard(async_op=True) for module in fsdp_modules(model)]
            with CountCollectives() as forward:
                loss = regression_loss(model, my_part(batch))
            assert forward.all_gathers == 0
            loss.backward()
            results.append([loss.detach(), full_grads(model)])
            model.zero_grad()
            assert len(handles) == 4
        return results

    same_as_torch(run)


@ranks(2)
def test_handle_that_is_never_waited_for() -> None:
    """reshard() takes back an unshard still in flight."""
    model = shard(OURS, mlp())
    model.unshard(async_op=True)
    model.reshard()
    assert is_sharded(model)
    steps = train_sharded(model, adamw, regression_loss, mlp_batches())
    plain = train_unsharded(mlp(), adamw, regression_loss, mlp_batches())
    assert_close(steps, plain, FP32, "unsharded")


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_whole_parameter_is_one_object(reshard_after_forward: bool) -> None:
    """Whoever keeps the whole parameter, as autograd does, sees the same one at every unshard."""
    model = shard(OURS, mlp(), reshard_after_forward=reshard_after_forward)
    seen: list[list[nn.Parameter]] = []
    model.layers[1].register_forward_pre_hook(lambda m, _: seen.append([m.weight, m.bias]))
    for batch in mlp_batches():
        regression_loss(model, my_part(batch)).backward()
    with torch.no_grad():
        model(torch.randn(2, DIM))
    model.layers[1].unshard()
    seen.append([model.layers[1].weight, model.layers[1].bias])
    assert len(seen) == STEPS + 2
    for weight, bias in seen:
        assert isinstance(weight, nn.Parameter)
        assert not isinstance(weight, DTensor)
        assert weight is seen[0][0]
        assert bias is seen[0][1]


@ranks(2)
def test_units_are_freed_as_the_iteration_moves_on() -> None:
    """Two units on from a unit, in forward as in backward, it is sharded again."""
    model = shard(OURS, seeded(partial(MLP, depth=5)))
    layers = list(model.layers)
    whole: list[list[int]] = []

    def note(*_: Any) -> None:
        whole.append([i for i, layer in enumerate(layers) if not is_sharded(layer)])

    for layer in layers:
        layer.register_forward_pre_hook(note)
        layer.register_forward_hook(lambda _, __, output: output.register_hook(note) and None)
    for batch in mlp_batches():
        whole.clear()
        loss = regression_loss(model, my_part(batch))
        assert all(is_sharded(layer) for layer in layers), "at the loss"
        loss.backward()
        assert all(is_sharded(layer) for layer in layers), "after backward"
        assert len(whole) == 10
        # Layer i is about to run forward, then the gradient of layer i's output is there.
        for i, there in zip([0, 1, 2, 3, 4, 4, 3, 2, 1, 0], whole, strict=True):
            assert set(there) <= {i - 1, i, i + 1}, whole


@ranks(2)
def test_resharding_frees_the_whole_parameter() -> None:
    """Its storage is emptied in place, so that a reference to it costs nothing."""
    model = shard(OURS, mlp())
    model.unshard()
    whole = model.head.weight
    assert whole.untyped_storage().nbytes() >= whole.numel() * whole.element_size()
    model.reshard()
    assert whole.untyped_storage().nbytes() == 0


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_optimizer_step_reaches_parameters_that_are_whole(
    reshard_after_forward: bool | None,
) -> None:
    """An evaluation between backward and step leaves parameters gathered, with their old values.

    torch's FSDP2 goes on computing with those, so the unsharded model is the only judge.
    """
    plain = mlp()
    model = shard(OURS, mlp(), reshard_after_forward=reshard_after_forward)
    x, _ = batch = one_batch()
    for trained, part in ((plain, batch), (model, my_part(batch))):
        optimizer = adamw(trained.parameters())
        regression_loss(trained, part).backward()
        with torch.no_grad():
            trained(x)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert_close(model(x), plain(x), FP32, "after the step")


# -- other methods as forward ---------------------------------------------------------------------


class _Coder(nn.Module):
    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Tanh of a linear map."""
        return torch.tanh(self.linear(x)) * scale

    def decode(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.linear(x)}

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("call encode and decode")


class _CodersModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coders = nn.ModuleList(_Coder() for _ in range(2))
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        for coder in self.coders:
            x = coder.decode(coder.encode(x, scale=0.5))["out"]
        return self.head(x)


@ranks(2)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_register_fsdp_forward_method(mixed: bool) -> None:
    def run(api: Any) -> Any:
        model = shard(api, seeded(_CodersModel), mixed=mixed, reshard_after_forward=True)
        for coder in model.coders:
            api.register_fsdp_forward_method(coder, "encode")
            api.register_fsdp_forward_method(coder, "decode")
        assert model.coders[0].encode.__doc__ == "Tanh of a linear map."
        steps = train_sharded(model, adamw, regression_loss, mlp_batches())
        assert all(is_sharded(coder.linear) for coder in model.coders)
        return steps

    ours = same_as_torch(run)
    plain = train_unsharded(
        seeded(_CodersModel), adamw, regression_loss, mlp_batches(), slices=True, mixed=mixed
    )
    assert_equal(ours, plain, "unsharded")


@ranks(2)
def test_register_fsdp_forward_method_elsewhere() -> None:
    """Does nothing on a module that is not sharded; names a method that is not there."""
    plain = _Coder()
    register_fsdp_forward_method(plain, "encode")
    assert "encode" not in vars(plain)
    sharded = _Coder()
    fully_shard(sharded, mesh=world_mesh())
    with pytest.raises(ValueError, match="recode"):
        register_fsdp_forward_method(sharded, "recode")


# -- exceptions -----------------------------------------------------------------------------------


class _BoomError(Exception):
    """What the tests below throw."""


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("unit", [0, 2])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_recovery_from_an_exception(
    phase: str, unit: int, reshard_after_forward: bool | None
) -> None:
    """After reset_iter_state() the next iteration is that of a fresh model.

    torch's FSDP2 adds the gradients that a failed backward left on whole parameters.
    """

    def boom(*_: Any) -> None:
        if armed:
            raise _BoomError

    model = shard(OURS, mlp(), reshard_after_forward=reshard_after_forward)
    if phase == "forward":
        model.layers[unit].register_forward_pre_hook(boom)
    else:
        model.layers[unit].register_forward_hook(
            lambda _, __, output: output.register_hook(boom) and None
        )
    fresh = shard(OURS, mlp(), reshard_after_forward=reshard_after_forward)
    for batch in mlp_batches()[:2]:
        armed = True
        with pytest.raises(_BoomError):
            regression_loss(model, my_part(batch)).backward()
        armed = False
        model.reset_iter_state()
        assert [is_sharded(module) for module in fsdp_modules(model)] == [True] * 4
        model.zero_grad()
        results = []
        for recovered in (model, fresh):
            with CountCollectives() as counted:
                loss = regression_loss(recovered, my_part(batch))
                loss.backward()
            results.append([loss.detach(), full_grads(recovered), counted.counts])
            recovered.zero_grad()
        assert_equal(results[0], results[1], "a fresh model's iteration")


@ranks(2)
def test_recovery_drops_gradients_that_were_not_reduced() -> None:
    model, fresh = shard(OURS, mlp()), shard(OURS, mlp())
    first, second = mlp_batches()[:2]
    model.set_requires_gradient_sync(False)
    regression_loss(model, my_part(first)).backward()
    model.set_requires_gradient_sync(True)

    def boom(_: Tensor) -> None:
        raise _BoomError

    output = model(my_part(first)[0])
    output.register_hook(boom)
    with pytest.raises(_BoomError):
        output.sum().backward()
    model.reset_iter_state()
    model.zero_grad()
    for recovered in (model, fresh):
        regression_loss(recovered, my_part(second)).backward()
    assert_equal(full_grads(model), full_grads(fresh), "a fresh model's iteration")


@ranks(2)
def test_reset_iter_state_is_for_the_root() -> None:
    model = shard(OURS, mlp())
    model(torch.randn(2, DIM)).sum().backward()
    with pytest.raises((RuntimeError, ValueError), match="root"):
        model.layers[0].reset_iter_state()
    grads = full_grads(model)
    model.reset_iter_state()
    assert_equal(full_grads(model), grads, "gradients that were complete")


# -- what users see -------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_state_dict_while_parameters_are_whole(reshard_after_forward: bool | None) -> None:
    """state_dict() has the shards at any time; taking it in the middle of a step does no harm."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=reshard_after_forward)
        loss = regression_loss(model, my_part(one_batch()))
        assert not is_sharded(model)
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        loss.backward()
        return [{name: full(value) for name, value in state.items()}, full_grads(model)]

    state, grads = same_as_torch(run)
    plain = mlp()
    regression_loss(plain, one_batch()).backward()
    assert_equal(state, dict(plain.state_dict()), "state dict")
    assert_close(grads, full_grads(plain), FP32, "unsharded")


@ranks(2)
def test_state_dict_stays_live() -> None:
    """Its tensors share storage with the parameters, so they follow the training."""
    model = shard(OURS, mlp())
    state = model.state_dict()
    steps = train_sharded(model, adamw, regression_loss, mlp_batches())
    assert_equal({name: full(value) for name, value in state.items()}, steps[-1].params, "live")


@ranks(2)
def test_load_state_dict_between_steps() -> None:
    """Shards go in, by value and by assignment; the next forward computes with them."""
    source, plain = shard(OURS, seeded(MLP, seed=7)), seeded(MLP, seed=7)
    for assign in (False, True):
        model = shard(OURS, mlp())
        regression_loss(model, my_part(one_batch())).backward()
        model.zero_grad()
        state = {name: value.clone() for name, value in source.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        steps = train_sharded(model, adamw, regression_loss, mlp_batches())
        expected = train_unsharded(
            seeded(MLP, seed=7), adamw, regression_loss, mlp_batches(), slices=True
        )
        assert_equal(steps, expected, f"assign={assign}")
    assert_equal(full_params(source), full_params(plain), "the source")


@ranks(2, extended=(4,))
def test_post_accumulate_grad_hooks() -> None:
    """Once per parameter and backward, when its reduced gradient is there; never without sync."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=True)
        fired: list[tuple[str, Tensor]] = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda p, name=name: fired.append((name, p.grad.to_local().clone()))
            )
        results = []
        # A new gradient, one that is added to it, one that stays back and one that it goes with.
        for sync, zero in ((True, False), (True, True), (False, False), (True, True)):
            model.set_requires_gradient_sync(sync)
            regression_loss(model, my_part(one_batch())).backward()
            for name, local in fired:
                assert_equal(model.get_parameter(name).grad.to_local(), local, name)
            results.append(sorted(fired, key=lambda pair: pair[0]))
            fired.clear()
            if zero:
                model.zero_grad()
        return results

    results = same_as_torch(run)
    names = sorted(name for name, _ in mlp().named_parameters())
    assert [[name for name, _ in fired] for fired in results] == [names, names, [], names]


@ranks(2)
def test_optimizer_in_backward() -> None:
    """A post-accumulate-grad hook that steps and frees the gradient at once."""
    model, plain = shard(OURS, mlp()), mlp()
    optimizers = {}
    for param in model.parameters():
        optimizers[param] = torch.optim.SGD([param], lr=0.1)

        def step(param: nn.Parameter) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        param.register_post_accumulate_grad_hook(step)
    for batch in mlp_batches():
        regression_loss(model, my_part(batch)).backward()
        assert all(param.grad is None for param in model.parameters())
    sgd = partial(torch.optim.SGD, lr=0.1)
    expected = train_unsharded(plain, sgd, regression_loss, mlp_batches(), slices=True)
    assert_equal(full_params(model), expected[-1].params, "unsharded")


@ranks(2)
def test_classes_and_names() -> None:
    """A sharded module is still what it was, and an FSDPModule; torch's own names fit."""
    model = mlp()
    before = [name for name, _ in model.named_parameters()]
    shard(OURS, model)
    assert isinstance(model, MLP)
    assert isinstance(model, FSDPModule)
    assert isinstance(model.layers[0], nn.Linear)
    assert isinstance(model.layers[0], FSDPModule)
    assert type(model).__name__ == "FSDPMLP"
    assert [name for name, _ in model.named_parameters()] == before
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())
    for name in ("OffloadPolicy", "MixedPrecisionPolicy"):
        assert hasattr(fsdp2, name)
    assert fully_shard(nn.Linear(2, 2), mesh=world_mesh(), offload_policy=fsdp2.OffloadPolicy())


@ranks(2)
def test_fully_shard_returns_the_module() -> None:
    linear = nn.Linear(DIM, DIM)
    assert fully_shard(linear, mesh=world_mesh()) is linear
    pair = [nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)]
    assert fully_shard(pair, mesh=world_mesh()) == pair


@ranks(2)
def test_nested_units_match_their_flat_count() -> None:
    """Every unit is gathered once in forward; all but the root's once more in backward."""

    def run(api: Any) -> Any:
        model = shard(api, seeded(Nested))
        results = []
        for batch in regression_batches(DIM, 3, steps=3):
            with CountCollectives() as forward:
                loss = regression_loss(model, my_part(batch))
            with CountCollectives() as backward:
                loss.backward()
            results.append([forward.counts, backward.counts])
        return results

    for forward, backward in same_as_torch(run):
        assert forward == {"all_gather": 5, "reduce_scatter": 0, "all_reduce": 0}
        assert backward == {"all_gather": 4, "reduce_scatter": 5, "all_reduce": 0}


# -- mixed precision ------------------------------------------------------------------------------


@dataclass
class _Batch:
    x: Tensor
    extras: list[dict[str, Tensor]]


class _Recorder(nn.Module):
    """Notes the dtypes of everything it gets and of its own parameters."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, batch: _Batch, *, mask: Tensor, double: Tensor) -> dict[str, Any]:
        extras = batch.extras[0]
        self.seen = {
            "x": batch.x.dtype,
            "extra": extras["float"].dtype,
            "int": extras["int"].dtype,
            "mask": mask.dtype,
            "double": double.dtype,
            "weight": self.linear.weight.dtype,
        }
        x = self.linear(batch.x.to(self.linear.weight.dtype))
        return {"x": x, "more": (x.sum(), extras["int"])}


@ranks(2)
@pytest.mark.parametrize("cast_forward_inputs", [True, False])
@pytest.mark.parametrize("output_dtype", [None, torch.float32, torch.float64])
def test_mixed_precision_casts(cast_forward_inputs: bool, output_dtype: torch.dtype | None) -> None:
    """Floating-point inputs are cast wherever they are, fp64 included; ints and bools never are."""

    def run(api: Any) -> Any:
        model = seeded(_Recorder)
        policy = api.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            output_dtype=output_dtype,
            cast_forward_inputs=cast_forward_inputs,
        )
        api.fully_shard(model, mesh=world_mesh(), mp_policy=policy)
        x = torch.ones(2, DIM, requires_grad=True)
        extras = [{"float": torch.ones(2), "int": torch.ones(2, dtype=torch.int64)}]
        output = model(
            _Batch(x, extras),
            mask=torch.ones(2, dtype=torch.bool),
            double=torch.ones(2, dtype=torch.float64),
        )
        output["x"].float().sum().backward()
        dtypes = [output["x"].dtype, output["more"][0].dtype, output["more"][1].dtype]
        grads = full_grads(model)
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        return [model.seen, dtypes, x.grad, grads]

    seen, dtypes, _, _ = same_as_torch(run)
    floats = torch.bfloat16 if cast_forward_inputs else torch.float32
    doubles = torch.bfloat16 if cast_forward_inputs else torch.float64
    assert seen == {
        "x": floats,
        "extra": floats,
        "int": torch.int64,
        "mask": torch.bool,
        "double": doubles,
        "weight": torch.bfloat16,
    }
    out = output_dtype or torch.bfloat16
    assert dtypes == [out, out, torch.int64]


@ranks(2, extended=(4,))
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (None, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float64),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_other_dtypes_to_compute_and_reduce_in(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> None:
    """Every combination gives fp32 gradients; fp16 is divided before and after the sum."""

    def run(api: Any) -> Any:
        policy = api.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        model = shard(api, mlp(), mp_policy=policy)
        loss = regression_loss(model, my_part(one_batch()))
        loss.backward()
        return [loss.detach(), full_grads(model)]

    # A sum of two has one order; a sum of four in 16 bits takes three roundings of up to 2**-9.
    loss, grads = same_as_torch(run, mixed=True)
    assert loss.dtype == torch.float32
    assert {grad.dtype for grad in grads.values()} == {torch.float32}


@ranks(2)
def test_dtype_is_resolved_at_the_first_forward() -> None:
    """A model that is recast after sharding computes and reduces in its new dtype."""

    def run(api: Any) -> Any:
        model = shard(api, mlp()).to(torch.float64)
        x, _ = my_part(one_batch())
        output = model(x.double())
        output.sum().backward()
        return [output.detach(), full_grads(model)]

    output, grads = same_as_torch(run)
    assert output.dtype == torch.float64
    assert {grad.dtype for grad in grads.values()} == {torch.float64}
    assert len(units(mlp())) == 3


LENT: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda weight: weight,
    "a view": lambda weight: weight.t(),
    "views, nested": lambda weight: ["a", {"b": (weight[:4], weight[4:])}],
}


class Lender(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 4)
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight, LENT[self.what](self.weight)


class Borrower(nn.Module):
    """Reads a parameter that a unit returned, after another unit has run."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.lender, self.between = Lender(what), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x, lent = self.lender(x)
        weight = torch.cat(lent[1]["b"]) if isinstance(lent, list) else lent
        return self.between(x) @ weight + weight.sum()


@ranks(2)
@pytest.mark.parametrize("what", LENT)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_unit_that_returns_its_parameters(frozen: bool, what: str) -> None:
    """It is freed by backward, not before; torch's FSDP2 frees what the caller still has."""
    plain, model = seeded(partial(Borrower, what)), seeded(partial(Borrower, what))
    for module in (plain, model):
        module.lender.requires_grad_(not frozen)
    fully_shard([model.lender, model.between] if what == "itself" else model.lender)
    fully_shard(model)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(2):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_close(model(x), plain(x), FP32)
        for module in (plain, model):
            module.zero_grad()
            module(x).sum().backward()
        expected = {name: param.grad for name, param in plain.named_parameters()}
        assert_close(full_grads(model), expected, FP32)
        assert not any(unit.is_gathered for unit in hooks_on(model).scheduler.units)  # type: ignore[union-attr]  # it has run
