"""get_/set_ …state_dict with every StateDictOptions: as with torch's FSDP2 and no sharding."""

from __future__ import annotations

import copy
import functools
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.common import parallelisms, parity, workers

pytestmark = pytest.mark.ranks

# torch gathers full state dicts with functional collectives, which on gloo crash once in a while
# (in torch's own runs too); meshes of two dims take the most, and stay out of the default run.
SHARDED = [
    "flat2",
    pytest.param("flat4", marks=pytest.mark.extended),
    pytest.param("hsdp", marks=pytest.mark.extended),
    pytest.param("tp", marks=pytest.mark.extended),
]


def trained(
    api: ModuleType, parallelism: parallelisms.Parallelism, **arguments: Any
) -> tuple[nn.Module, Optimizer]:
    """A model after two steps, so that nothing in a state dict is zero or as it was built."""
    model = parallelism.shard(api, parallelisms.ladder(**arguments))
    optimizer = parity.adamw(p for p in model.parameters() if p.requires_grad)
    parallelisms.losses(model, optimizer, parallelism, parallelisms.ladder_batches(2))
    return model, optimizer


def whole(state: Any) -> Any:
    """A state dict with whole tensors, and for each tensor whether it was a DTensor."""
    leaves, spec = tree_flatten(state)
    found = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    kinds = {}
    for i, tensor in zip(found, parallelisms.gather([leaves[i] for i in found]), strict=True):
        kinds[str(i)] = isinstance(leaves[i], DTensor)
        leaves[i] = tensor
    return tree_unflatten(leaves, spec), kinds


def both(name: str, body: Any, *args: Any) -> Any:
    """Runs a body with ours and torch's FSDP2; compares; returns what ours returned."""
    ours = body(parallelisms.APIS["ours"], parallelisms.PARALLELISMS[name], *args)
    parity.assert_like_torch(
        ours, body(parallelisms.APIS["torch"], parallelisms.PARALLELISMS[name], *args)
    )
    return ours


def on_rank_zero(state: dict[str, Any]) -> dict[str, Any]:
    return state if dist.get_rank() == 0 else {}


def spread(check: Any) -> Any:
    """Makes a test of a check by the name of a parallelism, on each that is in `SHARDED`."""

    @functools.wraps(check)
    def test(name: str) -> None:
        workers.run_on_ranks(parallelisms.PARALLELISMS[name].ranks, test, name)

    setattr(test, workers.RANK_BODY, check)
    return pytest.mark.parametrize("name", SHARDED)(test)


# -- get_ -----------------------------------------------------------------------------------------

GETTERS = [
    {},
    {"cpu_offload": True},
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"ignore_frozen_params": True},
    {"flatten_optimizer_state_dict": True},
    {"full_state_dict": True, "ignore_frozen_params": True, "flatten_optimizer_state_dict": True},
]


def _get(
    api: ModuleType, parallelism: parallelisms.Parallelism, options: list[dict[str, bool]]
) -> Any:
    model, optimizer = trained(api, parallelism, frozen=True)
    found = []
    for each in options:
        chosen = StateDictOptions(**each)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=chosen)
        assert list(get_model_state_dict(model, options=chosen)) == list(model_state)
        alone = get_optimizer_state_dict(model, optimizer, options=chosen)
        assert list(alone) == list(optimizer_state)
        found.append([whole(dict(model_state)), whole(optimizer_state)])
    return found


@spread
def test_get(name: str) -> None:
    found = both(name, _get, GETTERS)
    for options, ((model, kinds), _) in zip(GETTERS, found, strict=True):
        full = options.get("full_state_dict", False)
        if full and options.get("cpu_offload") and dist.get_rank():
            assert model == {}
            continue
        assert ("head.bias" in model) is not options.get("ignore_frozen_params", False)
        assert any(kinds.values()) is not full
    (plain, _), _ = _get(parity.OURS, parallelisms.PARALLELISMS["plain"], [{}])[0]
    parity.assert_close(found[0][0][0], plain, parity.FP32, "unsharded")


def _get_submodules(api: ModuleType, parallelism: parallelisms.Parallelism) -> Any:
    model, _ = trained(api, parallelism)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the argument is deprecated
        for keep in (True, False):
            options = StateDictOptions(keep_submodule_prefixes=keep)
            state = get_model_state_dict(model, submodules={model.rungs[1]}, options=options)
            found.append(whole(dict(state)))
    return found


@workers.ranks(2)
def test_submodules_and_their_prefixes() -> None:
    (kept, _), (cut, _) = both("flat2", _get_submodules)
    assert {name.removeprefix("rungs.1.") for name in kept} == set(cut)
    assert all(name.startswith("rungs.1.") for name in kept)


# -- set_ -----------------------------------------------------------------------------------------

SETTERS = [
    {"full_state_dict": True, "broadcast_from_rank0": True},
    {"full_state_dict": True, "broadcast_from_rank0": True, "cpu_offload": True},
    {"full_state_dict": True},
    {},
]


def _set(
    api: ModuleType, parallelism: parallelisms.Parallelism, options: dict[str, bool], flatten: bool
) -> Any:
    """From one trained model into a new one; then both train on alike."""
    chosen = StateDictOptions(**options, flatten_optimizer_state_dict=flatten)
    source, source_optimizer = trained(api, parallelism, seed=1, tied=True)
    full = StateDictOptions(
        full_state_dict=chosen.full_state_dict, flatten_optimizer_state_dict=flatten
    )
    model_state, optimizer_state = get_state_dict(source, source_optimizer, options=full)
    if chosen.broadcast_from_rank0:
        # An empty model's dict makes torch's set_state_dict leave the broadcast to the others.
        if dist.get_rank():
            model_state = {key: torch.zeros_like(value) for key, value in model_state.items()}
        optimizer_state = on_rank_zero(optimizer_state)
    model = parallelism.shard(api, parallelisms.ladder(tied=True))
    for rung in model.rungs:
        rung.shift.fill_(dist.get_rank() + 3)  # not in a state dict: each rank's own
    optimizer = parity.adamw(model.parameters())
    result = set_state_dict(
        model,
        optimizer,
        model_state_dict=dict(model_state),
        optim_state_dict=copy.deepcopy(optimizer_state),  # an optimizer keeps what it is given
        options=chosen,
    )
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert model.again.weight is model.inlet.weight
    for rung in model.rungs:
        assert rung.shift.eq(dist.get_rank() + 3).all()
        rung.shift.copy_(source.rungs[0].shift)
    loaded = whole(dict(model.state_dict()))
    parity.assert_equal(loaded, whole(dict(source.state_dict())), "loaded")
    batches = parallelisms.ladder_batches(4)[2:]
    after = parallelisms.losses(model, optimizer, parallelism, batches)
    parity.assert_equal(
        after, parallelisms.losses(source, source_optimizer, parallelism, batches), "losses"
    )
    return loaded, after


@spread
def test_set(name: str) -> None:
    """Tied weights stay tied; a rank's non-persistent buffers stay its own."""
    for options in SETTERS:
        both(name, _set, options, False)
    both(name, _set, {}, True)  # flat and full together, torch's function loads from nobody


@spread
def test_set_one_by_one(name: str) -> None:
    """Model and optimizer by their own functions."""

    def run(api: ModuleType, parallelism: parallelisms.Parallelism) -> Any:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        source, source_optimizer = trained(api, parallelism, seed=1)
        full = StateDictOptions(full_state_dict=True)
        model_state = get_model_state_dict(source, options=full)
        optimizer_state = get_optimizer_state_dict(source, source_optimizer, options=full)
        model = parallelism.shard(api, parallelisms.ladder())
        optimizer = parity.adamw(model.parameters())
        set_model_state_dict(model, on_rank_zero(dict(model_state)), options=options)
        set_optimizer_state_dict(model, optimizer, on_rank_zero(optimizer_state), options=options)
        return parallelisms.losses(
            model, optimizer, parallelism, parallelisms.ladder_batches(4)[2:]
        )

    both(name, run)


@workers.ranks(2)
@pytest.mark.parametrize("full", [False, True])
def test_strict(full: bool) -> None:
    """Missing and unexpected names raise, or are returned."""

    def run(api: ModuleType, parallelism: parallelisms.Parallelism) -> Any:
        source, _ = trained(api, parallelism, seed=1)
        options = StateDictOptions(full_state_dict=full)
        state = dict(get_model_state_dict(source, options=options))
        state["nobodys.weight"] = state.pop("head.weight")
        model = parallelism.shard(api, parallelisms.ladder())
        with pytest.raises(RuntimeError, match="nobodys"):
            set_model_state_dict(model, dict(state), options=options)
        if not full:
            parity.assert_equal(
                parallelisms.gather([model.head.weight])[0],
                parallelisms.ladder().head.weight,
                "what was missing",
            )
        options = StateDictOptions(full_state_dict=full, strict=False)
        result = set_model_state_dict(model, dict(state), options=options)
        loaded = whole(dict(model.state_dict()))
        return [sorted(result.missing_keys), sorted(result.unexpected_keys), loaded]

    missing, unexpected, _ = both("flat2", run)
    assert unexpected == ["nobodys.weight"]
    assert missing == ([] if full else ["head.weight"])


@spread
def test_broadcast_into_a_model_on_meta(name: str) -> None:
    """A model that only rank 0 has whole, into shards that have no memory yet."""

    def run(api: ModuleType, parallelism: parallelisms.Parallelism) -> Any:
        with torch.device("meta"):
            model = parallelisms.Ladder(tied=True)
        parallelism.shard(api, model)
        plain = parallelisms.ladder(seed=1, tied=True)
        state = on_rank_zero(dict(plain.state_dict()))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        for rung, source in zip(model.rungs, plain.rungs, strict=True):
            assert rung.shift.is_meta, "a non-persistent buffer is nobody's to load"
            rung.shift = source.shift.clone()
        if api is parity.OURS:
            assert model.again.weight is model.inlet.weight
        parity.assert_equal(whole(dict(model.state_dict()))[0], dict(plain.state_dict()), "loaded")
        optimizer = parity.adamw(model.parameters())
        return parallelisms.losses(model, optimizer, parallelism, parallelisms.ladder_batches(2))

    found = both(name, run)
    plain = parallelisms.ladder(seed=1, tied=True)
    expected = parallelisms.losses(
        plain,
        parity.adamw(plain.parameters()),
        parallelisms.PARALLELISMS["plain"],
        parallelisms.ladder_batches(2),
    )
    parity.assert_close(found, expected, parity.FP32, "unsharded")


# -- names that a module changes ------------------------------------------------------------------


class Renamed(nn.Module):
    """Saves its table's weight under its own name, as `_fqn_modifiers` says."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(4, 5, bias=False)
        self.register_state_dict_post_hook(self._after)
        self.register_load_state_dict_pre_hook(self._before)

    @staticmethod
    def _after(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}table.weight")

    @staticmethod
    def _before(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if f"{prefix}weight" in state:
            state[f"{prefix}table.weight"] = state.pop(f"{prefix}weight")

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "table"}

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


@workers.ranks(2)
@pytest.mark.parametrize("broadcast", [False, True])
def test_fqn_modifiers(broadcast: bool) -> None:
    def build(api: ModuleType, parallelism: parallelisms.Parallelism, value: float) -> nn.Module:
        model = nn.Sequential(Renamed(), nn.Linear(5, 3))
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.arange(param.numel()).view(param.shape) + value)
        api.fully_shard(model[0], mesh=parallelism.mesh())
        return api.fully_shard(model, mesh=parallelism.mesh())

    def run(api: ModuleType, parallelism: parallelisms.Parallelism) -> Any:
        source, model = build(api, parallelism, 1), build(api, parallelism, 2)
        state = dict(get_model_state_dict(source, options=StateDictOptions(full_state_dict=True)))
        assert set(state) == {"0.weight", "1.weight", "1.bias"}
        options = StateDictOptions(
            full_state_dict=True,
            broadcast_from_rank0=broadcast,
            dsd_fqn_modifiers="_fqn_modifiers",
        )
        given = on_rank_zero(dict(state)) if broadcast else dict(state)
        set_model_state_dict(model, given, options=options)
        loaded = whole(dict(model.state_dict()))
        parity.assert_equal(loaded[0], state, "loaded")
        return loaded

    both("flat2", run)
