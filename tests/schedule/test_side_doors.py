"""Backward that enters a unit by a tensor which its forward did not return.

Equality is exact: on two ranks ours does the arithmetic of the reference, rank by rank.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.common import models, parity, running
from tests.common.errors import raises
from tests.common.models import DIM
from tests.common.workers import ranks


def linear(out: int = DIM) -> nn.Linear:
    return nn.Linear(DIM, out)


def ones() -> Tensor:
    return torch.ones(2, DIM)


class Router(nn.Module):
    """Keeps a value of its forward, made before its output or after it."""

    is_unit = True

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.gate, self.expert = linear(3), linear()
        self.late = late
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self.aux = self.gate(x).softmax(-1).square().mean()
        y = torch.tanh(self.expert(x))
        if self.late:
            self.aux = self.gate(y).softmax(-1).square().mean()
        return y


class Routed(nn.Module):
    """Blocks with a value each, between layers of the root's own."""

    def __init__(self, late: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        self.stem = linear()
        self.blocks = nn.ModuleList(Router(late) for _ in range(3))
        self.head = linear(2)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def output(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


def own_aux(model: Any, x: Tensor) -> Tensor:
    model(x)
    aux: Tensor = model.aux
    return aux


def aux_only(model: Any, x: Tensor) -> Tensor:
    model(x)
    aux: Tensor = model.blocks[1].aux
    return aux


def all_aux(model: Any, x: Tensor) -> Tensor:
    model(x)
    return torch.stack([block.aux for block in model.blocks]).sum()


def aux_too(model: Any, x: Tensor) -> Tensor:
    total: Tensor = model(x).sum() + model.blocks[2].aux
    return total


class Features(nn.Module):
    """Frozen layers; hooks take what a layer of the first two blocks is given, or returns."""

    def __init__(self, index: int, inputs: bool) -> None:
        super().__init__()
        blocks = [nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.taken: list[Tensor] = []
        self.requires_grad_(False)
        for block in blocks:
            block.is_unit = True
        for block in blocks[:2]:
            if inputs:
                block[index].register_forward_pre_hook(lambda _, args: self.taken.append(args[0]))
            else:
                block[index].register_forward_hook(lambda *given: self.taken.append(given[2]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Perceptual(nn.Module):
    """A model that is trained by what frozen layers make of its output."""

    def __init__(self, index: int, inputs: bool) -> None:
        super().__init__()
        self.model, self.judge = linear(), Features(index, inputs)

    def forward(self, x: Tensor) -> Tensor:
        self.judge.taken.clear()
        self.judge(self.model(x))
        return torch.stack(self.judge.taken)


class Attention(nn.Module):
    """A block that appends keys to a cache, or keeps them, and reads what is there."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = linear(), linear()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        cache = self.kept if cache is None else cache
        cache.append(self.key(x))
        keys = torch.cat(cache)
        return x + torch.softmax(x @ keys.T, -1) @ torch.tanh(self.value(keys))


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = linear()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if caches is None else block(x, caches[index])
        return x


def last_output(given: bool, model: Any, x: Tensor) -> Tensor:
    """The first forward's units are entered by their keys alone."""
    caches: Any = [[] for _ in model.blocks]
    for block in model.blocks:
        block.kept.clear()
    for part in (x, x.flip(1), x / 2):
        y = model(part, caches) if given else model(part)
    assert [len(c) for c in (caches if given else [b.kept for b in model.blocks])] == [3, 3]
    return y.square().mean()


class Appends(nn.Module):
    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, cache: Any) -> None:
        values = cache if isinstance(cache, list) else cache.value
        values.append(torch.tanh(self.linear(values[-1] + x)))


class Appending(nn.Module):
    """The only input with gradients is in a cache."""

    def __init__(self, boxed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Appends() for _ in range(3))
        self.boxed = boxed

    def forward(self, x: Tensor) -> Tensor:
        values: Any = [torch.ones(2, DIM, requires_grad=True) * 2]
        for block in self.blocks:
            block(x, SimpleNamespace(value=values) if self.boxed else values)
        assert len(values) == 4
        return torch.stack(values)


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class Registered(Plain):
    pass


pytree.register_pytree_node(
    Registered, lambda each: ([each.value], None), lambda items, _: Registered(next(iter(items)))
)

BOXES: dict[str, Callable[[Any], Any]] = {
    "UserDict": lambda value: UserDict(value=value),
    "SimpleNamespace": lambda value: SimpleNamespace(value=value),
    "registered": Registered,
    "plain": Plain,
    "nested": lambda value: SimpleNamespace(value=Registered([value, 1])),
}


def unboxed(box: Any) -> Tensor:
    while not isinstance(box, Tensor):
        if isinstance(box, UserDict):
            box = box["value"]
        else:
            box = box[0] if isinstance(box, list) else box.value
    return box


class Boxing(nn.Module):
    is_unit = True

    def __init__(self, box: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.box = linear(), box

    def forward(self, x: Any) -> Any:
        return self.box(torch.tanh(self.linear(unboxed(x))))


class Boxes(nn.Module):
    def __init__(self, box: Callable[[Any], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Boxing(box) for _ in range(3))

    def forward(self, x: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return unboxed(x)


class Recursive(nn.Module):
    """A unit below the root that calls itself; some of these calls raise."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 3:
            raise ValueError("too deep")
        x = torch.tanh(self.first(x))
        if depth:
            try:
                x = x + self(x, 3)
            except ValueError:
                x = x + self(x, depth - 1)
        return self.second(x)


class Readout(nn.Module):
    """Differentiates, inside its forward, by what its inputs were made of."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.out = linear(), linear()

    def forward(self, x: Tensor, weights: Tensor | None, source: Any) -> Tensor:
        energy = torch.tanh(self.energy(x if weights is None else x * weights))
        (force,) = torch.autograd.grad(energy.sum(), source.positions, create_graph=True)
        return self.out(energy) + force


class Forces(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.embed, self.readout, self.inputs = linear(), Readout(), inputs
        self.embed.is_unit = True

    def forward(self, x: Tensor) -> Tensor:
        source = Plain(x.requires_grad_())  # not a container that inputs are looked for in
        x = self.embed(source.value)
        source.positions = source.value
        return self.readout(x, x * 2 if self.inputs == 2 else None, source)


# ---- all of them, in one way


class Case(NamedTuple):
    """How a model is built, what is differentiated, and arguments for `parity.shard`."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor] = output
    arguments: dict[str, Any] = {}  # noqa: RUF012  # nobody writes it
    unused: bool = False  # whether units that get no gradients count, with zeros


LATE, CHECKPOINTED = partial(Routed, late=True), partial(Routed, checkpoints=True)
KEPT, FREED = ({"reshard_after_forward": frees} for frees in (False, True))

CASES = {
    "a value of one block": Case(Routed, aux_only),
    "values of all blocks": Case(Routed, all_aux),
    "a value of the last block, and the output": Case(Routed, aux_too),
    "a later value of one block": Case(LATE, aux_only),
    "later values of all blocks": Case(LATE, all_aux),
    "a later value of the last block, and the output": Case(LATE, aux_too),
    "checkpointed blocks, values of all": Case(CHECKPOINTED, all_aux),
    "checkpointed blocks, a value, and the output": Case(CHECKPOINTED, aux_too),
    "a root entered by nothing else": Case(Router, own_aux, {"root": FREED}),
    # Nothing breaks; yet somebody must reduce its gradients.
    "a root that stays gathered": Case(Router, own_aux, {"root": KEPT}),
    **{
        f"features that hooks take: {'inputs' if inputs else 'outputs'} of layer {index}": Case(
            partial(Perceptual, index, inputs)
        )
        for index in (0, 2)
        for inputs in (False, True)
    },
    "a cache that is given": Case(Cached, partial(last_output, True), FREED),
    "a cache that is kept": Case(Cached, partial(last_output, False), FREED),
    "a cache that is given, gathered blocks": Case(Cached, partial(last_output, True), KEPT),
    "a cache that is kept, gathered blocks": Case(Cached, partial(last_output, False), KEPT),
    "the only gradients in a list": Case(partial(Appending, False)),
    "the only gradients in a box": Case(partial(Appending, True)),
    **{f"box: {name}": Case(partial(Boxes, box)) for name, box in BOXES.items()},
    "units that call themselves": Case(lambda: nn.Sequential(Recursive(), Recursive())),
    "a derivative inside of a forward, one input": Case(partial(Forces, 1)),
    "a derivative inside of a forward, two inputs": Case(partial(Forces, 2)),
    "a derivative of one input, with zeros": Case(partial(Forces, 1), unused=True),
    "a derivative of two inputs, with zeros": Case(partial(Forces, 2), unused=True),
}


def compare(name: str, case: Case, steps: int = 2) -> Any:
    """Gradients of some iterations, against the unsharded model; nothing stays gathered."""
    print("case:", name)  # in the report of a failure
    model, plain = sharded(case.build, **case.arguments), models.seeded(case.build)
    model.set_reduce_scatter_unused_params(case.unused)
    world = dist.get_world_size()
    for step in range(steps):
        batches = [torch.full((2, DIM), 0.1 + rank + step) for rank in range(world)]
        case.loss(model, batches[dist.get_rank()].clone()).backward()
        for batch in batches:
            (case.loss(plain, batch) / world).backward()
        parity.assert_equal(parity.full_grads(model), parity.full_grads(plain), name)
        model.zero_grad(), plain.zero_grad()
    assert all(running.is_sharded(unit) for unit in models.units(model)), name
    return model


def sharded(build: Callable[[], nn.Module], **arguments: Any) -> Any:
    return parity.shard(parity.OURS, models.seeded(build), **arguments)


@ranks(2)
def test_gradients_are_those_of_the_plain_model() -> None:
    for name, case in CASES.items():
        compare(name, case)


# ---- one by one


@ranks(2)
def test_a_door_that_opens_later_is_named() -> None:
    """The first iterations came in by outputs alone; what is run again works."""
    model = compare("outputs alone", Case(Routed, aux_too))
    with raises("entered-by-a-side-door") as error:
        aux_only(model, ones()).backward()
    assert "unit 'blocks.1' through a tensor" in str(error.value)
    assert "parameter 'blocks.1.gate.weight'" in str(error.value)
    model.zero_grad()
    aux_only(model, ones()).backward()
    plain = models.seeded(Routed)
    aux_only(plain, ones()).backward()
    parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))


class Penalized(nn.Module):
    """Keeps a function of its weight alone: the backward from it runs no hook of the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.aux = linear(), None

    def forward(self, x: Tensor) -> Any:
        self.aux = self.layer.weight.square().sum()
        return self.layer(x)


@ranks(2)
def test_a_door_to_a_gathered_root_that_opens_later() -> None:
    """Nothing is freed, so nothing breaks: gradients are reduced when the backward is over."""
    for build in (Router, Penalized):
        model = compare("outputs alone", Case(build))
        model(ones())
        torch.ones(1, requires_grad=True).sum().backward()  # another backward in between
        plain = models.seeded(build)
        for each in (model, plain):
            own_aux(each, ones()).backward()
        assert running.is_sharded(model)
        parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))


@ranks(2)
def test_derivatives_and_graphs_that_are_kept() -> None:
    model, plain = sharded(Routed), models.seeded(Routed)
    grads: Any = []
    for each in (model, plain):
        x = torch.ones(2, DIM, requires_grad=True)
        total = all_aux(each, x)
        (by_input,) = torch.autograd.grad(total, x, retain_graph=True)
        total.backward(retain_graph=True)
        total.backward()
        grads.append({"input": by_input, **parity.full_grads(each)})
    parity.assert_equal(grads[0], grads[1])


@ranks(2)
@pytest.mark.parametrize("sync", [False, True])
def test_micro_batches_and_zeros_for_what_is_unused(sync: bool) -> None:
    model, plain = sharded(Routed), models.seeded(Routed)
    model.set_reduce_scatter_unused_params(True)
    for number, loss in enumerate((all_aux, aux_only, aux_too)):
        model.set_requires_gradient_sync(sync or number == 2)
        for each in (model, plain):
            loss(each, torch.full((2, DIM), 1.0 + number)).backward()
    zeros = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    expected = {
        name: zeros[name] if g is None else g for name, g in parity.full_grads(plain).items()
    }
    parity.assert_equal(parity.full_grads(model), expected)


@ranks(2)
def test_several_forwards_and_a_backward_for_each() -> None:
    model, plain = sharded(Routed), models.seeded(Routed)
    for _ in range(2):
        for each in (model, plain):
            totals = [all_aux(each, torch.full((2, DIM), value)) for value in (1.0, 2.0, 3.0)]
            for total in totals:
                total.backward()
    parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))


class Reads(torch.autograd.Function):
    """Reads a parameter of another unit in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: nn.Linear) -> Tensor:
        ctx.other = other
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.other.weight, None


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linear() for _ in range(3))
        for block in self.blocks:
            block.is_unit = True

    def forward(self, x: Tensor) -> Tensor:
        x = Reads.apply(self.blocks[1](self.blocks[0](x)), self.blocks[0])
        return self.blocks[2](x)


@ranks(2)
def test_a_sharded_parameter_in_backward_is_named() -> None:
    model = sharded(Reading)
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
    with raises("used-outside") as error:
        model(ones()).sum().backward()
    assert str(error.value).startswith("parameter 'blocks.0.weight' was used outside")


@ranks(2)
def test_a_cache_of_the_iteration_before() -> None:
    """torch's FSDP2 fails in the same place, with its storage's words."""
    model = sharded(Cached)
    output(model, ones()).backward(retain_graph=True)
    with raises("entered-by-a-side-door") as error:
        output(model, ones()).backward()
    assert str(error.value).startswith("backward reached unit 'blocks.1' through a tensor")
