"""From unsharded gradients to sharded ``.grad``.

    reduction        runs in each backward: a job collected, launched, delivered
    transport        how gradients are reduced: direct, cast, packed, joined, custom, local
    coded            how gradients are reduced in fewer bytes, summed by each rank itself
    coded_levels     the same between nodes in fewer bytes
    kinds            the transport of a reduction
    feedback         rounding errors of gradient messages, added to the next ones
    program          steps by lane; the state that one run passes to the next
    binding          selects a transport, creates the other parts, orders their steps
    spec             the settings: dtypes, factors, collectives
    division         where to divide: before the collectives, inside them, after them
    rows             the position of this rank's rows in a flat result, and views in few calls
    presence_marks   which ranks had a gradient
    levels           the reduce-scatter between nodes that replaces HSDP's all-reduce
    partial_sums     sums that wait for the all-reduce over replicas, and that all-reduce
    average          over copies of the model that the mesh does not have
    result           from the sums to the delivery: hook, division, cast, copy to the host
    kept_gradients   gradients that keep their memory between steps

Owns: staging buffers, partial sums, kept gradients. Knows nothing of all-gathers.
May import: codecs, device, layout, params.
"""
