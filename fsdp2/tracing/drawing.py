"""A recorded step, once its times are known, as a `Timeline`.

    Replay(spans, stalls) ── draw(named) ──> Timeline(slices, waits)

A slice is an operation. Operators of the user's model that follow each other for one unit are one
slice. A collective that the host runs itself is apart from what it computes, on a lane of its own,
and compute stands still for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from fsdp2.core.facts import Lane
from fsdp2.tracing.record.notes import COLLECTIVE, HOST, USER, Operation, Place
from fsdp2.tracing.record.notes import COMPUTE as COMPUTED
from fsdp2.tracing.record.replay import Replay, Span
from fsdp2.tracing.timeline import (
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTE,
    COPY_IN,
    REDUCE,
    Memory,
    Slice,
    Timeline,
    Value,
    Wait,
)
from fsdp2.tracing.timeline import HOST as HOSTS

LANE_OF: Mapping[Place, str] = {
    Lane.COMPUTE: COMPUTE,
    Lane.COPY_IN: COPY_IN,
    Lane.ALL_GATHER: ALL_GATHER,
    Lane.REDUCE: REDUCE,
    Lane.ALL_REDUCE: ALL_REDUCE,
    HOST: HOSTS,
    USER: "user",
}
"""A timeline's name of each lane."""

_LANE_OF_COLLECTIVE = {
    "reduce-scatter": REDUCE,
    "all-to-all": REDUCE,
    "all-reduce": ALL_REDUCE,
}

_TOUCHING = 1e-3  # µs


Named = Callable[[Operation], tuple[str, str]]
"""A timeline's names of an operation, and of its unit ("" for none)."""


def draw(
    step: Replay,
    named: Named,
    memory: Iterable[Memory] = (),
    *,
    metadata: Mapping[str, Value],
    groups: Sequence[Sequence[int]] = (),
    scale: float = 1.0,
    asynchronous: bool = True,
    measured: bool = False,
) -> Timeline:
    """A step as a timeline."""
    slices: list[Slice] = []
    waits: list[Wait] = []
    place: list[int] = []  # of each span: its slice, or the one before it on its lane
    last: dict[str, int] = {}  # the last slice of each lane
    ended = False  # compute's, as it stood still since
    for span in step.spans:
        lane = _lane(span.operation)
        if measured or span.end > span.start:
            made = _slice(lane, span, named(span.operation), groups, scale)
            before = None if ended and lane == COMPUTE else last.get(lane)
            if before is not None and _continues(slices[before], made, span, asynchronous):
                slices[before] = _joined(slices[before], made)
            else:
                last[lane] = len(slices)
                slices.append(made)
            ended = span.operation.lane is Lane.COMPUTE and lane != COMPUTE
            if ended:
                waits.append(_inline(made, last[lane]))
        place.append(last.get(lane, -1))
    for stall in step.stalls:
        wait = Wait(
            LANE_OF[stall.lane],
            LANE_OF[stall.on],
            stall.label,
            stall.start * scale,
            stall.end * scale,
            iteration=stall.iteration,
        )
        behind = place[stall.behind] if stall.behind >= 0 else -1
        waits.append(wait if behind < 0 else _behind(wait, slices[behind], behind))
    return Timeline(slices, waits, list(memory), dict(metadata)).sorted()


def _slice(
    lane: str,
    span: Span,
    names: tuple[str, str],
    groups: Sequence[Sequence[int]],
    scale: float,
) -> Slice:
    op, (operation, unit) = span.operation, names
    dtype = str(op.dtype).removeprefix("torch.") if op.nbytes else ""
    ranks = _ranks_told(groups[op.group]) if op.group >= 0 else ""
    times = span.start * scale, span.end * scale
    return Slice(lane, operation, *times, unit, op.nbytes, dtype, ranks, op.iteration)


def _lane(note: Operation) -> str:
    if note.kind != COLLECTIVE or note.lane is not Lane.COMPUTE:
        return LANE_OF[note.lane]
    return _LANE_OF_COLLECTIVE.get(note.name, ALL_GATHER)


def _behind(wait: Wait, by: Slice, index: int) -> Wait:
    number = max(wait.iteration, by.iteration)
    return replace(wait, unit=by.unit, operation=by.operation, behind=index, iteration=number)


def _inline(made: Slice, behind: int) -> Wait:
    """Compute stands still for a collective that the host runs itself; named as in real runs."""
    label = f"the host waits for the {made.operation}"
    return _behind(Wait(COMPUTE, made.lane, label, made.start, made.end), made, behind)


def _continues(last: Slice, made: Slice, span: Span, asynchronous: bool) -> bool:
    alike = (last.operation, last.unit) == (made.operation, made.unit)
    touches = not asynchronous or made.start <= last.end + _TOUCHING
    return alike and span.operation.kind == COMPUTED and touches


def _joined(last: Slice, made: Slice) -> Slice:
    return replace(last, end=made.end, bytes=last.bytes + made.bytes)


def _ranks_told(ranks: Sequence[int]) -> str:
    """Ranks as people write them: "ranks 0-7", or "ranks 0, 8, 16"; "" for none."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}" if ranks else ""
