"""Lets the Python processes that this one starts be installed, too.

    install_children()     PYTHONPATH=<this folder>:…   their Python imports `sitecustomize` first
    uninstall_children()   PYTHONPATH=…                 as it was

`sitecustomize` installs fsdp2 where such a process imports torch's FSDP, and does nothing else.
Processes that are forked have what this one has. Workers of Ray are told by `ray_workers`.
"""

from __future__ import annotations

import os

from fsdp2.interop.startup.ray_workers import install_workers, uninstall_workers

FOLDER = os.path.dirname(os.path.abspath(__file__))
_VARIABLE = "PYTHONPATH"


def install_children() -> None:
    """Let processes that are started from now on install fsdp2."""
    os.environ[_VARIABLE] = os.pathsep.join([FOLDER, *_others()])
    install_workers()


def uninstall_children() -> None:
    """Let them be without again."""
    uninstall_workers()
    if FOLDER not in os.environ.get(_VARIABLE, "").split(os.pathsep):
        return
    others = _others()
    if others:
        os.environ[_VARIABLE] = os.pathsep.join(others)
    else:
        del os.environ[_VARIABLE]


def _others() -> list[str]:
    """Folders of the user's; an empty one, which is the current folder, stays among others."""
    value = os.environ.get(_VARIABLE, "")
    return [folder for folder in value.split(os.pathsep) if folder != FOLDER] if value else []
