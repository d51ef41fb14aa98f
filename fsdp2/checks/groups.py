"""Parameter groups that check before they communicate: what `fsdp2.debug` switches on.

    start_unshard   agree, then gather
    reduce          agree, reduce, check for NaN
    reshard         check for writes to unsharded parameters, then free

The checks are a layer around groups (`fsdp2.core.schedule.layers`), which is there while something
is checked: nothing asks in a step whether it is. The process has one `EnabledChecks` and, while
ranks are checked, one `Agreement` in `Checks`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from fsdp2.checks.agreement import Agreement, Intent
from fsdp2.checks.environment import asks_for_ranks
from fsdp2.checks.freed import mark_freed, unmark
from fsdp2.core.config import GroupOptions
from fsdp2.core.device.collectives import ReduceKind
from fsdp2.core.device.fingerprint import checksum
from fsdp2.core.device.process_groups import ProcessGroup, global_ranks, timeout_of
from fsdp2.core.device.streams import Lane
from fsdp2.core.errors import (
    CommunicationError,
    NonFiniteGradientError,
    RankMismatchError,
    ShardingStateError,
    coded,
)
from fsdp2.core.layout.mesh import local_of, memory_order
from fsdp2.core.modules import optimizers
from fsdp2.core.modules.registry import scheduler_of
from fsdp2.core.params.param import (
    PlannedParam,
    ShardedParam,
    axes_in,
    compute_dtype,
    is_extended,
    refuse_written,
)
from fsdp2.core.progress import OptimizerSteps
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import PendingReduction, Reduction, views_of
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.layers import GroupOperations, Layer, Watchers, layered
from fsdp2.core.schedule.states import GroupState
from fsdp2.core.schedule.unit import Phase, Unit, all_groups, all_units, put_around, unit_of
from fsdp2.ranks.channels import StoreBoard, default_store

_SAME_WEIGHTS = (
    "build the model from the same seed, or load the same weights, on every rank before fully_shard"
)
_SUM = ReduceKind(average=False)


@dataclass(frozen=True)
class EnabledChecks:
    """The active checks.

    Attributes:
        check_ranks: whether ranks agree on each step before they run it.
        check_nan: whether reduced gradients must be finite.
        check_writes: whether unsharded parameters must equal their shards, and stay so; and
            whether a read of freed ones raises.
        timeout: seconds that a rank waits for silent ranks; ``None`` for the process group's own
            time-out.
    """

    check_ranks: bool = False
    check_nan: bool = False
    check_writes: bool = False
    timeout: float | None = None


class Contents(NamedTuple):
    """Checksums of a group's parameters at some moment.

    Attributes:
        shards: this rank's rows.
        registered: the registered tensors: unsharded parameters, or a smaller group's rows.
    """

    shards: list[str]
    registered: list[str]


_ContentsOf = weakref.WeakKeyDictionary[ParamGroup, Contents]


class Checks:
    """The checks of this process.

    Attributes:
        settings: the active checks; ``None`` until requested.
        runs: how often the check of ranks was switched on: all ranks do so equally often.
        compared: groups of which ranks have compared the replicas of their shards.
        contents: of unsharded groups, checksums of each parameter at that time: of the shard, and
            of the registered tensor.
    """

    settings: EnabledChecks | None = None
    runs = 0
    compared: ClassVar[weakref.WeakSet[ParamGroup]] = weakref.WeakSet()
    contents: ClassVar[_ContentsOf] = weakref.WeakKeyDictionary()
    _agreement: Agreement | None = None
    _store: object = None  # where its notes are

    @classmethod
    def current(cls) -> EnabledChecks:
        """The active checks; the environment is read at the first call."""
        if cls.settings is None:
            asked = asks_for_ranks()
            cls.settings = EnabledChecks()
            if asked:
                cls.switch(EnabledChecks(check_ranks=True))
        return cls.settings

    @classmethod
    def switch(cls, settings: EnabledChecks) -> None:
        """Check this from now on, in all groups there are and those to come."""
        before, cls.settings = cls.settings, settings
        was_on = before is not None and before.check_ranks
        if settings.check_ranks and not was_on:
            cls.runs += 1
            optimizers.steps.add(_before_optimizer_step)
        elif was_on and not settings.check_ranks:
            optimizers.steps.remove(_before_optimizer_step)
            cls.compared.clear()
            cls.leave("has switched the check of ranks off")
        if not settings.check_writes:
            for group in all_groups():
                unmark(group.params)
        put_around(all_units(), CheckedGroup, cls.any_is_on())

    @classmethod
    def any_is_on(cls) -> bool:
        """Whether groups have anything to check."""
        settings = cls.current()
        return settings.check_ranks or settings.check_nan or settings.check_writes

    @classmethod
    def leave(cls, why: str) -> None:
        """Tell the ranks that may wait for this one that it does not come any more."""
        agreement, cls._agreement = cls._agreement, None
        if agreement is not None:
            with contextlib.suppress(RuntimeError):  # the store has ended before this process
                agreement.leave(why)

    @classmethod
    def agree(cls, group: ProcessGroup | None, device: torch.device, step: Intent) -> None:
        """Return when all ranks of a process group are about to take ``step``."""
        assert cls.settings is not None
        assert group is not None
        timeout = cls.settings.timeout
        if timeout is None:
            timeout = timeout_of(group, device)
        try:
            cls.agreement().agree(global_ranks(group), step, timeout)
        except RankMismatchError:
            raise
        except RuntimeError as error:
            raise coded(
                CommunicationError,
                "store-gone",
                f"the process group's store could not be reached before {step.what}, so the rank "
                f"that holds it has probably ended; start all ranks again: {error}",
            ) from error

    @classmethod
    def agreement(cls) -> Agreement:
        """The agreement of the current process group."""
        store = default_store()
        if cls._store is not store:
            cls.runs += cls._agreement is not None
            cls._store = store
            cls._agreement = None
        if cls._agreement is None:
            board = StoreBoard(f"fsdp2/debug/{cls.runs}")
            cls._agreement = Agreement(board, lambda: OptimizerSteps.ended)
            _announce_exit()
        return cls._agreement


@functools.cache
def _announce_exit() -> None:
    atexit.register(lambda: Checks.leave("has ended"))


def _follow(groups: Sequence[GroupOperations]) -> Sequence[GroupOperations]:
    """Let new groups run the enabled checks."""
    return layered(groups, CheckedGroup, Checks.any_is_on())


class CheckedGroup(Layer):
    """A layer that agrees on a group's steps, and checks for writes and gradients."""

    __slots__ = ()

    height = 2

    def start_unshard(self) -> None:
        """Check for writes, agree on the all-gather, then launch it."""
        if self.state is GroupState.RESHARDED:
            self._refuse_written(stays=True)
        elif self.base.keeps_rows and not self.base.reuses_rows:
            Checks.contents.pop(self.base, None)  # what the gather brings counts from now on
        if Checks.current().check_ranks:
            smaller = self.base.smaller_group if self.state is GroupState.RESHARDED else None
            collectives = self.base.collectives if smaller is None else smaller.collectives
            if self.base not in Checks.compared:
                Checks.compared.add(self.base)
                self._compare_copies()
            if collectives.size > 1:
                Checks.agree(collectives.group, self.base.device, self._gather_step())
            between = self.base.between
            if between is not None and smaller is None and not self.base.reuses_rows:
                Checks.agree(between.group, self.base.device, self._gather_step())
        self.below.start_unshard()

    def reduce(
        self, jobs: list[tuple[Reduction, Job]], all_reduce: bool
    ) -> PendingReduction | None:
        """Agree on the collectives, reduce, and check the result."""
        settings = Checks.current()
        if settings.check_ranks:
            self._agree_on_reduction(jobs, all_reduce)
        if not settings.check_nan:
            return self.below.reduce(jobs, all_reduce)
        before = [_finite(grad) for _, job in jobs for grad in job.grads]
        names = [member.name for reduction, _ in jobs for member in reduction.members]
        pending = self.below.reduce(jobs, all_reduce)
        if pending is not None:
            self.base.streams.wait(Lane.COMPUTE, pending.done, "compute after reduction")
        rows = [
            job.outputs
            if job.flat is None or self.base.between is not None
            else views_of(r.context.flat.runs, job.flat)
            for r, job in jobs
        ]
        after = [_finite(tensor) for tensors in rows for tensor in tensors]
        self._refuse_non_finite(names, before, after, all_reduce)
        return pending

    # ---- contents

    def finish_unshard(self) -> None:
        """Finish the all-gather, and record its result."""
        unmark(self.base.params)
        self.below.finish_unshard()
        if Checks.current().check_writes:
            self._note_contents()

    def take_back(self, stays: bool = True) -> None:
        """Check for writes while the group stayed unsharded."""
        self.below.take_back(stays)
        self._refuse_written(stays)

    def shard_smaller(self) -> None:
        """Check for writes, then free, and record the rows that are left."""
        self._refuse_written()
        self.below.shard_smaller()
        self._mark_freed()
        if self.state is GroupState.RESHARDED and self.base in Checks.contents:
            self._note_contents()

    def reshard(self) -> None:
        """Check for writes, then free."""
        self._refuse_written()
        self.below.reshard()
        self._mark_freed()

    def _mark_freed(self) -> None:
        if Checks.current().check_writes:
            mark_freed(self.base.params)

    def hide(self, to: GroupState = GroupState.HIDDEN) -> None:
        """Check for writes, then register the shards."""
        self._refuse_written()
        self.below.hide(to)

    def abandon(self) -> None:
        """Free, whatever was written."""
        Checks.contents.pop(self.base, None)
        self.below.abandon()
        self._mark_freed()

    def _contents(self) -> Contents:
        smaller = self.state is GroupState.RESHARDED
        pairs = [
            (_checksum(param.local), _checksum(local_of(registered)))
            for param in self._compared_params()
            if (registered := param.smaller if smaller else param.unsharded) is not None
        ]
        return Contents([own for own, _ in pairs], [full for _, full in pairs])

    def _note_contents(self) -> Contents:
        """Record the present contents; kept rows belong to the gathered shards."""
        before, now = Checks.contents.get(self.base), self._contents()
        if before is not None and self.base.keeps_rows:
            Checks.contents[self.base] = Contents(before.shards, now.registered)
        else:
            Checks.contents[self.base] = now
        return now

    def _compared_params(self) -> list[ShardedParam]:
        """For other parameters, an all-gather may return any values."""
        return [p for p in self.base.params if not (p.is_meta or p.is_extended or p.is_its_shard)]

    def _refuse_written(self, stays: bool = False) -> None:
        """Raise on all ranks alike: each has its own rows.

        Args:
            stays: whether the unsharded parameters are used again, so that shards count too.
        """
        before = Checks.contents.get(self.base)
        if before is None or self.state not in (GroupState.UNSHARDED, GroupState.RESHARDED):
            return
        now = self._note_contents()
        sharded = map(operator.ne, before.shards, now.shards) if stays else ()
        written = [*map(operator.ne, before.registered, now.registered), *sharded]
        own = list(map(int, written))
        everyones = self.base.collectives.exchange(own) if self.base.collectives.size > 1 else [own]
        names = [param.name for param in self._compared_params()]
        for index, by_rank in enumerate(zip(*everyones, strict=True)):
            if any(by_rank) and index < len(names):
                refuse_written(names[index])
            if any(by_rank):
                raise coded(
                    ShardingStateError,
                    "written-sharded",
                    f"parameter '{names[index - len(names)]}' was written while its unit was "
                    f"unsharded, so the unit computes with older values; call reshard() on its "
                    f"module after you write",
                )

    # ---- agreeing

    def _compare_copies(self) -> None:
        """The replicate axis holds copies: of this rank's rows, before they are first used."""
        if self.base.replicas is None or self.base.replicas.size == 1:
            return
        sums = {
            f"parameter '{param.name}'": f"{_checksum(param.local)}"
            for param in self.base.params
            if not (param.is_meta or param.is_extended)
        }
        what = f"the first use of the weights of '{self.base.name}', {self._iteration()}"
        fix = "start every replica from the same weights"
        Checks.agree(self.base.replicas.group, self.base.device, Intent(what, sums, fix))

    def _gather_step(self) -> Intent:
        unit = unit_of(self.base)
        details = {
            f"parameter '{param.name}'": (
                f"{_shape(param)} in {compute_dtype(self.base.options, param)}, "
                f"{'trained' if param.sharded.requires_grad else 'frozen'}"
            )
            for param in self.base.params
        }
        moment = "outside forward and backward"
        scheduler = scheduler_of(unit)
        if scheduler is not None and scheduler.iteration.in_backward:
            moment = "for" if unit.phase is Phase.BACKWARD else "ahead of"
            moment += " its backward"
        elif scheduler is not None and (running := scheduler.entered_last) is not None:
            moment = "for its forward"
            if running is not unit:
                moment = f"during the forward of '{running.name or '(root)'}'"
            details["torch.is_grad_enabled()"] = str(torch.is_grad_enabled())
        details.update(self._flags(unit))
        if self.base.keeps_rows:
            used = "used" if self.base.reuses_rows else "not used"
            details["rows of an earlier all-gather"] = used
        what = f"the all-gather of '{self.base.name}' {moment}, {self._iteration()}"
        return Intent(what, details)

    def _agree_on_reduction(self, jobs: list[tuple[Reduction, Job]], all_reduce: bool) -> None:
        details: dict[str, str] = {"requires_all_reduce": str(bool(all_reduce))}
        for reduction, _ in jobs:
            for member in reduction.members:  # ranks may differ in who has a gradient
                gradient = f"{_shape(member)} in {reduction.context.spec.reduce_dtype}"
                details[f"the gradient of '{member.name}'"] = gradient
        details.update(self._flags(unit_of(self.base)))
        where = f"of '{self.base.name}' in backward, {self._iteration()}"
        fix = "give every rank the same"
        if self.base.reducers.size > 1:
            step = Intent(f"the reduce-scatter {where}", details, fix)
            Checks.agree(self.base.reducers.group, self.base.device, step)
        if all_reduce and self.base.replicas is not None and self.base.replicas.size > 1:
            step = Intent(f"the all-reduce {where}", details, fix)
            Checks.agree(self.base.replicas.group, self.base.device, step)
        if all_reduce and self.base.between is not None:
            step = Intent(f"the reduce-scatter between nodes {where}", details, fix)
            Checks.agree(self.base.between.group, self.base.device, step)

    def _flags(self, unit: Unit) -> dict[str, str]:
        return {
            "reshard_after_forward": str(unit.frees_after_forward),
            "reshard_after_backward": str(unit.reshard_after_backward),
            "unshard_in_backward": str(unit.unshard_in_backward),
            **_said(self.base.options),
            **_exact(self.base),
        }

    @staticmethod
    def _iteration() -> str:
        return f"iteration {Checks.agreement().iteration}"

    # ---- gradients

    def _refuse_non_finite(
        self, names: list[str], before: list[bool], after: list[bool], all_reduce: bool
    ) -> None:
        """Raise on all ranks alike: each has its own gradients, and its own rows of the sums."""
        own = [int(not finite) for finite in (*before, *after)]
        everyones = [own]
        if self.base.reducers.size > 1:
            everyones = self.base.reducers.exchange(own)
        bad = torch.tensor(everyones, dtype=torch.float32, device=self.base.device).sum(0)
        ranks = self.base.reducers.size
        if all_reduce and self.base.replicas is not None and self.base.replicas.size > 1:
            ranks *= self.base.replicas.size
            work = self.base.replicas.all_reduce(bad, _SUM)
            if work is not None:
                work.wait()
        if all_reduce and self.base.between is not None:
            ranks *= self.base.between.size
            nodes = self.base.between.exchange([int(count) for count in bad.tolist()])
            bad = torch.tensor(nodes, dtype=torch.float32, device=self.base.device).sum(0)
        counts = [int(count) for count in bad.tolist()]
        found = [
            f"'{name}' (on {start} of {ranks} ranks before the sum)"
            for name, start, end in zip(names, counts, counts[len(names) :], strict=False)
            if start or end
        ]
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise coded(
                NonFiniteGradientError,
                "not-finite",
                f"the gradients of unit '{self.base.name}' hold NaN or infinity: parameter "
                f"{', '.join(found[:3])}{more}; check the loss and the inputs of those ranks, or, "
                f"if it was on no rank, reduce in a dtype with a larger range",
            )


# ---- before a unit is made


def _check_plans(name: str, plans: list[PlannedParam], options: GroupOptions) -> None:
    """Raise on all ranks alike if they shard something else; before anything is changed.

    Args:
        name: of the modules, for the message.
        plans: the plans of their parameters.
        options: the user's options.
    """
    if not Checks.current().check_ranks:
        return
    for axes in axes_in(plans):
        details = {"mesh": str(tuple(axes.mesh.mesh.shape)), **_said(options)}
        for plan in plans:
            if plan.axes is axes:
                local = local_of(plan.param.detach())
                order = memory_order(plan.param)
                laid_out = f"{_shape(local)} on {plan.cut}"
                if order is not None:
                    laid_out += f", dims in memory {order}"
                details[f"parameter '{plan.name}'"] = laid_out
                if not is_extended(local):
                    details[f"the weights of '{plan.name}'"] = _checksum(local)
        what = f"fully_shard of {name}"
        for group in (axes.group, axes.replicas):
            if group is not None:
                Checks.agree(group, axes.device, Intent(what, details, _SAME_WEIGHTS))


def _before_optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer's step is one that ranks take together, too."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    groups: dict[tuple[int, ...], tuple[ProcessGroup, torch.device]] = {}
    for group in all_groups():
        if any(id(param.sharded) in held for param in group.params):
            for axis in (group.collectives, group.replicas, group.between):
                if axis is not None and axis.size > 1:
                    shared = axis.group
                    assert shared is not None
                    groups[global_ranks(shared)] = shared, group.device
    what = f"{type(optimizer).__name__}.step()"
    for ranks in sorted(groups):  # in an order that all ranks share
        shared, device = groups[ranks]
        step = Intent(f"{what}, iteration {Checks.agreement().iteration}")
        Checks.agree(shared, device, step)


# ---- what is compared


def _said(options: GroupOptions) -> dict[str, str]:
    """A group's options, as far as ranks must share them."""
    precision, wire = options.precision, options.wire
    chosen = [n for n in ("differences", "rotate", "feedback") if getattr(wire, n)]
    between = (wire.between_gather, wire.between_reduce)
    formats = (wire.gather, wire.reduce, *chosen, *(between if any(between) else ()))
    return {
        "param_dtype": str(precision.param_dtype),
        "reduce_dtype": str(precision.reduce_dtype),
        "the gradient divide factor": str(options.divide_factor),
        "force_sum_reduction": str(options.sum_only),
        "reduce_scatter_unused_params": str(options.reduce_unused),
        "the all-gather": type(options.all_gather).__name__,
        "the reduce-scatter": type(options.reduce_scatter).__name__,
        "the formats of `set_wire_format`": ", ".join(map(str, formats)),
    }


def _exact(group: ParamGroup) -> dict[str, str]:
    """Which parameters are sent without a codec, in a group that encodes."""
    wire = group.options.wire
    if wire.gather is None and wire.reduce is None:
        return {}
    names = [param.name for param in group.params if param.exact]
    return {"the exact parameters of `set_wire_format`": ", ".join(names) or "none"}


def _shape(tensor: torch.Tensor | ShardedParam) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _checksum(local: torch.Tensor) -> str:
    """The checksum of the bits, the same on any device."""
    if local.is_meta:
        return "not there yet (meta)"
    return f"checksum {checksum([local]) % (1 << 64):016x}"


Watchers.plans.append(_check_plans)
Watchers.groups.append(_follow)
