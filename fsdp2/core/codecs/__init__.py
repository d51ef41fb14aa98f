"""Encoded messages with fewer bytes for parameters and gradients.

    codec  the interface of a codec, and all codecs: plain numbers, integers by blocks, rotated ones

Owns: the bytes of a message. Knows nothing of memory, lanes or collectives.
May import: only the modules of core itself.
"""
