"""The running code, according to the interpreter's frames, which end when an exception ends a call.

    running_calls    how many calls of a module, and of such methods, are running
    failure_of       the exception for which torch calls a hook that it always calls

Frames are read only in unusual cases: a unit that may run inside itself, a forward without an
output. They are identified by their code, never by a name.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from torch import nn

FORWARD_METHODS: set[CodeType] = set()
"""The code of methods that run between a unit's hooks, as its forward does."""


def running_calls(module: nn.Module, record: object) -> int:
    """How many calls of ``module`` and of its forward methods run, this one included."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is nn.Module._wrapped_call_impl.__code__:
            count += frame.f_locals["self"] is module
        elif code in FORWARD_METHODS:
            count += frame.f_locals["record"] is record
        frame = frame.f_back
    return count


def failure_of(module: nn.Module) -> BaseException | None:
    """The exception for which torch calls a hook of ``module`` that it always calls.

    ``None`` where its forward has returned: an exception that is handled around the call of the
    module came through frames that are over, or through others than the module's own.
    """
    error = sys.exc_info()[1]
    trace = None if error is None else error.__traceback__
    calls = set()
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module:
            calls.add(frame)
    running: FrameType | None = sys._getframe(1)
    while calls and running is not None:
        if running in calls:
            return error
        running = running.f_back
    return None
