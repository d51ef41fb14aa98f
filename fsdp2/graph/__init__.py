"""Graph mode: collectives as operators that autograd differentiates and ``torch.compile`` traces.

mode        `graph_mode`: the models that it takes, and what it changes
units       a unit's forward: from shards to unsharded parameters, and back
operators   ``fsdp2::unshard`` and ``fsdp2::reduce``, and their derivatives
rows        where elements lie in what collectives read and write
placement   the backend "fsdp2": where a graph launches collectives, and where it waits
edge        groups into a compiled graph, and gradients out of it

It stands on the engine's layouts, divisions and process groups. A program without it loads nothing.
"""

from fsdp2.graph.mode import graph_mode

__all__ = ["graph_mode"]
