"""Replica groups that may fail: fsdp2 shards inside each, torchft averages between them.

steps       `attach`, `Steps`: averaged between groups, committed or dropped everywhere
loose       parameters of no unit, averaged at the end of backward
managers    the used part of torchft's manager
transport   `ShardTransport`: a rank's state, fetched by the same rank of another group
contents    the state of a rank as one value, and how a rank that joins loads it
image       a value as a head and bytes, and back
serving     serves an image from a thread, but not while it is written
fetching    fetches an image, piece by piece; continues after a broken connection
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
