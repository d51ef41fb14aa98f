"""The memory that each operation of an all-gather and of a reduction may touch, by its name.

The stand-in device observes what operations read and write in random models; the table declares it.
An operation that touches what its row does not have fails, and so does a row that says too much.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fsdp2.core.gather.program import Gather
from fsdp2.core.reduce.reduction import Op, Program
from fsdp2.testing.virtual import VirtualDevice
from fsdp2.tracing.record.notes import Operation
from tests.common.scenarios import SCENARIOS

pytestmark = pytest.mark.alone

ROLES = {
    "shard": "shard|host shard|shards of|node rows of|rows of the smaller group",
    "gathered": "gathered",
    "messages": "all-gather output",
    "gradients": "gradient|absent gradient|accumulated|cast|rank-major gradient",
    "input": "reduce-scatter input|reduce-scatter input between nodes",
    "result": "reduce-scatter output|kept gradient|sharded gradient",
    "host": "host gradient",
    "marks": "marks|marks of some|marks of a node|sums of marks",
}
"""The buffers of the stand-in device that have a role, by the names that it gives them."""

TOUCHED = {
    "gather copy-in": ("shard", "shard gathered messages"),
    "gather collectives": ("shard gathered messages", "shard gathered messages"),
    "gather copy-out": ("shard messages", "shard gathered messages"),
    "mark": ("marks", "marks result"),
    "stage cast": ("gradients", "input"),
    "stage packed": ("gradients marks", "gradients input"),
    "stage joined": ("gradients marks", "gradients input"),
    "stage local": ("gradients marks", "result"),
    "divide": ("gradients result", "gradients result"),
    "reduce-scatter": ("gradients input marks", "result marks"),
    "keep": ("result", "result"),
    "add": ("result", "result"),
    "hook": ("result", "result"),
    "all-reduce": ("result", "result"),
    "allocate pieces": ("", "gradients marks"),
    "reduce-scatter between nodes": (
        "gradients input marks result",
        "gradients input marks result",
    ),
    "cast": ("result", "result"),
    "to host": ("result", "host"),
    "hold on host": ("result", "host"),
    "fetch": ("result marks", "host"),
    "deliver": ("gradients host result shard", "gradients host result shard"),
    "deliver missed": ("host result shard", "host result shard"),
}
"""What an operation reads, and what it writes. Delivery includes the hooks of users on gradients,
who may write the shards; the collectives of a smaller group read the rows that it keeps."""


def test_operations_touch_what_they_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[str] = []
    touched: defaultdict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))

    def named(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def runs(*args: Any) -> Any:
            running.append(name)
            try:
                return run(*args)
            finally:
                running.pop()

        return runs

    def bind(program: Program, ops: Sequence[Op], seeks: bool = False) -> None:
        bind_ops(program, [op._replace(run=named(op.name, op.run)) for op in ops], seeks)

    def gather(self: Gather, parameters: Any = (), *moments: Any, **given: Any) -> None:
        by_moment = dict(zip(MOMENTS, moments, strict=False)) | given
        for moment in MOMENTS:
            name = "gather " + moment.replace("_", "-")
            by_moment[moment] = [named(name, run) for run in by_moment.get(moment, ())]
        make_gather(self, parameters, **by_moment)

    def observe(device: VirtualDevice, note: Any) -> None:
        if isinstance(note, Operation) and running:
            for found, buffers in zip(touched[running[-1]], (note.reads, note.writes), strict=True):
                found.update(_role(buffer.name) for buffer in buffers)
        take(device, note)

    bind_ops, make_gather, take = Program.__init__, Gather.__init__, VirtualDevice.note
    monkeypatch.setattr(Program, "__init__", bind)
    monkeypatch.setattr(Gather, "__init__", gather)
    monkeypatch.setattr(VirtualDevice, "note", observe)
    for scenario, run in SCENARIOS.items():
        for seed in range(SEEDS):
            device = VirtualDevice()
            device.others_had = bool(seed % 2)
            run(random.Random(f"{scenario} {seed}"), device)
    declared = {name: tuple(map(set, map(str.split, both))) for name, both in TOUCHED.items()}
    assert touched == declared


MOMENTS = ("acquire", "copy_in", "collectives", "copy_out", "release")
SEEDS = 12


def _role(buffer: str) -> str:
    """The role of a buffer, whose name may end with a unit's and a parameter's number."""
    kind = re.sub(r" ?n\d+(/\w+)?(\.\d+)?$", "", buffer)
    return next(role for role, names in ROLES.items() if kind in names.split("|"))
