"""Which module is a root, and which units it serves: found when the first forward begins.

    the module that is called first      the root of all units below it
    units tied to one of these           served with it, wherever they are; so are their roots
    a root that is part of a larger model later, or gets more units      `start` again

Nothing is named before: only then is it known what a unit's place in the model is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import nn

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.layout.layout import GroupLayout
from fsdp2.core.modules.registry import RECORD, UnitRecord, record_of_unit, records_below
from fsdp2.core.notices import Notice
from fsdp2.core.params.param import ModuleEntry, ShardedParam
from fsdp2.core.schedule.calls import Calls
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.ties import inherit, tied_to

started: Notice[[str, Sequence[tuple[str, Sequence[GroupLayout]]]]] = Notice()
"""Called with a root's class, and the names of its units with the layouts of their groups."""


noting: list[weakref.ref[Scheduler]] = []
"""The schedulers that note their units' calls; empty when all have learned that they need not."""


def note_calls(scheduler: Scheduler) -> Calls:
    """Let ``scheduler`` note its units' calls from now on; returns the notes."""
    if scheduler.calls is None:
        scheduler.calls = Calls()
        noting.append(weakref.ref(scheduler))
    return scheduler.calls


def start(record: UnitRecord) -> Scheduler:
    """Make the module of ``record`` the root of all units below it, and give them one scheduler.

    Called before the first forward (or a call that needs the scheduler), when every unit is there.
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
    # What refuses comes before the first change: the schedulers before go on as they were then.
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
    layouts = [(u.title, [g.layout for g in u.own_groups if g.layout]) for u in scheduler.units]
    started(type(record.modules[0]).__name__, layouts)
    return scheduler


def served_with(record: UnitRecord) -> dict[UnitRecord, list[str]]:
    """The units that one scheduler serves, and their names: those below a root, and tied ones.

    If a unit uses parameters of a unit elsewhere, that unit and all units of its scheduler belong
    too.
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
