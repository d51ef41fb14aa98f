"""An observer of groups that a user has unsharded: contents decide whether he has written them.

    unshard()    note                    a fingerprint of what is gathered
    a forward    reshard                 another one, if it frees: the device compares
    reshard()    take_back(stays=False)  the host reads the result: a write, which is lost, raises

Version counters show no write through ``.data``. Each rank compares what it has in memory, and
communicates nothing. Only the user's `reshard()` makes the host wait. A unit that no user unshards
has no such observer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from fsdp2.core.device.fingerprint import bind_fingerprint
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.params.param import GATHERED, refuse_written
from fsdp2.core.schedule.bound import Bound
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import Observer
from fsdp2.core.schedule.states import UNSHARDED

_Fingerprints = weakref.WeakKeyDictionary[ParamGroup, torch.Tensor]

_before: _Fingerprints = weakref.WeakKeyDictionary()
"""Fingerprints of groups that a user has unsharded, from then on until they are freed."""

_lost: _Fingerprints = weakref.WeakKeyDictionary()
"""Whether a write was lost when they were freed."""


def note_gathered(group: ParamGroup) -> None:
    """Note what is gathered, unless it is noted already."""
    bound = group.bound
    if group in _before or bound is None:
        return
    if group.state is not UNSHARDED:  # a forward has freed it before the user waited
        return
    if bound.watched and not bound.watched[0].is_meta:
        _before[group] = _fingerprint(bound)


def _take_back(group: ParamGroup, run: Callable[[bool], None], stays: bool = True) -> None:
    """Raise if it was written and freed, or is to be freed.

    Raises:
        ShardingStateError: names the parameters, one of which was written.
    """
    if not stays:
        _compare(group)
    lost = None if stays else _lost.pop(group, None)  # another reshard() drops the write
    run(stays)
    if lost is not None and bool(lost):
        bound = group.bound
        assert bound is not None
        refuse_written("' or '".join(getattr(param, GATHERED) for param in bound.watched))


def _compare(group: ParamGroup) -> None:
    before = _before.pop(group, None)
    in_backward = torch._C._current_graph_task_id() != -1
    outdated = group.state is not UNSHARDED or group.is_outdated
    if before is None or outdated or in_backward:
        return
    assert group.bound is not None
    lost = (before != _fingerprint(group.bound)).any()
    _lost[group] = lost | _lost[group] if group in _lost else lost


def _fingerprint(bound: Bound) -> torch.Tensor:
    return bind_fingerprint([local_of(param.detach()) for param in bound.watched])()


def _free(group: ParamGroup, run: Callable[[], None]) -> None:
    """Compare, then free, also to a smaller group's rows."""
    _compare(group)
    run()


def _abandon(group: ParamGroup, run: Callable[[], None]) -> None:
    """Free, whatever was written."""
    _before.pop(group, None)
    _lost.pop(group, None)
    run()


CLAIMS = Observer(
    3,
    {"take_back": _take_back, "reshard": _free, "shard_smaller": _free, "abandon": _abandon},
)
"""Observes the groups of a unit from `Unit.note_contents` to `Unit.give_up`."""
