"""From full gradients to sharded ``.grad``.

    reduction        what runs in each backward: a job collected, launched, delivered
    transport        how gradients travel: direct, cast, packed, joined, custom, local
    coded            how gradients travel in fewer bytes, summed by each rank itself
    coded_levels     the same between nodes in fewer bytes
    kinds            which of them a reduction has
    feedback         what messages leave out of gradients, added to the next ones
    program          steps by lane; what one run of them leaves from step to step
    binding          a transport chosen, other parts made, their steps put in order
    spec             what sets all that: dtypes, factors, whose collectives
    division         where to divide: before the collectives, inside them, after them
    rows             where this rank's rows lie in a flat result, and views of them in few calls
    presence_marks   who had a gradient
    levels           the reduce-scatter between nodes that stands where HSDP all-reduces
    partial_sums     sums that wait for the all-reduce over replicas, and that all-reduce
    average          over copies of the model that the mesh does not have
    result           from the sums to what is delivered: hook, division, cast, copy to the host
    kept_gradients   gradients whose memory stays from step to step

Owns: staging buffers, partial sums, kept gradients. Knows nothing of gathers.
May import: codecs, device, layout, params.
"""
