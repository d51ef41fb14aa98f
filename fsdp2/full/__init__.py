"""Full tensors in and out of a sharded model.

gathering     `gathered`: parameters and gradients that are full for a while, and written back
unit_by_unit  `full_parameters`: one unit after another, for export
loading       `load_from_rank0`, `sync_module_states`: rank 0's weights and buffers to all;
              `rewritten`: for code that writes a model's shards by itself
selection     which parameters a call selects, and whether all ranks select the same
unsharding    how one parameter is unsharded and sharded again, exactly

The room owns only tensors that are currently full. It imports `fsdp2.core` and changes no unit: it
costs nothing unless it is called.
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
