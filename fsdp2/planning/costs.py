"""The time of an operation on a machine: on the device, and on the host.

    costs_of(hardware, world) ──> Costs          only rates are known: a roofline
                              ──> MeasuredCosts  tables of `Measured` hold this machine's times

A roofline takes the longer of an operator's arithmetic and its memory traffic. Tables contain the
lower rate of small products, the higher rate of caches, and the time of each operator while several
ranks compute on the same cores. Values between measured ones are interpolated. Ranks of a step also
wait for each other, and wake up: `Contention` holds these times.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeVar

from fsdp2.planning.hardware import Contention, Curve, Hardware, Measured
from fsdp2.record.notes import Operation

T = TypeVar("T")


class Costs:
    """By rates.

    Args:
        hardware: the machine.
        world: ranks in all.

    Attributes:
        unit: seconds of the host each time that another unit begins.
    """

    def __init__(self, hardware: Hardware, world: int) -> None:
        self._hardware, self._world = hardware, world
        self.unit = 0.0

    def operator(self, note: Operation) -> float:
        """Seconds of the device."""
        return self._hardware.compute(note, self._world)

    def collective(self, note: Operation, ranks: tuple[int, ...]) -> float:
        """Seconds of a collective, from when all ranks are there."""
        return self._hardware.collective(note.name, note.nbytes, ranks, self._world)

    def launch(self, note: Operation) -> float:
        """Seconds of the host."""
        hardware = self._hardware
        return hardware.host_collective if note.kind == "collective" else hardware.host_op


class MeasuredCosts(Costs):
    """By tables: of the numbers of ranks that are next to this one, and their measurements.

    If there are more ranks than cores, each waits for its turn: all times grow by that ratio.
    """

    def __init__(self, hardware: Hardware, world: int) -> None:
        super().__init__(hardware, world)
        ranks = min(world, hardware.node)
        self._tables = _beside(hardware.measured, ranks)
        most = max(hardware.cores, max(table.ranks for table, _ in self._tables))
        self._slower = max(1.0, ranks / most) * _slower(hardware.contention, ranks)
        self._waits = [(each.ranks, each.group, each.wait) for each in hardware.contention]
        self._host = {
            name: self._slower * sum(weight * table.host[name] for table, weight in self._tables)
            for name in self._tables[0][0].host
        }
        self.unit = self._host["unit"]

    def operator(self, note: Operation) -> float:
        return self._slower * sum(weight * _operator(table, note) for table, weight in self._tables)

    def collective(self, note: Operation, ranks: tuple[int, ...]) -> float:
        hardware = self._hardware
        kind = note.name if note.name in hardware.gloo else "all-gather"
        if len(ranks) == 1 or not hardware.gloo or hardware.nodes(ranks) > 1:
            return super().collective(note, ranks)
        world = min(self._world, hardware.node)
        curves = _near(hardware.gloo[kind], world, len(ranks))
        waits = _near(self._waits, world, len(ranks))
        seconds = sum(weight * _at(curve, note.nbytes) for curve, weight in curves)
        return seconds + sum(weight * wait for wait, weight in waits)

    def launch(self, note: Operation) -> float:
        if note.kind == "collective":
            return self._host["collective"]
        if note.phase == "optimizer":
            return self._host["optimizer"] * note.tensors
        return self._host[note.phase]


def costs_of(hardware: Hardware, world: int) -> Costs:
    """Those of tables where the machine has them."""
    return (MeasuredCosts if hardware.measured else Costs)(hardware, world)


def _beside(tables: Sequence[Measured], ranks: int) -> list[tuple[Measured, float]]:
    """The tables of the numbers of ranks next to this one, and their weights."""
    ordered = sorted(tables, key=lambda table: table.ranks)
    place = bisect_left([table.ranks for table in ordered], ranks)
    if place == len(ordered) or place == 0 or ordered[place].ranks == ranks:
        return [(ordered[min(place, len(ordered) - 1)], 1.0)]
    low, high = ordered[place - 1], ordered[place]
    part = math.log(ranks / low.ranks) / math.log(high.ranks / low.ranks)
    return [(low, 1.0 - part), (high, part)]


def _operator(table: Measured, note: Operation) -> float:
    beyond = table.excess.get(note.phase)
    more = _at(beyond, note.nbytes) if beyond else 0.0
    if note.flops:
        points = table.products.get(note.name) or table.products["mm"]
        return note.flops / _rate(points, note.flops, note.nbytes) + more
    curve = table.operators.get(note.name.rstrip("_")) or table.operators["add"]
    return _at(curve, note.nbytes) + more


def _at(curve: Curve, nbytes: float) -> float:
    """Seconds, interpolated between adjacent points; beyond the last at its rate."""
    last = curve[-1]
    if nbytes >= last[0]:
        return last[1] * nbytes / last[0]
    place = bisect_left([point[0] for point in curve], nbytes)
    if place == 0:
        return curve[0][1]
    (x0, y0), (x1, y1) = curve[place - 1 : place + 1]
    return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)


def _rate(points: Sequence[tuple[float, float, float]], flops: float, nbytes: float) -> float:
    """FLOPs per second: the mean of measurements near in size and in FLOPs per byte."""
    weights = rates = 0.0
    for at_flops, at_bytes, rate in points:
        size = math.log2(flops / at_flops)
        reuse = math.log2(flops / nbytes) - math.log2(at_flops / at_bytes)
        weight = 1.0 / (size * size + reuse * reuse + 1e-3) ** 2
        weights += weight
        rates += weight * math.log(rate)
    return math.exp(rates / weights)


def _near(known: Sequence[tuple[int, int, T]], world: int, size: int) -> list[tuple[T, float]]:
    """Measurements by (ranks of the machine, ranks of the group), with larger weights for nearer
    ones.
    """
    found = []
    for at_world, at_size, what in known:
        distance = math.log2(world / at_world) ** 2 + math.log2(size / at_size) ** 2
        if distance == 0.0:
            return [(what, 1.0)]
        found.append((what, 1.0 / distance**2))
    total = sum(weight for _, weight in found)
    return [(what, weight / total) for what, weight in found]


def _slower(contention: Sequence[Contention], ranks: int) -> float:
    """The mean over the nearest numbers of ranks."""
    if not contention:
        return 1.0
    away = {each: abs(math.log2(ranks / each.ranks)) for each in contention}
    least = min(away.values())
    return statistics.mean(each.slower for each in contention if away[each] == least)
