"""The record of a step, in the order of the host's calls: one form for all that runs without time.

notes       the record: operations on lanes, events between lanes, memory
categories  the kind of memory that a name denotes
replay      when each operation runs and what waits meanwhile, from the durations of operations

    `fsdp2.testing.virtual`  a device of names   ──┐
    `fsdp2.tracing.paper`    a device of shapes  ──┴──> notes ──> replay ──> Timeline
                                                              ──> races

`fsdp2.planning` provides the durations of operations, and `fsdp2.tracing` draws.
"""
