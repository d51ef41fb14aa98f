"""Which gradients arrive, and when: accumulation, freezing, unused parts, hooks.

A scenario runs with torch's FSDP2 and with ours where torch can do it; the
unsharded model judges the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.common import gradients, models, parity
from tests.common.backends import packs
from tests.common.workers import ranks

# -- accumulation ---------------------------------------------------------------------------------


@ranks(2, extended=(4,))
@pytest.mark.parametrize("keep", [False, True], ids=["free", "keep"])
@pytest.mark.parametrize("last_only", [False, True], ids=["every-is-last", "last-is-last"])
def test_accumulation_with_every_flag(last_only: bool, keep: bool) -> None:
    """The three flags of an accumulation loop together, over two steps of an optimizer."""

    def run(api: Any) -> Any:
        model = parity.shard(api, models.seeded(models.Nested), reshard_after_forward=True)
        optimizer = parity.adamw(model.parameters())
        results = []
        for _ in range(2):
            for i, batch in enumerate(batches):
                last = i == len(batches) - 1
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last or not last_only)
                model.set_reshard_after_backward(last or not keep)
                parity.regression_loss(model, parity.my_part(batch)).backward()
            grads = parity.full_grads(model)
            optimizer.step()
            optimizer.zero_grad()
            results.append([grads, parity.full_params(model)])
        return results

    batches = parity.regression_batches(models.DIM, 3, steps=3)
    ours = parity.same_as_torch(run)

    def compute(plain: nn.Module, rank: int) -> None:
        for batch in batches:
            parity.regression_loss(plain, parity.my_part(batch, rank)).backward()

    gradients.assert_like_unsharded(ours[0][0], models.seeded(models.Nested), compute)


@ranks(2)
def test_parameters_unused_in_some_microbatches() -> None:
    """What ran only in a microbatch without sync is reduced at the next sync, and only then."""
    choices = [("a",), ("b",), ("a", "b"), ("b",)]

    def run(api: Any) -> Any:
        model = parity.shard(api, models.seeded(models.Choosy), reshard_after_forward=True)
        results = []
        for first in (0, 2):
            for i in (first, first + 1):
                model.set_requires_gradient_sync(i == first + 1)
                model.active = choices[i]
                parity.regression_loss(model, parity.my_part(batches[i])).backward()
            results.append(parity.full_grads(model))
            model.zero_grad()
        return results

    batches = parity.regression_batches(models.DIM, 2, steps=len(choices))
    ours = parity.same_as_torch(run)
    for grads, first in zip(ours, (0, 2), strict=True):

        def compute(plain: Any, rank: int, first: int = first) -> None:
            for i in (first, first + 1):
                plain.active = choices[i]
                parity.regression_loss(plain, parity.my_part(batches[i], rank)).backward()

        gradients.assert_like_unsharded(
            grads, models.seeded(models.Choosy), compute, f"microbatches from {first}"
        )
        assert grads["choices.c.weight"] is None
        assert grads["choices.a.weight"] is not None


@ranks(2)
def test_freezing_between_microbatches() -> None:
    """A parameter frozen after a microbatch keeps the gradient that it had: it is reduced."""

    def run(api: Any) -> Any:
        model = parity.shard(api, gradients.mlp(), reshard_after_forward=True)
        model.set_requires_gradient_sync(False)
        parity.regression_loss(model, gradients.part(0)).backward()
        model.layers[1].weight.requires_grad_(False)
        model.set_requires_gradient_sync(True)
        parity.regression_loss(model, gradients.part(1)).backward()
        return parity.full_grads(model)

    def compute(plain: Any, rank: int) -> None:
        plain.requires_grad_(True)
        parity.regression_loss(plain, gradients.part(0, rank)).backward()
        plain.layers[1].weight.requires_grad_(False)
        parity.regression_loss(plain, gradients.part(1, rank)).backward()

    gradients.assert_like_unsharded(run(parity.OURS), gradients.mlp(), compute)


@ranks(2)
@pytest.mark.parametrize("after", ["evaluation", "kept"])
def test_zero_grad_while_parameters_are_gathered(after: str) -> None:
    """`model.zero_grad()` clears the shards' gradients too when those are not registered.

    With torch's FSDP2 it sees the gathered parameters only, and old gradients stay.
    """
    model, fresh = (
        parity.shard(parity.OURS, gradients.mlp()),
        parity.shard(parity.OURS, gradients.mlp()),
    )
    model.set_reshard_after_backward(after != "kept")
    parity.regression_loss(model, gradients.part(0)).backward()
    if after == "evaluation":
        with torch.no_grad():
            model(gradients.part(0)[0])
    model.zero_grad()
    model.set_reshard_after_backward(True)
    for trained in (model, fresh):
        parity.regression_loss(trained, gradients.part(1)).backward()
    parity.assert_equal(
        parity.full_grads(model), parity.full_grads(fresh), "the second batch alone"
    )


@ranks(2)
def test_zero_grad_to_zeros() -> None:
    """`set_to_none=False` keeps the gradients' tensors, as zeros, registered or not."""
    model = parity.shard(parity.OURS, gradients.mlp())
    parity.regression_loss(model, gradients.part(0)).backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    with torch.no_grad():
        model(gradients.part(0)[0])  # the root stays gathered
    model.zero_grad(set_to_none=False)
    model.reshard()
    for name, param in model.named_parameters():
        assert param.grad is grads[name], name
        assert not param.grad.to_local().any(), name


# -- freezing -------------------------------------------------------------------------------------


@ranks(2, extended=(4,))
def test_freezing_within_and_across_groups() -> None:
    """Other parameters are frozen in every step: one of a group, a group, all but one."""
    names = [name for name, _ in gradients.mlp().named_parameters()]
    plans = [
        set(),
        {"layers.0.weight", "layers.2.bias"},
        {"layers.1.weight", "layers.1.bias"},
        set(names) - {"layers.0.bias"},
        set(names) - {"head.weight"},
        set(),
    ]
    batches = parity.regression_batches(models.DIM, 4, steps=len(plans))

    def freeze(plan: Any, model: nn.Module, part: Any) -> Tensor:
        frozen = next(plan)
        for name, param in model.named_parameters():
            param.requires_grad_(name not in frozen)
        return parity.regression_loss(model, part)

    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = parity.shard(parity.OURS, gradients.mlp(), reshard_after_forward=True)
    ours = parity.train_sharded(model, sgd, partial(freeze, iter(plans)), batches)
    plan_of_ranks = iter([plan for plan in plans for _ in range(dist.get_world_size())])
    plain = parity.train_unsharded(
        gradients.mlp(), sgd, partial(freeze, plan_of_ranks), batches, slices=True
    )
    if dist.get_world_size() == 2:
        parity.assert_equal(ours, plain, "unsharded")
    else:
        parity.assert_close(ours, plain, parity.REORDERED_FP32, "unsharded")
    for plan, step in zip(plans, ours, strict=True):
        assert {name for name, grad in step.grads.items() if grad is None} == plan


@ranks(2)
def test_inputs_require_grad_and_all_parameters_are_frozen() -> None:
    """Backward runs through frozen units for the inputs' sake, and reduces nothing."""

    def run(api: Any) -> Any:
        model = parity.shard(api, gradients.mlp().requires_grad_(False), reshard_after_forward=True)
        grads = []
        for batch in gradients.mlp_batches():
            x = parity.my_part(batch)[0].requires_grad_()
            output = model(x)
            with parity.CountCollectives() as backward:
                output.square().sum().backward()
            assert backward.reduce_scatters == 0
            grads.append(x.grad)
        assert all(param.grad is None for param in model.parameters())
        return grads

    ours = parity.same_as_torch(run)
    plain = gradients.mlp().requires_grad_(False)
    for batch, grad in zip(gradients.mlp_batches(), ours, strict=True):
        x = parity.my_part(batch)[0].requires_grad_()
        plain(x).square().sum().backward()
        parity.assert_equal(grad, x.grad, "unsharded")


@ranks(2)
def test_frozen_parameters_are_not_reduced() -> None:
    """What is frozen adds nothing to the bytes of a reduction."""

    def reduced(*frozen: str) -> int:
        model = gradients.mlp()
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        parity.shard(parity.OURS, model)
        with parity.CountCollectives() as counted:
            parity.regression_loss(model, gradients.part(0)).backward()
        return counted.elements["reduce_scatter"]

    weight = (
        models.DIM * models.DIM + models.DIM * models.DIM // 2
    )  # the input of the collective and a rank's half of it
    assert reduced() - reduced("layers.0.weight") == weight
    assert reduced() - reduced("layers.0.weight", "layers.2.weight") == 2 * weight


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_unused_units_and_parameters(reshard_after_forward: bool) -> None:
    """Another choice of units runs in every step; what did not run has no gradient."""
    choices = [("a", "c"), ("b",), ("c", "a"), ("a", "b", "c"), ()]

    def loss(choosing: Any, model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        model.active = next(choosing)
        return parity.regression_loss(model, part)

    def train(api: Any) -> Any:
        model = parity.shard(
            api, models.seeded(models.Choosy), reshard_after_forward=reshard_after_forward
        )
        return parity.train_sharded(model, parity.adamw, partial(loss, iter(choices)), batches)

    batches = parity.regression_batches(models.DIM, 2, steps=len(choices))
    ours = parity.same_as_torch(train)
    plain = parity.train_unsharded(
        models.seeded(models.Choosy), parity.adamw, partial(loss, iter(choices)), batches
    )
    parity.assert_close(ours, plain, parity.FP32, "unsharded")
    for active, step in zip(choices, ours, strict=True):
        without = {name for name, grad in step.grads.items() if grad is None}
        expected = {
            f"choices.{c}.{p}" for c in "abc" if c not in active for p in ("weight", "bias")
        }
        assert without == expected | {"spare.weight", "spare.bias"}


# -- ranks that use different parts ---------------------------------------------------------------


class _Experts(nn.Module):
    """A unit of two linears; `used` says which of them this rank needs."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(models.DIM, models.DIM) for _ in range(2))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        y = x
        for i in used:
            y = y + torch.tanh(self.experts[i](x))
        return y


class _Mixture(nn.Module):
    """Units of experts in a row, of which each rank uses its own; all ranks run all units.

    `detach` names units whose result this rank drops: they get no gradient there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.DIM, models.DIM)
        self.blocks = nn.ModuleList(_Experts() for _ in range(4))
        self.head = nn.Linear(models.DIM, 4)
        self.use((0, 1))

    def use(self, experts: tuple[int, ...], drop: tuple[int, ...] = ()) -> None:
        self.experts, self.drop = experts, drop

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            y = block(x, self.experts)
            x = x if i in self.drop else y
        return self.head(x)


# Which experts and which units each rank uses, step by step.
_USES: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = [
    [((0, 1), ()), ((0,), ()), ((1,), ()), ((), ())],  # experts by rank
    [((0,), ()), ((0,), (1,)), ((1,), (1, 2)), ((0, 1), (0, 3))],  # whole units by rank
    [((0, 1), (2,)), ((0, 1), (2,)), ((0, 1), (2,)), ((0, 1), (2,))],  # a unit that nobody uses
    [((0, 1), (0, 1, 2, 3)), ((0, 1), ()), ((0,), (0, 1)), ((1,), (2, 3))],
]


@packs
@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("use", range(len(_USES)))
def test_ranks_that_use_different_parameters(use: int, reshard_after_forward: bool) -> None:
    """With `set_reduce_scatter_unused_params`, ranks agree on every collective: zeros travel for
    what a rank has not used, and each rank gets a gradient for all of its rows."""
    model = parity.shard(
        parity.OURS, models.seeded(_Mixture), reshard_after_forward=reshard_after_forward
    )
    model.set_reduce_scatter_unused_params(True)
    for _ in range(2):  # in the second step, with the order of the first one
        model.zero_grad()
        model.use(*_USES[use][dist.get_rank()])
        with parity.CountCollectives() as backward:
            parity.regression_loss(model, gradients.part(0)).backward()
        assert backward.reduce_scatters == 5
        gathers = [None] * dist.get_world_size()
        dist.all_gather_object(gathers, backward.counts)
        assert gathers == [backward.counts] * dist.get_world_size()

    def compute(plain: Any, rank: int) -> None:
        plain.use(*_USES[use][rank])
        for param in plain.parameters():
            param.grad = torch.zeros_like(param)
        parity.regression_loss(plain, gradients.part(0, rank)).backward()

    gradients.assert_like_unsharded(parity.full_grads(model), models.seeded(_Mixture), compute)


@packs
@ranks(2)
def test_part_of_a_group_unused_on_one_rank_does_not_hang() -> None:
    """By default ranks run the same collectives as long as each uses something of a group; a rank
    that used nothing of a parameter takes its rows of what others had."""
    model = parity.shard(parity.OURS, models.seeded(_Mixture))
    model.use((0, 1) if dist.get_rank() == 0 else (0,))
    with parity.CountCollectives() as backward:
        parity.regression_loss(model, gradients.part(0)).backward()
    assert backward.reduce_scatters == 5
    assert model.blocks[0].experts[1].weight.grad is not None


@ranks(2)
def test_reducing_unused_parameters_is_recursive_and_can_be_turned_off() -> None:
    model = parity.shard(parity.OURS, models.seeded(models.Choosy), reshard_after_forward=True)
    without = {name for name, _ in model.named_parameters() if "choices.b" in name}
    spare = {"spare.weight", "spare.bias"}
    batch = parity.regression_batches(models.DIM, 2, steps=1)[0]
    for flag, recurse, expected in (
        (True, True, set()),
        (False, False, spare),
        (False, True, spare | without),
    ):
        model.set_reduce_scatter_unused_params(flag, recurse=recurse)
        parity.regression_loss(model, parity.my_part(batch)).backward()
        missing = {name for name, param in model.named_parameters() if param.grad is None}
        assert missing == expected, (flag, recurse)
        model.zero_grad()


# -- hooks on parameters --------------------------------------------------------------------------


@ranks(2, extended=(4,))
@pytest.mark.parametrize(
    "build", [gradients.mlp, partial(models.seeded, models.Repeated)], ids=["mlp", "repeated"]
)
def test_optimizer_in_backward(build: Callable[[], nn.Module]) -> None:
    """A hook that steps as soon as a gradient is there, while other units' backward still runs."""
    model = parity.shard(parity.OURS, build(), reshard_after_forward=True)
    outputs = 4 if isinstance(model, models.MLP) else 2
    batches = parity.regression_batches(models.DIM, outputs, steps=4)
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2, foreach=True) for p in model.parameters()}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for batch in batches:
        with torch.no_grad():
            model(parity.my_part(batch)[0])  # leaves the root gathered
        parity.regression_loss(model, parity.my_part(batch)).backward()
        assert all(param.grad is None for param in model.parameters())
    expected = parity.train_unsharded(
        build(), parity.adamw, parity.regression_loss, batches, slices=True
    )[-1].params
    if dist.get_world_size() == 2:
        parity.assert_equal(parity.full_params(model), expected, "unsharded")
    else:
        parity.assert_close(parity.full_params(model), expected, parity.REORDERED_FP32, "unsharded")
