"""From full gradients to sharded ``.grad``.

    spec             what sets a reduction's steps; where it divides; views of rows in few calls
    reduction        the steps, bound once, and their launch on lanes
    presence_marks   who had a gradient
    kept_gradients   gradients whose memory stays from step to step

Owns: staging buffers, partial sums, kept gradients. Knows nothing of gathers.
May import: device, layout, params.
"""
