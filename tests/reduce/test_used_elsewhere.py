"""A parameter that some ranks use and others do not, in one unit: all of them train it alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.common import meshes, parity
from tests.common.cases import in_turn
from tests.common.models import seeded
from tests.common.workers import ranks

DIM = 6


class Experts(nn.Module):
    """A router's layer and experts in one unit; ``used`` names the experts that run."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.shared = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(experts))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        x = self.shared(x)
        return x + sum(torch.tanh(self.experts[index](x)) for index in used)


Used = tuple[int, ...]
BY_RANK: tuple[Used, ...] = ((0, 1), (1, 2))  # 3 is used by nobody


def _inputs(micro: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5 + micro)
    return [torch.randn(3, DIM, generator=generator) for _ in range(dist.get_world_size())]


def _expected(model: nn.Module, used: list[list[Used]]) -> dict[str, Tensor | None]:
    """Of ranks' micro-batches: averages over ranks, sums over micro-batches."""
    size = dist.get_world_size()
    for micro, by_rank in enumerate(used):
        for rank, x in enumerate(_inputs(micro)):
            (model(x, by_rank[rank % len(by_rank)]).sum() / size).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def _backward(model: nn.Module, used: list[list[Used]], micro: int = 0) -> None:
    rank = dist.get_rank()
    by_rank = used[micro]
    model(_inputs(micro)[rank], by_rank[rank % len(by_rank)]).sum().backward()


HSDP = "hsdp"


def _shard(how: dict[str, Any]) -> Any:
    options = dict(how)
    mesh = meshes.hsdp_mesh(*options.pop(HSDP)) if HSDP in options else parity.world_mesh()
    return fully_shard(seeded(Experts), mesh=mesh, **options)


@ranks(2)
def test_one_step_moves_the_whole_weight() -> None:
    model, plain = _shard({}), seeded(Experts)
    expected = _expected(plain, [list(BY_RANK)])
    _backward(model, [list(BY_RANK)])
    parity.assert_close(parity.full_grads(model), expected, parity.FP32)
    unused = model.experts[3].weight
    assert unused.grad is None  # nobody used it: no decay, no state
    for module in (model, plain):
        torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1).step()
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        parity.assert_close(ours.full_tensor(), theirs, parity.FP32, name)


class Sums(fsdp2.ReduceScatter):
    """A user's reduce-scatter, which keeps no value below a thousandth: as one that quantizes."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        small = input_tensor.abs() < 1e-3
        dist.reduce_scatter_tensor(output_tensor, input_tensor.masked_fill(small, 0), op, group)


def _drop(flat: Tensor) -> None:
    """A hook that sees marks behind the rows; what it drops of them is known all the same."""
    flat[flat.abs() < 1e-6] = 0


def _hook(model: Any) -> None:
    model.set_all_reduce_hook(_drop)


MIXED = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
HALF = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}
COPIES = {HSDP: (2, 1)}
COARSE = parity.Tolerance(rtol=2e-2, atol=2e-2)
ROUGH = parity.Tolerance(rtol=1e-5, atol=2e-3)

Way = tuple[dict[str, Any], Callable[[Any], object], parity.Tolerance]
WAYS: dict[str, Way] = {
    "plain": ({}, lambda model: None, parity.FP32),
    "hook": ({}, _hook, parity.FP32),
    "custom": ({}, lambda model: model.set_custom_reduce_scatter(Sums()), ROUGH),
    "kept": ({}, lambda model: model.set_tuning(keep_gradients=True), parity.FP32),
    "memory of the group": (
        {},
        lambda model: model.set_allocate_memory_from_process_group_for_comm(True),
        parity.FP32,
    ),
    "sums": ({}, lambda model: model.set_force_sum_reduction_for_comms(True), parity.FP32),
    "mixed": (MIXED, lambda model: None, COARSE),
    "half": (HALF, _hook, COARSE),
    "replicated": (COPIES, lambda model: None, parity.FP32),
    "replicated, hook": (COPIES, _hook, parity.FP32),
}


@ranks(2)
def test_every_way_to_reduce() -> None:
    in_turn(WAYS, _check_way)


def _check_way(way: Way) -> None:
    """The second step adds to gradients that are there; the third begins anew."""
    how, change, tolerance = way
    model = _shard(how)
    change(model)
    micros = [list(BY_RANK), [(2,), (0, 1)]]

    def check(steps: int) -> None:
        expected = _expected(seeded(Experts), micros[:steps])
        assert expected["experts.3.weight"] is None
        parity.assert_close(parity.full_grads(model), expected, tolerance)

    for steps in (1, 2):
        _backward(model, micros, steps - 1)
        check(steps)
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    _backward(model, micros, 0)
    check(1)


@ranks(2, extended=(4,))
@pytest.mark.parametrize("flag", ["sync", "all_reduce"])
@pytest.mark.parametrize("copies", [1, 2])
def test_used_in_different_micro_batches(flag: str, copies: int) -> None:
    """Expert 0 on rank 0 in the first, on rank 1 in the second; 1 in the first alone."""
    model = _shard({HSDP: (copies, dist.get_world_size() // copies)})
    set_flag = getattr(
        model, "set_requires_gradient_sync" if flag == "sync" else "set_requires_all_reduce"
    )
    micros: list[list[Used]] = [[(0,), (1,)], [(2,), (0,)]]
    for _ in range(2):
        model.zero_grad()
        for micro in range(2):
            set_flag(micro == 1)
            _backward(model, micros, micro)
        parity.assert_close(
            parity.full_grads(model), _expected(seeded(Experts), micros), parity.FP32
        )


@ranks(2)
def test_hooks_on_gradients_run_where_any_rank_had_one() -> None:
    model = _shard({})
    seen: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    _backward(model, [list(BY_RANK)])
    used = {name for name, _ in model.named_parameters() if "experts.3" not in name}
    assert set(seen) == used
    assert len(seen) == len(used)


@ranks(2)
def test_a_rank_that_uses_parameters_of_another_dtype() -> None:
    """Each dtype is a reduction of its own; of one, a rank has no gradient at all."""

    def build() -> nn.Module:
        model = Experts(2)
        model.experts[1].double()
        return model

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, x: Tensor, used: Used) -> Tensor:
            x = self.inner.shared(x)
            for index in used:
                expert = self.inner.experts[index]
                x = x + expert(x.to(expert.weight.dtype)).to(x.dtype)
            return x

    model = fully_shard(seeded(Cast), mesh=parity.world_mesh())
    micros: list[list[Used]] = [[(0,), (1,)]]
    _backward(model, micros)
    parity.assert_close(parity.full_grads(model), _expected(seeded(Cast), micros), parity.FP32)


@ranks(2)
def test_the_check_of_ranks_lets_it_pass() -> None:
    with fsdp2.debug(check_ranks=True):
        model = _shard({})
        _backward(model, [list(BY_RANK)])
    parity.assert_close(
        parity.full_grads(model), _expected(seeded(Experts), [list(BY_RANK)]), parity.FP32
    )
