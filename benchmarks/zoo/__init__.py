"""Tiny random instances of public architectures, each trained unsharded, by fsdp2 and by torch.

    python -m benchmarks.zoo

`architectures` finds what the installed libraries offer, and the `from_` modules make it tiny:
`instances.Instance`. `trial` trains one on a rank. `__main__` starts the ranks, asks them, and
writes the table.
"""
