"""What every rank process imports, once, in the process that they are forked from.

A frozen object is not looked at by the garbage collector of a rank, whose looks would copy the
memory that all share.
"""

import gc
import importlib

for _name in (
    "fsdp2.sharding.api",  # with all that `fully_shard` needs
    "torch._dynamo",  # a first backward, checkpoint or optimizer step imports it
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
):
    importlib.import_module(_name)
gc.collect()
gc.freeze()
