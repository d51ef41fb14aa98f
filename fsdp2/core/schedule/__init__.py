"""When groups of parameters are unsharded, resharded and reduced.

    scheduler  order, prefetch and windows of the units below one root
    iteration  state from the first forward to the end of the last backward; recorded graphs;
               pending reductions, and the memory that they hold
    reuse      units that are left gathered, rows that are kept: whether shards were written
    unit       the result of one call of fully_shard, its flags, its ties, watchers of its phase
    group      parameters that share collectives, and the result of binding them
    connections  process groups in use, connected before the first all-gather
    states     the state of a group's parameters, and the transitions
    retrace    a backward that misses no unit, whatever this rank's loss uses
    calls      which autograd node belongs to which unit, for backwards that enter by no output
    whole      parameters replicated on every rank, whose gradients are all-reduced together
    observers  of the operations that the scheduler calls, on request: a profiler's ranges,
               a user's writes to what he has unsharded

Owns: the state of groups and units, pending reductions.
May import: device, layout, params, gather, reduce.
"""
