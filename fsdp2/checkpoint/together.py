"""Ranks that succeed together or fail together.

rank 0  action() ─ ok ───────┐               ┌─> CheckpointError("the disk is full …")
rank 1  action() ─ raises ───┴─ exchange ────┴─> CheckpointError("the disk is full …")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fsdp2.core.config import CheckpointError
from fsdp2.core.device.collectives import gather_objects, rank_and_size

T = TypeVar("T")


def is_first() -> bool:
    """Whether this is rank 0, or the only process."""
    return rank_and_size()[0] == 0


def together(what: str, action: Callable[[], T]) -> list[T]:
    """Run ``action`` on each rank; return what each returned, or raise on all of them.

    Args:
        what: the function that is called, and its folder, for the sentence.
        action: communicates with nobody.

    Raises:
        CheckpointError: it raised on a rank; the sentence is that of the first such rank.
    """
    rank, _ = rank_and_size()
    value: T | None = None
    sentence: str | None = None
    cause: Exception | None = None
    try:
        value = action()
    except CheckpointError as error:
        sentence, cause = str(error), error
    except Exception as error:  # whatever it is, no rank may wait for this one
        text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        said = CheckpointError(
            f"{what} failed on rank {rank} ({type(error).__name__}: {text}); nothing that was "
            f"complete has changed, so mend that and call it again"
        )
        sentence, cause = str(said), error
    try:
        told = gather_objects((sentence, value))
    except RuntimeError as error:
        raise CheckpointError(
            f"{what} lost a rank; what was complete before is complete still, so start the ranks "
            f"again and load"
        ) from error
    for sentence, _ in told:
        if sentence is not None:
            raise CheckpointError(sentence) from cause
    return [found for _, found in told]  # type: ignore[misc]  # of T, as nobody raised
