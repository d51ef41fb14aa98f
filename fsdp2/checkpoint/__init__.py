"""A folder of steps that a crash at any moment leaves whole, in the files of DCP.

saving     `save`, `async_save`: written beside, synced, listed with checksums, renamed
items      DCP's files, written: a rank's items, and the index
staging    copies to host memory, beside training
snapshots  `snapshot`: what is there, looked at without touching it
loading    `load`, `read_extra`: compared on all ranks before anything is written
exporting  `export`: a folder that Hugging Face's libraries load, written by all ranks at once
transforms tensors of a model that are made of a step's: transposed, joined, cut
pretrained `load_pretrained`: such a folder into a model, each rank its own slices
unsaved    buffers that no file has, as their modules' own code sets them
retention  `Keep`, `best_step`: which steps stay, and what a branch replaces
binaries   the same of pytorch_model*.bin, read without running code
folder     `steps`, `replaced`, `verify`, `unfinished`, `remove`; the manifest that makes a step one
stores     where steps are kept, what is done there, and the one on a disk
remote     the one behind a URL, which fsspec reaches: no renames, no syncs
state      what is saved under which name, and what differs; DCP's reader, which runs no code
values     what is no tensor, with its types, as JSON
reading    a step's items, by what they belong to
optimizers states and options of optimizers, found by parameter name
converting `convert`: from any kind of checkpoint to any other, streamed
contents   model, optimizer by name and the rest, of any kind; files of ranks joined
archives   files of torch.save, read without running code and written tensor by tensor
index      DCP's index: read, and checked before anything is made of it
pickles    pickles, by an interpreter that reaches new containers alone
boxes      pieces that cover a tensor, each element once
entries    tensors that stay in their files, read block by block
tensors    the safetensors format by offsets: slices written and read at their places
consensus  ranks that succeed together or fail together
owning     one job at a time in a folder: by a lock, or by a lease
files      all that is done to files, in one place

The room stands on public modules, on `fsdp2.full` and on ``torch.distributed.checkpoint``;
``fsdp2 checkpoint`` is its command. It adds nothing to a step of training.
"""

from fsdp2.checkpoint.converting import Converted, convert
from fsdp2.checkpoint.exporting import Exported, export
from fsdp2.checkpoint.folder import remove, replaced, steps, unfinished, verify
from fsdp2.checkpoint.loading import Loaded, load, read_extra
from fsdp2.checkpoint.pretrained import load_pretrained
from fsdp2.checkpoint.retention import Keep, best_step
from fsdp2.checkpoint.saving import Saving, async_save, save
from fsdp2.checkpoint.snapshots import Snapshot, snapshot
from fsdp2.checkpoint.state import Differences

__all__ = [
    "Converted",
    "Differences",
    "Exported",
    "Keep",
    "Loaded",
    "Saving",
    "Snapshot",
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
