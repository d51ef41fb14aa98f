"""A process group for the stand-in device: gloo on the same memory, ordered like NCCL.

    all_gather(out, in) ──> the collective's stream waits for the current one (asynchronous calls)
                        ──> the device is told what that stream reads and writes
                        ──> gloo moves the bytes, at once
                        ──> a Work whose wait() makes the current stream wait

Calls that are not asynchronous run on the current stream, as NCCL's do since torch 2.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fsdp2.core.device.backends import Traits, know
from fsdp2.testing.stand_in import device
from fsdp2.tracing.paper.null_group import PythonGroup
from fsdp2.tracing.paper.values import tensors_in

COALESCING = "standin_ring"
"""Backend that gathers many tensors in one launch, as NCCL does."""

PACKING = "standin_gloo"
"""The same, but fsdp2 has no traits for it and packs groups."""


class StreamWork(dist.Work):
    """A collective that the current stream has to wait for; its tensors live until then."""

    def __init__(self, done: torch.Event | None, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._done = done
        self._tensors = tensors

    def wait(self, timeout: object = None) -> bool:
        if self._done is not None:
            self._done.wait(torch.accelerator.current_stream(0))
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return True


def _gloos(name: str, what: str) -> Callable[..., StreamWork]:
    """A collective that gloo runs as it is, with its outputs first."""

    def call(group: StandInGroup, outputs: object, *args: object) -> StreamWork:
        written = tensors_in([outputs])
        read = written if name == "broadcast" else tensors_in(args)
        on_host = tree_map_only(Tensor, _host_view, (outputs, *args))
        move = getattr(group._gloo, name)
        return group._run(what, written, read, args[-1], lambda: move(*on_host).wait())

    return call


class StandInGroup(PythonGroup):
    """Collectives on tensors of the device and of the CPU."""

    backend = COALESCING
    own_stream = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        try:
            self._stream: torch.Stream | None = torch.Stream(device.load())
        except RuntimeError:  # `device.take_away`
            self._stream = None

    def _run(
        self,
        what: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: object,
        move: Callable[[], object],
    ) -> StreamWork:
        on_device = any(t.device.type == device.NAME for t in (*outputs, *inputs))
        done, stream = None, self._stream
        apart = self.own_stream or getattr(opts, "asyncOp", True)
        if on_device and apart and stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(0))
            with stream:
                torch.ops.stand_in.accessed(what, list(inputs), list(outputs))
            done = stream.record_event()
        elif on_device:
            torch.ops.stand_in.accessed(what, list(inputs), list(outputs))
        move()
        return StreamWork(done, () if done is None else (*outputs, *inputs))

    allgather = _gloos("allgather", "all-gather")
    gather = _gloos("gather", "gather")
    scatter = _gloos("scatter", "scatter")
    broadcast = _gloos("broadcast", "broadcast")
    all_to_all_single = _gloos("alltoall_base", "all-to-all")

    def all_gather_single(self, output: Tensor, input: Tensor, opts: object = None) -> StreamWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> StreamWork:
        def move() -> None:
            for output, input_ in _pairs(outputs, inputs):
                self._gloo._allgather_base(output.view(-1), input_.flatten()).wait()

        return self._run("all-gather", outputs, inputs, opts, move)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: object) -> StreamWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object
    ) -> StreamWork:
        def move() -> None:
            for output, input_ in _pairs(outputs, inputs):
                whole = input_.clone()
                self._sum(whole, opts.reduceOp)
                output.copy_(whole.view(self.size(), -1)[self.rank()].view(output.shape))

        return self._run("reduce-scatter", outputs, inputs, opts, move)

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> StreamWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def move() -> None:
            for tensor in map(_host_view, tensors):
                self._sum(tensor, op)

        return self._run("all-reduce", tensors, tensors, opts, move)

    allreduce_coalesced = allreduce

    def barrier(self, opts: object = None) -> StreamWork:
        self._gloo.barrier().wait()
        return StreamWork(None)

    def _sum(self, tensor: Tensor, op: dist.ReduceOp) -> None:
        average = op == dist.ReduceOp.AVG
        self._gloo.allreduce([tensor], dist.ReduceOp.SUM if average else op).wait()
        if average:
            tensor.div_(self.size())


class PackingGroup(StandInGroup):
    """The same, for `PACKING`."""

    backend = PACKING


know("StandInGroup", Traits("stand-in", coalesces=True))


def _pairs(outputs: list[Tensor], inputs: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(map(_host_view, outputs), map(_host_view, inputs), strict=True)


def _host_view(tensor: Tensor) -> Tensor:
    if tensor.device.type != device.NAME:
        return tensor
    found: Tensor = torch.ops.stand_in.host_view(tensor)
    return found


def register() -> None:
    """Make the backend known to c10d, in this process."""
    for kind in (StandInGroup, PackingGroup):
        if kind.backend not in dist.Backend.backend_list:
            dist.Backend.register_backend(kind.backend, kind, devices=["cpu", device.NAME])
