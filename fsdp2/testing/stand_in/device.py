"""A stand-in for an accelerator: computes like the CPU, has streams and events, checks their order.

    stand_in.cpp, order.h ──compiler──> a device "standin", registered as torch's PrivateUse1
    load()                     in each process that uses it; `races()` is what was out of order

On it fsdp2 takes the paths that it takes on a GPU: lanes on streams, events between them,
transient memory from a caching allocator, and hooks on autograd's own thread. It needs a C++
compiler and ninja.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

NAME = "standin"
SOURCES = [Path(__file__).with_name(name) for name in ("stand_in.cpp", "order.h")]


def missing_tool() -> str | None:
    """The first tool that the build requires and this machine lacks."""
    return next((tool for tool in ("c++", "ninja") if shutil.which(tool) is None), None)


def library() -> Path:
    """The path of the library for this torch and this source."""
    version = f"{torch.__version__} {sys.version_info[:2]}".encode()
    sources = b"".join(source.read_bytes() for source in SOURCES)
    label = hashlib.sha256(sources + version).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"fsdp2-stand-in-{os.getuid()}" / f"{label}.so"


def build() -> None:
    """Compile it, unless that was done before; in a process of its own, which then has it."""
    if not library().exists():
        command = [sys.executable, "-m", "fsdp2.testing.stand_in.device"]
        root = Path(__file__).parents[3]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def _compile() -> None:
    from torch.utils import cpp_extension  # here, as it brings setuptools along

    path = library()
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        cpp_extension.load(
            "stand_in",
            [str(SOURCES[0])],
            extra_cflags=["-O1"],
            build_directory=scratch,
            is_python_module=False,
        )
        Path(scratch, "stand_in.so").replace(path)


@cache
def load() -> torch.device:
    """Register the device in this process, once it is built."""
    torch.ops.load_library(str(library()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device(NAME, 0)


def _module() -> ModuleType:
    """The functions that torch expects in ``torch.<device>``."""
    module: object = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = lambda device: nullcontext()
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.Stream = torch.Stream
    module.Event = torch.Event
    module.stream = lambda stream: stream or nullcontext()  # a stream is its own context
    module.current_stream = lambda device=None: torch.accelerator.current_stream(0)
    found: ModuleType = module
    return found


def races() -> list[str]:
    """The races found since the last call, one sentence each. Waits for all operations first."""
    found: list[str] = torch.ops.stand_in.races()
    return found


def count_of(what: str) -> int:
    """How often it was asked to "record", "wait", "set stream", "record_stream" and so on."""
    found: int = torch.ops.stand_in.count_of(what)
    return found


def take_away() -> None:
    """Remove its streams and events, and the ability to empty storages, permanently."""
    torch.ops.stand_in.take_away()


def live_bytes() -> int:
    """The allocated bytes."""
    found: int = torch.ops.stand_in.live_bytes()
    return found


def peak_bytes() -> int:
    """The most that was allocated at once since the last call."""
    found: int = torch.ops.stand_in.peak_bytes()
    return found


if __name__ == "__main__":
    _compile()
