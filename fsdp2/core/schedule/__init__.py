"""When groups of parameters are gathered, freed and reduced.

    scheduler  order, prefetch and windows of the units below one root
    iteration  what lasts from the first forward to the end of the last backward
    kept       units that a forward has left unsharded, and what users write meanwhile
    reuse      when groups that keep rows of a gather gather anew
    in_flight  reductions on their way, and the memory that they hold
    unit       what one call of fully_shard made, and its flags
    moves      notices of its phases, while somebody watches
    group      parameters that share collectives
    bound      all that binding makes of a group, for its gathers, frees and reductions
    connections  process groups that they use, connected before the first gather
    states     where a group's parameters are, and what leads from where to where
    retrace    a backward that misses no unit, whatever this rank's loss uses
    calls      which of autograd's nodes are which unit's, for backwards that enter by no output
    side_doors which schedulers note that, and for how long
    graphs     graphs that backwards record, for which parameters stay in memory
    ties       groups that several units use
    whole      parameters that are whole on every rank, whose gradients are all-reduced together
    layers     operations of a group that the scheduler calls, and layers around them on request
    profiling  a layer: ranges by unit name in a profiler's trace

Owns: the state of groups and units, reductions in flight.
May import: device, layout, params, gather, reduce.
"""
