"""Tied parameters, in one unit and across units: one parameter, as without sharding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from fsdp2 import errors
from tests.common import models, parity
from tests.common.backends import packs
from tests.common.cases import in_turn
from tests.common.combinations import each_once
from tests.common.errors import raises
from tests.common.workers import ranks
from tests.ties import stories
from tests.ties.stories import IDS, Shard, as_without_sharding, train


def build(vocab: int = 13, tied: bool = False) -> Any:
    return models.seeded(partial(models.Transformer, blocks=2, vocab=vocab, tied=tied))


def _assign(model: Any) -> None:
    model.head.weight = model.embed.weight


def _before(shard: Shard, model: Any, *modules: Any, **arguments: Any) -> None:
    _assign(model)
    shard(*modules, **arguments)


def _between(shard: Shard, model: Any, *modules: Any, **arguments: Any) -> None:
    shard(*modules[:-1], **arguments)
    _assign(model)
    shard(modules[-1], **arguments)


def _after(shard: Shard, model: Any, *modules: Any, **arguments: Any) -> None:
    shard(*modules, **arguments)
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
    assert stories.names(model) == stories.names(plain)
    assert stories.managed(model) == len(list(plain.parameters()))


# -- parity ---------------------------------------------------------------------------------------


@ranks(2, extended=(4,))
@each_once(
    which=list(UNITS),
    tie=[_before, _between, _after],
    vocab=[13, 3, 16],  # uneven on 2 and 4 ranks; fewer rows than 4 ranks; even
    reshard_after_forward=[True, False],
)
def test_trained_as_without_sharding(
    which: str, tie: Any, vocab: int, reshard_after_forward: bool
) -> None:
    model = build(vocab)
    tie(stories.shard, model, *UNITS[which](model), reshard_after_forward=reshard_after_forward)
    batches = parity.language_batches(vocab, steps=3)
    sharded = parity.train_sharded(model, parity.adamw, parity.language_loss, batches)
    check_one(model)
    plain = parity.train_unsharded(
        build(vocab, tied=True), parity.adamw, parity.language_loss, batches
    )
    parity.assert_close(sharded, plain, parity.FP32, "unsharded")


@ranks(4)
@pytest.mark.parametrize("tie", [_before, _after])
def test_with_replicas_and_accumulation(tie: Any) -> None:
    """HSDP, mixed in one after the other: no sync, no all-reduce, both; hooks run once a step."""
    model, plain = build(), build(tied=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tie(stories.shard, model, *UNITS["both"](model), mesh=mesh)
    reduced: list[Any] = []
    model.embed.weight.register_post_accumulate_grad_hook(reduced.append)
    for step in range(3):
        model.set_requires_gradient_sync(step != 0)
        model.set_requires_all_reduce(step == 2)
        for each in (model, plain):
            each(IDS + step).square().mean().backward()
    assert len(reduced) == 1
    parity.assert_close(parity.full_grads(model), parity.full_grads(plain), parity.FP32)


@packs
@ranks(2)
@pytest.mark.parametrize("tie", [_before, _after])
def test_gathered_where_it_is_used_and_reduced_once(tie: Any) -> None:
    """Units of their own free it between the two places."""
    model = build()
    tie(stories.shard, model, *UNITS["both"](model))
    seen: list[bool] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append(isinstance(model.head.weight, DTensor)))
    for _ in range(2):
        with parity.CountCollectives() as counted:
            model(IDS).sum().backward()
    assert seen == [True] * 4
    # Gathers: blocks, the root's norm, the tied weight twice in forward and twice in backward.
    assert counted.reduce_scatters == 2 + 1 + 1
    assert counted.all_gathers == 2 * 2 + 1 + 3 + 1


# -- tied later -----------------------------------------------------------------------------------


def _register(model: Any) -> None:
    model.head.register_parameter("weight", model.embed.weight)


def _delete_and_assign(model: Any) -> None:
    del model.head.weight
    _assign(model)


def _assign_while_gathered(model: Any) -> None:
    for unit in (model, model.embed, model.head):
        if hasattr(unit, "unshard"):
            unit.unshard()
    _assign(model)


@ranks(2)
@each_once(
    tie=[_assign, _register, _delete_and_assign, _assign_while_gathered],
    which=["root", "pair", "both"],
    trained=[False, True],
)
def test_tied_after_sharding(tie: Any, which: str, trained: bool) -> None:
    """The parameter stays the object that it was; the other one's shard goes."""

    def story(model: Any, shard: Shard) -> bool:
        shard(*UNITS[which](model))
        if trained:
            train(model, IDS)
        kept = model.embed.weight
        tie(model)
        model.zero_grad()
        model(IDS).square().mean().backward()
        stories.reshard(model)
        return model.embed.weight is kept

    check_one(as_without_sharding(build, story))


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

    def __init__(self, one_module: bool = False) -> None:
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


class Chain(nn.Sequential):
    """Linears with one weight, with a tanh after each; the last one deeper than the others."""

    def __init__(self, length: int) -> None:
        parts = [nn.Sequential(nn.Linear(models.DIM, models.DIM), nn.Tanh()) for _ in range(length)]
        for part in parts[1:]:
            part[0].weight = parts[0][0].weight
        parts[-1] = nn.Sequential(parts[-1])
        super().__init__(*parts)


X = torch.linspace(-1, 1, 2 * models.DIM).view(2, models.DIM)


def _encoder_and_decoder(model: Any, shard: Shard, again: bool, blocks: bool) -> Any:
    """The encoder is a unit, the decoder too, and the head is the root's."""
    if blocks:
        shard(model.encoder.block, model.decoder.block)
    shard(model.encoder, model.decoder, model)
    if again:
        model.tie_weights()
    trained = train(model, IDS, IDS + 1, IDS)
    with torch.no_grad():  # a part on its own, as in generation
        return trained, model.encoder(IDS)


def _a_part_runs_first(model: Any, shard: Shard) -> Any:
    """One scheduler serves all units that a tie joins, whichever runs first."""
    shard(model.encoder, model.decoder, model)
    return train(model.encoder, IDS), train(model, IDS, IDS + 1)


def _without_a_root(model: Any, shard: Shard, backward: bool, inner: bool) -> None:
    """Both are roots; a loss may use one of them, or both."""
    for part in reversed(model) if backward else model:
        shard(*((part[0], part) if inner else (part,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for use in (model[1], model, model[0], model):
        model.zero_grad()
        for part in model:
            part.zero_grad()
        use(X).square().sum().backward()
        optimizer.step()


def _the_owner_is_deleted(model: Any, shard: Shard, trained: bool) -> Any:
    """A unit that used its group owns it then."""
    _before(shard, model, *UNITS["both"](model))
    if trained:
        train(model, IDS)
    model.embed = nn.Identity()
    return train(model, X[None])


def _in_one_unit(model: Any, shard: Shard) -> Any:
    shard(model, reshard_after_forward=True)
    return train(model, X)


def _added(model: Any, shard: Shard) -> Any:
    """`shard_new_parameters` takes a tied one, too; an alias of a managed one needs no call."""
    shard(*model, model)
    model.extra = model[0][0].weight
    getattr(model, "shard_new_parameters", stories.not_at_all)()
    model.other = model[1][0][0].weight
    model.register_forward_hook(lambda m, _, y: y @ m.extra + y @ m.other)
    return train(model, X)


TWICE = (False, True)
OTHERS: dict[str, tuple[Callable[[], Any], stories.Story]] = {
    "a part runs first": (EncoderDecoder, _a_part_runs_first),
    "three times, across depths": (partial(Chain, 3), _in_one_unit),
    "aliases": (partial(Chain, 2), _added),
}
for one, two, three in product(TWICE, TWICE, TWICE):
    name = f"encoder and decoder, one module: {one}, tied again: {two}, blocks: {three}"
    told = partial(_encoder_and_decoder, again=two, blocks=three)
    OTHERS[name] = (partial(EncoderDecoder, one), told)
for one, two in product(TWICE, TWICE):
    told = partial(_without_a_root, backward=one, inner=two)
    OTHERS[f"no root, backward: {one}, units inside: {two}"] = (partial(Chain, 2), told)
for one in TWICE:
    OTHERS[f"owner deleted, trained: {one}"] = (build, partial(_the_owner_is_deleted, trained=one))


@ranks(2)
def test_other_shapes_of_models() -> None:
    in_turn(OTHERS, lambda case: as_without_sharding(*case))


# -- loaded ---------------------------------------------------------------------------------------


def _like(param: Tensor, name: str) -> Tensor:
    """The values of a tied model, sharded as the parameter is."""
    values = build(tied=True).get_parameter(name).detach()
    if not isinstance(param, DTensor):
        return values
    return distribute_tensor(values, param.device_mesh, param.placements)


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return models.Transformer(blocks=2, vocab=13)


@ranks(2)
@pytest.mark.parametrize("early", [True, False], ids=["before to_empty", "after"])
def test_from_the_meta_device(early: bool) -> None:
    def story(model: Any, shard: Shard) -> Any:
        shard(*UNITS["both"](model))
        if early:
            _assign(model)
        model.to_empty(device="cpu")
        if not early or shard is stories.not_at_all:  # where torch has untied them
            _assign(model)
        for block in model.blocks:
            block.scale.fill_((models.DIM // 2) ** -0.5)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(_like(param, name))
        return train(model, IDS, IDS + 1)

    check_one(as_without_sharding(_on_meta, story))


@ranks(2)
@each_once(
    which=["both", "both, head first", "root"],
    when=["before the first forward", "after an iteration", "by a state dict"],
)
def test_a_loader_replaces_both_and_ties_them(which: str, when: str) -> None:
    """As transformers does it: the optimizer trains the one tensor that the entries hold."""
    before: list[nn.Parameter] = []

    def story(model: Any, shard: Shard) -> Any:
        shard(*UNITS[which](model))
        if when == "after an iteration":
            train(model, IDS)
        before[:] = model.embed.weight, model.head.weight
        held = dict(model.named_parameters())
        loaded = {n: nn.Parameter(_like(param, n)) for n, param in held.items()}
        loaded["head.weight"] = loaded["embed.weight"]
        if when == "by a state dict":
            model.load_state_dict({**model.state_dict(), **loaded}, assign=True)
        else:
            for name, param in loaded.items():
                owner, _, key = name.rpartition(".")
                setattr(model.get_submodule(owner), key, param)
        return train(model, IDS, IDS + 1)

    model = as_without_sharding(build, story)
    check_one(model)
    for stale, name in zip(before, ["embed.weight", "head.weight"], strict=True):
        with pytest.raises(errors.ShardingStateError, match=rf"holds parameter '{name}'"):
            torch.optim.SGD([stale], lr=0.1).step()


@ranks(2)
@each_once(tie=[_before, _after], which=["root", "both", "pair"], assign=[True, False])
def test_one_parameter_whatever_is_done(tie: Any, which: str, assign: bool) -> None:
    """Sharded, gathered, loaded by either name, after `.to()`: one object, of one tensor."""
    model = build()
    tie(stories.shard, model, *UNITS[which](model))
    inside: list[bool] = []
    model.norm.register_forward_hook(
        lambda *_: inside.append(model.embed.weight is model.head.weight)
    )
    before = model(IDS).detach()
    state = model.state_dict()
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    copy = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        model.embed.weight.zero_()
    for change in (
        lambda: model.load_state_dict(copy, assign=assign),
        lambda: model.head.load_state_dict({"weight": copy["embed.weight"]}, assign=assign),
        lambda: model.to(torch.float64).to(torch.float32),
    ):
        change()
        output = model(IDS)
        parity.assert_close(output.detach(), before, parity.FP32)
        output.sum().backward()
        stories.reshard(model)
        check_one(model)
        assert isinstance(model.embed.weight.grad, DTensor)
        model.zero_grad()
    assert inside == [True] * 4


# -- optimizers -----------------------------------------------------------------------------------


@ranks(2)
@each_once(which=["root", "both"], late=[False, True])
def test_an_optimizer_that_holds_the_other_one(which: str, late: bool) -> None:
    """It raises; pointed to what there is, it trains the parameter once, with its own state."""

    def story(model: Any, shard: Shard) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        shard(*UNITS[which](model))
        if late:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            train(model, IDS, optimizer=optimizer)
        _assign(model)
        if isinstance(model, fsdp2.FSDPModule):
            model(IDS).sum().backward()
            with raises("optimizer-holds-tied" if late else "stale-optimizer"):
                optimizer.step()
            fsdp2.optim.repoint_optimizer(optimizer)
            held = [param for group in optimizer.param_groups for param in group["params"]]
            assert held == list(model.parameters())
        return train(model, IDS, IDS, optimizer=optimizer)

    as_without_sharding(build, story)


# -- what is refused ------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("tie", [_before, _after])
def test_units_that_compute_in_other_dtypes(tie: Any) -> None:
    model = build()
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16)
    with parity.CountCollectives() as counted, raises("tied-dtypes"):
        if tie is _before:
            _assign(model)
        stories.shard(model.head, mp_policy=policy)
        tie(stories.shard, model, *models.units(model), model)
        model(IDS)
    assert counted.total == 0


@ranks(2)
def test_tied_between_a_forward_and_its_backward() -> None:
    """The earlier forward's gradients would be lost in silence."""
    model = build()
    stories.shard(*UNITS["both"](model))
    early = model.embed(IDS)
    _assign(model)
    late = model(IDS)
    with raises("tied-late"):
        (early.sum() + late.sum()).backward()
    model(IDS).sum().backward()


def _one_storage(first: nn.Linear, second: nn.Linear) -> None:
    second.weight.data = first.weight.data


def _same_memory(first: nn.Linear, second: nn.Linear) -> None:
    second.weight = nn.Parameter(first.weight)


def _overlap(first: nn.Linear, second: nn.Linear) -> None:
    rows = torch.randn(models.DIM + 1, models.DIM)
    first.weight, second.weight = nn.Parameter(rows[:-1]), nn.Parameter(rows[1:])


@ranks(2)
def test_parameters_that_share_memory_are_refused() -> None:
    """Two parameters over the same memory would go apart in silence: each gets its own rows.

    Within one call only: the memory of parameters that other calls sharded is gone.
    """

    def check(share: Callable[[nn.Linear, nn.Linear], None]) -> None:
        pair = [nn.Linear(models.DIM, models.DIM, bias=False) for _ in range(2)]
        share(*pair)
        match = r"'1\.weight' shares memory with parameter '0\.weight'"
        with pytest.raises(ValueError, match=match):
            stories.shard(nn.Sequential(*pair))

    in_turn({case.__name__: case for case in (_one_storage, _same_memory, _overlap)}, check)
