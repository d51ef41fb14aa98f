"""Ranks that succeed together or fail together.

rank 0  action() ─ ok ───────┐               ┌─> CheckpointError("the disk is full …")
rank 1  action() ─ raises ───┴─ exchange ────┴─> CheckpointError("the disk is full …")

A `Call` knows the participating ranks: those of one process group. `Call.together` exchanges over
that group, as training does; `Call.agree` over a separate one, so that a save can continue during
training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from fsdp2.core.errors import CheckpointError, checkpoint_error, resaid
from fsdp2.core.facts import (
    LostRankError,
    ProcessGroup,
    SideChannel,
    members_of,
    rank_and_size,
    side_channel,
)

T = TypeVar("T")
V = TypeVar("V")


@dataclass
class Outcome(Generic[T]):
    """The result of an action on one rank: a value, or a message."""

    value: T | None = None
    sentence: str | None = None


def lost_rank(what: str) -> CheckpointError:
    """The error that the other ranks raise."""
    return checkpoint_error(
        "ckpt-lost-rank",
        f"{what} lost a rank; everything that was complete before is unchanged, so start the "
        f"ranks again and load",
    )


class Call:
    """A call of a public function, and the participating ranks."""

    def __init__(self, what: str, group: ProcessGroup | None = None) -> None:
        members = members_of(group)
        if members is None:
            _refuse(what, group)
        self.what = what
        self.rank, self.size = members.rank, members.size
        self.members = members

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the group, or the only process."""
        return self.rank == 0

    def channel(self) -> SideChannel:
        """The channel for objects during training; created in the first call of these ranks."""
        return side_channel(self.members)

    def attempt(self, action: Callable[[], T]) -> tuple[Outcome[T], Exception | None]:
        """Run ``action``, which does not communicate; return its result and its exception."""
        try:
            return Outcome(action()), None
        except CheckpointError as error:
            return Outcome(sentence=str(error)), error
        except Exception as error:  # whatever it is, no rank may wait for this one
            text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            said = checkpoint_error(
                "ckpt-rank-failed",
                f"{self.what} failed on rank {self.rank} ({type(error).__name__}: {text}); "
                f"everything that was complete before is unchanged, so correct the cause and call "
                f"it again",
            )
            return Outcome(sentence=str(said)), error

    def together(self, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on each rank; return what each returned, or raise on all of them."""
        own, cause = self.attempt(action)
        try:
            told = self.members.gather(own)
        except RuntimeError as error:
            raise lost_rank(self.what) from error
        for outcome in told:
            if outcome.sentence is not None:
                sentence = outcome.sentence
                raise resaid(CheckpointError, sentence) from cause
        return [outcome.value for outcome in told]  # type: ignore[misc]  # of T, as nobody raised

    def agree(
        self,
        channel: SideChannel,
        own: Outcome[T],
        cause: Exception | None,
        decide: Callable[[list[T]], Sequence[V]],
    ) -> V:
        """Let rank 0 decide on what all ranks have come to; return its answer to this one."""
        answer: Outcome[V]
        try:
            told = channel.collect(own)
            answers: list[Outcome[V]] | None = None
            if told is not None:
                answers, raised = self._answers(told, decide)
                cause = cause or raised
            answer = channel.spread(answers)
        except LostRankError as error:
            raise lost_rank(self.what) from error
        if answer.sentence is not None:
            sentence = answer.sentence
            raise resaid(CheckpointError, sentence) from cause
        return answer.value  # type: ignore[return-value]  # of V, as nobody raised

    def _answers(
        self, told: Sequence[Outcome[T] | LostRankError], decide: Callable[[list[T]], Sequence[V]]
    ) -> tuple[list[Outcome[V]], Exception | None]:
        """On rank 0: the same sentence for all, or to each its answer."""
        for outcome in told:
            if isinstance(outcome, LostRankError):
                return [Outcome(sentence=str(lost_rank(self.what)))] * len(told), outcome
        for outcome in told:
            if isinstance(outcome, Outcome) and outcome.sentence is not None:
                return [Outcome(sentence=outcome.sentence)] * len(told), None
        values = [outcome.value for outcome in told if isinstance(outcome, Outcome)]
        whole, raised = self.attempt(lambda: decide(values))  # type: ignore[arg-type]  # none raised
        if whole.value is None:
            return [Outcome(sentence=whole.sentence)] * len(told), raised
        return [Outcome(answer) for answer in whole.value], None


def _refuse(what: str, group: object) -> NoReturn:
    """``new_group`` returns a number on ranks outside of the group."""
    if isinstance(group, (ProcessGroup, int)):
        raise checkpoint_error(
            "ckpt-not-in-group",
            f"{what} was called on rank {rank_and_size()[0]}, which is not in its process_group; "
            f"call it only on the ranks of the group, before the group is destroyed",
        )
    raise checkpoint_error(
        "ckpt-group-kind",
        f"{what} takes a process group of torch.distributed as process_group=, not a "
        f"{type(group).__qualname__}; pass mesh.get_group() of a mesh, or None for all ranks",
    )
