"""One parameter: its two forms, the module entries that hold them, and its gradients.

    param      ShardedParam, and the plan from which it is created; references from before sharding,
               hooks that users register on it
    gradients  the gradients of several, taken and delivered; reuse of their DTensors

Owns: the sharded and the unsharded ``nn.Parameter`` and their ``.grad``.
May import: codecs, layout.
"""
