"""Retention of steps: those that a branch replaces, and those that `keep` removes.

    100  200  300      load(step=200), train on, save(step=230)
    100  200  (300)  230         300 is replaced: durably marked before 230 exists
    keep=2:  200  230            replaced steps are removed first, then older ones

A crash between the mark and the step leaves 200 as the newest, as the user requested.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from fsdp2.checkpoint.folder import read_manifest, store_of
from fsdp2.checkpoint.stores import Failures, PathLike, Store, step_name
from fsdp2.core.errors import CheckpointError, checkpoint_error

LOG = logging.getLogger("fsdp2.checkpoint")
# No `warnings`: where they are errors, a step that is durable would be told as one that is not.


@dataclass(frozen=True)
class Keep:
    """The number of complete steps to keep, for ``save(keep=…)``.

    Attributes:
        newest: number of the newest steps to keep; at least 1.
        best: number of additional steps with the best metric. Default 0.
        highest: whether a higher metric is better. Default ``False``: a lower one is.

    Example::

        keep = fsdp2.checkpoint.Keep(newest=2, best=1)
        fsdp2.checkpoint.save("run", model, optimizer, step=100, keep=keep, metric=loss)
    """

    newest: int
    best: int = 0
    highest: bool = False


def best_step(folder: PathLike, *, highest: bool = False) -> int:
    """Return the complete step with the best metric passed to ``save(metric=…)``; the newest if
    equal.

    Local: call it on one rank, or on all.

    Args:
        folder: as for `save`.
        highest: whether a higher metric is better. Default ``False``: a lower one is.

    Raises:
        CheckpointError: no complete step has a metric.

    Example::

        fsdp2.checkpoint.load("run", model, step=fsdp2.checkpoint.best_step("run"))
    """
    store = store_of(folder)
    ranked = _ranked(store, store.steps(), highest)
    if not ranked:
        raise checkpoint_error(
            "ckpt-no-metric",
            f"'{store}' has no complete step with a metric; pass metric= to save(), or load the "
            f"newest step",
        )
    return ranked[0]


def _ranked(store: Store, steps: list[int], highest: bool) -> list[int]:
    """Those with a metric, the best first; of equal ones the newest first."""
    found = []
    for step in steps:
        try:
            metric = read_manifest(store, step).metric
        except CheckpointError:  # it cannot be loaded either
            continue
        if metric is not None:
            found.append((-metric if highest else metric, -step))
    return [-step for _, step in sorted(found)]


def checked(asked: int | Keep | None, metric: float | None) -> tuple[Keep | None, float | None]:
    """The arguments ``keep`` and ``metric`` of `save`; a metric that is not finite is none."""
    try:
        found = None if metric is None else float(metric)
    except (TypeError, ValueError):
        raise checkpoint_error(
            "ckpt-metric", f"save(metric=…) takes a number or None, not {metric!r}"
        ) from None
    keep = Keep(asked) if type(asked) is int else asked
    numbers = [keep.newest, keep.best] if isinstance(keep, Keep) else [0, 0]
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in numbers)
    if keep is not None and (not whole or numbers[0] < 1 or numbers[1] < 0):
        raise checkpoint_error(
            "ckpt-keep",
            f"save(keep=…) takes a number of steps from 1, a Keep, or None, not {asked!r}",
        )
    assert not isinstance(keep, int)
    return keep, found if found is not None and math.isfinite(found) else None


# ---- what a branch replaces


_origins: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
"""The step of a folder from which each model continues, between a load and the next save."""


def note_load(model: nn.Module, store: Store, step: int) -> None:
    """The next save of this model continues from a step, and replaces newer ones."""
    _origins.setdefault(model, {})[str(store)] = step


def note_save(model: nn.Module, store: Store, step: int) -> None:
    """The loads of other models do not start a branch of a save."""
    name = str(store)
    _origins.get(model, {}).pop(name, None)
    for known in _origins.values():
        if name in known:
            known[name] = max(known[name], step)


def forget_load(model: nn.Module) -> None:
    """The next save of this model is not a branch: others have gone on from the step it loaded."""
    _origins.pop(model, None)


def origin_of(model: nn.Module, store: Store) -> int | None:
    """The step from which a model's first save after loads continues: the newest of all."""
    name = str(store)
    if name not in _origins.get(model, {}):
        return None
    return max(known[name] for known in _origins.values() if name in known)


def left_behind(store: Store, origin: int | None) -> list[int]:
    """The steps that a branch from ``origin`` leaves."""
    return [] if origin is None else [step for step in store.steps() if step > origin]


def branch(store: Store, step: int, origin: int | None) -> list[int]:
    """Before a step is there: mark what it replaces, and say so; which these are."""
    left = left_behind(store, origin)
    newer = [each for each in store.steps() if each > step]
    if left:
        store.replace(dict.fromkeys(left, f"by step {step}, which continues from step {origin}"))
        LOG.warning(
            "step %d of '%s' goes on from step %d and replaces %s: load() finds these by their "
            "number alone from now on, and keep= removes them first",
            *(step, store, origin, left),
        )
    elif newer:
        LOG.warning(
            "step %d of '%s' is saved beside %s, of which load() takes the newest; remove these, "
            "or pass step=%d to load()",
            *(step, store, newer, step),
        )
    return left


# ---- what `keep` removes


_doomed_before: dict[str, set[int]] = {}
"""By store, steps whose removal has begun: on a disk, a name tells the remains of removals."""


def prune(store: Store, step: int, keep: Keep | None) -> None:
    """Remove steps according to `keep`, never the newest nor ``step``; the next save retries.

    It raises nothing.
    """
    if keep is None:
        return
    try:
        tried = _doomed_before.setdefault(str(store), set())
        left = {step_name(each) for each in tried if not store.has(each)}
        doomed = _doomed(store, step, keep)
        with Failures() as failures:
            with failures.noted():
                names = [*store.half_removed(), *left.intersection(store.unfinished())]
                store.remove_unfinished(names)
                tried.clear()
            tried.update(doomed)
            with failures.noted():
                store.remove_steps(doomed)
                tried.difference_update(doomed)
    except Exception as error:  # of each store's own classes
        LOG.warning(
            "step %d of '%s' is durable, but an older one could not be removed (%s: %s); the "
            "next save with keep= tries again",
            *(step, store, type(error).__name__, error),
        )


def _doomed(store: Store, step: int, keep: Keep) -> list[int]:
    """Replaced steps that exceed the limit together with the others, and older steps."""
    live, replaced = store.steps(), sorted(store.replaced())
    stay = {step, *live[-keep.newest :]}
    if keep.best:
        others = [each for each in live if each not in stay]
        stay.update(_ranked(store, others, keep.highest)[: keep.best])
    room = max(0, keep.newest - len(live))
    stay.update(replaced[len(replaced) - room :] if room < len(replaced) else replaced)
    return [each for each in (*replaced, *live) if each not in stay]
