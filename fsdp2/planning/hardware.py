"""What a machine can do, from a JSON file: rates, bandwidths, latencies, and where each is from.

    load("h100")            one of the files beside this module
    load("my_machine.json") what `fsdp2 calibrate` wrote, or somebody

Durations are a roofline: an operator takes the longer of its arithmetic and its memory traffic,
and a fixed cost; products, attention and all else have rates of their own. A collective takes the
longer of what it sends in a node and between nodes, and a latency for each round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from fsdp2.record.notes import Operation

FOLDER = Path(__file__).with_name("hardware")

Curve = list[tuple[float, float]]
"""Bytes and seconds, the smallest first."""


@dataclass(frozen=True)
class Measured:
    """What operators and the host took where so many ranks computed on the same cores.

    Attributes:
        ranks: of the machine, each with an equal part of its cores.
        products: by operator, "mm" for those that are not there: FLOPs, bytes, FLOPs a second.
        operators: by operator, "add" for those that are not there: bytes and seconds, without what
            the smallest takes, which is the host's.
        host: seconds of an operator in "forward" and "backward"; of each tensor that an
            operator of the "optimizer" takes; of the engine's own for each "collective", and each
            time that another "unit" begins.
        excess: of an operator in "forward" and "backward", bytes and seconds: how much longer it
            takes in a step than one after another of its kind, as caches hold other things then.
    """

    ranks: int
    products: dict[str, list[tuple[float, float, float]]]
    operators: dict[str, Curve]
    host: dict[str, float]
    excess: dict[str, Curve]


@dataclass(frozen=True)
class Contention:
    """What sharded steps take more than their parts, as ranks wait for each other.

    Attributes:
        ranks: of the machine.
        group: ranks that shard.
        slower: times as long as alone: all but collectives.
        wait: seconds that each collective takes more than one after another of its kind.
    """

    ranks: int
    group: int
    slower: float
    wait: float


@dataclass(frozen=True)
class Attained:
    """What a training step attains, beside large products and copies.

    Attributes:
        attention: "forward" and "backward": FLOPs a second that fused attention attains in bf16, of
            all pairs of tokens, also those that a causal mask leaves out; empty: a product's.
        unfused: the part of the bandwidth that the model's operators attain which are neither
            products nor attention. An operator counts what it is given and returns; kernels of a
            training step read and write more than that, and some are too small to fill a device.
        straggling: the part of a step by which it is longer for each doubling of nodes, as ranks
            wait for the slowest.
    """

    attention: dict[str, float] = field(default_factory=dict)
    unfused: float = 1.0
    straggling: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """A kind of machine: nodes of alike devices.

    Attributes:
        name: of the device.
        device: "cuda" for what has lanes beside the host, or "cpu".
        backend: what collectives run on: "nccl", "nccl2" or "gloo".
        memory: bytes of a device.
        reserved: bytes of it that no tensor gets: the driver's context, the backend's buffers.
        rounding: an allocation's size is rounded up to a multiple of so many bytes.
        peak_flops: by dtype, per second, as the vendor says; for MFU.
        flops: by dtype, per second, as a large matrix product attains.
        bandwidth: bytes a second that kernels attain on the device's memory.
        kernel: seconds that the shortest kernel takes.
        host_op: seconds of the host for one operator.
        host_collective: seconds of the host for one collective.
        node: devices in a node.
        link: bytes a second that a device sends to others of its node.
        link_latency: seconds of a round in a node.
        network: bytes a second that a node sends to others, all its devices together.
        network_latency: seconds of a round between nodes.
        shared: whether the ranks of a node share its cores: all rates are of the node then.
        sources: where the figures are from, by name.
        cores: which the ranks of a node share; 0: they do not.
        measured: tables, which count in place of rates where there are any.
        gloo: by kind of collective: ranks of the machine, ranks of the group, and what it takes.
        contention: what steps take more than tables and curves say; empty: nothing.
        attained: what a training step attains of these rates.
    """

    name: str
    device: str
    backend: str
    memory: int
    reserved: int
    rounding: int
    peak_flops: dict[str, float]
    flops: dict[str, float]
    bandwidth: float
    kernel: float
    host_op: float
    host_collective: float
    node: int
    link: float
    link_latency: float
    network: float
    network_latency: float
    shared: bool = False
    sources: dict[str, str] = field(default_factory=dict)
    cores: int = 0
    measured: tuple[Measured, ...] = ()
    gloo: dict[str, list[tuple[int, int, Curve]]] = field(default_factory=dict)
    contention: tuple[Contention, ...] = ()
    attained: Attained = field(default_factory=Attained)

    @property
    def asynchronous(self) -> bool:
        """Whether its lanes run beside the host."""
        return self.device != "cpu"

    def rate(self, dtype: torch.dtype, ranks: int) -> float:
        """FLOPs a second of one rank where ``ranks`` compute."""
        return _of(self.flops, dtype) / self._sharers(ranks)

    def compute(self, note: Operation, ranks: int) -> float:
        """Seconds of one operator on the device, where ``ranks`` compute."""
        arithmetic = note.flops / self._rate_of(note) if note.flops else 0.0
        whole = bool(note.flops) or note.kind == "copy"
        traffic = note.nbytes / (self.bandwidth * (1.0 if whole else self.attained.unfused))
        return self.kernel + max(arithmetic, traffic) * self._sharers(ranks)

    def _rate_of(self, note: Operation) -> float:
        """FLOPs a second: attention's, or a product's."""
        products = _of(self.flops, note.dtype)
        if "attention" not in note.name or not self.attained.attention:
            return products
        found = self.attained.attention["backward" if "backward" in note.name else "forward"]
        return found * products / _of(self.flops, torch.bfloat16)

    def waits_for_slowest(self, ranks: int) -> float:
        """The part of a step for which a rank waits for the slowest of so many."""
        return self.attained.straggling * math.log2(max(1.0, ranks / self.node))

    def collective(self, kind: str, nbytes: int, ranks: tuple[int, ...], world: int) -> float:
        """Seconds of one collective.

        Args:
            kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", which sends as much
                as an all-gather of the same bytes; others count as all-gathers.
            nbytes: of the whole tensor.
            ranks: global ranks of the group.
            world: ranks in all; those of a node share the network.
        """
        size = len(ranks)
        if size == 1:
            return self.kernel
        within, between = self.traffic(kind, nbytes, ranks)
        inside = min(self.node, world)
        nodes = self.nodes(ranks)
        seconds = within / self.link * (inside if self.shared else 1)
        seconds = max(seconds, between * inside / self.network if nodes > 1 else 0.0)
        rounds = 2 if kind == "all-reduce" else 1
        latency = self.link_latency * _rounds(size / nodes)
        latency += self.network_latency * _rounds(nodes)
        return rounds * latency + seconds

    def nodes(self, ranks: tuple[int, ...]) -> int:
        """How many nodes these ranks are on."""
        return len({rank // self.node for rank in ranks})

    def traffic(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> tuple[float, float]:
        """Bytes that a rank sends in its node and to others, on average, in a ring.

        Each rank sends (n - 1) / n of the tensor, to its neighbour; of the ranks in a node one has
        its neighbour in another. An all-reduce is a reduce-scatter and an all-gather.
        """
        size = len(ranks)
        if size == 1:
            return 0.0, 0.0
        sent = nbytes * (size - 1) / size * (2 if kind == "all-reduce" else 1)
        nodes = self.nodes(ranks)
        if nodes == 1:
            return sent, 0.0
        between = sent * nodes / size
        return sent - between, between

    def _sharers(self, ranks: int) -> int:
        return min(ranks, self.node) if self.shared else 1


def _rounds(size: float) -> int:
    """Of a tree: a ring has more, which pay where tensors are large."""
    return math.ceil(math.log2(size)) if size > 1 else 0


def _of(table: dict[str, float], dtype: torch.dtype) -> float:
    name = str(dtype).removeprefix("torch.")
    return table.get(name) or table.get("float32") or next(iter(table.values()))


def names() -> list[str]:
    """What `load` knows by name."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(which: str | Path | Hardware) -> Hardware:
    """A machine.

    Args:
        which: one of `names`, the path of a JSON file of the same form, or a `Hardware`.

    Raises:
        ValueError: there is none of that name, or the file lacks a figure.

    Example::

        load("h100").memory
    """
    if isinstance(which, Hardware):
        return which
    path = Path(which)
    if path.suffix != ".json":
        path = FOLDER / f"{str(which).lower()}.json"
    if not path.is_file():
        raise ValueError(
            f"hardware={str(which)!r} is neither one of {', '.join(names())} nor the path of a "
            f".json file; write one with fsdp2 calibrate"
        )
    found: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    known = {each.name for each in fields(Hardware)}
    wrong = sorted(found.keys() - known)
    optional = {each.name for each in fields(Hardware) if _has_default(each)}
    missing = sorted(known - found.keys() - optional)
    if wrong or missing:
        raise ValueError(
            f"{path.name} lacks {missing or 'nothing'} and has unknown {wrong or 'nothing'}; see "
            f"fsdp2/planning/hardware/h100.json for what a file says"
        )
    return from_json(found)


def from_json(found: Mapping[str, Any]) -> Hardware:
    """A machine from the fields of a file."""
    found = dict(found)
    for name in ("memory", "reserved", "rounding", "node"):
        found[name] = int(found[name])
    found["measured"] = tuple(Measured(**table) for table in found.get("measured", ()))
    found["attained"] = Attained(**found.get("attained", {}))
    found["contention"] = tuple(Contention(**each) for each in found.get("contention", ()))
    return Hardware(**found)


def _has_default(each: Field[object]) -> bool:
    return each.default is not MISSING or each.default_factory is not MISSING


def write(hardware: Hardware, path: Path) -> None:
    """Write a file that `load` reads."""
    path.write_text(json.dumps(asdict(hardware), indent=2) + "\n", encoding="utf-8")
