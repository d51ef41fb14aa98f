"""From shards to unsharded parameters.

    program        an all-gather as operations by moment and lane, and what runs them
    segments       the operations of a segment that is sent as it is; rows that stay
    coded          of one that is sent in fewer bytes, as messages of a codec
    differences    of one that is sent as differences to the values gathered last
    custom         of all segments, by a collective of the user
    extension      of tensor subclasses that define their own messages
    make           which operations each segment has
    levels         rows of a node, gathered between nodes before an all-gather inside
    smaller_group  a smaller group's rows between forward and backward
    keeping        the two all-gathers of a group that keeps rows, and which of them is next

Owns: the inputs and outputs of collectives. Knows nothing of reductions.
May import: codecs, device, layout, params.
"""
