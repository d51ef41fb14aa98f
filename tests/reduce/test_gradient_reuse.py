"""DTensors of old gradients are used again, unless somebody could tell."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.core.modules.registry import record_of
from fsdp2.core.params import gradients
from fsdp2.testing.null_group import null_world

pytestmark = pytest.mark.alone

DIM = 16  # a half of it is even, and aligned in bf16: all parameters are reduced alike
X = torch.ones(2, DIM)


@pytest.fixture
def size() -> int:
    return 2


@pytest.fixture(autouse=True)
def _null_ranks_and_no_collector(size: int) -> Iterator[None]:
    with null_world(size):
        _grads(_model())  # what torch imports at first use keeps frames in cycles
        gc.collect()
        gc.freeze()  # and those need not be looked at again
        gc.disable()
        yield
        gc.enable()


def _model(layers: int = 3, **arguments: Any) -> Any:
    """One unit of two parameters a layer."""
    model = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(layers)])
    return fsdp2.fully_shard(
        model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **arguments
    )


def _grads(model: Any) -> list[Any]:
    """The gradients after a forward and backward."""
    model(X).sum().backward()
    return [param.grad for param in model.parameters()]


def _ids(model: Any) -> list[int]:
    return [id(grad) for grad in _grads(model)]


def _rows(model: Any) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(param.grad._local_tensor) for param in model.parameters()]


def _none(model: Any) -> None:
    for param in model.parameters():
        param.grad = None


WAYS: dict[str, Callable[[Any], None]] = {
    "module": lambda model: model.zero_grad(),
    "optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "one by one": _none,
}


@pytest.mark.parametrize("drop", WAYS)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"mp_policy": fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)},
    ],
)
def test_objects_are_used_again_and_memory_is_not(drop: str, arguments: dict[str, Any]) -> None:
    model = _model(**arguments)
    first = _ids(model)
    for _ in range(3):
        rows = _rows(model)
        WAYS[drop](model)
        assert all(row() is None for row in rows)
        grads = _grads(model)
        assert [id(grad) for grad in grads[:-1]] == first[:-1]
        for grad, param in zip(grads, model.parameters(), strict=True):
            assert type(grad) is DTensor
            assert grad.shape == param.shape
            assert grad.placements == param.placements
            assert grad._local_tensor.shape == param._local_tensor.shape
            assert not grad.requires_grad
            assert grad.grad_fn is None
        del grads, grad


def test_added_to_while_they_are_there() -> None:
    model = _model()
    first = _ids(model)
    assert _ids(model) == first
    model.zero_grad(set_to_none=False)
    assert _ids(model) == first
    model.zero_grad()
    assert _ids(model)[:-1] == first[:-1]


# -- somebody could tell --------------------------------------------------------------------------


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "the gradient": lambda grad: grad,
    "an autograd graph": lambda grad: (torch.ones_like(grad).requires_grad_() * grad).grad_fn,
}
OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "its rows": lambda grad: grad._local_tensor,
    "a view": lambda grad: grad._local_tensor[:1],
    "to_local": lambda grad: grad.to_local(),
    "detach": lambda grad: grad.detach(),
    "numpy": lambda grad: grad.to_local().numpy(),
}


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("way", [*HOLDERS, *OF_ROWS])
def test_what_somebody_holds_stays_as_it_is(way: str, which: int) -> None:
    model = _model()
    grad = _grads(model)[which]
    grad._local_tensor.fill_(3)
    row = weakref.ref(grad._local_tensor)
    held = (HOLDERS | OF_ROWS)[way](grad)
    old = id(grad)
    del grad
    model.zero_grad()
    for _ in range(3):
        for new in _grads(model):
            if way in HOLDERS:
                assert id(new) != old
            new._local_tensor.fill_(5)
        del new
        model.zero_grad()
    if way == "an autograd graph":
        saved = held._saved_other if held._saved_other is not None else held._saved_self
        assert id(saved) == old
        assert saved._local_tensor.eq(3).all()
    else:
        values = held._local_tensor if isinstance(held, DTensor) else torch.as_tensor(held)
        assert values.eq(3).all()
    del held
    if way == "an autograd graph":
        del saved
    else:
        del values
    assert row() is None


@pytest.mark.parametrize("which", range(6))
def test_a_gradient_that_somebody_assigned_is_added_to(which: int) -> None:
    model = _model()
    _grads(model)
    model.zero_grad()
    param = list(model.parameters())[which]
    param.grad = mine = torch.zeros_like(param)
    _grads(model)
    assert param.grad is mine
    others = [p for p in model.parameters() if p is not param]
    assert all(other.grad._local_tensor is not None for other in others)


def _attribute(grad: Any) -> None:
    grad.seen = True


def _differentiable(grad: Any) -> None:
    grad.requires_grad_()


def _of_a_graph(grad: Any) -> None:
    grad.mul_(torch.ones_like(grad).requires_grad_())


@pytest.mark.parametrize("change", [_attribute, _differentiable, _of_a_graph])
def test_what_somebody_made_of_one_is_not_in_the_next(change: Callable[[Any], None]) -> None:
    model = _model()
    change(_grads(model)[1])
    model.zero_grad()
    for grad in _grads(model):
        assert not grad.requires_grad
        assert grad.grad_fn is None
        assert not hasattr(grad, "seen")


# -- other steps ----------------------------------------------------------------------------------


def test_hooks_that_drop_every_gradient_at_once() -> None:
    """As optimizers do that step in backward."""
    model = _model()
    seen: list[list[int]] = [[]]

    def drop(param: Tensor) -> None:
        assert param.grad is not None
        seen[-1].append(id(param.grad))
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)
    for _ in range(3):
        model(X).sum().backward()
        seen.append([])
    assert seen[0][:-1] == seen[1][:-1] == seen[2][:-1]


def test_the_last_gradient_goes_while_the_next_are_made() -> None:
    """As where it was in a cycle of garbage, and the collector runs then."""
    model = _model()
    held = _grads(model)[-1]
    model.zero_grad()
    reuse = record_of(model).unit.own_groups[0].bound.reductions[0].gradients._reuse
    count = len(list(model.parameters()))
    assert reuse.take(count) == [None] * count
    del held  # the others are spare now
    reuse.lend(_grads(_model()))  # and all but the last of these
    assert len(reuse.take(count)) == count


def test_counts_of_a_free_threaded_interpreter_are_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gradients.counts_are_true()
    monkeypatch.setattr(gradients.sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not gradients.counts_are_true()


def test_where_counts_are_not_trusted_each_gradient_is_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, "COUNTS_ARE_TRUE", False)
    model = _model()
    first = [id(grad) for grad in _grads(model)]
    held = [weakref.ref(grad) for grad in _grads(model)]
    model.zero_grad()
    assert first
    assert all(reference() is None for reference in held)
    assert record_of(model).unit.own_groups[0].bound.reductions[0].gradients._reuse is None
