"""The exceptions that fsdp2 raises, and the code that each one has.

    raise coded(ValueError, "empty-list", "fully_shard got an empty list; pass at least one module")

    ValueError: fully_shard got an empty list; pass at least one module [empty-list]
    error.code == "empty-list"                  its address on the docs site's page of errors

A code names one message permanently, also if a later version changes its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

E = TypeVar("E", bound=Exception)


def coded(kind: Callable[[str], E], code: str, message: str) -> E:
    """An exception of class ``kind`` whose message, one sentence without a full stop, ends in
    ``[code]``, and which has it as ``code``. The docs site reads the code from the call.
    """
    return resaid(kind, f"{message} [{code}]")


def reword(error: Exception, code: str, message: str) -> None:
    """Give an exception that another library raised a message of ours, and its code."""
    said = coded(Exception, code, message)
    error.args, error.__dict__["code"] = said.args, code


def resaid(kind: Callable[[str], E], sentence: str) -> E:
    """An exception with a message that another one had, on this rank or another, and its code."""
    error = kind(sentence)
    if found := re.search(r" \[([a-z0-9-]+)\]$", sentence):
        error.code = found[1]  # type: ignore[attr-defined]  # builtin exceptions have no such slot
    return error


class ShardingStateError(RuntimeError):
    """A call is not possible in the current state of its module.

    For example, a parameter group cannot reshard parameters whose all-gather is still running. The
    message names the module, its state and the call that resolves it.
    """


class RankMismatchError(ShardingStateError):
    """Ranks are about to run different collectives, which would hang.

    `fsdp2.debug(check_ranks=True)` raises it on all ranks before anything is launched. The message
    names the unit and the step of each rank.
    """


class CommunicationError(RuntimeError):
    """A collective of a unit failed, for example because a rank did not arrive in time.

    The message names the unit, the operation, whether forward or backward ran, and the iteration;
    ``__cause__`` is the backend's exception.
    """


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved, found or loaded.

    `fsdp2.checkpoint` raises it on all ranks with the same message. Complete steps are unchanged.

    Example::

        try:
            fsdp2.checkpoint.load("run", model, optimizer)
        except fsdp2.errors.CheckpointError as error:
            print(error)  # there is no step yet
    """


def checkpoint_error(code: str, message: str) -> CheckpointError:
    """A `coded` one."""
    return coded(CheckpointError, code, message)


class NonFiniteGradientError(FloatingPointError):
    """A unit's gradients contain NaN or infinity.

    `fsdp2.debug(check_nan=True)` raises it on all ranks of the unit before an optimizer can use the
    gradients. The message names the parameters.
    """
