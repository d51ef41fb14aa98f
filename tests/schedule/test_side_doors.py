"""Backward that enters a unit by a tensor which its forward did not return.

Equality is exact: on two ranks ours does the arithmetic of the reference, rank by rank.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard
from tests.common import models, parity
from tests.common.errors import raises
from tests.common.workers import ranks


class Router(nn.Module):
    """Keeps a value of its forward, made before its output or after it."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(models.DIM, 3), nn.Linear(models.DIM, models.DIM)
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
        self.stem = nn.Linear(models.DIM, models.DIM)
        self.blocks = nn.ModuleList(Router(late) for _ in range(3))
        self.head = nn.Linear(models.DIM, 2)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def sharded(model: nn.Module, **arguments: Any) -> Any:
    root = arguments.pop("root", {})
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=parity.world_mesh(), **arguments)
    return fully_shard(model, mesh=parity.world_mesh(), **{**arguments, **root})


def compare(
    build: Callable[[], nn.Module],
    loss: Callable[[Any, Tensor], Tensor],
    steps: int = 3,
    prepare: Callable[[Any], object] = lambda model: None,
    **arguments: Any,
) -> Any:
    """Gradients of ``steps`` iterations, against the unsharded model; nothing stays gathered."""
    model, plain = models.seeded(build), models.seeded(build)
    prepare(model), prepare(plain)
    model = sharded(model, **arguments)
    world = dist.get_world_size()
    for step in range(steps):
        batches = [torch.full((2, models.DIM), 0.1 + rank + step) for rank in range(world)]
        loss(model, batches[dist.get_rank()].clone()).backward()
        for batch in batches:
            (loss(plain, batch) / world).backward()
        parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))
        model.zero_grad(), plain.zero_grad()
    assert not any(unit_is_gathered(block) for block in getattr(model, "blocks", ()))
    return model


def unit_is_gathered(module: nn.Module) -> bool:
    return any(not hasattr(param, "to_local") for param in module.parameters())


def aux_only(model: Any, x: Tensor) -> Tensor:
    model(x)
    return model.blocks[1].aux


def all_aux(model: Any, x: Tensor) -> Tensor:
    model(x)
    return sum(block.aux for block in model.blocks)


def aux_too(model: Any, x: Tensor) -> Tensor:
    return model(x).sum() + model.blocks[2].aux


class Late(Routed):
    def __init__(self) -> None:
        super().__init__(late=True)


class Checkpointed(Routed):
    def __init__(self) -> None:
        super().__init__(checkpoints=True)


@ranks(2)
@pytest.mark.parametrize("build", [Routed, Late])
@pytest.mark.parametrize("loss", [aux_only, all_aux, aux_too])
def test_values_kept_on_modules(build: Any, loss: Any) -> None:
    compare(build, loss)


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_root_that_is_entered_by_nothing_else(reshard_after_forward: bool) -> None:
    """Where it stays gathered, nothing breaks; yet somebody must reduce its gradients."""

    def loss(model: Any, x: Tensor) -> Tensor:
        model(x)
        return model.aux

    compare(Router, loss, root={"reshard_after_forward": reshard_after_forward})


class Features(nn.Module):
    """Frozen layers, of which hooks take what they are given and what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(models.DIM, models.DIM), nn.Tanh(), nn.Linear(models.DIM, models.DIM)
            )
            for _ in range(3)
        )
        self.taken: list[Tensor] = []
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Perceptual(nn.Module):
    """A model that is trained by what frozen layers make of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.judge = nn.Linear(models.DIM, models.DIM), Features()
        self.blocks = self.judge.blocks

    def forward(self, x: Tensor) -> Tensor:
        self.judge.taken.clear()
        self.judge(self.model(x))
        return sum(taken.square().mean() for taken in self.judge.taken)


def take(index: int, inputs: bool) -> Callable[[Any], None]:
    def prepare(model: Perceptual) -> None:
        taken = model.judge.taken
        for block in model.judge.blocks[:2]:
            if inputs:
                block[index].register_forward_pre_hook(lambda _, args: taken.append(args[0]))
            else:
                block[index].register_forward_hook(lambda _, args, output: taken.append(output))

    return prepare


@ranks(2)
@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("index", [0, 2])
def test_features_that_hooks_take(index: int, inputs: bool) -> None:
    compare(Perceptual, lambda model, x: model(x), prepare=take(index, inputs))


class Attention(nn.Module):
    """A block that appends keys to a cache, or keeps them, and reads what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        cache = self.kept if cache is None else cache
        cache.append(self.key(x))
        keys = torch.cat(cache)
        return x + torch.softmax(x @ keys.T, -1) @ torch.tanh(self.value(keys))


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(models.DIM, models.DIM)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if caches is None else block(x, caches[index])
        return x


@ranks(2)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_cache_with_gradient(given: bool, keeps: bool) -> None:
    """Only the last output is used: the first forward's units are entered by their keys alone."""

    def loss(model: Any, x: Tensor) -> Tensor:
        caches: Any = [[] for _ in model.blocks]
        for block in model.blocks:
            block.kept.clear()
        for part in (x, x.flip(1), x / 2):
            y = model(part, caches) if given else model(part)
        assert [len(c) for c in (caches if given else [b.kept for b in model.blocks])] == [3, 3]
        return y.square().mean()

    compare(Cached, loss, reshard_after_forward=not keeps)


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        values = cache if isinstance(cache, list) else cache.value
        values.append(torch.tanh(self.linear(values[-1] + x)))
        return values[-1]


class Appending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Appends() for _ in range(3))

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        for block in self.blocks:
            block(x, cache)
        values = cache if isinstance(cache, list) else cache.value
        assert len(values) == 4
        return torch.stack(values)


@ranks(2)
@pytest.mark.parametrize("boxed", [False, True])
def test_a_cache_in_the_only_input_with_gradients(boxed: bool) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        cache: Any = [torch.ones(2, models.DIM, requires_grad=True) * 2]
        return model(x, SimpleNamespace(value=cache) if boxed else cache).square().mean()

    compare(Appending, loss)


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
    def __init__(self, box: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.box = nn.Linear(models.DIM, models.DIM), box

    def forward(self, x: Any) -> Any:
        return self.box(torch.tanh(self.linear(x if isinstance(x, Tensor) else unboxed(x))))


class Boxes(nn.Module):
    def __init__(self, box: Callable[[Any], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Boxing(box) for _ in range(3))

    def forward(self, x: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return unboxed(x)


@ranks(2)
@pytest.mark.parametrize("name", BOXES)
def test_containers(name: str) -> None:
    compare(lambda: Boxes(BOXES[name]), lambda model, x: model(x).square().mean())


@ranks(2)
def test_a_door_that_opens_later_is_named() -> None:
    """The first iterations came in by outputs alone; what is run again works."""
    model = compare(Routed, aux_too)
    with raises("entered-by-a-side-door") as error:
        aux_only(model, torch.ones(2, models.DIM)).backward()
    assert "unit 'blocks.1' through a tensor" in str(error.value)
    assert "parameter 'blocks.1.gate.weight'" in str(error.value)
    model.zero_grad()
    aux_only(model, torch.ones(2, models.DIM)).backward()
    plain = models.seeded(Routed)
    aux_only(plain, torch.ones(2, models.DIM)).backward()
    parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))


@ranks(2)
def test_a_door_to_a_gathered_root_that_opens_later() -> None:
    """Nothing is freed, so nothing breaks: gradients are reduced when the backward is over."""

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).sum()

    def aux(model: Any, x: Tensor) -> Tensor:
        model(x)
        return model.aux

    model = compare(Router, loss)
    model(torch.ones(2, models.DIM))
    torch.ones(1, requires_grad=True).sum().backward()  # another backward in between
    plain = models.seeded(Router)
    x = torch.ones(2, models.DIM)
    aux(model, x).backward()
    aux(plain, x).backward()
    parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))


@ranks(2)
def test_derivatives_and_graphs_that_are_kept() -> None:
    model, plain = sharded(models.seeded(Routed)), models.seeded(Routed)
    grads: Any = []
    for each in (model, plain):
        x = torch.ones(2, models.DIM, requires_grad=True)
        total = all_aux(each, x)
        (by_input,) = torch.autograd.grad(total, x, retain_graph=True)
        total.backward(retain_graph=True)
        total.backward()
        grads.append({"input": by_input, **parity.full_grads(each)})
    parity.assert_equal(grads[0], grads[1])


@ranks(2)
@pytest.mark.parametrize("sync", [False, True])
def test_micro_batches_and_zeros_for_what_is_unused(sync: bool) -> None:
    model, plain = sharded(models.seeded(Routed)), models.seeded(Routed)
    model.set_reduce_scatter_unused_params(True)
    for number, loss in enumerate((all_aux, aux_only, aux_too)):
        model.set_requires_gradient_sync(sync or number == 2)
        for each in (model, plain):
            loss(each, torch.full((2, models.DIM), 1.0 + number)).backward()
    zeros = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    expected = {
        name: zeros[name] if g is None else g for name, g in parity.full_grads(plain).items()
    }
    parity.assert_equal(parity.full_grads(model), expected)


@ranks(2)
def test_several_forwards_and_a_backward_for_each() -> None:
    model, plain = sharded(models.seeded(Routed)), models.seeded(Routed)
    for _ in range(2):
        for each in (model, plain):
            totals = [
                all_aux(each, torch.full((2, models.DIM), value)) for value in (1.0, 2.0, 3.0)
            ]
            for total in totals:
                total.backward()
    parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))


@ranks(2)
def test_checkpointed_blocks() -> None:
    compare(Checkpointed, aux_too)
    compare(Checkpointed, all_aux)


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
        self.blocks = nn.ModuleList(nn.Linear(models.DIM, models.DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = Reads.apply(self.blocks[1](self.blocks[0](x)), self.blocks[0])
        return self.blocks[2](x)


@ranks(2)
def test_a_sharded_parameter_in_backward_is_named() -> None:
    model = sharded(models.seeded(Reading))
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
    with raises("used-outside") as error:
        model(torch.ones(2, models.DIM)).sum().backward()
    assert str(error.value).startswith("parameter 'blocks.0.weight' was used outside")


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(models.DIM, models.DIM),
            nn.Linear(models.DIM, models.DIM),
        )

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


class Recursives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recursive() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@ranks(2)
def test_a_unit_below_the_root_that_calls_itself() -> None:
    compare(Recursives, lambda model, x: model(x).square().mean())


@ranks(2)
def test_a_cache_of_the_iteration_before() -> None:
    """torch's FSDP2 fails in the same place, with its storage's words."""
    model = sharded(models.seeded(Cached))
    x = torch.ones(2, models.DIM)
    model(x).square().mean().backward(retain_graph=True)
    with raises("entered-by-a-side-door") as error:
        model(x).square().mean().backward()
    assert str(error.value).startswith("backward reached unit 'blocks.1' through a tensor")
