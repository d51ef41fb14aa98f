"""A step of whole matrices: its messages, what is whole at a time, and who owns what."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Partial
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp2
from fsdp2.optim.matrices import exchange
from tests.common import parity
from tests.common.errors import raises
from tests.common.workers import ranks

DIM, UNITS = 64, 5


class Blocks(nn.Module):
    """Units of six matrices of two shapes."""

    def __init__(self, units: int = UNITS, matrices: int = 6) -> None:
        super().__init__()
        shapes = [(DIM, DIM), (2 * DIM, DIM)] * 3
        self.blocks = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes[:matrices])
            for _ in range(units)
        )

    def sharded(self) -> Blocks:
        for block in self.blocks:
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(self)
        for param in self.parameters():
            param.grad = param.detach().clone()
        return self


UNIT_BYTES = 9 * DIM * DIM * 4


class Same(fsdp2.optim.Muon):
    """Gradient descent, by way of owners."""

    def orthogonalized(self, stack: Any, group: Any) -> Any:
        return stack

    def momentum_of(self, grads: Any, states: Any, group: Any) -> Any:
        return list(grads)

    def step_size(self, shape: Any, group: Any) -> float:
        return 0.1

    def _dtype_of_messages(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


class Live(TorchDispatchMode):
    """Bytes of memory that operators make inside, while it is there."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(t) for t in tree_leaves((args, kwargs)) if type(t) is torch.Tensor}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is torch.Tensor and self._key(tensor) not in given | {*self._known}:
                storage, key = tensor.untyped_storage(), self._key(tensor)
                self._known[key] = storage.nbytes()
                weakref.finalize(storage, self._known.pop, key, None)
        self.peak = max(self.peak, sum(self._known.values()))
        return result

    @staticmethod
    def _key(tensor: Any) -> int:
        return tensor.untyped_storage()._cdata


@ranks(2, 4)
def test_whole_at_a_time(world_size: int) -> None:
    """Of two units at most something is whole, and a bound of bytes, messages of rows included."""
    model = Blocks().sharded()
    optimizer = Same(model, weight_decay=0.0)
    optimizer.step()
    whole: set[Any] = set()
    most = 0
    start, finish = exchange.Wave.start, Same._finish

    def started(wave: Any, rows: Any) -> Any:
        nonlocal most
        whole.add(wave)
        most = max(most, len(whole))
        return start(wave, rows)

    def finished(self: Same, outgoing: Any) -> None:
        sent = [wave for wave, _ in outgoing]
        finish(self, outgoing)
        whole.difference_update(sent)

    peaks = []
    with (
        mock.patch.object(exchange.Wave, "start", started),
        mock.patch.object(Same, "_finish", finished),
    ):
        for _ in range(5):
            with Live() as live:
                optimizer.step()
            assert not whole
            peaks.append(live.peak)
            dist.barrier()
    assert most == 2
    assert optimizer.owners()[0].waves == UNITS
    # A wave holds received rows, matrices and updates; this rank's rows have as many bytes. A gloo
    # thread may hold a message for a moment after it was sent, and then a step has a higher peak.
    assert UNIT_BYTES < min(peaks) < {2: 3.0, 4: 1.5}[world_size] * UNIT_BYTES


@ranks(2, 4)
def test_messages(world_size: int) -> None:
    """Two a unit, of which each rank sends its rows and gets them back, in bf16."""
    model = Blocks().sharded()
    optimizer = fsdp2.optim.Muon(model)
    rows = sum(param._local_tensor.numel() for param in model.parameters())
    with mock.patch.object(
        exchange, "exchange_messages", side_effect=exchange.exchange_messages
    ) as sent:
        optimizer.step()
    messages = [call.args for call in sent.call_args_list]
    assert len(messages) == 2 * UNITS
    assert {args[1].dtype for args in messages} == {torch.bfloat16}
    to_owners = {id(args[1]): args for args in messages if sum(args[3]) == rows // UNITS}
    assert to_owners
    received = sum(sum(args[2]) for args in messages)
    (owners,) = optimizer.owners()
    assert received == rows + owners.nbytes[dist.get_rank()] // 2
    assert owners.busiest_over_mean < 1.1


@ranks(4)
def test_more_ranks_than_matrices() -> None:
    """Units travel together then, so that no rank has nothing to do."""
    model = Blocks(units=8, matrices=1).sharded()
    optimizer = Same(model, weight_decay=0.0)
    optimizer.step()
    (owners,) = optimizer.owners()
    assert owners.waves == 2
    assert owners.matrices == (2, 2, 2, 2)
    for param in model.parameters():
        assert torch.equal(param._local_tensor, torch.full_like(param._local_tensor, 0.9))


@ranks(2)
def test_a_mesh_in_another_order() -> None:
    """Only `fully_shard` refuses such a mesh; a matrix is put together as torch would."""
    found = []
    for order in ([0, 1], [1, 0]):
        torch.manual_seed(0)
        mesh = DeviceMesh("cpu", order)
        param, grad = (distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]) for _ in range(2))
        param = nn.Parameter(param)
        param.grad = grad
        fsdp2.optim.Muon([param]).step()
        found.append(param.detach().full_tensor())
    assert torch.equal(*found)


@ranks(2)
def test_placements_that_are_refused() -> None:
    """Sums that are still to be made."""
    partial = DTensor.from_local(torch.ones(2, 2), parity.world_mesh(), [Partial()])
    param = nn.Parameter(partial)
    param.grad = partial
    with raises("muon-placements"):
        fsdp2.optim.Muon([param]).step()
