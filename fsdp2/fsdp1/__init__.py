"""torch's FSDP1 on units of `fully_shard`: `FullyShardedDataParallel` and its functions.

wrapper       `FullyShardedDataParallel`
config        strategies, prefetch, mixed precision, offload
meshes        process groups, meshes and devices: which ranks a wrapper shards over
planned       a planned wrapper, and those below it, before anything is changed
construction  the work of a constructor before it shards
comm_hooks    hooks that reduce gradients, and how units call them
flat_parameter  the attributes of torch's flat parameter that clients read and write
grad_scaler   `ShardedGradScaler`
state_dicts   the contents of ``state_dict()``: full or sharded tensors
optimizer_states  state dicts of optimizers by names, and loading them

Parameters are DTensors, with DTensor's operators (decision 26).

Names, arguments, defaults and results match ``torch.distributed.fsdp``; docs/compat_fsdp1.md has a
row for each, and a table of features that torch's does not support. It costs nothing unless it is
imported.
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
