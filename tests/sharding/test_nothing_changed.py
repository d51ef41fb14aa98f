"""A sharding call that raises leaves the whole model as it was, through every entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import fsdp1
from fsdp2.planning.rehearsal import Settings, shard_as_planned
from fsdp2.testing.null_group import init_null_group, null_mesh
from fsdp2.wrap import CustomPolicy
from fsdp2.xla import XlaFullyShardedDataParallel
from tests.common.errors import raises
from tests.sharding.test_classes import SealedLayer
from tests.sharding.test_misuses import AT_FULLY_SHARD

pytestmark = pytest.mark.alone

OF_ARGUMENTS_THAT_A_POLICY_HAS_NOT = {
    "dims-type",
    "dims-unknown",
    "ignored-type",
    "not-replicated",
    "other-full-mesh",
    "plain-on-full-mesh",
}
NO_MODULES = {"not-a-module", "not-a-module-or-list", "empty-list", "listed-twice"}
OF_A_MODULE = [
    entry
    for entry in AT_FULLY_SHARD
    if entry not in {*NO_MODULES, *OF_ARGUMENTS_THAT_A_POLICY_HAS_NOT, "container"}
]
"""What is wrong with one module, or with what is chosen for it; a policy leaves containers out."""


@pytest.fixture
def sent() -> Iterator[list[str]]:
    """The collectives that were launched."""
    sent: list[str] = []
    init_null_group(4, observer=lambda _, name, *__: sent.append(name))
    yield sent
    dist.destroy_process_group()


Refused = Callable[[str, nn.Module], AbstractContextManager[None]]


@pytest.fixture
def refused(sent: list[str]) -> Refused:
    """Whatever runs inside raises an error of the catalogue; nothing is changed or sent."""

    @contextmanager
    def look(entry: str, model: nn.Module) -> Iterator[None]:
        before = _state(model)
        sent.clear()
        with raises(entry):
            yield
        assert _state(model) == before
        assert sent == []

    return look


def _state(model: nn.Module) -> dict[str, Any]:
    """All that sharding changes: classes, what is registered, hooks, what modules keep, groups."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_backward_hooks")
    found: dict[str, Any] = {"groups": len(dist.distributed_c10d._world.pg_map)}
    for name, module in model.named_modules():
        kept = [(key, id(value)) for key, value in module._parameters.items()]
        kept += [(key, id(value)) for key, value in module._buffers.items()]
        marks = [sorted(p.__dict__) for p in module._parameters.values() if p is not None]
        own = [list(getattr(module, hook)) for hook in hooks]
        found[name] = (type(module), kept, marks, own, sorted(module.__dict__))
    return found


@pytest.mark.parametrize(
    ("entry", "wire"),
    [
        ("wire-format-unknown", {"gather": "int2"}),
        ("wire-format-alone", {"feedback": True}),
        ("wire-format-differences", {"differences": True}),
        ("wire-level-of-one", {"gather": "int8", "level": "between"}),
        ("wire-format-dtype", {"gather": "int8", "exact_below": 0}),
        ("wire-argument", {"gathers": "int8"}),  # which the setter has not
    ],
)
def test_shard_model_with_a_format(entry: str, wire: Any, refused: Refused) -> None:
    """The last parameter is of a dtype that no format takes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    with refused(entry, model):
        fsdp2.shard_model(model, {nn.Linear}, wire=wire)


def test_shard_model_calls_the_setter(sent: list[str]) -> None:
    """What is left exact by name may be of any dtype."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    wire: fsdp2.wrap.WireFormat = {
        "gather": "int8",
        "reduce": "bf16",
        "exact": lambda name, _: name.startswith("1."),
        "exact_below": 5,
    }
    fsdp2.shard_model(model, {nn.Linear}, wire=wire)
    groups = {group.name: group for group in fsdp2.report(model).groups}
    assert [groups[name].exact for name in ("0", "1")] == [["0.bias"], ["1.weight", "1.bias"]]
    assert {(g.gather_format, g.reduce_format) for g in groups.values()} == {("int8", "bf16")}


@pytest.mark.parametrize("entry", OF_A_MODULE)
def test_shard_model(entry: str, refused: Refused) -> None:
    """The last unit but one is wrong: those before it stay as they are."""
    target, arguments = AT_FULLY_SHARD[entry]()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), target, nn.Linear(4, 4))
    units = {model[0], model[1], model[3]}
    options = {key: value for key, value in arguments.items() if key != "ignored_params"}
    policy = CustomPolicy(lambda m: (options or True) if m is target else m in units)
    with refused(entry, model):
        fsdp2.shard_model(model, policy)


NEW = (
    "scalar-parameter",
    "lazy-parameter",
    "sparse-parameter",
    "non-contiguous-parameter",
    "owner-gone",
    "renormalised",
    "shared-memory",
    "hooks-missing",
)


@pytest.mark.parametrize("entry", NEW)
def test_shard_new_parameters(entry: str, refused: Refused) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    fsdp2.fully_shard(model)
    model(torch.ones(1, 4))
    model.append(AT_FULLY_SHARD[entry]()[0])
    with refused(entry, model):
        model.shard_new_parameters()


# ---- wrappers, contexts and the planner

OF_PARAMETERS = (*NEW, "wrapped", "scripted", "torchs-own", "hooks-arguments")
"""What wrappers refuse, too; they do not refuse ``meta-and-real``, as they give memory first."""

ON_A_MESH = ("mesh-order", "partial-parameter", "other-device-mesh", "meshes-not-joined")
"""What FSDP1's refuses on a mesh that it is given; XLA's takes none."""

NOT_OF_WRAPPERS: dict[str, str] = {
    **dict.fromkeys(NO_MODULES, "a wrapper takes one module, and says so in words of its own"),
    **dict.fromkeys(OF_ARGUMENTS_THAT_A_POLICY_HAS_NOT, "a wrapper has no such argument"),
    **dict.fromkeys(
        ("applied-twice", "child-after-parent"), "a wrapper around a unit has words of its own"
    ),
    "meta-and-real": "a wrapper gives parameters memory first",
    **dict.fromkeys(
        ("mesh-type", "mesh-dims", "mesh-without-this-rank"), "a wrapper says what it takes itself"
    ),
    **dict.fromkeys(
        (
            *("reshard-type", "reshard-size", "reshard-smaller-group", "policy-type"),
            *("policy-override-value", "offload-type"),
        ),
        "a wrapper's arguments have other names, and are looked at before",
    ),
    **dict.fromkeys(
        (
            *("placement-function", "placement-type", "placement-empty", "placement-dim"),
            *("placement-mesh", "placement-whole-extension", "hooks-uneven"),
        ),
        "a wrapper takes no shard_placement_fn",
    ),
    "hooks-unnamed-mesh": "a wrapper's meshes have names, but for one that it is given",
}
"""Errors of `fully_shard` that wrappers do not raise, and why."""


def test_each_error_of_a_call_is_tried_through_wrappers() -> None:
    tried = {*OF_PARAMETERS, *ON_A_MESH, "container"}
    assert tried | NOT_OF_WRAPPERS.keys() == AT_FULLY_SHARD.keys()


class Head(nn.Module):
    """Has a weight of its own, and a module that is a unit: so it stays one by itself."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x @ self.weight)


def _tied() -> tuple[Any, set[nn.Module]]:
    """A model, and its units to be: the last has a parameter of the first."""
    first = nn.Linear(4, 4)
    head = Head(first.weight)
    return nn.Sequential(first, nn.Linear(4, 4), head), {first, head, head.inner}


def _around(target: nn.Module) -> nn.Sequential:
    """A model with a unit before ``target`` that has memory, and one that is to get it."""
    return nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4, device="meta"), target, nn.BatchNorm1d(4), nn.Linear(4, 4)
    )


def _choosing(model: nn.Sequential, *more: nn.Module) -> Callable[..., bool]:
    units = {model[0], model[1], model[4], *more}
    return lambda module, recurse, nonwrapped_numel: recurse or module in units


def _fsdp1(model: nn.Sequential, policy: Any) -> None:
    precision = fsdp1.MixedPrecision(
        torch.bfloat16,
        buffer_dtype=torch.bfloat16,
        _module_classes_to_ignore=(nn.BatchNorm1d,),
    )
    fsdp1.FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        mixed_precision=precision,
        sync_module_states=True,
        use_orig_params=True,
    )


def _xla(model: nn.Sequential, policy: Any) -> None:
    XlaFullyShardedDataParallel(model, auto_wrap_policy=policy, compute_dtype=torch.bfloat16)


def _as_planned(model: nn.Sequential, policy: Any) -> None:
    """The planner's calls: no forward is checkpointed either."""
    shard_as_planned(model, null_mesh((4,)), Settings((4,), checkpointing=True), policy)


LATE: dict[str, Callable[[], nn.Module]] = {
    "meta-no-reset": lambda: Head(nn.Parameter(torch.empty(4, 4, device="meta"))),
    "class-resists": SealedLayer,
}
"""What wrappers find after they have begun."""

CALLS = [
    *((shard, entry, True) for shard in (_fsdp1, _xla) for entry in (*OF_PARAMETERS, *LATE)),
    *((shard, entry, False) for shard in (_fsdp1, _xla) for entry in OF_PARAMETERS),
    *((_as_planned, entry, True) for entry in OF_PARAMETERS),
]


@pytest.mark.parametrize(("shard", "entry", "is_chosen"), CALLS)
def test_wrappers_and_the_planner(
    shard: Callable[..., None], entry: str, is_chosen: bool, refused: Refused
) -> None:
    """The last but one of a policy's modules is wrong, or what is left for the model."""
    target = LATE[entry]() if entry in LATE else AT_FULLY_SHARD[entry]()[0]
    model = _around(target)
    if shard is _as_planned:
        model[1].to_empty(device="cpu")
    with refused(entry, model):
        shard(model, _choosing(model, *[target] * is_chosen))


@pytest.mark.parametrize(
    ("shard", "entry", "options"),
    [
        (_fsdp1, "fsdp1-member", {"sharding_strategy": "FULL"}),
        (_fsdp1, "fsdp1-precision", {"mixed_precision": torch.bfloat16}),
        (_fsdp1, "fsdp1-init-type", {"param_init_fn": 1}),
        (_xla, "xla-bucket", {"reduce_scatter_bucket_size_mb": -1}),
        (_xla, "xla-groups", {"sharding_groups": [[0, 1], [2]]}),
    ],
)
def test_arguments_of_a_later_wrapper(
    shard: Callable[..., None], entry: str, options: dict[str, Any], refused: Refused
) -> None:
    model = _around(nn.Linear(4, 4))
    units = {model[0], model[1], model[4]}
    with refused(entry, model):
        shard(model, CustomPolicy(lambda m: options if m is model[2] else m in units))


BF16 = fsdp2.MixedPrecisionPolicy(torch.bfloat16)


@pytest.mark.parametrize(
    ("shard", "options"),
    [
        (fsdp1.FullyShardedDataParallel, {"mixed_precision": fsdp1.MixedPrecision(torch.bfloat16)}),
        (XlaFullyShardedDataParallel, {"compute_dtype": torch.bfloat16}),
        (fsdp2.shard_model, {"mp_policy": BF16}),
    ],
)
def test_a_tie_of_two_units_to_be(
    shard: Callable[..., Any], options: dict[str, Any], refused: Refused
) -> None:
    """The second unit has a parameter of the first, which is not sharded when that is found."""
    model, units = _tied()
    policy = CustomPolicy(lambda m: options if m is model[0] else m in units)
    call = {"policy" if shard is fsdp2.shard_model else "auto_wrap_policy": policy}
    with refused("tied-dtypes", model):
        shard(model, **call)


def test_a_parameter_that_a_unit_below_was_given(refused: Refused) -> None:
    """That unit would compute with it in another dtype than the call."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp2.fully_shard(model[0], mp_policy=BF16)
    model[0].given = model[1].weight
    with refused("tied-dtypes", model):
        fsdp2.fully_shard(model)


def test_xla_executes_what_was_put_off(refused: Refused) -> None:
    """Several wrappers that are to shard later: none of them does if one cannot."""
    inner = [
        XlaFullyShardedDataParallel(module, execute_sharding_on_init=False)
        for module in (nn.Linear(4, 4), AT_FULLY_SHARD["scalar-parameter"]()[0])
    ]
    model = XlaFullyShardedDataParallel(nn.Sequential(*inner), execute_sharding_on_init=False)
    with refused("scalar-parameter", model):
        model.execute_sharding()


@pytest.mark.parametrize("entry", [entry for entry in NEW if entry != "owner-gone"])
def test_deferred(entry: str, sent: list[str]) -> None:
    """What is left for the end is planned, all of it, before one of them is sharded."""
    models = nn.ModuleList()
    with raises(entry), fsdp2.wrap.deferred(None, [nn.Conv1d]):
        models.append(nn.Linear(4, 4))
        models.append(AT_FULLY_SHARD[entry]()[0])
        before = _state(models)
    assert _state(models) == before
    assert sent == []


def test_what_is_planned_together_is_what_single_calls_make(sent: list[str]) -> None:
    """Ties among units of one call, and parameters that are left for the model."""
    made = []
    for together in (True, False):
        model, units = _tied()
        if together:
            fsdp2.shard_model(model, CustomPolicy(lambda m, units=units: m in units))
        else:
            for module in (model[0], model[2].inner, model[2], model):
                fsdp2.fully_shard(module)
        model(torch.ones(1, 4)).sum().backward()
        made.append(fsdp2.report(model).groups)
    assert made[0] == made[1]
    assert len(made[0]) == 3
