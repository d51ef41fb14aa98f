"""The abilities of a device: the only room that uses streams, memory and process groups.

    streams             lanes and the events that order them: an accelerator's, the CPU's
    buffers             flat buffers: permanent and transient ones
    fingerprint         numbers that show whether memory was written, by its contents
    kernels             the few tensor operations that all-gathers and reductions launch; the stage
                        of a device, also that of a step rehearsed on ``meta``
    backends            the known behavior of each backend
    collectives         those of a step, bound; differences between torch versions; those that no
                        step binds
    process_groups      properties of a process group, whether all its ranks are there, new groups
    channels            outside of steps: objects, tensors, and notes in the default store
    comm_memory         collectives in memory of a process group, or in symmetric memory

Owns: streams and events, storages, and the process groups that it creates.
May import: only the modules of core itself, nothing else of fsdp2.
"""
