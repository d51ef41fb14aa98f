"""Rows that are kept until shards change: which gathers communicate, and which must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2.core.config import GroupOptions, Wire
from fsdp2.core.device.streams import Lane
from fsdp2.optim import FlatOptimizer
from fsdp2.testing.null_group import CallLog, init_null_group
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import VirtualDevice
from fsdp2.tracing.record.notes import Await, Operation, Signal
from tests.gather.test_custom_comm import Gather

pytestmark = pytest.mark.alone

GATHER = "all_gather_single"
KEEPS = Wire(differences=True)  # all parameters travel as they are
UNITS = 3


@pytest.fixture
def log() -> Iterator[CallLog]:
    found = CallLog()
    init_null_group(4, observer=found)
    yield found
    dist.destroy_process_group()


def build(**arguments: object) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(UNITS)))
    for layer in model:
        fsdp2.fully_shard(layer, **arguments)  # type: ignore[arg-type]
    fsdp2.fully_shard(model)
    for record in model._records(True):
        record.unit.change(wire=KEEPS)
    return model


def gathers(log: CallLog) -> int:
    found = log.counts().get(GATHER, 0)
    log.clear()
    return found


def forward(model: nn.Module) -> Tensor:
    done: Tensor = model(torch.ones(2, 8)).sum()
    return done


def both(model: nn.Module) -> None:
    forward(model).backward()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "flat": lambda model: FlatOptimizer(model, torch.optim.SGD, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_of_any_optimizer_are_seen(log: CallLog, kind: str) -> None:
    model = build()
    optimizer = OPTIMIZERS[kind](model)
    for _ in range(3):
        both(model)
        assert gathers(log) == UNITS
        optimizer.step()  # and gradients stay


def test_what_the_user_gathers_is_gathered_each_time(log: CallLog) -> None:
    """Exact parameters of units with a collective of the user's; differences are not."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(UNITS)))
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    model.set_wire_format(gather="int8", differences=True, exact_below=100)
    for layer in model:
        layer.set_custom_all_gather(Gather())
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        assert gathers(log) == 3 * UNITS
        _write(model, lambda param: param.add_(1))
    reports = fsdp2.report(model).groups
    assert {(group.gathers, group.gathered_bytes - group.reused_bytes) for group in reports} == {
        (2, 4 * 64)
    }
    assert {group.step_bytes - group.reduced_bytes for group in reports} == {
        group.reused_bytes + 2 * 4 * 64 for group in reports
    }


@pytest.mark.parametrize("after_forward", [True, False, 2])
def test_an_optimizers_step_is_one_gather(log: CallLog, after_forward: bool | int) -> None:
    """Not again in backward, nor for further micro-batches."""
    model = build(reshard_after_forward=after_forward)
    log.clear()  # of the mesh of smaller groups
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for micro in range(3):
            both(model)
            assert gathers(log) == (UNITS if micro == 0 else 0)
        optimizer.step()
        optimizer.zero_grad()


def test_rows_are_kept_on_request(log: CallLog) -> None:
    """All of them, where no smaller group is named: the report says so, and what they take."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(UNITS)))
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    optimizer = OPTIMIZERS["torch"](model)
    seen = []
    for keep in (False, True, False):
        model.set_tuning(keep_rows=keep)
        log.clear()
        for _ in range(2):
            both(model)
            both(model)
            optimizer.step()
            seen.append(gathers(log))
        groups = fsdp2.report(model).groups
        assert [group.kept_bytes for group in groups] == [keep * g.gathered_bytes for g in groups]
        assert all(group.gathered_bytes >= 4 * 8 * 9 for group in groups)
    assert seen == [4 * UNITS] * 2 + [UNITS] * 2 + [4 * UNITS] * 2


def test_hooks_on_gradients_may_step(log: CallLog) -> None:
    """Of one parameter; others' gradients stay."""

    model = build()
    model[1].weight.register_post_accumulate_grad_hook(lambda param: param.data.sub_(1))
    both(model)
    gathers(log)
    for _ in range(3):
        both(model)
        assert gathers(log) == 1


def test_a_checkpoint_runs_again_with_the_same_rows(log: CallLog) -> None:
    from torch.utils.checkpoint import checkpoint

    model = build()
    x = torch.ones(2, 8, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert gathers(log) == UNITS


def _write(model: nn.Module, write: Callable[[nn.Parameter], object]) -> None:
    with torch.no_grad():
        for param in model.parameters():
            write(param)


def _by_data_and_none(model: nn.Module) -> None:
    def step(param: nn.Parameter) -> None:
        param.data.sub_(1)
        param.grad = None

    _write(model, step)


def _zeroed_in_forward(model: nn.Module) -> None:
    """As whoever drops gradients between a forward and its backward, and then steps by hand."""
    loss = forward(model)
    model.zero_grad()
    loss.backward()
    _write(model, lambda param: param.data.sub_(1))


def _evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 8))


def _unshard(model: nn.Module) -> None:
    for module in (*model, model):
        module.unshard()
        module.reshard()


def _write_through_memory(model: nn.Module) -> None:
    for param in model.parameters():
        array = param._local_tensor.numpy()  # type: ignore[attr-defined]  # a DTensor
        array += 1


@torch.no_grad()
def _write_many(model: nn.Module) -> None:
    torch._foreach_add_([*model.parameters()], 1)


def _write_and_undo(model: nn.Module) -> None:
    _write(model, lambda param: param.neg_())
    _write(model, lambda param: param.neg_())


CHANGES: dict[str, tuple[Callable[[nn.Module], object], int, int]] = {
    "an operator writes": (lambda model: _write(model, lambda param: param.add_(1)), 0, UNITS),
    "one operator": (lambda model: _write(model[0], lambda param: param.add_(1)), 0, 1),
    "foreach": (_write_many, 0, UNITS),
    "numpy": (_write_through_memory, 0, UNITS),
    "by hand, gradients dropped": (_by_data_and_none, 0, UNITS),
    "by hand, dropped in between": (_zeroed_in_forward, 0, UNITS),
    "undone": (_write_and_undo, 0, 0),
    "zero_grad": (lambda model: model.zero_grad(), 0, 0),
    "in place": (lambda model: model.zero_grad(set_to_none=False), 0, 0),
    "an evaluation": (_evaluate, UNITS, 0),  # more exact with each
    "loaded": (lambda model: model.load_state_dict(model.state_dict()), 0, UNITS),
    "cast": (lambda model: model.double().float(), 0, UNITS),
    "reshard": (lambda model: [module.reshard() for module in (*model, model)], 0, UNITS),
    "unshard": (_unshard, UNITS, UNITS),
    "given up": (lambda model: model.reset_iter_state(), 0, UNITS),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_gathered_again(log: CallLog, change: str) -> None:
    model = build()
    both(model)
    both(model)
    assert gathers(log) == UNITS
    do, during, after = CHANGES[change]
    do(model)
    assert gathers(log) == during
    both(model)
    assert gathers(log) == after


def test_a_forward_that_raises_ends_it(log: CallLog) -> None:
    model = build()
    both(model)
    gathers(log)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 7))
    both(model)
    assert gathers(log) == UNITS


def test_it_can_be_switched_off_and_memory_goes(log: CallLog) -> None:
    model = build()
    both(model)
    (group,) = model[0]._records(False)[0].unit.own_groups
    assert group.bound.keeping is not None
    assert group.bound.keeping.nbytes >= 8 * 9 * 4
    for record in model._records(True):
        record.unit.change(wire=Wire())
    gathers(log)
    both(model)
    both(model)
    assert gathers(log) == 4 * UNITS
    assert group.bound.keeping is None


def test_another_way_to_gather_takes_rows_over(log: CallLog) -> None:
    """As a trace does, which one rank alone may start."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both(model)
    optimizer.step()
    both(model)
    gathers(log)
    for record in model._records(True):
        for group in record.unit.own_groups:
            group.bind_launches()
    both(model)
    assert gathers(log) == 0
    optimizer.step()
    both(model)
    assert gathers(log) == UNITS


def test_a_cuda_graph_records_gathers(log: CallLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be replayed after any step."""
    model = build()
    model.set_keep_unsharded_storage(True)
    model.set_tuning(keep_gradients=True)
    both(model)
    both(model)
    gathers(log)
    scheduler = model._records(False)[0].scheduler
    assert scheduler is not None
    monkeypatch.setattr(type(scheduler.streams), "captures", lambda _: True, raising=False)
    both(model)
    assert gathers(log) == UNITS


def test_frozen_units_are_gathered_once(log: CallLog) -> None:
    model = build()
    for layer in model[:2]:
        layer.requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    for step in range(3):
        both(model)
        optimizer.step()
        assert gathers(log) == (UNITS if step == 0 else 1)


def test_nothing_is_launched_for_rows_that_are_there() -> None:
    """No lane but COMPUTE has anything to do, and none is waited for."""
    device = VirtualDevice()
    root = Node("root", children=[Node("a"), Node("b")], calls=[0, 1])
    sim = Simulation(root, device, options=GroupOptions(wire=KEEPS))
    sim.iteration(step=False)
    start = len(device.trace)
    sim.forward()
    found = device.trace[start:]
    assert {note.kind for note in found if isinstance(note, Operation)} >= {"copy_out"}
    assert {note.lane for note in found if isinstance(note, Operation)} == {Lane.COMPUTE}
    assert not [note for note in found if isinstance(note, Await | Signal)]
    assert device.races == []


def test_backward_computes_with_what_forward_has_used(log: CallLog) -> None:
    model = build()
    loss = forward(model)
    gathers(log)
    model[1].weight.data.add_(1)
    loss.backward()
    assert gathers(log) == 0
    both(model)
    assert gathers(log) == 1
