"""Numbers in fewer bytes: what travels in place of parameters and gradients.

    codec      what each codec does: rows of numbers to rows of bytes, and back
    rounded    floating-point numbers: bfloat16, or fp32 as it is
    blocks     a byte or half a byte per number: integers, and a scale per block
    rotated    another codec, of blocks that are rotated: outliers are spread

Owns: the bytes of a message. Knows nothing of memory, lanes or collectives.
May import: the ground floor alone.
"""
