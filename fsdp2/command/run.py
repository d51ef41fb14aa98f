"""`fsdp2 run`: a script or a module that was written for torch's FSDP, unchanged."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

SUMMARY = "run a script that was written for torch's FSDP, unchanged, on fsdp2"


def main(arguments: Sequence[str]) -> int:
    """Exit code: the script's."""
    from fsdp2.run.__main__ import main as run_script

    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()  # as of `python -m`; here it is the folder of the command
    run_script(arguments)
    return 0
