"""Whole tensors out of a model, one unit after another, and from rank 0 into one.

Also models that are sharded while they are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import full_parameters, gathered, load_from_rank0
from fsdp2.full import sync_module_states
from fsdp2.testing.counting import collectives
from fsdp2.wrap import deferred
from tests.common import meshes, models, parity
from tests.common.errors import raises
from tests.common.tensors import Quantized
from tests.common.workers import ranks


class Buffered(nn.Module):
    """Tied parameters, buffers of both kinds, and a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.Transformer(blocks=2, tied=True)
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.normal_()
        self.register_buffer("table", torch.randn(5), persistent=False)
        self.also = nn.Module()
        self.also.register_buffer("table", self.table, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids)


def build(seed: int = 0) -> Any:
    return models.seeded(Buffered, seed)


def on_meta() -> Any:
    with torch.device("meta"):
        return Buffered()


def whole_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of an unsharded model."""
    return {
        name: tensor.detach().clone()
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    }


def check(model: nn.Module, expected: dict[str, Tensor], where: str) -> None:
    found = parity.full_params(model)
    found |= dict(model.named_buffers())  # type: ignore[arg-type]
    parity.assert_equal(found, {name: expected[name] for name in found}, where)


def _is_first() -> bool:
    return dist.get_rank() == 0


def _parallel(model: Any) -> Any:
    plan = {"inner.blocks.0.up": ColwiseParallel(), "inner.blocks.0.down": RowwiseParallel()}
    return parallelize_module(model, meshes.mesh("shard", "tp", shape=(2, 2))["tp"], plan)


def _ways() -> dict[str, Callable[[Any], Any]]:
    """How to shard a model on this many ranks."""
    if dist.get_world_size() < 4:
        placed = fsdp2.whole_below(100)
        return {
            "flat": partial(parity.shard, parity.OURS),
            "whole": partial(parity.shard, parity.OURS, shard_placement_fn=placed),
        }
    tp = meshes.mesh("shard", "tp", shape=(2, 2))
    return {
        "hsdp": partial(parity.shard, parity.OURS, mesh=meshes.hsdp_mesh(2, 2)),
        "tp": lambda model: parity.shard(parity.OURS, _parallel(model), mesh=tp["shard"]),
    }


def _in_order(found: Iterable[tuple[str, Tensor]], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was found, each name once, in the order of ``like``."""
    found = list(found)
    assert len({name for name, _ in found}) == len(found)
    assert {name for name, _ in found} == like.keys()
    by_name = dict(found)
    return {name: by_name[name] for name in like}


# -- out ------------------------------------------------------------------------------------------


@ranks(1, 2, 4)
def test_streamed() -> None:
    """Each once, by its first name, whole; with rank0_only on the first rank alone."""
    for way, sharded in _ways().items():
        model, plain = sharded(build()), build()
        named = {name: param.detach() for name, param in plain.named_parameters()}
        parity.assert_equal(_in_order(full_parameters(model), named), named, way)
        buffers = dict(plain.named_buffers())
        del buffers["table"]
        found = full_parameters(model, with_buffers=True, dtype=torch.bfloat16)
        cast = {n: t.bfloat16() if t.is_floating_point() else t for n, t in named.items()}
        cast |= {n: t.bfloat16() if t.is_floating_point() else t for n, t in buffers.items()}
        parity.assert_equal(_in_order(found, cast), cast, "cast")
        given = dict(full_parameters(model, rank0_only=True, offload_to_cpu=True))
        if _is_first():
            parity.assert_equal(_in_order(given.items(), named), named, "on the first rank")
        elif way != "tp":  # there each of two ranks is the first that has what is not parallel
            assert given == {}
        next(iter(full_parameters(model)))[1].zero_()
        check(model, whole_of(plain), "copies")


@ranks(1, 2, 4)
@pytest.mark.parametrize(
    ("pack_below", "pack"),
    [(0, 0), (512, 1024), (1 << 20, 1 << 20)],
    ids=["none is packed", "several packs", "one pack"],
)
def test_gathered_together(pack_below: int, pack: int) -> None:
    """Packed or not, the values are the same, and each tensor has its own memory."""
    sizes = {"PACK_BELOW": pack_below, "PACK": pack}
    with mock.patch.multiple("fsdp2.full.unsharding", **sizes):
        for way, sharded in _ways().items():
            model, plain = sharded(build()), build()
            named = {name: param.detach() for name, param in plain.named_parameters()}
            found = _in_order(full_parameters(model), named)
            parity.assert_equal(found, named, way)
            assert len({x.untyped_storage().data_ptr() for x in found.values()}) == len(found)
            given = dict(full_parameters(model, rank0_only=True))
            if _is_first():
                parity.assert_equal(_in_order(given.items(), named), named, "on the first rank")
            with gathered(model):
                parity.assert_equal(dict(model.named_parameters()), named, "gathered")


@ranks(2)
def test_small_parameters_of_a_unit_travel_together() -> None:
    """Weights and biases of three units, and in `gathered` of all of them.

    Ranks also exchange a few numbers: at the start, before each unit, and at the end.
    """
    model = parity.shard(parity.OURS, models.OddMLP((8, 5, 8)))

    def stream(rank0_only: bool) -> None:
        dict(full_parameters(model, rank0_only=rank0_only))

    def hold() -> None:
        with gathered(model, writeback=False):
            pass

    assert collectives(partial(stream, False)) == {"all_gather": 3, "all_reduce": 5}
    assert collectives(partial(stream, True)) == {"gather": 3, "all_reduce": 5}
    assert collectives(hold) == {"all_gather": 1, "all_reduce": 1}


@ranks(2)
def test_streams_that_stop() -> None:
    model, plain = parity.shard(parity.OURS, build()), whole_of(build())
    for stop in ({0}, {1}, {0, 1}):
        mine = dist.get_rank() in stop
        with contextlib.nullcontext() if mine else raises("stream-left"):
            for number, _ in enumerate(full_parameters(model)):
                if mine and number == 3:
                    break
        check(model, plain, "unchanged")
    with raises("stream-ranks-differ"):
        full_parameters(model, with_buffers=_is_first())
    with raises("stream-dtype"):
        full_parameters(model, dtype="bf16")  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises("stream-stepped"):
        for _ in full_parameters(model):
            optimizer.step()
    with gathered(model), raises("inside-gathered"):
        full_parameters(model)


# -- in -------------------------------------------------------------------------------------------


@ranks(1, 2, 4)
def test_loaded_from_rank_0() -> None:
    """Into models of other weights, and of none; buffers, tied and tensor-parallel ones too."""
    expected = build(1)
    for sharded in _ways().values():
        weights = whole_of(expected) if _is_first() else None
        for model in (sharded(build(dist.get_rank())), sharded(on_meta())):
            found = load_from_rank0(model, weights)
            assert found == ([], [])
            check(model, whole_of(expected), "loaded")
            assert model.inner.head.weight is model.inner.embed.weight
            assert model.also.table is model.table or dist.get_world_size() > 0
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            if dist.get_world_size() < 4:
                plain = build(1)
                ids = parity.language_batches(13)[0]
                for trained, part in ((plain, ids), (model, parity.my_part(ids))):
                    parity.language_loss(trained, part).backward()
                optimizer.step()
                torch.optim.SGD(plain.parameters(), lr=0.5).step()
                found_params, wanted = parity.full_params(model), dict(plain.named_parameters())
                for name in wanted:
                    torch.testing.assert_close(found_params[name], wanted[name].detach())
    _loaded_in_part()


def _loaded_in_part() -> None:
    """A state dict with one of two tied names, one name missing and one too many."""
    model = next(iter(_ways().values()))(build())
    expected, plain = whole_of(build(1)), whole_of(build())
    weights = {name: value.double() for name, value in expected.items() if "embed" not in name}
    weights = {n: v if n != "norm.num_batches_tracked" else expected[n] for n, v in weights.items()}
    del weights["norm.weight"]
    found = load_from_rank0(model, {**weights, "other": torch.ones(1)}, strict=False)
    assert found == (["norm.weight"], ["other"])
    expected["norm.weight"] = plain["norm.weight"]
    check(model, expected, "in part")


@ranks(2)
def test_loading_that_is_refused() -> None:
    """By all ranks alike, and nothing is written."""
    model, plain = parity.shard(parity.OURS, build()), whole_of(build())
    other = whole_of(build(1))
    wrong: list[Any] = [
        None,
        {n: v for n, v in other.items() if n != "norm.weight"},
        {**other, "more": torch.ones(1)},
        {**other, "norm.weight": torch.ones(4)},
        {**other, "norm.weight": torch.ones(3, dtype=torch.int64)},
        {**other, "norm.weight": torch.ones(3, device="meta")},
        {**other, "norm.weight": model.norm.weight},
        {**other, "inner.head.weight": torch.ones(13, models.DIM)},
    ]
    for weights in wrong:
        with raises("load-refused"):
            load_from_rank0(model, weights if _is_first() else None)
        check(model, plain, "unchanged")
    with raises("load-refused"):  # a buffer that nobody knows
        model_on_meta = parity.shard(parity.OURS, on_meta())
        found = {n: v for n, v in other.items() if "table" not in n}
        load_from_rank0(model_on_meta, found if _is_first() else None)
    with raises("load-unsharded"):
        load_from_rank0(build(), other)
    with raises("models-differ"):
        sync_module_states(nn.Linear(2, 3) if _is_first() else nn.Linear(3, 2))
    with raises("sync-meta"):
        sync_module_states(on_meta())
    check(model, plain, "unchanged")


@ranks(2, 4)
def test_synced() -> None:
    """Before `fully_shard` all is rank 0's, on meta elsewhere; later what ranks have copies of."""
    for other in (build(dist.get_rank()), build() if _is_first() else on_meta()):
        sync_module_states(other)
        found = {n: t.detach() for n, t in other.named_parameters()} | dict(other.named_buffers())
        expected = whole_of(build())
        parity.assert_equal(found, {n: expected[n] for n in found}, "before")
        assert other.inner.head.weight is other.inner.embed.weight
    if dist.get_world_size() == 4:
        model = parity.shard(parity.OURS, build(dist.get_rank() // 2), mesh=meshes.hsdp_mesh(2, 2))
        sync_module_states(model)
        check(model, whole_of(build()), "replicas")


# -- deferred -------------------------------------------------------------------------------------


class Initialised(models.Transformer):
    """As many models: the root's constructor initialises all that is below."""

    def __init__(self, how: str = "apply", **arguments: Any) -> None:
        super().__init__(**arguments)
        if how == "apply":
            self.apply(self._init)
        elif how == "parameters":
            for param in self.parameters():
                nn.init.normal_(param)
        elif how == "methods":
            for module in self.modules():
                self._init_weights(module)
        elif how != "":
            self.apply(partial(self._init_below, how))
        self.final = nn.Parameter(torch.randn(3))

    def _init_weights(self, module: nn.Module) -> None:
        self._init(module)

    @staticmethod
    def _init_below(kind: str, module: nn.Module) -> None:
        """Of a parent, or a grandparent, with what is below it."""
        if type(module).__name__.endswith(kind):
            for param in module.parameters():
                nn.init.normal_(param)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _by_predicate(module: nn.Module) -> bool:
    return isinstance(module, models.Block | nn.Embedding)


@ranks(1, 2)
def test_deferred() -> None:
    """The weights and the random state are those of a model that is made whole."""
    policies: list[Any] = [
        {models.Block},
        _by_predicate,
        ModuleWrapPolicy({models.Block}),
        partial(size_based_auto_wrap_policy, min_num_params=100),
        models.Block,
    ]
    for policy in policies:
        for model_class in (models.Transformer, Initialised, partial(Initialised, "methods")):
            torch.manual_seed(3)
            plain = model_class(blocks=3, tied=True)
            state = torch.get_rng_state()
            torch.manual_seed(3)
            with deferred(parity.world_mesh(), policy, reshard_after_forward=True):
                model = model_class(blocks=3, tied=True)
            assert torch.equal(torch.get_rng_state(), state)
            parity.assert_equal(
                parity.full_params(model), {n: p.detach() for n, p in plain.named_parameters()}
            )
            assert isinstance(model, fsdp2.FSDPModule)
            assert isinstance(model.blocks[1], fsdp2.FSDPModule)
        parity.language_loss(model, parity.my_part(parity.language_batches(13)[0])).backward()
    assert "__init_subclass__" not in vars(nn.Module)
    assert not hasattr(models.Block.__init__, "__wrapped__")
    assert not isinstance(models.Block(), fsdp2.FSDPModule)


@ranks(2)
def test_deferred_on_meta() -> None:
    """`init_fn` gives each module of a block its values; without it that is refused."""

    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, param.numel() / 7)
        for buffer in module.buffers(recurse=False):
            buffer.fill_(0.5)

    with deferred(parity.world_mesh(), {models.Block}, init), torch.device("meta"):
        model = models.Transformer()
    for name, value in parity.full_params(model).items():
        parity.assert_equal(value, torch.full_like(value, value.numel() / 7), name)
    with (
        raises("deferred-meta"),
        deferred(parity.world_mesh(), {models.Block}),
        torch.device("meta"),
    ):
        models.Transformer()
    with raises("wrap-policy"), deferred(parity.world_mesh(), 3):  # type: ignore[arg-type]
        pass
    for how in ("parameters", "ModuleList", "Initialised"):
        with raises("deferred-written"), deferred(parity.world_mesh(), {models.Block}):
            Initialised(how)
    with deferred(parity.world_mesh(), {models.Block}):
        Initialised("Block")
    with pytest.raises(KeyError), deferred(parity.world_mesh(), {models.Block}):
        raise KeyError
    assert not hasattr(models.Block.__init__, "__wrapped__")


@ranks(2)
def test_subclasses_are_streamed_and_loaded() -> None:
    """What travels are the tensors that they wrap."""

    def made(seed: int) -> Any:
        model = models.seeded(partial(models.OddMLP, (8, 5)), seed)
        for layer in model.layers:
            layer.weight = nn.Parameter(Quantized.of(layer.weight.detach()), False)
        return model

    model = parity.shard(parity.OURS, made(0))
    load_from_rank0(model, dict(made(1).named_parameters()) if _is_first() else None)
    wanted = made(1)
    found = dict(full_parameters(model))
    for name, tensor in wanted.named_parameters():
        tensor = tensor.detach()
        if isinstance(tensor, Quantized):
            parity.assert_equal(found[name]._codes, tensor._codes, name)
            parity.assert_equal(found[name]._scales, tensor._scales, name)
        else:
            parity.assert_equal(found[name], tensor, name)
    assert all(isinstance(param, DTensor) for param in model.parameters())
