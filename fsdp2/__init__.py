"""fsdp2: per-parameter fully sharded data parallelism for PyTorch.

Example::

    from fsdp2 import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
"""

from fsdp2 import checkpoint, optim, xla
from fsdp2.api import fully_shard
from fsdp2.checks.switch import DebugSettings, debug
from fsdp2.core.config import (
    CheckpointError,
    CommunicationError,
    NonFiniteGradientError,
    RankMismatchError,
    ShardingStateError,
)
from fsdp2.core.custom_collectives import AllGather, Comm, ReduceScatter
from fsdp2.full import full_parameters, gathered, load_from_rank0, sync_module_states
from fsdp2.handles import GradientReductionHandle, UnshardHandle
from fsdp2.interop import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from fsdp2.interop.installing import install, uninstall
from fsdp2.module import FSDPModule, register_fsdp_forward_method, share_comm_ctx
from fsdp2.optim import repoint_optimizer
from fsdp2.optim.norms import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from fsdp2.planning.planner import Plan, plan
from fsdp2.reports import GroupReport, Report, group_reports, report
from fsdp2.sharding.meshes import FSDPMeshInfo, ShardPlacementResult
from fsdp2.tracing import trace
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
    options_for,
    shard_model,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap_modules,
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
    "always_wrap_policy",
    "any_wrap_policy",
    "checkpoint",
    "chosen_modules",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "debug",
    "deferred",
    "enable_wrap",
    "full_parameters",
    "fully_shard",
    "gathered",
    "get_total_norm",
    "group_reports",
    "install",
    "lambda_auto_wrap_policy",
    "load_from_rank0",
    "optim",
    "options_for",
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
    "wrap_modules",
    "xla",
]
