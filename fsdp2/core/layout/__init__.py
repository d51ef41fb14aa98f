"""The position of every element of a parameter, as plain numbers.

    layout  a group's flat shard and gathered buffer: offsets, padding, transports
    levels  pieces of pieces, if masters are sharded over two levels of a mesh
    mesh    from a mesh and a cut to DTensor placements
    logs    log messages about layouts, binds and the schedule

Owns: nothing that changes. Equal groups share one layout and its data, equal parameters their axes;
process groups of meshes created here are cached. May import: device.
"""
