"""Kinds of memory, and of which kind is what the engine allocates: by the name that it gives."""

from __future__ import annotations

import functools

SHARDS = "shards"
GATHERED = "gathered"
GRADIENTS = "gradients"
KEPT = "kept rows"
REDUCTIONS = "reduction buffers"
ACTIVATIONS = "activations"
OPTIMIZER = "optimizer"
TEMPORARY = "temporary"
MODEL = "buffers"

CATEGORIES = (
    *(SHARDS, OPTIMIZER, KEPT, GRADIENTS, GATHERED, REDUCTIONS, ACTIVATIONS, TEMPORARY, MODEL),
)
"""In stacking order, long-lived ones at the bottom. A timeline may have others, on top."""

_OF_GATHERS = (
    "gathered ",
    "shards of ",
    "all-gather output",
    "coded shards",
    "coded differences",
    "rows of the smaller group",
)
_OF_NODES = "node rows"
_OF_GRADIENTS = ("sharded gradient", "kept gradient")


@functools.cache
def category_of(name: str) -> str:
    """The kind of what has this name (`fsdp2.core.device.kernels.Kernels`)."""
    if name.startswith(_OF_GATHERS):
        return GATHERED
    if name in _OF_GRADIENTS:
        return GRADIENTS
    if name == KEPT or name.startswith(_OF_NODES):
        return KEPT
    return SHARDS if name == "shard" else REDUCTIONS
