"""Units whose outputs some ranks do not use: every rank must run the same reductions, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import fully_shard
from tests.common import models, parity
from tests.common.cases import in_turn
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


# ---- the cases


@dataclass(frozen=True)
class Case:
    """A model, the modules that are units besides the root, and a rank's loss of its input."""

    build: Callable[[], nn.Module]
    units: Callable[[Any], Iterable[nn.Module]]
    loss: Callable[[Any, Tensor, int], Tensor]
    needs_grad: bool = False  # whether inputs require it
    exact: bool = False


def _sum(*how: Any) -> Callable[[Any, Tensor, int], Tensor]:
    return lambda model, x, rank: model(x, rank, *how).sum()


def _nested(used: list[int], forwards: int) -> Case:
    def loss(model: Any, x: Tensor, rank: int) -> Tensor:
        calls = [(used[rank] + i) % 3 for i in range(forwards)]
        return torch.stack([model(x, call).sum() for call in calls]).sum()

    def units(model: Any) -> Iterable[nn.Module]:
        for tower in model.towers:
            yield from (*tower.blocks, tower)

    return Case(Nest, units, loss, needs_grad=True)


def _without_parameters(forwards: int) -> Case:
    def loss(model: Any, x: Tensor, rank: int) -> Tensor:
        return torch.stack([model(x * (1 + i), rank == 1).sum() for i in range(forwards)]).sum()

    return Case(MaybeUsed, lambda m: (m.inner.linear, m.inner), loss, needs_grad=True)


def _dropping(used: list[bool]) -> Case:
    def loss(model: Any, x: Tensor, rank: int) -> Tensor:
        uses = [[True, True], used][rank]
        return (model(x, uses) + model(x * 2, uses)).sum()

    return Case(Dropping, lambda m: m.blocks, loss)


def _one_choice(model: Any, x: Tensor, rank: int) -> Tensor:
    model.active = ("a",)
    loss: Tensor = model(x).sum()
    return loss


def _tower(used: list[int]) -> Case:
    return Case(
        Tower,
        lambda m: m.blocks,
        lambda model, x, rank: model(x, used[rank]).sum(),
        needs_grad=True,
        exact=True,
    )


EITHER = (False, True)
CASES = {
    **{f"outputs {used}": _tower(used) for used in ([3, 0], [0, 3], [1, 2], [2, 2])},
    **{
        f"units inside units {used}, {forwards} forwards": _nested(used, forwards)
        for used in ([0, 1], [1, 2], [2, 0])
        for forwards in (1, 2)
    },
    # Only on rank 1 is the end of the units' backward seen; they are reduced in the same order.
    **{
        f"inputs require grad on one rank {calls}": Case(Ahead, lambda m: m.blocks, _sum(calls))
        for calls in ([0], [0, 1], [1, 1, 0], [0, 1, 0])
    },
    # Recomputed in the order of forward, they are reduced in that of backward.
    **{
        f"several in one checkpoint, {reentrant=} {behind=}": Case(
            Recomputed, lambda m: (*m.units, m.last), _sum(reentrant, behind)
        )
        for reentrant in EITHER
        for behind in EITHER
    },
    # Its second module's input is not its end, nor is the first's output the call before.
    **{
        f"a list in a checkpoint, {reentrant=}": Case(
            Listed, lambda m: ([*m.parts], m.between), _sum(reentrant)
        )
        for reentrant in EITHER
    },
    # The list is entered before: its first module runs again in the middle of its backward. Where
    # its input is not autograd's newest, the list's backward ends at a view of it.
    **{
        f"a unit inside a list in a checkpoint, {reentrant=} {newest=}": Case(
            Around, lambda m: (m.parts[0].linear, [*m.parts]), _sum(reentrant, newest)
        )
        for reentrant in EITHER
        for newest in EITHER
    },
    **{
        f"a root without parameters, {forwards} forwards": _without_parameters(forwards)
        for forwards in (1, 2)
    },
    # What it returns is a view of what is outside of it: no gradient enters the unit by that.
    "called twice, returns its input on one rank": Case(Twice, lambda m: [m.unit], _sum()),
    # The root's end is not seen, and where a rank skips all units nothing else leaves it.
    **{
        f"one backward of two forwards {used}": _dropping(used)
        for used in ([False, False], [True, False], [False, True])
    },
    # Also those that nobody gathered by a wrong guess of what is next.
    "units that no forward calls": Case(models.Choosy, lambda m: m.choices.values(), _one_choice),
}


@ranks(2)
def test_ranks_reduce_alike_and_absent_gradients_are_zeros() -> None:
    in_turn(CASES, _check)


def _check(case: Case) -> None:
    """Two steps: the second time the order is known, and guesses are right."""
    model, plain = models.seeded(case.build), models.seeded(case.build)
    for unit in case.units(model):
        fully_shard(unit, mesh=parity.world_mesh())
    fully_shard(model, mesh=parity.world_mesh())
    model.set_reduce_scatter_unused_params(True)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(4, DIM, generator=generator) for _ in range(2)]

    def compute(module: nn.Module, rank: int) -> None:
        case.loss(module, inputs[rank].clone().requires_grad_(case.needs_grad), rank).backward()

    shapes = dict(plain.named_parameters())
    expected = {
        name: torch.zeros_like(shapes[name]) if grad is None else grad
        for name, grad in unsharded_grads(plain, compute).items()
    }
    with fsdp2.debug(check_ranks=case.build is Dropping):
        for _ in range(2):
            model.zero_grad()
            compute(model, dist.get_rank())
            found = parity.full_grads(model)
            if case.exact:
                parity.assert_equal(found, expected)
            parity.assert_close(found, expected, parity.FP32)
