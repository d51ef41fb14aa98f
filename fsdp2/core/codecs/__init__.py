"""Encoded messages with fewer bytes for parameters and gradients.

    codec      the interface of a codec: rows of numbers to rows of bytes, and back; bfloat16, fp32
    blocks     a byte or half a byte per number: integers, and a scale per block
    rotated    wraps another codec and rotates blocks, which spreads outliers

Owns: the bytes of a message. Knows nothing of memory, lanes or collectives.
May import: only the modules of core itself.
"""
