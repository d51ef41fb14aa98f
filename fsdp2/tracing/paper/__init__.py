"""A device without memory or time, on which the real engine runs a whole step that is recorded.

null_group  process groups of any number of ranks that send nothing
recording   the record, which is the lanes: operations by lane, events, allocations
operators   every operator that runs on ``meta``: its FLOPs, its bytes, its allocations
values      values that are known because they follow from constants
devices     a device or an autocast that the model names itself
stage       kernels and process groups that record their calls

Models, units, hooks and autograd are the real ones. Only the device's work is replaced: tensors are
on ``meta``, lanes and collectives are notes.
"""
