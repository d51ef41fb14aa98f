"""torch's error for a parameter that was used while sharded or freed, explained in a sentence.

torch raises the error in C++, below any Python code that could catch it without a cost per
operation on a DTensor. fsdp2 therefore explains it when it leaves a forward of a unit: torch also
calls hooks that are registered with ``always_call`` for an exception. Code in this module runs only
then. Its user is everyone whose code reads `model.head.weight` outside of a unit: torch's words
name an operator, and neither the parameter nor the unit (tests/sharding/test_misuses.py).
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, TracebackType

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

from fsdp2.core.errors import reword
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.modules import engine, hooks
from fsdp2.core.modules.engine import schedulers
from fsdp2.core.modules.registry import note_calls, record_of_unit
from fsdp2.core.params.param import ShardedParam, is_extended
from fsdp2.core.progress import running_tracer, tracing_error
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.unit import Unit

_TORCHS = "got mixed torch.Tensor and DTensor"

_FREED = ("out of bounds for storage of size 0", "its data is not allocated yet")
"""torch's words on a tensor whose storage has no memory (2.11 to 2.15)."""

_OURS = " (torch: "
"""Precedes torch's message in a reworded one."""

_SEEN = "_fsdp2_seen"
"""Attribute of an exception that has left a unit. When it leaves those around it, parameters that
were gathered where it was raised are sharded again, and would seem to be the cause."""

_MOST = 3
"""The number of parameters to name if the code does not show which one it is."""

_Owned = tuple[ShardedParam, ParamGroup]


def explain(error: BaseException, units: Iterable[Unit]) -> None:
    """Put torch's words on a parameter that is not gathered into a sentence, in place."""
    if _SEEN in error.__dict__:
        return  # it has left a forward inside of this one
    error.__dict__[_SEEN] = True
    tracer = running_tracer()
    if tracer is not None and isinstance(error, Exception) and not hasattr(error, "code"):
        record = next(filter(None, map(record_of_unit, units)), None)
        said = tracing_error(type(record.modules[0]).__name__ if record else "a module", tracer)
        error.args, error.__dict__["code"] = said.args, "traced"
        return
    if type(error) is not RuntimeError:
        return
    words = str(error)
    if _TORCHS in words:
        _explain_sharded(error, units)
    elif any(part in words for part in _FREED):
        _explain_freed(error, units)


def _explain_sharded(error: RuntimeError, units: Iterable[Unit]) -> None:
    known = {
        id(form): (param, group)
        for unit in units
        for group in unit.own_groups
        for param in group.params
        for form in param.forms()
        if form is not param.unsharded
    }
    found = _find(error.__traceback__, known)
    if found:
        params = _either(param.name for param, _ in found)
        owners = _either(group.name for _, group in found)
        reword(
            error,
            "used-outside",
            f"parameter {params} was used outside the forward of its unit {owners}, where it is "
            f"sharded; use it in that forward or in a method given to "
            f"register_fsdp_forward_method, call fully_shard on the module that reads it, or call "
            f"unshard() on the unit before and reshard() after backward (torch: {error})",
        )


def explain_backward(error: RuntimeError, nodes: Iterable[Node], units: Iterable[Unit]) -> None:
    """The same for an exception of a backward; if C++ read a freed parameter, it may continue
    after.

    From then on side doors are recorded. The next forward resets the interrupted state, and a
    repeated run does not raise the error.
    """
    units = list(units)
    explain(error, units)
    if _explain_freed_in(error, nodes, units):
        for scheduler in schedulers():
            note_calls(scheduler)


def _explain_freed_in(error: RuntimeError, nodes: Iterable[Node], units: Iterable[Unit]) -> bool:
    """For what autograd's nodes have saved, and C++ has read; whether it was that."""
    words = str(error)
    if _OURS in words or not any(part in words for part in _FREED):
        return False
    # Autograd runs the newest that it can: of those that still hold what they saved, it was that.
    newest_first = sorted(nodes, key=lambda node: -node._sequence_nr())
    found = _freed_among((value for node in newest_first for value in _saved_by(node)), units)
    if found is not None:
        param, group = found
        reword(
            error,
            "entered-by-a-side-door",
            f"backward reached unit '{group.name}' through a tensor that its forward did not "
            f"return, and read parameter '{param.name}', which is freed; return that tensor from "
            f"the forward too, or call set_reshard_after_forward(False) on the unit "
            f"(torch: {error})",
        )
    return found is not None


def _saved_by(node: Node) -> Iterator[torch.Tensor]:
    """The tensors that a node has saved, without running saved-tensor hooks."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                saved = getattr(node, name)
                raw = saved if isinstance(saved, (tuple, list)) else (saved,)
                values = [each.data for each in raw if each.unpack_hook is None]
            except (AttributeError, RuntimeError):  # it has run; or another version of torch
                continue
            yield from (value for value in values if isinstance(value, torch.Tensor))


def _freed_among(values: Iterable[object], units: Iterable[Unit]) -> _Owned | None:
    """The first parameter with a view among ``values`` that has to be gathered before use."""
    known: dict[int, list[_Owned]] = {}  # by memory
    for unit in units:
        for group in unit.own_groups:
            for param in group.params if group.state.needs_gather else ():
                memory = _memory(param.unsharded)
                if memory is not None:
                    known.setdefault(memory, []).append((param, group))
    for value in values:
        for owned in known.get(_memory(value) or 0, ()):
            if _begins_in(value, owned[0].unsharded):
                return owned
    return None


def _explain_freed(error: RuntimeError, units: Iterable[Unit]) -> None:
    frames = _innermost_first(error.__traceback__)
    found = _freed_among((v for frame, _ in frames for v in frame.f_locals.values()), units)
    if found is not None:
        param, group = found
        reword(
            error,
            "used-freed",
            f"parameter '{param.name}', or a view of it, was read after the forward of its unit "
            f"'{group.name}', which has freed it; return a copy from that forward (.clone()), or "
            f"call set_reshard_after_forward(False) on the unit (torch: {error})",
        )


def _memory(value: object) -> int | None:
    """Identifies a plain tensor's storage, or a DTensor's."""
    local = local_of(value) if isinstance(value, torch.Tensor) else None
    if local is None or is_extended(local):
        return None
    return local.untyped_storage()._cdata


def _begins_in(view: object, gathered: torch.Tensor | None) -> bool:
    """Whether a tensor's first element is one of a gathered parameter in the same storage."""
    assert isinstance(view, torch.Tensor)
    assert gathered is not None  # or its memory would not be known
    view, gathered = local_of(view), local_of(gathered)
    start = gathered.storage_offset() * gathered.itemsize
    return start <= view.storage_offset() * view.itemsize < start + gathered.nbytes


def explain_loading(errors: list[str]) -> None:
    """The same for what ``load_state_dict`` has collected, in place."""
    for index, text in enumerate(errors):
        key = re.search(r'named "([^"]+)"', text)
        if _TORCHS in text and key is not None:
            errors[index] = (
                f"parameter '{key[1]}' is sharded, but the state dict holds a plain tensor for it; "
                f"load full tensors with torch.distributed.checkpoint.state_dict."
                f"set_model_state_dict(model, state_dict, "
                f"options=StateDictOptions(full_state_dict=True)), after reshard() on units that "
                f"are gathered [plain-state-dict]"
            )


def _innermost_first(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Frames of a traceback and the numbers of their lines."""
    places = []
    while trace is not None:
        places.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return places[::-1]


def _find(trace: TracebackType | None, known: dict[int, _Owned]) -> list[_Owned]:
    """Those of the innermost frame that has one, or has a module and names one below it."""
    for frame, number in _innermost_first(trace):
        values: list[object] = list(frame.f_locals.values())
        for value in frame.f_locals.values():
            if isinstance(value, FunctionCtx):  # of a backward written in Python
                values += vars(value).values()
        held = [known[id(value)] for value in values if id(value) in known]
        modules = [value for value in values if isinstance(value, nn.Module)]
        if held or modules:
            code = frame.f_code
            line = set(re.findall(r"\w+", linecache.getline(code.co_filename, number)))
            anywhere = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
            return held[:1] or _named(modules, line, known) or _named(modules, anywhere, known)
    return []


def _named(modules: Sequence[nn.Module], words: set[str], known: dict[int, _Owned]) -> list[_Owned]:
    """Sharded parameters whose names are in the code; without an index those of all indices."""
    owned = [
        (known[id(param)], name.split("."))
        for module in modules
        for name, param in module.named_parameters()
        if id(param) in known
    ]
    exact = [found for found, parts in owned if words.issuperset(parts)]
    alike = (each for each in owned if words.issuperset(p for p in each[1] if not p.isdigit()))
    return exact or [found for found, _ in alike]


def _either(names: Iterable[str]) -> str:
    """'a', or 'b' or 'c'; of many, the first few."""
    different = list(dict.fromkeys(names))
    more = " or others" if len(different) > _MOST else ""
    return " or ".join(f"'{name}'" for name in different[:_MOST]) + more


hooks.forward_raised.add(explain)
engine.backward_raised.add(explain_backward)
