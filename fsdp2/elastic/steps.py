"""Steps that are averaged between replica groups, and committed or dropped everywhere.

    begin     drop gradients, ask who takes part; a group that missed a step heals
    backward  unit by unit: reduce-scatter inside the group ── manager.allreduce ──> ``.grad``
    commit    the ranks of the group vote ── yes ──> optimizers step
                                          └─ no ───> drop: all is as before the step

The all-reduce is a part of a unit's reduction, on its lane (`core.reduce.binding`): one flat tensor
per unit and backward, divided by the groups that take part in the step. An error in it raises
nothing: the manager notes it, lets the rest of the step pass, and votes no.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import nn

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import Scheduler, UnitRecord, current_world, gather_numbers, records_below
from fsdp2.elastic.loose import LooseParams
from fsdp2.elastic.managers import Manager
from fsdp2.optim.in_backward import InBackward, is_stepped
from fsdp2.sharding.module import FSDPModule


def attach(
    model: nn.Module,
    manager: Manager,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    scaler: torch.amp.GradScaler | None = None,
) -> Steps:
    """Average a model's gradients between replica groups, and step all groups alike.

    Inside a group, `fully_shard` works as usual: over any mesh, with replicas, tensor parallelism
    or none. Between groups each rank averages its shards with the same ranks of other groups: one
    flat all-reduce per unit and backward that reduces, after the all-reduce of HSDP. Whole
    parameters of all units, and parameters that no unit has, share one each. With accumulation by
    `set_requires_gradient_sync` or `set_requires_all_reduce` only the last micro-batch is sent.

    Ranks that use different units call ``set_reduce_scatter_unused_params(True)``; that holds for
    groups, too.

    Call it on all ranks of a group, when all units are made, and between iterations.

    Args:
        model: a module, sharded or with sharded modules in it.
        manager: a ``torchft.Manager`` that ``begin`` and ``commit`` drive. Its process group
            connects the groups; its world is one group.
        optimizer: what `Steps.commit` steps; several in a sequence. None if
            ``torchft.Optimizer(manager, optimizer)`` begins and commits steps instead.
        scaler: a gradient scaler, which then steps the optimizers.

    Raises:
        RuntimeError: a parameter is stepped in backward.
        ValueError: a unit's gradients are sent with error feedback.

    Example::

        steps = elastic.attach(model, manager, optimizer)
        while manager.current_step() < 1000:
            steps.begin()
            loss(model(batch())).backward()
            if steps.commit():
                scheduler.step()
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer]
    return Steps(model, manager, optimizers, scaler)


class Steps:
    """A model's steps, each committed by all ranks of this group or by none; made by `attach`."""

    def __init__(
        self,
        model: nn.Module,
        manager: Manager,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.manager = manager
        self._model, self._optimizers, self._scaler = model, optimizers, scaler
        self._records = records = records_below(model)
        self._refuse_stepped()
        for record in records:
            if record.unit.options.wire.feedback:
                raise coded(
                    ValueError,
                    "elastic-feedback",
                    f"attach() got a model whose unit '{record.unit.title}' uses error feedback, "
                    f"which would keep parts of the gradients of a dropped step; call "
                    f"set_wire_format with feedback=False",
                )
        self._zeroed: list[nn.Module] = [model]
        if not isinstance(model, FSDPModule):
            self._zeroed += [m for m in model.modules() if isinstance(m, FSDPModule)]
        managed = {p.sharded for r in records for g in r.unit.own_groups for p in g.params}
        loose = [p for p in model.parameters() if p.requires_grad and p not in managed]
        self._device = _device_of(model, records)
        self._loose = LooseParams(loose, self._syncs, self._average)
        for record in records:
            record.unit.change(average=self._average)

    def detach(self) -> None:
        """Average no longer: this group trains by itself. Call it between iterations."""
        for record in self._records:
            record.unit.change(average=None)
        self._loose.detach()

    # ---- a step

    def begin(self) -> None:
        """Begin a step: drop the model's gradients, and agree on the groups that take part.

        If the manager heals before the forward (``use_async_quorum=False``), a group that
        missed a step has the others' state on return.

        Raises:
            RuntimeError: a parameter is stepped in backward; or the manager's own error, such as
                no answer from the lighthouse.
        """
        self._refuse_stepped()
        self._zero_grad()
        self.manager.start_quorum()

    def commit(self) -> bool:
        """End the step: step the optimizers if all ranks of this group had all averages.

        Returns:
            Whether they stepped. If not, the state is that of the begin of the step, except buffers
            that the forward has written and random number generators.
        """
        if not self.manager.should_commit():
            self.drop()
            _agree_on_step(self.manager, self._device)
            return False
        for optimizer in self._optimizers:
            if self._scaler is None:
                optimizer.step()
            else:
                self._scaler.step(optimizer)
        if self._scaler is not None:
            self._scaler.update()
        return True

    def fail(self, error: Exception) -> None:
        """Let this step be dropped because of an exception that was caught.

        All ranks of the group must have left the step, as with an exception that all of them raise,
        or one after the backward: ranks that are still in a collective of the group wait for this
        one. Then call `commit`, which returns ``False``. An exception on only one rank must end
        the process, and so the group.

        Other groups that wait for this one's gradients notice when the manager's process group
        gives up. They drop the step too. Groups that had all of them commit it, and this one heals.

        Args:
            error: what was raised; the manager logs it.
        """
        self.manager.report_error(error)

    def drop(self) -> None:
        """Undo the step: `commit` calls it if a step does not count.

        Gradients, sums that wait for an all-reduce, and running reductions are dropped. With
        ``torchft.Optimizer``, which steps or not by itself, call it after an exception.
        """
        schedulers: dict[Scheduler, None] = {}
        for record in self._records:
            if record.scheduler is not None:
                schedulers[record.scheduler] = None
        for scheduler in schedulers:
            if scheduler.is_running:
                scheduler.reset()
            else:
                scheduler.wait_for_reductions()
        self._zero_grad()
        if self._scaler is not None:
            with contextlib.suppress(AssertionError):  # nothing was ever scaled
                self._scaler.update(self._scaler.get_scale())  # forgets what was unscaled

    # ---- inside

    def _zero_grad(self) -> None:
        """Drop gradients, and what units hold of them."""
        for module in self._zeroed:
            module.zero_grad(set_to_none=True)

    def _average(self, flat: torch.Tensor) -> bool:
        """Average over the groups that take part, in place; whether this one does."""
        manager = self.manager
        if not manager.num_participants():
            raise coded(
                ShardingStateError,
                "elastic-not-begun",
                "a backward reduces gradients before any step has begun, so fsdp2 does not know "
                "which replica groups take part; call begin() first, or zero_grad() of torchft's "
                "Optimizer",
            )
        manager.allreduce(torch.view_as_real(flat) if flat.is_complex() else flat).wait()
        return manager.is_participating()

    def _syncs(self) -> bool:
        """Whether a backward reduces: not one whose units keep gradients for the next."""
        return not self._records or any(record.unit.sync for record in self._records)

    def _refuse_stepped(self) -> None:
        if InBackward.count and is_stepped(self._model.parameters()):
            raise coded(
                ShardingStateError,
                "elastic-stepped-in-backward",
                "elastic steps end with a vote, but FlatOptimizer(step_in_backward=True) has "
                "stepped before it, so no step could be dropped; create the optimizer without "
                "step_in_backward",
            )


def _device_of(model: nn.Module, records: Sequence[UnitRecord]) -> torch.device:
    """The device of this rank's collectives: the shards may be offloaded."""
    axes = (p.axes.device for record in records for g in record.unit.own_groups for p in g.params)
    params = (param.device for param in model.parameters())
    return next(axes, next(params, torch.device("cpu")))


def _agree_on_step(manager: Manager, device: torch.device) -> None:
    """Let this rank be at the earliest step that a rank of its group is at; all ranks call it.

    torchft counts steps on each rank, and asks one of them where its group is. With rank 0 healed
    to step 7 and rank 1 at 0, the group would count as healed, and rank 1 would train on with
    weights of another step. If all have healed, they keep that state: the group that sent it may
    have ended.
    """
    group = current_world()
    if group is None or group.size() == 1:
        return
    own = manager.current_step()
    earliest = min(step for (step,) in gather_numbers(group, [own], device))
    if earliest < own:
        manager.load_state_dict({**manager.state_dict(), "step": earliest})
