"""What a step costs, as exact counts: collectives, memory, kernels, Python calls. Nothing is timed.

On a null process group of 8 ranks; units are blocks of 9 even parameters below a root without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

import fsdp2
from fsdp2.core.modules.registry import record_of
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.testing.blocks import BlockStack, tall_blocks, tiny_blocks
from fsdp2.testing.counting import Operators, called, copied_bytes, operators
from fsdp2.testing.null_group import CallLog, init_null_group, null_mesh

pytestmark = pytest.mark.alone

PARAMS = 9
# How often a unit is gathered in a step: for forward and again for backward.
GATHERS = 2
STEADY = 3  # steps until buffers are made and the order of units is known
PRECISIONS = ("fp32", "mixed")

RESIZE = "UntypedStorage.resize_"
COPIES = ("copy", "clone", "cat", "contiguous")  # parts of the names of kernels that copy


@pytest.fixture
def log() -> Iterator[CallLog]:
    """Every collective of the null group of 8 ranks."""
    calls = CallLog()
    init_null_group(8, observer=calls)
    yield calls
    dist.destroy_process_group()


def build(
    variant: str, precision: str = "fp32", blocks: int = 2, world_size: int = 8, tall: bool = False
) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and its step, which has been run until it is steady."""
    model = (tall_blocks if tall else tiny_blocks)(blocks, PARAMS)
    model.reset_parameters()
    dtype = torch.float32
    if variant != "none":
        _shard(model, variant, precision, world_size)
    elif precision == "mixed":
        dtype = torch.bfloat16
        model.to(dtype)
    x = torch.randn(4, model.width, dtype=dtype, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)
        x.grad = None

    for _ in range(STEADY):
        step()
    return model, step


def _shard(model: BlockStack, variant: str, precision: str, world_size: int) -> None:
    api: Any = torch.distributed.fsdp if variant == "torch" else fsdp2
    options: dict[str, Any] = {"mesh": null_mesh(world_size)}
    if precision == "mixed":
        options["mp_policy"] = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.blocks, model):
        api.fully_shard(module, **options)
    if isinstance(model, fsdp2.FSDPModule):
        model.set_tuning(pack_below=0)  # small parameters stand for large ones
    if variant == "kept":
        model.set_tuning(keep_gradients=True)


def group_of(module: nn.Module) -> ParamGroup:
    record = record_of(module)
    assert record is not None
    (group,) = record.unit.own_groups
    return group


def gather_and_free(group: ParamGroup) -> None:
    group.start_unshard()
    group.finish_unshard()
    group.reshard()


# ---- one gather


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gather_is_one_collective_one_allocation_and_one_free(
    log: CallLog, precision: str
) -> None:
    """And no kernel, or one that casts shards into their places, where dtypes differ."""
    group = group_of(build("fsdp2", precision)[0].blocks[0])
    log.clear()
    python, built_in = called(lambda: gather_and_free(group))
    assert [(call.name, call.tensors) for call in log] == [
        ("all_gather_single_coalesced", 2 * PARAMS)
    ]
    assert built_in[RESIZE] == 2
    assert (
        python["fsdp2.core.device.buffers.acquire"]
        == python["fsdp2.core.device.buffers.release"]
        == 1
    )
    cast = {"aten._foreach_copy_.default": 1} if precision == "mixed" else {}
    assert operators(lambda: gather_and_free(group)) == cast


# ---- large and small parameters in a unit


class Mixed(nn.Module):
    """Two large parameters, of 4 KiB a rank, and three small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.first(self.norm(x)))
        return hidden


@pytest.mark.parametrize(("precision", "casts"), [("fp32", 0), ("mixed", 1)])
def test_small_parameters_go_along_in_one_buffer(log: CallLog, precision: str, casts: int) -> None:
    model = nn.Sequential(Mixed(), Mixed())
    options: dict[str, Any] = {"mesh": null_mesh(8)}
    if precision == "mixed":
        options["mp_policy"] = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model, model):
        fsdp2.fully_shard(module, **options)
    assert isinstance(model, fsdp2.FSDPModule)
    model.set_tuning(pack_below=1024)

    def step() -> None:
        model(torch.ones(4, 64)).sum().backward()
        model.zero_grad()

    for _ in range(STEADY):
        step()
    log.clear()
    step()
    assert log.counts() == {
        "all_gather_single_coalesced": 2 * GATHERS,
        "reduce_scatter_single_coalesced": 2,
    }
    assert {call.tensors for call in log} == {2 * (2 + 1)}
    group = group_of(model[0])
    kernels = {"aten._foreach_copy_.default": 1}  # the small ones, put in their places
    if casts:
        kernels = {"aten._foreach_copy_.default": 2, "aten.copy_.default": 1}
    assert operators(lambda: gather_and_free(group)) == kernels
    python = called(step)[0]
    assert python["fsdp2.core.reduce.transport.pack"] == 2
    copies = GATHERS + (GATHERS + 1) * casts  # of small ones into their places; casts
    assert operators(step)["aten._foreach_copy_.default"] == 2 * copies


# ---- a whole step


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_collectives_memory_and_casts_of_a_step(log: CallLog, blocks: int, precision: str) -> None:
    """In mixed precision the shard is cast with each gather, the gradients with the reduction, and
    the model's input. Each is read and written once: fp32 shards to bf16, bf16 gradients to fp32.
    """
    step = build("fsdp2", precision, blocks)[1]
    log.clear()
    step()
    assert log.counts() == {
        "all_gather_single_coalesced": GATHERS * blocks,
        "reduce_scatter_single_coalesced": blocks,
    }
    tensors = {(call.name.split("_")[0], call.tensors) for call in log}
    assert tensors == {("all", 2 * PARAMS), ("reduce", 2 * (PARAMS + 1))}  # and who had a gradient
    buffers = GATHERS + (precision == "mixed")  # in which gradients are staged for the cast
    assert called(step)[1][RESIZE] == 2 * buffers * blocks
    copies = {name: n for name, n in operators(step).items() if any(c in name for c in COPIES)}
    if precision == "fp32":
        assert copies == copied_bytes(step) == {}
        return
    assert copies == {
        "aten._foreach_copy_.default": (GATHERS + 1) * blocks,
        "aten._to_copy.default": 2,  # forward and backward
    }
    numel = blocks * PARAMS * 16 * 16
    gathered, reduced = GATHERS * numel // 8, numel
    assert copied_bytes(step) == {"_foreach_copy_": (4 + 2) * (gathered + reduced)}


@pytest.mark.parametrize("blocks", [1, 3])
def test_no_kernel_copies_where_dtypes_agree(log: CallLog, blocks: int) -> None:
    """Beyond the unsharded step there are views and one allocation a unit, nothing else.

    The parameters of a unit are alike, so that no view is made of them together. Only the first
    unit's input may have other uses, as a leaf: a view of it stands in front of that unit.
    """
    step, unsharded = build("fsdp2", blocks=blocks)[1], build("none", blocks=blocks)[1]
    beyond = operators(step) - operators(unsharded)
    assert beyond == {
        "aten.empty.memory_format": blocks,  # reduced gradients
        "aten.split_with_sizes.default": blocks,  # into the rows of each parameter
        "aten.alias.default": 1,  # its backward runs nothing
    }


@pytest.mark.parametrize(("precision", "casts"), [("fp32", 0), ("mixed", 3)])
def test_kept_gradients_cost_neither_memory_nor_views_nor_dtensors(
    log: CallLog, precision: str, casts: int
) -> None:
    step = build("kept", precision)[1]
    beyond = operators(step) - operators(build("none", precision)[1])
    names = ("aten.copy_.default", "aten._foreach_copy_.default", "aten.alias.default")
    # Of the model's input there is a view, as it is a leaf, or a cast, and one of its gradient.
    blocks, view, model = 2, int(not casts), 2
    assert sum(beyond.pop(name, 0) for name in names) == casts * blocks + view
    assert beyond == ({"aten._to_copy.default": model} if casts else {})
    assert called(step)[1]["TensorBase._dtensor__new__"] == 0
    # of those of a unit, the others are used again
    assert called(build("fsdp2", precision)[1])[1]["TensorBase._dtensor__new__"] == blocks


# ---- what a step does not pay for

UNASKED = (
    "torch.autograd.profiler",
    "torch.profiler",
    "torch.utils._pytree",
    "torch.utils._cxx_pytree",
    "torch.distributed.",
    "torch._dynamo",
    "torch._ops",
    "inspect",
    "contextlib",
)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_marks_no_range_walks_no_tree_and_dispatches_no_dtensor(
    log: CallLog, precision: str
) -> None:
    step = build("fsdp2", precision)[1]
    assert [name for name in called(step)[0] if name.startswith(UNASKED)] == []
    with Operators() as found:
        step()
    assert found.on_dtensors == 0
    assert [name for name in found.counts if name.startswith("profiler")] == []


def test_those_counts_see_what_torchs_step_does_and_pytrees_and_dtensors(log: CallLog) -> None:
    step = build("torch")[1]
    python, _ = called(step)
    seen = {prefix for prefix in UNASKED for name in python if name.startswith(prefix)}
    assert {"torch.autograd.profiler", "torch.distributed.", "torch._dynamo"} <= seen
    assert any(name.startswith("profiler") for name in operators(step))
    walk, _ = called(lambda: torch.utils._pytree.tree_leaves([1]))
    assert any(name.startswith("torch.utils._pytree") for name in walk)
    weight = next(build("fsdp2")[0].parameters())
    with Operators() as found, torch.no_grad():
        weight * 2
    assert found.on_dtensors > 0


# ---- how it grows


def python_calls(**how: Any) -> int:
    return sum(called(build("fsdp2", **how)[1])[0].values())


def test_python_calls_are_linear_in_blocks(log: CallLog) -> None:
    two, four, eight = (python_calls(blocks=blocks) for blocks in (2, 4, 8))
    assert eight - four == 2 * (four - two)


def test_python_calls_do_not_depend_on_the_world_size() -> None:
    found = []
    for world_size in (8, 1024):
        init_null_group(world_size)
        found.append(python_calls(world_size=world_size, tall=True))
        dist.destroy_process_group()
    assert found[0] == found[1]
