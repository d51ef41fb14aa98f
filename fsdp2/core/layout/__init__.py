"""The position of every element of a parameter, as plain numbers.

    layout  a group's flat shard and gathered buffer: offsets, padding, transports
    levels  pieces of pieces, if masters are sharded over two levels of a mesh
    mesh    from a mesh and a cut to DTensor placements
    logs    log messages about layouts, binds and the schedule

Owns: nothing that changes. Data shared by equal groups is kept with their layout, which is one
object; data shared by equal parameters, with their axes. Process groups of meshes created here are
cached.
May import: device.
"""
