"""An observer of groups that a user has unsharded: contents decide whether he has written them.

    unshard()    note                    a fingerprint of what is gathered
    a forward    reshard                 another one, if it frees: the device compares
    reshard()    take_back(stays=False)  the host reads the result: a write, which is lost, raises

Version counters show no write through ``.data``. Each rank compares what it has in memory, and
communicates nothing. Only the user's `reshard()` makes the host wait. A unit that no user unshards
has no such observer.
"""

from __future__ import annotations

import torch

from fsdp2.core.device.fingerprint import bind_fingerprint
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.params.param import gathered_name, refuse_written
from fsdp2.core.schedule.group import Claim, ParamGroup
from fsdp2.core.schedule.observers import Observer, Run
from fsdp2.core.schedule.states import UNSHARDED


def note(group: ParamGroup) -> None:
    """Note what is gathered for a user, unless it is noted already."""
    claim = group.claim = group.claim or Claim()
    if claim.before is not None or group.bound is None:
        return
    if group.state is not UNSHARDED:  # a forward has freed it before the user waited
        return
    if group.bound.watched and not group.bound.watched[0].is_meta:
        claim.before = _fingerprint(group)


def _fingerprint(group: ParamGroup) -> torch.Tensor:
    assert group.bound is not None
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
        assert group.bound is not None
        refuse_written("' or '".join(str(gathered_name(param)) for param in group.bound.watched))


def _abandon(group: ParamGroup, run: Run) -> None:
    """Free, whatever was written."""
    group.claim = None
    run()


CLAIMED = Observer(
    1, {"reshard": _free, "shard_smaller": _free, "take_back": _take_back, "abandon": _abandon}
)
