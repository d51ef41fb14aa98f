"""Run the scheduler without a cluster: on paper, without a network, on a device that is a CPU.

virtual     streams, memory and collectives on paper
races       the checker of races in a record
simulation  a model's forward and backward on them
parameters  parameters on paper
null_group  a process group of any number of ranks that sends nothing, from `fsdp2.tracing.paper`
blocks      models of many small blocks, for any number of ranks
counting    operators, calls and copied bytes of a step, counted exactly
stand_in    a device with streams, events and an allocator that computes with the CPU's kernels
"""
