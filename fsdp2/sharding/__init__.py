"""The preparation of modules by a call of `fully_shard`, before anything runs.

    planned      the parameters that calls take, planned before anything is changed
    meshes       the mesh to shard over, and whether a parameter can be sharded on it
    selection    which parameters a call takes, and whether they can be sharded
    ties         parameters that other units have: joined, or refused
    assembly     from those to groups: collectives, offload, aliases
    state_dicts  state dicts that hold shards
    random_values  random operators on shards: the numbers of the full tensor, on the CPU

Owns: nothing; its results belong to core.
May import: core, and the notices of `fsdp2.checks`.
"""
