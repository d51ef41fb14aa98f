"""One parameter: its two forms, the entries of modules that they fill, and its gradients.

    param      ShardedParam, and the plan that it is made from
    gradients  the gradients of several, taken and delivered; their DTensors used again

Owns: the sharded and the gathered ``nn.Parameter`` and their ``.grad``.
May import: layout.
"""
