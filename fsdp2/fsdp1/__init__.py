"""torch's FSDP1 on units of `fully_shard`: `FullyShardedDataParallel`, and all around it.

wrapper       `FullyShardedDataParallel`
config        strategies, prefetch, mixed precision, offload
meshes        process groups, meshes and devices: which ranks a wrapper shards over
planned       a wrapper to be, and those below it, before anything is changed
construction  what a constructor does before it shards
comm_hooks    hooks that reduce gradients, and how units call them
flat_parameter  what clients read and write of torch's flat parameter
grad_scaler   `ShardedGradScaler`
operators     loops and optimizers that do with parameters what DTensor has no rule for
plain_tensors  which DTensors take a plain tensor beside them
state_dicts   what ``state_dict()`` holds: full or sharded tensors
optimizer_states  state dicts of optimizers by names, and the way back

Names, arguments, defaults and results are those of ``torch.distributed.fsdp``; docs/compat_fsdp1.md
has a row for each, and a table of what torch's cannot do. Who does not import it pays nothing.
"""

from fsdp2.fsdp1.config import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp2.fsdp1.grad_scaler import ShardedGradScaler
from fsdp2.fsdp1.wrapper import FullyShardedDataParallel

FSDP = FullyShardedDataParallel

__all__ = [
    "FSDP",
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
