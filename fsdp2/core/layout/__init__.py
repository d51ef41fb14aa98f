"""Where every element of a parameter lives, as plain numbers.

    layout  a group's flat shard and gathered buffer: offsets, padding, transports
    levels  pieces of pieces, where masters are sharded over two levels of a mesh
    mesh    from a mesh and a cut to DTensor placements
    logs    what is logged of layouts, binds and the schedule

Owns: nothing that changes. What alike groups have in common is kept with their layout, which is one
object; what alike parameters have, with their axes. Process groups of meshes made here are cached.
May import: device.
"""
