"""Observers of what the scheduler does with groups, on request; a profiler's ranges are one.

    no feature is on    unit.groups ──> ParamGroup
    a profiler runs     unit.groups ──> Observed (PROFILER) ──> ParamGroup
    checks are on too   unit.groups ──> Observed (PROFILER, CHECKS) ──> ParamGroup

A unit's list of groups is the single point of interception (decision 27): the scheduler calls
groups only through it, calls a group without observers directly, and checks nothing.
Observers do not know each other. They see no call that a `ParamGroup` makes to itself: `abandon`
frees it without `reshard`, so that an observer of frees has a function for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from fsdp2.core.config import GroupOptions
from fsdp2.core.device.fingerprint import bind_fingerprint
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.params.param import PlannedParam, gathered_name, refuse_written
from fsdp2.core.schedule.group import Claim, ParamGroup
from fsdp2.core.schedule.states import UNSHARDED

Run = Callable[..., object]
"""Runs an operation of a group, or calls the next observer."""


class Observer(NamedTuple):
    """Functions that are called instead of a group's operations, which they run; the highest first.

    ``sees`` has, by the operation's name, a function of the group, of what runs the operation (or
    the next observer), and of the operation's arguments. It returns what the operation returns.
    """

    height: int
    sees: Mapping[str, Callable[..., object]]


class Observed:
    """A group as the scheduler calls it while it has observers; all else is of ``base``."""

    def __init__(self, base: ParamGroup, observers: Sequence[Observer]) -> None:
        self.base, self.observers = base, observers
        for observer in reversed(observers):
            for operation, see in observer.sees.items():
                # Bound to the group and not to this object, which is freed by its last reference.
                run = functools.partial(see, self.base, getattr(self, operation))
                setattr(self, operation, run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)


GroupOperations = ParamGroup | Observed
"""A group as the scheduler calls it."""


def observers_of(group: GroupOperations) -> Sequence[Observer]:
    """The observers of a group, the highest first."""
    return group.observers if isinstance(group, Observed) else ()


def observed(group: GroupOperations, observers: Sequence[Observer]) -> GroupOperations:
    """A group with these observers, and no others; the group itself if there are none."""
    ordered = sorted(observers, key=lambda observer: -observer.height)
    return Observed(group.base, ordered) if ordered else group.base


def with_observer(group: GroupOperations, observer: Observer, wanted: bool) -> GroupOperations:
    """A group with an observer, or without; all other observers stay."""
    present = observers_of(group)
    # By identity: two observers, such as two tests', may have equal tables.
    if any(each is observer for each in present) is wanted:
        return group
    others = [each for each in present if each is not observer]
    return observed(group, [observer, *others] if wanted else others)


plan_checks: list[Callable[[str, list[PlannedParam], GroupOptions], None]] = []
"""Called before anything is changed, with the name of a unit's modules, the plans of their
parameters, and the options of its groups. They may raise. Rooms above core add theirs when they are
imported, as below."""

on_new_groups: list[Callable[[ParamGroup], Observer | None]] = []
"""Called with each new group of a unit; they return its observer, if it is to have one."""


def newly_observed(groups: Sequence[GroupOperations]) -> list[GroupOperations]:
    """New groups with the observers of `on_new_groups`."""
    found = []
    for group in groups:
        observers = [choose(group.base) for choose in on_new_groups]
        found.append(observed(group, [each for each in observers if each is not None]))
    return found


# ---- a profiler


def _ranges(operation: str) -> Callable[..., object]:
    def mark(group: ParamGroup, run: Run, *args: object) -> object:
        name = group.name.replace("(root)", "root")
        with record_function(f"fsdp2::{operation} ({name})"):
            return run(*args)

    return mark


PROFILER = Observer(
    3,  # around the checks: a trace shows what they cost
    {
        "start_unshard": _ranges("all_gather"),
        "finish_unshard": _ranges("wait"),
        "reduce": _ranges("reduce"),
    },
)
"""Ranges by unit name in a profiler's trace. When a forward or backward of the root begins, the
scheduler reads torch's own flag, without a call, and lets this observe its groups, or no longer."""


# ---- a user's writes to parameters that he has unsharded

#     unshard()    note                    a fingerprint of what is gathered
#     a forward    reshard                 another one, if it frees: the device compares
#     reshard()    take_back(stays=False)  the host reads the result: a write, which is lost, raises
#
# Version counters show no write through ``.data``. Each rank compares what it has in memory, and
# communicates nothing. Only the user's `reshard()` makes the host wait.


def note(group: ParamGroup) -> None:
    """Note what is gathered for a user, unless it is noted already."""
    claim = group.claim = group.claim or Claim()
    if claim.before is not None:
        return
    if group.state is not UNSHARDED:  # a forward has freed it before the user waited
        return
    if group.bound.watched and not group.bound.watched[0].is_meta:
        claim.before = _fingerprint(group)


def _fingerprint(group: ParamGroup) -> torch.Tensor:
    return bind_fingerprint([local_of(param.detach()) for param in group.bound.watched])()


def _compare(group: ParamGroup) -> None:
    claim = group.claim
    if claim is None:
        return
    before, claim.before = claim.before, None
    in_backward = torch._C._current_graph_task_id() != -1
    outdated = group.state is not UNSHARDED or group.is_outdated
    if before is None or outdated or in_backward:
        return
    lost = (before != _fingerprint(group)).any()
    claim.lost = lost if claim.lost is None else lost | claim.lost


def _free(group: ParamGroup, run: Run) -> None:
    """Compare, then free."""
    _compare(group)
    run()


def _take_back(group: ParamGroup, run: Run, stays: bool = True) -> None:
    """Raise, naming the parameters, if one was written and freed, or is to be freed."""
    if stays:
        run(stays)
        return
    _compare(group)
    claim, group.claim = group.claim, None  # another reshard() drops the write
    run(stays)
    if claim is not None and claim.lost is not None and bool(claim.lost):
        refuse_written("' or '".join(str(gathered_name(param)) for param in group.bound.watched))


def _abandon(group: ParamGroup, run: Run) -> None:
    """Free, whatever was written."""
    group.claim = None
    run()


CLAIMED = Observer(
    1, {"reshard": _free, "shard_smaller": _free, "take_back": _take_back, "abandon": _abandon}
)
