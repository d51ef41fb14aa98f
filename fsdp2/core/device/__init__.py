"""What a device can do: the only room that knows streams, memory and process groups.

    streams             lanes and the events that order them: an accelerator's, the CPU's
    buffers             flat buffers: the ones that stay, and the ones that come and go
    kernels             the few tensor operations that gathers and reductions launch
    backends            what each kind of backend is known to do
    collectives         those of a step, bound; what differs between torch versions
    custom_collectives  those that users write: AllGather, ReduceScatter
    process_groups      what a process group tells, and new ones beside it
    one_off             collectives that no step binds
    channels            objects and notes between ranks
    presence            every rank of a process group runs fsdp2, or none communicates
    rehearsal           what stands for streams and kernels while a step is rehearsed on ``meta``
    comm_memory         collectives in memory of the process group, or in symmetric memory

Owns: streams and events, storages, process groups made on the way.
May import: config and progress, nothing else of fsdp2.
"""
