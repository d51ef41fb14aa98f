"""Running reductions, and the window of memory that they may hold (invariant I7).

holding ── COMPUTE waits for the reduce-scatter ──> summing ── COMPUTE waits for the all-reduce
   └────── those that end in CPU memory ──────────> arriving ── the host waits, and delivers
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.core.device.streams import COMPUTE, Streams
from fsdp2.core.params.param import ShardedParam
from fsdp2.core.reduce.reduction import PendingReduction


class InFlight:
    """A scheduler's running reductions, of which a ``window`` of units may hold their inputs:
    ``holding``, the oldest first, then ``summing`` in an all-reduce, or ``arriving`` on the host.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.window = 1
        self.holding: list[PendingReduction] = []
        self.summing: list[PendingReduction] = []
        self.arriving: list[PendingReduction] = []

    def make_room(self, params: Sequence[ShardedParam], first: bool) -> None:
        """Before a group reduces: limit the reductions that hold inputs, and end its own last one,
        which may still read the buffer that stages gradients; a unit's groups, from its ``first``,
        are one.
        """
        if first:
            self.retire(keep=self.window - 1)
        while any(pending.params is params for pending in self.holding):
            # Oldest first: earlier ones are on the same lane, and end before the group's own.
            self.retire(keep=len(self.holding) - 1)

    def retire(self, keep: int) -> None:
        """Let COMPUTE wait for the oldest reduce-scatters until ``keep`` hold their inputs."""
        while len(self.holding) > keep:
            pending = self.holding.pop(0)
            self.streams.wait(COMPUTE, pending.scattered, "compute after reduction")
            pending.release_inputs()
            if pending.host:
                self.arriving.append(pending)
            # No all-reduce followed: the wait above was for everything.
            if pending.done is pending.scattered:
                pending.release_rest()
            else:
                # At most one all-reduce is not waited for (I7).
                self.finish_all_reduces()
                self.summing.append(pending)

    def finish_all_reduces(self) -> None:
        """Let COMPUTE wait for running all-reduces, whose inputs may then be freed."""
        while self.summing:
            pending = self.summing.pop(0)
            self.streams.wait(COMPUTE, pending.done, "compute after all-reduce")
            pending.release_rest()

    def order_after_hooks(self) -> None:
        """Make all-gathers wait for changes of shards by users' hooks after these reductions:
        COMPUTE waits, which reads shards itself on one rank; the side lanes always wait for it.
        """
        for pending in (*self.summing, *self.holding):
            if any(param.has_grad_hooks for param in pending.params):
                self.streams.wait(COMPUTE, pending.done, "compute after hooks on gradients")

    def deliver(self) -> None:
        """Let the host wait for copies to it, and deliver them."""
        arriving, self.arriving = self.arriving, []
        for pending in arriving:
            self.streams.synchronize(pending.done, "host after gradients")
            pending.deliver()
