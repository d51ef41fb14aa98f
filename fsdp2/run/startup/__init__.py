"""Lets the Python processes that this one starts be installed, too.

    install_children()     PYTHONPATH=<this folder>:…   their Python imports `sitecustomize` first
    uninstall_children()   PYTHONPATH=…                 as it was

It serves launchers inside a script: Lightning's without torchrun, ``torch.multiprocessing.spawn``,
accelerate's ``notebook_launcher``. Without it, their child ranks would run torch's FSDP, and rank 0
would wait for them. `sitecustomize` installs fsdp2 where such a process imports torch's FSDP, and
costs other processes two comparisons per import. Processes that are forked have what this one has.
"""

from __future__ import annotations

import os

FOLDER = os.path.dirname(os.path.abspath(__file__))
_VARIABLE = "PYTHONPATH"


def install_children() -> None:
    """Let processes that are started from now on install fsdp2."""
    os.environ[_VARIABLE] = os.pathsep.join([FOLDER, *_others()])


def uninstall_children() -> None:
    """Let them be without again."""
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
