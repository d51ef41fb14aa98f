"""Ranks that succeed together or fail together.

rank 0  action() ─ ok ───────┐               ┌─> CheckpointError("the disk is full …")
rank 1  action() ─ raises ───┴─ exchange ────┴─> CheckpointError("the disk is full …")

`together` exchanges over the default process group, as training does; `agree` over a group of its
own, so that a save may go on beside training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fsdp2.core.config import CheckpointError
from fsdp2.core.device.process_groups import rank_and_size
from fsdp2.ranks.channels import LostRankError, SideChannel, gather_objects, side_channel

T = TypeVar("T")
V = TypeVar("V")


def is_first() -> bool:
    """Whether this is rank 0, or the only process."""
    return rank_and_size()[0] == 0


@dataclass
class Outcome(Generic[T]):
    """What an action came to on one rank: a value, or a sentence."""

    value: T | None = None
    sentence: str | None = None


def attempt(what: str, action: Callable[[], T]) -> tuple[Outcome[T], Exception | None]:
    """Run ``action``, which communicates with nobody; what it came to, and what it raised.

    Args:
        what: the function that was called, and its folder, for the sentence.
        action: what to run.
    """
    try:
        return Outcome(action()), None
    except CheckpointError as error:
        return Outcome(sentence=str(error)), error
    except Exception as error:  # whatever it is, no rank may wait for this one
        text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        said = CheckpointError(
            f"{what} failed on rank {rank_and_size()[0]} ({type(error).__name__}: {text}); nothing "
            f"that was complete has changed, so mend that and call it again"
        )
        return Outcome(sentence=str(said)), error


def lost_rank(what: str) -> CheckpointError:
    """What the others raise."""
    return CheckpointError(
        f"{what} lost a rank; what was complete before is complete still, so start the ranks "
        f"again and load"
    )


def together(what: str, action: Callable[[], T]) -> list[T]:
    """Run ``action`` on each rank; return what each returned, or raise on all of them.

    Raises:
        CheckpointError: it raised on a rank; the sentence is that of the first such rank.
    """
    own, cause = attempt(what, action)
    try:
        told = gather_objects(own)
    except RuntimeError as error:
        raise lost_rank(what) from error
    for outcome in told:
        if outcome.sentence is not None:
            sentence = outcome.sentence
            raise CheckpointError(sentence) from cause
    return [outcome.value for outcome in told]  # type: ignore[misc]  # of T, as nobody raised


def agree(
    what: str,
    channel: SideChannel,
    own: Outcome[T],
    cause: Exception | None,
    decide: Callable[[list[T]], Sequence[V]],
) -> V:
    """Let rank 0 decide on what all ranks have come to; return its answer to this one.

    Args:
        what: as of `attempt`.
        channel: to rank 0 and back.
        own: of this rank.
        cause: what this rank has raised.
        decide: on rank 0, of each rank's value, an answer to each; it may raise.

    Raises:
        CheckpointError: a rank raised, or ``decide`` did: the same sentence on all ranks. Or a rank
            is gone.
    """
    answer: Outcome[V]
    try:
        told = channel.collect(own)
        answers: list[Outcome[V]] | None = None
        if told is not None:
            answers, raised = _answers(what, told, decide)
            cause = cause or raised
        answer = channel.spread(answers)
    except LostRankError as error:
        raise lost_rank(what) from error
    if answer.sentence is not None:
        sentence = answer.sentence
        raise CheckpointError(sentence) from cause
    return answer.value  # type: ignore[return-value]  # of V, as nobody raised


def _answers(
    what: str,
    told: Sequence[Outcome[T] | LostRankError],
    decide: Callable[[list[T]], Sequence[V]],
) -> tuple[list[Outcome[V]], Exception | None]:
    """On rank 0: the same sentence for all, or to each its answer."""
    for outcome in told:
        if isinstance(outcome, LostRankError):
            return [Outcome(sentence=str(lost_rank(what)))] * len(told), outcome
    for outcome in told:
        if isinstance(outcome, Outcome) and outcome.sentence is not None:
            return [Outcome(sentence=outcome.sentence)] * len(told), None
    values = [outcome.value for outcome in told if isinstance(outcome, Outcome)]
    whole, raised = attempt(what, lambda: decide(values))  # type: ignore[arg-type]  # nobody raised
    if whole.value is None:
        return [Outcome(sentence=whole.sentence)] * len(told), raised
    return [Outcome(answer) for answer in whole.value], None


__all__ = ["Outcome", "agree", "attempt", "is_first", "lost_rank", "side_channel", "together"]
