"""What `fsdp2.debug` switches on.

    checks     groups that agree, and look for NaN, before they go on
    agreement  ranks agree on each step, by notes on a board

Owns: the settings and the agreement of this process.
May import: every room below.
"""
