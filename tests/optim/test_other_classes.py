"""torch's optimizers of whole parameters over DTensors, and classes said to be element-wise.

What goes through no call of fsdp2's is torch's to say: it is the same over torch's own FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fsdp2
from fsdp2.optim.flat import WHOLE, FlatOptimizer
from tests.common import models, parity
from tests.common.cases import in_turn
from tests.common.errors import raises
from tests.common.gradients import mlp
from tests.common.workers import ranks

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.ndim == 2], lr=1e-2)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> dict[str, Tensor]:
    """All ranks have one batch: the mean of their gradients is each one's, to the bit."""
    width = next(reversed(list(model.parameters()))).shape[0]
    for x, y in parity.regression_batches(models.DIM, width, steps=steps):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = parity.regression_loss(model, (x, y))
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return parity.full_params(model)


def _trained(api: ModuleType | None, make: Make) -> Any:
    model = mlp() if api is None else parity.shard(api, mlp())
    return _train(model, make(model.parameters()))


@ranks(2)
def test_where_rows_are_even() -> None:
    """Sums over shards are in another order, of bf16 in Muon; `fsdp2.optim.Muon` is exact."""
    for make, close in ((_lbfgs, parity.FP32), (_muon, parity.Tolerance(0.0, 3 * 1e-2 * 0.1))):
        ours = _trained(parity.OURS, make)
        parity.assert_equal(ours, _trained(parity.TORCH, make), make.__name__)
        parity.assert_close(ours, _trained(None, make), close, make.__name__)


@ranks(2)
def test_states_of_lbfgs_are_kept_by_no_checkpoint(tmp_path: Path) -> None:
    """torch's calls `step` without a closure to make states; ours says what it cannot keep."""
    model = parity.shard(parity.OURS, mlp())
    optimizer = _lbfgs(model.parameters())
    _train(model, optimizer)
    model.zero_grad()
    with pytest.raises(TypeError, match="not callable"):
        get_optimizer_state_dict(model, _lbfgs(model.parameters()))
    with raises("ckpt-contained"):
        fsdp2.checkpoint.save(tmp_path, model, optimizer, step=1)


class _ByKernels(torch.optim.SGD):
    """As bitsandbytes': kernels get the address of a tensor's memory. A DTensor has none."""

    def step(self, closure: Any = None) -> Any:
        assert all(p.data_ptr() for group in self.param_groups for p in group["params"])
        return super().step(closure)


@ranks(2)
@pytest.mark.parametrize("module", ["bitsandbytes.optim.adamw", "deepspeed.ops.adam.cpu_adam"])
def test_kernels_that_read_memory(module: str) -> None:
    """Refused before the first step; over flat shards they read plain tensors."""

    class Mine(type("ByKernels", (_ByKernels,), {"__module__": module})):  # type: ignore[misc]  # made here
        """A user's subclass."""

    model = parity.shard(parity.OURS, mlp())
    with raises("optimizer-kernels"):
        _train(model, Mine(model.parameters(), lr=0.1))
    model.zero_grad()
    flat = FlatOptimizer(model, Mine, elementwise=True, lr=0.1)
    plain = mlp()
    expected = _train(plain, Mine(plain.parameters(), lr=0.1))
    parity.assert_equal(_train(model, flat), expected)


# -- elementwise=True -----------------------------------------------------------------------------


class _Keeps(torch.optim.SGD):
    """Makes something in its first step, of each tensor that it steps."""

    made: Callable[[Tensor], object]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("kept", type(self).made(param))
        return super().step(closure)


class _Codes(Tensor):
    """A subclass whose values are somewhere else."""


KEPT: dict[str, Callable[[Tensor], object]] = {
    "scales": lambda param: torch.ones(-(-param.numel() // 4)),
    "codes": lambda param: torch.zeros_like(param.detach()).as_subclass(_Codes),
    "dict": lambda param: {"exp_avg": torch.zeros_like(param)},
    "list": lambda param: [torch.zeros_like(param)],
}


@ranks(2)
def test_classes_that_are_refused_whatever_is_said() -> None:
    """Those that look at whole parameters, and those whose state belongs to no element.

    The latter by the first step, before a state dict could tell which parameter has which part.
    """
    model = parity.shard(parity.OURS, mlp())
    for whole in WHOLE:
        with raises("flat-whole"):
            FlatOptimizer(model, whole, elementwise=True)
    for in_backward in (False, True):
        cases = {f"{kind}, in backward: {in_backward}": kept for kind, kept in KEPT.items()}
        in_turn(cases, partial(_refused_in_the_first_step, in_backward))


def _refused_in_the_first_step(in_backward: bool, kept: Callable[[Tensor], object]) -> None:
    class Keeps(_Keeps):
        made = kept

    model = parity.shard(parity.OURS, mlp())
    optimizer = FlatOptimizer(model, Keeps, elementwise=True, lr=0.1, step_in_backward=in_backward)
    with raises("flat-state") as caught:
        _train(model, optimizer, 1)
    assert "Keeps" in str(caught.value)


@ranks(2)
def test_numbers_and_tensors_by_element_are_kept() -> None:
    class Keeps(_Keeps):
        @staticmethod
        def made(param: Tensor) -> object:
            return None

    model = parity.shard(parity.OURS, mlp())
    optimizer = FlatOptimizer(model, Keeps, elementwise=True, lr=0.1, momentum=0.9)
    plain = parity.shard(parity.OURS, mlp())
    expected = _train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    parity.assert_equal(_train(model, optimizer), expected)
