"""How a process group was started does not change how shards travel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch, torch.distributed as dist
from unittest import mock
from fsdp2.core.collectives import GroupCollectives, backend_name
from fsdp2.core.sharding import default_mesh

dist.init_process_group({arguments})
cpu = torch.device("cpu")
group = dist.new_group()
collectives = GroupCollectives(group, cpu, asynchronous=False)
print(backend_name(group, cpu), collectives.coalesces, collectives.premultiplies)
with mock.patch("fsdp2.core.collectives.backend_name", return_value="nccl"):
    print(GroupCollectives(group, cpu, asynchronous=False).coalesces)
with mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("xpu")):
    print(default_mesh().device_type)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
@pytest.mark.parametrize("arguments", ["", "'gloo'", "'cpu:gloo'"], ids=["none", "gloo", "cpu"])
def test_gloo_by_any_name_travels_packed(arguments: str, debug: str) -> None:
    """Started without a name, c10d calls the group's backend "undefined".

    The wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL does not hand coalesced collectives on (2.11). No
    backend serves the accelerator that is pretended, so that the default mesh is of CPUs.
    """
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(arguments=arguments)],
        env={**os.environ, **given, "TORCH_DISTRIBUTED_DEBUG": debug},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["gloo", "False", "False", str(debug == "OFF"), "cpu"]
