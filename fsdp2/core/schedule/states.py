"""The states of a group's parameters, and the actions that change them.

    action          from                                     to
    start_unshard   SHARDED, RESHARDED, RETAINED             GATHERING
    finish_unshard  GATHERING                                UNSHARDED
    shard_smaller   UNSHARDED                                RESHARDED
    reshard         GATHERING, UNSHARDED, RESHARDED, HIDDEN  SHARDED
    hide            UNSHARDED                                HIDDEN, RETAINED or GRANTED
    show            HIDDEN, GRANTED                          UNSHARDED
    grant           RETAINED                                 GRANTED
    drop_retained   RETAINED, GRANTED                        SHARDED

The registered parameters are the gathered ones in UNSHARDED, rows of a smaller group in RESHARDED,
and the sharded ones in all other states. An action sets the state at its end, so that one that
raises is undone; only `start_unshard` sets it first (invariant I12).
"""

from __future__ import annotations

from enum import Enum

from fsdp2.core.errors import ShardingStateError, coded


class GroupState(Enum):
    """The state of a group's parameters.

    HIDDEN is for graphs, which may read what is gathered. RETAINED and GRANTED are for later uses:
    of GRANTED it is known that it is what the shards hold. ``is_sharded``: nothing in use reads
    what is gathered, if anything is.
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    RESHARDED = "resharded to a smaller group"
    HIDDEN = "gathered, with the sharded ones registered"
    RETAINED = "sharded, and retained until the shards are compared"
    GRANTED = "sharded, and retained for the next use"

    needs_gather: bool
    is_sharded: bool


SHARDED, GATHERING, UNSHARDED, RESHARDED, HIDDEN, RETAINED, GRANTED = GroupState
"""For the hot path, as in `fsdp2.core.device.streams`."""

for _state in GroupState:
    _state.needs_gather = _state in (SHARDED, RESHARDED, RETAINED)
    _state.is_sharded = _state in (SHARDED, RETAINED, GRANTED)


def refused(action: str, group: str, state: GroupState) -> ShardingStateError:
    """The error of an action, a method of `ParamGroup`, that ``state`` does not allow."""
    return coded(
        ShardingStateError,
        "wrong-state",
        f"cannot {action} the parameters of '{group}', which are {state.value}; after an "
        f"exception in forward or backward, call reset_iter_state() on the root module",
    )
