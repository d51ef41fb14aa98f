"""A rank's state, fetched by the same rank of another group: both in one process, over localhost.

The group that trains and the one that joins are models of rank 1 of 2 over a null process group.
"""

from __future__ import annotations

import datetime
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2 import elastic
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.progress import ShardReaders
from fsdp2.elastic import contents, fetching, image, serving
from fsdp2.testing.null_group import fill_gathered, null_world
from tests.common.errors import raises

pytestmark = pytest.mark.alone

TIME = datetime.timedelta(seconds=30)
KINDS = ("adamw", "flat", "muon", "groups")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for block in self.blocks:
            x = block(x).tanh()
        return self.norm(x)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "flat":
        return fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, lr=0.1)
    if kind == "muon":
        return fsdp2.optim.Muon(model, lr=0.1)
    if kind == "groups":
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 0.3}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.1)


class Rank:
    """A model with all that is trained, on one rank of a group."""

    def __init__(self, seed: int, kind: str = "adamw", mesh: DeviceMesh | None = None) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        mesh = mesh or init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        for block in self.model.blocks:
            fsdp2.fully_shard(block, mesh=mesh)
        fsdp2.fully_shard(self.model, mesh=mesh)
        self.optimizer = optimizer_of(kind, self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.ema = fsdp2.optim.EMA(self.model, 0.5)
        states = {"schedule": self.schedule, "ema": self.ema}
        self.transport = elastic.ShardTransport(
            self.model, self.optimizer, states=states, host="localhost", patience=0.2
        )

    def step(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model(torch.randn(4, 8)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.ema.update()

    def send(self, step: int = 3) -> None:
        """What torchft's manager does where a peer needs this rank."""
        state = {"user": {"default": self.transport.state_dict()}, "torchft": {"step": step}}
        self.transport.send_checkpoint([1], step, state, TIME)

    def heal(self, donor: Rank, step: int = 3) -> None:
        """What torchft's manager does on a rank that joins."""
        self.load(self.transport.recv_checkpoint(0, donor.transport.metadata(), step, TIME))

    def load(self, found: dict[str, Any]) -> None:
        self.transport.load_state_dict(found["user"]["default"])

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that must be the same bits after healing, by name."""
        seen = fsdp2.checkpoint.snapshot(self.model, self.optimizer)
        found = {**seen.model, **seen.buffers}
        assert seen.optimizer is not None
        for name, entries in seen.optimizer["state"].items():
            tensors = {k: v for k, v in entries.items() if isinstance(v, torch.Tensor)}
            found |= {f"{name}.{key}": value for key, value in tensors.items()}
        found |= {f"ema.{name}": value for name, value in self.ema.averages().items()}
        return {name: local_of(value).clone() for name, value in found.items()}

    def options(self) -> list[dict[str, Any]]:
        keys = ("lr", "initial_lr", "momentum")
        return [{k: group[k] for k in keys if k in group} for group in self.optimizer.param_groups]


Ranks = Callable[..., Rank]


def copy_parts(
    group: object, name: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
) -> None:
    """An observer: this rank's part stands for what others send."""
    fill_gathered(group, name, outputs, inputs)
    if name.startswith("reduce_scatter"):
        for output, source in zip(outputs, inputs, strict=True):
            output.view(-1).copy_(source.view(-1)[-output.numel() :])


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit: NaN, too."""
    first, second = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def assert_same(one: Rank, other: Rank) -> None:
    first, second = one.tensors(), other.tensors()
    assert first.keys() == second.keys()
    assert [name for name in first if not equal(first[name], second[name])] == []
    assert one.options() == other.options()
    assert one.schedule.state_dict() == other.schedule.state_dict()
    assert one.ema.updates == other.ema.updates


@pytest.fixture(autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two ranks, of which this one is the last; or as many as a test says."""
    size = getattr(request, "param", 2)
    with null_world(size, rank=min(size - 1, 1), observer=copy_parts):
        yield


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made: list[Rank] = []

    def make(seed: int, kind: str = "adamw", **options: Any) -> Rank:
        made.append(Rank(seed, kind, **options))
        return made[-1]

    yield make
    for rank in made:
        rank.transport.shutdown()
    assert not ShardReaders.waiting


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stepped", [False, True])
def test_a_rank_that_joins_has_all_of_its_peer(ranks: Ranks, kind: str, stepped: bool) -> None:
    """Parameters, buffers, states, options, schedule and averages; and so it goes on."""
    donor, joins = ranks(1, kind), ranks(2, kind)
    for seed in range(3):
        donor.step(seed)
    if stepped:
        joins.step(9)
    donor.send()
    joins.heal(donor)
    assert_same(donor, joins)
    donor.transport.disallow_checkpoint()
    if kind == "muon":  # its exchange of matrices brings anything over a null group
        return
    for rank in (donor, joins):
        rank.step(5)
    assert_same(donor, joins)


@pytest.mark.parametrize("world", [4], indirect=True)
def test_groups_with_replicas_inside(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shard"))
    donor, joins = ranks(1, mesh=mesh), ranks(2, mesh=mesh)
    donor.step()
    donor.send()
    joins.heal(donor)
    assert_same(donor, joins)


@pytest.mark.parametrize("world", [4], indirect=True)
def test_groups_with_tensor_parallelism_inside() -> None:
    """Strided pieces of pieces; optimizer states that are spread as the parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    kept = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        for layer, dim in zip(model, (0, 1), strict=True):
            rows = layer.weight.detach().chunk(2, dim)[1].contiguous()
            whole = DTensor.from_local(rows, mesh["tp"], [Shard(dim)], run_check=False)
            layer.weight = nn.Parameter(whole)
            fsdp2.fully_shard(layer, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        kept.append((model, optimizer, elastic.ShardTransport(model, optimizer, host="localhost")))
    (model, optimizer, sends), (joined, other, joins) = kept
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    sends.send_checkpoint([1], 1, sends.state_dict(), TIME)
    joins.load_state_dict(joins.recv_checkpoint(0, sends.metadata(), 1, TIME))
    for first, second in zip(model.parameters(), joined.parameters(), strict=True):
        assert first.placements == second.placements
        assert equal(local_of(first), local_of(second))
        for key, value in optimizer.state[first].items():
            found = other.state[second][key]
            assert equal(local_of(value), local_of(found))
            assert getattr(value, "_spec", None) == getattr(found, "_spec", None)
    for transport in (sends, joins):
        transport.shutdown()


def test_a_peer_is_read_in_the_middle_of_its_forward_and_backward(ranks: Ranks) -> None:
    """Units are gathered meanwhile, and stay so: no collective, no change, and the same bits."""
    donor, other, joins = ranks(1), ranks(1), ranks(2)
    for rank in (donor, other):
        rank.step()
    before = donor.tensors()
    moments = 0

    def heal(*_: object) -> None:
        nonlocal moments
        moments += 1
        log = fsdp2.report(donor.model).groups
        state = {"user": {"default": donor.transport.state_dict()}}
        donor.transport.send_checkpoint([1], moments, state, TIME)
        joins.heal(donor, moments)
        assert fsdp2.report(donor.model).groups == log

    hooks = [
        donor.model.blocks[1].register_forward_hook(heal),
        donor.model.blocks[1].register_full_backward_hook(heal),
    ]
    torch.manual_seed(0)
    donor.model(torch.randn(4, 8)).square().sum().backward()
    for hook in hooks:
        hook.remove()
    assert moments == 2
    found = joins.tensors()
    own = {name for name, _ in donor.model.named_buffers()}
    assert [n for n in before if n not in own and not equal(before[n], found[n])] == []
    torch.manual_seed(0)
    other.model(torch.randn(4, 8)).square().sum().backward()
    for rank in (donor, other):
        rank.optimizer.step()
    assert_same(donor, other)


def test_what_messages_have_left_out(ranks: Ranks) -> None:
    """Residuals are of the joining rank's own gradients: they begin at zero, and nobody warns."""
    donor, joins = ranks(1), ranks(2)
    for rank in (donor, joins):
        rank.model.set_wire_format(reduce="int8", feedback=True, exact_below=0)
        rank.step()
    assert any(value.to_local().any() for value in residuals(joins))
    donor.send()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joins.heal(donor)
    assert not any(value.to_local().any() for value in residuals(joins))


def residuals(rank: Rank) -> list[DTensor]:
    state = fsdp2.checkpoint.WireState(rank.model).state_dict()
    found = [value for name, value in state.items() if name.startswith("residuals.")]
    assert found
    return found


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_iteration_that_was_interrupted(ranks: Ranks, in_backward: bool) -> None:
    """On weights that count for nothing, anything may be raised; the rank heals all the same."""
    donor, joins = ranks(1), ranks(2)
    donor.step()
    donor.send()

    def fail(*_: object) -> None:
        raise FloatingPointError

    block = joins.model.blocks[1]
    register = block.register_full_backward_hook if in_backward else block.register_forward_hook
    hook = register(fail)
    with pytest.raises(FloatingPointError):
        joins.step()
    hook.remove()
    joins.heal(donor)
    assert_same(donor, joins)
    donor.transport.disallow_checkpoint()
    joins.model.zero_grad()
    for rank in (donor, joins):
        rank.step(5)
    assert_same(donor, joins)


# ---- the wire


class Wire(threading.Thread):
    """Stands between a rank that joins and its peer, and does to each connection what it is told.

    Args:
        address: of the peer.
        faults: of each connection in turn: after how many bytes it is cut, or, negative, which byte
            is flipped; 0 does nothing, as do connections behind the last fault.
    """

    def __init__(self, address: str, faults: list[int]) -> None:
        super().__init__(daemon=True)
        self._port = int(address.split(":")[2].split("/")[0])
        self.faults = faults
        self.connections = 0
        self._socket = socket.create_server(("localhost", 0))
        port = self._socket.getsockname()[1]
        self.address = address.replace(f":{self._port}/", f":{port}/")
        self.start()

    def run(self) -> None:
        while True:
            try:
                taken, _ = self._socket.accept()
            except OSError:
                return
            fault = self.faults[self.connections] if self.connections < len(self.faults) else 0
            self.connections += 1
            threading.Thread(target=self._carry, args=(taken, fault), daemon=True).start()

    def _carry(self, taken: socket.socket, fault: int) -> None:
        with taken, socket.create_connection(("localhost", self._port)) as peer:
            peer.sendall(taken.recv(1 << 16))
            sent = 0
            while data := bytearray(peer.recv(1 << 12)):
                if fault > 0:
                    data = data[: fault - sent]
                elif fault and sent <= -fault < sent + len(data):
                    data[-fault - sent] ^= 1
                try:
                    taken.sendall(data)
                except OSError:
                    return
                sent += len(data)
                if sent == fault:
                    return

    def close(self) -> None:
        self._socket.close()


def fetched(
    donor: Rank, joins: Rank, faults: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], int]:
    """What comes through a wire with these faults, and over how many connections."""
    monkeypatch.setattr(fetching, "sleep", lambda _: None)
    monkeypatch.setattr(donor.transport._server, "piece", 100)
    wire = Wire(donor.transport.metadata(), faults)
    try:
        return joins.transport.recv_checkpoint(0, wire.address, 3, TIME), wire.connections
    finally:
        wire.close()


@pytest.mark.parametrize(
    ("faults", "connections"),
    [
        ([], 2),
        ([700], 3),  # in the head
        ([0, 30], 3),  # before the first frame
        ([0, 900], 3),
        ([0, 900, 1, 500], 5),
        ([0, *[300] * 6], 8),  # more breaks than are forgiven in a row
        ([0, -900], 3),  # a flipped byte of a frame's head
        ([0, -950], 3),  # of a piece
        ([0, -900, -300, 200], 5),
    ],
)
def test_it_goes_on_where_the_connection_broke(
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    faults: list[int],
    connections: int,
) -> None:
    donor, joins = ranks(1), ranks(2)
    donor.step()
    donor.send()
    found, seen = fetched(donor, joins, faults, monkeypatch)
    assert seen == connections
    joins.load(found)
    assert_same(donor, joins)


def test_what_has_come_is_not_sent_again(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    donor, joins = ranks(1), ranks(2)
    donor.send()
    asked: list[int] = []
    pieces = image.Image.pieces

    def noted(self: image.Image, start: int, size: int) -> Any:
        asked.append(start)
        return pieces(self, start, size)

    monkeypatch.setattr(image.Image, "pieces", noted)
    fetched(donor, joins, [0, 900, 1, 500], monkeypatch)
    assert asked == sorted(asked)
    assert asked[0] == 0 < asked[1] == asked[2] < asked[3]


def test_a_peer_that_is_lost(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that joins has what it had, and may join later."""
    donor, joins = ranks(1), ranks(2)
    donor.step()
    joins.step(7)
    donor.send()
    before = joins.tensors()
    with raises("elastic-not-fetched"):
        fetched(donor, joins, [0, 900, *([1] * 20)], monkeypatch)
    after = joins.tensors()
    assert all(equal(before[name], after[name]) for name in before)
    joins.transport.disallow_checkpoint()
    joins.heal(donor)
    assert_same(donor, joins)


# ---- one committed step


def test_who_asks_before_the_peer_knows(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both learn of it at the same time. An image of the step before, or of none, is no answer."""
    monkeypatch.setattr(serving, "_WAIT", 0.01)
    donor, joins = ranks(1), ranks(2)
    asked = threading.Event()
    monkeypatch.setattr(fetching, "sleep", lambda _: asked.set())
    for opened in (False, True):
        asked.clear()
        if opened:
            donor.send(2)
        thread = threading.Thread(target=joins.heal, args=(donor,))
        thread.start()
        assert asked.wait(30)
        donor.transport.disallow_checkpoint()
        donor.step()
        donor.send()
        thread.join(30)
        assert_same(donor, joins)
        donor.transport.disallow_checkpoint()


def test_a_peer_that_never_knows(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_WAIT", 0.01)
    donor, joins = ranks(1), ranks(2)
    at_once = datetime.timedelta(seconds=0)
    with raises("elastic-gone-on"):
        joins.transport.recv_checkpoint(0, donor.transport.metadata(), 3, at_once)
    donor.send()
    donor.transport.disallow_checkpoint()
    with raises("elastic-gone-on"):
        joins.transport.recv_checkpoint(0, donor.transport.metadata(), 3, at_once)
    donor.send(3)
    with raises("elastic-gone-on"):  # that step is over
        joins.heal(donor, 2)
    joins.heal(donor, 3)
    assert_same(donor, joins)


def test_a_step_between_head_and_pieces(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another image of the same step is another one: a step that was dropped is run again."""
    donor, joins = ranks(1), ranks(2)
    donor.send()
    read = fetching.Fetch.head

    def later(self: fetching.Fetch) -> Any:
        found = read(self)
        donor.transport.disallow_checkpoint()
        donor.send()
        return found

    monkeypatch.setattr(fetching.Fetch, "head", later)
    with raises("elastic-gone-on"):
        joins.heal(donor)


@pytest.mark.parametrize("by", ["manager", "optimizer", "load"])
def test_parameters_are_not_written_while_they_are_read(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Who reads for longer than `patience` is cut off, and has nothing."""
    donor, joins = ranks(1), ranks(2)
    donor.step()
    donor.send()
    began, over = threading.Event(), threading.Event()
    pieces = image.Image.pieces

    def slow(self: image.Image, start: int, size: int) -> Any:
        for number, piece in enumerate(pieces(self, start, 100)):
            if number == 3:
                began.set()
                over.wait()
            yield piece

    monkeypatch.setattr(image.Image, "pieces", slow)
    monkeypatch.setattr(fetching, "sleep", lambda _: None)
    failed: list[BaseException] = []

    def join() -> None:
        try:
            joins.heal(donor)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    assert began.wait(30)
    if by == "manager":
        donor.transport.disallow_checkpoint()
    elif by == "optimizer":
        donor.optimizer.step()
    else:
        donor.model.load_state_dict(donor.model.state_dict())
    thread.join(30)
    over.set()
    assert not thread.is_alive()
    with raises("elastic-gone-on"):
        raise failed[0]


# ---- what is refused


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(8, 2)


def test_groups_that_are_not_alike(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised where it is found, and once more in the thread that trains; the peer trains on."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shard"))
    donor = ranks(1)
    unlike = [
        (ranks(2, "flat"), "'optimizer 0' is FlatOptimizer of"),
        (ranks(2, mesh=mesh), "at (0, 1) of a mesh (1, 2) here"),
    ]
    monkeypatch.setattr(f"{__name__}.Net", Other)
    unlike.append((ranks(2), "'more.weight' is float32"))
    for joins, words in unlike:
        assert_refused(donor, joins, "elastic-unlike", words)


def assert_refused(donor: Rank, joins: Rank, entry: str, words: str) -> None:
    donor.send()
    with raises(entry) as caught:
        joins.heal(donor)
    assert words in str(caught.value)
    with raises(entry):
        joins.transport.disallow_checkpoint()
    joins.transport.disallow_checkpoint()  # once
    donor.transport.disallow_checkpoint()


class Odd:
    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_what_cannot_be_sent(ranks: Ranks) -> None:
    """The rank that has it trains on; who asks is told."""
    donor, joins = ranks(1), ranks(2)
    for value, words in (
        (RuntimeError("it has none"), "it has none"),
        (lambda: None, "a function at 'user.default.states.odd.value'"),
    ):
        for rank in (donor, joins):
            rank.transport._contents._states["odd"] = Odd(value)
        assert_refused(donor, joins, "elastic-not-sent", words)
    mesh = init_device_mesh("cpu", (2,))
    with raises("elastic-partial"):
        image.Image.of(0, DTensor.from_local(torch.ones(2), mesh, [Partial()]), {})
    with raises("elastic-code"):
        image.Image.of(0, {"x": object()}, {})
    sent = image.Image.of(0, DTensor.from_local(torch.ones(2), mesh, [Replicate()]), {})
    with raises("elastic-mesh"):
        sent.head.value(sent.rows, {})


# ---- tensors of all kinds


def test_tensors_of_all_kinds() -> None:
    """Layouts, dtypes and placements come back, and bytes are those of memory: no copy."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    base = torch.arange(120, dtype=torch.float32)
    value = {
        "plain": base.view(2, 3, 4, 5),
        "last": base.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "turned": base.view(12, 10).t(),
        "gaps": base[::2],
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "half": base.bfloat16(),
        "bool": base > 4,
        "complex": torch.complex(base, base),
        "eight": base.to(torch.float8_e4m3fn),
        "sharded": DTensor.from_local(base.view(12, 10), mesh, [Replicate(), Shard(1)]),
        "strided": DTensor.from_local(
            base.view(12, 10), mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False
        ),
    }
    sent = image.Image.of(7, value, {"x": "y"})
    head = image.Head.decoded(sent.head.encoded())
    assert head.encoded() == sent.head.encoded()
    assert head.starts()[-1] == sent.nbytes
    memories = [part.memory() for part in head.parts]
    for begin, data in sent.pieces(0, 64):
        which = max(at for at, start in enumerate(head.starts()[:-1]) if start <= begin)
        at = begin - head.starts()[which]
        image.memory_of(memories[which])[at : at + len(data)] = data
    found = head.value(memories, image.meshes_of([value["sharded"]]))
    for name, tensor in value.items():
        assert type(found[name]) is type(tensor)
        local, other = local_of(found[name]), local_of(tensor)
        assert local.dtype == other.dtype
        assert local.shape == other.shape
        assert equal(local, other)
        if isinstance(tensor, DTensor):
            assert found[name]._spec == tensor._spec
    owners = {tensor.untyped_storage()._cdata for tensor in map(local_of, value.values())}
    copied = [rows.nbytes for rows in sent.rows if rows.untyped_storage()._cdata not in owners]
    assert copied == [value["gaps"].nbytes]


def test_shards_of_tensor_subclasses(ranks: Ranks) -> None:
    """Their inner tensors go; a parameter stays the object that it was."""
    inner = [("x", torch.ones(2))]
    assert [name for name, _ in contents._rows(iter(inner))] == ["x"]
    two = TwoTensor(torch.zeros(3), torch.ones(3))
    assert [name for name, _ in contents._rows(iter([("w", two)]))] == ["w.a", "w.b"]


# ---- memory


def test_memory_of_the_peer_that_is_read(ranks: Ranks) -> None:
    """It allocates no tensor but copies of buffers, however large shards and states are."""
    donor = ranks(1)
    donor.step()
    counted: list[tuple[str, int]] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            new = isinstance(out, torch.Tensor) and not any(
                isinstance(arg, torch.Tensor)
                and arg.untyped_storage()._cdata == out.untyped_storage()._cdata
                for arg in args
            )
            if new:
                counted.append((str(func), out.nbytes))
            return out

    with pytest.MonkeyPatch.context() as patch, Count():
        patch.setattr(contents, "_COPIED", 0)  # all are small here
        sent = image.Image.of(3, donor.transport.state_dict(), donor.transport._contents.layout())
        for _ in sent.pieces(0, 100):
            pass
    assert sum(n for _, n in counted) == sum(b.nbytes for b in donor.model.buffers())
    assert sent.nbytes > sum(n for _, n in counted)


def test_small_tensors_are_as_they_were(ranks: Ranks) -> None:
    """Step counts are written in place by the next step: a view would be of two steps."""
    donor = ranks(1)
    donor.step()
    state = donor.transport.state_dict()
    counts = [entries["step"].item() for entries in state["optimizers"][0]["state"].values()]
    donor.step()
    again = [entries["step"].item() for entries in state["optimizers"][0]["state"].values()]
    assert counts == again


@pytest.mark.parametrize("world", [1], indirect=True)
def test_the_next_save_is_no_branch(ranks: Ranks, tmp_path: Path) -> None:
    """A group that has loaded a step and then healed goes on from what others have saved since."""
    mesh = init_device_mesh("cpu", (1,))
    donor, joins = ranks(1, mesh=mesh), ranks(2, mesh=mesh)
    for step in (1, 2):
        fsdp2.checkpoint.save(tmp_path, donor.model, step=step)
    fsdp2.checkpoint.load(tmp_path, joins.model, step=1)  # as if before the save of 2
    donor.send()
    joins.heal(donor)
    fsdp2.checkpoint.save(tmp_path, joins.model, step=3)
    assert fsdp2.checkpoint.steps(tmp_path) == [1, 2, 3]
    assert not fsdp2.checkpoint.replaced(tmp_path)
