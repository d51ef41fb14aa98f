"""From unsharded gradients to sharded ``.grad``: a reduction is a tuple of operations, bound once.

    spec        the settings: dtypes, factors, collectives; where to divide, where rows lie
    reduction   operations by lane, and what stays between runs; jobs collected, run, delivered
    transport   ways to the reduce-scatter: direct, cast, packed, joined, coded, custom, local; and
                to the one between nodes that replaces HSDP's all-reduce
    feedback    rounding errors of gradient messages, added to the next ones
    binding     selects a transport, makes the other operations, orders all

Owns: staging buffers, partial sums, kept gradients. Knows nothing of all-gathers.
May import: codecs, device, layout, params.
"""
