"""State dicts of models and optimizers by type: against unsharded models and torch's own FSDP1."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fsdp2
import fsdp2.fsdp1 as ours
from fsdp2.fsdp1 import FSDP, OptimStateKeyType, StateDictType
from fsdp2.optim import FlatOptimizer
from tests.common import models, parity
from tests.common.errors import raises
from tests.common.observing import LargestMade
from tests.common.workers import ranks

CPU = torch.device("cpu")
VOCAB = 13
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


def plain(seed: int = 0) -> nn.Module:
    """An embedding that is the head, too; buffers; a frozen block."""
    model = models.seeded(partial(models.Transformer, tied=True), seed)
    model.blocks[0].requires_grad_(False)
    return model


def wrap(api: Any, model: nn.Module, **arguments: Any) -> Any:
    arguments.setdefault("use_orig_params", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return api.FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({models.Block}), device_id=CPU, **arguments
        )


def sharded(seed: int = 0, **arguments: Any) -> Any:
    return wrap(ours, plain(seed), **arguments)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, the second without decay; the tied weight once."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    """On the same batches on each rank: means of equal gradients have the same bits."""
    for batch in parity.language_batches(VOCAB, steps=steps):
        optimizer.zero_grad()
        parity.language_loss(model, batch).backward()
        optimizer.step()


def trained(model: Any, kind: str = "adamw") -> tuple[Any, Optimizer]:
    optimizer = OPTIMIZERS[kind](groups_of(model))
    train(model, optimizer)
    return model, optimizer


def by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return FSDP.rekey_optim_state_dict(
        optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer
    )


def full(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)


def in_order(states: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By name; torch's has other orders."""
    return {name: dict(sorted(state.items())) for name, state in sorted(states.items())}


def assert_same_states(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """States and groups; the order of names within a group may differ."""
    parity.assert_equal(in_order(found["state"]), in_order(expected["state"]), where)
    for one, other in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert sorted(one["params"]) == sorted(other["params"])
        assert {**one, "params": []} == {**other, "params": []}


@ranks(2)
def test_full_and_sharded_state_dicts() -> None:
    """Wrappers, plain units and submodules, before training and after; keys are clean."""
    expected = plain().state_dict()
    model = sharded()
    checkpoint = checkpoint_wrapper(model.blocks[1])
    model.module.blocks[1] = checkpoint
    for _ in range(2):
        state = model.state_dict()
        assert list(state) == list(expected)
        parity.assert_equal(dict(state), dict(expected), "full")
        assert not any(isinstance(value, DTensor) for value in state.values())
        assert state["head.weight"] is state["embed.weight"]
        below = model.blocks[0].state_dict()
        parity.assert_equal(dict(below), plain().blocks[0].state_dict(), "below")
        with FSDP.state_dict_type(model, SHARDED):
            shards = model.state_dict()
            assert list(shards) == list(expected)
            parity.assert_equal(
                shards["embed.weight"].full_tensor(), expected["embed.weight"], "sharded"
            )
            assert FSDP.get_state_dict_type(model).state_dict_type == SHARDED
        assert FSDP.get_state_dict_type(model).state_dict_type == FULL
        parity.language_loss(
            model, parity.language_batches(VOCAB, steps=1)[0]
        )  # gathered in between
    units = plain()
    fsdp2.fully_shard(units.blocks[1])
    fsdp2.fully_shard(units)
    assert isinstance(units.state_dict()["embed.weight"], DTensor)
    with FSDP.state_dict_type(units, FULL):
        parity.assert_equal(dict(units.state_dict()), dict(expected), "units")
    if dist.get_rank() == 0:  # as ever: without communication
        assert isinstance(units.state_dict()["embed.weight"], DTensor)


@ranks(2)
def test_rank0_only_and_offload() -> None:
    model, expected = sharded(), plain().state_dict()
    config = ours.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    for given in (config, torchs.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        with FSDP.state_dict_type(model, torchs.StateDictType.FULL_STATE_DICT, given):
            state = model.state_dict()
        assert dict(state) == {} if dist.get_rank() else list(state) == list(expected)
        if dist.get_rank() == 0:
            parity.assert_equal(dict(state), dict(expected), "rank 0")


@ranks(2)
def test_full_state_dicts_load_both_ways() -> None:
    """Into unsharded models, ours and torch's FSDP1, and back; every pair has the same bits."""
    state = plain(1).state_dict()
    for assign in (False, True):
        model = sharded()
        model.load_state_dict(state, assign=assign)
        parity.assert_equal(dict(model.state_dict()), dict(state), f"assign={assign}")
        assert model.head.weight is model.embed.weight or not assign
    for orig in (True, False):
        other = wrap(torchs, plain(), use_orig_params=orig)
        other.load_state_dict(sharded(2).state_dict())
        expected = plain(2).state_dict()
        parity.assert_equal(dict(other.state_dict()), dict(expected), f"to torch's {orig}")
        model = sharded()
        model.load_state_dict(other.state_dict())
        parity.assert_equal(dict(model.state_dict()), dict(expected), f"from torch's {orig}")
    alone = plain()
    alone.load_state_dict(sharded(3).state_dict())
    parity.assert_equal(dict(alone.state_dict()), dict(plain(3).state_dict()), "alone")
    model.blocks[1].load_state_dict(plain(4).blocks[1].state_dict())
    parity.assert_equal(
        dict(model.blocks[1].state_dict()), dict(plain(4).blocks[1].state_dict()), "submodule"
    )
    broken = {**state, "norm.weight": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"size mismatch for .*norm.weight"):
        model.load_state_dict(broken)


@ranks(2)
def test_sharded_state_dicts_load() -> None:
    """Ours, and those of ShardedTensors that torch's FSDP1 makes."""
    source, target = sharded(1), sharded()
    for model in (source, target):
        FSDP.set_state_dict_type(model, SHARDED)
    target.load_state_dict(source.state_dict())
    FSDP.set_state_dict_type(target, FULL)
    parity.assert_equal(dict(target.state_dict()), dict(plain(1).state_dict()), "ours")
    other = wrap(torchs, plain(2))
    with torchs.FullyShardedDataParallel.state_dict_type(
        other, torchs.StateDictType.SHARDED_STATE_DICT
    ):
        state = other.state_dict()
    assert isinstance(state["embed.weight"], ShardedTensor)
    target.load_state_dict(state)
    parity.assert_equal(dict(target.state_dict()), dict(plain(2).state_dict()), "torch's")
    shard = state["embed.weight"].local_shards()[0]
    shard.metadata.shard_offsets[0] += 1
    with pytest.raises(RuntimeError, match=r"embed.weight' is a ShardedTensor .* other rows"):
        target.load_state_dict(state)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@ranks(2)
def test_full_optimizer_states(kind: str) -> None:
    """As the unsharded optimizer's, into one and back, by names and by ids."""
    alone, alone_optimizer = trained(plain(), kind)
    model, optimizer = trained(sharded(), kind)
    expected = by_name(alone, alone_optimizer)
    assert not any(name.startswith("blocks.0") for name in expected["state"])
    found = full(model, optimizer)
    assert_same_states(found, expected, "full")
    mine = FSDP.full_optim_state_dict(model, optimizer, optim_input=groups_of(model))
    assert bool(mine) == (dist.get_rank() == 0)
    if mine:
        assert_same_states(mine, expected, "rank 0")
    ids = FSDP.rekey_optim_state_dict(
        found, OptimStateKeyType.PARAM_ID, alone, optim=alone_optimizer
    )
    parity.assert_equal(ids["state"], alone_optimizer.state_dict()["state"], "ids")
    fresh = OPTIMIZERS[kind](groups_of(alone))
    fresh.load_state_dict(ids)
    assert_same_states(by_name(alone, fresh), expected, "into an unsharded one")
    scattered = FSDP.scatter_full_optim_state_dict
    ways: list[Callable[..., Any]] = [
        lambda m, o: FSDP.shard_full_optim_state_dict(expected, m, optim=o),
        lambda m, o: FSDP.shard_full_optim_state_dict(expected, m, optim_input=groups_of(m)),
        lambda m, o: scattered(None if dist.get_rank() else expected, m, optim=o),
        lambda m, o: scattered(expected, m, optim=o, group=dist.new_group([0, 1])),
        lambda m, o: FSDP.optim_state_dict_to_load(m, o, expected),
        lambda m, o: FSDP.flatten_sharded_optim_state_dict(
            FSDP.sharded_optim_state_dict(model, optimizer), m, o
        ),
    ]
    for way in ways:
        other = sharded()
        its = OPTIMIZERS[kind](groups_of(other))
        before = copy.deepcopy(expected["state"])
        its.load_state_dict(way(other, its))
        assert_same_states(full(other, its), expected, "in")
        train(other, its)
        parity.assert_equal(before, expected["state"], "what was given")
    its.load_state_dict(ways[0](other, its))
    other.load_state_dict(model.state_dict())
    for each, its_own in ((alone, alone_optimizer), (other, its)):
        train(each, its_own)  # go on alike
    parity.assert_equal(dict(other.state_dict()), dict(alone.state_dict()), "continued")


@ranks(2)
def test_optimizer_states_by_type() -> None:
    """`optim_state_dict` follows the type, and its config; loading takes what it gave."""
    model, optimizer = trained(sharded())
    expected = full(model, optimizer)
    config = ours.FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, FULL, optim_state_dict_config=config):
        found = FSDP.optim_state_dict(model, optimizer)
        assert bool(found) == (dist.get_rank() == 0)
        other = sharded()
        its = OPTIMIZERS["adamw"](groups_of(other))
        FSDP.set_state_dict_type(other, FULL, None, config)
        FSDP.optim_state_dict_to_load(other, its, found, load_directly=True)
    assert_same_states(full(other, its), expected, "rank 0")
    with FSDP.state_dict_type(model, SHARDED):
        shards = FSDP.optim_state_dict(model, optimizer)
        assert isinstance(shards["state"]["embed.weight"]["exp_avg"], DTensor)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, shards))
    assert_same_states(full(model, optimizer), expected, "sharded")
    with pytest.warns(UserWarning, match="belongs to no parameter"):
        mixed = FSDP.optim_state_dict(
            model, optimizer, {**optimizer.state_dict(), "state": {"mine": 3}}
        )
    assert mixed["state"] == {"mine": 3}


@pytest.mark.parametrize("orig", [True, False])
@ranks(2)
def test_optimizer_states_of_torchs_fsdp1(orig: bool) -> None:
    """Full states of torch's into ours and of ours into torch's; sharded ones of torch's."""
    theirs = torchs.FullyShardedDataParallel
    other = wrap(torchs, plain(), use_orig_params=orig)
    make = OPTIMIZERS["adamw"]
    its = make(other.parameters())
    train(other, its)

    def states(of: Any, its: Optimizer, kind: str) -> dict[str, Any]:
        """Of torch's, not offloaded: where memory is the CPU's already, it would reuse its own."""
        configs = (
            getattr(torchs, f"{kind}StateDictConfig")(),
            getattr(torchs, f"{kind}OptimStateDictConfig")(offload_to_cpu=False),
        )
        of_kind = torchs.StateDictType[f"{kind.upper()}_STATE_DICT"]
        with theirs.state_dict_type(of, of_kind, *configs):
            return theirs.optim_state_dict(of, its)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, shards = states(other, its, "Full"), states(other, its, "Sharded")
        model = sharded()
        optimizer = make(model.parameters())
        train(model, optimizer)
        found = full(model, optimizer)
        parity.assert_equal(in_order(found["state"]), in_order(expected["state"]), "alike")
        for given in (expected, shards):
            fresh = make(model.parameters())
            fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, given))
            loaded = full(model, fresh)
            parity.assert_equal(
                in_order(loaded["state"]), in_order(expected["state"]), "from torch's"
            )
        fresh = make(other.parameters())
        fresh.load_state_dict(theirs.shard_full_optim_state_dict(found, other, optim=fresh))
        loaded = states(other, fresh, "Full")
        parity.assert_equal(in_order(loaded["state"]), in_order(expected["state"]), "into torch's")


@ranks(2)
def test_types_are_set_through_a_module_around() -> None:
    """Of models and of optimizers."""
    inner, _ = trained(sharded())
    model: Any = nn.Sequential(inner)
    optimizer = OPTIMIZERS["adamw"](groups_of(model))
    train(model, optimizer, 1)
    FSDP.set_state_dict_type(
        model,
        SHARDED,
        state_dict_config=ours.ShardedStateDictConfig(offload_to_cpu=True),
        optim_state_dict_config=ours.OptimStateDictConfig(offload_to_cpu=True),
    )
    state = model.state_dict()
    assert isinstance(state["0.embed.weight"], DTensor)
    states = FSDP.optim_state_dict(model, optimizer)["state"]
    assert isinstance(states["0.embed.weight"]["exp_avg"], DTensor)
    FSDP.set_state_dict_type(model, FULL)
    with FSDP.state_dict_type(model, SHARDED):
        again = model.state_dict()
    assert list(again) == list(state)
    parity.assert_equal(parity.full_all(again.values()), parity.full_all(state.values()))
    assert not any(isinstance(value, DTensor) for value in model.state_dict().values())


@ranks(2)
def test_other_optimizers() -> None:
    """`FlatOptimizer`, and states of Adafactor, which have other shapes than parameters."""
    model, optimizer = trained(sharded())
    expected = full(model, optimizer)
    other = sharded()
    flat = FlatOptimizer(groups_of(other), torch.optim.AdamW, lr=1e-2)
    train(other, flat)
    found = full(other, flat)
    parity.assert_equal(found["state"], expected["state"], "flat")
    flat.load_state_dict(FSDP.optim_state_dict_to_load(other, flat, expected))
    loaded = full(other, flat)
    assert_same_states(loaded, expected, "into flat")
    alone, model = plain(), sharded()
    make = partial(torch.optim.Adafactor, lr=1e-2)
    adafactor = make(alone.parameters())
    train(alone, adafactor, steps=1)  # torch's cannot step DTensors (2.13), but states travel
    states = by_name(alone, adafactor)
    fresh = make(model.parameters())
    for scatter in (False, True):
        load = FSDP.scatter_full_optim_state_dict if scatter else FSDP.shard_full_optim_state_dict
        fresh.load_state_dict(load(states, model, optim=fresh))
        found = full(model, fresh)
        parity.assert_equal(found["state"], states["state"], "Adafactor's")


@ranks(4)
def test_replicas() -> None:
    """HSDP: states and weights of the unsharded model, and back from rank 0 alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = partial(
        sharded, device_mesh=mesh, sharding_strategy=ours.ShardingStrategy.HYBRID_SHARD
    )
    alone, alone_optimizer = trained(plain())
    model, optimizer = trained(hybrid())
    expected = by_name(alone, alone_optimizer)
    parity.assert_equal(dict(model.state_dict()), dict(alone.state_dict()), "weights")
    assert_same_states(full(model, optimizer), expected, "states")
    config = ours.FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, FULL, config):
        assert bool(model.state_dict()) == (dist.get_rank() == 0)
    other = hybrid(1)
    its = OPTIMIZERS["adamw"](groups_of(other))
    given = expected if dist.get_rank() == 0 else None
    its.load_state_dict(FSDP.scatter_full_optim_state_dict(given, other, optim=its))
    other.load_state_dict(alone.state_dict())
    found = full(other, its)
    assert_same_states(found, expected, "scattered")
    parity.assert_equal(dict(other.state_dict()), dict(alone.state_dict()), "loaded")


@ranks(2)
def test_other_ranks_hold_no_more_than_their_rows() -> None:
    """Full state dicts of rank 0 alone, out and in again."""
    model = ours.FSDP(models.seeded(partial(nn.Linear, 256, 256)), device_id=CPU)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    config = ours.FullStateDictConfig(rank0_only=True)
    with LargestMade() as largest:
        with FSDP.state_dict_type(model, FULL, config):
            model.state_dict()
        states = FSDP.full_optim_state_dict(model, optimizer)
        FSDP.scatter_full_optim_state_dict(states, model, optim=optimizer)
    whole = 256 * 256 * 4
    assert largest.nbytes >= whole if dist.get_rank() == 0 else largest.nbytes <= whole // 2


@ranks(2)
def test_misuse() -> None:
    model, optimizer = trained(sharded())
    states = full(model, optimizer)
    with raises("state-dict-local"):
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with raises("state-dict-type"):
        FSDP.set_state_dict_type(model, "full")  # type: ignore[arg-type]
    with raises("state-dict-config"):
        FSDP.set_state_dict_type(model, FULL, ours.ShardedStateDictConfig())
    with raises("state-dict-no-units"):
        FSDP.get_state_dict_type(plain())
    with raises("optim-key-type"):
        FSDP.rekey_optim_state_dict(states, "name", model)  # type: ignore[arg-type]
    both = {"state": {"embed.weight": {}, 3: {}}, "param_groups": []}
    with raises("optim-keys-mixed"):
        FSDP.rekey_optim_state_dict(both, OptimStateKeyType.PARAM_ID, model)
    foreign = {"state": {"nobody": {}}, "param_groups": []}
    with raises("optim-key-unknown"):
        FSDP.rekey_optim_state_dict(foreign, OptimStateKeyType.PARAM_ID, model)
    with raises("optim-of-another-model"):
        FSDP.full_optim_state_dict(sharded(), optimizer)
    wider = copy.deepcopy(states)
    wider["state"]["embed.weight"]["exp_avg"] = torch.zeros(VOCAB, 3)
    moved = copy.deepcopy(states)
    moved["param_groups"].reverse()
    fewer = {**states, "param_groups": states["param_groups"][:1]}
    unknown = copy.deepcopy(states)
    unknown["param_groups"][0]["params"].append("nobody")
    aliased = copy.deepcopy(states)
    aliased["state"]["embed.weight"]["exp_avg"] = aliased["state"]["embed.weight"]["exp_avg_sq"]
    for wrong in ({}, optimizer.state_dict(), wider, moved, fewer, unknown):
        with raises("optim-not-loadable"):
            FSDP.shard_full_optim_state_dict(wrong, model, optim=optimizer)
        with raises("optim-not-loadable"):
            given = None if dist.get_rank() else wrong
            FSDP.scatter_full_optim_state_dict(given, model, optim=optimizer)
    with raises("optim-states-aliased"):
        FSDP.optim_state_dict_to_load(model, optimizer, aliased)
    with raises("optim-states-aliased"):
        given = None if dist.get_rank() else aliased
        FSDP.scatter_full_optim_state_dict(given, model, optim=optimizer)
    FSDP.set_state_dict_type(model.blocks[0], SHARDED)
    with raises("state-dict-types-below"):
        FSDP.get_state_dict_type(model)


@ranks(2)
def test_ranks_that_differ() -> None:
    """In the type set, in the states of their optimizers, in the model that is scattered into."""
    model, optimizer = trained(sharded())
    mine = (FULL, SHARDED)[dist.get_rank()]
    for record in (model, *(model.blocks)):
        FSDP.set_state_dict_type(record, SHARDED)
    FSDP.set_state_dict_type(model, mine)
    with raises("state-dict-ranks"):
        model.state_dict()
    with raises("optim-state-ranks"):
        FSDP.optim_state_dict(model, optimizer)
    FSDP.set_state_dict_type(model, FULL)
    if dist.get_rank():
        del optimizer.state[model.embed.weight]
    with raises("optim-state-ranks"):
        FSDP.full_optim_state_dict(model, optimizer)
    other = OPTIMIZERS["adamw"](list(model.parameters())[: 3 + dist.get_rank()])
    with raises("optim-scatter-ranks"):
        FSDP.scatter_full_optim_state_dict({"state": {}}, model, optim=other)
    parity.assert_equal(len(model.state_dict()), len(plain().state_dict()), "and goes on")
