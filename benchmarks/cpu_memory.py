"""Bytes that torch's CPU allocator has given out, at the most: of all threads.

    memory = CountedMemory()        # in a process of its own: it stays
    memory.peak()                   # since the last call

torch's profiler does not see what gloo's threads let go of, so that bytes which it adds up grow
with every collective. This is an allocator around torch's own, of C++; it needs a compiler. What
libraries take from the system beside it is not counted.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cpu_memory.cpp")


def missing_tool() -> str | None:
    """What is needed to build it and is not there."""
    return None if shutil.which("c++") else "c++"


@cache
def build() -> Path:
    """Compile it, unless that was done before."""
    label = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"fsdp2-cpu-memory-{os.getuid()}"
    library = folder / f"{label}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        made = folder / f"{label}.{os.getpid()}"
        theirs = Path(torch.__file__).parent
        command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE)]
        command += [f"-I{theirs / 'include'}", f"-L{theirs / 'lib'}", "-lc10", "-o", str(made)]
        subprocess.run(command, check=True)
        made.replace(library)
    return library


class CountedMemory:
    """Counts all that is allocated from now on; there can be one in a process."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(build()))
        self._peak = library.fsdp2_peak
        self._peak.restype = ctypes.c_int64
        library.fsdp2_count()

    def peak(self) -> int:
        """The most bytes at once since the last call."""
        found: int = self._peak()
        return found
