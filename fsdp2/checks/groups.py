"""`fsdp2.debug`, and parameter groups that check before they communicate: what it switches on.

    start_unshard   agree, then gather
    reduce          agree, reduce, check for NaN
    reshard         check for writes to unsharded parameters, then free

`CHECKS` observes groups (`fsdp2.core.schedule.observers`) while something is checked: nothing asks
in a step whether it is. `Checks` has the process's `DebugSettings` and, while ranks are checked,
its `Agreement`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, cast

import torch

from fsdp2.checks.agreement import Agreement, Intent
from fsdp2.checks.environment import asks_for_ranks
from fsdp2.checks.freed import mark_freed, unmark
from fsdp2.checks.presence import store_gone
from fsdp2.core.config import GroupOptions
from fsdp2.core.device.channels import StoreBoard, default_store
from fsdp2.core.device.collectives import Collectives, largest_over
from fsdp2.core.device.fingerprint import checksum
from fsdp2.core.device.process_groups import ProcessGroup, global_ranks, timeout_of
from fsdp2.core.device.streams import Lane
from fsdp2.core.errors import (
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
from fsdp2.core.progress import Counts
from fsdp2.core.reduce.reduction import Jobs, PendingReduction, views_of
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import Observer, Run, on_new_groups, plan_checks
from fsdp2.core.schedule.states import GroupState
from fsdp2.core.schedule.unit import Phase, Unit, all_groups, all_units, put_around, unit_of

_SAME_WEIGHTS = (
    "build the model from the same seed, or load the same weights, on every rank before fully_shard"
)


@dataclass(frozen=True)
class DebugSettings:
    """The active checks of `debug`, and a context that restores the earlier ones.

    Attributes:
        check_ranks: whether ranks agree on each step before they run it.
        check_nan: whether reduced gradients must be finite.
        check_writes: whether writes to parameters that would be lost raise, and reads of freed
            ones.
        timeout: seconds that a rank waits for silent ranks; ``None`` for the process group's own
            time-out.
    """

    check_ranks: bool = False
    check_nan: bool = False
    check_writes: bool = False
    timeout: float | None = None
    _before: DebugSettings | None = field(default=None, repr=False, compare=False)

    def __enter__(self) -> DebugSettings:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        Checks.switch(self._before)


def debug(
    *,
    check_ranks: bool | None = None,
    check_nan: bool | None = None,
    check_writes: bool | None = None,
    timeout: float | None = None,
) -> DebugSettings:
    """Switch checks on or off, for all sharded models of this process; call it on all ranks.

    Call it before `fully_shard`, if possible, which then compares the ranks' full parameters.
    Otherwise, call it between iterations. Setting the environment variable ``FSDP2_DEBUG=1``, which
    is read at the first call of `fully_shard` or of this function, is equivalent to
    ``check_ranks=True``.

    Args:
        check_ranks: before each all-gather, reduce-scatter, all-reduce and optimizer step, the
            participating ranks compare it by notes in the process group's store: unit, operation,
            iteration, shapes, dtypes, flags, which gradients exist. ``None`` (default) leaves the
            setting unchanged.
        check_nan: before and after each reduction, the participating ranks compare whether
            gradients are finite. ``None`` (default) leaves the setting unchanged.
        check_writes: compare checksums of parameters, so that a write raises which no version
            counter shows: to unsharded parameters, because it would be lost, and to sharded ones of
            a unit that stays unsharded and computes with the values gathered earlier. A read of an
            unsharded parameter that was kept and is freed raises, too. ``None`` (default) leaves
            the setting unchanged.
        timeout: with ``check_ranks``, seconds that a rank waits for silent ranks. ``None``
            (default): unchanged, initially the process group's own time-out. Ranks that are known
            to be at another step are not waited for.

    Returns:
        The active checks; as a context manager, it restores the checks from before the call.

    Raises:
        ValueError: ``timeout`` is not positive, or ``FSDP2_DEBUG`` is neither 0 nor 1.

    While checks are on, a step may raise `RankMismatchError` or `NonFiniteGradientError`, on all
    ranks that take part in it. With ``check_ranks``, each step costs about five requests to the
    store, some tenths of a millisecond, and the host waits for the slowest rank. With
    ``check_nan``, each reduction costs a small all-gather for which the host waits. With
    ``check_writes``, each all-gather and each free reads all parameters, and costs a small
    all-reduce; a lost write raises `ShardingStateError`.

    Example::

        with fsdp2.debug(check_ranks=True, check_nan=True):
            train_some_steps()
    """
    before = Checks.current()
    if timeout is not None and not timeout > 0:
        raise coded(
            ValueError,
            "debug-timeout",
            f"debug takes a positive number of seconds as timeout, not {timeout!r}",
        )
    settings = replace(
        before,
        check_ranks=before.check_ranks if check_ranks is None else bool(check_ranks),
        check_nan=before.check_nan if check_nan is None else bool(check_nan),
        check_writes=before.check_writes if check_writes is None else bool(check_writes),
        timeout=before.timeout if timeout is None else timeout,
    )
    if settings != before:
        Checks.switch(settings)
    return replace(settings, _before=before)


class Contents(NamedTuple):
    """Checksums of a group's parameters at some moment."""

    shards: list[str]
    registered: list[str]


_ContentsOf = weakref.WeakKeyDictionary[ParamGroup, Contents]


class Checks:
    """The checks of this process."""

    settings: DebugSettings | None = None
    runs = 0
    contents: ClassVar[_ContentsOf] = weakref.WeakKeyDictionary()
    _agreement: Agreement | None = None
    _store: object = None  # where its notes are

    @classmethod
    def current(cls) -> DebugSettings:
        """The active checks; the environment is read at the first call."""
        if cls.settings is None:
            asked = asks_for_ranks()
            cls.settings = DebugSettings()
            if asked:
                cls.switch(DebugSettings(check_ranks=True))
        return cls.settings

    @classmethod
    def switch(cls, settings: DebugSettings) -> None:
        """Check this from now on, in all groups there are and those to come."""
        before, cls.settings = cls.settings, settings
        was_on = before is not None and before.check_ranks
        if settings.check_ranks and not was_on:
            cls.runs += 1
            optimizers.steps.add(_before_optimizer_step)
        elif was_on and not settings.check_ranks:
            optimizers.steps.remove(_before_optimizer_step)
            cls.leave("has switched the check of ranks off")
        if not settings.check_writes:
            for group in all_groups():
                unmark(group.params)
        put_around(all_units(), CHECKS, cls.any_is_on())

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
            raise store_gone(step.what, error) from error

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
            cls._agreement = Agreement(board, lambda: Counts.ended_steps)
            _announce_exit()
        return cls._agreement


@functools.cache
def _announce_exit() -> None:
    atexit.register(lambda: Checks.leave("has ended"))


def _follow(group: ParamGroup) -> Observer | None:
    """Let a new group run the enabled checks."""
    return CHECKS if Checks.any_is_on() else None


# ---- operations


def _check_gather(group: ParamGroup, run: Run) -> None:
    """Check for writes, agree on the all-gather, then launch it."""
    resharded = group.state is GroupState.RESHARDED
    if resharded:
        _refuse_written(group, stays=True)
    elif group.keeps_rows and not group.reuses_rows:
        Checks.contents.pop(group, None)  # what the gather brings counts from now on
    if Checks.current().check_ranks:
        smaller = group.smaller_group if resharded else None
        collectives = group.collectives if smaller is None else smaller.collectives
        between = None if smaller is not None or group.reuses_rows else group.between
        _agree(group, functools.partial(_gather_step, group), collectives, between)
    run()


def _check_reduction(group: ParamGroup, run: Run, jobs: Jobs, all_reduce: bool) -> object:
    """Agree on the collectives, reduce, and check the result."""
    settings = Checks.current()
    if settings.check_ranks:
        _agree_on_reduction(group, jobs, all_reduce)
    if not settings.check_nan:
        return run(jobs, all_reduce)
    before = [_finite(grad) for _, job in jobs for grad in job.grads]
    names = [member.name for reduction, _ in jobs for member in reduction.members]
    pending = cast(PendingReduction | None, run(jobs, all_reduce))
    if pending is not None:
        group.streams.wait(Lane.COMPUTE, pending.done, "compute after reduction")
    rows = [
        job.outputs
        if job.flat is None or group.between is not None
        else views_of(r.context.flat.runs, job.flat)
        for r, job in jobs
    ]
    after = [_finite(tensor) for tensors in rows for tensor in tensors]
    _refuse_non_finite(group, names, before, after, all_reduce)
    return pending


def _note_gathered(group: ParamGroup, run: Run) -> None:
    """Finish the all-gather, and record its result."""
    unmark(group.params)
    run()
    if Checks.current().check_writes:
        _note_contents(group)


def _look(group: ParamGroup, run: Run, *args: object) -> None:
    """Check for writes, then register the shards."""
    _refuse_written(group)
    run(*args)


def _look_back(group: ParamGroup, run: Run, stays: bool = True) -> None:
    """Check for writes while the group stayed unsharded."""
    try:
        run(stays)
    finally:  # also where the group has found a write: only this raises on all ranks alike
        _refuse_written(group, stays)


def _free(group: ParamGroup, run: Run) -> None:
    """Check for writes, then free, and record the rows of a smaller group that are left."""
    _refuse_written(group)
    run()
    _mark_freed(group)
    if group.state is GroupState.RESHARDED and group in Checks.contents:
        _note_contents(group)


def _abandon(group: ParamGroup, run: Run) -> None:
    """Free, whatever was written."""
    Checks.contents.pop(group, None)
    run()
    _mark_freed(group)


CHECKS = Observer(
    2,
    {
        "start_unshard": _check_gather,
        "finish_unshard": _note_gathered,
        "reduce": _check_reduction,
        "take_back": _look_back,
        "shard_smaller": _free,
        "reshard": _free,
        "hide": _look,
        "abandon": _abandon,
    },
)


# ---- contents


def _mark_freed(group: ParamGroup) -> None:
    if Checks.current().check_writes:
        mark_freed(group.params)


def _contents(group: ParamGroup) -> Contents:
    smaller = group.state is GroupState.RESHARDED
    pairs = [
        (_checksum(param.local), _checksum(local_of(registered)))
        for param in _compared_params(group)
        if (registered := param.smaller if smaller else param.unsharded) is not None
    ]
    return Contents([own for own, _ in pairs], [full for _, full in pairs])


def _note_contents(group: ParamGroup) -> Contents:
    """Record the present contents; kept rows belong to the gathered shards."""
    before, now = Checks.contents.get(group), _contents(group)
    if before is not None and group.keeps_rows:
        Checks.contents[group] = Contents(before.shards, now.registered)
    else:
        Checks.contents[group] = now
    return now


def _compared_params(group: ParamGroup) -> list[ShardedParam]:
    """For other parameters, an all-gather may return any values."""
    return [p for p in group.params if not (p.is_meta or p.is_extended or p.is_its_shard)]


def _refuse_written(group: ParamGroup, stays: bool = False) -> None:
    """Raise on all ranks alike: each has its own rows."""
    before = Checks.contents.get(group)
    if before is None or group.state not in (GroupState.UNSHARDED, GroupState.RESHARDED):
        return
    now = _note_contents(group)
    sharded = map(operator.ne, before.shards, now.shards) if stays else ()
    written = [*map(operator.ne, before.registered, now.registered), *sharded]
    shared = [group.collectives] if group.collectives.size > 1 else []
    names = [param.name for param in _compared_params(group)]
    for index, found in enumerate(largest_over(shared, list(map(int, written)))):
        if found and index < len(names):
            refuse_written(names[index])
        if found:
            raise coded(
                ShardingStateError,
                "written-sharded",
                f"parameter '{names[index - len(names)]}' was written while its unit was "
                f"unsharded, so the unit computes with older values; call reshard() on its "
                f"module after you write",
            )


# ---- agreeing


def _agree(group: ParamGroup, describe: Callable[[], Intent], *axes: Collectives | None) -> None:
    """Return when all ranks of the axes are about to take a step."""
    present = [axis for axis in axes if axis is not None and axis.size > 1]
    if not present:
        return
    step = describe()
    for axis in present:
        Checks.agree(axis.group, group.device, step)


def _gather_step(group: ParamGroup) -> Intent:
    unit = unit_of(group)
    details = {
        f"parameter '{param.name}'": (
            f"{_shape(param)} in {compute_dtype(group.options, param)}, "
            f"{'trained' if param.sharded.requires_grad else 'frozen'}"
        )
        for param in group.params
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
    details.update(_flags(group, unit))
    if group.keeps_rows:
        used = "used" if group.reuses_rows else "not used"
        details["rows of an earlier all-gather"] = used
    what = f"the all-gather of '{group.name}' {moment}, {_iteration()}"
    return Intent(what, details)


def _agree_on_reduction(group: ParamGroup, jobs: Jobs, all_reduce: bool) -> None:
    details: dict[str, str] = {"requires_all_reduce": str(bool(all_reduce))}
    for reduction, _ in jobs:
        for member in reduction.members:  # ranks may differ in who has a gradient
            gradient = f"{_shape(member)} in {reduction.context.spec.reduce_dtype}"
            details[f"the gradient of '{member.name}'"] = gradient
    details.update(_flags(group, unit_of(group)))
    axes: dict[str, Collectives | None] = {"reduce-scatter": group.reducers}
    if all_reduce:
        axes |= {"all-reduce": group.replicas, "reduce-scatter between nodes": group.between}
    for collective, axis in axes.items():
        what = f"the {collective} of '{group.name}' in backward, {_iteration()}"
        _agree(group, functools.partial(Intent, what, details, "give every rank the same"), axis)


def _flags(group: ParamGroup, unit: Unit) -> dict[str, str]:
    return {
        "reshard_after_forward": str(unit.frees_after_forward),
        "reshard_after_backward": str(unit.reshard_after_backward),
        "unshard_in_backward": str(unit.unshard_in_backward),
        **_said(group.options),
        **_exact(group),
    }


def _iteration() -> str:
    return f"iteration {Checks.agreement().iteration}"


# ---- gradients


def _refuse_non_finite(
    group: ParamGroup, names: list[str], before: list[bool], after: list[bool], all_reduce: bool
) -> None:
    """Raise on all ranks alike: each has its own gradients, and its own rows of the sums."""
    counts, ranks = [int(not finite) for finite in (*before, *after)], 1
    for axis in (group.reducers, *((group.replicas, group.between) if all_reduce else ())):
        if axis is not None and axis.size > 1:
            counts = [sum(everyones) for everyones in zip(*axis.exchange(counts), strict=True)]
            ranks *= axis.size
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
            f"the gradients of unit '{group.name}' hold NaN or infinity: parameter "
            f"{', '.join(found[:3])}{more}; check the loss and the inputs of those ranks, or, "
            f"if it was on no rank, reduce in a dtype with a larger range",
        )


# ---- before a unit is made


def _check_plans(name: str, plans: list[PlannedParam], options: GroupOptions) -> None:
    """Raise on all ranks alike if they shard something else; before anything is changed."""
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
    for ranks in sorted(groups):  # in an order that all ranks share
        shared, device = groups[ranks]
        Checks.agree(shared, device, Intent(f"{type(optimizer).__name__}.step(), {_iteration()}"))


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


plan_checks.append(_check_plans)
on_new_groups.append(_follow)
