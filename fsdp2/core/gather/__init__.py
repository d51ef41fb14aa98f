"""From shards to unsharded parameters.

    program     an all-gather as operations by moment and lane, and what runs them
    segments    the operations of a segment that is sent as it is; rows of all ranks that stay
    coded       of one that is sent in fewer bytes, as messages of a codec, or as differences
    extension   of tensor subclasses that define their own messages
    keeping     which operations each segment has; rows that stay, of a node and of a smaller group,
                too; the next all-gather's choice

Owns: the inputs and outputs of collectives. Knows nothing of reductions.
May import: codecs, device, layout, params.
"""
