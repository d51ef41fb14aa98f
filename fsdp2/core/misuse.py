"""What torch says of a sharded parameter that was used as if it were gathered, in a sentence.

    a forward raises RuntimeError("aten.mm.default got mixed torch.Tensor and DTensor …")
      traceback ──> innermost frame that knows a module or a parameter ──> the sharded parameter
      error.args = one sentence: the parameter, its unit, the ways out, and what torch said

torch raises it in C++, below all that Python could shadow without a cost to each operation on a
DTensor. So it is put into words where it leaves a forward of ours: torch calls hooks that are
registered with ``always_call`` for an exception, too. Only then is anything here called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from torch import nn

from fsdp2.core.group import ParamGroup
from fsdp2.core.param import ShardedParam
from fsdp2.core.unit import Unit

_TORCHS = "got mixed torch.Tensor and DTensor"

_Known = dict[int, tuple[ShardedParam, ParamGroup]]
"""By id of what is registered while a parameter is sharded: the parameter and its group."""


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


def explain(error: BaseException, units: Iterable[Unit]) -> None:
    """Put torch's words on a sharded parameter among plain tensors into a sentence, in place.

    Nothing happens to other exceptions, nor if the parameter is none of ours.

    Args:
        error: what a forward raised.
        units: those below the root.
    """
    if type(error) is not RuntimeError or _TORCHS not in str(error):
        return
    known: _Known = {}
    for unit in units:
        for group in unit.groups:
            for param in group.params:
                for form in param.forms():
                    if form is not param.unsharded:
                        known[id(form)] = param, group
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    found = _find(frames, known)
    if found is not None:
        param, group = found
        error.args = (
            f"parameter '{param.name}' was used outside the forward of its unit '{group.name}', "
            f"where it is sharded; use it in that forward or in a method given to "
            f"register_fsdp_forward_method, call fully_shard on the module that holds it, or call "
            f"unshard() on the unit before (torch: {error})",
        )


def _find(frames: Sequence[FrameType], known: _Known) -> tuple[ShardedParam, ParamGroup] | None:
    """The parameter that the innermost frame with a module or a parameter of ours means."""
    for frame in reversed(frames):
        values: list[Any] = list(frame.f_locals.values())
        for value in values:
            if id(value) in known:
                return known[id(value)]
        code = frame.f_code
        words = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
        modules = [value for value in values if isinstance(value, nn.Module)]
        for module in modules:
            for name, param in module.named_parameters():
                parts = [part for part in name.split(".") if not part.isdigit()]
                if id(param) in known and words.issuperset(parts):
                    return known[id(param)]
        if modules:
            return None
    return None
