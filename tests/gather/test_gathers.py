"""How often units are gathered, how far ahead, and how many at a time (invariant I6)."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from fsdp2.core.schedule.unit import Unit
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import VirtualDevice
from tests.common import random_models
from tests.common.observing import observe

SEEDS = 30


pytestmark = pytest.mark.alone


def _entries(node: Node) -> list[str]:
    """Names of the units with parameters, in the order in which one call of ``node`` enters."""
    inner = [name for position in node.calls for name in _entries(node.children[position])]
    return [node.name, *inner] if node.shapes else inner


def _exposed(log: list[tuple[str, str]]) -> int:
    """How many all-gathers were waited for at once, so that nothing overlaps them."""
    return sum(a[0] == "all_gather" and b == ("finish", a[1]) for a, b in pairwise(log))


class Rules:
    """What the rules demand where every guess is right: no streams, no states, no scheduler.

    A unit is gathered when its forward or backward begins, unless it still is; a root always in
    forward, unless it is kept on request. It is freed when its forward ends, unless it is kept or
    also begins next; and when its backward ends, unless the forward that ended before is its own
    too. Whatever begins next is gathered ahead.
    """

    def __init__(self, root: Node) -> None:
        self.gathers: Counter[str] = Counter()
        self.exposed = 0
        self._root = root
        self._gathered: set[str] = set()
        self._exits: list[str] = []  # forwards whose backward is to come
        self._rest: list[str] = []  # what this forward is still to begin
        entered = {*_entries(root)}
        units = [n.unit for n in root.walk() if n.unit is not None and n.name in entered]
        self._looks = any(unit.reshard_after_forward is False for unit in units) or any(
            group.keeps_rows for unit in units for group in unit.own_groups
        )
        self._silent = {node.name for node in root.walk() if not random_models.communicates(node)}

    def forward(self) -> None:
        """One forward of the root."""
        assert self._root.unit is not None
        if not self._looks:  # its shards may have been written since
            self._gathered.discard(self._root.name)
        self._rest = _entries(self._root)
        self._forward(self._root)

    def backward(self) -> None:
        """The backward of the last forward that had none."""
        self._backward(self._root)

    def _begin(self, name: str, following: str | None) -> None:
        if name not in self._gathered:
            self._gather(name)
            self.exposed += name not in self._silent
        if following is not None and following not in self._gathered:
            self._gather(following)

    def _gather(self, name: str) -> None:
        self._gathered.add(name)
        if name not in self._silent:
            self.gathers[name] += 1

    def _forward(self, node: Node) -> None:
        assert node.unit is not None
        if node.shapes:
            self._rest.pop(0)
            self._begin(node.name, self._rest[0] if self._rest else None)
        for position in node.calls:
            self._forward(node.children[position])
        if node.shapes:
            self._exits.append(node.name)
            if node.unit.frees_after_forward and self._rest[:1] != [node.name]:
                self._gathered.discard(node.name)

    def _backward(self, node: Node) -> None:
        before = None
        if node.shapes:
            self._exits.pop()
            before = self._exits[-1] if self._exits else None
            self._begin(node.name, before)
        for position in reversed(node.calls):
            self._backward(node.children[position])
        if node.shapes and self._exits[-1:] != [node.name]:
            self._gathered.discard(node.name)


def _watched(seed: int, repeats: bool) -> random_models.Watch:
    """A model after two iterations, with a clean log."""
    rng = random.Random(f"gathers {seed}")
    root = random_models.random_tree(rng, plain=True, tied=False)
    if not repeats:
        for node in root.walk():
            node.calls = rng.sample(range(len(node.children)), len(node.children))
    watch = random_models.Watch(rng, root, ranks=(2, 4))
    watch.sim.iteration()
    watch.sim.iteration()
    watch.log.clear()
    watch.gathers.clear()
    watch.wasted = 0
    return watch


def _check(watch: random_models.Watch, rules: Rules, seed: int) -> None:
    assert watch.gathers == rules.gathers, f"seed {seed}"
    assert watch.wasted == 0, f"seed {seed}"
    assert _exposed(watch.log) == rules.exposed, f"seed {seed}"
    assert watch.problems == [], f"seed {seed}"


def test_each_unit_is_gathered_once_a_phase_and_ahead() -> None:
    for seed in range(SEEDS):
        watch = _watched(seed, repeats=False)
        watch.sim.iteration()
        loss = watch.log.index(("step", "loss"))
        nodes = {node.name: node for node in watch.sim.root.walk()}
        entries = [
            name for name in _entries(watch.sim.root) if random_models.communicates(nodes[name])
        ]
        kept = {name for name in entries if not nodes[name].unit.frees_after_forward}
        wanted = Counter(entries) + Counter(name for name in entries if name not in kept)
        assert watch.gathers == wanted, f"seed {seed}"
        assert watch.wasted == 0, f"seed {seed}"
        assert _exposed(watch.log[:loss]) <= 1, f"seed {seed}"
        assert _exposed(watch.log[loss:]) <= 1, f"seed {seed}"


def test_repeated_calls_gather_what_was_freed_and_no_more() -> None:
    for seed in range(SEEDS):
        watch = _watched(seed, repeats=True)
        rules = Rules(watch.sim.root)
        watch.sim.forward()
        rules.forward()
        _check(watch, rules, seed)
        watch.sim.backward()
        rules.backward()
        _check(watch, rules, seed)


@pytest.mark.parametrize("joint", [True, False])
def test_backwards_of_several_forwards_go_on_where_the_one_before_ended(joint: bool) -> None:
    for seed in range(SEEDS):
        watch = _watched(seed, repeats=seed % 2 == 0)
        for _ in range(2):  # the second one finds something to use again
            watch.sim.forward()
        watch.sim.backward(2)
        watch.sim.optimizer_step()
        watch.log.clear()
        watch.gathers.clear()
        sim, rules = watch.sim, Rules(watch.sim.root)
        forwards = 2 + seed % 3
        for _ in range(forwards):
            sim.forward()
            rules.forward()
        for left in reversed(range(forwards)):
            rules.backward()
            if not joint:
                sim.scheduler.is_last_backward = left == 0
                sim.backward()
                _check(watch, rules, seed)
        if joint:
            sim.backward(forwards)
            _check(watch, rules, seed)
        watch.check_sharded()
        watch.check_reduced()
        assert watch.problems == [], f"seed {seed}"


@pytest.mark.parametrize("times", [1, 2, 5])
def test_unit_called_several_times_in_a_row_is_gathered_once_a_phase(times: int) -> None:
    leaves = [Node("first"), Node("block"), Node("last")]
    root = Node("root", leaves, [0, *[1] * times, 2], shapes=())
    watch = random_models.Watch(random.Random(0), root, ranks=(2,))
    watch.sim.iteration()
    watch.gathers.clear()
    watch.sim.forward()
    assert watch.gathers == {"first": 1, "block": 1, "last": 1}
    watch.sim.backward()
    assert watch.gathers == {"first": 2, "block": 2, "last": 2}
    watch.check_sharded()
    watch.check_trace()
    assert watch.problems == []
    assert watch.wasted == 0


def test_never_more_than_two_of_a_sequence() -> None:
    """Whatever the order, and however often it changes: the unit in use and one guess."""
    for seed in range(60):
        rng = random.Random(seed)
        count = rng.randint(2, 6)
        leaves = [Node(f"block{i}") for i in range(count)]
        device = VirtualDevice()
        sim = Simulation(
            Node("root", leaves, list(range(count))), device, coalesces=rng.random() < 0.5
        )
        blocks = sim.scheduler.units[1:]
        most: list[int] = []

        def look(*_: str, blocks: list[Unit] = blocks, most: list[int] = most) -> None:
            most.append(sum(unit.is_gathered for unit in blocks))

        observe(blocks, look)
        for _ in range(4):
            sim.iteration()
            assert most[-1] == 0, f"seed {seed}"
            sim.root.calls = [rng.randrange(count) for _ in range(rng.randint(1, 8))]
        assert max(most) == 2, f"seed {seed}"
        assert device.races == [], f"seed {seed}"
