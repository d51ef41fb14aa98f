"""The states of a group's parameters, and the actions that change them.

SHARDED ──start_unshard──> GATHERING ──finish_unshard──> UNSHARDED
   ^                        │     ^                       │     │
   └────────reshard─────────┴─────┼────────reshard────────┘     │
   │                        start_unshard                shard_smaller
   ├────────reshard────────── RESHARDED <───────────────────────┤
   │                                                         hide, show
   └────────reshard─────────────────────────── HIDDEN <─────────┘

An action sets the state at its end, so that one that raises is undone; only `start_unshard` sets it
first (invariant I12).
"""

from __future__ import annotations

from enum import Enum

from fsdp2.core.errors import ShardingStateError, coded


class GroupState(Enum):
    """The state of a group's parameters.

    Attributes:
        needs_gather: whether they must be gathered before use.
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    RESHARDED = "resharded to a smaller group"
    HIDDEN = "gathered, with the sharded ones registered"

    needs_gather: bool


SHARDED, GATHERING, UNSHARDED, RESHARDED, HIDDEN = GroupState
"""For the hot path, as in `fsdp2.core.device.streams`."""

for _state in GroupState:
    _state.needs_gather = _state in (SHARDED, RESHARDED)


def refused(action: str, group: str, state: GroupState) -> ShardingStateError:
    """The error of an action that ``state`` does not allow.

    Args:
        action: its name, of a method of `ParamGroup`.
        group: the group's name.
        state: where the group's parameters are.
    """
    return coded(
        ShardingStateError,
        "wrong-state",
        f"cannot {action} the parameters of '{group}', which are {state.value}; after an "
        f"exception in forward or backward, call reset_iter_state() on the root module",
    )
