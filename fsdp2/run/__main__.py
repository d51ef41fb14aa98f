"""Run an unchanged script, written for torch's FSDP2 or FSDP1, on fsdp2.

    fsdp2 run script.py ARGUMENTS…            as  python script.py ARGUMENTS…
    fsdp2 run -m package.module ARGUMENTS…    as  python -m package.module ARGUMENTS…
    torchrun --nproc-per-node 8 -m fsdp2.run script.py ARGUMENTS…

``python -m fsdp2.run`` is ``fsdp2 run``: torchrun and other launchers start modules. The script
sees the same ``sys.argv``, ``sys.path`` and ``__name__`` as without fsdp2.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> None:
    """Install fsdp2's names, then run the script that the arguments name.

    Args:
        arguments: in place of ``sys.argv``.

    Raises:
        SystemExit: with 0 where ``--help`` was asked for, with 2 where no script is named, or
            there is none of that name.
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
    if not as_module and not (os.path.exists(target[0]) and _has_main(target[0])):
        _refuse(f"there is no script '{target[0]}'")
    missing = f"there is no module '{target[0]}' that can be run"
    if as_module and importlib.util.find_spec(target[0].partition(".")[0]) is None:
        _refuse(missing)
    from fsdp2.run.installing import install  # with it comes torch

    install()
    sys.argv = target
    if as_module:
        if not _is_module(target[0]):  # which imports what is around it
            _refuse(missing)
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):  # else the first is the user's
            sys.path[0] = os.path.dirname(os.path.realpath(target[0]))
        runpy.run_path(target[0], run_name="__main__")


def _has_main(path: str) -> bool:
    return not os.path.isdir(path) or os.path.exists(os.path.join(path, "__main__.py"))


def _is_module(name: str) -> bool:
    """Whether there is one; what a package around it raises is left as it is."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return False
    if found is None or found.submodule_search_locations is None:
        return found is not None
    return _is_module(f"{name}.__main__")


def _refuse(problem: str) -> NoReturn:
    print(f"fsdp2 run: {problem}; name a script, or -m and a module", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
