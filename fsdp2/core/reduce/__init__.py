"""From unsharded gradients to sharded ``.grad``: a reduction is a tuple of operations, bound once.

    program          operations by lane; the state that one run passes to the next; gradients that
                     keep their memory between steps
    reduction        runs in each backward: a job collected, launched, delivered; reduced directly
    transport        other ways to reduce gradients: cast, packed, joined, custom, local
    coded            gradients in fewer bytes, summed by each rank itself; the table of codecs
    feedback         rounding errors of gradient messages, added to the next ones
    binding          selects a transport, makes the other operations, orders all
    spec             the settings: dtypes, factors, collectives; where to divide
    rows             the position of this rank's rows in a flat result, and views in few calls
    presence_marks   which ranks had a gradient
    levels           the reduce-scatter between nodes that replaces HSDP's all-reduce; coded, too
    result           from the sums to the delivery: hook, division, average, cast, copy to the host

Owns: staging buffers, partial sums, kept gradients. Knows nothing of all-gathers.
May import: codecs, device, layout, params.
"""
