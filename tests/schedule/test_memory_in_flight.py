"""Memory of collectives that complete late: nobody frees, reads or writes it before they do.

A null group's collectives are over when they are launched. Here they are over when they are waited
for, and not before: until then what they write holds NaN. `wait` finds out whether their memory is
where it was and what they read is as it was, and a buffer may be given back only when no collective
under way uses it. What keeps the memory till then:

    all-gather, inline        the group's transport holds the tensors, the group the work; `reshard`
                              waits for it before it gives buffers back
    reduce-scatter and after  waited for at once, where all lanes are one
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2 import MixedPrecisionPolicy, errors, fully_shard
from fsdp2.core.device import collectives
from fsdp2.core.device.backends import UNKNOWN
from fsdp2.core.device.buffers import TransientBuffer
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.testing.null_group import NullGroup, NullWork, init_null_group, null_mesh
from tests.common import models

pytestmark = pytest.mark.alone

GATHERS = ("all_gather_single", "_allgather_base")
GATHERS_MANY = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
SCATTERS = ("reduce_scatter_single", "_reduce_scatter_base")
SCATTERS_MANY = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


class LateWork(NullWork):
    """A collective that is over when it is waited for."""

    under_way: list[LateWork] = []  # noqa: RUF012  # of all groups
    launched = 0

    def __init__(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        super().__init__()
        self.outputs, self.inputs = outputs, inputs
        self.read = [each.detach().clone() for each in inputs]
        if not {each.data_ptr() for each in outputs} & {each.data_ptr() for each in inputs}:
            for output in outputs:
                spoil(output, inputs)
        self.places = [place(each) for each in (*outputs, *inputs)]
        LateWork.under_way.append(self)
        LateWork.launched += 1

    def wait(self, timeout: object = None) -> bool:
        LateWork.under_way.remove(self)
        assert self.places == [place(each) for each in (*self.outputs, *self.inputs)]
        for now, then in zip(self.inputs, self.read, strict=True):
            assert torch.equal(raw(now), raw(then)), "what a collective reads was changed"
        for output, read in zip(self.outputs, self.read, strict=bool(self.inputs)):
            flat = output.detach().view(-1)
            own = read.view(-1).to(output.dtype)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(output):
                times = -(-flat.numel() // max(own.numel(), 1))
                flat.copy_(own.repeat(times)[: flat.numel()])
        return True

    def uses(self, storage: torch.UntypedStorage) -> bool:
        tensors = (*self.outputs, *self.inputs)
        return any(t.untyped_storage()._cdata == storage._cdata for t in tensors)


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def place(tensor: Tensor) -> tuple[int, int, int]:
    storage = tensor.untyped_storage()
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    assert storage.nbytes() >= end
    return storage.data_ptr(), tensor.storage_offset(), tensor.numel()


def spoil(output: Tensor, inputs: list[Tensor]) -> None:
    """NaN in what a collective writes, but not in what it reads of the same memory."""
    kept = [each.detach().clone() for each in inputs]
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(output):
        output.fill_(torch.nan if output.is_floating_point() else 77)
        for each, value in zip(inputs, kept, strict=True):
            if each.untyped_storage()._cdata == output.untyped_storage()._cdata:
                each.detach().copy_(value)


def make_late(group: NullGroup) -> None:
    """Let the collectives of ``group`` complete when they are waited for."""

    def one(output: Tensor, input: Tensor, opts: object = None) -> LateWork:
        return LateWork([output], [input])

    def many(outputs: Any, inputs: Any, opts: object = None) -> LateWork:
        return LateWork(list(outputs), list(inputs))

    def in_place(tensors: list[Tensor], opts: object = None) -> LateWork:
        return LateWork(tensors, [])

    for name in (*GATHERS, *SCATTERS):
        setattr(group, name, one)
    for name in (*GATHERS_MANY, *SCATTERS_MANY):
        setattr(group, name, many)
    group.allreduce = in_place  # type: ignore[assignment, method-assign]  # a stand-in


@pytest.fixture(autouse=True, params=["packed", "coalesced"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    LateWork.under_way, LateWork.launched = [], 0
    release, acquire = TransientBuffer.release, TransientBuffer.acquire

    def checked(change: Callable[[TransientBuffer], None]) -> Callable[[TransientBuffer], None]:
        def run(self: TransientBuffer) -> None:
            # A view beyond its end would have made it longer, and reach beyond it later.
            assert self._storage.nbytes() in (0, self.nbytes)
            if change is release:
                assert not any(work.uses(self._storage) for work in LateWork.under_way), self.name
            change(self)

        return run

    monkeypatch.setattr(TransientBuffer, "release", checked(release))
    monkeypatch.setattr(TransientBuffer, "acquire", checked(acquire))
    if request.param == "packed":
        monkeypatch.setattr(collectives, "traits_of", lambda group, device: UNKNOWN)
    make_late(init_null_group(4))
    yield
    dist.destroy_process_group()


def build(**arguments: Any) -> Any:
    model: Any = models.seeded(models.Transformer)
    for block in model.blocks:
        fully_shard(block, mesh=null_mesh(4), **arguments)
    return fully_shard(model, mesh=null_mesh(4), **arguments)


TOKENS = torch.arange(8).view(2, 4)


def step(model: Any) -> None:
    loss = model(TOKENS).float().square().mean()
    assert loss.isfinite()
    loss.backward()
    for param in model.parameters():
        if param.requires_grad and param.grad is not None:
            assert param.grad.to_local().isfinite().all()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    model.zero_grad()


def over() -> None:
    """All that was launched was waited for."""
    assert LateWork.launched
    assert LateWork.under_way == []


MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"mp_policy": MIXED},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        {"reshard_after_forward": False},
        {"reshard_after_forward": True},
        {"offload_policy": fsdp2.CPUOffloadPolicy()},
    ],
)
def test_training(arguments: dict[str, Any]) -> None:
    model = build(**arguments)
    for _ in range(3):
        step(model)
        with torch.no_grad():
            model(TOKENS)
    over()


def test_accumulation_unused_parameters_kept_gradients_and_prefetch_on_request() -> None:
    model = build()
    model.set_reduce_scatter_unused_params(True)
    model.set_tuning(keep_gradients=True)
    for number in range(12):
        model.set_requires_gradient_sync(number % 3 == 2)
        if number == 6:
            model.set_modules_to_forward_prefetch(list(model.blocks))
            model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
        step(model)
    over()


@pytest.mark.parametrize("where", ["block", "root"])
def test_exceptions_with_a_gather_under_way(where: str) -> None:
    """The next unit is gathered ahead when a unit raises."""
    model = build()
    step(model)
    target = model.blocks[0].norm2 if where == "block" else model.norm
    for _ in range(2):
        handle = target.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(TOKENS)
        handle.remove()
        step(model)
    over()
    model.blocks[1].unshard(async_op=True)
    assert LateWork.under_way
    model.reset_iter_state()
    over()


@pytest.mark.parametrize("then", ["reshard", "forward", "to", "state_dict", "new"])
def test_a_handle_that_is_never_waited_for(then: str) -> None:
    model = build()
    step(model)
    model.blocks[1].unshard(async_op=True)
    assert LateWork.under_way
    if then == "reshard":
        model.blocks[1].reshard()
    elif then == "forward":
        step(model)
    elif then == "to":
        model.to(torch.float64)
    elif then == "state_dict":
        model.state_dict()
    else:
        model.blocks[1].new = nn.Linear(2, 2)
        model.blocks[1].shard_new_parameters()
        step(model)
    model.reshard()
    over()
    step(model)


def test_a_model_that_goes_with_a_gather_under_way() -> None:
    """The work refers to its tensors, as c10d's does; nothing resizes their storage any more."""
    model = build()
    step(model)
    model.blocks[0].unshard(async_op=True)
    works = list(LateWork.under_way)
    assert works
    del model
    gc.collect()
    for work in works:
        work.wait()


class Interrupt(BaseException):
    """As KeyboardInterrupt: comes at any time."""


@pytest.mark.parametrize("kind", [Interrupt, RuntimeError])
def test_a_wait_that_is_interrupted(kind: type[BaseException], monkeypatch: Any) -> None:
    """The interrupt came before the wait had ended: the collective still uses the memory."""
    model = build()
    step(model)
    wait = LateWork.wait
    interrupted = []

    def interrupt(self: LateWork, timeout: object = None) -> bool:
        if not interrupted:
            interrupted.append(self)
            if kind is RuntimeError:
                wait(self)  # it has failed, so it is over
            raise kind
        return wait(self)

    monkeypatch.setattr(LateWork, "wait", interrupt)
    with pytest.raises((kind, errors.CommunicationError)):
        model(TOKENS)
    model.reset_iter_state()
    over()
    step(model)


def test_a_wait_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is given back too early, or what is computed is NaN: the checks above see it."""
    monkeypatch.setattr(ParamGroup, "_await_gather", lambda self, _: self._works.clear())
    model = build()
    with pytest.raises(AssertionError):
        step(model)
