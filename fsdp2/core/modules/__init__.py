"""nn.Module and autograd: what drives the schedule.

    registry       which module has which unit, and what it was made with
    walks          the walk over modules, and which of them belong to a unit
    roots          which module is a root, and which units it serves
    hooks          on modules and gradients: with engine, the only code that knows autograd's engine
    saved          hooks with others on what autograd saves, where storages cannot be emptied
    engine         where Python starts a backward: side doors; who can explain what it raises
    registrations  what modules register after fully_shard
    ties           parameters that modules of several units register
    optimizers     what optimizers hold when they step
    frames         what runs now, as the interpreter's frames tell it
    failures       exceptions that leave a forward or a backward: told to who can explain them
    containers     walks through what modules take and return
    dynamo         marks that keep torch.compile out of functions

Owns: the hooks on modules, and with them the units.
May import: every room below.
"""
