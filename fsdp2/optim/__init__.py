"""Optimizers of sharded parameters.

flat     FlatOptimizer: element-wise optimizers over the units' flat shards
repoint  repoint_optimizer: optimizers that were made before `fully_shard`
"""

from fsdp2.optim.flat import FlatOptimizer
from fsdp2.optim.repoint import repoint_optimizer

__all__ = ["FlatOptimizer", "repoint_optimizer"]
