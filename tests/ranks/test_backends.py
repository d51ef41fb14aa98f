"""How a process group was started does not change how shards travel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.common.combinations import often

pytestmark = pytest.mark.ranks

SCRIPT = """
import torch, torch.distributed as dist
from unittest import mock
from fsdp2.core.device import backends
from fsdp2.core.device.collectives import GroupCollectives
from fsdp2.core.device.process_groups import backend_name
from fsdp2.core.layout.mesh import default_mesh

cpu = torch.device("cpu")
for arguments in ((), ("gloo",), ("cpu:gloo",)):
    dist.init_process_group(*arguments)
    group = dist.new_group()
    collectives = GroupCollectives(group, cpu, asynchronous=False)
    found = [backend_name(group, cpu), collectives.coalesces, collectives.premultiplies]
    traits = backends.Traits("one that coalesces", coalesces=True)
    with mock.patch.dict(backends._KNOWN, {"ProcessGroupGloo": traits}):
        found.append(GroupCollectives(group, cpu, asynchronous=False).coalesces)
    with mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("xpu")):
        found.append(default_mesh().device_type)
    print(*found)
    dist.destroy_process_group()
"""


@pytest.mark.extended
@pytest.mark.parametrize("debug", often(["OFF", "DETAIL"]))
def test_gloo_by_any_name_travels_packed(debug: str) -> None:
    """Started without a name, c10d calls the group's backend "undefined".

    The wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL does not hand coalesced collectives on (2.11). No
    backend serves the accelerator that is pretended, so that the default mesh is of CPUs.
    """
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **given, "TORCH_DISTRIBUTED_DEBUG": debug},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"gloo False False {debug == 'OFF'} cpu"] * 3
