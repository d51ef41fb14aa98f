"""The rates of a machine, from a JSON file: FLOPs, bandwidths, latencies, and the source of each.

    load("h100")            one of the files next to this module
    load("my_machine.json") a file written by `fsdp2 calibrate`, or by hand

Durations are a roofline: an operator takes the longer of its arithmetic and its memory traffic,
plus a fixed cost; products, attention and all others have separate rates. A collective takes the
longer of its traffic within a node and between nodes, plus a latency per round.
"""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp2.core.errors import coded
from fsdp2.tracing.record.notes import Operation

FOLDER = Path(__file__).with_name("hardware")


@dataclass(frozen=True)
class Attained:
    """Rates that a training step attains, besides large products and copies.

    Attributes:
        attention: "forward" and "backward": FLOPs per second of fused attention in bf16, over all
            pairs of tokens, including those that a causal mask excludes; empty: a product's.
        unfused: the fraction of the bandwidth that the model's operators attain other than products
            and attention. An operator counts its inputs and outputs; kernels of a training step
            read and write more, and some are too small to fill a device.
        straggling: the fraction by which each doubling of nodes makes a step longer, because ranks
            wait for the slowest.
    """

    attention: dict[str, float] = field(default_factory=dict)
    unfused: float = 1.0
    straggling: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """A type of machine: nodes of equal devices.

    Attributes:
        name: the name of the device.
        device: "cuda" for devices whose streams run asynchronously to the host, or "cpu".
        backend: the backend of collectives: "nccl", "nccl2" or "gloo".
        memory: bytes of memory per device.
        reserved: bytes of it that tensors cannot use: the driver's context, the backend's buffers.
        rounding: an allocation's size is rounded up to a multiple of this number of bytes.
        peak_flops: FLOPs per second by dtype, according to the vendor; for MFU.
        flops: FLOPs per second by dtype that a large matrix product attains.
        bandwidth: bytes per second that kernels attain on the device's memory.
        kernel: seconds of the shortest kernel.
        host_op: seconds of the host per operator.
        host_collective: seconds of the host per collective.
        node: devices in a node.
        link: bytes per second that a device sends to others of its node.
        link_latency: seconds of a round in a node.
        network: bytes per second that a node sends to others, over all its devices.
        network_latency: seconds of a round between nodes.
        shared: whether the ranks of a node share its cores; all rates are then those of the node.
        sources: the sources of the figures, by name.
        attained: the fractions of these rates that a training step attains.
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
    attained: Attained = field(default_factory=Attained)

    @property
    def asynchronous(self) -> bool:
        """Whether its streams run asynchronously to the host."""
        return self.device != "cpu"

    def rate(self, dtype: torch.dtype, ranks: int) -> float:
        """FLOPs per second of one rank while ``ranks`` compute."""
        return _of(self.flops, dtype) / self._sharers(ranks)

    def compute(self, note: Operation, ranks: int) -> float:
        """Seconds of one operator on the device while ``ranks`` compute."""
        arithmetic = note.flops / self._rate_of(note) if note.flops else 0.0
        whole = bool(note.flops) or note.kind == "copy"
        traffic = note.nbytes / (self.bandwidth * (1.0 if whole else self.attained.unfused))
        return self.kernel + max(arithmetic, traffic) * self._sharers(ranks)

    def _rate_of(self, note: Operation) -> float:
        """FLOPs per second: attention's, or a product's."""
        products = _of(self.flops, note.dtype)
        if "attention" not in note.name or not self.attained.attention:
            return products
        found = self.attained.attention["backward" if "backward" in note.name else "forward"]
        return found * products / _of(self.flops, torch.bfloat16)

    def waits_for_slowest(self, ranks: int) -> float:
        """The fraction of a step for which a rank waits for the slowest of this number."""
        return self.attained.straggling * math.log2(max(1.0, ranks / self.node))

    def collective(self, kind: str, nbytes: int, ranks: tuple[int, ...], world: int) -> float:
        """Seconds of one collective.

        Args:
            kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", which sends as much
                as an all-gather of the same bytes; others count as all-gathers.
            nbytes: bytes of the full tensor.
            ranks: global ranks of the group.
            world: the total number of ranks; those of a node share the network.
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
        """The number of nodes of these ranks."""
        return len({rank // self.node for rank in ranks})

    def traffic(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> tuple[float, float]:
        """Bytes that a rank sends within its node and to others, on average, in a ring.

        Each rank sends (n - 1) / n of the tensor to its neighbor; one of the ranks in a node has
        its neighbor in another. An all-reduce is a reduce-scatter and an all-gather.
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
    """Rounds of a tree; a ring has more, which pays off for large tensors."""
    return math.ceil(math.log2(size)) if size > 1 else 0


def _of(table: dict[str, float], dtype: torch.dtype) -> float:
    name = str(dtype).removeprefix("torch.")
    return table.get(name) or table.get("float32") or next(iter(table.values()))


def names() -> list[str]:
    """The names that `load` accepts."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(which: str | Path | Hardware) -> Hardware:
    """Return a machine.

    Args:
        which: one of `names`, the path of a JSON file of the same form, or a `Hardware`.

    Raises:
        ValueError: there is no machine of that name, or the file lacks a figure.

    Example::

        load("h100").memory
    """
    if isinstance(which, Hardware):
        return which
    path = Path(which)
    if path.suffix != ".json":
        path = FOLDER / f"{str(which).lower()}.json"
    if not path.is_file():
        raise coded(
            ValueError,
            "plan-hardware",
            f"hardware={str(which)!r} is neither one of {', '.join(names())} nor the path of a "
            f".json file; write one with fsdp2 calibrate",
        )
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    known = inspect.signature(Hardware).parameters
    wrong = sorted(found.keys() - known.keys())
    required = {name for name, each in known.items() if each.default is each.empty}
    missing = sorted(required - found.keys())
    if wrong or missing:
        raise coded(
            ValueError,
            "plan-hardware-file",
            f"{path.name} lacks {missing or 'nothing'} and has unknown {wrong or 'nothing'}; see "
            f"fsdp2/planning/hardware/h100.json for an example",
        )
    found["attained"] = Attained(**found.get("attained", {}))
    return Hardware(**found)


def write(hardware: Hardware, path: Path) -> None:
    """Write a file that `load` reads."""
    path.write_text(json.dumps(asdict(hardware), indent=2) + "\n", encoding="utf-8")
