"""One parameter: its two forms, the entries of modules that they fill, and its gradients.

    param      ShardedParam, and the plan that it is made from
    aliases    a reference from before sharding, which is followed
    hooks      hooks that users register on sharded parameters
    gradients  the gradients of several, taken and delivered; their DTensors used again

Owns: the sharded and the gathered ``nn.Parameter`` and their ``.grad``.
May import: codecs, layout.
"""
