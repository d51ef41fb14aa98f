"""A layer around groups that a user has unsharded: contents decide whether he has written them.

    unshard()    note                    a fingerprint of what is gathered
    a forward    reshard                 another one, if it frees: the device compares
    reshard()    take_back(stays=False)  the host reads the result: a write, which is lost, raises

Version counters show no write through ``.data``. Each rank compares what it has in memory, and
communicates nothing. Only the user's `reshard()` makes the host wait. A unit that no user unshards
has no such layer.
"""

from __future__ import annotations

import torch

from fsdp2.core.device.fingerprint import bind_fingerprint
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.params.param import gathered_name, refuse_written
from fsdp2.core.schedule.layers import GroupOperations, Layer
from fsdp2.core.schedule.states import UNSHARDED


class ClaimedGroup(Layer):
    """Knows what was gathered while it is unsharded, and what was lost when it was freed."""

    __slots__ = ("_before", "_lost")

    height = 2

    def __init__(self, below: GroupOperations) -> None:
        super().__init__(below)
        self._before: torch.Tensor | None = None
        self._lost: torch.Tensor | None = None

    def note(self) -> None:
        """Note what is gathered, unless it is noted already."""
        bound = self.base.bound
        if self._before is not None or self.is_alias or bound is None:
            return
        if self.state is not UNSHARDED:  # a forward has freed it before the user waited
            return
        if bound.watched and not bound.watched[0].is_meta:
            self._before = self._fingerprint()

    def take_back(self, stays: bool = True) -> None:
        """Raise if it was written and freed, or is to be freed.

        Raises:
            ShardingStateError: names the parameters, one of which was written.
        """
        if not stays:
            self._compare()
        lost = self._lost
        if not stays:
            self._lost = None  # another reshard() drops the write
        self.below.take_back(stays)
        if not stays and lost is not None and bool(lost):
            bound = self.base.bound
            assert bound is not None
            refuse_written("' or '".join(str(gathered_name(param)) for param in bound.watched))

    def _compare(self) -> None:
        before, self._before = self._before, None
        in_backward = torch._C._current_graph_task_id() != -1
        outdated = self.state is not UNSHARDED or self.base.is_outdated
        if before is None or outdated or in_backward:
            return
        lost = (before != self._fingerprint()).any()
        self._lost = lost if self._lost is None else lost | self._lost

    def _fingerprint(self) -> torch.Tensor:
        bound = self.base.bound
        assert bound is not None
        return bind_fingerprint([local_of(param.detach()) for param in bound.watched])()

    def reshard(self) -> None:
        """Compare, then free."""
        self._compare()
        self.below.reshard()

    def shard_smaller(self) -> None:
        """As `reshard`, to a smaller group's rows."""
        self._compare()
        self.below.shard_smaller()

    def abandon(self) -> None:
        """Free, whatever was written."""
        self._before = self._lost = None
        self.below.abandon()
