"""What a call of `fully_shard` makes of modules, before anything runs.

    state_dicts  state dicts that hold shards

May import: core, and what `fsdp2.checks` says.
"""
