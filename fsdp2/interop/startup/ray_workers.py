"""Lets the workers of Ray be installed, too, whatever their environment.

RAY_RUNTIME_ENV_HOOK=fsdp2.interop.startup.ray_workers.in_workers
    ray.init(runtime_env=…)  ──>  in_workers(runtime_env)     in the driver
    a worker starts          ──>  what `in_workers` has put in as its setup hook

A ``runtime_env`` that sets ``PYTHONPATH`` hides the folder that other processes are told by, and
workers of a cluster that runs already never had it. Ray itself is not imported here.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
VARIABLE, HOOK = "RAY_RUNTIME_ENV_HOOK", f"{__name__}.in_workers"
_SETUP = "worker_process_setup_hook"

Setup = Callable[[], object]
"""The function that a worker calls as it starts, or its import path as a string."""

_before: list[str] = []  # the user's hook, while ours is in its place


def install_workers() -> None:
    """Let workers of a ``ray.init()`` from now on install fsdp2.

    Warns:
        UserWarning: Ray runs already, so that its workers do not.
    """
    if os.environ.get(VARIABLE) == HOOK:
        return
    _before[:] = [os.environ[VARIABLE]] if VARIABLE in os.environ else []
    os.environ[VARIABLE] = HOOK
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        warnings.warn(
            "ray.init() ran before fsdp2.install(), so that Ray's workers go on using torch's "
            "FSDP; call install() before it, or start the script with python -m fsdp2.run",
            stacklevel=4,
        )


def uninstall_workers() -> None:
    """Let them be without again."""
    if os.environ.get(VARIABLE) != HOOK:
        return
    del os.environ[VARIABLE]
    if _before:
        os.environ[VARIABLE] = _before.pop()


def in_workers(runtime_env: Mapping[str, Any] | None) -> dict[str, object]:
    """For Ray's driver: the user's ``runtime_env``, extended so that workers install fsdp2."""
    env = dict(runtime_env or {})
    for theirs in _before:
        env = dict(_found(theirs)(env) or {})
    env[_SETUP] = _setup(env.get(_SETUP))
    return env


def _setup(theirs: Setup | str | None) -> Setup:
    """A setup hook that first runs the user's."""
    # Ray sends functions of modules that can be imported by their names. A worker may not find
    # fsdp2 by its name, so that this one belongs to none: its code is sent.
    nowhere = {"__builtins__": __builtins__, "__name__": "fsdp2's, in a worker of Ray"}
    arguments = theirs, FOLDER
    return FunctionType(_set_up.__code__, nowhere, "install_fsdp2", arguments)


def _set_up(theirs: Setup | str | None, folder: str) -> None:
    """Runs in the worker, and needs only its own imports."""
    import importlib
    import importlib.util
    import os
    import sys

    if isinstance(theirs, str):
        module, _, name = theirs.rpartition(".")
        getattr(importlib.import_module(module), name)()
    elif theirs is not None:
        theirs()
    path = os.path.join(folder, "sitecustomize.py")
    spec = importlib.util.spec_from_file_location("fsdp2_in_a_worker", path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        importlib.import_module("fsdp2").install()  # elsewhere on this machine, or Ray says so
        return
    startup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(startup)
    sys.meta_path.insert(0, startup.Watch())
    if startup.TORCHS in sys.modules:
        importlib.import_module(startup.OURS)  # which installs itself


def _found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
