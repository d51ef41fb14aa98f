"""From shards to gathered parameters.

    transport      how a segment travels: coalesced, packed, local, custom
    coded          how a segment travels in fewer bytes
    differences    the same, as differences to what was gathered last
    messages       what both send: a message of each rank, and the collective of them
    kinds          which of them a segment has
    kept_rows      rows that the next gathers reuse, and the two routes of a group that keeps them
    extension      the transport of tensor subclasses that say themselves what travels
    levels         rows of a node, gathered between nodes in front of a gather inside
    smaller_group  a smaller group's rows between forward and backward
    launch         a gather's collectives, issued on their lanes or inline

Owns: what collectives read and write on the way. Knows nothing of reductions.
May import: codecs, device, layout, params.
"""
