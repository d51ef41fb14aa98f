"""Units whose outputs some ranks do not use: every rank must run the same reductions, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import fully_shard
from tests.common import models, parity
from tests.common.gradients import unsharded_grads
from tests.common.workers import ranks

DIM = 8


class Tower(nn.Module):
    """Blocks in a row; the loss reads the output of one of them, later ones run for nothing."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(blocks))

    def forward(self, x: Tensor, used: int) -> Tensor:
        outputs = []
        for block in self.blocks:
            x = torch.tanh(block(x))
            outputs.append(x)
        return outputs[used]


def _expected(used: list[int], inputs: list[Tensor]) -> dict[str, Tensor | None]:
    model = models.seeded(Tower)
    for block, x in zip(used, inputs, strict=True):
        model(x, block).sum().backward()
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad / len(used)
        for name, param in model.named_parameters()
    }


@ranks(2)
@pytest.mark.parametrize("used", [[3, 0], [0, 3], [1, 2], [2, 2]])
def test_ranks_that_use_different_outputs_reduce_alike(used: list[int]) -> None:
    model = models.seeded(Tower)
    for block in model.blocks:
        fully_shard(block, mesh=parity.world_mesh())
    fully_shard(model, mesh=parity.world_mesh())
    model.set_reduce_scatter_unused_params(True)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(4, DIM, generator=generator, requires_grad=True) for _ in used]
    rank = dist.get_rank()
    for _ in range(2):  # the second time the order is known, and guesses are right
        model.zero_grad()
        model(inputs[rank], used[rank]).sum().backward()
        parity.assert_equal(parity.full_grads(model), _expected(used, inputs))


class Nest(nn.Module):
    """Two towers, units with units inside; either may be used for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([Tower(2), Tower(2)])
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, used: int) -> Tensor:
        outputs = [tower(x, 1) for tower in self.towers]
        outputs.append(sum(outputs))
        return self.last(outputs[used])


@ranks(2)
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("used", [[0, 1], [1, 2], [2, 0]])
def test_units_inside_units_that_are_skipped(used: list[int], forwards: int) -> None:
    model, plain = models.seeded(Nest), models.seeded(Nest)
    for tower in model.towers:
        for block in tower.blocks:
            fully_shard(block, mesh=parity.world_mesh())
        fully_shard(tower, mesh=parity.world_mesh())
    fully_shard(model, mesh=parity.world_mesh())
    model.set_reduce_scatter_unused_params(True)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(4, DIM, generator=generator, requires_grad=True) for _ in used]
    rank = dist.get_rank()
    for _ in range(2):
        model.zero_grad()
        losses = [model(inputs[rank], (used[rank] + i) % 3).sum() for i in range(forwards)]
        torch.stack(losses).sum().backward()
        plain.zero_grad()
        for block, x in zip(used, inputs, strict=True):
            for i in range(forwards):
                plain(x, (block + i) % 3).sum().backward()
        expected = {
            name: torch.zeros_like(p) if p.grad is None else p.grad / 2
            for name, p in plain.named_parameters()
        }
        parity.assert_close(parity.full_grads(model), expected, parity.FP32)


def _assert_like_unsharded(model: Any, plain: nn.Module, *how: Any) -> None:
    """Two steps of a model that is called with an input, the rank and `how`; absent ones are zeros.

    The second time the order is known, and guesses are right.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(4, DIM, generator=generator) for _ in range(2)]

    def compute(module: nn.Module, rank: int) -> None:
        module(inputs[rank], rank, *how).sum().backward()

    shapes = dict(plain.named_parameters())
    expected = {
        name: torch.zeros_like(shapes[name]) if grad is None else grad
        for name, grad in unsharded_grads(plain, compute).items()
    }
    model.set_reduce_scatter_unused_params(True)
    for _ in range(2):
        model.zero_grad()
        compute(model, dist.get_rank())
        parity.assert_close(parity.full_grads(model), expected, parity.FP32)


class Ahead(nn.Module):
    """What blocks read requires grad on rank 1 only, where a parameter comes before them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(DIM))
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM, bias=bool(i)) for i in range(2))

    def forward(self, x: Tensor, rank: int, calls: list[int]) -> Tensor:
        outputs = [x + self.bias if rank else x]
        for call in calls:
            outputs.append(torch.tanh(self.blocks[call](outputs[0])))
        return torch.stack(outputs[1:]).sum(0)


@ranks(2)
@pytest.mark.parametrize("calls", [[0], [0, 1], [1, 1, 0], [0, 1, 0]])
def test_units_whose_inputs_require_grad_on_one_rank(calls: list[int]) -> None:
    """Only there is the end of their backward seen; they are reduced in the same order."""
    model, plain = models.seeded(Ahead), models.seeded(Ahead)
    for block in model.blocks:
        fully_shard(block, mesh=parity.world_mesh())
    fully_shard(model, mesh=parity.world_mesh())
    _assert_like_unsharded(model, plain, calls)


class Recomputed(nn.Module):
    """A checkpointed part of units; a parameter and the last unit are used on rank 1 only."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Bent(1 + i) for i in range(3))
        self.last = nn.Linear(DIM, 3 * DIM)
        self.bias = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor, rank: int, reentrant: bool, behind: bool) -> Tensor:
        def run(x: Tensor) -> Tensor:
            for unit in self.units:
                x = unit(x, rank)
            return torch.tanh(x) if behind else x

        y = checkpoint(run, x + self.bias, use_reentrant=reentrant)
        last = self.last(y).sum(1, keepdim=True)
        return y + last if rank else y * 1.0


class Bent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM * width)
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        y = torch.tanh(self.linear(x)).view(len(x), -1, DIM).sum(1)
        return y * self.scale if rank else torch.tanh(x) + y.detach()


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("behind", [False, True])
def test_several_units_in_one_checkpoint(reentrant: bool, behind: bool) -> None:
    """Recomputed in the order of forward, they are reduced in that of backward."""
    model, plain = models.seeded(Recomputed), models.seeded(Recomputed)
    for module in (*model.units, model.last):
        fully_shard(module, mesh=parity.world_mesh())
    fully_shard(model, mesh=parity.world_mesh())
    _assert_like_unsharded(model, plain, reentrant, behind)


class Listed(nn.Module):
    """A list of modules, called once as it is and once in a checkpoint behind another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.between = Bent(2)

    def forward(self, x: Tensor, rank: int, reentrant: bool) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return torch.tanh(self.parts[1](torch.tanh(self.parts[0](x))))

        x = self.between(run(x), rank)
        return checkpoint(run, x, use_reentrant=reentrant)


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_list_in_a_checkpoint(reentrant: bool) -> None:
    """Its second module's input is not its end, nor is the first's output the call before."""
    model, plain = models.seeded(Listed), models.seeded(Listed)
    fully_shard([*model.parts], mesh=parity.world_mesh())
    fully_shard(model.between, mesh=parity.world_mesh())
    fully_shard(model, mesh=parity.world_mesh())
    _assert_like_unsharded(model, plain, reentrant)


class Around(nn.Module):
    """A list of modules, the first in a checkpoint and around a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Bent(2), nn.Linear(DIM, DIM)])
        self.bias = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor, rank: int, reentrant: bool, newest: bool) -> Tensor:
        x = x + self.bias
        between = None if newest else x * 2  # a node between the input's own and the call
        x = checkpoint(self.parts[0], x, rank, use_reentrant=reentrant)
        return self.parts[1](x) if between is None else self.parts[1](x) + between


@ranks(2)
@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_unit_inside_a_list_in_a_checkpoint(reentrant: bool, newest: bool) -> None:
    """The list is entered before: its first module runs again in the middle of its backward.

    Where its input is not autograd's newest, the list's backward ends at a view of it.
    """
    model, plain = models.seeded(Around), models.seeded(Around)
    fully_shard(model.parts[0].linear, mesh=parity.world_mesh())
    fully_shard([*model.parts], mesh=parity.world_mesh())
    fully_shard(model, mesh=parity.world_mesh())
    _assert_like_unsharded(model, plain, reentrant, newest)


class Inner(nn.Module):
    """A unit around a unit; the outer may have no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class MaybeUsed(nn.Module):
    """No parameters of its own; the output of ``inner`` is used on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        y = self.inner(x)
        return x + y if uses else x * 1.0


@ranks(2)
@pytest.mark.parametrize("forwards", [1, 2])
def test_a_root_without_parameters_none_of_whose_units_a_rank_uses(forwards: int) -> None:
    model, plain = models.seeded(MaybeUsed), models.seeded(MaybeUsed)
    for module in (model.inner.linear, model.inner, model):
        fully_shard(module, mesh=parity.world_mesh())
    model.set_reduce_scatter_unused_params(True)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(4, DIM, generator=generator, requires_grad=True) for _ in range(forwards)]
    for _ in range(2):
        model.zero_grad()
        torch.stack([model(x, dist.get_rank() == 1).sum() for x in inputs]).sum().backward()
    torch.stack([plain(x, True).sum() for x in inputs]).sum().backward()
    expected = {name: p.grad / 2 for name, p in plain.named_parameters() if p.grad is not None}
    assert len(expected) == 2
    parity.assert_close(parity.full_grads(model), expected, parity.FP32)


class Twice(nn.Module):
    """Calls a unit twice that returns its input on rank 0, which uses one of both."""

    def __init__(self) -> None:
        super().__init__()
        self.unit, self.bias = Scaled(), nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        first, second = (self.unit(x + self.bias, rank) for _ in range(2))
        return first + second if rank else first * 1.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(DIM))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x @ self.weight if rank else x[:]


@ranks(2)
def test_a_unit_that_is_called_twice_and_returns_its_input_on_one_rank() -> None:
    """What it returns is a view of what is outside of it: no gradient enters the unit by that."""
    model, plain = models.seeded(Twice), models.seeded(Twice)
    fully_shard(model.unit, mesh=parity.world_mesh())
    fully_shard(model, mesh=parity.world_mesh())
    model.set_reduce_scatter_unused_params(True)
    x = torch.ones(2, DIM)
    for _ in range(2):
        model.zero_grad()
        model(x, dist.get_rank()).sum().backward()
    for rank in range(2):
        plain(x, rank).sum().backward()
    expected = {name: p.grad / 2 for name, p in plain.named_parameters() if p.grad is not None}
    assert len(expected) == 2
    parity.assert_close(parity.full_grads(model), expected, parity.FP32)


class Dropping(nn.Module):
    """Units between two layers of the root's; ``used`` says which of their outputs go on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, used: list[bool]) -> Tensor:
        x = self.first(x)
        for block, uses in zip(self.blocks, used, strict=True):
            y = block(x)
            x = x + y if uses else x
        return self.last(x)


@ranks(2)
@pytest.mark.parametrize("used", [[False, False], [True, False], [False, True]])
def test_one_backward_of_two_forwards_whose_inputs_require_no_grad(used: list[bool]) -> None:
    """The root's end is not seen, and where a rank skips all units nothing else leaves it."""
    model, plain = models.seeded(Dropping), models.seeded(Dropping)
    for block in model.blocks:
        fully_shard(block, mesh=parity.world_mesh())
    fully_shard(model, mesh=parity.world_mesh())
    model.set_reduce_scatter_unused_params(True)
    x, uses = torch.ones(2, DIM), [[True, True], used]
    with fsdp2.debug(check_ranks=True):
        for _ in range(2):
            model.zero_grad()
            first, second = (model(x * n, uses[dist.get_rank()]) for n in (1, 2))
            (first + second).sum().backward()
    for rank in range(2):
        (plain(x, uses[rank]) + plain(x * 2, uses[rank])).sum().backward()
    expected = {name: p.grad / 2 for name, p in plain.named_parameters() if p.grad is not None}
    parity.assert_close(parity.full_grads(model), expected, parity.FP32)


@ranks(2)
def test_units_that_no_forward_has_called_count_as_zeros() -> None:
    """All of them: also those that nobody gathered by a wrong guess of what is next."""
    model: Any = models.seeded(models.Choosy)
    for choice in model.choices.values():
        fully_shard(choice, mesh=parity.world_mesh())
    fully_shard(model, mesh=parity.world_mesh())
    model.set_reduce_scatter_unused_params(True)
    model.active = ("a",)
    model(torch.ones(2, DIM)).sum().backward()
    for name in ("b", "c"):
        weight = model.choices[name].weight
        parity.assert_equal(weight.grad.full_tensor(), torch.zeros(DIM, DIM), name)
