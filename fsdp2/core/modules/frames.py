"""The running code, according to the interpreter's frames: they are gone when an exception ends a
call.

    forward_method   a method that runs between a unit's hooks, as its forward does
    running_calls    how many calls of a module, and of such methods, are running
    failure_of       the exception for which torch calls a hook that it always calls

Frames are read only in unusual cases: a unit that may run inside itself, a forward without an
output. They are identified by their code, never by a name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType

from torch import nn

from fsdp2.core.modules.dynamo import see_through
from fsdp2.core.modules.registry import UnitRecord

_wrappers: list[CodeType] = []  # of `forward_method`: one, however many methods there are


def forward_method(record: UnitRecord, method: Callable[..., object]) -> Callable[..., object]:
    """``method``, a bound method, run between the hooks of its module's unit."""

    def run_between_hooks(self: nn.Module, *args: object, **kwargs: object) -> object:
        args, kwargs = record.pre_forward(self, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except Exception as error:
            record.forward_raised(error)
            raise
        return record.post_forward(self, args, output)

    _wrappers[:] = [run_between_hooks.__code__]
    return functools.update_wrapper(see_through(run_between_hooks), method)


def running_calls(module: nn.Module, record: UnitRecord) -> int:
    """How many calls of ``module`` are running, this one included, and of its `forward_method`s.

    For one that an exception has ended there is no frame any more.
    """
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is nn.Module._wrapped_call_impl.__code__:
            count += frame.f_locals["self"] is module
        elif any(code is wrapper for wrapper in _wrappers):
            count += frame.f_locals["record"] is record
        frame = frame.f_back
    return count


def failure_of(module: nn.Module) -> BaseException | None:
    """The exception for which torch calls a hook of ``module`` that it always calls.

    ``None`` where its forward has returned: another exception may be handled meanwhile, around
    the call of the module. That one came through frames that are over, or through others than the
    module's own.
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
