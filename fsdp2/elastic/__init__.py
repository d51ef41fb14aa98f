"""Replica groups that come and go: fsdp2 shards inside each, torchft averages between them.

    steps      `attach` and `Steps`: steps begun, averaged, and committed or dropped everywhere
    loose      parameters that no unit has, averaged where a backward ends
    managers   what is asked of a manager of groups: torchft's, or a stand-in

torchft is an extra (``pip install fsdp2[elastic]``). This room does not import it: the user hands
in a `torchft.Manager`. ``import fsdp2`` does not load this room.
"""

from fsdp2.elastic.managers import Manager
from fsdp2.elastic.steps import Steps, attach

__all__ = ["Manager", "Steps", "attach"]
