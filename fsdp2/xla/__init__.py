"""The interface of XLA's FSDP, on any device: a wrapper around `fully_shard`, and its files.

    wrapper      XlaFullyShardedDataParallel: its arguments are those of a unit; checkpoint_module
    shards       this rank's rows as plain tensors, and the metadata that identifies the rows
    files        merges per-rank files into one full file
    consolidate  the same as a command: ``python -m fsdp2.xla.consolidate``

    module ── wrapper ──> wrapper around a unit ── state_dict() ──> shards ──> one file per rank
                                                          all of them ── files ──> one full file

docs/compat_xla.md has a row for each name and argument.
"""

from fsdp2.xla.files import (
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)
from fsdp2.xla.wrapper import XlaFullyShardedDataParallel, checkpoint_module

__all__ = [
    "XlaFullyShardedDataParallel",
    "checkpoint_module",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_state_dicts",
]
