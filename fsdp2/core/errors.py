"""The exceptions that fsdp2 raises, and the code that each one has.

    raise coded(ValueError, "empty-list", "fully_shard got an empty list; pass at least one module")

    ValueError: fully_shard got an empty list; pass at least one module [empty-list]
    error.code == "empty-list"                  an entry of docs/errors.md, and its address there

A code names one message for good, whatever the message says in a later version.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

E = TypeVar("E", bound=Exception)

_CODE = re.compile(r" \[([a-z0-9-]+)\]$")


def coded(kind: Callable[[str], E], code: str, message: str) -> E:
    """An exception whose message ends in ``[code]``, and which has it as ``code``.

    Args:
        kind: its class.
        code: its id in docs/errors.md.
        message: one sentence without a full stop.

    Returns:
        The exception, to be raised.

    Example::

        try:
            fully_shard([])
        except ValueError as error:
            assert error.code == "empty-list"
    """
    return resaid(kind, f"{message} [{code}]")


def reword(error: Exception, code: str, message: str) -> None:
    """Give an exception that another library raised a message of ours, and its code."""
    said = coded(Exception, code, message)
    error.args, error.__dict__["code"] = said.args, code


def resaid(kind: Callable[[str], E], sentence: str) -> E:
    """An exception with a message that another one had, on this rank or another, and its code."""
    error = kind(sentence)
    found = _CODE.search(sentence)
    if found is not None:
        error.code = found[1]  # type: ignore[attr-defined]  # builtin exceptions have no such slot
    return error


class ShardingStateError(RuntimeError):
    """A call came at a moment in which its module cannot honour it.

    For example a parameter group that is asked to free parameters that are still on their way.
    The message names the module, the state it is in and the call that leads out of it.
    """


class RankMismatchError(ShardingStateError):
    """Ranks are about to run different collectives, which would hang.

    Raised by `fsdp2.debug(check_ranks=True)` on all ranks alike, before anything is launched. The
    message names the unit and the step that each rank is at.
    """


class CommunicationError(RuntimeError):
    """A collective of a unit failed, for example because a rank did not come in time.

    The message names the unit, the operation, whether forward or backward ran, and the iteration;
    ``__cause__`` is what the backend raised.
    """


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved, found or loaded.

    Raised by `fsdp2.checkpoint` on all ranks alike, with one sentence. Complete steps have not been
    changed then.
    """


class NonFiniteGradientError(FloatingPointError):
    """A unit's gradients hold NaN or infinity.

    Raised by `fsdp2.debug(check_nan=True)` on all ranks of the unit alike, before an optimizer can
    use them. The message names the parameters.
    """
