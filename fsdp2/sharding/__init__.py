"""The calls that shard a module and that control it afterwards, and what they prepare.

    api          `fully_shard`, and its parts: a call is planned, then applied
    module       `FSDPModule`: the methods that control a unit
    wire         the wire formats that `FSDPModule.set_wire_format` sets
    wire_states  what these add to the state of training
    plan         what calls take, planned before anything is changed
    meshes       the mesh to shard over, and whether a parameter can be sharded on it
    assembly     from plans to groups: collectives, offload, ties, aliases
    state_dicts  state dicts that hold shards
    random_values  random operators on shards: the numbers of the full tensor, on the CPU

Owns: nothing; its results belong to core.
May import: core, the notices of `fsdp2.checks`, and what torch recognizes (`fsdp2.interop`).
"""
