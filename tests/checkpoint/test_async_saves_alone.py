"""`async_save` in one process: memory over many saves, and the end of the process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp2 import checkpoint
from fsdp2.checkpoint import files
from tests.checkpoint.shared import Unsynced
from tests.common import combinations

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
SAVES, WARM = 200, 100  # torch and Python fill caches in the first hundred


def _resident() -> int:
    """Bytes; Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("overlap", combinations.seldom([True, False], extended=1))
def test_memory_is_flat_over_200_saves(tmp_path: Path, overlap: bool) -> None:
    """Neither Python's objects, nor threads, files or pages grow; a state has 3 MiB."""
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[tuple[int, int, int, int, int]] = []
    tracemalloc.start()
    with mock.patch.object(files, "DISK", Unsynced()):
        for step in range(SAVES):
            model(torch.ones(1, 512)).sum().backward()
            saving = checkpoint.async_save(tmp_path, model, optimizer, step=step, keep=1)
            optimizer.step()
            optimizer.zero_grad()
            if not overlap:
                saving.result()
            if step in (WARM, SAVES - 1):
                saving.result()
                gc.collect()
                objects, handles = len(gc.get_objects()), len(os.listdir("/proc/self/fd"))
                traced = tracemalloc.get_traced_memory()[0]
                seen.append((objects, traced, _resident(), handles, threading.active_count()))
    tracemalloc.stop()
    first, last = seen
    assert last[0] - first[0] < (SAVES - WARM) // 2  # less than an object every second save
    assert last[1] - first[1] < 100 * (SAVES - WARM)  # and than 100 bytes a save
    assert last[2] - first[2] < 16 << 20  # of 300 MiB, if states stayed
    assert last[3:] == first[3:]
    assert checkpoint.steps(tmp_path) == [SAVES - 1]


ENDS = """
import sys, threading
import torch
from torch import nn
from fsdp2 import checkpoint
from fsdp2.checkpoint import files

class Late(files.Disk):
    def create(self, path):
        threading.main_thread().join()  # the script is over, and Python ends
        return super().create(path)

if sys.argv[2] == "late":
    files.DISK = Late()
model = nn.Linear(1024, 1024)
checkpoint.async_save(sys.argv[1], model, step=1)
checkpoint.async_save(sys.argv[1], model, step=2)
if sys.argv[2] == "raises":
    raise KeyError("the script's own")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", combinations.often(["late", "raises"]))
def test_the_end_of_the_process(how: str, tmp_path: Path) -> None:
    """It waits for both saves, which are whole, and then ends, with nothing left running."""
    command = [sys.executable, "-c", ENDS, str(tmp_path), how]
    ended = subprocess.run(command, cwd=ROOT, timeout=300, capture_output=True, text=True)
    assert ended.returncode == (how == "raises"), ended.stderr
    assert ("KeyError" in ended.stderr) is (how == "raises")
    assert checkpoint.steps(tmp_path) == [1, 2], ended.stderr
    assert checkpoint.verify(tmp_path) == []
