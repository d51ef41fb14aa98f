"""Replica groups that come and go: fsdp2 shards inside each, torchft averages between them.

steps       `attach`, `Steps`: averaged between groups, committed or dropped everywhere
loose       parameters that no unit has, averaged where a backward ends
managers    what is asked of a manager of groups: torchft's, or a stand-in
transport   `ShardTransport`: a rank's state, fetched by the same rank of another group
contents    what a rank has, as one value, and how a rank that joins takes it over
image       a value as a head and bytes, and back
serving     serves an image from a thread, and never while it is written
fetching    fetches one, piece by piece, on after a broken connection
batches     `batch_number`, `Batches`, `is_writer`: which group trains on what, and which writes

torchft is an extra (``pip install torchft``). This room does not import it: the user hands
in a `torchft.Manager`. ``import fsdp2`` does not load this room.
"""

from fsdp2.elastic.batches import Batches, batch_number, is_writer
from fsdp2.elastic.managers import Manager
from fsdp2.elastic.steps import Steps, attach
from fsdp2.elastic.transport import ShardTransport

__all__ = [
    "Batches",
    "Manager",
    "ShardTransport",
    "Steps",
    "attach",
    "batch_number",
    "is_writer",
]
