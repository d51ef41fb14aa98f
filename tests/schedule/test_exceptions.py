"""An exception that all ranks raise at the same place: the iteration can simply be run again.

For each way to shard, each place in an iteration and each kind of exception, in turn: the place
raises, the caller catches it and runs the iteration again, and its loss and gradients are, to the
bit, those of a twin in which nothing raised. Nothing that was gathered or staged is left, with the
garbage collector off.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fsdp2 import CPUOffloadPolicy
from fsdp2.core.device import kernels
from fsdp2.core.device.buffers import TransientBuffer
from fsdp2.core.device.collectives import GroupCollectives
from fsdp2.core.modules.registry import records_below
from tests.common import models, parity, tensors
from tests.common.looped import coalescing
from tests.common.meshes import hsdp_mesh
from tests.common.offloading import forced_offload
from tests.common.running import is_sharded
from tests.common.workers import ranks

KINDS = (RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError)


class Bomb:
    """Raises at one place, at the n-th time that it is passed."""

    def __init__(self) -> None:
        self.place = ""
        self.left = 0
        self.kind: type[BaseException] = RuntimeError

    def arm(self, place: str, after: int, kind: type[BaseException]) -> None:
        self.place, self.left, self.kind = place, after, kind

    def __call__(self, place: str) -> None:
        if self.place == place:
            self.left -= 1
            if self.left < 0:
                self.place = ""
                raise self.kind(f"at {place}")


BOMB = Bomb()


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        BOMB("backward")
        return grad


class Block(nn.Module):
    """Two linears; every place of it may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(models.DIM, 11)
        self.down = nn.Linear(11, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        recomputes = torch._C._current_graph_task_id() != -1
        BOMB("recomputation" if recomputes else "forward")
        hidden = _InBackward.apply(torch.tanh(self.up(x)))
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(models.DIM)
        self.head = nn.Linear(models.DIM, 4)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        BOMB("the root's forward")
        return self.head(self.norm(x))


# -- ways to shard --------------------------------------------------------------------------------


def _shard(model: Model, lists: bool = False, **arguments: Any) -> Any:
    arguments.setdefault("mesh", parity.world_mesh())
    for block in model.blocks:
        parity.OURS.fully_shard(block, **arguments)
    if lists:
        parity.OURS.fully_shard([model.norm, model.head], **arguments)
    return parity.OURS.fully_shard(model, **arguments)


def _prefetching(model: Any) -> Any:
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks[:2])
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    blocks[1].set_modules_to_backward_prefetch([blocks[0]])
    return model


def _offloaded(model: Model, **arguments: Any) -> Any:
    """Also on a CPU mesh."""
    with forced_offload():
        return _shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False), **arguments)


def _coalesced() -> Any:
    with coalescing():
        return _shard(Model(), mp_policy=parity.mixed_policy(parity.OURS))


def _unreduced() -> Any:
    model = _shard(Model())
    model.set_reduce_scatter_unused_params(True)
    return model


SETTINGS: dict[str, Callable[[], Any]] = {
    "plain": lambda: _shard(Model()),
    "mixed": lambda: _shard(Model(), mp_policy=parity.mixed_policy(parity.OURS)),
    "kept after forward": lambda: _shard(Model(), reshard_after_forward=False),
    "prefetch": lambda: _prefetching(_shard(Model(), mp_policy=parity.mixed_policy(parity.OURS))),
    "offload": lambda: _offloaded(Model()),
    "checkpoints": lambda: _shard(Model(checkpoints=True)),
    "coalesced": _coalesced,
    "unused parameters": _unreduced,
    "a list": lambda: _shard(Model(), lists=True),
    "extended": lambda: _shard(tensors.extend(Model(), tensors.Bf16Weight)),  # type: ignore[arg-type]  # itself
}

DEFAULT = ("plain", "checkpoints", "coalesced")

ON_FOUR: dict[str, Callable[[], Any]] = {
    "HSDP": lambda: _shard(Model(), mesh=hsdp_mesh(2, 2)),
    "HSDP, mixed, offload": lambda: _offloaded(
        Model(), mesh=hsdp_mesh(2, 2), mp_policy=parity.mixed_policy(parity.OURS)
    ),
    "a smaller group": lambda: _shard(Model(), reshard_after_forward=2),
}


# -- places ---------------------------------------------------------------------------------------


def _arm_hooks(model: Any) -> None:
    """Users' hooks in every place that modules, tensors, parameters and optimizers offer."""
    middle = model.blocks[1]

    def at(place: str) -> Callable[..., None]:
        return lambda *_, **__: BOMB(place)

    middle.register_forward_pre_hook(at("a pre-forward hook"))
    middle.register_forward_hook(at("a forward hook"))
    model.register_forward_hook(at("the root's forward hook"))
    middle.register_full_backward_pre_hook(at("a backward pre-hook"))
    middle.register_full_backward_hook(at("a backward hook"))
    middle.down.weight.register_post_accumulate_grad_hook(at("a hook on a gradient"))
    model.head.weight.register_post_accumulate_grad_hook(at("a hook on the root's gradient"))
    if not any(
        group.reducers.size == 1 for h in records_below(middle) for group in h.unit.own_groups
    ):
        middle.set_all_reduce_hook(at("an all-reduce hook"))


USERS_PLACES = (
    "forward",
    "the root's forward",
    "a pre-forward hook",
    "a forward hook",
    "the root's forward hook",
    "loss",
    "a backward pre-hook",
    "a backward hook",
    "backward",
    "recomputation",
    "a hook on a gradient",
    "a hook on the root's gradient",
    "an all-reduce hook",
    "step",
)

OUR_PLACES = {
    "allocation": (TransientBuffer, "acquire"),
    "allocation of a gradient": (kernels.Kernels, "bind_empty"),
    "all-gather": (GroupCollectives, "bind_all_gather"),
    "all-gather in a loop": (GroupCollectives, "all_gather"),  # of what is coalesced
    "reduce-scatter": (GroupCollectives, "bind_reduce_scatter"),
    "copy-in": (kernels.Kernels, "copy"),
    "staging": (kernels.Kernels, "chunk_cat"),
    "copies": (kernels.Kernels, "copy_many"),
}


@contextmanager
def _armed_calls() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for place, (owner, name) in OUR_PLACES.items():
            stack.enter_context(mock.patch.object(owner, name, _armed(place, owner, name)))
        yield


def _armed(place: str, owner: type, name: str) -> Any:
    """A method of ``owner`` that explodes when its turn is; of one that binds, what it returns."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        BOMB(place)
        return original(*args, **kwargs)

    def bind(*args: Any, **kwargs: Any) -> Any:
        bound = original(*args, **kwargs)

        def call_bound(*args: Any) -> Any:
            BOMB(place)
            return bound(*args)

        return call_bound

    if name.startswith("bind_"):
        return bind
    return staticmethod(call) if isinstance(vars(owner)[name], staticmethod) else call


# -- an iteration ---------------------------------------------------------------------------------


def _iteration(model: Any, optimizer: Any, batch: Any, accumulates: bool) -> list[Any]:
    """Losses and local gradients; with accumulation over two micro-batches."""
    model.zero_grad()  # not the optimizer's, which does not know of gradients that are not reduced
    losses = []
    halves = [parity.my_part(batch, half, 2) for half in range(2)] if accumulates else [batch]
    for number, part in enumerate(halves):
        model.set_requires_gradient_sync(number == len(halves) - 1)
        inputs, targets = parity.my_part(part)
        value = (model(inputs).float() - targets).square().mean()
        BOMB("loss")
        value.backward()
        losses.append(value.detach())
    grads = [None if p.grad is None else _rows(p.grad).clone() for p in model.parameters()]
    BOMB("step")
    optimizer.step()
    return [losses, grads]


def _rows(tensor: Tensor) -> Tensor:
    local = tensor.to_local()  # type: ignore[attr-defined]  # a DTensor
    return getattr(local, "_data", local)


def _raises(run: Callable[[], Any], kind: type[BaseException], place: str) -> None:
    """Run until it raises; what was raised and its traceback are gone on return."""
    message = ""
    try:
        run()
    except kind as error:
        message = str(error)
    assert message == f"at {place}", "what was raised"


class Memory:
    """What `fully_shard` and the steps allocate through our kernels, while this is active."""

    def __init__(self) -> None:
        self.buffers: list[TransientBuffer] = []
        self.storages: dict[StorageWeakRef, None] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        transient = kernels.Kernels.transient
        bind_empty = kernels.Kernels.bind_empty

        def counted_transient(*args: Any) -> TransientBuffer:
            self.buffers.append(transient(*args))
            return self.buffers[-1]

        def bind_counted(*args: Any) -> Callable[[], Tensor]:
            empty = bind_empty(*args)

            def counted_empty() -> Tensor:
                tensor = empty()
                self.storages[StorageWeakRef(tensor.untyped_storage())] = None
                return tensor

            return counted_empty

        with (
            mock.patch.object(kernels.Kernels, "transient", counted_transient),
            mock.patch.object(kernels.Kernels, "bind_empty", bind_counted),
        ):
            yield

    def left(self) -> list[str]:
        """What is allocated now."""
        names = [b.name for b in self.buffers if b.allocated and b.nbytes]
        return names + ["a tensor" for s in self.storages if not s.expired()]


def _count(run: Callable[[], Any]) -> dict[str, int]:
    """How often each place is passed."""
    passed: dict[str, int] = {}

    def count(place: str) -> None:
        passed[place] = passed.get(place, 0) + 1

    with mock.patch(f"{__name__}.BOMB", count):
        run()
    return passed


def _positions(passed: dict[str, int]) -> list[tuple[str, int]]:
    """Where to raise: each of the user's places once, ours at the first, middle and last time."""
    found = [(place, passed[place] // 2) for place in USERS_PLACES if place in passed]
    for place in OUR_PLACES:
        number = passed.get(place, 0)
        found += [(place, n) for n in sorted({0, number // 3, number // 2, number - 1}) if n >= 0]
    return [(place, n) for place, n in found if n < passed.get(place, 0)]


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_without_collector()
def _try_all(build: Callable[[], Any], accumulates: bool) -> None:
    memory = Memory()
    with _armed_calls(), memory.watched():
        model = models.seeded(build)
        _arm_hooks(model)
        optimizer = parity.adamw(model.parameters())
        twin = models.seeded(build)
        twins = parity.adamw(twin.parameters())
        _arm_hooks(twin)
        batches = parity.regression_batches(models.DIM, 4, rows=16, steps=4)
        parity.assert_equal(
            _iteration(model, optimizer, batches[0], accumulates),
            _iteration(twin, twins, batches[0], accumulates),
        )
        passed = _count(functools.partial(_iteration, model, optimizer, batches[1], accumulates))
        _iteration(twin, twins, batches[1], accumulates)
        assert {"allocation", "reduce-scatter"} <= passed.keys()
        assert {"all-gather", "all-gather in a loop"} & passed.keys()
        positions = _positions(passed)
        assert len(positions) >= 20
        for number, (place, after) in enumerate(positions):
            kind = KINDS[number % 3] if place in USERS_PLACES else torch.OutOfMemoryError
            where = f"{kind.__name__} at {place}, time {after}"
            batch = batches[number % 4]
            BOMB.arm(place, after, kind)
            run = functools.partial(_iteration, model, optimizer, batch, accumulates)
            _raises(run, kind, place)
            del run
            if number % 2:
                _nothing_left(model, twin, memory, where)
            parity.assert_equal(
                _iteration(model, optimizer, batch, accumulates),
                _iteration(twin, twins, batch, accumulates),
                where,
            )
        parity.assert_equal(parity.full_params(model), parity.full_params(twin), "at the end")


def _nothing_left(model: Any, twin: Any, memory: Memory, where: str) -> None:
    for each in (model, twin):  # a root that stays gathered after forward, too
        each.reset_iter_state()
        each.zero_grad()
    deadline = time.monotonic() + 30
    while left := memory.left():  # gloo's thread may hold what it sent for a moment longer
        assert time.monotonic() < deadline, f"{left} after {where}"
        time.sleep(0.001)


@ranks(2, timeout=120)
@pytest.mark.parametrize(
    "setting",
    [pytest.param(s, marks=[] if s in DEFAULT else [pytest.mark.extended]) for s in SETTINGS],
)
def test_an_exception_on_all_ranks(setting: str) -> None:
    _try_all(SETTINGS[setting], accumulates=False)


@ranks(2, timeout=120)
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param("plain", marks=pytest.mark.extended),
        pytest.param("mixed", marks=pytest.mark.extended),
        "offload",
    ],
)
def test_an_exception_while_gradients_accumulate(setting: str) -> None:
    _try_all(SETTINGS[setting], accumulates=True)


@pytest.mark.extended
@ranks(4, timeout=120)
@pytest.mark.parametrize("setting", list(ON_FOUR))
def test_an_exception_on_a_mesh(setting: str) -> None:
    _try_all(ON_FOUR[setting], accumulates="HSDP" in setting)


class _Tolerant(Model):
    """Goes on without a block that raises."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with contextlib.suppress(ZeroDivisionError):
                x = block(x)
        return self.head(self.norm(x))


@ranks(2)
def test_a_block_that_raises_inside_a_forward_that_goes_on() -> None:
    model, twin = _shard(models.seeded(_Tolerant)), models.seeded(_Tolerant)
    for each in (model, twin):
        BOMB.arm("forward", 1, ZeroDivisionError)
        loss = each(torch.ones(2, models.DIM)).square().mean()
        if each is model:
            assert all(map(is_sharded, model.blocks))
        loss.backward()
    assert twin.blocks[1].up.weight.grad is None
    parity.assert_equal(parity.full_grads(model), parity.full_grads(twin))
