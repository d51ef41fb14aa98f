"""A folder of steps that a crash at any moment leaves whole, in the files of DCP.

saving     `save`, `async_save`: written beside, hashed, synced, renamed
staging    copies to host memory, beside training
snapshot   `snapshot`: what is there, looked at without touching it
loading    `load`: compared on all ranks before anything is written
folder     `steps`, `verify`, `unfinished`, `remove`; the manifest that makes a step one
state      what is saved under which name, and what differs; DCP's reader, which runs no code
together   ranks that succeed together or fail together
files      all that is done to files, in one place

The room stands on public modules and on ``torch.distributed.checkpoint``; ``python -m
fsdp2.checkpoint`` is `__main__`. It adds nothing to a step of training.
"""

from fsdp2.checkpoint.folder import remove, steps, unfinished, verify
from fsdp2.checkpoint.loading import Loaded, load
from fsdp2.checkpoint.saving import Saving, async_save, save
from fsdp2.checkpoint.snapshot import Snapshot, snapshot
from fsdp2.checkpoint.state import Differences

__all__ = [
    "Differences",
    "Loaded",
    "Saving",
    "Snapshot",
    "async_save",
    "load",
    "remove",
    "save",
    "snapshot",
    "steps",
    "unfinished",
    "verify",
]
