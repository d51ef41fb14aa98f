"""Exceptions that leave a forward or a backward of sharded modules, for rooms that explain them.

torch's message about a sharded or freed parameter does not help the author of the model. Rooms
above core change the exception in place (`fsdp2.checks.explain`); core raises it in any case.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.autograd.graph import Node

from fsdp2.core.notices import Notice
from fsdp2.core.schedule.unit import Unit

in_forward: Notice[[BaseException, Iterable[Unit]]] = Notice()
"""Called with the exception of a forward, and the units below its root."""

in_backward: Notice[[RuntimeError, Iterable[Node], Iterable[Unit]]] = Notice()
"""Called with the exception of a backward, the nodes that it would run, and all units."""
