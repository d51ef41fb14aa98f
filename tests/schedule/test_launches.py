"""What each kind of backend is asked to launch: compared with files, line by line.

    pytest tests/schedule/test_launches.py --rewrite-golden     # then read the difference

Two blocks and a root, each with even parameters; blocks have an uneven one. One process claims to
be rank 0 of 4, and trains two steps: in fp32, in mixed precision, so with replicas, and so with
rows kept by smaller groups between forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from fsdp2.core.schedule.group import ParamGroup
from tests.common import backends

pytestmark = pytest.mark.alone

GOLDEN = Path(__file__).parent / "launches"
WORLD, WIDTH, STEPS = 4, 16, 2
SMALL = 60  # bytes of a piece: biases are small, most weights are not
CASES = {"fp32": (WORLD,), "mixed": (WORLD,), "mixed, replicas": (2, 2), "mixed, smaller": (WORLD,)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(6, WIDTH))  # 6 rows on 4 ranks

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x)) * self.gain.sum(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.outlet = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


@pytest.fixture
def _units_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a group launches is written down with its name."""

    def noted(method: Any) -> Any:
        def run(group: ParamGroup, *args: Any, **kwargs: Any) -> Any:
            backends.RECORDER.unit = group.name
            try:
                return method(group, *args, **kwargs)
            finally:
                backends.RECORDER.unit = "-"

        return run

    for name in ("start_unshard", "reduce"):
        monkeypatch.setattr(ParamGroup, name, noted(getattr(ParamGroup, name)))


@pytest.fixture(params=list(backends.KINDS))
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    if dist.is_initialized():
        dist.destroy_process_group()


def _mesh(case: str) -> DeviceMesh:
    names = ("replicate", "shard")[-len(CASES[case]) :]
    mesh = init_device_mesh("cpu", CASES[case], mesh_dim_names=names)
    for name in names:
        group: Any = mesh.get_group(name)
        group.label = name
    return mesh


def launches(kind: str, case: str) -> list[str]:
    """Of two steps, a heading before each."""
    backends.init_recorded(kind, WORLD)
    model, arguments = Model(), {"mesh": _mesh(case)}
    if "mixed" in case:
        arguments["mp_policy"] = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if "smaller" in case:
        arguments["reshard_after_forward"] = 2
    for module in (*model.blocks, model):
        fsdp2.fully_shard(module, **arguments)
    assert isinstance(model, fsdp2.FSDPModule)
    model.set_tuning(pack_below=SMALL)
    lines = []
    for step in range(STEPS):
        backends.RECORDER.launches.clear()
        backends.RECORDER.phase = "forward"
        loss = model(torch.ones(2, 8)).sum()
        backends.RECORDER.phase = "backward"
        loss.backward()
        model.zero_grad()
        lines += ["", f"== {case}: step {step + 1}", *map(str, backends.RECORDER.launches)]
    dist.destroy_process_group()
    return lines


@pytest.mark.usefixtures("_units_are_noted")
def test_launches(kind: str, request: pytest.FixtureRequest) -> None:
    name = backends.KINDS[kind][0]
    lines = [f"What {kind} ({name}) is asked to launch; {Path(__file__).name} says how it is made."]
    for case in CASES:
        lines += launches(kind, case)
    path = GOLDEN / f"{kind}.txt"
    if request.config.getoption("--rewrite-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert path.read_text(encoding="utf-8").splitlines() == lines


def test_only_a_backend_that_coalesces_is_asked_to() -> None:
    """Whatever the files say."""
    asked = {path.stem for path in GOLDEN.iterdir() if "coalesced" in path.read_text()}
    assert asked == {"nccl-legacy"}


def test_what_does_not_coalesce_gets_one_launch_a_unit() -> None:
    """The first collectives of nccl2 left out, all of those are asked for the same."""
    found = set()
    for kind in backends.KINDS.keys() - {"nccl-legacy"}:
        lines = (GOLDEN / f"{kind}.txt").read_text(encoding="utf-8").splitlines()[1:]
        found.add("\n".join(line for line in lines if not line.startswith("forward  -")))
    assert len(found) == 1
