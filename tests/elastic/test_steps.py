"""Steps of replica groups: what travels, what each group gets, and what a dropped step leaves."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

import fsdp2
from fsdp2 import elastic
from fsdp2.testing.counting import called
from fsdp2.testing.null_group import null_mesh, null_world
from tests.common import combinations, models, parity
from tests.common.errors import raises
from tests.elastic import replica_groups
from tests.elastic.replica_groups import StandIn

pytestmark = pytest.mark.alone

DIM, BLOCKS, STEPS = 6, 2, 4


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """One rank per group: nothing travels inside of a group."""
    with null_world(1):
        yield


class Block(nn.Module):
    """Two layers, of which a call may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.second(x) if both else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        for block in self.blocks:
            x = block(x, both)
        return self.norm(x)


SEEDING = threading.Lock()


def seeded(make: Callable[[], nn.Module] = Model) -> Any:
    """Groups are threads, and the generator of random numbers is one."""
    with SEEDING:
        return models.seeded(make)


def shard(root: bool = True, **options: Any) -> Any:
    model = seeded()
    for module in (*model.blocks, model)[: None if root else BLOCKS]:
        fsdp2.fully_shard(module, mesh=null_mesh(1), **options)
    return model


def inputs(step: int, group: int = 0) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(100 * step + group))


def loss(model: nn.Module, x: Tensor, *arguments: Any) -> Tensor:
    return model(x, *arguments).square().sum()


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else getattr(p.grad, "_local_tensor", p.grad).clone()
        for name, p in model.named_parameters()
    }


def plain_grads(*arguments: Any) -> dict[str, Tensor | None]:
    model = seeded()
    loss(model, *arguments).backward()
    return grads(model)


def average(grads: list[dict[str, Tensor | None]]) -> dict[str, Tensor | None]:
    """Over groups; a group without a gradient counts as zeros."""
    found: dict[str, Tensor | None] = {}
    for name in grads[0]:
        there = [g for each in grads if (g := each[name]) is not None]
        found[name] = functools.reduce(torch.add, there) / len(grads) if there else None
    return found


# ---- what travels


def test_one_all_reduce_per_unit() -> None:
    model, manager = shard(), StandIn()
    steps = elastic.attach(model, manager)
    for step in range(3):
        steps.begin()
        loss(model, inputs(step)).backward()
        # rows, and a mark for each parameter
        block = 2 * (DIM * DIM + DIM)
        assert sorted(manager.sent) == [2 * DIM + 4, *[block + 4] * BLOCKS]


@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_the_last_micro_batch_alone_travels(setter: str) -> None:
    model, manager = shard(), StandIn()
    steps = elastic.attach(model, manager)
    steps.begin()
    plain = seeded()
    for micro in range(3):
        getattr(model, setter)(micro == 2)
        loss(model, inputs(micro)).backward()
        loss(plain, inputs(micro)).backward()
        assert len(manager.sent) == (1 + BLOCKS if micro == 2 else 0)
    parity.assert_equal(grads(model), grads(plain))


def test_who_does_not_attach_pays_nothing() -> None:
    model = shard()

    def step() -> None:
        loss(model, inputs(0)).backward()
        model.zero_grad()

    for _ in range(3):
        step()
    before = called(step)
    steps = elastic.attach(model, StandIn())
    steps.begin()
    step()
    assert called(step) != before
    steps.detach()
    for _ in range(3):
        step()
    assert called(step) == before


def test_whole_and_loose_parameters_share_an_all_reduce_each() -> None:
    model = seeded()
    whole = lambda p: Replicate() if p.dim() == 1 else None  # noqa: E731
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=null_mesh(1), shard_placement_fn=whole)
    manager = StandIn()
    steps = elastic.attach(model, manager)
    steps.begin()
    loss(model, inputs(0)).backward()
    matrices, biases, norm = 2 * DIM * DIM + 4, 2 * DIM + 4, 2 * DIM + 2
    # blocks are roots, each with all of its whole parameters in one tensor
    assert sorted(manager.sent) == sorted([*[matrices, biases] * BLOCKS, norm])
    parity.assert_equal(grads(model), plain_grads(inputs(0)))


# ---- what each group gets

MIXED = fsdp2.MixedPrecisionPolicy(torch.float32, torch.bfloat16)


@combinations.each_once(groups=[2, 3], root=[True, False], keep=[False, True])
def test_every_group_gets_the_average(groups: int, root: bool, keep: bool) -> None:
    def run(manager: StandIn, group: int) -> Any:
        model = shard(root)
        for module in model.modules():
            if keep and isinstance(module, fsdp2.FSDPModule):
                module.set_tuning(keep_gradients=True)
        steps = elastic.attach(model, manager)
        seen = []
        for step in range(2):
            steps.begin()
            loss(model, inputs(step, group)).backward()
            seen.append(grads(model))
            assert steps.commit()
        return seen

    expected = [
        average([plain_grads(inputs(step, group)) for group in range(groups)]) for step in range(2)
    ]
    for found in replica_groups.run_groups(groups, run):
        parity.assert_equal(found, expected)


def _backward_of(group: int, manager: StandIn, uses: list[bool], root: bool, last: int) -> Any:
    """Gradients where group ``g`` uses the second layers if ``uses[g]``."""
    model = shard(root)
    steps = elastic.attach(model, manager)
    manager.participates = group <= last
    manager.others_participate = last + 1 - manager.participates
    steps.begin()
    loss(model, inputs(0, group), uses[group]).backward()
    return grads(model)


@combinations.each_once(uses=[[True, False], [False, True], [False, False]], root=[True, False])
def test_a_parameter_that_one_group_uses(uses: list[bool], root: bool) -> None:
    """The others count as zeros; what nobody uses has no gradient anywhere."""
    run = lambda manager, group: _backward_of(group, manager, uses, root, 1)  # noqa: E731
    expected = average([plain_grads(inputs(0, group), use) for group, use in enumerate(uses)])
    for found in replica_groups.run_groups(2, run):
        parity.assert_equal(found, expected)


@pytest.mark.parametrize("uses", [[True, True], [True, False], [False, True], [False, False]])
def test_a_group_that_does_not_count(uses: list[bool]) -> None:
    """It gets what the others have: no zeros where it alone had a gradient."""
    run = lambda manager, group: _backward_of(group, manager, uses, True, 0)  # noqa: E731
    expected = plain_grads(inputs(0, 0), uses[0])
    for found in replica_groups.run_groups(2, run):
        parity.assert_equal(found, expected)


@pytest.mark.parametrize("used", [True, False])
def test_loose_parameters(used: bool) -> None:
    """Of a model without units: the second layer of each block is used by group 1, or nobody."""

    def run(manager: StandIn, group: int) -> Any:
        model = seeded()
        steps = elastic.attach(model, manager)
        steps.begin()
        for micro in range(2):  # the average of sums of averages
            loss(model, inputs(micro, group), used and group == 1).backward()
        assert len(manager.sent) == 2
        return grads(model)

    first, second = seeded(), seeded()
    for micro in range(2):
        loss(first, inputs(micro, 0), False).backward()
        loss(second, inputs(micro, 1), used).backward()
    expected = average([grads(first), grads(second)])
    for found in replica_groups.run_groups(2, run):
        torch.testing.assert_close(found, expected)


def test_a_complex_parameter() -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).abs().sum()

    def run(manager: StandIn, group: int) -> Any:
        model = fsdp2.fully_shard(seeded(Wave), mesh=null_mesh(1))
        elastic.attach(model, manager).begin()
        model(torch.tensor(group + 1.0)).backward()
        return grads(model)

    plain = seeded(Wave)
    (plain(torch.tensor(1.0)) / 2 + plain(torch.tensor(2.0)) / 2).backward()
    for found in replica_groups.run_groups(2, run):
        torch.testing.assert_close(found, grads(plain))


# ---- dropped


def _adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _flat(model: nn.Module) -> Any:
    return fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, lr=0.01)


def _muon(model: nn.Module) -> Any:
    return fsdp2.optim.Muon(
        model.named_parameters(), lr=0.01, elementwise_options={"lr": 0.01, "fused": False}
    )


class UsersError(Exception):
    """Of the user's code."""


def _all_reduce(run: Run, micro: int) -> None:
    run.manager.breaks = 1


def _behind(run: Run, micro: int) -> None:
    run.backward(micro)
    run.steps.fail(UsersError())


def _in_backward(run: Run, micro: int) -> None:
    def fail(_: Tensor) -> None:
        raise UsersError

    x = inputs(77).requires_grad_()
    x.register_hook(fail)
    found = loss(run.model, x)
    with pytest.raises(UsersError) as failed:
        found.backward()
    run.steps.fail(failed.value)


def _in_forward(run: Run, micro: int) -> None:
    def fail(*_: object) -> None:
        raise UsersError

    hook = run.model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(UsersError) as failed:
        loss(run.model, inputs(77)).backward()
    hook.remove()
    run.steps.fail(failed.value)


class Run:
    """A training, some of whose steps fail the first time."""

    def __init__(self, make: Callable[[nn.Module], Any], variant: str) -> None:
        self.variant = variant
        self.model, self.manager = shard(), StandIn()
        self.model.set_tuning(keep_gradients=variant == "kept")
        self.optimizer = make(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.ema = fsdp2.optim.EMA(self.model, 0.9)
        scaler = self.scaler if variant == "scaler" else None
        self.steps = elastic.attach(self.model, self.manager, self.optimizer, scaler=scaler)

    def backward(self, seed: int) -> None:
        for last in (False, True):
            if self.variant == "sync":
                self.model.set_requires_gradient_sync(last)
            else:
                self.model.set_requires_all_reduce(last)
            found = loss(self.model, inputs(seed + last))
            (self.scaler.scale(found) if self.variant == "scaler" else found).backward()

    def train(self, fails: Callable[[Run, int], None] | None) -> Any:
        done = 0
        while done < STEPS:
            self.steps.begin()
            failing = fails is not None and self.manager.begun % 2 == 0
            if failing and fails is not None:
                fails(self, 50)
            if not failing or self.manager.breaks is not None:
                self.backward(2 * done)
            if not self.manager.errored() or self.manager.breaks is not None:
                if self.variant == "scaler":
                    self.scaler.unscale_(self.optimizer)
                fsdp2.clip_grad_norm_(self.model.parameters(), 0.1)
            committed = self.steps.commit()
            self.manager.breaks = None
            assert committed is not failing
            if committed:
                self.scheduler.step()
                self.ema.update()
                done += 1
            else:
                assert all(p.grad is None for p in self.model.parameters())
        states: Any = (self.model.state_dict(), self.optimizer.state_dict(), self.ema.state_dict())
        states = (*states, self.scheduler.state_dict(), self.scaler.state_dict())
        return copy.deepcopy(tree_map_only(DTensor, DTensor.to_local, states))


@combinations.each_once(
    make=[_adamw, _flat, _muon],
    variant=["kept", "all-reduce", "sync", "scaler"],
    fails=[_all_reduce, _behind, _in_backward, _in_forward],
)
def test_a_dropped_step_leaves_all_as_before(
    make: Callable[[nn.Module], Any], variant: str, fails: Callable[[Run, int], None]
) -> None:
    parity.assert_equal(Run(make, variant).train(fails), Run(make, variant).train(None))


def test_partial_sums_of_a_dropped_step() -> None:
    """A step that fails between its micro-batches."""
    model, manager = shard(), StandIn()
    steps = elastic.attach(model, manager, _adamw(model))
    steps.begin()
    model.set_requires_all_reduce(False)
    loss(model, inputs(5)).backward()
    steps.fail(UsersError())
    assert not steps.commit()
    steps.begin()
    model.set_requires_all_reduce(True)
    loss(model, inputs(0)).backward()
    parity.assert_equal(grads(model), plain_grads(inputs(0)))


# ---- refused


def test_what_is_refused() -> None:
    model = shard()
    steps = elastic.attach(model, StandIn())
    with raises("elastic-not-begun"):
        loss(model, inputs(0)).backward()
    steps.drop()
    steps.detach()
    optimizer = fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, step_in_backward=True, lr=0.01)
    with raises("elastic-stepped-in-backward"):
        steps.begin()
    with raises("elastic-stepped-in-backward"):
        elastic.attach(model, StandIn(), optimizer)
    del optimizer
    fed = shard()
    fed.set_wire_format(reduce="int8", feedback=True)
    with raises("elastic-feedback"):
        elastic.attach(fed, StandIn())
