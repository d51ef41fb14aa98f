"""fsdp2: per-parameter fully sharded data parallelism for PyTorch.

Example::

    from fsdp2 import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

The import itself loads nothing, not even torch, so that ``fsdp2 --help`` is there at once. The
first use of `fully_shard`, or of another name in the table `_TOGETHER`, loads all of them. Each
other public name loads its module when it is first used (PEP 562), by the table `_LATER`. Type
checkers and editors do not run that: they read the imports under ``TYPE_CHECKING``, which
tests/house/test_imports.py compares with the tables. Rooms that are no attributes, as
`fsdp2.planning`, `fsdp2.elastic`, `fsdp2.fsdp1` and `fsdp2.xla`, are imported by name.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp2 import checkpoint, errors, full, optim, tracing, wrap
    from fsdp2.checks.switch import debug
    from fsdp2.core.custom_collectives import AllGather, Comm, ReduceScatter
    from fsdp2.core.schedule.unit import PrefetchTime
    from fsdp2.full import full_parameters, gathered, load_from_rank0
    from fsdp2.graph import graph_mode
    from fsdp2.interop import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
    )
    from fsdp2.optim.norms import clip_grad_norm_
    from fsdp2.planning.planner import plan
    from fsdp2.run.installing import install, uninstall
    from fsdp2.sharding.api import fully_shard
    from fsdp2.sharding.meshes import FSDPMeshInfo, Levels, ShardPlacementResult
    from fsdp2.sharding.module import (
        FSDPModule,
        GradientReductionHandle,
        UnshardHandle,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from fsdp2.sharding.plan import whole_below
    from fsdp2.tracing import trace
    from fsdp2.tracing.reports import report
    from fsdp2.wrap import shard_model

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "GradientReductionHandle",
    "Levels",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PrefetchTime",
    "ReduceScatter",
    "ShardPlacementResult",
    "UnshardHandle",
    "checkpoint",
    "clip_grad_norm_",
    "debug",
    "errors",
    "full",
    "full_parameters",
    "fully_shard",
    "gathered",
    "graph_mode",
    "install",
    "load_from_rank0",
    "optim",
    "plan",
    "register_fsdp_forward_method",
    "report",
    "shard_model",
    "share_comm_ctx",
    "trace",
    "tracing",
    "uninstall",
    "whole_below",
    "wrap",
]

_ROOMS = ("checkpoint", "errors", "full", "optim", "tracing", "wrap")
"""Modules that are attributes of this one without an import, and load when they are first used."""

_TOGETHER = {
    "sharding.api": ("fully_shard",),
    "core.custom_collectives": ("AllGather", "Comm", "ReduceScatter"),
    "core.schedule.unit": ("PrefetchTime",),
    "interop": (
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
    ),
    "sharding.module": (
        *("FSDPModule", "GradientReductionHandle", "UnshardHandle"),
        *("register_fsdp_forward_method", "share_comm_ctx"),
    ),
    "sharding.meshes": ("FSDPMeshInfo", "Levels", "ShardPlacementResult"),
    "sharding.plan": ("whole_below",),
}
"""Public names whose modules `fully_shard` needs: the first use of one loads all of them.

So a compiled function that reads another of them after `fully_shard` finds an ordinary attribute.
"""

_LATER = {
    "checks.switch": ("debug",),
    "full": ("full_parameters", "gathered", "load_from_rank0"),
    "graph": ("graph_mode",),
    "run.installing": ("install", "uninstall"),
    "optim.norms": ("clip_grad_norm_",),
    "planning.planner": ("plan",),
    "tracing.reports": ("report",),
    "tracing": ("trace",),
    "wrap": ("shard_model",),
}
"""Public names that are loaded when they are first used, by the module that has them."""

_HOMES = {
    name: home for table in (_TOGETHER, _LATER) for home, names in table.items() for name in names
}


def _load(name: str) -> object:
    """Load the attribute that the tables list as ``name``, and keep it as an ordinary attribute.

    Raises:
        AttributeError: no table lists it.
    """
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        # `obj` has the names of which Python suggests a similar one.
        import functools
        import sys

        from fsdp2.core.errors import coded

        missing = functools.partial(AttributeError, name=name, obj=sys.modules[__name__])
        raise coded(
            missing,
            "no-such-name",
            f"module 'fsdp2' has no attribute '{name}'; dir(fsdp2) lists what it has",
        )
    if _HOMES[name] in _TOGETHER:
        for home, names in _TOGETHER.items():
            module = importlib.import_module(f"{__name__}.{home}")
            globals().update({each: getattr(module, each) for each in names})
    else:
        globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    found: object = globals()[name]
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if not TYPE_CHECKING:  # with a ``__getattr__``, type checkers would take any name for one of ours
    __getattr__ = _load
