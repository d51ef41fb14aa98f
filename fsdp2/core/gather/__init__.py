"""From shards to unsharded parameters.

    transport      how a segment is gathered: coalesced, packed, local, custom
    coded          how a segment is gathered in fewer bytes
    differences    the same, as differences to the values gathered last
    messages       the messages of both: one per rank, and their collective
    kinds          the transport of a segment
    kept_rows      rows that the next all-gathers reuse, and the two routes of such a group
    extension      the transport of tensor subclasses that define their own messages
    levels         rows of a node, gathered between nodes before an all-gather inside
    smaller_group  a smaller group's rows between forward and backward
    launch         an all-gather's collectives, launched on their lanes or inline

Owns: the inputs and outputs of collectives. Knows nothing of reductions.
May import: codecs, device, layout, params.
"""
