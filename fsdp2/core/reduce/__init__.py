"""From unsharded gradients to sharded ``.grad``: a reduction is a tuple of operations, bound once.

    spec        the settings: dtypes, factors, collectives; where to divide, where rows lie
    program     operations by lane; the state of one run; what stays between runs; marks
    reduction   runs in each backward: a job collected, launched, delivered
    transport   ways to the reduce-scatter: direct, cast, packed, joined, coded, custom, local
    feedback    rounding errors of gradient messages, added to the next ones
    levels      the reduce-scatter between nodes that replaces HSDP's all-reduce; coded, too
    binding     selects a transport, makes the other operations, orders all

Owns: staging buffers, partial sums, kept gradients. Knows nothing of all-gathers.
May import: codecs, device, layout, params.
"""
