"""Where a group's parameters are, and what leads from where to where.

SHARDED ──start_unshard──> GATHERING ──finish_unshard──> UNSHARDED
   ^                        │     ^                       │     │
   └────────reshard─────────┴─────┼────────reshard────────┘     │
   │                        start_unshard                shard_smaller
   └────────reshard────────── RESHARDED <───────────────────────┘
"""

from __future__ import annotations

from enum import Enum

from fsdp2.core.config import ShardingStateError


class State(Enum):
    """Where a group's parameters are.

    Attributes:
        needs_gather: whether they have to be gathered before use.
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    RESHARDED = "resharded to a smaller group"

    # Enum's own is a function in Python; members are compared by identity anyway.
    __hash__ = object.__hash__

    needs_gather: bool

    def after(self, action: str, group: str) -> State:
        """The state in which ``action``, a method of `ParamGroup`, ends.

        It is set at the action's end, so that one that raises is undone.

        Args:
            action: its name.
            group: the group's name, for the message.
        """
        target = _MOVES[action].get(self)
        if target is None:
            raise ShardingStateError(
                f"cannot {action} the parameters of '{group}', which are {self.value}; after an "
                f"exception in forward or backward, call reset_iter_state() on the root module"
            )
        return target


_MOVES = {
    "start_unshard": {State.SHARDED: State.GATHERING, State.RESHARDED: State.GATHERING},
    "finish_unshard": {State.GATHERING: State.UNSHARDED},
    "shard_smaller": {State.UNSHARDED: State.RESHARDED},
    "reshard": {
        State.GATHERING: State.SHARDED,
        State.UNSHARDED: State.SHARDED,
        State.RESHARDED: State.SHARDED,
    },
}

for _state in State:
    _state.needs_gather = _state in _MOVES["start_unshard"]
