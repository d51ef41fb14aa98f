"""Bytes and collectives of `set_wire_format`, counted on a group that moves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2.core.modules.registry import record_of
from fsdp2.testing.null_group import init_null_group

pytestmark = pytest.mark.alone

RANKS, WIDTH = 8, 256
HALF = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Bytes:
    """What collectives send, by name: of whole tensors."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __call__(
        self, _: object, name: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> None:
        self.calls[name] += 1
        whole = inputs if name.startswith("reduce_scatter") else outputs
        self.seen[name] += sum(tensor.nbytes for tensor in whole)


@pytest.fixture
def sent() -> Iterator[Bytes]:
    found = Bytes()
    init_null_group(RANKS, observer=found)
    yield found
    dist.destroy_process_group()


def step(
    sent: Bytes,
    gather: str | None,
    reduce: str | None,
    policy: fsdp2.MixedPrecisionPolicy,
    **options: bool,
) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH))
    fsdp2.fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    model.set_wire_format(gather=gather, reduce=reduce, **options)
    model(torch.ones(2, WIDTH)).sum().backward()
    sent.seen.clear(), sent.calls.clear()
    model(torch.ones(2, WIDTH)).sum().backward()
    return model


NUMEL = WIDTH * WIDTH
MESSAGES = {
    "int8": NUMEL + 4 * NUMEL // 128,
    "int4": NUMEL // 2 + 2 * NUMEL // 64,
    "bf16": 2 * NUMEL,
    "fp32": 4 * NUMEL,
}
SMALL = 2 * WIDTH


@pytest.mark.parametrize("policy", [fsdp2.MixedPrecisionPolicy(), HALF], ids=["fp32", "mixed"])
@pytest.mark.parametrize(
    ("gather", "reduce"),
    [
        *(("int8", None), (None, "bf16"), (None, "int8"), ("int8", "bf16"), ("int8", "int8")),
        *(("int4", None), (None, "int4"), ("int8", "int4"), (None, "fp32")),
    ],
)
def test_bytes_are_what_the_format_promises(
    sent: Bytes, gather: str | None, reduce: str | None, policy: fsdp2.MixedPrecisionPolicy
) -> None:
    model = step(sent, gather, reduce, policy)
    (group,) = fsdp2.report(model).groups
    size = (policy.param_dtype or torch.float32).itemsize
    weights = MESSAGES[gather] if gather else size * NUMEL
    gradients = MESSAGES[reduce] if reduce else 0
    gathered = sent.seen["all_gather_single"] + sent.seen["all_gather_single_coalesced"]
    assert gathered == 2 * (weights + size * SMALL)
    assert sent.seen["all_to_all_single"] == gradients
    assert sent.calls["all_to_all_single"] == bool(reduce)
    exact = sum(n for name, n in sent.seen.items() if name.startswith("reduce_scatter"))
    marks = exact - 4 * (SMALL if reduce else SMALL + NUMEL)
    assert 0 <= marks <= 4 * 16 * RANKS  # who had a gradient, and padding
    assert group.gathered_bytes == weights + size * SMALL
    assert group.reduced_bytes == (gradients or 4 * NUMEL) + 4 * SMALL
    assert (group.gather_format, group.reduce_format) == (gather, reduce)
    assert group.exact == ["1.weight", "1.bias"]
    assert f"({gather or 'exact'} / {reduce or 'exact'}, 2 exact)" in str(fsdp2.report(model))


def test_who_does_not_use_it_sends_the_same_collectives(sent: Bytes) -> None:
    step(sent, None, None, HALF)
    asked = Counter(sent.calls)
    dist.destroy_process_group()
    plain = Bytes()
    init_null_group(RANKS, observer=plain)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH))
    fsdp2.fully_shard(model, mp_policy=HALF, reshard_after_forward=True)
    for _ in range(2):
        plain.calls.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
    assert asked == plain.calls


def test_differences_are_sent_once_per_optimizer_step(sent: Bytes) -> None:
    """The first gather is exact; a step's backward and further micro-batches gather nothing."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fsdp2.fully_shard(layer, mp_policy=HALF)
    fsdp2.fully_shard(model, mp_policy=HALF)
    model.set_wire_format(gather="int4", reduce="int8", differences=True)
    optimizer = torch.optim.AdamW(model.parameters())
    groups = fsdp2.report(model).groups
    x = torch.ones(2, WIDTH)

    def gathered() -> int:
        found = sent.seen["all_gather_single"] + sent.seen["all_gather_single_coalesced"]
        sent.seen.clear()
        return found

    small = 3 * 2 * WIDTH
    model(x).sum().backward()
    assert gathered() == 3 * 2 * NUMEL + small  # bf16
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        for micro in range(3):
            model(x).sum().backward()
            message = 3 * (NUMEL // 2 + 2 * NUMEL // 64) + small
            assert gathered() == (message if micro == 0 else 0)
            assert message == sum(group.gathered_bytes for group in groups)
    assert {group.gather_format for group in groups} == {"int4 differences"}
    assert {(group.gathers, group.reused_bytes) for group in groups} == {
        (1, group.gathered_bytes) for group in groups
    }
    kept = sum(r.unit.own_groups[0].bound.keeping.nbytes for r in model._records(True)[1:])
    assert sum(group.kept_bytes for group in groups) == kept == 3 * 2 * NUMEL + small
    assert "(int4 differences / int8, keeps 131.58 kB, 1 exact)" in str(fsdp2.report(model))


@pytest.mark.parametrize("options", [{"rotate": True}, {"feedback": True}])
def test_options_of_gradients_send_the_same(sent: Bytes, options: dict[str, bool]) -> None:
    """Of whole blocks; what they cost is kernels, and memory for residuals."""
    plain = fsdp2.report(step(sent, None, "int4", HALF)).groups[0]
    calls, seen = Counter(sent.calls), Counter(sent.seen)
    model = step(sent, None, "int4", HALF, **options)
    assert (sent.calls, sent.seen) == (calls, seen)
    found = fsdp2.report(model)
    assert found.groups[0].step_bytes == plain.step_bytes
    assert found.groups[0].residual_bytes == (2 * NUMEL if "feedback" in options else 0)
    said = "int4 rotated" if "rotate" in options else "int4 with feedback, 131.07 kB of residuals"
    assert f"(exact / {said}, 2 exact)" in str(found)


PLACED = [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Replicate(),) * 2, (Shard(1),) * 2]
APART, TOGETHER = [{0, 4}, {1}, {2, 5}, {3}], [{0, 1, 2, 3, 4, 5}]


@pytest.mark.parametrize(
    ("formats", "gathered", "reduced"),
    [
        ({"gather": "int8"}, APART, TOGETHER),
        ({"reduce": "int8"}, TOGETHER, APART),
        ({"reduce": "bf16"}, TOGETHER, TOGETHER),  # which rounds each number by itself
        ({"reduce": "bf16", "rotate": True}, TOGETHER, APART),
    ],
)
def test_messages_by_the_dims_over_which_model_parallel_ranks_differ(
    sent: Bytes, formats: dict[str, Any], gathered: list[set[int]], reduced: list[set[int]]
) -> None:
    """Ranks that have the same parameter must encode it with the same neighbors."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "expert", "model"))
    module = nn.Module()
    for number, placements in enumerate([*PLACED, PLACED[0]]):
        local = torch.randn(8, 8)
        param = DTensor.from_local(local, mesh["expert", "model"], placements, run_check=False)
        module.register_parameter(f"p{number}", nn.Parameter(param))
    module.plain = nn.Parameter(torch.randn(8, 8))
    fsdp2.fully_shard(module, mesh=mesh["data"])
    module.set_wire_format(**formats, exact_below=0)
    (group,) = record_of(module).unit.own_groups
    group.bind()
    segments = [{slot.index for slot in each.slots} for each in group.layout.segments]
    members = [{group.params.index(m) for m in each.members} for each in group.bound.reductions]
    assert segments == gathered
    assert members == reduced
