"""The exceptions of fsdp2 that programs catch; other errors are Python's own classes.

Each has a ``code`` that names its message (`fsdp2.core.errors`).
"""

from fsdp2.core.errors import (
    CheckpointError,
    CommunicationError,
    NonFiniteGradientError,
    RankMismatchError,
    ShardingStateError,
)

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "NonFiniteGradientError",
    "RankMismatchError",
    "ShardingStateError",
]
