"""A device for torch that computes with the CPU's kernels, with streams, events and an allocator.

    device  compiles and registers it as torch's PrivateUse1; what it counts, and the races it found
    group   a process group for it, over gloo

It needs a C++ compiler and ninja. Streams keep vector clocks for each operator that any code runs.
"""
