"""nn.Module and autograd: they drive the schedule.

    registry       which module has which unit, and which is a root; the walk over modules
    hooks          on modules and gradients: with engine, the only code that uses autograd's engine
    saved          hooks plus saved-tensor hooks, for devices whose storages cannot be resized
    engine         where Python starts a backward: side doors; explanations of its exceptions
    registrations  parameters that modules register after fully_shard, or that units share
    optimizers     the parameters that optimizers hold when they step
    frames         the running code, according to the interpreter's frames
    containers     walks through inputs and outputs of modules
    dynamo         marks that keep torch.compile out of functions

Owns: the hooks on modules, and with them the units.
May import: every room below.
"""
