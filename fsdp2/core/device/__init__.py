"""What a device can do: the only room that knows streams, memory and process groups.

    streams             lanes and the events that order them: an accelerator's, the CPU's
    buffers             flat buffers: the ones that stay, and the ones that come and go
    kernels             the few tensor operations that gathers and reductions launch
    backends            what each kind of backend is known to do
    collectives         those of a step, bound; what differs between torch versions
    process_groups      what a process group tells, and new ones beside it
    one_off             collectives that no step binds
    presence            all ranks of a process group are there, before a unit uses it first
    rehearsal           what stands for streams and kernels while a step is rehearsed on ``meta``

Owns: streams and events, storages, process groups made on the way.
May import: the ground floor, nothing else of fsdp2.
"""
