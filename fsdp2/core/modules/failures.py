"""Exceptions that leave a forward or a backward of sharded modules: told to who can explain them.

torch's words on a parameter that is sharded, or freed, mean nothing to who wrote the model. Rooms
above core change the exception in place (`fsdp2.checks.explain`); core raises it in any case.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.autograd.graph import Node

from fsdp2.core.notices import Notice
from fsdp2.core.schedule.unit import Unit

in_forward: Notice[[BaseException, Iterable[Unit]]] = Notice()
"""Called with what a forward raised, and the units below its root."""

in_backward: Notice[[RuntimeError, Iterable[Node], Iterable[Unit]]] = Notice()
"""Called with what a backward raised, the nodes that it would run, and all units."""
