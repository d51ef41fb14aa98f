"""`fsdp2.optim.EMA`: averages of shards, against torch's `AveragedModel` without sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp2
from fsdp2 import checkpoint
from fsdp2.optim import EMA
from fsdp2.testing.counting import operators
from tests.common import meshes, models, parity, tensors, workers
from tests.common.errors import raises
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

STEPS = 4


class Net(nn.Module):
    """Uneven rows, two dtypes, a tie, a frozen parameter, buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.block = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 8, bias=False))
        self.norm = nn.BatchNorm1d(8)
        self.low = nn.Linear(8, 5).to(torch.bfloat16)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.block(self.embed(ids)))
        y = self.low(x.to(torch.bfloat16)).float()
        return self.head(x) + y.sum(-1, keepdim=True)


def sharded(seed: int = 0, **arguments: Any) -> Any:
    model: Any = models.seeded(Net, seed)
    arguments.setdefault("mesh", parity.world_mesh())
    fsdp2.fully_shard(model.block, **arguments)
    fsdp2.fully_shard(model, **arguments)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.SGD(trained, lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    """All ranks see the same, so that sums over ranks change nothing."""
    ids = torch.randint(13, (6,), generator=torch.Generator().manual_seed(number))
    model(ids).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: parity.full(tensors[name]) for name in sorted(tensors)}


def averaged(model: Any, ema: EMA, steps: int = STEPS) -> dict[str, Tensor]:
    optimizer = optimizer_of(model)
    for number in range(steps):
        step(model, optimizer, number)
        ema.update()
    return whole(ema.averages())


@torch.no_grad()
def follow(plain: nn.Module, model: nn.Module) -> None:
    """Give a model in one piece the weights and buffers of a sharded one."""
    weights = parity.full_params(model)
    for name, param in plain.named_parameters():
        param.copy_(weights[name])
    for own, other in zip(plain.buffers(), model.buffers(), strict=True):
        own.copy_(other)


def check_like_torch(decay: float | None, buffers: bool) -> None:
    """Beside torch's own, which averages the same weights in one piece."""
    model, plain = sharded(), models.seeded(Net)
    ema = EMA(model, decay, buffers=buffers)
    average = get_ema_multi_avg_fn(decay) if decay is not None else None
    theirs = AveragedModel(plain, multi_avg_fn=average, use_buffers=buffers)
    optimizer = optimizer_of(model)
    for number in range(STEPS):
        step(model, optimizer, number)
        ema.update()
        follow(plain, model)
        theirs.update_parameters(plain)
    wanted: dict[str, Tensor] = dict(theirs.module.named_parameters())
    if buffers:
        named = theirs.module.named_buffers()
        wanted |= {name: buffer for name, buffer in named if buffer.is_floating_point()}
    found = whole(ema.averages())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # Kernels may round differently at the ends of tensors: by a last bit.
        tolerance = parity.REORDERED_MIXED if "low" in name else parity.REORDERED_FP32
        parity.assert_close(found[name], tensor.detach(), tolerance, name)


@ranks(1, 2, extended=(4,))
def test_as_torch_without_sharding() -> None:
    for decay, buffers in ((0.9, False), (0.9, True), (0.0, True), (1.0, False), (None, True)):
        check_like_torch(decay, buffers)


@ranks(2, extended=(4,))
def test_wherever_parameters_lie() -> None:
    """HSDP, and parameters that no unit has: the same averages."""
    plain = sharded()
    wanted = averaged(plain, EMA(plain))
    size = dist.get_world_size()
    model = sharded(mesh=meshes.hsdp_mesh(size // 2, 2))
    for name, tensor in averaged(model, EMA(model)).items():
        parity.assert_close(tensor, wanted[name], parity.REORDERED_MIXED, name)
    free: Any = models.seeded(Net)
    fsdp2.fully_shard(free.block, mesh=parity.world_mesh())
    for name, tensor in averaged(free, EMA(free)).items():
        parity.assert_close(tensor, wanted[name], parity.REORDERED_MIXED, name)


@ranks(2)
def test_a_schedule() -> None:
    """Called with the number of updates so far, not for the first, which copies."""
    asked: list[int] = []

    def decay(updates: int) -> float:
        asked.append(updates)
        return updates / (updates + 1)

    model, other = sharded(), sharded()
    found = averaged(model, EMA(model, decay))
    assert asked == [1, 2, 3]
    mean = averaged(other, EMA(other, None))
    for name, tensor in found.items():
        parity.assert_close(tensor, mean[name], parity.REORDERED_MIXED, name)


@ranks(2)
def test_every_third_call() -> None:
    """The first and the fourth of four calls average; the others run no operator."""
    model, other = sharded(), sharded()
    ema, wanted = EMA(model, 0.5, every=3), EMA(other, 0.5)
    optimizer, others = optimizer_of(model), optimizer_of(other)
    for number in range(STEPS):
        step(model, optimizer, number)
        step(other, others, number)
        seen = operators(ema.update)
        if number % 3 == 0:
            wanted.update()
        assert bool(seen) == (number % 3 == 0)
        assert ema.updates == wanted.updates
    parity.assert_equal(whole(ema.averages()), whole(wanted.averages()))
    resumed = EMA(sharded(5), 0.5, every=3)
    resumed.load_state_dict(ema.state_dict())
    assert (resumed.steps, resumed.updates) == (STEPS, 2)


@ranks(2)
def test_an_update_is_one_kernel_and_sends_nothing() -> None:
    model: Any = models.seeded(models.MLP)
    parity.shard(parity.OURS, model)
    ema = EMA(model)
    ema.update()
    seen = operators(ema.update)
    seen.pop("aten.detach.default", None)
    assert seen == {"aten._foreach_lerp_.Scalar": 1}


@ranks(2)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_swapped(dtype: torch.dtype | None) -> None:
    model = sharded()
    ema = EMA(model, 0.5, dtype=dtype)
    averages = averaged(model, ema)
    weights, ids = parity.full_params(model), torch.arange(6)
    plain = models.seeded(Net)
    state = {n: t.clone() for n, t in plain.state_dict().items()}
    with torch.no_grad():
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        rounded = {n: averages[n].to(state[n].dtype) for n, _ in model.named_parameters()}
        plain.load_state_dict(
            {**state, **rounded, **buffers, "head.weight": rounded["embed.weight"]}
        )
        model.eval(), plain.eval()
        before = model(ids)
        with ema.swapped() as same:
            assert same is model
            parity.assert_equal(parity.full_params(model), rounded)
            assert torch.allclose(model(ids), plain(ids), atol=1e-5)
            for call in (ema.update, ema.averages, ema.swapped().__enter__):
                with raises("ema-swapped"):
                    call()
        assert torch.equal(model(ids), before)
    parity.assert_equal(parity.full_params(model), weights)
    parity.assert_equal(whole(ema.averages()), averages)
    with pytest.raises(ZeroDivisionError), ema.swapped():
        raise ZeroDivisionError
    parity.assert_equal(parity.full_params(model), weights)
    model.train()
    step(model, optimizer_of(model), 9)


@ranks(2)
def test_in_another_dtype() -> None:
    """Averages of bf16 weights in fp32 move where bf16 ones stand still."""
    model = sharded()
    low, high = EMA(model, 0.999), EMA(model, 0.999, dtype=torch.float32)
    optimizer = optimizer_of(model)
    for number in range(STEPS):
        step(model, optimizer, number)
        low.update()
        high.update()
    name = "low.weight"
    assert low.averages()[name].dtype == torch.bfloat16
    average = high.averages()[name]
    assert average.dtype == torch.float32
    assert isinstance(average, DTensor)
    assert average.placements == model.low.weight.placements
    assert not torch.equal(parity.full(average), parity.full(low.averages()[name]).float())


@ranks(2)
def test_parameters_that_move() -> None:
    """Packing, `.to()` and assigned state dicts give shards other memory; averages go along."""
    model, still = sharded(), sharded()
    ema, wanted = EMA(model, 0.5), EMA(still, 0.5)
    averaged(model, ema, 2), averaged(still, wanted, 2)
    model.set_tuning(pack_below=0)
    step(model, optimizer_of(model), 7)
    ema.update()
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    step(model, optimizer_of(model), 8)
    ema.update()
    for number in (7, 8):
        step(still, optimizer_of(still), number)
        wanted.update()
    parity.assert_equal(whole(ema.averages()), whole(wanted.averages()))


@ranks(2)
def test_state_dicts(tmp_path: Path) -> None:
    model = sharded()
    ema = EMA(model, 0.5)
    before = averaged(model, ema)
    other = EMA(sharded(5), 0.5)
    other.load_state_dict(ema.state_dict())
    assert other.updates == STEPS
    parity.assert_equal(whole(other.averages()), before)
    dcp.save({"ema": ema}, checkpoint_id=tmp_path / "dcp")
    again = EMA(sharded(6), 0.5)
    dcp.load({"ema": again}, checkpoint_id=tmp_path / "dcp")
    assert again.updates == STEPS
    parity.assert_equal(whole(again.averages()), before)
    state: Any = ema.state_dict()
    del state["averages"]["embed.weight"]
    with raises("ema-load"):
        other.load_state_dict(state)


def _saves(folder: Path) -> dict[str, Tensor]:
    model = sharded()
    ema = EMA(model, 0.5)
    found = averaged(model, ema)
    checkpoint.save(folder / "steps", model, step=1, states={"ema": ema.averages()})
    with ema.swapped():
        checkpoint.export(folder / "exported", model)
    return found


def _loads(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = sharded(5)
    ema = EMA(model, 0.5)
    checkpoint.load(folder / "steps", model, states={"ema": ema.averages()})
    found = whole(ema.averages())
    checkpoint.load_pretrained(model, folder / "exported")
    exported = parity.full_params(model)
    return found, {name: exported[name] for name in sorted(exported)}


def test_files(tmp_path: Path) -> None:
    """Saved on two ranks, loaded on another number; exported as the averages."""
    saved = workers.run_on_ranks(2, _saves, tmp_path)[0]
    for size in (4, 1):
        for found, exported in workers.run_on_ranks(size, _loads, tmp_path):
            parity.assert_equal(found, saved, "loaded")
            parity.assert_equal(exported, saved, "exported")


@ranks(2)
def test_what_is_refused() -> None:
    model = sharded()
    for decay in (-0.1, 1.5, "0.9"):
        with raises("ema-decay"):
            EMA(model, decay)  # type: ignore[arg-type]  # what is tested
    with raises("ema-every"):
        EMA(model, every=0)
    ema = EMA(model, lambda _: 2.0)
    ema.update()
    with raises("ema-decay"):
        ema.update()
    with raises("ema-meta"):
        EMA(nn.Linear(2, 2, device="meta"))
    with raises("ema-extension"):
        EMA(tensors.extend(nn.Linear(2, 2), tensors.Aliased))

    def during(*_: Any) -> None:
        with raises("full-during"):
            ema.swapped().__enter__()

    model.block.register_forward_hook(during)
    model(torch.arange(6))
