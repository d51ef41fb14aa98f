"""Which module has which unit, with what arguments `fully_shard` was called on it, and its root.

    fully_shard ──> module.__dict__[RECORD] = a UnitRecord ──> record_of, records_below

Roots are found when the first forward begins; nothing is named before:

    the module that is called first      the root of all units below it
    units tied to one of these           served with it, wherever they are; so are their roots
    a root that is part of a larger model later, or gets more units      `start` again

Plans, reports and setters use this. This module does not know how hooks are installed, nor the
autograd engine: `UnitHooks`, which does, is the record's subclass that `fully_shard` makes.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from torch import nn

from fsdp2.core.config import CPUOffloadPolicy
from fsdp2.core.device.streams import Streams
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.layout.mesh import MeshAxes
from fsdp2.core.modules.dynamo import uncompiled
from fsdp2.core.params.param import ModuleEntries, ModuleEntry, ShardedParam
from fsdp2.core.schedule.calls import Calls
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import Unit, all_units, enlist, inherit, tied_to

RECORD = "_fsdp2_record"
"""The key of the unit's record in a sharded module's ``__dict__``."""

OUTSIDE = "_fsdp2_outside"
"""The key of a hook on modules' forwards that `UnitRecord.outside` has."""

Args = tuple[object, ...]
Kwargs = dict[str, object]
"""The keyword arguments of a module call."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of `fully_shard` that later parameters also use; ``reshard_to`` is the number
    of ranks over which forward reshards, if not over all or none.
    """

    axes: MeshAxes
    offload: CPUOffloadPolicy | None
    reshard_to: int | None


class UnitRecord:
    """The record that a call of `fully_shard` leaves on its modules.

    Attributes:
        ignored: the entries of its modules that hold ignored parameters.
        scheduler: the one that serves the unit; ``None`` before the root's first forward.
        alone: whether it serves one root; false if parameters below several are tied.
        cast_to: the dtype of floating-point inputs of the unit's forward; ``None``: as they are.
        leave_backward: called by autograd with the gradient of an input, when the unit's backward
            is over. A bound method of the record would be one more Python call per unit and step;
            the state of this one changes with the scheduler.
        outside: forward hooks of modules that explain an exception outside of the unit's forwards.
    """

    def __init__(
        self,
        unit: Unit,
        modules: Sequence[nn.Module],
        arguments: Arguments,
        ignored: ModuleEntries,
        streams: Streams,
    ) -> None:
        self.unit = unit
        # They own this object. A way back would leave their memory to the garbage collector.
        self._modules = [weakref.ref(module) for module in modules]
        self.arguments = arguments
        self.ignored = ignored
        self.scheduler: Scheduler | None = None
        self.alone = True
        self.streams = streams
        precision = unit.options.precision
        self.cast_to = precision.param_dtype if precision.cast_forward_inputs else None
        self.leave_backward: functools.partial[None] = functools.partial(Scheduler.exit_backward)
        self.outside: list[dict[str, object]] = []
        enlist(unit, self)
        for module in modules:
            module.__dict__[RECORD] = self

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that `fully_shard` was called on, as far as they still exist."""
        return tuple([m for reference in self._modules if (m := reference()) is not None])

    def run_on(self, streams: Streams) -> None:
        """Let the scheduler, and later ones, order lanes by another object for the same streams."""
        self.streams = streams
        if self.scheduler is not None:
            self.scheduler.run_on(streams)

    def serve(self, scheduler: Scheduler) -> None:
        """Let ``scheduler`` serve the unit from now on: in graphs that are there already, too."""
        self.scheduler = scheduler
        for hooks in self.outside:
            hooks.pop(OUTSIDE, None)
        self.outside.clear()
        leave = uncompiled(Scheduler.exit_backward)
        # In place, for the tensors that hold it.
        self.leave_backward.__setstate__((leave, (scheduler, self.unit), {}, None))  # type: ignore[attr-defined]  # not in typeshed


# ---- look-ups


def record_of(module: object) -> UnitRecord | None:
    """The record of the unit that `fully_shard` made of ``module``, if it was called on it."""
    return module.__dict__.get(RECORD)


def record_of_unit(unit: Unit) -> UnitRecord | None:
    """The record of a unit; ``None`` if its modules were deleted."""
    record = unit.record()
    return record if isinstance(record, UnitRecord) else None


def units_by_param() -> dict[nn.Parameter, Unit]:
    """The unit that each sharded parameter of this process belongs to."""
    return {
        param.sharded: unit
        for unit in all_units()
        for group in unit.own_groups
        for param in group.params
    }


def scheduler_of(unit: Unit) -> Scheduler | None:
    """The scheduler that serves a unit; ``None`` before its root's first forward. Another one does
    where its root becomes part of a larger model, or gets more units.
    """
    record = record_of_unit(unit)
    return None if record is None else record.scheduler


def refresh(records: Iterable[UnitRecord]) -> None:
    """Let the schedulers of units follow flags that were changed."""
    for scheduler in {record.scheduler for record in records}:
        if scheduler is not None:
            scheduler.refresh()


def require_record(module: object) -> UnitRecord:
    """As `record_of`; raises where `fully_shard` was not called on ``module``."""
    record = record_of(module)
    if record is None:
        raise coded(
            ValueError,
            "not-sharded",
            f"{type(module).__name__} is not sharded; call fully_shard on it before its methods",
        )
    return record


def records_below(module: nn.Module, recurse: bool = True) -> list[UnitRecord]:
    """The records of a module's unit and, with ``recurse``, of those below it; each once."""
    members = modules_below(module) if recurse else [module]
    return list(dict.fromkeys(filter(None, [m.__dict__.get(RECORD) for m in members])))


# ---- walks


def walk(
    root: nn.Module, leaves_out: Callable[[nn.Module], bool], by_depth: bool = False
) -> list[tuple[nn.Module, str]]:
    """Modules at and below ``root``, each once, in the order of registration, with the prefix of
    their parameters' names; none that ``leaves_out``, or that are only below such.
    """
    found: dict[nn.Module, str] = {}
    waiting = deque([(root, "")])
    while waiting:
        module, prefix = waiting.popleft()
        if module in found or (found and leaves_out(module)):  # which is not asked for the root
            continue
        found[module] = prefix
        below = [(m, f"{prefix}{name}.") for name, m in module._modules.items() if m is not None]
        if by_depth:
            waiting.extend(below)
        else:
            waiting.extendleft(reversed(below))
    return list(found.items())


def managed_modules(
    modules: tuple[nn.Module, ...],
    into_units: bool = False,
    pending: Set[nn.Module] = frozenset(),
) -> list[tuple[nn.Module, str]]:
    """Modules at and below ``modules``, parents first, that no other unit has and that are not
    ``pending`` as units to be, with their parameters' prefixes.
    """
    # `walk` would call a function for each module that `fully_shard` is called on.
    others = pending - set(modules)
    found: dict[nn.Module, str] = {}
    waiting = [(module, "") for module in reversed(modules)]
    while waiting:
        module, prefix = waiting.pop()
        if module in found:
            continue
        found[module] = prefix
        for name, child in reversed(module._modules.items()):
            if child is None or child in others:
                continue
            if into_units or child.__dict__.get(RECORD) is None:
                waiting.append((child, f"{prefix}{name}."))
    return list(found.items())


def modules_below(module: nn.Module) -> list[nn.Module]:
    """As ``module.modules()``, in the same order: without a generator for each depth."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [module]
    while waiting:
        member = waiting.pop()
        if member is not None and member not in found:
            found[member] = None
            waiting += reversed(member._modules.values())
    return list(found)


# ---- roots

noting: list[weakref.ref[Scheduler]] = []
"""The schedulers that note their units' calls; empty when all have learned that they need not."""


def note_calls(scheduler: Scheduler) -> Calls:
    """Let ``scheduler`` note its units' calls from now on; returns the notes."""
    if scheduler.calls is None:
        scheduler.calls = Calls()
        noting.append(weakref.ref(scheduler))
    return scheduler.calls


def start(record: UnitRecord) -> Scheduler:
    """Make the module of ``record`` the root of all units below it, and give them one scheduler:
    before the first forward (or a call that needs the scheduler), when every unit is there.
    """
    if len(record.modules) > 1:
        raise coded(
            ShardingStateError,
            "list-has-no-root",
            f"the first forward ran a module of the list {record.unit.name}, which has no single "
            f"root; call fully_shard on the model that holds them and run that first",
        )
    # A group whose own unit lost its modules is below no root: who uses it owns it from now on.
    for below in records_below(record.modules[0]):
        inherit(below.unit, lambda unit: record_of_unit(unit) is None)
    found = served_with(record)
    roots = _tops(found)
    for top in roots:
        if top is not record and record in records_below(top.modules[0]):
            start(top)  # a tied one is around it, and is the root sooner or later
            assert record.scheduler is not None
            return record.scheduler
    # Errors come before the first change, so that the earlier schedulers still serve their units.
    for below, names in found.items():
        busy = below.scheduler
        if busy is not None and busy.is_running:
            raise coded(
                ShardingStateError,
                "running-below",
                f"unit '{', '.join(names)}' is still in its own forward or backward; finish that, "
                f"or call reset_iter_state() on it, before running its parent",
            )
        if busy is not None and busy.manual and below not in roots:
            raise coded(
                ShardingStateError,
                "manual-below",
                f"set_manual_backward_finalization was called on '{', '.join(names)}', which is "
                f"below the root; call it on the module whose forward you call",
            )
        if busy is not None:
            busy.wait_for_reductions()  # which are in its window, not in the new one's
    old = record.scheduler
    scheduler = Scheduler([below.unit for below in found], record.streams)
    if old is not None:  # units were added; what users set on the root stays
        scheduler.is_last_backward = old.is_last_backward
        scheduler.post_optim_event = old.post_optim_event
    before = [top.scheduler for top in (record, *roots) if top.scheduler is not None]
    scheduler.manual = any(former.manual for former in before)
    for former in before:
        scheduler.succeed(former)
    for below, names in found.items():
        below.serve(scheduler)
        below.unit.name = ", ".join(names)
        below.unit.visits = []  # positions among the calls of an iteration that is dropped
        below.unit.is_root = below is record or below in roots
        below.alone = len(roots) == 1
    # Messages name a parameter by its place in the model, which is known since the root is.
    for top in roots:
        for module in top.modules:
            _name_parameters(module)
    note_calls(scheduler)
    return scheduler


def served_with(record: UnitRecord) -> dict[UnitRecord, list[str]]:
    """The units that one scheduler serves, and their names: those below a root, and units, with all
    of their scheduler, whose parameters one of these uses.
    """
    found: dict[UnitRecord, list[str]] = {}
    for name, module in record.modules[0].named_modules():
        below = module.__dict__.get(RECORD)
        if below is not None:
            found.setdefault(below, []).append(name)
    reached = list(found)
    for near in reached:  # which grows
        for unit in sorted(tied_to(near.unit), key=lambda unit: unit.name):
            tied = record_of_unit(unit)
            if tied is None or tied in found:
                continue
            others = [below for module in tied.modules for below in records_below(module)]
            if tied.scheduler is not None:
                others += filter(None, map(record_of_unit, tied.scheduler.units))
            for further in others:
                if further not in found:
                    found[further] = [further.unit.name]
                    reached.append(further)
    return found


def _tops(found: Iterable[UnitRecord]) -> list[UnitRecord]:
    """Those that are below none of the others."""
    inside: set[UnitRecord] = set()
    for record in found:
        modules = record.modules
        if record in inside and len(modules) == 1:
            continue  # all that is below it is below the one around it, too
        for module in modules:
            inside.update(below for below in records_below(module) if below is not record)
    return [record for record in found if record not in inside]


def _name_parameters(root: nn.Module) -> None:
    """By where they are registered, the first place of several; whatever is registered there."""
    managed: dict[ModuleEntry, ShardedParam] = {}
    modules = list(root.named_modules())
    for below in records_below(root):
        for group in below.unit.own_groups:
            group.name = below.unit.title
            for param in group.params:
                managed.update(dict.fromkeys(param.entries, param))
    entries = [(m, key, prefix) for prefix, m in modules for key in m._parameters]
    for module, key, prefix in reversed(entries):
        named = managed.get((module, key))
        if named is not None:
            named.name = f"{prefix}.{key}" if prefix else key
