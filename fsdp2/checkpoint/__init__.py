"""A folder of steps that stays intact after a crash at any moment, in DCP's file format.

The formats that fsdp2 reads by itself, and why, are those of decision 32.

saving     `save`, `async_save`: written to a temporary folder, synced, listed, renamed
items      DCP's files: a rank's items, and the index, which is read without running code
staging    copies to host memory, during training
snapshots  `snapshot`: the current contents, read without any change
loading    `load`, `read_extra`: compared on all ranks before anything is written
exporting  `export`: a folder that Hugging Face's libraries load, written by all ranks at once
pretrained `load_pretrained`: such a folder into a model, each rank its own slices
retention  `Keep`, `best_step`: which steps to keep, and which ones a branch replaces
folder     `steps`, `replaced`, `verify`, `unfinished`, `remove`; the manifest of a step
stores     the storage of steps, its operations, and the implementation on a disk
remote     the implementation for URLs, with fsspec: no renames, no syncs
state      names of saved entries, and their differences
values     values other than tensors, with their types, as JSON
reading    a step's items, by their owner, with DCP's reader, which runs no code here
optimizers states and options of optimizers, found by parameter name
converting `convert`: from any kind of checkpoint to any other, streamed
contents   model, optimizer by name and the rest, of any kind; slices of mapped files
archives   files of torch.save: read by torch without running code, written tensor by tensor
tensors    the safetensors format by offsets: slices written and items read in place
preemption `Preemption`: a signal before the end, and ranks that agree when to exit
consensus  ranks that succeed together or fail together
owning     one job at a time in a folder: by a lock, or by a lease
files      all file operations, in one module

The room imports public modules, `fsdp2.full` and ``torch.distributed.checkpoint``; ``fsdp2
checkpoint`` is its command. It adds nothing to a step of training.
"""

from fsdp2.checkpoint.converting import Converted, convert
from fsdp2.checkpoint.exporting import Exported, export
from fsdp2.checkpoint.folder import remove, replaced, steps, unfinished, verify
from fsdp2.checkpoint.loading import Loaded, load, read_extra
from fsdp2.checkpoint.preemption import Preemption
from fsdp2.checkpoint.pretrained import load_pretrained
from fsdp2.checkpoint.retention import Keep, best_step
from fsdp2.checkpoint.saving import Saving, async_save, save
from fsdp2.checkpoint.snapshots import Snapshot, snapshot
from fsdp2.checkpoint.state import Differences
from fsdp2.sharding.wire_states import WireState

__all__ = [
    "Converted",
    "Differences",
    "Exported",
    "Keep",
    "Loaded",
    "Preemption",
    "Saving",
    "Snapshot",
    "WireState",
    "async_save",
    "best_step",
    "convert",
    "export",
    "load",
    "load_pretrained",
    "read_extra",
    "remove",
    "replaced",
    "save",
    "snapshot",
    "steps",
    "unfinished",
    "verify",
]
