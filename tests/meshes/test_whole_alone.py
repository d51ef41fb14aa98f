"""Parameters that stay whole: collectives counted, settings, and what reports and plans say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2.core.device.streams import Lane
from fsdp2.core.modules.registry import require_record
from fsdp2.planning.planner import plan
from fsdp2.testing.null_group import init_null_group, null_mesh, null_world

pytestmark = pytest.mark.alone

RANKS, BLOCKS, DIM, HIDDEN, VOCAB = 8, 4, 64, 128, 96
SMALL = 2 * DIM
NORMS = 2 * BLOCKS + 1
MIXED = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Of a Llama's block what matters here: two norms and seven matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.o(self.q(y) * self.k(y) + self.v(y))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Sent:
    """Collectives by name, and the elements of those that reduce; but the first of a model, of
    checksums.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.reduced: list[tuple[int, torch.dtype]] = []

    def __call__(self, _: object, name: str, tensors: list[Tensor], __: object) -> None:
        if name == "allreduce" and tensors[0].dtype is torch.int64:
            return  # replicas are compared, once
        self.calls[name] += 1
        if name == "allreduce":
            self.reduced += [(tensor.numel(), tensor.dtype) for tensor in tensors]

    def clear(self) -> None:
        self.calls.clear()
        self.reduced.clear()


@pytest.fixture
def sent() -> Iterator[Sent]:
    found = Sent()
    init_null_group(RANKS, observer=found)
    yield found
    dist.destroy_process_group()


def sharded(whole: int = 0, **options: Any) -> Any:
    model = Llama()
    fsdp2.shard_model(model, {Block}, whole_below=whole, **options)
    return model


def step(model: Any, backwards: int = 1) -> None:
    for _ in range(backwards):
        model(torch.arange(6).view(1, 6)).float().sum().backward()


def again(model: Any, sent: Sent, backwards: int = 1) -> None:
    """A step, of which nothing is counted, and another."""
    step(model)
    sent.clear()
    step(model, backwards)


def filled(numel: int) -> int:
    """Elements of a flat tensor of so many numbers and a mark for each of the norms."""
    multiple = 16 // 4
    return -(-(numel + NORMS) // multiple) * multiple


# ---- what travels


def test_collectives_of_a_step(sent: Sent) -> None:
    """Norms travel packed beside the matrices, or not at all: one all-reduce for all of them."""
    again(sharded(), sent)
    counts = {"all_gather_single": 2 * BLOCKS + 1, "reduce_scatter_single": BLOCKS + 1}
    assert sent.calls == counts
    again(sharded(SMALL), sent)
    assert sent.calls == {**counts, "allreduce": 1}
    assert sent.reduced == [(filled(NORMS * DIM), torch.float32)]


def test_norms_alone_are_never_gathered(sent: Sent) -> None:
    """A unit of small parameters has no collective of its own left."""
    counts = []
    for whole in (None, fsdp2.whole_below(SMALL)):
        model: Any = Llama()
        norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
        for unit in (*norms, *model.blocks, model):
            fsdp2.fully_shard(unit, shard_placement_fn=whole)
        again(model, sent)
        kinds = ("all_gather", "reduce_scatter", "allreduce")
        counts.append(
            [sum(n for name, n in sent.calls.items() if name.startswith(kind)) for kind in kinds]
        )
    before, after = counts
    # Each is gathered twice, as its unit is not the root.
    assert before == [after[0] + 2 * NORMS, after[1] + NORMS, 0]
    assert after == [2 * BLOCKS + 1, BLOCKS + 1, 1]


def test_one_all_reduce_a_backward_and_dtype(sent: Sent) -> None:
    model = sharded(SMALL, mp_policy=MIXED)
    model.norm.weight.requires_grad_(False)
    again(model, sent, backwards=3)
    assert [dtype for _, dtype in sent.reduced] == [torch.float32] * 3
    for block in model.blocks[:2]:
        block.set_gradient_divide_factor(3.0)  # other steps
    sent.clear()
    step(model)
    assert len(sent.reduced) == 2
    assert model.blocks[0].norm1.weight.grad.dtype == torch.float32
    assert model.norm.weight.grad is None


def test_flags_say_which_backward_reduces(sent: Sent) -> None:
    model = sharded(SMALL)
    for sync, all_reduce, wanted in ((False, True, 0), (True, False, 0), (True, True, 1)):
        model.set_requires_gradient_sync(sync)
        model.set_requires_all_reduce(all_reduce)
        sent.clear()
        step(model)
        assert sent.calls["allreduce"] == wanted
        assert (model.norm.weight.grad is not None) is bool(wanted)
    # Blocks that go on accumulating are left out: others have fewer elements.
    model.zero_grad()
    for block in model.blocks[1:]:
        block.set_requires_all_reduce(False)
    sent.clear()
    step(model)
    assert [numel for numel, _ in sent.reduced] == [3 * DIM + 4]
    assert model.blocks[0].norm1.weight.grad is not None
    assert model.blocks[1].norm1.weight.grad is None
    model.set_requires_all_reduce(True)
    step(model)
    assert model.blocks[1].norm1.weight.grad is not None


def test_ended_by_hand(sent: Sent) -> None:
    """Pipelines finish the backwards of an iteration themselves."""
    model = sharded(SMALL)
    model.set_is_last_backward(False)
    step(model, backwards=2)
    assert sent.calls["allreduce"] == 2
    assert model.norm.weight.grad is not None


def test_exact_whatever_the_wire_format(sent: Sent) -> None:
    model = sharded(SMALL)
    model.set_wire_format(gather="int8", reduce="int8", exact_below=0)
    again(model, sent)
    assert sent.reduced == [(filled(NORMS * DIM), torch.float32)]


def test_frozen_on_the_way(sent: Sent) -> None:
    model = sharded(SMALL)
    step(model)
    for block in model.blocks:
        block.norm1.weight.requires_grad_(False)
        block.norm1.weight.grad = None
    sent.clear()
    step(model)
    assert [numel for numel, _ in sent.reduced] == [(BLOCKS + 1) * DIM + 8]
    assert model.blocks[0].norm1.weight.grad is None


# ---- where they lie


def test_a_mesh_of_its_own(sent: Sent) -> None:
    """Whole on the ranks of a mesh that only this parameter is on."""
    mesh = null_mesh(2)
    info = fsdp2.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    layer = nn.Linear(8, 8)

    def choose(param: nn.Parameter) -> Any:
        return fsdp2.ShardPlacementResult(Replicate(), info) if param.ndim == 1 else None

    fsdp2.fully_shard(layer, shard_placement_fn=choose)
    assert isinstance(layer.bias, DTensor)
    assert layer.bias.device_mesh == mesh
    assert layer.bias.placements == (Replicate(),)


# ---- what is said of them


def test_the_report(sent: Sent) -> None:
    model = sharded(SMALL)
    whole = [group for group in fsdp2.report(model).groups if group.transport == "whole"]
    assert [group.num_params for group in whole] == [1] + [2] * BLOCKS
    assert sum(group.numel for group in whole) == NORMS * DIM
    assert {group.gathers for group in whole} == {0}
    assert sum(group.step_bytes for group in whole) == 4 * NORMS * DIM
    lines = str(fsdp2.report(model)).splitlines()
    assert sum(line.endswith("whole") for line in lines) == 2  # the root's, and 4 alike


def test_a_plan() -> None:
    """One all-reduce, on its lane."""

    def build(model: nn.Module, mesh: Any) -> None:
        fsdp2.shard_model(model, {Block}, mesh=mesh, whole_below=SMALL)

    made = plan(Llama, lambda: torch.zeros(1, 6, dtype=torch.long), shard=build, mesh=RANKS)
    notes = [n for n in made.rehearsal.recording.operations if n.kind == "collective"]
    names = Counter(note.name for note in notes)
    assert names["all-reduce"] == 1, names
    assert [n.lane for n in notes if n.name == "all-reduce"] == [Lane.ALL_REDUCE]


@pytest.mark.parametrize(
    ("dims", "ranks"),
    [
        ({"shard": "shard"}, 2),
        ({"shard": "shard", "replicate": "copy"}, 4),
        ({"shard": ("copy", "shard")}, 4),
    ],
    ids=["shard", "hsdp", "joined"],
)
def test_on_a_full_mesh(dims: dict[str, Any], ranks: int) -> None:
    """A DTensor on the whole SPMD mesh keeps its placements, data-parallel dims included."""
    with null_world(8):
        names = ("copy", "shard", "tp")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        layer = nn.Linear(4, 4)
        placed = {"weight": Shard(1), "bias": Replicate()}
        for name, param in list(layer.named_parameters()):
            on_mesh = distribute_tensor(
                param.detach(), mesh, [Replicate(), Replicate(), placed[name]], src_data_rank=None
            )
            setattr(layer, name, nn.Parameter(on_mesh))
        fsdp2.fully_shard(
            layer,
            mesh=mesh,
            dp_mesh_dims=fsdp2.DataParallelMeshDims(**dims),
            shard_placement_fn=fsdp2.whole_below(8),
        )
        bias: Any = layer.bias
        assert bias.device_mesh == mesh
        assert bias.placements == (Replicate(), Replicate(), Replicate())
        (whole,) = [group for group in fsdp2.report(layer).groups if group.transport == "whole"]
        assert whole.numel == 4
        axes = next(
            param.axes
            for group in require_record(layer).unit.own_groups
            for param in group.params
            if param.axes.whole
        )
        assert axes.copies == ranks
