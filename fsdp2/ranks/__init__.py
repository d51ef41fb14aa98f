"""Exchanges among ranks outside steps: core does not need them.

    channels   objects to rank 0 and back, and notes in the default store
    transfers  tensors to and from the first rank, messages among ranks, and sums

The only room above core that uses c10d.
May import: device's process groups.
"""
