"""Run an unchanged script, written for torch's FSDP2, on fsdp2.

    python -m fsdp2.run script.py ARGUMENTS…            as  python script.py ARGUMENTS…
    python -m fsdp2.run -m package.module ARGUMENTS…    as  python -m package.module ARGUMENTS…
    torchrun --nproc-per-node 8 -m fsdp2.run script.py ARGUMENTS…

The script sees the same ``sys.argv``, ``sys.path`` and ``__name__`` as without fsdp2.
"""

from __future__ import annotations

import os
import runpy
import sys

from fsdp2.interop.installing import install


def main() -> None:
    """Install fsdp2's names, then run the script given by ``sys.argv``."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    target = arguments[as_module:]
    if not target or target[0].startswith("-"):
        sys.exit(__doc__)
    install()
    sys.argv = target
    if as_module:
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):  # else the first is the user's
            sys.path[0] = os.path.dirname(os.path.realpath(target[0]))
        runpy.run_path(target[0], run_name="__main__")


if __name__ == "__main__":
    main()
