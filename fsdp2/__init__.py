"""fsdp2: per-parameter fully sharded data parallelism for PyTorch.

Example::

    from fsdp2 import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
"""

from fsdp2.api import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method
from fsdp2.core.config import MixedPrecisionPolicy, OffloadPolicy, ShardingStateError
from fsdp2.norms import clip_grad_norm_, get_total_norm
from fsdp2.report import GroupReport, group_reports

__version__ = "0.1.0"

__all__ = [
    "FSDPModule",
    "GroupReport",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardingStateError",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "get_total_norm",
    "group_reports",
    "register_fsdp_forward_method",
]
