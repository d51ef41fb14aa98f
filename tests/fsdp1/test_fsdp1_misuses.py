"""Misuse of FSDP1's wrapper, each as docs/errors.md says; and what it takes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp2
from fsdp2.fsdp1 import (
    FSDP,
    BackwardPrefetch,
    MixedPrecision,
    ShardedGradScaler,
    ShardingStrategy,
)
from fsdp2.testing.null_group import init_null_group
from tests.common import errors

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")
MISUSES: dict[str, Callable[[], Any]] = {
    "fsdp1-module": lambda: FSDP(torch.ones(1)),  # type: ignore[arg-type]
    "fsdp1-member": lambda: FSDP(linear(), sharding_strategy="FULL_SHARD"),  # type: ignore[arg-type]
    "fsdp1-precision": lambda: FSDP(linear(), mixed_precision=torch.bfloat16),  # type: ignore[arg-type]
    "fsdp1-offload": lambda: FSDP(linear(), cpu_offload=True),  # type: ignore[arg-type]
    "fsdp1-group-type": lambda: FSDP(linear(), process_group=[0, 1]),  # type: ignore[arg-type]
    "fsdp1-group-count": lambda: FSDP(linear(), dist.group.WORLD, ShardingStrategy.HYBRID_SHARD),
    "fsdp1-mesh-type": lambda: FSDP(linear(), device_mesh=4),  # type: ignore[arg-type]
    "fsdp1-mesh-dims": lambda: FSDP(linear(), device_mesh=init_device_mesh("cpu", (2, 2))),
    "fsdp1-ignored-twice": lambda: FSDP(linear(), ignored_modules=[], ignored_states=[]),
    "fsdp1-ignored-type": lambda: FSDP(linear(), ignored_modules=["bias"]),  # type: ignore[list-item]
    "fsdp1-wrapped-before": lambda: FSDP(
        nn.Sequential(FSDP(linear())), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    ),
    "fsdp1-init-type": lambda: FSDP(linear(), param_init_fn="normal"),  # type: ignore[arg-type]
    "meta-no-reset": lambda: FSDP(Bare()),
    "meta-left": lambda: FSDP(Bare(), param_init_fn=print),
    "fsdp1-hook-type": lambda: nested().register_comm_hook(None, "allreduce"),
    "fsdp1-scaler": lambda: ShardedGradScaler("cpu").scale(3),
    "fsdp1-torchs-method": lambda: FSDP._unshard,  # type: ignore[attr-defined]
    "backward-prefetch": lambda: fsdp2.fully_shard(linear()).set_tuning(backward_prefetch="late"),  # type: ignore[attr-defined]
}


def misuse(entry: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    assert entry not in MISUSES
    return lambda run: MISUSES.setdefault(entry, run)


@pytest.fixture(params=[0, 3], ids="rank{}".format)
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    init_null_group(4, request.param)
    yield
    gc.collect()
    dist.destroy_process_group()


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def nested() -> Any:
    return FSDP(nn.Sequential(FSDP(linear())))


@misuse("fsdp1-group-and-mesh")
def _() -> None:
    mesh = init_device_mesh("cpu", (4,))
    FSDP(linear(), process_group=mesh.get_group(), device_mesh=mesh)


@misuse("local-world-size")
def _() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "3")
        FSDP(linear(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@misuse("fsdp1-no-accelerator")
def _() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
        FSDP(linear(), device_id=1)


@misuse("fsdp1-other-device")
def _() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        FSDP(linear(), device_id=1)


@misuse("fsdp1-ignored-wrapper")
def _() -> None:
    inner = FSDP(linear())
    FSDP(nn.Sequential(inner, linear()), ignored_states=[inner])


@misuse("fsdp1-ignored-mixed")
def _() -> None:
    layer = linear()
    FSDP(nn.Sequential(layer), ignored_states=[layer, layer.bias])  # type: ignore[arg-type]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4, device="meta"))


@misuse("fsdp1-inner")
def _() -> None:
    inner = nested().module[0]
    for method, given in ((inner.clip_grad_norm_, (1.0,)), (inner.register_comm_hook, (0, print))):
        with errors.raises("fsdp1-inner"):
            method(*given)
    with inner.no_sync():
        pass


@misuse("fsdp1-hook-twice")
def _() -> None:
    model = nested()
    model.register_comm_hook(None, print)
    model.register_comm_hook(None, print)


@misuse("fsdp1-hook-hybrid")
def _() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    strategy = ShardingStrategy.HYBRID_SHARD
    model = FSDP(linear(), sharding_strategy=strategy, device_mesh=mesh)
    model.register_comm_hook(None, print)


@pytest.mark.parametrize("entry", MISUSES)
def test_misuse(entry: str, group: None) -> None:
    with errors.raises(entry):
        MISUSES[entry]()


def test_objects_of_torchs_are_taken(group: None) -> None:
    model = FSDP(
        linear(),
        sharding_strategy=torchs.ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=torchs.CPUOffload(True),
        backward_prefetch=torchs.BackwardPrefetch.BACKWARD_POST,
        mixed_precision=torchs.MixedPrecision(torch.bfloat16),
        device_id=CPU,
    )
    assert model.sharding_strategy == torchs.ShardingStrategy.SHARD_GRAD_OP
    assert model.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    assert fsdp2.report(model).groups[0].mp_policy.reduce_dtype == torch.bfloat16
    assert model.cpu_offload.offload_params
    strategies = {torchs.ShardingStrategy.NO_SHARD: 1}
    assert strategies[ShardingStrategy.NO_SHARD] == 1  # type: ignore[index]
    assert ShardingStrategy.NO_SHARD != torchs.BackwardPrefetch.BACKWARD_PRE


def test_what_changes_nothing_is_taken(group: None) -> None:
    for name in ("forward_prefetch", "limit_all_gathers", "use_orig_params"):
        for value in (False, True):
            model = FSDP(linear(), **{name: value})
            assert getattr(model, f"_{name}" if name == "use_orig_params" else name) is value


def test_a_wrapper_may_wrap_a_wrapper(group: None) -> None:
    inner = FSDP(linear())
    outer = FSDP(inner)
    assert [name for name, _ in outer.named_parameters()] == ["weight", "bias"]
    outer(torch.ones(2, 8)).sum().backward()
    assert FSDP.fsdp_modules(outer) == [outer, inner]


def test_classes_in_full_precision_only_where_there_is_mixed_precision(group: None) -> None:
    bf16 = MixedPrecision(torch.bfloat16)
    for precision, wrappers in ((None, 2), (MixedPrecision(), 2), (bf16, 3)):
        model = nn.Sequential(linear(), nn.BatchNorm1d(8))
        policy = ModuleWrapPolicy({nn.Linear})
        wrapped = FSDP(model, auto_wrap_policy=policy, mixed_precision=precision)
        assert len(FSDP.fsdp_modules(wrapped)) == wrappers


def test_full_states_load_into_a_parameter_tied_over_wrappers(group: None) -> None:
    """The wrapper around a module that is tied to another's takes its rows, too."""
    for inner in (0, 1):
        model = nn.ModuleDict({"first": linear(), "second": linear()})
        model["second"].weight = model["first"].weight
        state = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
        state["second.weight"] = state["first.weight"]
        name = ("first", "second")[inner]
        model[name] = FSDP(model[name])
        wrapped = FSDP(Around(model))
        for _ in range(2):  # before and behind what makes the units share a group
            wrapped.load_state_dict({f"inside.{key}": value for key, value in state.items()})
            rank = dist.get_rank()
            for key, param in wrapped.named_parameters():
                rows = state[key.removeprefix("inside.")].chunk(4)[rank]
                assert torch.equal(param.to_local(), rows), key  # type: ignore[attr-defined]
                nn.init.zeros_(param)
            wrapped(torch.ones(2, 8))


class Around(nn.Module):
    """Calls what is inside."""

    def __init__(self, inside: nn.ModuleDict) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> Any:
        return self.inside["second"](self.inside["first"](x))
