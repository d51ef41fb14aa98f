"""Other settings of a planned model: which of them fit, and which of those is the fastest.

search(plan, room)  ──>  Fit(tried): meshes, micro-batches, checkpointing, resharding; the best
                         of them with a larger window, units kept in part, … ; offload last
advice(plan)        ──>  the first change for a plan that does not fit, in words
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Generic, Protocol, TypeVar

import torch

from fsdp2.planning.printing import Planned, render_fit, told
from fsdp2.planning.rehearsal import Settings
from fsdp2.tracing.summaries import amount

REFINEMENTS = 6
"""Rehearsals reserved for settings that are tried only with the best ones."""

ALIKE = 0.995
"""Relative difference in speed within which plans count as equally fast, and less memory wins."""

Progress = Callable[[str], object]

P = TypeVar("P", bound="Candidate")


class Candidate(Planned, Protocol):
    """The interface of a plan that a search uses."""

    @property
    def room(self) -> int:
        """Bytes that tensors may have."""

    @property
    def is_own(self) -> bool:
        """Whether no setting changes how it is sharded."""

    @property
    def is_resizable(self) -> bool:
        """Whether a micro-batch may have other samples."""

    def with_(self: P, **changes: object) -> P:
        """Other settings."""


class Fit(Generic[P]):
    """The plans that `Plan.fit` tried.

    Attributes:
        room: the allowed bytes.
        tried: all plans.
    """

    def __init__(self, room: int, tried: list[P]) -> None:
        self.room = room
        self.tried = tried

    @property
    def fitting(self) -> list[P]:
        """The plans that fit, the fastest first; of those within 0.5 % of it, the one with least
        memory comes first.
        """
        found = [plan for plan in self.tried if _peak(plan) <= self.room]
        most = max((plan.tokens_per_second for plan in found), default=0.0)

        def order(plan: P) -> tuple[float, int]:
            speed = plan.tokens_per_second
            return (-most if speed >= ALIKE * most else -speed), _peak(plan)

        return sorted(found, key=order)

    @property
    def best(self) -> P | None:
        """The first of `fitting`; ``None`` if none fits."""
        found = self.fitting
        return found[0] if found else None

    def __str__(self) -> str:
        return render_fit(self.fitting, self.tried, self.room)


def search(
    plan: P, room: int, limit: int, low_precision: bool, progress: Progress | None = None
) -> Fit[P]:
    """See `Plan.fit`."""
    found: _Search[P] = _Search(room, limit, progress)
    for settings in _candidates(plan):
        if len(found.tried) + REFINEMENTS >= max(limit, REFINEMENTS + 1):
            break
        if not found.is_hopeless(settings):
            found.run(plan, settings)
    if found.best is None:
        thrifty = min(found.tried, key=_peak)
        found.run_all(thrifty, [replace(thrifty.settings, offload=True)])
    best = found.best
    if best is not None:
        found.run_all(best, _refinements(best, room))
    best = found.best
    if best is not None and low_precision and best.settings.precision is not None:
        halves = replace(best.settings.precision, reduce_dtype=torch.bfloat16)
        found.run_all(best, [replace(best.settings, precision=halves)])
    return Fit(room, found.tried)


class _Search(Fit[P]):
    """A running search."""

    def __init__(self, room: int, limit: int, progress: Progress | None) -> None:
        super().__init__(room, [])
        self._limit, self._progress = limit, progress

    def run(self, plan: P, settings: Settings) -> None:
        """Plan these settings, and tell what came of it."""
        made = _with(plan, settings)
        self.tried.append(made)
        if self._progress is not None:
            fits = "fits" if _peak(made) <= self.room else "does not fit"
            self._progress(
                f"{len(self.tried)} of at most {self._limit}: {told(settings)}: "
                f"{amount(_peak(made))} {fits}, {made.tokens_per_second:,.0f} tokens/s"
            )

    def run_all(self, plan: P, settings: Sequence[Settings]) -> None:
        """Those that were not tried, within the limit."""
        known = {made.settings for made in self.tried}
        for each in settings:
            if len(self.tried) < self._limit and each not in known:
                self.run(plan, each)

    def is_hopeless(self, settings: Settings) -> bool:
        """Whether other settings of this micro-batch that need less memory do not fit.

        Keeping units unsharded after forward takes more memory. So does less recomputation, unless
        activations are small: then the recomputed tensors may take more than checkpointing saves.
        """
        for made in self.tried:
            now = made.settings
            if (now.mesh, now.batch) != (settings.mesh, settings.batch):
                continue
            same = now.checkpointing == settings.checkpointing
            frees = now.reshard_after_forward is True
            if same and frees and _peak(made) > self.room:
                return True
            less = _recomputed(now) > _recomputed(settings) and (
                frees or now.reshard_after_forward == settings.reshard_after_forward
            )
            if less and _peak(made) > 1.25 * self.room:
                return True
        return False


def _recomputed(settings: Settings) -> float:
    """The part of units that are computed again."""
    every = int(settings.checkpointing)
    return 1 / every if every else 0.0


def _refinements(best: Candidate, room: int) -> list[Settings]:
    """Further changes to try with settings that fit."""
    now = best.settings
    found = [replace(now, window=now.window + 1)]
    if now.reshard_after_forward is not False:
        kept = _kept(best, room - _peak(best))
        if kept:
            found.append(replace(now, kept=kept))
        if now.accumulate > 1:
            found.append(replace(now, reshard_after_backward=False))
    if now.accumulate > 1:
        found.append(replace(now, reduce_each=not now.reduce_each))
    return found


def _kept(plan: Candidate, spare: float) -> tuple[str, ...]:
    """The last units, whose backward begins first, as many as there is spare memory for."""
    kept: list[str] = []
    for group in reversed(plan.rehearsal.reports):
        spare -= group.unsharded_bytes
        if spare < 0:
            break
        if group.name != "(root)":
            kept.append(group.name)
    return tuple(reversed(kept))


def advice(plan: Candidate) -> str:
    """The first change for a plan that does not fit: a part of a sentence, "" for nothing."""
    room = plan.room
    for settings, words in _changes_of(plan):
        made = _with(plan, settings)
        if _peak(made) <= room:
            slower = plan.tokens_per_second / made.tokens_per_second - 1
            pace = f"{abs(slower):.0%} {'slower' if slower > 0 else 'faster'}"
            return f"with {words} it does, {pace if abs(slower) >= 0.005 else 'no slower'}"
    return ""


def _changes_of(plan: Candidate) -> Iterator[tuple[Settings, str]]:
    """One change after another, those that cost least first."""
    now = plan.settings
    if plan.is_own:
        return
    blocks = [group for group in plan.rehearsal.reports if group.name != "(root)"]
    if now.reshard_after_forward is False and blocks:
        over, freed = _peak(plan) - plan.room, 0
        for group in blocks:
            freed, over = freed + 1, over - group.unsharded_bytes
            if over <= 0:
                break
        for count in dict.fromkeys((freed, len(blocks))):
            kept = tuple(group.name for group in blocks[count:])
            where = f" on {blocks[0].name} to {blocks[count - 1].name}" if kept else ""
            yield (
                replace(now, reshard_after_forward=True, kept=kept),
                f"reshard_after_forward=True{where}",
            )
        now = replace(now, reshard_after_forward=True)
    if now.batch > 1 and plan.is_resizable:
        accumulate = now.accumulate * now.batch
        yield (
            replace(now, batch=1, accumulate=accumulate, reduce_each=_is_large(plan)),
            f"batch=1 and accumulate={accumulate}",
        )
    if now.accumulate > 1 and not now.reduce_each:
        yield replace(now, reduce_each=True), "reduce_each"
    if now.checkpointing is not True:
        yield replace(now, checkpointing=True), "checkpointing"
    if not now.offload:
        yield replace(now, checkpointing=True, offload=True), "checkpointing and offload"


def _peak(plan: Candidate) -> int:
    return plan.memory.peak.rounded


def _with(plan: P, settings: Settings) -> P:
    changes: dict[str, object] = {
        each.name: getattr(settings, each.name)
        for each in fields(Settings)
        if getattr(settings, each.name) != getattr(plan.settings, each.name)
    }
    return plan.with_(**changes) if changes else plan


def _candidates(plan: Candidate) -> Iterator[Settings]:
    """The thriftiest of a micro-batch first: where that does not fit, none does."""
    now = plan.settings
    samples = now.batch * now.accumulate
    sizes = [size for size in range(samples, 0, -1) if samples % size == 0][:4]
    if not plan.is_resizable:
        sizes = [now.batch]
    for mesh in _meshes(now, plan.hardware.node):
        for size in sizes:
            for reshard in (True, False):
                for checkpointing in (True, 2, False):
                    yield replace(
                        now,
                        mesh=mesh,
                        batch=size,
                        accumulate=samples // size if plan.is_resizable else now.accumulate,
                        reduce_each=now.reduce_each or _is_large(plan),
                        reshard_after_forward=reshard,
                        checkpointing=checkpointing,
                    )


def _is_large(plan: Candidate) -> bool:
    """Whether whole gradients, which stay between micro-batches, take a quarter of the device."""
    return sum(group.unsharded_bytes for group in plan.rehearsal.reports) > plan.room / 4


def _meshes(now: Settings, node: int) -> list[tuple[int, ...]]:
    """As it is; over several nodes also all ranks, and shards within one node, or within two."""
    world, found = now.world, [now.mesh]
    if world > node and world % node == 0:
        found.append((world,))
        found += [(world // size, size) for size in (node, 2 * node) if world % size == 0]
    return [mesh for mesh in dict.fromkeys(found) if mesh[0] > 1 or len(mesh) == 1]
