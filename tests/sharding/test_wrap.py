"""Wrap policies: the modules that torch's choose, in the order in which they are wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.fsdp.wrap as torchs
from torch import nn

import fsdp2.wrap as ours
from fsdp2.wrap import chosen_modules
from fsdp2.wrap.choices import options_for, wrap_chosen
from tests.common import cases
from tests.common.errors import raises

pytestmark = pytest.mark.alone


class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 2)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))


class Model(nn.Module):
    def __init__(self, blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Special(nn.Linear):
    """A subclass."""


def _nested() -> nn.Module:
    inner = nn.Sequential(Block(), nn.Sequential(nn.Linear(8, 8), Special(8, 64)))
    return nn.Sequential(inner, nn.ModuleDict({"a": Block(), "b": nn.Linear(8, 100)}))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "sequential": lambda: nn.Sequential(nn.Linear(8, 100), nn.Linear(100, 8), nn.Linear(8, 8)),
    "empty": lambda: nn.Sequential(nn.ReLU(), nn.Identity()),
    "blocks": Model,
    "more blocks": lambda: Model(5),
    "tied": lambda: Model(tied=True),
    "nested": _nested,
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3),
    "convolutions": lambda: nn.Sequential(
        *(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)) for _ in range(3)), nn.Linear(9, 200)
    ),
    "containers": lambda: nn.ModuleList([nn.ModuleDict({"x": nn.Linear(30, 30)}), nn.Linear(9, 9)]),
    "lists below": lambda: nn.ModuleDict({"l": nn.ModuleList(nn.Linear(9, 9) for _ in range(8))}),
}

CLASSES = {Block, nn.Linear, nn.TransformerEncoderLayer, nn.BatchNorm2d}


def _by_name(module: nn.Module) -> Any:
    if isinstance(module, nn.Linear):
        return {"size": module.in_features}
    return isinstance(module, Block | nn.Embedding)


POLICIES: dict[str, Callable[[Any], Any]] = {
    "classes": lambda api: api.ModuleWrapPolicy(CLASSES),
    "custom": lambda api: api.CustomPolicy(_by_name),
    "always": lambda api: api.always_wrap_policy,
    "lambda": lambda api: functools.partial(
        api.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Embedding | Block)
    ),
    "transformer": lambda api: functools.partial(
        api.transformer_auto_wrap_policy, transformer_layer_cls=CLASSES
    ),
    "size": lambda api: functools.partial(api.size_based_auto_wrap_policy, min_num_params=300),
    "small": lambda api: functools.partial(api.size_based_auto_wrap_policy, min_num_params=0),
    "leaves": lambda api: functools.partial(
        api.size_based_auto_wrap_policy,
        min_num_params=50,
        force_leaf_modules={Block},
        exclude_wrap_modules={nn.Linear},
    ),
    "either": lambda api: functools.partial(
        getattr(api, "any_wrap_policy", None) or api._or_policy,
        policies=[
            api.ModuleWrapPolicy({nn.Embedding}),
            functools.partial(api.size_based_auto_wrap_policy, min_num_params=300),
        ],
    ),
}


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self.options = options


def _torchs_choices(
    model: nn.Module, policy: Any, ignored: set[nn.Module], **options: Any
) -> list[tuple[str, Any]]:
    """What torch wraps, in its order, as its FSDP1 goes about it."""
    names = {module: name for name, module in model.named_modules()}
    wrapped = []

    def wrapper(module: nn.Module, **own: Any) -> nn.Module:
        wrapped.append((names[module], own))
        return Wrapper(module, **own)

    params = {param for module in ignored for param in module.parameters()}
    if isinstance(policy, torchs._Policy):
        found = policy._run_policy(model, ignored, options)
        fn = torchs._construct_wrap_fn(model, found, wrapper)
        torchs._post_order_apply(model, fn)
    else:
        torchs._recursive_wrap(
            model, policy, wrapper, ignored, params, only_wrap_children=True, **options
        )
    return wrapped


@cases.each("kind", POLICIES)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("ignores", [False, True])
def test_the_choices_are_torchs(kind: str, build: Callable[[], nn.Module], ignores: bool) -> None:
    """Names, order and options; by our policy and by torch's own."""
    expected_of = build()
    ignored = _ignored(expected_of, ignores)
    expected = _torchs_choices(expected_of, POLICIES[kind](torchs), ignored, of="root")
    for api in (ours, torchs):
        model = build()
        ignored = _ignored(model, ignores)
        found = chosen_modules(
            model,
            POLICIES[kind](api),
            ignored_modules=ignored,
            ignored_params={p for module in ignored for p in module.parameters()},
            options={"of": "root"},
        )
        assert [(choice.name, choice.options) for choice in found] == expected
        assert all(model.get_submodule(choice.name) is choice.module for choice in found)


def _ignored(model: nn.Module, ignores: bool) -> set[nn.Module]:
    """Some modules below, one of them with children."""
    return {m for m in list(model.modules())[1:] if isinstance(m, nn.BatchNorm2d)} | (
        set(list(model.modules())[2:3]) if ignores else set()
    )


def test_policies_choose_something() -> None:
    """So that the comparison above compares something, and with several answers."""
    for kind, make in POLICIES.items():
        counts = {len(chosen_modules(build(), make(ours))) for build in MODELS.values()}
        assert len(counts) > 2, kind


def test_xlas_functions_are_asked_by_their_name() -> None:
    def policy(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        return unwrapped_params >= 300

    by_size = functools.partial(
        ours.size_based_auto_wrap_policy,
        min_num_params=300,
        force_leaf_modules=set(),
        exclude_wrap_modules=set(),
    )
    expected = [choice.name for choice in chosen_modules(Model(), by_size)]
    assert [choice.name for choice in chosen_modules(Model(), policy)] == expected != []


def test_a_shared_module_is_one_choice_and_is_replaced_everywhere() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    choices = chosen_modules(model, {nn.Linear}, options={"of": "root"})
    wrap_chosen(model, choices, Wrapper)
    assert [c.name for c in choices] == ["0.0"]
    first, second = model[0][0], model[1][0]  # type: ignore[index]
    assert first is second
    assert isinstance(first, Wrapper)
    assert first.module is shared
    assert first.options == {"of": "root"}


def test_wrapped_modules_are_inside_of_wrapped_ones() -> None:
    model = Model(1)
    choices = chosen_modules(model, {Block, nn.Linear})
    wrap_chosen(model, choices, Wrapper)
    assert [c.name for c in choices][-2:] == ["blocks.0", "head"]
    outer: Any = model.blocks[0]
    assert isinstance(outer, Wrapper)
    assert isinstance(outer.module.mlp[0], Wrapper)


def test_options_for_one_module() -> None:
    block = Block()
    assert options_for(block, {Block}, options={"a": 1}) == {"a": 1}
    assert options_for(block, {nn.Linear}) is None
    assert options_for(block, None) is None
    assert chosen_modules(block, None) == []
    assert options_for(nn.Linear(3, 2), ours.CustomPolicy(_by_name)) == {"size": 3}
    size = functools.partial(ours.size_based_auto_wrap_policy, min_num_params=9)
    assert options_for(nn.Linear(4, 2), size, options={"a": 1}) == {"a": 1}
    assert options_for(nn.Linear(4, 2), size, numel=8) is None


def test_annotations() -> None:
    linear = nn.Linear(2, 2)
    assert ours.wrap(linear, a=1) is linear
    with ours.enable_wrap(wrapper_cls=Wrapper, a=1, b=2):
        wrapped: Any = ours.wrap(linear, b=3)
    assert wrapped.module is linear
    assert wrapped.options == {"a": 1, "b": 3}
    assert ours.wrap(linear) is linear
    with pytest.raises(ZeroDivisionError), ours.enable_wrap(wrapper_cls=Wrapper):
        raise ZeroDivisionError
    assert ours.wrap(linear) is linear


def test_misuse() -> None:
    wrong: Any
    for wrong in (Block, 3, Model(), "Block"):
        with raises("wrap-policy"):
            chosen_modules(Model(), wrong)
    wrong = [3]
    with raises("wrap-classes"):
        ours.ModuleWrapPolicy(wrong)
    wrong = ours.CustomPolicy(lambda _: None)  # type: ignore[arg-type, return-value]
    with raises("wrap-answer"):
        chosen_modules(Model(), wrong)
    wrong = 3
    with raises("wrapper-class"), ours.enable_wrap(wrapper_cls=wrong):
        pass
    with (
        ours.enable_wrap(wrapper_cls=Wrapper),
        raises("wrap-nested"),
        ours.enable_wrap(wrapper_cls=Wrapper),
    ):
        pass
