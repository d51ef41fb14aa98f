"""Run the scheduler without a cluster: on paper, on no network, on a device made of a CPU.

virtual     streams, memory and collectives on paper, and the checker of races
simulation  a model's forward and backward on them
timeline    when each operation of such a schedule runs, given how long it takes
parameters  parameters on paper
phases      units that refuse a move of their phase which nobody has thought of
null_group  a process group of as many ranks as you like that moves nothing, of `fsdp2.paper`
blocks      models of many small blocks, for any number of ranks
counting    operators, calls and copied bytes of a step, counted exactly
stand_in    a device with streams, events and an allocator, that computes with the CPU's kernels
"""
