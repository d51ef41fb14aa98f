"""Run the scheduler without a cluster: on paper, without a network, on a device that is a CPU.

virtual     streams, memory and collectives on paper, and the checker of races
simulation  a model's forward and backward on them
parameters  parameters on paper
phases      units that refuse a change of phase that the table of phases does not allow
null_group  a process group of any number of ranks that sends nothing, from `fsdp2.tracing.paper`
blocks      models of many small blocks, for any number of ranks
counting    operators, calls and copied bytes of a step, counted exactly
stand_in    a device with streams, events and an allocator that computes with the CPU's kernels
"""
