"""One parameter: its two forms, the module entries that hold them, and its gradients.

    param      ShardedParam; references from before sharding; users' hooks on it
    gradients  the gradients of several, taken and delivered; reuse of their DTensors

Owns: the sharded and the unsharded ``nn.Parameter`` and their ``.grad``.
May import: codecs, layout.
"""
