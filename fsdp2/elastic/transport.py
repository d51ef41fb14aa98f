"""`ShardTransport`: what `torchft.Manager` takes as ``checkpoint_transport=``.

    a group that trains                              a group that joins
    start_quorum                                     start_quorum
      send_checkpoint    the image is open             recv_checkpoint    into host memory, checked
    forward, backward <── pieces, from the shards ──     │ untouched until all is there
    should_commit                                    should_commit, or start_quorum
      disallow_checkpoint   closed                     load_state_dict    in place
    optimizer.step()                                 optimizer.step()

Rank r of a group fetches from rank r of another, so nothing is gathered and other ranks do not
wait. If the quorum runs during the forward, the joining rank's forward runs meanwhile, on weights
that count for nothing, and autograd has saved them: so the pieces are not written in place as they
come. A fetch that fails leaves the rank as it was.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from fsdp2.checkpoint.retention import forget_load
from fsdp2.checkpoint.snapshots import Nested
from fsdp2.checkpoint.staging import watch_loads, watch_optimizers
from fsdp2.checkpoint.state import Optimizers, as_list
from fsdp2.core.errors import coded
from fsdp2.core.facts import ShardReaders
from fsdp2.elastic.contents import Contents
from fsdp2.elastic.fetching import Fetch
from fsdp2.elastic.image import Image, Layout
from fsdp2.elastic.serving import ShardServer

LOG = logging.getLogger("fsdp2.elastic")


class ShardTransport:
    """State of a rank, for the same rank of another group: fetched from memory, shard by shard.

    A group that joins fetches parameters, buffers, optimizer states and ``states`` while others
    compute. Nothing is gathered, no hook runs, no unit changes its state. The rank that is fetched
    from needs memory for one piece of 4 MiB and a copy of the buffers; the one that fetches needs
    host memory for its shards, until they are in place. Pieces have checksums; after a
    broken connection, the transfer continues. Before parameters are written, reads end
    (`disallow_checkpoint`).

    Args:
        model: sharded inside the group, in all groups alike.
        optimizer: over parameters of ``model``; or a list. Default ``None``: none.
        states: further objects by name, with ``state_dict()`` and ``load_state_dict()``: learning
            rate schedules, gradient scalers, ``EMA``. They change after a commit, and not in a
            forward. Default ``None``: none.
        host: the name under which other groups reach this machine. Default ``None``: its host name.
        port: to listen at. Default 0: any that is free.
        patience: the maximum seconds that a step waits for ranks that read the parameters that it
            writes. A reader that is cut off heals in a later step. Default 10.

    Example::

        transport = elastic.ShardTransport(model, optimizer, states={"schedule": schedule})
        manager = torchft.Manager(
            checkpoint_transport=transport,
            state_dict=transport.state_dict,
            load_state_dict=transport.load_state_dict,
            ...
        )
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        *,
        states: Mapping[str, Stateful] | None = None,
        host: str | None = None,
        port: int = 0,
        patience: float = 10.0,
    ) -> None:
        self._contents = Contents(model, as_list(optimizer), dict(states or {}))
        self._server = ShardServer(host or socket.gethostname(), port, patience)
        self._refused: ValueError | None = None
        self._unsent: Exception | None = None  # why `state_dict` had none
        watch_optimizers()
        watch_loads(model)

    # ---- for Manager(state_dict=…, load_state_dict=…)

    def state_dict(self) -> Nested:
        """Views of what this rank has; safe at any time between two steps, in any thread.

        An error is told to the rank that asks: an exception would drop this rank's step.
        """
        _wait_for_device()  # for the last step's writes
        try:
            self._unsent = None
            return self._contents.value()
        except Exception as error:  # of the user's objects, too
            self._unsent = error
            return {}

    def load_state_dict(self, state: Nested) -> None:
        """Take over what `recv_checkpoint` has brought; an interrupted iteration is given up.

        Raises:
            ShardingStateError: parameters are full, inside `fsdp2.gathered`.
        """
        self._contents.put(state)
        forget_load(self._contents.model)

    # ---- for Manager(checkpoint_transport=…)

    def metadata(self) -> str:
        """The address of this rank's state."""
        return self._server.address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Nested, timeout: timedelta
    ) -> None:
        """Let other ranks read views of `state_dict`; the rank that asks receives an error."""
        layout: Layout = {}
        try:
            layout = self._contents.layout()
            if self._unsent is not None:
                raise self._unsent
            image = Image.of(step, state_dict, layout)
        except Exception as error:
            LOG.warning("this rank cannot send its state to a group that joins: %s", error)
            image = Image.of_refusal(step, layout, str(error))
        _wait_for_device()  # for the copies: other streams send them
        ShardReaders.waiting.append(self.disallow_checkpoint)
        self._server.open(image)

    def disallow_checkpoint(self) -> None:
        """Return when the state of `send_checkpoint` is not read any more: it may be written (I18).

        Raises:
            ValueError: `recv_checkpoint` has found that this rank can never take over what groups
                that train have.
        """
        self._stop_waiting()
        self._server.close()
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> Nested:
        """Fetch what the same rank of another group has at a step; changes nothing here.

        Raises:
            ValueError: the source has a different model, optimizer or sharding, or cannot send;
                raised again at the end of the step, in the thread that trains.
            CommunicationError: the source is lost, or has continued with the next step.
        """
        fetch = Fetch(metadata, step, timeout.total_seconds())
        head = fetch.head()
        try:
            _check_sent(head.refusal)
            _check_alike(self._contents.layout(), head.layout)
            return head.value(fetch.tensors(head), self._contents.meshes())
        except ValueError as error:
            self._refused = error
            raise

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving."""
        self._stop_waiting()
        self._server.shutdown()

    def _stop_waiting(self) -> None:
        while self.disallow_checkpoint in ShardReaders.waiting:
            ShardReaders.waiting.remove(self.disallow_checkpoint)


def _wait_for_device() -> None:
    """Return when this process's accelerator has done all that it was asked for."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _check_sent(refusal: str) -> None:
    if refusal:
        raise coded(
            ValueError,
            "elastic-not-sent",
            f"the group that this one joins cannot send its state ({refusal}); correct that in "
            f"all groups, and start them from a checkpoint",
        )


def _check_alike(own: Layout, theirs: Layout) -> None:
    """Raise what differs first."""
    names = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
    if names:
        name = names[0]
        raise coded(
            ValueError,
            "elastic-unlike",
            f"this group cannot join: '{name}' is {own.get(name, 'missing')} here and "
            f"{theirs.get(name, 'missing')} in the group that it joins; start groups with equally "
            f"many ranks and the same sharding, or start all from a checkpoint, which any number "
            f"of ranks can load",
        )
