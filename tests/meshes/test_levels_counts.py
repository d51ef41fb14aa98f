"""`Levels`: collectives, bytes and memory of a step, by axis, on a group that moves nothing."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.core.device import buffers
from fsdp2.testing.null_group import init_null_group
from tests.common.errors import raises

pytestmark = pytest.mark.alone

NODES, LOCAL = 4, 8
WIDTH, LAYERS = 256, 3
HALF = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NUMEL = WIDTH * WIDTH


class Axes:
    """What collectives send, by axis."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __call__(
        self, group: Any, name: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> None:
        if name == "allreduce":  # whether shards were written
            self.calls["question"] += 1
        elif inputs:
            whole = inputs if name.startswith("reduce_scatter") else outputs
            kind = {"all_to_all": "exchange", "all_gather": "gather"}.get(name[:10], "reduce")
            where = {NODES: "between", LOCAL: "inside"}.get(group.size(), "all")
            self.calls[f"{kind} {where}"] += 1
            self.bytes[f"{kind} {where}"] += sum(tensor.nbytes for tensor in whole)

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()


@pytest.fixture
def sent() -> Iterator[Axes]:
    found = Axes()
    init_null_group(NODES * LOCAL, observer=found)
    yield found
    dist.destroy_process_group()


def sharded(mesh: Any, **arguments: Any) -> Any:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fsdp2.fully_shard(layer, mesh=mesh, **arguments)
    return fsdp2.fully_shard(model, mesh=mesh, **arguments)


def levels() -> fsdp2.Levels:
    names = ("node", "local")
    return fsdp2.Levels(init_device_mesh("cpu", (NODES, LOCAL), mesh_dim_names=names))


def settled(sent: Axes, **arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model on two levels that has taken a step, of which nothing is counted."""
    model = sharded(levels(), **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    sent.clear()
    return model, optimizer


def rows_there() -> list[str]:
    gc.collect()  # models of tests before
    found = buffers.all_buffers()
    return [each.name for each in found if each.name.startswith("node rows") and each.allocated]


def step(model: Any, optimizer: torch.optim.Optimizer, micro: int = 4) -> None:
    for number in range(micro):
        model.set_requires_all_reduce(number == micro - 1)
        model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("policy", [fsdp2.MixedPrecisionPolicy(), HALF], ids=["fp32", "mixed"])
def test_nodes_talk_once_per_step(sent: Axes, policy: fsdp2.MixedPrecisionPolicy) -> None:
    model = sharded(levels(), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = (policy.param_dtype or torch.float32).itemsize
    step(model, optimizer)
    for _ in range(2):
        sent.clear()
        step(model, optimizer)
        assert sent.calls == {
            "gather between": LAYERS,
            "gather inside": 4 * 2 * LAYERS,
            "reduce inside": 4 * LAYERS,
            "reduce between": LAYERS,
            "question": 3,  # as each further micro-batch begins
        }
        rows = NUMEL // LOCAL  # of a rank: what nodes exchange
        assert sent.bytes["gather between"] == size * LAYERS * rows
        marks = sent.bytes["reduce between"] - 4 * LAYERS * rows
        assert 0 < marks <= LAYERS * NODES * 16


def test_rows_are_freed_on_request(sent: Axes) -> None:
    """Memory of full sharding: each gather crosses nodes, with a part of a rank's rows."""
    model = sharded(levels())
    model.set_tuning(keep_rows=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    sent.clear()
    step(model, optimizer)
    assert sent.calls["gather between"] == sent.calls["gather inside"] == 4 * 2 * LAYERS
    assert not rows_there()
    model.set_tuning(keep_rows=True)
    step(model, optimizer)
    assert len(rows_there()) == LAYERS


def test_evaluations_between_steps_cross_once(sent: Axes) -> None:
    model, optimizer = settled(sent)
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
        model(torch.ones(2, WIDTH))
    assert sent.calls["gather between"] == LAYERS
    step(model, optimizer)
    assert sent.calls["gather between"] == LAYERS


def test_the_report_tells(sent: Axes) -> None:
    model = sharded(levels(), mp_policy=HALF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for keep, times in ((True, "once"), (False, "2 times")):
        model.set_tuning(keep_rows=keep)
        step(model, optimizer, micro=1)
        sent.clear()
        step(model, optimizer, micro=1)
        report = fsdp2.report(model)
        assert {group.levels for group in report.groups} == {(NODES, LOCAL)}
        assert {group.shard_bytes for group in report.groups} == {4 * NUMEL // NODES // LOCAL}
        counted = sent.bytes["gather between"] + sent.bytes["reduce between"]
        assert sum(group.between_bytes for group in report.groups) == counted
        assert f"between {NODES} ({times})" in str(report)


def test_plans_tell_nodes_apart() -> None:
    def planned(keep: bool) -> Any:
        def shard(model: Any, mesh: Any) -> None:
            for module in (*model, model):
                fsdp2.fully_shard(module, mesh=fsdp2.Levels(mesh))
            model.set_tuning(keep_rows=keep)

        def build() -> nn.Module:
            return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

        shape = (NODES, LOCAL)
        return str(fsdp2.plan(build, lambda: torch.ones(2, WIDTH), shard=shard, mesh=shape))

    assert "kept rows" in planned(True)
    once, twice = (re.search(r"and ([\d.]+) kB to other nodes", planned(k)) for k in (True, False))
    assert once is not None
    assert twice is not None
    assert float(once[1]) < float(twice[1])


# -- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gather", "reduce"), [("int4", None), (None, "bf16"), ("int8", "int4")])
@pytest.mark.parametrize("inside", [None, "int8"])
def test_bytes_of_formats_between_nodes(
    sent: Axes, gather: str | None, reduce: str | None, inside: str | None
) -> None:
    model = sharded(levels(), mp_policy=HALF)
    model.set_wire_format(gather=inside, level="inside")
    model.set_wire_format(gather=gather, reduce=reduce, level="between")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, micro=1)
    sent.clear()
    step(model, optimizer, micro=1)
    rows = NUMEL // LOCAL
    sizes = {
        "int8": rows + 4 * NODES * (rows // NODES // 128),
        "int4": rows // 2 + 2 * NODES * (rows // NODES // 64),
        "bf16": 2 * rows,
    }
    assert sent.bytes["gather between"] == LAYERS * (sizes[gather] if gather else 2 * rows)
    marks = LAYERS * NODES * 16
    if reduce:
        assert sent.bytes["exchange between"] == LAYERS * sizes[reduce]
        assert sent.bytes["reduce between"] == marks
    else:
        assert sent.bytes["reduce between"] == LAYERS * 4 * rows + marks
    (named,) = {group.between_format for group in fsdp2.report(model).groups}
    assert named == f"{gather or 'exact'} / {reduce or 'exact'}"
    counted = sum(sent.bytes[f"{kind} between"] for kind in ("gather", "reduce", "exchange"))
    assert sum(group.between_bytes for group in fsdp2.report(model).groups) == counted
    assert {group.gather_format for group in fsdp2.report(model).groups} == {inside}


def test_formats_of_both_levels(sent: Axes) -> None:
    model = sharded(levels(), mp_policy=HALF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_wire_format(gather="int8", reduce="int8")
    step(model, optimizer, micro=1)
    before = [param.to_local().clone() for param in model.parameters()]
    model.set_wire_format()  # rows move back
    step(model, optimizer, micro=1)
    sent.clear()
    step(model, optimizer, micro=1)
    assert sent.calls["exchange between"] == 0
    assert {group.between_format for group in fsdp2.report(model).groups} == {None}
    assert [param.to_local().shape for param in model.parameters()] == [b.shape for b in before]


def test_formats_that_are_refused(sent: Axes) -> None:
    model, flat = sharded(levels()), sharded(None)
    with raises("wire-level"):
        model.set_wire_format(gather="int8", level="outside")
    with raises("wire-level-of-one"):
        flat.set_wire_format(gather="int8", level="between")
    for arguments in ({"differences": True}, {"feedback": True, "level": "inside"}):
        with raises("wire-between"):
            model.set_wire_format(gather="int8", reduce="int8", **arguments)
