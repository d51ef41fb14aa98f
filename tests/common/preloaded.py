"""What every rank process imports, once, in the process that they are forked from.

A frozen object is not looked at by the garbage collector of a rank, whose looks would copy the
memory that all share.
"""

import gc
import importlib
import pkgutil

import fsdp2

OURS = ("checkpoint", "core", "elastic", "fsdp1", "full", "graph", "optim", "sharding", "tracing")
"""Rooms of fsdp2 that many tests on ranks use."""

TORCHS = (
    "torch._dynamo.backends.inductor",  # a first compile, whatever its backend, loads it
    "torch._inductor.lowering",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)

for _name in ("pytest", "tests.common.compiling", "tests.common.meshes", *TORCHS):
    importlib.import_module(_name)
for _room in OURS:
    for _module in pkgutil.walk_packages([f"{fsdp2.__path__[0]}/{_room}"], f"fsdp2.{_room}."):
        importlib.import_module(_module.name)
gc.collect()
gc.freeze()
