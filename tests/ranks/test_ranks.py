"""Ranks that disagree raise one sentence together; without the check, the message says where."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.core.modules.registry import records_below
from fsdp2.core.schedule.observers import observers_of
from fsdp2.errors import CommunicationError, RankMismatchError
from fsdp2.testing.counting import CountCollectives
from tests.common import backends, errors, meshes, models, parity
from tests.common.cases import in_turn
from tests.common.workers import ranks

DIM = 8
ALL = (0, 1, 2, 3)
Order = tuple[int, ...]


class Chain(nn.Module):
    """Blocks of two layers, run in the order that is asked for; the second layer may be left out.

    `order` names the blocks to run, `short` those whose second layer is left out.
    """

    def __init__(self, hidden: int = DIM) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Two(hidden) for _ in ALL)
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: Tensor, order: Order = ALL, short: Order = ()) -> Tensor:
        for index in order:
            x = self.blocks[index](x, index in short)
        return self.head(x)


class Two(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: Tensor, short: bool = False) -> Tensor:
        x = torch.tanh(self.up(x))
        return x if short else self.down(x)


def _shard(mesh: DeviceMesh | None = None, seed: int = 0) -> nn.Module:
    model = models.seeded(Chain, seed)
    mesh = mesh or parity.world_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _step(model: nn.Module, *args: tuple[int, ...]) -> None:
    model(torch.ones(2, DIM), *args).sum().backward()


def _hsdp() -> DeviceMesh:
    return meshes.hsdp_mesh(2, 2)


def _said(function: Callable[[], object]) -> str:
    """The sentence that every rank raised; afterwards, ranks that agree train under the check."""
    with pytest.raises(RankMismatchError) as caught:
        function()
    everyones: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, str(caught.value))
    assert len(set(everyones)) == 1, everyones
    model = _shard()
    _step(model)
    assert all(param.grad is not None for param in model.parameters())
    return everyones[0]


# ---- what one rank does otherwise


def _train(model: nn.Module, orders: list[Order]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for order in orders:
        optimizer.zero_grad()
        _step(model, order)
        optimizer.step()


@ranks(4)
def test_a_unit_skipped_on_one_rank() -> None:
    with fsdp2.debug(check_ranks=True):
        model, other = _shard(), _shard()
        third = (0, 2, 3) if dist.get_rank() == 2 else ALL
        said = _said(lambda: _train(model, [ALL, ALL, third]))
        errors.assert_said("ranks-elsewhere", said)
        assert said == (
            "ranks disagree on their next step: ranks 0, 1 and 3 are at the all-gather of "
            "'blocks.2' during the forward of 'blocks.1', iteration 2, rank 2 is at the all-gather "
            "of 'blocks.2' for its forward, iteration 2; run the same units in the same order on "
            "every rank, with zeros as input if a rank does not need a unit [ranks-elsewhere]"
        )
        model.reset_iter_state()
        _train(model, [ALL])  # the model is as usable as after any exception
        _train(other, [ALL] * 3)
        parity.assert_equal(parity.full_grads(model), parity.full_grads(other))


def _units_in(order: Order) -> None:
    model = _shard()
    _step(model)
    _step(model, order if dist.get_rank() == 1 else ALL)


def _no_backward() -> None:
    model = _shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, DIM)).sum()
    if dist.get_rank() == 0:
        loss.backward()
    optimizer.step()


def _no_gradients() -> None:
    """Of some parameters of a unit a rank may lack them; of all, it does not reduce."""
    model = _shard()
    first = dist.get_rank() == 0
    _step(model, ALL, () if first else (1,))
    if not first:
        model.blocks[1].register_forward_hook(lambda _, args, out: args[0] + out.detach())
    _step(model)


def _other_model(build: Callable[[int], nn.Module], **arguments: Any) -> None:
    fully_shard(build(dist.get_rank()), mesh=parity.world_mesh(), **arguments)


def _other_policy() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16 if dist.get_rank() == 1 else None)
    _other_model(lambda _: models.seeded(Chain), mp_policy=policy)


def _other_flags(change: Callable[[nn.Module], object]) -> None:
    model = _shard()
    if dist.get_rank() == 1:
        change(model)
    _step(model)


Case = tuple[Callable[[], object], str]
"""What some ranks do otherwise, and what all of them say; "…" is for anything."""

DISAGREEMENTS: dict[str, Case] = {
    "the last unit left out": (
        lambda: _units_in((0, 1, 2)),
        "rank 1 is at the all-gather of 'blocks.2' ahead of",
    ),
    "another order": (
        lambda: _units_in((1, 0, 2, 3)),
        "rank 1 is at the all-gather of 'blocks.1' for its",
    ),
    "a unit twice": (
        lambda: _units_in((0, 1, 1, 2, 3)),
        "rank 1 is at the all-gather of 'blocks.1' for",
    ),
    "an optimizer that steps without a backward": (
        _no_backward,
        "rank 0 is at the all-gather of 'blocks.3' … rank 1 is at SGD.step(), iteration 0; ",
    ),
    "no gradients of a unit": (
        _no_gradients,
        "rank 0 is at the all-gather of 'blocks.0' ahead of its backward, iteration 0, rank 1 is "
        "at the all-gather of 'blocks.0' for its backward, iteration 0; ",
    ),
    "shapes": (
        lambda: _other_model(lambda rank: Chain(9 if rank == 1 else DIM)),
        "ranks disagree about fully_shard of Chain: parameter 'blocks.0.up.weight' is "
        "torch.float32 [8, 8] on dim 0 on rank 0, torch.float32 [9, 8] on dim 0 on rank 1; ",
    ),
    "dtypes": (
        lambda: _other_model(lambda rank: Chain().to((torch.float32, torch.bfloat16)[rank])),
        "torch.float32 [8, 8] on dim 0 on rank 0, torch.bfloat16 [8, 8] on dim 0 ",
    ),
    "weights": (
        lambda: _other_model(lambda rank: models.seeded(Chain, seed=rank)),
        "the weights of 'blocks.0.up.weight' is checksum ",
    ),
    "policies": (_other_policy, "param_dtype is None on rank 0, torch.bfloat16 on rank 1; "),
    "resharding": (
        lambda: _other_flags(lambda model: model.blocks[1].set_reshard_after_forward(False)),
        "'blocks.1' during the forward of 'blocks.0', iteration 0: reshard_after_for",
    ),
    "factors": (
        lambda: _other_flags(lambda model: model.set_gradient_divide_factor(3.0)),
        "the gradient divide factor is None on rank 0, 3.0 on rank 1; ",
    ),
    "frozen parameters": (
        lambda: _other_flags(lambda model: model.blocks[1].up.bias.requires_grad_(False)),
        "'blocks.1.up.bias' is torch.float32 [8] in torch.float32, trained on rank 0, ",
    ),
    "sync": (
        lambda: _other_flags(lambda model: model.set_requires_gradient_sync(False)),
        "rank 0 is at the reduce-scatter of 'blocks.3' in backward, iterat",
    ),
}


def _all_reduces_of(replica: int) -> None:
    """The ranks of a shard axis agree; those of the replicate axis are at different steps."""
    mesh = _hsdp()
    model = _shard(mesh)
    model.set_requires_all_reduce(mesh.get_local_rank("replicate") == replica)
    _train(model, [ALL])


def _skips_beside_tensor_parallelism() -> None:
    """Ranks 0 and 2 shard together, ranks 1 and 3 do; in both sets one skips a unit."""
    mesh = meshes.mesh("shard", "tp", shape=(2, 2))
    _step(_shard(mesh["shard"]), (0, 2, 3) if mesh.get_local_rank("shard") == 1 else ALL)


REDUCES, STEPS = "at the all-reduce of 'blocks.3' in backward, iteration 0", "at SGD.step(), itera"
OF_ONE_AXIS: dict[str, Case] = {
    "all-reduces of the first replica": (lambda: _all_reduces_of(0), f"{REDUCES}…{STEPS}"),
    "all-reduces of the second": (lambda: _all_reduces_of(1), f"{STEPS}…{REDUCES}"),
    "a unit, beside tensor parallelism": (
        _skips_beside_tensor_parallelism,
        " is at the all-gather of 'blocks.2' during the forward of 'blocks.1'",
    ),
}


@ranks(2, 4)
def test_what_some_ranks_do_otherwise_is_named_on_all(world_size: int) -> None:
    def check(case: Case) -> None:
        function, said = case
        with fsdp2.debug(check_ranks=True):
            sentence = _said(function)
        if "disagree about" in sentence:
            errors.assert_said("ranks-differ", sentence)
        else:
            errors.assert_said("ranks-elsewhere", sentence)
        assert re.search(".*".join(map(re.escape, said.split("…"))), sentence), sentence

    in_turn(DISAGREEMENTS if world_size == 2 else OF_ONE_AXIS, check)


@ranks(2)
def test_a_rank_that_has_finished() -> None:
    """Rank 1 ends its loop, and the check with it, an iteration before the other."""
    rank = dist.get_rank()
    before = fsdp2.debug()
    fsdp2.debug(check_ranks=True)
    model = _shard()
    _step(model)
    if rank == 1:
        fsdp2.debug(check_ranks=False)
    else:
        with pytest.raises(RankMismatchError) as caught:
            _step(model)
        fsdp2.debug(check_ranks=False)
        assert str(caught.value).startswith(
            "ranks disagree on their next step: rank 0 is at the all-gather of '(root)' for its "
            "forward, iteration 0, rank 1 has switched the check of ranks off and "
            "was last at the reduce-scatter of 'blocks.0' in backward, iteration 0; "
        )
    assert not before.check_ranks
    with fsdp2.debug(check_ranks=True):
        _step(_shard())  # both are there again


@ranks(2)
def test_a_rank_that_does_not_come_in_time() -> None:
    rank = dist.get_rank()
    with fsdp2.debug(check_ranks=True):
        model = _shard()
        _step(model)
        fsdp2.debug(timeout=0.5)
        if rank == 1:
            dist.barrier()  # until the other has raised
        with pytest.raises(RankMismatchError) as caught:
            _step(model)
        if rank == 0:
            dist.barrier()
        assert "rank 0 is at the all-gather of '(root)' for its forward" in str(caught.value)
        assert "rank 1 has not come for 0." in str(caught.value)
        assert "and was last at the reduce-scatter of 'blocks.0' in backward" in str(caught.value)


@ranks(2)
def test_a_unit_that_is_refused_is_as_it_was() -> None:
    model = models.seeded(Chain, seed=dist.get_rank())
    before = list(model.parameters())
    with fsdp2.debug(check_ranks=True):
        _said(lambda: fully_shard(model, mesh=parity.world_mesh()))
    assert type(model) is Chain
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


# ---- replicas


def _seeds_apart(mesh: DeviceMesh) -> nn.Module:
    return _shard(mesh, seed=mesh.get_local_rank("replicate"))


def _initializes_apart(mesh: DeviceMesh) -> nn.Module:
    with torch.device("meta"):
        model = _shard(mesh)
    model.to_empty(device="cpu")
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, number)
    _change_one(model.blocks[2].up.bias)
    return model


def _changes_one_row(mesh: DeviceMesh) -> nn.Module:
    model = _shard(mesh)
    _change_one(model.blocks[2].up.bias)
    return model


def _changes_whole(mesh: DeviceMesh) -> nn.Module:
    """On a mesh without replicas, of which one parameter is whole on every rank."""
    model = models.seeded(Chain)
    whole = model.blocks[2].up.bias
    fully_shard(
        model,
        mesh=parity.world_mesh(),
        shard_placement_fn=lambda param: Replicate() if param is whole else Shard(0),
    )
    _change_one(model.blocks[2].up.bias)
    return model


@torch.no_grad()
def _change_one(param: Tensor) -> None:
    if dist.get_rank() == 2:
        assert isinstance(param, DTensor)
        param.to_local()[-1] += 1


@ranks(4)
@pytest.mark.parametrize("check", [False, True], ids=["plain", "debug"])
def test_replicas_that_differ_raise_at_their_first_all_reduce(check: bool) -> None:
    def compare(build: Callable[[DeviceMesh], nn.Module]) -> None:
        model = build(_hsdp())
        with fsdp2.debug(check_ranks=check):
            model.set_requires_all_reduce(False)
            _step(model)  # nothing is added up over replicas
            model.set_requires_all_reduce(True)
            with errors.raises("replicas-differ"):
                _step(model)
            name = "head.weight" if build is _seeds_apart else "blocks.2.up.bias"
            assert _said(lambda: _step(model)).startswith(f"parameter '{name}' differs between")

    cases = (_seeds_apart, _initializes_apart, _changes_one_row, _changes_whole)
    in_turn({case.__name__: case for case in cases}, compare)


@ranks(4)
def test_replicas_are_compared_once() -> None:
    model = _shard(_hsdp())
    counts = []
    for _ in range(3):
        with CountCollectives() as found:
            _step(model)
        counts.append(found.counts)
    shared = {"all_reduce": 2}  # over replicas, then over the shard axis
    assert counts[0] - counts[1] == shared
    assert counts[1] == counts[2]
    assert not any(observers_of(group) for group in _groups(model))
    _change_one(model.head.weight)
    _step(model)  # what is written later is the user's: replicas may average it themselves


# ---- ranks that agree


class Plain(fsdp2.AllGather):
    def allocate(self, size, *, dtype, device):  # type: ignore[no-untyped-def]  # as documented
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):  # type: ignore[no-untyped-def]  # as documented
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)


def _every_feature(model: nn.Module) -> None:
    """Two iterations of two micro-batches, one evaluation, and ranks that use different units."""
    rank = dist.get_rank()
    model.set_reduce_scatter_unused_params(True)
    model.blocks[0].set_custom_all_gather(Plain())
    model.blocks[1].set_modules_to_forward_prefetch([model.blocks[2], model.blocks[3]])
    model.blocks[2].set_reshard_after_forward(False)
    for iteration in range(2):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            x = torch.full((2, DIM), float(rank), requires_grad=True)
            y = checkpoint(model.blocks[0], x, use_reentrant=False)
            loss = model(y, ALL).sum() if rank else model(y, ALL, (1, 3)).sum()
            loss.backward()
        if iteration == 0:
            with torch.no_grad():
                model(torch.ones(2, DIM), ALL)
            handle = model.blocks[3].unshard(async_op=True)
            handle.wait()
            model.blocks[3].reshard()


@ranks(4)
@pytest.mark.parametrize("kind", ["flat", "hsdp", "smaller"])
def test_ranks_that_agree_train_as_without_the_check(kind: str) -> None:
    mesh = _hsdp() if kind == "hsdp" else parity.world_mesh()
    found = []
    for checked in (False, True):
        with fsdp2.debug(check_ranks=checked, check_nan=checked):
            model = models.seeded(Chain)
            for block in model.blocks:
                fully_shard(
                    block, mesh=mesh, reshard_after_forward=2 if kind == "smaller" else True
                )
            fully_shard(model, mesh=mesh)
            model(torch.ones(2, DIM))  # the root is the root of all before a block runs alone
            _every_feature(model)
            found.append(parity.full_grads(model))
    parity.assert_equal(found[1], found[0])


@ranks(2)
def test_groups_follow_when_the_check_is_switched() -> None:
    model = _shard()
    kinds = [type(group) for group in _groups(model)]
    with fsdp2.debug(check_ranks=True):
        _step(model)
        inside = {type(group).__name__ for group in _groups(model)}
    _step(model)
    assert inside == {"Observed"}
    assert [type(group) for group in _groups(model)] == kinds


def _groups(model: nn.Module) -> list[Any]:
    return [group for record in records_below(model) for group in record.unit.groups]


# ---- without the check


PATIENCE = timedelta(seconds=0.5)
TIMED_OUT = "Timed out waiting 500ms"


def _in_a_hurry(group: dist.ProcessGroup) -> None:
    """From now on its collectives wait for a moment only; once one has failed, it is of no use."""
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(PATIENCE, group)


# What a rank waits for first: where it makes communicators, one does before the first gather.
FIRST = "first collective" if backends.known(backends.pretended()).connects_late else "all-gather"


@ranks(4)
def test_a_unit_skipped_on_one_rank_without_the_check() -> None:
    """The same as with it above; what each rank names depends on which collectives fit together."""
    group = dist.new_group(list(ALL))
    model = _shard(DeviceMesh.from_group(group, "cpu"))
    _step(model)
    _in_a_hurry(group)
    with pytest.raises(CommunicationError, match=r"of unit '.*' failed in backward, iteration "):
        _step(model, (0, 2, 3) if dist.get_rank() == 2 else ALL)
    dist.barrier()


def _chain(group: dist.ProcessGroup) -> nn.Module:
    return _shard(DeviceMesh.from_group(group, "cpu"))


def _linear(group: dist.ProcessGroup) -> nn.Module:
    return fully_shard(nn.Linear(DIM, DIM), mesh=DeviceMesh.from_group(group, "cpu"))


def _replicated(group: dist.ProcessGroup) -> nn.Module:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    names = ("replicate", "shard")
    mesh = DeviceMesh.from_group([group, alone], "cpu", [[0], [1]], mesh_dim_names=names)
    return fully_shard(models.seeded(lambda: nn.Linear(DIM, DIM)), mesh=mesh)


TIME_OUTS: dict[str, tuple[Callable[[dist.ProcessGroup], nn.Module], str]] = {
    "in forward": (_chain, f"the {FIRST} of unit '(root)' failed in forward, iteration "),
    "in backward": (_chain, "the all-gather of unit 'blocks.3' failed in backward, iteration "),
    "of a sum": (_linear, "the reduce-scatter of unit '(root)' failed in backward, iteration "),
    "of replicas": (_replicated, "the all-reduce of unit '(root)' failed in backward, iteration "),
}


@ranks(2)
def test_a_time_out_names_what_this_rank_waited_for() -> None:
    def check(case: tuple[Callable[[dist.ProcessGroup], nn.Module], str]) -> None:
        build, sentence = case
        group = dist.new_group([0, 1])
        model = build(group)
        loss = None if "in forward" in sentence else model(torch.ones(2, DIM)).sum()
        _in_a_hurry(group)
        if dist.get_rank() == 0:
            with errors.raises("collective-failed") as caught:
                _step(model) if loss is None else loss.backward()
            assert sentence in str(caught.value)
            assert TIMED_OUT in str(caught.value.__cause__)
        dist.barrier()

    in_turn(TIME_OUTS, check)


# ---- gradients that are not numbers


@ranks(2, 4)
def test_nan_on_one_rank_raises_on_all(world_size: int) -> None:
    with fsdp2.debug(check_nan=True):
        model = _shard(_hsdp() if world_size == 4 else None)
        x = torch.ones(2, DIM)
        model(x).sum().backward()
        model.zero_grad()
        if dist.get_rank() == 1:
            x[0] = float("nan")
        with pytest.raises(fsdp2.errors.NonFiniteGradientError) as caught:
            model(x).sum().backward()
        everyones: list[str] = [""] * world_size
        dist.all_gather_object(everyones, str(caught.value))
        assert set(everyones) == {
            "the gradients of unit 'blocks.3' hold NaN or infinity: parameter "
            f"'blocks.3.up.weight' (on 1 of {world_size} ranks before the sum), "
            f"'blocks.3.up.bias' (on 1 of {world_size} ranks before the sum), "
            f"'blocks.3.down.weight' (on 1 of {world_size} ranks before the sum); check "
            "the loss and the inputs of those ranks, or, if it was on no rank, reduce in a dtype "
            "with a larger range [not-finite]"
        }
        model.reset_iter_state()
        model.zero_grad()
        model(torch.ones(2, DIM)).sum().backward()


@ranks(2)
def test_a_sum_that_overflows_is_on_no_rank_before() -> None:
    policy = MixedPrecisionPolicy(torch.float32, torch.float16)
    with fsdp2.debug(check_nan=True):
        model = fully_shard(
            nn.Linear(DIM, 1, bias=False), mesh=parity.world_mesh(), mp_policy=policy
        )
        model.set_gradient_divide_factor(1.0)
        with errors.raises("not-finite") as caught:
            model(torch.full((1, DIM), 6e4)).sum().backward()
        assert "'weight' (on 0 of 2 ranks before" in str(caught.value)
