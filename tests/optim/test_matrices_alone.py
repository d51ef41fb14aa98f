"""Matrices in weights, what ranks hold of them, who owns them: plain arithmetic, and refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp2
from fsdp2.optim.matrices import blocks, owners
from fsdp2.optim.matrices.blocks import Box
from tests.common.errors import raises

pytestmark = pytest.mark.alone


# ---- matrices in a weight

SPLITS: dict[str, tuple[tuple[int, ...], Any]] = {
    "experts": ((3, 4, 5), lambda name, w: w),
    "unbound": ((3, 4, 5), lambda name, w: w.unbind()),
    "chunks": ((6, 4), lambda name, w: w.chunk(3)),
    "columns": ((4, 6), lambda name, w: w.split([1, 2, 3], dim=1)),
    "transposed": ((6, 4), lambda name, w: [w.T]),
    "kernels": ((4, 3, 2, 2), lambda name, w: [w.flatten(1)]),
    "kernels, transposed": ((4, 3, 2, 2), lambda name, w: [w.flatten(1).T]),
    "heads": ((12, 4), lambda name, w: w.unflatten(0, (2, 3, 2)).flatten(0, 1).unbind()),
    "middle": ((3, 4, 5), lambda name, w: w.unbind(1)),
    "one": ((1, 4, 1), lambda name, w: [w[0]]),
    "groups": ((2, 2, 3, 2), lambda name, w: [one for each in w for one in each]),
}


@pytest.mark.parametrize("name", SPLITS)
def test_matrices_of_a_weight(name: str) -> None:
    """Each block of the weight, seen as a matrix, has the values that the user's view has."""
    shape, split = SPLITS[name]
    weight = torch.arange(float(torch.Size(shape).numel())).view(shape)
    found = blocks.matrices_of("w", torch.Size(shape), split)
    expected = list(split("w", weight))
    assert len(found) == len(expected)
    for matrix, wanted in zip(found, expected, strict=True):
        block = matrix.box.of(weight).contiguous()[None]
        seen = matrix.seen(block)
        assert matrix.shape == tuple(wanted.shape)
        assert torch.equal(seen[0], wanted)
        assert torch.equal(matrix.unseen(seen), block)


def test_without_a_choice() -> None:
    """A weight of two dims is a matrix; others are none."""
    whole = Box.whole((4, 6))
    for split in (None, lambda name, w: None):
        assert blocks.matrices_of("w", torch.Size((4, 6)), split) == (blocks.Matrix(whole, (4, 6)),)
        assert blocks.matrices_of("w", torch.Size((4,)), split) == ()
        assert blocks.matrices_of("w", torch.Size((4, 6, 2)), split) == ()


@pytest.mark.parametrize(
    "split",
    [
        lambda name, w: [w[::2], w[1::2]],
        lambda name, w: [w.clone()],
        lambda name, w: [w[0]],
        lambda name, w: [torch.empty(6, 4)],
        lambda name, w: [w.flatten()[1:9].view(2, 4)],
        lambda name, w: [w.diagonal()[None]],
        lambda name, w: ["rows"],
    ],
)
def test_what_is_no_block(split: Any) -> None:
    with raises("muon-split-block"):
        blocks.matrices_of("w", torch.Size((6, 4)), split)


@pytest.mark.parametrize(
    "split",
    [
        lambda name, w: [w[:2]],
        lambda name, w: [w[:4], w[2:]],
        lambda name, w: [w[:4], w[1:3]],
        lambda name, w: [w[:2], w[:2], w[2:4]],
        lambda name, w: [w, w],
    ],
)
def test_what_does_not_cover_a_weight(split: Any) -> None:
    with raises("muon-split-cover"):
        blocks.matrices_of("w", torch.Size((6, 4)), split)


# ---- what ranks hold


class Mesh:
    """Ranks in a grid, seen from one of them."""

    def __init__(self, *shape: int, at: tuple[int, ...] = ()) -> None:
        self.mesh = torch.arange(torch.Size(shape).numel()).view(shape)
        self._at = at or (0,) * len(shape)

    def get_coordinate(self) -> Any:
        return self._at


def _spread(mesh: Any, placements: tuple[Any, ...], *shape: int) -> Any:
    return blocks._spread(mesh, placements, torch.Size(shape))


@pytest.mark.parametrize("seed", range(20))
def test_ranks_hold_each_element_once(seed: int) -> None:
    """Of each copy: on random meshes, by any dims, some of them twice."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    shape = [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]
    placements = []
    for _ in sizes:
        dim = rng.randrange(len(shape))
        placements.append(rng.choice([Replicate(), Shard(dim), Shard(dim - len(shape))]))
    if isinstance(placements[-1], Shard) and len(sizes) > 1:
        placements[0] = _StridedShard(placements[-1].dim, split_factor=sizes[-1])
    spread = _spread(Mesh(*sizes), tuple(placements), *shape)
    counts = {copy: torch.zeros(shape) for copy in spread.copies}
    for box, copy in zip(spread.boxes, spread.copies, strict=True):
        box.of(counts[copy]).add_(1)
    assert all(count.eq(1).all() for count in counts.values())


def test_a_piece_of_a_piece() -> None:
    """The tensor-parallel half first, and of that the rows of a shard."""
    strided = _StridedShard(0, split_factor=2)
    spread = _spread(Mesh(2, 2, at=(1, 0)), (strided, Shard(0)), 8, 3)
    assert [box.starts[0] for box in spread.boxes] == [0, 4, 2, 6]
    assert spread.own == Box((2, 0), (2, 3))


# ---- owners


def _cubes(*dims: int) -> list[tuple[float, int]]:
    return [(float(dim**3), dim * dim) for dim in dims]


def test_the_longest_first() -> None:
    load = owners.Tally.of(3)
    assert owners.assign(_cubes(2, 9, 8, 7, 6), load) == [1, 0, 1, 2, 2]
    assert load.matrices == [1, 2, 2]
    assert owners.assign(_cubes(1), load) == [1]


def test_units_are_joined_until_all_have_work() -> None:
    """Within a bound of bytes; two ranks are busy with a unit each, and nothing is joined."""
    block = _cubes(8, 8, 8, 8)
    assert owners.join_units([block] * 3, 2) == [range(i, i + 1) for i in range(3)]
    assert owners.join_units([block] * 5, 8) == [range(2), range(2, 4), range(4, 5)]
    assert owners.join_units([block] * 5, 64) == [range(5)]
    assert owners.join_units([_cubes(8)] * 4, 2) == [range(2), range(2, 4)]
    assert owners.join_units([], 2) == []


def test_balance_of_a_model() -> None:
    """Blocks of unequal matrices on many ranks: nobody has a tenth more than the mean."""
    weights = [(2.0 * rows * 64 * 64, rows * 64) for rows in (64, 64, 64, 64, 256, 256, 256)]
    for ranks in (2, 4, 8):
        load = owners.Tally.of(ranks)
        for _ in range(24):
            owners.assign(weights, load)
        assert max(load.flops) * ranks / sum(load.flops) < 1.1


# ---- one process, and refusals


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3, bias=False)


def _net() -> Net:
    torch.manual_seed(0)
    net = Net()
    for param in net.parameters():
        param.grad = torch.randn_like(param)
    return net


@pytest.mark.parametrize(
    "elementwise", [["head.*"], lambda name, param: name == "head.weight", ["head.weight", "nor*"]]
)
def test_on_plain_parameters(elementwise: Any) -> None:
    """Without ranks the results are torch's, too; so are groups' options."""
    ours, theirs = _net(), _net()
    optimizer = fsdp2.optim.Muon(
        ours, 0.1, elementwise=elementwise, elementwise_options={"lr": 0.2, "weight_decay": 0.0}
    )
    matrices = [theirs.first.weight, theirs.second.weight]
    others = [p for p in theirs.parameters() if all(p is not matrix for matrix in matrices)]
    expected = torch.optim.Muon(matrices, 0.1), torch.optim.AdamW(others, 0.2, weight_decay=0.0)
    for _ in range(2):
        for each in (optimizer, *expected):
            each.step()
    for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(param, other)
    for group, each in zip(optimizer.param_groups, expected, strict=True):
        assert group.keys() == each.param_groups[0].keys()


def test_what_muon_refuses() -> None:
    net = _net()
    for bad in ({"lr": -1.0}, {"momentum": float("nan")}, {"weight_decay": -0.1}):
        with raises("muon-range"):
            fsdp2.optim.Muon(net, **bad)
    with raises("muon-adjust"):
        fsdp2.optim.Muon(net, adjust_lr_fn="twice")
    for worse in ({"ns_steps": 100}, {"ns_coefficients": (1.0, 2.0)}):
        with raises("muon-steps"):
            fsdp2.optim.Muon(net, **worse)
    with raises("muon-name"):
        fsdp2.optim.Muon(net, elementwise=["heads.*"])
    with raises("muon-name"):
        fsdp2.optim.Muon(net.parameters(), elementwise=["head.*"])
    with raises("muon-group"):
        fsdp2.optim.Muon([{"params": net.parameters(), "elementwise": False}])
    with raises("muon-complex"):
        fsdp2.optim.Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])


def test_gradients_that_are_refused() -> None:
    param = nn.Parameter(torch.zeros(2, 2))
    param.grad = torch.eye(2).to_sparse()
    with raises("muon-gradient"):
        fsdp2.optim.Muon([param]).step()
