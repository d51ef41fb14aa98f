"""Random module trees, device settings, and a watch over what a simulation must never do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import torch

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions, MixedPrecisionPolicy
from fsdp2.core.device.streams import Lane
from fsdp2.core.gather import segments
from fsdp2.core.layout.layout import ROWS, Cut
from fsdp2.core.progress import Counts
from fsdp2.core.schedule.unit import Phase, Unit
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import VirtualDevice, VirtualTensor
from fsdp2.tracing.record.notes import HOST, Allocation, Place, operations
from tests.common.observing import observe

MAX_DEPTH = 4
MAX_NODES = 9
MAX_CALLS = 24

SHAPES = (
    ((8, 8), (8,)),  # aligned: coalesced where the backend can
    ((8, 8), (8,)),
    ((5, 3),),  # odd: packed, padded
    ((64, 4), (7,), (8, 2)),  # both
    ((8, 8), (0, 4)),  # an empty one among others
    (),  # every parameter belongs to units below
)
EMPTY = ((0, 8), (3, 0))  # nothing to gather or reduce: in one tree of four

PRECISIONS = (
    None,
    None,
    MixedPrecisionPolicy(torch.bfloat16),
    MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
)

OFFLOADS = (None, None, None, CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False))


def random_settings(
    rng: random.Random, device: VirtualDevice, ranks: Sequence[int]
) -> dict[str, Any]:
    """What a simulation takes besides its model and its device."""

    def hook(flat: VirtualTensor) -> None:
        device.run("hook", [flat], [flat])

    apart = random.Random(repr(rng.getstate()[1][:3]))  # of later draws: schedules stay the same
    options = GroupOptions(
        divide_factor=rng.choice((None, None, 3.0)),
        sum_only=rng.random() < 0.2,
        reduce_unused=rng.random() < 0.15,
        pack_below=rng.choice((0, 0, 64, 256)),
        keep_storage=rng.random() < 0.15,
        keep_gradients=rng.random() < 0.2,
        all_reduce_hook=hook if rng.random() < 0.2 else None,  # type: ignore[arg-type]  # simulated
        keep_rows=apart.choice((None, None, True, False)),
    )
    settings: dict[str, Any] = {
        "world_size": rng.choice(ranks),
        "coalesces": rng.random() < 0.6,
        "precision": rng.choice(PRECISIONS),
        "copies": rng.choice((1, 1, 2)),
        "offload": rng.choice(OFFLOADS),
        "smaller": rng.choice((None, None, 2)),
        "options": options,
        "levels": apart.random() < 0.5,
    }
    if not _keeps_near_rows(settings):
        settings["options"] = replace(options, keep_rows=None)
    return settings


def _keeps_near_rows(settings: dict[str, Any]) -> bool:
    """Whether rows that are kept are a node's or a smaller group's in each group of a node.

    Groups that keep all rows gather once per step: other rules count those.
    """
    smaller, levels = settings["smaller"], settings["levels"] and settings["copies"] > 1
    sizes = {settings["world_size"], max(settings["world_size"] // 2, 1)} - {1}  # `Node.more`
    return levels or all(smaller and smaller < size and size % smaller == 0 for size in sizes)


def random_flags(rng: random.Random, sim: Simulation) -> None:
    """Flags of units that change schedules and leave the results as they are."""
    for unit in sim.scheduler.units:
        unit.input_buffers = rng.choice((1, 1, 1, 1, 1, 1, 2, 3))
        unit.unshard_in_backward = rng.random() < 0.9
    sim.scheduler.refresh()


def by_rows(shape: tuple[int, ...], ranks: int) -> Cut:
    """As torch's FSDP2 cuts."""
    return ROWS


def by_columns(shape: tuple[int, ...], ranks: int) -> Cut:
    """On dim 1, where there is one."""
    return Cut(1) if len(shape) > 1 else ROWS


def random_tree(rng: random.Random, plain: bool = False, tied: bool = True) -> Node:
    """A root with up to `MAX_NODES` nodes below."""
    budget = rng.randint(2, MAX_NODES)
    shapes = (*SHAPES, EMPTY) if rng.random() < 0.25 else SHAPES
    root = Node("n0", shapes=rng.choice(shapes))
    open_nodes = [(root, 1)]
    for number in range(1, budget):
        parent, depth = rng.choice(open_nodes)
        node = Node(
            f"n{number}",
            shapes=rng.choice(shapes),
            cut=rng.choice((by_rows, by_rows, by_rows, by_columns)),
            reshard_after_forward=rng.choice((None, None, None, True, False)),
        )
        if not plain:
            node.grad_to_input = rng.random() < 0.8
            node.used = rng.random() < 0.9
            node.absent = rng.choice((0, 0, 0, 1))
            if rng.random() < 0.15:
                node.more = [rng.choice(shapes) or ((8, 8),)]
        parent.children.append(node)
        if depth + 1 < MAX_DEPTH:
            open_nodes.append((node, depth + 1))
    shuffle_calls(rng, root)
    if tied:
        tie_some(root)
    if not plain:
        keep_some_whole(root)
    return root


def keep_some_whole(root: Node) -> None:
    """In one tree of four, some nodes have parameters that stay whole."""
    rng = random.Random(repr([(node.name, node.shapes, node.calls) for node in root.walk()]))
    if rng.random() < 0.25:
        for node in root.walk():
            node.whole = rng.choice(((), ((8,),), ((5,), (3, 2))))


def tie_some(root: Node) -> None:
    """In one tree of four, other nodes use a parameter of a node, too."""
    rng = random.Random(repr([(node.calls, node.shapes) for node in root.walk()]))
    owners = [node for node in root.walk() if node.shapes]
    while owners and rng.random() < 0.25:
        owner = rng.choice(owners)
        others = [n for n in root.walk() if n.shapes or n.grad_to_input]
        others = [n for n in others if n not in (owner, *owner.tied)]
        owner.tied += rng.sample(others, min(len(others), rng.choice((1, 1, 2))))


def shuffle_calls(rng: random.Random, root: Node) -> None:
    """New calls for every node: children in any order, left out or repeated."""
    for node in root.walk():
        positions = list(range(len(node.children)))
        style = rng.random()
        if style < 0.3:
            rng.shuffle(positions)
        elif style < 0.7 and positions:
            positions = [rng.choice(positions) for _ in range(rng.randint(1, 4))]
        node.calls = positions
    while calls_below(root) > MAX_CALLS:
        longest = max(root.walk(), key=lambda node: len(node.calls))
        longest.calls.pop()


def calls_below(node: Node) -> int:
    """How many calls one call of ``node`` makes, itself included."""
    return 1 + sum(calls_below(node.children[position]) for position in node.calls)


def communicates(node: Node) -> bool:
    """Whether its parameters have elements, so that there is something to gather and reduce."""
    return any(
        0 not in shape for shapes in (node.shapes, *node.more, node.whole) for shape in shapes
    )


def calls_of(root: Node) -> Counter[Node]:
    """How often one call of ``root`` calls each node."""
    calls = Counter([root])
    for position in root.calls:
        calls.update(calls_of(root.children[position]))
    return calls


_HOMES = (Lane.COMPUTE, HOST)  # of memory: invariant I2
_LANES: dict[str, tuple[Place, ...]] = {
    "gradient": (Lane.COMPUTE,),
    "copy_out": (Lane.COMPUTE, Lane.ALL_GATHER),  # there, into node rows
    "chunk_cat": (Lane.COMPUTE, Lane.ALL_REDUCE),  # there, of sums of a node
    "load": (Lane.COPY_IN,),
    "all_gather": (Lane.ALL_GATHER,),
    "reduce_scatter": (Lane.REDUCE, Lane.ALL_REDUCE),  # there, between nodes
    "all_reduce": (Lane.ALL_REDUCE,),
    "to_host": (Lane.REDUCE, Lane.ALL_REDUCE),
}


def _unit_of(group: str) -> str:
    """The unit of a group of this name; a unit's further groups are called unit/1, unit/2, …"""
    return group.partition("/")[0]


def is_gathered(unit: Unit) -> bool:
    """Whether parameters are that no other unit uses, which would gather and free them, too.

    Whole ones do not count: a hook that writes them frees what was gathered ahead.
    """
    own = [g for g in unit.groups if g.base not in unit.ties and not g.is_whole]
    return any(not (g.state.needs_gather or g.state.is_sharded) for g in own)


class InterruptError(Exception):
    """Stands for whatever a user's forward or backward may raise."""


class Watch:
    """Looks at a simulation after every step and notes what went wrong.

    Its settings are random but for those that are ``wanted``.
    """

    window: ClassVar[int] = 1

    def __init__(
        self,
        rng: random.Random,
        root: Node,
        bounded: bool = True,
        device: VirtualDevice | None = None,
        ranks: Sequence[int] = (1, 2, 2, 4, 4),
        **wanted: Any,
    ) -> None:
        self.problems: list[str] = []
        self.gathers: Counter[str] = Counter()
        self.wasted = 0
        self.log: list[tuple[str, str]] = []
        self.interrupt_after: int | None = None
        self.at_each_step: Callable[[], None] = lambda: None
        self.device = device or VirtualDevice()
        self._bounded = bounded
        self._owed: set[str] = set()  # groups that have gradients to reduce
        self._partial: set[str] = set()  # groups that may have partial sums
        self._excused: set[Allocation] = set()  # gradients that an exception cost
        self._seen = 0
        self._arriving: set[str] = set()
        self._waiting: list[Unit] = []  # gathered at the last step, for what is to come
        self._hollow = {
            f"{node.name}/{number}" if number else node.name
            for node in root.walk()
            for number, shapes in enumerate((node.shapes, *node.more))
            if any(0 in shape for shape in shapes)
        }
        self._whole = {f"{node.name}/whole" for node in root.walk() if node.whole}
        self._kept: set[Unit] = set()  # by the last backward, whatever the flags are now
        self.sim = Simulation(
            root,
            self.device,
            check=self._check,
            **(random_settings(rng, self.device, ranks) | {"window": self.window} | wanted),
        )
        units = self.sim.scheduler.units
        self._groups = {group.name: group for unit in units for group in unit.own_groups}
        observe(units, self._observe)
        for group in self._groups.values():
            group.bind()  # what it keeps for good is allocated now
        groups = self._groups.items()
        self._silent = {name for name, group in groups if not group.bound.gather.collectives}
        self._silent |= {node.name for node in root.walk() if not communicates(node)}
        self._kept_for_good = self.live()
        self._fills = any(g.options.reduce_unused for u in units for g in u.own_groups)
        self._keeps_storage = any(g.options.keep_storage for u in units for g in u.own_groups)
        self._keeps_rows = any(g.keeps_rows for u in units for g in u.own_groups)
        self._keeps_gradients = any(g.options.keep_gradients for u in units for g in u.own_groups)

    # ---- while it runs

    def _observe(self, operation: str, name: str) -> None:
        self._follow_gradients()
        if operation == "reshard" and self._groups[name].gathered_at != Counts.steps:
            operation = "free what is outdated"
        self.log.append((operation, name))
        if operation == "all_gather":
            self.gathers[name] += 1
            self._arriving.add(name)
        elif operation == "finish":
            self._arriving.discard(name)
        elif operation in ("reshard", "free what is outdated") and name in self._arriving:
            self._arriving.discard(name)
            self.wasted += 1
        elif operation == "reduce" and name in self._whole:
            self._reduces_whole(name)
        elif operation == "reduce":
            unit = next(u for u in self.sim.scheduler.units if u.name == _unit_of(name))
            known = self._owed | self._hollow | (self._partial if unit.all_reduce else set())
            if name not in known and not self._fills:  # else skipped units reduce zeros
                self._say(f"{name} is reduced without new gradients")
            (self._partial.discard if unit.all_reduce else self._partial.add)(name)
            self._owed.discard(name)

    def _reduces_whole(self, leader: str) -> None:
        """Those of all units that all-reduce now go together, by the name of the first."""
        units = [u for u in self.sim.scheduler.units if u.sync and u.all_reduce]
        due = {group.name for unit in units for group in unit.own_groups} & self._whole
        if leader not in due or not (due & self._owed or self._fills):
            self._say(f"{leader} is reduced without new gradients of whole parameters")
        self._owed -= due

    def _follow_gradients(self) -> None:
        trace = self.device.trace
        for op in operations(trace[self._seen :]):
            if op.kind == "gradient" and op.writes:
                self._owed.add(op.writes[0].name.split()[1].partition(".")[0])
        self._seen = len(trace)

    def _check(self, sim: Simulation, what: str) -> None:
        self._kept = {unit for unit in self._kept if unit.is_gathered}
        ahead = sim.gathered_ahead(self._kept)
        if what == "end of backward":
            units = sim.scheduler.units
            self._kept = {unit for unit in units if not unit.reshard_after_backward}
            if not sim.scheduler.is_last_backward:
                what = "backward that is not the last"
                lost = [unit for unit in self._waiting if not is_gathered(unit)]
                if lost and not self._fills:  # else backward takes along what it skips
                    self._say(f"{lost} were gathered for a backward to come, and freed")
        idle = [unit for unit in sim.scheduler.units if unit.phase is Phase.IDLE]
        self._waiting = [unit for unit in (*ahead, *idle) if is_gathered(unit)]
        if what == "finalize":
            what = "end of backward"
        self.log.append(("step", what))
        window = max(unit.prefetch_window for unit in sim.scheduler.units)
        if self._bounded and len(ahead) > (0 if what == "loss" else window):
            self._say(f"after {what} {ahead} are gathered")
        if self.device.races:
            self._say(f"at {what}: {self.device.races[0]}")
        self.at_each_step()
        if self.interrupt_after is not None:
            self.interrupt_after -= 1
            if self.interrupt_after < 0:
                self.interrupt_after = None
                raise InterruptError

    def break_hooks(self, after: int) -> None:
        """The hook of the parameter whose gradient comes ``after`` others raises."""
        seen = iter(range(after))

        def hook(param: Any) -> None:
            if next(seen, None) is None:
                raise InterruptError

        for unit in self.sim.scheduler.units:
            for group in unit.own_groups:
                for param in group.params:
                    param.hook = hook  # type: ignore[attr-defined]  # a simulated one

    def _say(self, problem: str) -> None:
        self.problems.append(problem)

    # ---- between phases

    def discard_gradients(self) -> None:
        """What ``zero_grad()`` does of those that are not reduced: they are gone."""
        called = [(unit, g) for unit in self.sim.scheduler.units for g in unit.own_groups]
        waiting = [g for unit, g in called if g in unit.ties or g.name in self._whole]
        params = [param.name for group in waiting for param in group.params]
        names = {f"{what} {name}" for name in params for what in ("gradient", "accumulated")}
        for op in operations(self.device.trace):
            if op.kind in ("gradient", "copy"):
                self._excused |= {b for b in op.writes if b.name in names}
        for _, group in called:
            group.discard_gradients()

    def reset(self) -> None:
        """What a user does after an exception; gradients that were not reduced are gone."""
        self.sim.scheduler.reset()
        self.sim.active.clear()
        self.sim.calls.clear()
        self._follow_gradients()
        self._owed.clear()
        self._partial.clear()
        self._arriving.clear()
        self.log.append(("step", "reset"))
        found = operations(self.device.trace)
        self._excused |= {b for op in found if op.kind == "gradient" for b in op.writes}

    def check_reduced(self) -> None:
        """After a backward: no unit that syncs has gradients left, every other keeps its own."""
        self._follow_gradients()
        units = self.sim.scheduler.units
        syncing = {unit.name for unit in units if unit.sync}
        left = {name for name in self._owed if _unit_of(name) in syncing}
        left -= self._whole & {f"{unit.name}/whole" for unit in units if not unit.all_reduce}
        if left:
            self._say(f"{sorted(left)} have gradients that were not reduced")

    def check_sharded(self) -> None:
        """After an iteration: nothing is gathered but what is kept on request."""
        for unit in self.sim.scheduler.units:
            if unit.reshard_after_backward and unit.is_gathered:
                self._say(f"{unit.name} is still gathered")

    def check_trace(self) -> None:
        """At the end: operations kept to their lanes, and no gradient was dropped unread."""
        read: set[Allocation] = set()
        gradients: set[Allocation] = set()
        for note in self.device.trace:
            if isinstance(note, Allocation) and note.lane not in _HOMES:
                self._say(f"'{note}' is not on COMPUTE")
        for op in operations(self.device.trace):
            lanes = _LANES.get(op.kind, (op.lane,))
            if op.lane not in lanes:
                self._say(f"'{op}' is not on {lanes[0].name}")
            if op.kind == "gradient":
                gradients.update(op.writes)
            else:
                read.update(op.reads)
        if not gradients <= read | self._excused:
            self._say(f"{sorted(g.name for g in gradients - read)} were dropped")

        if self._bounded:
            self._check_guesses()

    def _check_guesses(self) -> None:
        """What was gathered on a guess and is freed unused made room for the next guess.

        Besides, it goes at the loss, after the last backward and in a reset, and when a forward
        begins after an optimizer step. A guess with nothing to gather is not in the log.
        """
        log = self._unit_log()
        arriving: set[str] = set()
        for position, (kind, name) in enumerate(log):
            if kind == "all_gather":
                arriving.add(name)
            elif kind in ("finish", "free what is outdated"):
                arriving.discard(name)
            elif kind == "reshard" and name in arriving:
                arriving.discard(name)
                what, other = log[position + 1]
                guess = what == "all_gather" and log[position + 2] != ("finish", other)
                guess = guess or bool(self._silent) or self._comes_again(log, position)
                if not guess and not self._is_end(log, position):
                    self._say(f"{name} was gathered ahead, and freed for {what} {other}")

    def _unit_log(self) -> list[tuple[str, str]]:
        """The log with one entry for what all groups of a unit do."""
        log: list[tuple[str, str]] = []
        tied = {group.name for unit in self.sim.scheduler.units for group in unit.ties}
        for kind, name in self.log:
            if name in tied and kind in ("reshard", "free what is outdated"):
                continue  # they go with any of several units
            entry = (kind, name if kind == "step" else _unit_of(name))
            if kind == "step" or log[-1:] != [entry]:
                log.append(entry)
        return log

    def _comes_again(self, log: list[tuple[str, str]], position: int) -> bool:
        """Whether a unit stays gathered in its place, being one of several that come next."""
        names = {unit.name for unit in self.sim.scheduler.units if unit.prefetch_window > 1}
        freed = set()
        for kind, name in islice(log, position + 1, None):
            if kind == "step":
                return name.startswith("exit") and name.split()[-1] in names - freed
            if kind == "reshard":
                freed.add(name)
        return False

    @staticmethod
    def _is_end(log: list[tuple[str, str]], position: int) -> bool:
        """Whether in the log a forward or the last backward ends here, or is given up."""
        steps = (name for kind, name in islice(log, position, None) if kind == "step")
        step = next(steps)
        if step.startswith("exit forward"):  # that of the root comes right before the loss
            step = next(steps)
        return step in ("loss", "end of backward", "reset")

    def live(self) -> Counter[str]:
        """Names of what is allocated."""
        return Counter(allocation.name for allocation in self.device.live)

    def check_live(self, padding: bool = True) -> None:
        """After an iteration in which nothing is kept: no allocation came or went.

        Gathered memory may stay where ``keep_storage`` says so, that of gradients where
        ``keep_gradients`` does, that of rows that are kept always.
        """
        live, wanted = self.live(), Counter(self._kept_for_good)
        del live[segments.ROWS]
        for group in self.sim.scheduler.groups:
            if group.is_retained:
                live[f"gathered {group.name}"] -= 1
        live += Counter()  # without zeros
        for name in list(live):
            if name.startswith("gathered") and self._keeps_storage:
                del live[name]
            if name in ("kept gradient", "host gradient") and self._keeps_gradients:
                del live[name]
            if name.startswith(("node rows", "rows of the smaller")) and self._keeps_rows:
                del live[name]
        live.pop("residuals", None)  # made by the first reduction with error feedback, and kept
        # Whole parameters' reduction of all is bound at the end of the first backward.
        for name in () if padding and not self._whole else ("padding", "marks"):
            live.pop(name, None)
            wanted.pop(name, None)
        if live != wanted:
            self._say(f"leaked {live - wanted}, lost {wanted - live}")
