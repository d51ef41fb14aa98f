"""What a step does, in the order of the host's calls, and when: one record, whoever runs the step.

notes       the record: operations on lanes, events between lanes, memory
categories  of which kind memory is, by its name
replay      when each operation runs and what stands still meanwhile, given what operations take

    `fsdp2.testing.virtual`    a device of names   ──┐
    `fsdp2.paper`              a device of shapes  ──┼──> notes ──> replay ──┐
    `fsdp2.tracing.recording`  a device            ──┘    (or times as measured) ──> Timeline

`fsdp2.planning` says what operations take, and `fsdp2.tracing` draws.
"""
