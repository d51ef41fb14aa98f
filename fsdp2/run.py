"""Run an unchanged script, written for torch's FSDP2 or FSDP1, on fsdp2.

    fsdp2 run script.py ARGUMENTS…            as  python script.py ARGUMENTS…
    fsdp2 run -m package.module ARGUMENTS…    as  python -m package.module ARGUMENTS…
    torchrun --nproc-per-node 8 -m fsdp2.run script.py ARGUMENTS…

``python -m fsdp2.run`` is ``fsdp2 run``: torchrun and other launchers start modules. The script
sees the same ``sys.argv``, ``sys.path`` and ``__name__`` as without fsdp2.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Install fsdp2's names, then run the script that the arguments name.

    Args:
        arguments: in place of ``sys.argv``.

    Raises:
        SystemExit: with 0 where ``--help`` was asked for, with 2 where no script is named.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] in (["-h"], ["--help"]):
        print((__doc__ or "").rstrip())
        sys.exit(0)
    as_module = arguments[:1] == ["-m"]
    target = arguments[as_module:]
    if not target or target[0].startswith("-"):
        print("fsdp2 run: name a script, or -m and a module; see fsdp2 run --help", file=sys.stderr)
        sys.exit(2)
    from fsdp2.interop.installing import install  # with it comes torch

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
