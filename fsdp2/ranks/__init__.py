"""What ranks tell each other outside of steps: nothing of core needs it.

    channels   objects to rank 0 and back, and notes in the default store
    transfers  tensors to and from the first rank, messages among ranks, and sums

The only room above core that touches c10d.
May import: device's process groups.
"""
