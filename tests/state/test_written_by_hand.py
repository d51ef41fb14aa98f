"""Parameters that users write themselves: no write is lost, and the next forward sees each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.core.device import buffers
from fsdp2.core.device.collectives import GroupCollectives
from fsdp2.core.modules.registry import record_of
from tests.common import combinations, gradients, models, parity, running
from tests.common.errors import raises
from tests.common.observing import observe
from tests.common.workers import ranks

# -- ways to write: each doubles all parameters ---------------------------------------------------


Way = Callable[[Sequence[nn.Parameter]], object]


def _each(write: Callable[[Any], object]) -> Way:
    """One parameter after the other."""

    def writes(params: Sequence[nn.Parameter]) -> None:
        for param in params:
            write(param)

    return writes


def _local(param: Any) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param.data


def _inference(params: Sequence[nn.Parameter]) -> None:
    with torch.inference_mode():
        torch._foreach_mul_(list(params), 2.0)


def _collective(params: Sequence[nn.Parameter]) -> None:
    """A sum over ranks that all have the same would be another number on 4: of one alone."""
    for param in params:
        alone = _local(param).clone()
        work = dist.all_reduce(alone, group=_GROUPS[dist.get_rank()])
        assert work is None
        _local(param).copy_(alone * 2)


_GROUPS: list[Any] = []


def _swapped(params: Sequence[nn.Parameter]) -> None:
    """As averages are swapped in: with a clone in between."""
    doubled = [param.detach() * 2 for param in params]
    for param, other in zip(params, doubled, strict=True):
        kept = param.detach().clone()
        param.data.copy_(other)
        other.copy_(kept)


def _sgd(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        param.grad = -param.detach().clone()
    torch.optim.SGD(params, lr=1.0).step()
    for param in params:
        param.grad = None


_mul, _copy = _each(lambda p: p.mul_(2)), _each(lambda p: p.copy_(p * 2))
_data = _each(lambda p: p.data.mul_(2))
_numpy = _each(lambda p: _local(p).detach().numpy().__imul__(2))


def _foreach(params: Sequence[nn.Parameter]) -> None:
    torch._foreach_mul_(list(params), 2.0)


WAYS: dict[str, Way] = {
    "mul_": _mul,
    "copy_": _copy,
    "lerp_": _each(lambda p: p.lerp_(p * 3, 0.5)),
    "add_": _each(lambda p: p.add_(p.clone())),
    "view": _each(lambda p: p.view_as(p).mul_(2)),
    "detach": _each(lambda p: p.detach().mul_(2)),
    "data": _data,
    "data.copy_": _each(lambda p: p.data.copy_(p.data * 2)),
    "foreach": _foreach,
    "foreach lerp": lambda ps: torch._foreach_lerp_([*ps], torch._foreach_mul([*ps], 3.0), 0.5),
    "foreach data": lambda ps: torch._foreach_mul_([p.data for p in ps], 2.0),
    "inference": _inference,
    "to_local": _each(lambda p: _local(p).mul_(2)),
    "numpy": _numpy,
    "collective": _collective,
    "flat copy": _each(lambda p: _local(p).view(-1).copy_(_local(p).detach().flatten() * 2)),
    "swapped": _swapped,
    "sgd": _sgd,
}
BUT_SGD = {name: way for name, way in WAYS.items() if way is not _sgd}


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def _load_by_torch(model: nn.Module) -> None:
    set_model_state_dict(model, {n: v * 2 for n, v in get_model_state_dict(model).items()})


def _in_place_in_a_state_dict(model: nn.Module) -> None:
    for value in model.state_dict().values():
        value.mul_(2)


def _apply(model: nn.Module) -> None:
    model.apply(lambda module: _mul(list(module.parameters(recurse=False))))


BY_MODEL = {
    "load_state_dict": _load,
    "set_model_state_dict": _load_by_torch,
    "state_dict in place": _in_place_in_a_state_dict,
    "apply": _apply,
}

# -- what is compared -----------------------------------------------------------------------------


def _x() -> Tensor:
    return gradients.part(0, 0)[0]


def _pair(**arguments: Any) -> tuple[Any, nn.Module]:
    if not _GROUPS:
        _GROUPS.extend(dist.new_group([rank]) for rank in range(dist.get_world_size()))
    return parity.shard(parity.OURS, running.mlp(), **arguments), running.mlp()


def _assert_same(model: nn.Module, plain: nn.Module, way: str = "") -> None:
    """What they are, and what they compute."""
    with torch.no_grad():
        assert torch.equal(model(_x()), plain(_x())), way
    parity.assert_equal(parity.full_params(model), dict(plain.named_parameters()), way)


def _double(way: Way, params: Sequence[nn.Parameter], plain: nn.Module) -> None:
    """Write parameters of a sharded model, and all of the plain one."""
    with torch.no_grad():
        way(params)
        way(list(plain.parameters()))


def _evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(_x())


def _evaluate_in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        model(_x())


def _evaluate_twice(model: nn.Module) -> None:
    _evaluate(model)
    _evaluate(model)


def _evaluate_recorded(model: nn.Module) -> None:
    """In eval mode, and nobody thought of no_grad."""
    model.eval()
    model(_x())


def _train(model: nn.Module) -> None:
    parity.regression_loss(model, gradients.part(0)).backward()
    model.zero_grad()


def _evaluate_before_backward(model: nn.Module) -> None:
    loss = parity.regression_loss(model, gradients.part(0))
    _evaluate(model)
    loss.backward()
    model.zero_grad()


def _found(model: Any) -> list[nn.Parameter]:
    """In the model; after a recorded forward only once it is resharded."""
    if not model.training:
        model.reshard()
        for module in models.units(model):
            module.reshard()
    return list(model.parameters())


BEFORE = [
    _evaluate,
    _evaluate_in_inference_mode,
    _evaluate_twice,
    _evaluate_recorded,
    _train,
    _evaluate_before_backward,
]


@ranks(2, extended=(4,))
@combinations.each_once(before=BEFORE, reshard_after_forward=[None, True, False])
def test_the_next_forward_sees_a_write(
    before: Callable[[nn.Module], None], reshard_after_forward: bool | None
) -> None:
    """By any route: parameters held from before, or found in the model now."""
    model, plain = _pair(reshard_after_forward=reshard_after_forward)
    held = list(model.parameters())
    for name, way in WAYS.items():
        for of_model in (lambda: held, lambda: _found(model)):
            before(model)
            params = of_model()
            assert all(isinstance(p, DTensor) for p in params)
            _double(way, params, plain)
            _assert_same(model, plain, name)
            with torch.no_grad():  # numbers stay what they are to the bit
                torch._foreach_mul_(held, 0.5)
                torch._foreach_mul_(list(plain.parameters()), 0.5)
    for name, write in BY_MODEL.items():
        before(model)
        _found(model)
        with torch.no_grad():
            write(model)
            write(plain)
        _assert_same(model, plain, name)


def _of(which: str) -> tuple[Any, nn.Module]:
    if which == "offloaded":
        return _pair(offload_policy=fsdp2.CPUOffloadPolicy(pin_memory=False))
    if which == "mixed":
        return _pair(mixed=True)
    if which == "int":
        return _pair(reshard_after_forward=1)
    if which == "replicas":
        mesh = torch.distributed.device_mesh.init_device_mesh(
            "cpu", (2, 1), mesh_dim_names=("replicate", "shard")
        )
        return _pair(mesh=mesh)

    def build() -> nn.Module:
        model = models.MLP(out=models.DIM)
        model.head.weight = model.layers[0].weight
        return model

    return parity.shard(parity.OURS, models.seeded(build)), models.seeded(build)


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_shards_are_registered_after_an_evaluation(reshard_after_forward: bool | None) -> None:
    """So a loop over the parameters of two models pairs DTensors, and an optimizer gets them."""
    student, _ = _pair(reshard_after_forward=reshard_after_forward)
    teacher, _ = _pair(reshard_after_forward=reshard_after_forward)
    _evaluate(teacher)
    _train(student)
    with torch.no_grad():
        for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
            own.mul_(0.5).add_(other, alpha=0.5)
    optimizer = torch.optim.AdamW(teacher.parameters())
    parity.regression_loss(teacher, gradients.part(0)).backward()
    optimizer.step()


# -- between a forward and its backward -----------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_written_between_a_forward_and_its_backward_by_data(
    reshard_after_forward: bool | None,
) -> None:
    """Autograd does not see it without sharding: backward computes with what was written."""
    model, plain = _pair(reshard_after_forward=reshard_after_forward)

    def compute(model: nn.Module, rank: int | None = None) -> None:
        held = list(model.parameters())
        loss = parity.regression_loss(model, gradients.part(0, rank))
        _evaluate(model)  # after which shards are registered
        with torch.no_grad():
            _data(held)
        loss.backward()
        with torch.no_grad():
            torch._foreach_mul_(held, 0.5)

    compute(model)
    gradients.assert_like_unsharded(parity.full_grads(model), plain, compute)


@ranks(2)
def test_unsharded_parameters_are_written() -> None:
    """Between a forward and its backward, where autograd alone tells, and what to do instead."""
    for write in (_mul, _copy, _foreach):
        model, _ = _pair()
        loss = parity.regression_loss(model, gradients.part(0))
        with torch.no_grad():
            write(list(model.head.parameters()))
        with raises("written-unsharded"):
            if write is _copy:
                model(_x())
            elif write is _foreach:
                model.reshard()
            else:
                loss.backward()
    model, plain = _pair()
    parity.regression_loss(model, gradients.part(0))
    model.reshard()
    _double(_mul, list(model.parameters()), plain)
    _assert_same(model, plain)


@ranks(2)
def test_numpy_of_an_unsharded_parameter() -> None:
    """Its memory stays, as torch can resize it no more; results are those of the plain model."""
    buffers._kept.clear()  # of tests before, in this process
    model, plain = _pair()
    unit = models.units(model)[0]
    unit.unshard()
    array = next(unit.parameters()).detach().numpy()
    with pytest.warns(UserWarning, match=r"memory of gathered .* is not freed any more, as numpy"):
        unit.reshard()
    assert array.size
    with warnings.catch_warnings():  # it is said once
        warnings.simplefilter("error")
        for _ in range(2):
            _compute(model, dist.get_rank())
            gradients.assert_like_unsharded(parity.full_grads(model), plain, _compute)
            _double(_mul, list(model.parameters()), plain)
            model.zero_grad()
    _assert_same(model, plain)


def _compute(model: nn.Module, rank: int) -> None:
    parity.regression_loss(model, gradients.part(0, rank)).backward()


@ranks(2)
def test_a_forward_that_writes_its_parameter() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    model: Any = nn.Sequential(
        models.seeded(lambda: Clamped(models.DIM, models.DIM)), nn.Linear(models.DIM, models.DIM)
    )
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    with raises("forward-writes"):
        model(_x())


@ranks(2)
@pytest.mark.parametrize("name", WAYS)
def test_written_after_a_forward_that_has_no_backward(name: str) -> None:
    """The root stays unsharded after it, and is gathered again for the next."""
    way = WAYS[name]
    model, plain = _pair()
    held = list(model.parameters())
    model(_x())
    _double(way, held, plain)
    _assert_same(model, plain, name)


@ranks(2)
@pytest.mark.parametrize("name", BUT_SGD)
def test_checked_writes(name: str) -> None:
    """By any route: those that no version tells of, to what is unsharded and what stays so.

    An optimizer's step is no such route: it frees what is gathered.
    """
    way = WAYS[name]
    with fsdp2.debug(check_writes=True):
        model, plain = _pair(reshard_after_forward=False)
        held = list(model.parameters())
        loss = parity.regression_loss(model, gradients.part(0))
        with torch.no_grad():
            (_mul if way is _numpy else way)(list(model.head.parameters()))
        with raises("written-unsharded"):
            loss.backward()
        model.reset_iter_state()
        model(_x())
        _double(way, held, plain)
        _assert_same(model, plain, name)  # gathered again
        every = [model, *models.units(model)]
        for module in every:
            module.unshard()
        _double(way, held, plain)
        with raises("written-sharded"):
            model(_x())
        for module in every:
            module.reshard()
        _assert_same(model, plain, name)
        _train(model)


@ranks(2)
@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_a_question_that_nobody_answers(
    inference: Callable[[], AbstractContextManager[None]],
) -> None:
    """Raises as an all-gather does; the next forward computes with the weights."""
    model, plain = _pair(reshard_after_forward=False)
    with inference():
        model(_x())
        gone = RuntimeError("Connection closed by peer")
        with (
            mock.patch.object(GroupCollectives, "largest", side_effect=gone),
            raises("collective-failed"),
        ):
            model(_x())
        assert torch.equal(model(_x()), plain(_x()))


# -- what a user unshards -------------------------------------------------------------------------


def _counting(model: Any) -> list[str]:
    """The gathers of all units from now on."""
    gathers: list[str] = []
    scheduler: Any = record_of(model).scheduler  # type: ignore[union-attr]  # it is sharded
    observe(scheduler.units, lambda what, _: gathers.append(what))
    return gathers


@ranks(2)
@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_units_that_a_user_has_unsharded_stay(
    inference: Callable[[], AbstractContextManager[None]],
) -> None:
    """For a generation of many tokens: no gather until they are resharded."""
    model, plain = _pair(reshard_after_forward=False)
    _train(model)
    every = [model, *models.units(model)]
    with inference():
        for module in every:
            module.unshard()
        gathers = _counting(model)
        for _ in range(3):
            assert torch.equal(model(_x()), plain(_x()))
            assert not any(map(running.is_sharded, every))
        assert gathers == []
        for module in every:
            module.reshard()
        assert all(map(running.is_sharded, every))
    _double(_mul, list(model.parameters()), plain)
    _assert_same(model, plain)
    assert "all_gather" in gathers


@ranks(2)
@pytest.mark.parametrize("name", BUT_SGD)
def test_writes_to_what_a_user_has_unsharded(name: str) -> None:
    """Raise at his reshard(), whatever the route, and whether a forward has freed them since."""
    way = WAYS[name]
    for between in (nullcontext, torch.no_grad, torch.enable_grad):
        model, plain = _pair()
        unit: Any = models.units(model)[0]
        unit.unshard()
        written = list(unit.parameters())
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # memory that numpy() refers to stays
            way(written)
        with raises("written-unsharded"):
            if between is not nullcontext:
                with between():
                    model(_x())
            unit.reshard()
        model.reset_iter_state()
        unit.reshard()
        _assert_same(model, plain, name)
        _train(model)


@ranks(2)
def test_a_user_unshards_and_writes_shards() -> None:
    """Nothing is raised where he has only read, trained or written shards; one rank may raise."""
    model, plain = _pair()
    unit: Any = models.units(model)[0]
    shards = list(model.parameters())
    for write in (None, _mul, _sgd):
        unit.unshard()
        if write is _sgd:
            parity.regression_loss(model, gradients.part(0)).backward()
            model.zero_grad()
        elif write is not None:
            model(_x())
        if write is not None:
            _double(write, shards, plain)
        unit.reshard()
        _assert_same(model, plain)
    unit.unshard()
    if dist.get_rank() == 0:
        next(unit.parameters()).data[-1] += 1  # of the other rank's rows
        with raises("written-unsharded"):
            unit.reshard()
    unit.reshard()
    _assert_same(model, plain)


@ranks(2)
@pytest.mark.parametrize("trains", [False, True])
def test_a_kept_unit_is_gathered_once_for_all_evaluations(trains: bool) -> None:
    """The root, by default."""
    model, _ = _pair()
    _train(model)
    with nullcontext() if trains else torch.no_grad():
        gathers = _counting(model)
        for _ in range(2):
            loss = parity.regression_loss(model, gradients.part(0))
            if trains:
                loss.backward()
    assert gathers.count("all_gather") == (2 * 7 if trains else 4 + 3)


# -- what is used again ---------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("which", ["", "offloaded", "mixed", "replicas", "inference", "compiled"])
def test_what_no_one_has_written_is_gathered_once(which: str) -> None:
    model, _ = _of(which) if which in ("offloaded", "mixed", "replicas") else _pair()
    model.set_reshard_after_forward(False)
    for module in models.units(model):
        module.set_reshard_after_forward(False)
    for layer in model.layers if which == "compiled" else ():
        layer.compile(backend="eager")
    _train(model)
    gathers = _counting(model)
    with torch.inference_mode() if which == "inference" else torch.no_grad():
        outputs = [model(_x()) for _ in range(3)]
    alone = which == "replicas"  # nothing to gather, but copies in the compute dtype
    assert gathers.count("all_gather") == (0 if alone else 4)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    gathers.clear()
    if dist.get_rank() == 0:  # who alone knows of it
        next(model.parameters())._local_tensor.numpy()[0] = 3.0
    with torch.no_grad():
        model(_x())
    assert gathers.count("all_gather") == (0 if alone else 1)
    _train(model)


@ranks(2)
def test_several_roots_and_a_step_of_another() -> None:
    """A teacher is gathered once, however often the student steps."""
    teacher, plain = _pair(reshard_after_forward=False)
    student, _ = _pair()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    _evaluate(teacher)
    gathers = _counting(teacher)
    for _ in range(3):
        _train(student)
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(teacher(_x()), plain(_x()))
    assert "all_gather" not in gathers


@ranks(2)
def test_gradients_are_shown_by_units_that_stay_gathered() -> None:
    """Clipping and averages read ``model.parameters()`` after backward and after a step."""
    model, _ = _pair()
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        parity.regression_loss(model, gradients.part(0)).backward()
        assert all(param.grad is not None for param in model.parameters())
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor() > 0
        optimizer.step()
        for held, shown in zip(
            optimizer.param_groups[0]["params"], model.parameters(), strict=True
        ):
            assert held is shown
        optimizer.zero_grad()
