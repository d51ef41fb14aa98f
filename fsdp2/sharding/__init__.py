"""The preparation of modules by a call of `fully_shard`, before anything runs.

    plan         what calls take, planned before anything is changed
    meshes       the mesh to shard over, and whether a parameter can be sharded on it
    assembly     from plans to groups: collectives, offload, ties, aliases
    state_dicts  state dicts that hold shards
    random_values  random operators on shards: the numbers of the full tensor, on the CPU

Owns: nothing; its results belong to core.
May import: core, and the notices of `fsdp2.checks`.
"""
