"""`FlatOptimizer(offload="cpu")`: the steps of the plain optimizer, whenever gradients leave.

Shards in CPU memory are taken for shards on a device here, so that they travel from CPU memory to
other CPU memory; streams and their order are those of tests/accelerator/test_offloaded_states.py.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.optim import offloaded
from fsdp2.optim.flat import FlatOptimizer
from tests.common import meshes, models, parallelisms, parity
from tests.common.combinations import each_once
from tests.common.errors import raises
from tests.common.gradients import mlp, mlp_batches
from tests.common.workers import ranks

pytestmark = [pytest.mark.ranks, pytest.mark.feature("Optimizer states in CPU memory")]

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}
MODES: dict[str, dict[str, Any]] = {
    "whole": {"offload": "cpu"},
    "steps": {"offload": "cpu", "step_in_backward": True},
}
CLIPPED = ["whole"]
PLAIN: dict[str, Any] = {}
Before = Callable[[Any, Any, int], object]


@contextmanager
def apart() -> Iterator[None]:
    """Shards in CPU memory are somewhere else than the CPU's own."""
    with mock.patch.object(offloaded, "travels", return_value=True):
        yield


def flat(model: nn.Module, **options: Any) -> FlatOptimizer:
    return FlatOptimizer(model, torch.optim.AdamW, **{**OPTIONS, **options})


def states(optimizer: torch.optim.Optimizer) -> Any:
    """The state dict, DTensors as this rank's rows."""
    saved = optimizer.state_dict()["state"]
    rows = {
        (index, key): getattr(value, "_local_tensor", value)
        for index, state in saved.items()
        for key, value in state.items()
    }
    return [(name, copy.deepcopy(rows[name])) for name in sorted(rows)]


def leave_alone(*_: object) -> None:
    """Nothing to be done."""


def train(
    model: Any,
    optimizer: Any,
    batches: Any,
    before: Before = leave_alone,
    after: Before = leave_alone,
) -> list[Any]:
    """Parameters and states after each step.

    Args:
        before: called ahead of each backward with the model, the optimizer and the step's number.
        after: the same behind it.
    """
    seen = []
    for step, batch in enumerate(batches):
        before(model, optimizer, step)
        parity.regression_loss(model, batch).backward()
        after(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        seen.append([parity.full_params(model), states(optimizer)])
    return seen


def parts(steps: int = 3, out: int = 4) -> list[Any]:
    return [*map(parity.my_part, parity.regression_batches(models.DIM, out, steps=steps))]


def check(mode: str, build: Callable[[], Any], batches: Any, **calls: Before) -> None:
    """The same bits as without offload."""
    seen = []
    for options in (PLAIN, MODES[mode]):
        with apart():
            model = build()
            seen.append(train(model, flat(model, **options), batches, **calls))
    parity.assert_equal(seen[1], seen[0])


def clip(model: nn.Module, _: Any, __: int) -> None:
    assert fsdp2.clip_grad_norm_(model.parameters(), 0.05) > 0.05


# ---- where the steps are the same


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
@each_once(
    mixed=[False, True],
    model=[models.MLP, models.OddMLP, models.Repeated, models.Nested],
    reshard=[None, False],
)
def test_steps_are_those_of_the_whole(mode: str, mixed: bool, model: Any, reshard: Any) -> None:
    """Uneven and empty shards, units that are called twice, two dtypes."""

    def build() -> nn.Module:
        return parity.shard(
            parity.OURS, models.seeded(model), mixed=mixed, reshard_after_forward=reshard
        )

    head = models.seeded(model)
    out = head.head.out_features if hasattr(head, "head") else 1
    check(mode, build, parts(out=out))


@ranks(1)
@pytest.mark.parametrize("mode", MODES)
def test_on_one_rank_gradients_are_autograds_own(mode: str) -> None:
    check(mode, lambda: parity.shard(parity.OURS, mlp()), parts())


@ranks(4)
@pytest.mark.parametrize("mode", MODES)
def test_replicas(mode: str) -> None:
    mesh = meshes.hsdp_mesh(2, 2)
    check(
        mode,
        lambda: parity.shard(parity.OURS, models.seeded(models.OddMLP), mesh=mesh),
        parts(2, 1),
    )


@ranks(4)
@pytest.mark.parametrize("mode", MODES)
def test_tensor_parallel_shards(mode: str) -> None:
    spread = parallelisms.PARALLELISMS["tp"]

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(parallelisms.Rung(), parallelisms.Rung())
        return spread.shard(fsdp2, model)

    batches = parity.regression_batches(models.DIM, models.DIM, steps=2)
    check(mode, build, [*map(spread.part, batches)], after=clip if mode in CLIPPED else leave_alone)


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_units_that_rest_and_parameters_of_no_unit(mode: str) -> None:
    actives = [("a", "c"), ("a", "b"), ("b", "c"), ("a", "b", "c"), ("a",)]

    def build() -> nn.Module:
        model = models.seeded(models.Choosy)
        left = next(model.parameters())
        for unit in models.units(model)[:-1]:
            fsdp2.fully_shard(unit, ignored_params={left})
        fsdp2.fully_shard(model, ignored_params={left})
        left.register_hook(lambda grad: parity.over_ranks(grad))
        return model

    def choose(model: Any, _: Any, step: int) -> None:
        model.active = actives[step]

    check(mode, build, parts(len(actives), 2), before=choose)


class Partly(nn.Module):
    """Two parameters, of which one is used on one rank, on both or on none."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(models.DIM, models.DIM)
        self.at_times = nn.Linear(models.DIM, models.DIM)
        self.uses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.always(x))
        return x + self.at_times(x) if self.uses else x


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_other_ranks_have(mode: str) -> None:
    """They are delivered at the end of backward, behind those that have left by then."""
    used = [(True, True), (True, False), (False, False), (False, True), (True, True)]

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Partly(), Partly())
        return parity.shard(parity.OURS, model)

    def choose(model: Any, _: Any, step: int) -> None:
        model[0].uses = used[step][torch.distributed.get_rank()]

    check(mode, build, parts(len(used), models.DIM), before=choose)


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_groups_schedules_and_micro_batches(mode: str) -> None:
    seen = []
    for options in (PLAIN, MODES[mode]):
        with apart():
            model = parity.shard(parity.OURS, mlp())
            named = dict(model.layers.named_parameters())
            biases = [param for name, param in named.items() if name.endswith("bias")]
            weights = [param for name, param in named.items() if name.endswith("weight")]
            groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
            optimizer = flat(model, params=groups, **options)
            optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.5})
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            for batch in mlp_batches():
                for last in (False, True):
                    model.set_requires_gradient_sync(last)
                    parity.regression_loss(model, parity.my_part(batch)).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        seen.append([parity.full_params(model), states(optimizer)])
    parity.assert_equal(seen[1], seen[0])


@ranks(2)
@pytest.mark.parametrize("mode", CLIPPED)
def test_several_reductions_before_a_step_are_added(mode: str) -> None:
    """Clipped between them, too, as gradients on the device would be."""
    batch = parity.my_part(mlp_batches()[1])

    def more(model: Any, optimizer: Any, step: int) -> None:
        if step == 1:
            clip(model, optimizer, step)
        for _ in range(step):
            parity.regression_loss(model, batch).backward()

    check(mode, lambda: parity.shard(parity.OURS, models.seeded(models.MLP)), parts(), after=more)


# ---- norms first, then the step


@ranks(2)
@pytest.mark.parametrize("mode", CLIPPED)
@pytest.mark.parametrize("mixed", [False, True])
def test_clipping_by_the_norm_of_all(mode: str, mixed: bool) -> None:
    norms: dict[str, list[torch.Tensor]] = {}

    def build() -> nn.Module:
        return parity.shard(parity.OURS, models.seeded(models.OddMLP), mixed=mixed)

    def note(model: Any, optimizer: Any, _: int) -> None:
        own = norms.setdefault(str(optimizer._in_backward is None), [])
        own.append(fsdp2.clip_grad_norm_(model.parameters(), 0.05))
        own.append(fsdp2.clip_grad_norm_(model.parameters(), 1e9, norm_type=torch.inf))

    check(mode, build, parts(out=1), after=note)
    found = list(norms.values())
    assert all(map(torch.equal, found[0], found[-1]))


@ranks(2)
def test_torchs_own_clipping_and_a_scaler_while_gradients_wait_for_the_step() -> None:
    """torch writes gradients through operators that no version counter sees."""
    seen = []
    for options in (PLAIN, MODES["whole"]):
        with apart():
            model = parity.shard(parity.OURS, mlp())
            optimizer = flat(model, **options)
            scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
            for step, batch in enumerate(mlp_batches()):
                loss = parity.regression_loss(model, parity.my_part(batch))
                scaler.scale(loss * (torch.inf if step == 1 else 1)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        seen.append([parity.full_params(model), states(optimizer), scaler.get_scale()])
    parity.assert_equal(seen[1], seen[0])


@ranks(2)
@pytest.mark.parametrize("mode", CLIPPED)
@pytest.mark.parametrize("zeroes", ["optimizer", "model"])
def test_a_step_that_is_left_out_for_its_nans(mode: str, zeroes: str) -> None:
    seen = []
    for options in (PLAIN, MODES[mode]):
        with apart():
            model = parity.shard(parity.OURS, mlp())
            optimizer = flat(model, **options)
            skipped = []
            for step, batch in enumerate(mlp_batches()):
                loss = parity.regression_loss(model, parity.my_part(batch))
                (loss * (torch.nan if step == 1 else 1)).backward()
                finite = bool(fsdp2.clip_grad_norm_(model.parameters(), 0.1).isfinite())
                if finite:
                    optimizer.step()
                skipped.append(not finite)
                (optimizer if zeroes == "optimizer" else model).zero_grad()
            assert skipped[:2] == [False, True]
        seen.append([parity.full_params(model), states(optimizer)])
    parity.assert_equal(seen[1], seen[0])


# ---- states


@ranks(2)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_state_is_exchanged_with_the_plain_optimizer(mode: str, back: bool) -> None:
    """torch's own, over DTensors."""

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **OPTIONS)

    order = [plain, partial(flat, **MODES[mode])]
    if back:
        order.reverse()
    with apart():
        whole, model = (parity.shard(parity.OURS, mlp()) for _ in range(2))
        expected = train(whole, plain(whole), parts(4))[-1]
        first = order[0](model)
        train(model, first, parts(4)[:2])
        saved = copy.deepcopy(first.state_dict())
        del first
        second = order[1](model)
        second.load_state_dict(saved)
        assert train(model, second, parts(4)[2:])
        parity.assert_equal([parity.full_params(model), states(second)], expected)


# ---- where gradients are


@ranks(2)
@pytest.mark.parametrize(("mode", "most"), [("", 6), ("whole", 6), ("steps", 3)])
def test_gradients_of_few_units_exist_at_a_time(mode: str, most: int) -> None:
    """Of two that are stepped, and of the one that was reduced last."""
    with apart():
        model = nn.Sequential(*(nn.Linear(models.DIM, models.DIM, bias=False) for _ in range(6)))
        alive: list[Any] = []
        counts: list[int] = []

        def note(param: torch.Tensor) -> None:
            alive.append(weakref.ref(param.grad._local_tensor))
            counts.append(sum(each() is not None for each in alive))

        for block in model:
            fsdp2.fully_shard(block)
            block.weight.register_post_accumulate_grad_hook(note)
        fsdp2.fully_shard(model)
        optimizer = flat(model, **MODES.get(mode, PLAIN))
        for _ in range(2):
            model(torch.randn(2, models.DIM)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert max(counts) <= most
        assert (max(counts) == most) or mode == "steps"  # whose thread may be fast


@ranks(2)
def test_a_backward_that_raises_is_followed_by_others() -> None:
    """What its units have left behind is dropped with the gradients of the others."""

    class OnceError(Exception):
        pass

    for mode in CLIPPED:
        seen = []
        for options in (PLAIN, MODES[mode]):
            with apart():
                model = parity.shard(parity.OURS, mlp())
                optimizer = flat(model, **options)
                train(model, optimizer, parts(1))

                def fail(*_: object) -> None:
                    raise OnceError

                inside = model.layers[0].register_full_backward_hook(fail)
                with pytest.raises(OnceError):
                    parity.regression_loss(model, parts()[0]).backward()
                inside.remove()
                optimizer.zero_grad()
                seen.append(train(model, optimizer, parts(2)))
        parity.assert_equal(seen[1], seen[0])


# ---- what is refused


@ranks(2)
def test_what_gradients_in_backward_exclude() -> None:
    model = parity.shard(parity.OURS, mlp())
    with apart():
        optimizer = flat(model, **MODES["steps"])
        with raises("stepped-twice-owner"):
            flat(model, step_in_backward=True)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(parity.regression_loss(model, parts()[0])).backward()
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)
