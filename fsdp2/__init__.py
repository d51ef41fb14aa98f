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
tests/house/test_imports.py compares with the tables.
"""

import functools
import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp2 import checkpoint, elastic, optim, xla
    from fsdp2.checks.groups import DebugSettings, debug
    from fsdp2.core.custom_collectives import AllGather, Comm, ReduceScatter
    from fsdp2.core.errors import (
        CheckpointError,
        CommunicationError,
        NonFiniteGradientError,
        RankMismatchError,
        ShardingStateError,
    )
    from fsdp2.full import full_parameters, gathered, load_from_rank0, sync_module_states
    from fsdp2.graph import graph_mode
    from fsdp2.interop import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
    )
    from fsdp2.optim import repoint_optimizer
    from fsdp2.optim.norms import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
    from fsdp2.planning.planner import Plan, plan
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
    from fsdp2.sharding.wire import WireFormat
    from fsdp2.sharding.wire_states import WireState, wire_state
    from fsdp2.tracing import trace
    from fsdp2.tracing.reports import GroupReport, Report, group_reports, report
    from fsdp2.wrap import (
        Choice,
        CustomPolicy,
        ModuleWrapPolicy,
        ShardReport,
        UnitReport,
        always_wrap_policy,
        any_wrap_policy,
        chosen_modules,
        deferred,
        enable_wrap,
        lambda_auto_wrap_policy,
        shard_model,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "CheckpointError",
    "Choice",
    "Comm",
    "CommunicationError",
    "CustomPolicy",
    "DataParallelMeshDims",
    "DebugSettings",
    "FSDPMeshInfo",
    "FSDPModule",
    "GradientReductionHandle",
    "GroupReport",
    "Levels",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "NonFiniteGradientError",
    "OffloadPolicy",
    "Plan",
    "RankMismatchError",
    "ReduceScatter",
    "Report",
    "ShardPlacementResult",
    "ShardReport",
    "ShardingStateError",
    "UnitReport",
    "UnshardHandle",
    "WireFormat",
    "WireState",
    "always_wrap_policy",
    "any_wrap_policy",
    "checkpoint",
    "chosen_modules",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "debug",
    "deferred",
    "elastic",
    "enable_wrap",
    "full_parameters",
    "fully_shard",
    "gathered",
    "get_total_norm",
    "graph_mode",
    "group_reports",
    "install",
    "lambda_auto_wrap_policy",
    "load_from_rank0",
    "optim",
    "plan",
    "register_fsdp_forward_method",
    "repoint_optimizer",
    "report",
    "shard_model",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "sync_module_states",
    "trace",
    "transformer_auto_wrap_policy",
    "uninstall",
    "whole_below",
    "wire_state",
    "xla",
]

_ROOMS = (
    *("checks", "core", "interop", "sharding"),  # which `fully_shard` loads
    *("checkpoint", "elastic", "fsdp1", "full", "graph", "optim", "planning", "tracing"),
    *("wrap", "xla"),
)
"""Modules that are attributes of this one without an import, and load when they are first used."""

_TOGETHER = {
    "sharding.api": ("fully_shard",),
    "core.errors": (
        *("CheckpointError", "CommunicationError", "NonFiniteGradientError", "RankMismatchError"),
        "ShardingStateError",
    ),
    "core.custom_collectives": ("AllGather", "Comm", "ReduceScatter"),
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
    "checks.groups": ("DebugSettings", "debug"),
    "full": ("full_parameters", "gathered", "load_from_rank0", "sync_module_states"),
    "graph": ("graph_mode",),
    "run.installing": ("install", "uninstall"),
    "optim": ("repoint_optimizer",),
    "optim.norms": ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"),
    "planning.planner": ("Plan", "plan"),
    "tracing.reports": ("GroupReport", "Report", "group_reports", "report"),
    "tracing": ("trace",),
    "sharding.wire": ("WireFormat",),
    "sharding.wire_states": ("WireState", "wire_state"),
    "wrap": (
        *("Choice", "CustomPolicy", "ModuleWrapPolicy", "ShardReport", "UnitReport"),
        *("always_wrap_policy", "any_wrap_policy", "chosen_modules", "deferred", "enable_wrap"),
        *("lambda_auto_wrap_policy", "shard_model", "size_based_auto_wrap_policy"),
        "transformer_auto_wrap_policy",
    ),
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
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        # `obj` has the names of which Python suggests a similar one.
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
    return sorted({*globals(), *_ROOMS, *_HOMES})


if not TYPE_CHECKING:  # with a ``__getattr__``, type checkers would take any name for one of ours
    __getattr__ = _load
