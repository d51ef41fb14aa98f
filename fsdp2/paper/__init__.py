"""A device without memory or time, on which the shipped engine runs a whole step and all is noted.

null_group  process groups of as many ranks as you like that move nothing
recording   what was noted: operations by lane, events, allocations; and who notes it
operators   every operator that runs on ``meta``: its FLOPs, its bytes, what it allocates
scratch     what a CPU's kernels allocate inside
recurrent   LSTMs of a CPU, which are oneDNN's
values      those that are known, as they follow from constants alone
devices     a device or an autocast that the model names itself
stage       lanes, kernels and process groups that note what is asked of them

Models, units, hooks and autograd are the real ones. Only what a device does is replaced: tensors
are on ``meta``, lanes and collectives are notes.
"""
