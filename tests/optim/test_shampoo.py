"""A second optimizer on `MatrixOptimizer`: preconditioners that live with owners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp2
from tests.common import meshes, models, parity
from tests.common.workers import ranks
from tests.optim import test_muon, test_muon_states

pytestmark = pytest.mark.ranks


class Shampoo(fsdp2.optim.MatrixOptimizer):
    """Steps by L^(-1/4) G R^(-1/4), with L and R the sums of G Gᵀ and Gᵀ G so far."""

    def update(self, gradient: Tensor, state: Any, group: Any) -> Tensor:
        rows, columns = gradient.shape
        if not state:
            state["left"] = 1e-3 * torch.eye(rows)
            state["right"] = 1e-3 * torch.eye(columns)
        state["left"].addmm_(gradient, gradient.mT)
        state["right"].addmm_(gradient.mT, gradient)
        return self._root(state["left"]) @ gradient @ self._root(state["right"])

    def flops(self, rows: int, columns: int) -> float:
        return 25.0 * (rows**3 + columns**3)

    @staticmethod
    def _root(matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return (vectors * values.clamp(min=1e-6) ** -0.25) @ vectors.mT


def built(mesh: Any = None, sharded: bool = True) -> tuple[Any, Shampoo]:
    model = models.seeded(test_muon.Weights)
    if sharded:
        test_muon.sharded(model, mesh)
    aside = {"elementwise": ["embed.*"], "elementwise_options": test_muon.HEAD}
    return model, Shampoo(model, {"lr": 0.1, "weight_decay": 0.1}, **aside)


def steps(model: Any, optimizer: Shampoo, numbers: range) -> dict[str, Any]:
    for number in numbers:
        test_muon.give(model, test_muon.gradients(model, number))
        optimizer.step()
        optimizer.zero_grad()
    return parity.full_params(model)


def owned(optimizer: Shampoo) -> set[tuple[int, str]]:
    """Keys of matrices in this rank's state dict."""
    found = optimizer.state_dict()["state"]
    return {(at, key) for at, kept in found.items() for key in kept if key.startswith("matrix")}


@ranks(2)
def test_as_unsharded() -> None:
    """And each preconditioner is on one rank."""
    model, optimizer = built()
    found = steps(model, optimizer, range(3))
    whole, alone = built(sharded=False)
    parity.assert_equal(found, steps(whole, alone, range(3)))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, owned(optimizer))
    assert told[0].isdisjoint(told[1])
    assert told[0] | told[1] == owned(alone)
    assert all(told)


@ranks(4)
@pytest.mark.parametrize("by", ["dcp", "fsdp2"])
def test_other_owners(by: str, tmp_path: Path) -> None:
    """Saved by owners, loaded on another mesh by whoever owns a matrix there."""
    whole, alone = built(sharded=False)
    expected = steps(whole, alone, range(4))
    told: list[Any] = [str(tmp_path)]
    dist.broadcast_object_list(told)
    model, optimizer = built()
    steps(model, optimizer, range(2))
    other, fresh = built(meshes.hsdp_mesh(2, 2))
    test_muon_states.carry(by, told[0], (model, optimizer), (other, fresh))
    parity.assert_equal(steps(other, fresh, range(2, 4)), expected)
    assert len(owned(fresh)) < len(owned(alone))
