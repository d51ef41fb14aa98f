"""A rank whose process ends while others go on announces it; in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn

rank, store, last = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)

from fsdp2 import fully_shard
from fsdp2.errors import RankMismatchError

torch.manual_seed(0)
model = fully_shard(nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
if rank == 1 and last == "returns":
    sys.exit(0)
if rank == 1 and last == "raises":
    raise KeyError("a bug of this rank")
try:
    model(torch.ones(2, 4))
except RankMismatchError as error:
    print(error, flush=True)
os._exit(0)  # an ordinary exit may abort in gloo's threads
"""


@pytest.mark.extended
@pytest.mark.parametrize("last", ["returns", "raises"])
def test_a_rank_that_ends_is_not_waited_for(tmp_path: Path, last: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store"), last],
            env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, "FSDP2_DEBUG": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, errors = processes[0].communicate(timeout=170)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert said.startswith(
        "ranks disagree on their next step: rank 0 is at the all-gather of '(root)' for its "
        "forward, iteration 0, rank 1 has ended and was last at the reduce-scatter of '(root)' in "
        "backward, iteration 0; "
    ), errors
