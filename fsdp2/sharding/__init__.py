"""What a call of `fully_shard` makes of modules, before anything runs.

    planned      what calls take, all planned before anything is changed
    meshes       which mesh it shards over, and whether a parameter can be
    cuts         the dim that a parameter is cut on where several will do
    selection    which parameters a call takes, and whether they can be sharded
    ties         those that other units have: joined, or refused
    aliases      references to parameters from before, besides the entries of modules
    assembly     from those to groups: collectives, offload, aliases
    state_dicts  state dicts that hold shards

Owns: nothing; what it makes belongs to core.
May import: core, and what `fsdp2.checks` says.
"""
