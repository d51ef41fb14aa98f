"""Parameters cut on two dims, where each of them alone would pad too much or need copies.

Four ranks, so that two experts are two bands of two ranks. `up` and `down` are pieces in order,
`odd` is uneven in both dims: 6 rows on 4 ranks, 5 columns on 4 or on 2.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import CPUOffloadPolicy
from fsdp2.core.layout.layout import Transport
from fsdp2.core.modules.registry import record_of
from tests.common import meshes, models, parity, workers
from tests.common.combinations import each_once
from tests.common.errors import raises
from tests.common.looped import coalescing
from tests.common.offloading import forced_offload
from tests.common.parallelisms import APIS
from tests.common.tensors import Bf16Weight

pytestmark = pytest.mark.ranks

STEPS = 2
WIDE = 28_000  # large enough that padding counts; few columns are used, so sums stay short


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, models.DIM, WIDE) / models.DIM)
        self.down = nn.Parameter(torch.randn(2, WIDE, models.DIM) / models.DIM)
        self.odd = nn.Parameter(torch.randn(6, 5, WIDE))
        self.scale = nn.Parameter(torch.ones(models.DIM))
        self.is_unit = True

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = torch.tanh(x @ up[:, ::5000]) @ down[::5000]
        shift = self.odd[:, :, :: WIDE // 2].flatten()[: 7 * models.DIM].view(-1, models.DIM)
        return x * self.scale + shift.sum(0)


def _with_experts() -> nn.Module:
    return nn.Sequential(nn.Linear(models.DIM, models.DIM), _Experts(), nn.Linear(models.DIM, 2))


def _two_dims(param: nn.Parameter) -> tuple[Shard, ...]:
    return tuple(Shard(dim) for dim in range(min(param.ndim, 2)))


def _shard(seed: int = 0, **arguments: Any) -> Any:
    model = models.seeded(_with_experts, seed=seed)
    return parity.shard(parity.OURS, model, shard_placement_fn=_two_dims, **arguments)


@workers.ranks(4)
def test_where_the_parts_are() -> None:
    model = _shard()
    for name in ("up", "down", "odd"):
        param = getattr(model[1], name)
        whole = getattr(models.seeded(_with_experts)[1], name).detach()
        assert param.placements == (Shard(0), Shard(1)), name
        assert tuple(param.device_mesh.mesh.shape) == (2, 2), name
        assert param.shape == whole.shape
        assert param.stride() == whole.stride()
        band, position = divmod(dist.get_rank(), 2)
        part = whole.chunk(2, 0)[band].chunk(2, 1)[position]
        parity.assert_equal(param.to_local().detach(), part, name)
        parity.assert_equal(parity.full(param), whole, name)
        parity.assert_equal(param.detach().full_tensor(), whole, name)
    assert model[1].up.device_mesh is model[1].odd.device_mesh  # its process groups are made once
    for param in (model[1].scale, model[0].weight, model[2].weight):
        assert param.placements == (Shard(0),)
        assert param.device_mesh == parity.world_mesh()
    (report,) = (report for report in fsdp2.report(model).groups if report.name == "1")
    assert report.dims == {"1.up": (0, 1), "1.down": (0, 1), "1.odd": (0, 1)}


@workers.ranks(4)
@each_once(
    coalesced=[False, True],
    arguments={
        "mixed": {"mixed": True},
        "fp32": {},
        "kept": {"reshard_after_forward": False},
        "smaller group": {"reshard_after_forward": 2},
        "offloaded, mixed": {"offload_policy": CPUOffloadPolicy(pin_memory=False), "mixed": True},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    },
)
def test_training(coalesced: bool, arguments: dict[str, Any]) -> None:
    with coalescing() if coalesced else nullcontext(), forced_offload():
        parity.check_training(
            partial(models.seeded, _with_experts),
            parity.regression_batches(models.DIM, 2, steps=STEPS),
            torch_too=False,
            shard_placement_fn=_two_dims,
            **arguments,
        )


@workers.ranks(4)
def test_bands_of_one_row_travel_without_copies() -> None:
    with coalescing():
        model = _shard()
    record = record_of(model[1])
    assert record is not None
    layout = record.unit.own_groups[0].layout
    assert layout is not None
    direct = [segment for segment in layout.segments if segment.transport is Transport.COALESCED]
    shapes = [slot.shape for segment in direct for slot in segment.slots]
    assert shapes == [(2, models.DIM, WIDE), (2, WIDE, models.DIM)]


@pytest.mark.extended
@workers.ranks(8)
def test_training_with_copies() -> None:
    model = partial(models.seeded, _with_experts)
    data = meshes.mesh("replicate", "shard", shape=(2, 4))
    batches = parity.regression_batches(models.DIM, 2, steps=STEPS)
    sharded = _shard(mesh=data)
    assert sharded[1].up.placements == (Replicate(), Shard(0), Shard(1))
    assert tuple(sharded[1].up.device_mesh.mesh.shape) == (2, 2, 2)
    assert sharded[1].up.device_mesh.mesh_dim_names == ("replicate", "bands", "shard")
    parity.assert_equal(sharded[1].odd.full_tensor(), model()[1].odd.detach())
    steps = parity.train_sharded(sharded, parity.adamw, parity.regression_loss, batches)
    plain = parity.train_unsharded(
        model(), parity.adamw, parity.regression_loss, batches, slices=True
    )
    parity.assert_close(steps, plain, parity.REORDERED_FP32, "unsharded, by slices")


@workers.ranks(4)
def test_clipping_and_flat_optimizer() -> None:
    """The norm of gradients on two meshes: one all-reduce, since both join the same ranks."""
    plain, ours = models.seeded(_with_experts), _shard()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    flat = fsdp2.optim.FlatOptimizer(ours, torch.optim.AdamW, lr=1e-2)
    for batch in parity.regression_batches(models.DIM, 2, steps=STEPS):
        for rank in range(4):
            (parity.regression_loss(plain, parity.my_part(batch, rank, 4)) / 4).backward()
        parity.regression_loss(ours, parity.my_part(batch)).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        with parity.CountCollectives() as counter:
            norm = fsdp2.clip_grad_norm_(ours.parameters(), 0.1)
        assert counter.counts == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 1}
        parity.assert_close(norm, expected, parity.REORDERED_FP32, "norm")
        grads = {name: param.grad for name, param in plain.named_parameters()}
        parity.assert_close(parity.full_grads(ours), grads, parity.REORDERED_FP32, "clipped")
        for optimizer in (reference, flat):
            optimizer.step()
            optimizer.zero_grad()
        for name, param in plain.named_parameters():
            found = parity.full(ours.get_parameter(name))
            parity.assert_close(found, param.detach(), parity.REORDERED_FP32, name)
    state = flat.state_dict()["state"]
    moments = [entry["exp_avg"] for entry in state.values()]
    assert all(isinstance(moment, DTensor) for moment in moments)
    assert {moment.placements for moment in moments} == {(Shard(0),), (Shard(0), Shard(1))}


@workers.ranks(4)
def test_subclasses_that_come_later_are_refused() -> None:
    """All-gather hooks know one shard dim; the parameter had none when it was cut."""
    model = _shard()
    up = model[1].up
    local = Bf16Weight(up.to_local().detach())
    other = DTensor.from_local(
        local, up.device_mesh, up.placements, shape=up.shape, stride=up.stride()
    )
    model[1].up = nn.Parameter(other)
    with raises("hooks-two-dims"):
        model(torch.ones(2, models.DIM))


@workers.ranks(4)
def test_ranks_in_different_numbers_of_groups() -> None:
    """torch would name one group twice: all ranks are told, and nothing has changed."""
    data = meshes.unshared_mesh("banded")
    model = models.seeded(_with_experts)
    with meshes.more_groups_on_some(), raises("group-counts"):
        fsdp2.fully_shard(model[1], mesh=data, shard_placement_fn=_two_dims)
    assert type(model[1].up) is nn.Parameter
    fsdp2.fully_shard(model[1], mesh=data, shard_placement_fn=_two_dims)
    assert model[1].up.placements == (Shard(0), Shard(1))


@workers.ranks(4)
def test_full_state_dicts() -> None:
    options = StateDictOptions(full_state_dict=True)
    plain = models.seeded(_with_experts).state_dict()
    parity.assert_equal(dict(get_model_state_dict(_shard(), options=options)), dict(plain))
    other = _shard(seed=1)
    set_model_state_dict(other, dict(plain), options=options)
    for name, param in other.named_parameters():
        parity.assert_equal(parity.full(param), plain[name], name)


def _save(api: str, path: Path) -> None:
    model = _shard() if api == "ours" else parity.shard(APIS[api], models.seeded(_with_experts))
    dcp.save(model.state_dict(), checkpoint_id=path)


def _load(api: str, path: Path) -> None:
    model = (
        _shard(seed=1)
        if api == "ours"
        else parity.shard(APIS[api], models.seeded(_with_experts, seed=1))
    )
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    for name, whole in models.seeded(_with_experts).state_dict().items():
        parity.assert_equal(parity.full(model.state_dict()[name]), whole, name)


@pytest.mark.parametrize(("writer", "reader"), [("torch", "ours"), ("ours", "torch")])
def test_checkpoints_move_between_one_dim_and_two(writer: str, reader: str, tmp_path: Path) -> None:
    """torch's FSDP2 shards on dim 0 what we shard on two."""
    workers.run_on_ranks(4, _save, writer, tmp_path)
    workers.run_on_ranks(4, _load, reader, tmp_path)


@workers.ranks(4)
def test_ranks_that_cut_otherwise_say_so() -> None:
    """Rank 3 alone allows one dim only: all ranks are told, before a process group is made."""
    dims = _two_dims if dist.get_rank() < 3 else (lambda param: Shard(0))
    model = models.seeded(_with_experts)
    told = r"'odd' is .* dims 0 \(in 2\) and 1 on ranks 0, 1 and 2, .* dim 0 on rank 3"
    with fsdp2.debug(check_ranks=True), pytest.raises(RuntimeError, match=told):
        fsdp2.fully_shard(model[1], mesh=parity.world_mesh(), shard_placement_fn=dims)
    assert type(model[1].odd) is nn.Parameter
