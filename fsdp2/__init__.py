"""fsdp2: per-parameter fully sharded data parallelism for PyTorch.

Example::

    from fsdp2 import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
"""

from fsdp2.api import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method
from fsdp2.core.config import MixedPrecisionPolicy, OffloadPolicy, ShardingStateError
from fsdp2.optimizers import repoint_optimizer
from fsdp2.report import GroupReport, group_reports

__version__ = "0.1.0"

__all__ = [
    "FSDPModule",
    "GroupReport",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardingStateError",
    "UnshardHandle",
    "fully_shard",
    "group_reports",
    "register_fsdp_forward_method",
    "repoint_optimizer",
]
