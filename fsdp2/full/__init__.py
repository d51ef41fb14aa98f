"""Whole tensors in and out of a sharded model.

gathering     `gathered`: parameters and gradients that are whole for a while, and written back
unit_by_unit  `full_parameters`: one unit after another, for export
loading       `load_from_rank0`, `sync_module_states`: rank 0's weights and buffers to all;
              `rewritten`: for what writes a model's shards by itself
selection     which parameters a call is about, and whether all ranks mean the same
unsharding    how one parameter becomes whole and is cut again, exactly

The room owns nothing but what is whole at the moment. It stands on `fsdp2.core` and changes no
unit: who does not call it pays nothing.
"""

from fsdp2.full.gathering import gathered
from fsdp2.full.loading import IncompatibleKeys, load_from_rank0, sync_module_states
from fsdp2.full.unit_by_unit import full_parameters

__all__ = [
    "IncompatibleKeys",
    "full_parameters",
    "gathered",
    "load_from_rank0",
    "sync_module_states",
]
