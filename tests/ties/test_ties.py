"""Tied parameters across units, before and after sharding: one parameter, as without sharding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from fsdp2 import errors, fully_shard
from fsdp2.core.modules.registry import require_record
from tests.common import models, parity
from tests.common.backends import packs
from tests.common.combinations import each_once
from tests.common.errors import raises
from tests.common.workers import ranks


def build(vocab: int = 13, tied: bool = False) -> Any:
    return models.seeded(partial(models.Transformer, blocks=2, vocab=vocab, tied=tied))


def _shard(*modules: Any, **arguments: Any) -> None:
    for module in modules:
        fully_shard(module, **{"mesh": parity.world_mesh(), **arguments})


def _assign(model: Any) -> None:
    model.head.weight = model.embed.weight


def _register(model: Any) -> None:
    model.head.register_parameter("weight", model.embed.weight)


def _delete_and_assign(model: Any) -> None:
    del model.head.weight
    model.head.weight = model.embed.weight


def _assign_while_gathered(model: Any) -> None:
    for unit in (model, model.embed, model.head):
        if hasattr(unit, "unshard"):
            unit.unshard()
    model.head.weight = model.embed.weight


def _before(model: Any, *modules: Any, **arguments: Any) -> None:
    _assign(model)
    _shard(*modules, **arguments)


def _between(model: Any, *modules: Any, **arguments: Any) -> None:
    _shard(*modules[:-1], **arguments)
    _assign(model)
    _shard(modules[-1], **arguments)


def _after(model: Any, *modules: Any, **arguments: Any) -> None:
    _shard(*modules, **arguments)
    _assign(model)


UNITS: dict[str, Callable[[Any], list[Any]]] = {
    "root": lambda m: [*models.units(m), m],
    "pair": lambda m: [*models.units(m), [m.embed, m.head], m],
    "embedding": lambda m: [m.embed, *models.units(m), m],
    "head": lambda m: [*models.units(m), m.head, m],
    "both": lambda m: [m.embed, *models.units(m), m.head, m],
    "both, head first": lambda m: [m.head, *models.units(m), m.embed, m],
}


def check_one(model: Any) -> None:
    """Two names, one DTensor; of the parameters, one."""
    assert model.head.weight is model.embed.weight
    assert isinstance(model.embed.weight, DTensor)
    plain = build(tied=True)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]


# -- parity ---------------------------------------------------------------------------------------


@ranks(2, extended=(4,))
@each_once(
    which=list(UNITS),
    tie=[_before, _between, _after],
    vocab=[13, 3],  # uneven on 2 and 4 ranks; fewer rows than 4 ranks
    reshard_after_forward=[True, False],
)
def test_trained_as_without_sharding(
    which: str, tie: Any, vocab: int, reshard_after_forward: bool
) -> None:
    model = build(vocab)
    tie(model, *UNITS[which](model), reshard_after_forward=reshard_after_forward)
    batches = parity.language_batches(vocab, steps=3)
    sharded = parity.train_sharded(model, parity.adamw, parity.language_loss, batches)
    check_one(model)
    plain = parity.train_unsharded(
        build(vocab, tied=True), parity.adamw, parity.language_loss, batches
    )
    parity.assert_close(sharded, plain, parity.FP32, "unsharded")


@ranks(2)
@each_once(
    tie=[_assign, _register, _delete_and_assign, _assign_while_gathered],
    which=["root", "pair", "both"],
    when=["before the first forward", "after an iteration"],
)
def test_tied_after_sharding(tie: Any, which: str, when: str) -> None:
    """The parameter stays the object that it was; the other one's shard goes."""
    model, plain = build(), build()
    _shard(*UNITS[which](model))
    ids = torch.arange(6).view(2, 3)
    if when == "after an iteration":
        for each in (model, plain):
            each(ids).square().mean().backward()
            each.zero_grad()
    kept, gone = model.embed.weight, model.head.weight
    for each in (model, plain):
        (tie if each is model else _assign)(each)
    for each in (model, plain):
        each(ids).square().mean().backward()
        each.reshard() if each is model else None
    check_one(model)
    assert model.embed.weight is kept
    assert not any(p.sharded is gone for p in _managed(model))
    parity.assert_close(
        parity.full_grads(model), {n: p.grad for n, p in plain.named_parameters()}, parity.FP32
    )


def _managed(model: Any) -> list[Any]:
    groups = require_record(model).scheduler.groups  # type: ignore[union-attr]  # it has run
    return [param for group in groups for param in group.params]


@ranks(4)
@pytest.mark.parametrize("tie", [_before, _after])
def test_with_replicas_and_accumulation(tie: Any) -> None:
    """HSDP, mixed in one after the other: no sync, no all-reduce, both; hooks run once a step."""
    model, plain = build(), build(tied=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tie(model, *UNITS["both"](model), mesh=mesh)
    reduced: list[Any] = []
    model.embed.weight.register_post_accumulate_grad_hook(reduced.append)
    for step in range(3):
        model.set_requires_gradient_sync(step != 0)
        model.set_requires_all_reduce(step == 2)
        for each in (model, plain):
            each(torch.arange(step, step + 6).view(2, 3)).square().mean().backward()
    assert len(reduced) == 1
    parity.assert_close(
        parity.full_grads(model), {n: p.grad for n, p in plain.named_parameters()}, parity.FP32
    )


@packs
@ranks(2)
@pytest.mark.parametrize("tie", [_before, _after])
def test_gathered_where_it_is_used_and_reduced_once(tie: Any) -> None:
    """Units of their own free it between the two places."""
    model = build()
    tie(model, *UNITS["both"](model))
    ids = torch.zeros(2, 3, dtype=torch.int64)
    seen: list[bool] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append(isinstance(model.head.weight, DTensor)))
    for _ in range(2):
        with parity.CountCollectives() as counted:
            model(ids).sum().backward()
    assert seen == [True] * 4
    # Gathers: blocks, the root's norm, the tied weight twice in forward and twice in backward.
    assert counted.reduce_scatters == 2 + 1 + 1
    assert counted.all_gathers == 2 * 2 + 1 + 3 + 1


# -- other shapes of models -----------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self, embed: nn.Embedding | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, models.DIM) if embed is None else embed
        self.block = nn.Linear(models.DIM, models.DIM)

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        return torch.tanh(self.block(x if memory is None else x + memory.mean(1, keepdim=True)))


class EncoderDecoder(nn.Module):
    """One embedding for encoder, decoder and head: one module, or tied weights."""

    def __init__(self, one_module: bool) -> None:
        super().__init__()
        self.shared = nn.Embedding(7, models.DIM)
        self.encoder = Stack(self.shared if one_module else None)
        self.decoder = Stack(self.shared if one_module else None)
        self.head = nn.Linear(models.DIM, 7, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        for module in (self.encoder.embed, self.decoder.embed, self.head):
            module.weight = self.shared.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.decoder(ids, self.encoder(ids)))


def _compare(model: Any, plain: Any, steps: int = 3, loss: Any = None) -> None:
    loss = loss or (lambda each, ids: each(ids).square().mean())
    optimizers = [parity.adamw(each.parameters()) for each in (model, plain)]
    for step in range(steps):
        ids = torch.arange(step, step + 6).view(2, 3) % 7
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            loss(each, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    parity.assert_close(
        parity.full_params(model), dict(plain.named_parameters()), parity.FP32, "parameters"
    )


@ranks(2)
@each_once(one_module=[True, False], again=[True, False], blocks=[True, False])
def test_encoder_and_decoder(one_module: bool, again: bool, blocks: bool) -> None:
    """The encoder is a unit, the decoder too, and the head is the root's."""
    model, plain = (models.seeded(partial(EncoderDecoder, one_module)) for _ in range(2))
    if blocks:
        _shard(model.encoder.block, model.decoder.block)
    _shard(model.encoder, model.decoder, model)
    if again:
        model.tie_weights()
    _compare(model, plain)
    assert model.shared.weight is model.encoder.embed.weight is model.head.weight
    with torch.no_grad():  # a part on its own, as in generation
        ids = torch.zeros(1, 2, dtype=torch.int64)
        parity.assert_close(model.encoder(ids), plain.encoder(ids), parity.FP32)


@ranks(2)
@pytest.mark.parametrize("first", ["encoder", "root"])
def test_a_part_that_runs_first(first: str) -> None:
    """One scheduler serves all units that a tie joins, whichever runs first."""
    model, plain = (models.seeded(partial(EncoderDecoder, False)) for _ in range(2))
    _shard(model.encoder, model.decoder, model)
    for each in (model, plain):
        (each.encoder if first == "encoder" else each)(torch.arange(4).view(2, 2)).sum().backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    parity.assert_close(parity.full_grads(model), expected, parity.FP32)
    for each in (model, plain):
        each.zero_grad()
    _compare(model, plain)


class Parts(nn.Module):
    """Two units, and nothing around them that is one."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = (
            nn.Sequential(nn.Linear(models.DIM, models.DIM), nn.Tanh()) for _ in range(2)
        )
        self.high[0].weight = self.low[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.low(x))


@ranks(2)
@each_once(order=[("low", "high"), ("high", "low")], inner=[True, False])
def test_without_a_root(order: tuple[str, str], inner: bool) -> None:
    """Both are roots; a loss may use one of them, or both."""
    model, plain = models.seeded(Parts), models.seeded(Parts)
    for name in order:
        part: Any = getattr(model, name)
        _shard(*((part[0], part) if inner else (part,)))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    x = torch.randn(2, models.DIM)
    for use in ("high", None, "low", None):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            (each if use is None else getattr(each, use))(x).square().sum().backward()
            optimizer.step()
            for part in (each.low, each.high):
                part.zero_grad()
    parity.assert_close(
        parity.full_params(model), dict(plain.named_parameters()), parity.FP32, "parameters"
    )


@ranks(2)
@pytest.mark.parametrize("when", ["before the first forward", "after an iteration"])
def test_the_owner_is_deleted(when: str) -> None:
    """A unit that used its group owns it then."""
    model, plain = build(), build(tied=True)
    _before(model, *UNITS["both"](model))
    ids, x = torch.arange(6).view(2, 3), torch.randn(2, models.DIM)
    if when == "after an iteration":
        for each in (model, plain):
            each(ids).square().mean().backward()
            each.zero_grad()
    for each in (model, plain):
        each.embed = nn.Identity()
    for each in (model, plain):
        each(x[None]).square().mean().backward()
    parity.assert_close(
        parity.full_grads(model), {n: p.grad for n, p in plain.named_parameters()}, parity.FP32
    )


@ranks(2)
def test_an_added_alias_and_new_parameters() -> None:
    """`shard_new_parameters` takes a tied one, too; an alias of a managed one needs no call."""
    model: Any = models.seeded(
        lambda: nn.Sequential(nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM))
    )
    _shard(*model, model)
    model.extra = model[0].weight
    model.shard_new_parameters()
    model.other = model[1].weight
    x = torch.ones(2, models.DIM)
    model.register_forward_hook(lambda m, _, y: y @ m.extra + y @ m.other)
    model(x).sum().backward()
    plain: Any = models.seeded(
        lambda: nn.Sequential(nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM))
    )
    plain.register_forward_hook(lambda m, _, y: y @ m[0].weight + y @ m[1].weight)
    plain(x).sum().backward()
    assert sorted(model.state_dict()) == sorted([*plain.state_dict(), "extra", "other"])
    expected = {n: p.grad for n, p in plain.named_parameters()}
    found = parity.full_grads(model)
    found.update({"0.weight": found.pop("extra"), "1.weight": found.pop("other")})
    parity.assert_close(dict(sorted(found.items())), dict(sorted(expected.items())), parity.FP32)


@ranks(2)
@pytest.mark.parametrize("when", ["before to_empty", "after"])
def test_from_the_meta_device(when: str) -> None:
    source = build(tied=True)
    with torch.device("meta"):
        model: Any = models.Transformer(blocks=2, vocab=13)
    _shard(*UNITS["both"](model))
    if when != "after":
        _assign(model)
    model.to_empty(device="cpu")
    if when == "after":
        _assign(model)
    for block in model.blocks:
        block.scale.fill_((models.DIM // 2) ** -0.5)
    with torch.no_grad():
        for (_, param), (_, values) in zip(
            model.named_parameters(), source.named_parameters(), strict=True
        ):
            mesh, placements = param.device_mesh, param.placements
            param.copy_(distribute_tensor(values, mesh, placements))
    batches = parity.language_batches(13, steps=3)
    sharded = parity.train_sharded(model, parity.adamw, parity.language_loss, batches)
    check_one(model)
    parity.assert_close(
        sharded,
        parity.train_unsharded(source, parity.adamw, parity.language_loss, batches),
        parity.FP32,
    )


@ranks(2)
@each_once(
    which=["both", "both, head first", "root"],
    when=["before the first forward", "after an iteration", "by a state dict"],
)
def test_a_loader_replaces_both_and_ties_them(which: str, when: str) -> None:
    """As transformers does it: the optimizer trains the one tensor that the entries hold."""
    source, model = build(tied=True), build()
    _shard(*UNITS[which](model))
    ids = torch.arange(6).view(2, 3)
    if when == "after an iteration":
        model(ids).square().mean().backward()
        model.zero_grad()
    before = model.embed.weight, model.head.weight
    loaded = {
        name: nn.Parameter(
            distribute_tensor(
                source.get_parameter(name).detach(), param.device_mesh, param.placements
            )
        )
        for name, param in model.named_parameters()
        if name != "head.weight"
    }
    loaded["head.weight"] = loaded["embed.weight"]
    if when == "by a state dict":
        model.load_state_dict({**model.state_dict(), **loaded}, assign=True)
    else:
        for name, param in loaded.items():
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, param)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plain = torch.optim.AdamW(source.parameters(), lr=0.1)
    for _ in range(2):
        _step(model, optimizer)
        _step(source, plain)
    check_one(model)
    parity.assert_close(parity.full_params(model), dict(source.named_parameters()), parity.FP32)
    for stale, name in zip(before, ["embed.weight", "head.weight"], strict=True):
        with pytest.raises(errors.ShardingStateError, match=rf"holds parameter '{name}'"):
            torch.optim.SGD([stale], lr=0.1).step()


@ranks(2)
@each_once(tie=[_before, _after], which=["root", "both"], assign=[True, False])
def test_state_dicts(tie: Any, which: str, assign: bool) -> None:
    """Both names hold one tensor; loading keeps them one, by either name's values."""
    model = build()
    tie(model, *UNITS[which](model))
    ids = torch.arange(6).view(2, 3)
    before = model(ids).detach()
    state = model.state_dict()
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    copy = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        model.embed.weight.zero_()
    model.load_state_dict(copy, assign=assign)
    parity.assert_close(model(ids).detach(), before, parity.FP32)
    model.reshard()
    check_one(model)
    model.head.load_state_dict({"weight": copy["embed.weight"]}, assign=assign)
    parity.assert_close(model(ids).detach(), before, parity.FP32)
    model.reshard()
    check_one(model)


# -- optimizers -----------------------------------------------------------------------------------


@ranks(2)
@each_once(which=["root", "both"], made=["before sharding", "before tying"])
def test_an_optimizer_that_holds_the_other_one(which: str, made: str) -> None:
    """It raises; pointed to what there is, it trains the parameter once, with its own state."""
    model, plain = build(), build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _shard(*UNITS[which](model))
    if made == "before tying":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        _step(model, optimizer)
        other = torch.optim.AdamW(plain.parameters(), lr=0.1)
        _step(plain, other)
    else:
        other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for each in (model, plain):
        _assign(each)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    if made == "before tying":
        with raises("optimizer-holds-tied"):
            optimizer.step()
    else:
        with raises("stale-optimizer"):
            optimizer.step()
    model.zero_grad()
    fsdp2.optim.repoint_optimizer(optimizer)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert held == list(model.parameters())
    for _ in range(2):
        _step(model, optimizer)
        _step(plain, other)
    parity.assert_close(parity.full_params(model), dict(plain.named_parameters()), parity.FP32)


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(6).view(2, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- what is refused ------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("tie", [_before, _after])
def test_units_that_compute_in_other_dtypes(tie: Any) -> None:
    model = build()
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16)
    with parity.CountCollectives() as counted, raises("tied-dtypes"):
        if tie is _before:
            _assign(model)
        _shard(model.head, mp_policy=policy)
        tie(model, *models.units(model), model)
        model(torch.zeros(1, 2, dtype=torch.int64))
    assert counted.total == 0


@ranks(2)
def test_tied_between_a_forward_and_its_backward() -> None:
    """The earlier forward's gradients would be lost in silence."""
    model = build()
    _shard(*UNITS["both"](model))
    ids = torch.zeros(1, 2, dtype=torch.int64)
    early = model.embed(ids)
    _assign(model)
    late = model(ids)
    with raises("tied-late"):
        (early.sum() + late.sum()).backward()
    model(ids).sum().backward()
