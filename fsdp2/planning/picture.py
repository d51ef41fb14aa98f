"""A plan as a timeline: the same data, file and page as of a real run (`fsdp2.trace`)."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp2.core.device.streams import Lane
from fsdp2.paper.recording import Operation, Recording
from fsdp2.planning.memory import samples
from fsdp2.planning.timing import Span, Timing
from fsdp2.tracing import Memory, Slice, Timeline, Wait

LANES = {
    Lane.COMPUTE: "compute",
    Lane.COPY_IN: "copy-in",
    Lane.ALL_GATHER: "all-gather",
    Lane.REDUCE: "reduce",
    Lane.ALL_REDUCE: "all-reduce",
}
MICRO = 1e6


def timeline_of(recording: Recording, timing: Timing, facts: Mapping[str, str | int]) -> Timeline:
    """A planned step: operators that follow each other for one unit are one slice.

    Args:
        recording: what it did.
        timing: when.
        facts: for `Timeline.metadata`.
    """
    slices: list[Slice] = []
    waits: list[Wait] = []
    place: list[int] = []  # the slice of each span
    open_: dict[str, int] = {}  # the last slice of each lane
    for span in timing.spans:
        note = span.operation
        ranks = recording.groups[note.group] if note.group >= 0 else ()
        lane = _lane(note)
        made = Slice(
            lane,
            _name(note),
            span.start * MICRO,
            span.end * MICRO,
            note.unit,
            note.nbytes,
            str(note.dtype).removeprefix("torch."),
            f"ranks {ranks[0]}-{ranks[-1]}" if ranks else "",
        )
        last = open_.get(lane)
        if last is not None and _continues(slices[last], made, span, recording.asynchronous):
            slices[last] = _joined(slices[last], made)
        else:
            open_[lane] = len(slices)
            slices.append(made)
        place.append(open_[lane])
        if note.lane is Lane.COMPUTE and lane != "compute":
            open_.pop("compute", None)
            waits.append(_inline(made, place[-1]))
    for stall in timing.stalls:
        behind = place[stall.behind] if stall.behind >= 0 else -1
        waits.append(
            Wait(
                "host" if stall.lane is None else LANES[stall.lane],
                LANES[stall.on],
                stall.label,
                stall.start * MICRO,
                stall.end * MICRO,
                slices[behind].unit if behind >= 0 else "",
                slices[behind].operation if behind >= 0 else "",
                behind,
            )
        )
    memory: dict[float, dict[str, int]] = {}
    for index, totals in samples(recording):
        time = timing.times[index] * MICRO if index >= 0 else 0.0
        # Of one moment the fullest state counts, so that the picture has the peak.
        if time not in memory or sum(memory[time].values()) <= sum(totals.values()):
            memory[time] = {name: max(total, 0) for name, total in totals.items()}
    found = [Memory(time, totals) for time, totals in memory.items()]
    return Timeline(slices, waits, found, dict(facts)).sorted()


def _name(note: Operation) -> str:
    if note.kind == "collective":
        return note.name
    return "copy" if note.kind == "copy" else note.phase


def _lane(note: Operation) -> str:
    """Where it is shown: collectives that the host runs itself are apart from what it computes."""
    assert note.lane is not None
    if note.kind != "collective" or note.lane is not Lane.COMPUTE:
        return LANES[note.lane]
    return {"reduce-scatter": "reduce", "all-reduce": "all-reduce"}.get(note.name, "all-gather")


def _inline(made: Slice, behind: int) -> Wait:
    """Compute stands still for a collective that the host runs itself; named as in real runs."""
    label = f"the host waits for the {made.operation}"
    about = (made.unit, made.operation, behind)
    return Wait("compute", made.lane, label, made.start, made.end, *about)


def _continues(last: Slice, made: Slice, span: Span, asynchronous: bool) -> bool:
    """Without lanes beside it the host is in a unit also between its operators."""
    alike = (last.operation, last.unit) == (made.operation, made.unit)
    touches = not asynchronous or made.start <= last.end + 1e-3
    return alike and span.operation.kind == "compute" and touches


def _joined(last: Slice, made: Slice) -> Slice:
    return Slice(
        last.lane,
        last.operation,
        last.start,
        made.end,
        last.unit,
        last.bytes + made.bytes,
        last.dtype,
        last.group,
    )
