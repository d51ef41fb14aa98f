"""Optimizers of sharded parameters, and functions of their gradients.

flat         FlatOptimizer: element-wise optimizers over the units' flat shards
runs         stretches of flat shards that it steps as one tensor each
in_backward  steps of a unit's runs as soon as their gradients are delivered
offloaded    steps of a unit's runs on the CPU, where the states are
matrices     Muon: whole matrices, each on its owner
ema          EMA: averages of weights, sharded like the weights
repoint      repoint_optimizer: optimizers that were created before `fully_shard`
norms        clip_grad_norm_ and its parts
clipping     torch's own functions of norms, on shards that may be empty: for `install`
"""

from fsdp2.optim.ema import EMA
from fsdp2.optim.flat import FlatOptimizer
from fsdp2.optim.matrices import Muon
from fsdp2.optim.norms import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from fsdp2.optim.repoint import repoint_optimizer

__all__ = [
    "EMA",
    "FlatOptimizer",
    "Muon",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "repoint_optimizer",
]
