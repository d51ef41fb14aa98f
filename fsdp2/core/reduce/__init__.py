"""From full gradients to sharded ``.grad``.

    program    what sets a reduction's steps, the steps by lane, one run of them
    division   where a reduction divides
    reduction  the steps, bound once
    launch     runs them on their lanes; what they keep alive meanwhile
    marks      who had a gradient
    storage    gradients whose memory stays from step to step

Owns: staging buffers, partial sums, kept gradients. Knows nothing of gathers.
May import: device, layout, params.
"""
