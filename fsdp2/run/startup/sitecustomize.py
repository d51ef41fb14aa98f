"""Imported by Python as it starts, where a process with `fsdp2.install()` started it.

    import torch.distributed.fsdp   ──>  import fsdp2, the one that this file belongs to
    import fsdp2                    ──>  fsdp2.install()

A process that imports neither pays for two comparisons per import. ``sys.path`` is what it would be
without us, and another ``sitecustomize`` that this one hides runs after it. Any Python may come
here, so that this file needs nothing but the standard library.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

FOLDER = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(FOLDER))
TORCHS, OURS = "torch.distributed.fsdp", "fsdp2"


class Watch:
    """A finder that delegates to others, and acts when torch's FSDP or fsdp2 was imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of torch's FSDP or of fsdp2, which acts when it has run."""
        if name == OURS:
            # The one that the first process runs, whatever else is on this one's path.
            spec = importlib.util.spec_from_file_location(
                OURS, os.path.join(PACKAGE, "__init__.py"), submodule_search_locations=[PACKAGE]
            )
            return _then(spec, _install)
        if name == TORCHS:
            return _then(PathFinder.find_spec(name, path, target), _import_ours)
        return None


def _then(spec: ModuleSpec | None, act: Callable[[ModuleType], None]) -> ModuleSpec | None:
    """``spec``, whose module is handed to ``act`` when it has run."""
    loader = spec.loader if spec is not None else None
    if loader is not None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            act(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def _import_ours(_: ModuleType) -> None:
    if OURS in sys.modules:  # it has imported torch's itself, and is not ready yet
        return
    try:
        importlib.import_module(OURS)
    except Exception as error:
        warnings.warn(
            "fsdp2 is installed in the process that started this one, but cannot be imported here, "
            f"so that torch's FSDP2 stays: {error!r}; give both the same environment",
            RuntimeWarning,
            stacklevel=2,
        )


def _install(ours: ModuleType) -> None:
    ours.install()


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that Python would have found without us."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":  # else it is looked at, not started with
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != FOLDER]
    if sys.version_info >= (3, 10):  # noqa: UP036  # it is not yet known who imports this
        sys.meta_path.insert(0, Watch())
    _run_hidden()
