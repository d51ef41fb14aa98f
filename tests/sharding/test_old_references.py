"""What still refers to a parameter as it was before `fully_shard`: followed, or refused."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import fsdp2
from tests.common import gradients, parity
from tests.common.errors import raises
from tests.common.models import DIM, seeded
from tests.common.workers import ranks

Use = Callable[[Any, Tensor], Tensor]
Arrange = Callable[["Layer"], Use]


class Layer(nn.Module):
    """A linear layer that reads its parameters by other references, which `arrange` makes."""

    def __init__(self, arrange: Arrange) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(DIM, DIM) / 4)
        self.b = nn.Parameter(torch.zeros(DIM))
        self.use = arrange(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


# -- followed -------------------------------------------------------------------------------------


def _attribute(layer: Layer) -> Use:
    layer.__dict__["alias"] = layer.w
    return lambda self, x: F.linear(x, self.alias, self.b)


def _by_object(layer: Layer) -> Use:
    object.__setattr__(layer, "alias", layer.w)
    return lambda self, x: F.linear(x, self.alias, self.b)


def _list(layer: Layer) -> Use:
    layer.params = [layer.w, layer.b]
    return lambda self, x: F.linear(x, *self.params)


def _list_with_others(layer: Layer) -> Use:
    layer.params = ["w", layer.w, None, layer.b]
    return lambda self, x: F.linear(x, self.params[1], self.params[3])


def _dict(layer: Layer) -> Use:
    layer.params = {"weight": layer.w, "bias": layer.b}
    return lambda self, x: F.linear(x, **self.params)


def _dict_by_id(layer: Layer) -> Use:
    layer.params = {7: layer.w}
    return lambda self, x: F.linear(x, self.params[7], self.b)


def _two(layer: Layer) -> Use:
    layer.params = [layer.w]
    layer.__dict__["alias"] = layer.w
    return lambda self, x: F.linear(x, (self.alias + self.params[0]) / 2, self.b)


FOLLOWED = [_attribute, _by_object, _list, _list_with_others, _dict, _dict_by_id, _two]

# -- refused --------------------------------------------------------------------------------------


def _partial(layer: Layer) -> Use:
    call = functools.partial(F.linear, weight=layer.w, bias=layer.b)
    return lambda self, x: call(x)


def _partial_attribute(layer: Layer) -> Use:
    layer.call = functools.partial(F.linear, weight=layer.w)
    return lambda self, x: self.call(x) + self.b


def _closure(layer: Layer) -> Use:
    w, b = layer.w, layer.b
    return lambda self, x: F.linear(x, w, b)


def _view(layer: Layer) -> Use:
    layer.__dict__["alias"] = layer.w[:3]
    return lambda self, x: F.linear(x, torch.cat([self.alias, self.w[3:]]), self.b)


def _transposed(layer: Layer) -> Use:
    layer.__dict__["alias"] = layer.w.t()
    return lambda self, x: x @ self.alias + self.b


def _tuple(layer: Layer) -> Use:
    layer.params = (layer.w, layer.b)
    return lambda self, x: F.linear(x, *self.params)


def _nested(layer: Layer) -> Use:
    layer.params = [[layer.w], {"b": layer.b}]
    return lambda self, x: F.linear(x, self.params[0][0], self.params[1]["b"])


def _object(layer: Layer) -> Use:
    layer.params = SimpleNamespace(w=layer.w)
    return lambda self, x: F.linear(x, self.params.w, self.b)


def _ordered(layer: Layer) -> Use:
    layer.params = OrderedDict(w=layer.w)
    return lambda self, x: F.linear(x, self.params["w"], self.b)


def _by_weak_reference(layer: Layer) -> Use:
    kept = [layer.w]
    layer.params = weakref.ref(layer.w)
    return lambda self, x: F.linear(x, self.params(), self.b) if kept else x


def _functional(layer: Layer) -> Use:
    params = {"weight": layer.w, "bias": layer.b}
    inner = nn.Linear(DIM, DIM)
    return lambda self, x: functional_call(inner, params, x)


def _default(layer: Layer) -> Use:
    def use(self: Any, x: Tensor, w: Tensor = layer.w) -> Tensor:
        return F.linear(x, w, self.b)

    return use


REFUSED = [
    _partial,
    _partial_attribute,
    _closure,
    _view,
    _transposed,
    _tuple,
    _nested,
    _object,
    _ordered,
    _by_weak_reference,
    _functional,
    _default,
]


def _model(arrange: Arrange) -> Any:
    return seeded(lambda: nn.Sequential(Layer(arrange), nn.Tanh(), nn.Linear(DIM, 4)))


def _shard(model: Any, inner: bool) -> Any:
    if inner:
        fsdp2.fully_shard(model[0], mesh=parity.world_mesh())
    return fsdp2.fully_shard(model, mesh=parity.world_mesh())


def _compute(model: nn.Module, rank: int | None = None) -> None:
    model(gradients.part(0, rank)[0]).square().mean().backward()


@ranks(2)
@pytest.mark.parametrize("inner", [True, False])
def test_what_is_followed(inner: bool) -> None:
    """It is what its module registers at any moment: trained, seen by evaluations, loaded."""
    for arrange in FOLLOWED:
        model, plain = _shard(_model(arrange), inner), _model(arrange)
        models = (model, plain)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
        for _ in range(3):
            for each in models:
                each.zero_grad()
            _compute(model)
            gradients.unsharded_grads(plain, _compute)
            expected = gradients.unsharded_grads(_copy_of(plain, arrange), _compute)
            parity.assert_close(parity.full_grads(model), expected, parity.FP32, arrange.__name__)
            for name, param in plain.named_parameters():
                param.grad = expected[name]
            for optimizer in optimizers:
                optimizer.step()
            x = gradients.part(0, 0)[0]
            with torch.no_grad():
                torch.testing.assert_close(model(x), plain(x))
        parity.assert_close(
            parity.full_params(model), dict(plain.named_parameters()), parity.FP32, arrange.__name__
        )


def _copy_of(plain: nn.Module, arrange: Arrange) -> Any:
    other = _model(arrange)
    other.load_state_dict(plain.state_dict())
    return other


@ranks(2)
@pytest.mark.parametrize("inner", [True, False])
def test_what_cannot_be_followed(inner: bool) -> None:
    """Its first backward raises, on all ranks, and names the parameter."""
    for arrange in REFUSED:
        model = _shard(_model(arrange), inner)
        with raises("gradient-of-former") as caught:
            _compute(model)
        assert "'0.w'" in str(caught.value) or "'0.b'" in str(caught.value), arrange.__name__


@ranks(2)
def test_a_loss_of_what_a_parameter_was() -> None:
    """A regulariser, and a list that somebody outside of the model has."""
    model = _model(lambda layer: lambda self, x: F.linear(x, self.w, self.b))
    held = list(model.parameters())
    _shard(model, True)
    loss = model(gradients.part(0)[0]).square().mean()
    with raises("gradient-of-former"):
        (loss + sum(param.square().sum() for param in held)).backward()
    model.reset_iter_state()
    with raises("grad-of-shard"):
        torch.autograd.grad(held[0].square().sum(), held[0])
    with torch.no_grad():
        assert not any(param.square().sum().isnan() for param in held)  # values are still there
    _compute(model)


@ranks(2)
def test_users_hooks_stay_where_they_are() -> None:
    """Those from before run on what is gathered, and their handles remove them."""
    model, seen = _model(lambda layer: lambda self, x: F.linear(x, self.w, self.b)), []
    handle = model[0].w.register_hook(lambda grad: seen.append(grad.shape))
    _shard(model, True)
    _compute(model)
    assert seen == [(DIM, DIM)]
    handle.remove()
    _compute(model)
    assert len(seen) == 1


@ranks(2)
def test_an_alias_that_is_given_another_value() -> None:
    """It is the user's: no gather overwrites it."""
    model = _shard(_model(_list), True)
    _compute(model)
    other = torch.zeros(DIM, DIM)
    model[0].params[0] = other
    model.zero_grad()
    _compute(model)
    assert model[0].params[0] is other
    assert model[0].w.grad is None
    del model[0].params[1]
    _compute(model)
    assert len(model[0].params) == 1


@ranks(2)
def test_an_alias_in_a_module_around() -> None:
    """The root refers to parameters of a block; between the passes that holds the shards."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(DIM, DIM)
            self.weights = [self.block.weight]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.block(x)
            return y

    model: Any = Around()
    fsdp2.fully_shard(model.block, mesh=parity.world_mesh())
    fsdp2.fully_shard(model, mesh=parity.world_mesh())
    _compute(model)
    assert model.weights[0] is model.block.weight
    assert model.weights[0].grad is not None


@ranks(2)
def test_lstms_keep_their_own_in_step() -> None:
    model, plain = (seeded(lambda: nn.LSTM(DIM, DIM, 2, batch_first=True)) for _ in range(2))

    def compute(model: nn.Module, rank: int | None = None) -> None:
        model(gradients.part(0, rank)[0][None])[0].square().mean().backward()

    fsdp2.fully_shard(model, mesh=parity.world_mesh())
    for _ in range(2):
        model.zero_grad()
        compute(model)
        parity.assert_close(
            parity.full_grads(model), gradients.unsharded_grads(plain, compute), parity.FP32
        )
