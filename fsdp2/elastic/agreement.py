"""Ranks of a group agree on their step, after one that was dropped.

    rank 0   step 0   healed from step 7 ─> 7 ┐ dropped ─> 0   and both heal in the next step
    rank 1   step 0   its peer was lost       ┘            0

torchft counts steps on each rank, and asks one of them where its group is: with rank 0 at 7, the
group would count as healed, and rank 1 would train on with weights of another step.
"""

from __future__ import annotations

import torch

from fsdp2.core.device.one_off import gather_numbers
from fsdp2.core.device.process_groups import current_world
from fsdp2.elastic.managers import Manager


def agree_on_step(manager: Manager, device: torch.device) -> None:
    """Let this rank be at the earliest step that a rank of its group is at; all ranks call it.

    If all have healed, they keep that state, whatever the step was dropped for: the group that
    sent it may have ended.

    Args:
        manager: counts steps.
        device: of the group's collectives.
    """
    group = current_world()
    if group is None or group.size() == 1:
        return
    own = manager.current_step()
    earliest = min(step for (step,) in gather_numbers(group, [own], device))
    if earliest < own:
        manager.load_state_dict({**manager.state_dict(), "step": earliest})
