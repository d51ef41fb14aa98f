"""What `fsdp2.xla` refuses, and what it says once; one process that claims to be one of four."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.testing.null_group import init_null_group
from fsdp2.xla import XlaFullyShardedDataParallel as FSDP  # noqa: N814
from fsdp2.xla import checkpoint_module, wrapper
from tests.common import errors

pytestmark = pytest.mark.alone

MISUSES: dict[str, Callable[[], Any]] = {
    "xla-not-a-module": lambda: FSDP([nn.Linear(2, 2)]),  # type: ignore[arg-type]
    "xla-wrapped-twice": lambda: FSDP(FSDP(nn.Linear(2, 2))),
    "xla-groups": lambda: FSDP(nn.Linear(2, 2), sharding_groups=[[0, 1], [2]]),
    "xla-group-position": lambda: FSDP(nn.Linear(2, 2), sharding_world_size=2),
    "xla-bucket": lambda: FSDP(nn.Linear(2, 2), reduce_scatter_bucket_size_mb=-1),
    "xla-divide-factors": lambda: FSDP(nn.Linear(2, 2)).set_gradient_divide_factors(
        1.0, 0.0, False
    ),
    "xla-clip-groups": lambda: FSDP(nn.Linear(2, 2)).clip_grad_norm_(1.0, groups=[[0, 1], [2, 3]]),
    "xla-checkpoint": lambda: checkpoint_module(print),  # type: ignore[type-var]
    "xla-foreign-rows": lambda: FSDP(nn.Linear(8, 8)).load_state_dict(nn.Linear(8, 8).state_dict()),
}


def misuse(entry: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    assert entry not in MISUSES
    return lambda run: MISUSES.setdefault(entry, run)


@pytest.fixture(params=[0, 3], ids="rank{}".format, autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    init_null_group(4, request.param)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("entry", MISUSES)
def test_misuse(entry: str) -> None:
    with errors.raises(entry):
        MISUSES[entry]()


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


@misuse("meta-no-reset")
def _() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), _Own())
    FSDP(model)


@misuse("meta-left")
def _() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), _Own())
    FSDP(model, param_init_fn=lambda module: module[0].to_empty(device="cpu"))


@misuse("xla-other-mesh")
def _() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fsdp2.fully_shard(module[0], mesh=mesh)
    FSDP(module).get_shard_metadata()


def test_a_load_that_is_refused_changes_nothing() -> None:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), nn.Linear(8, 8)))
    before = {name: rows.clone() for name, rows in model.state_dict().items()}
    state = {name: rows + 1 for name, rows in before.items()}
    state["1.bias"] = torch.zeros(8)
    with errors.raises("xla-foreign-rows"):
        model.load_state_dict(state)
    assert all(torch.equal(rows, before[name]) for name, rows in model.state_dict().items())


MEANINGLESS: dict[str, Any] = {
    "optimization_barrier_in_forward": False,
    "optimization_barrier_in_backward": False,
    "sync_on_finalization": True,
    "pin_layout_in_collective_ops": False,
    "coalesce_all_gather_ops": True,
}


@pytest.mark.parametrize("argument", MEANINGLESS)
def test_what_is_meaningless_is_said_once(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "_said", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        FSDP(nn.Linear(2, 2))
        assert not seen
        for _ in range(2):
            FSDP(nn.Linear(2, 2), **{argument: MEANINGLESS[argument]})
    (said,) = seen
    assert str(said.message).startswith(f"{argument} changes nothing")
    assert said.filename == __file__


def test_a_module_in_two_places_gets_one_wrapper() -> None:
    shared = nn.Linear(8, 8)
    model: Any = FSDP(
        nn.ModuleList([nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.ReLU(), shared)]),
        auto_wrap_policy={nn.Linear},
        execute_sharding_on_init=False,
    )
    assert isinstance(model[0][0], FSDP)
    assert model[0][0] is model[1][1]
    assert model[0][0].module is shared


def test_what_is_wrapped_already_is_left_alone() -> None:
    """And its elements do not count."""
    counted: list[tuple[str, bool, int]] = []

    def policy(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        counted.append((type(module).__name__, recurse, unwrapped_params))
        return recurse

    inner = FSDP(nn.Sequential(nn.Linear(4, 4, bias=False)))
    FSDP(nn.Sequential(nn.Sequential(inner, nn.Linear(2, 2, bias=False))), auto_wrap_policy=policy)
    assert set(counted) == {
        *(("Sequential", recurse, 4) for recurse in (True, False)),
        *(("Linear", recurse, 4) for recurse in (True, False)),
    }


def test_settings_of_units() -> None:
    """Each argument is the one of `fully_shard`, or a setting."""

    def unit(**arguments: Any) -> Any:
        return FSDP(nn.Linear(8, 2, bias=False), **arguments)

    def group(model: Any) -> Any:
        return fsdp2.report(model).groups[0]

    assert group(unit(reshard_after_forward=False)).reshard_after_forward is False
    with torch.no_grad():
        for disable in (True, False):
            root = unit(disable_reshard_on_root=disable)
            root(torch.ones(1, 8))
            assert group(root).reshard_after_forward is not disable
    policy = group(unit(compute_dtype=torch.bfloat16, fp32_reduce_scatter=True)).mp_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    policy = group(unit(compute_dtype=torch.bfloat16)).mp_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.bfloat16)

    def threshold(model: Any) -> int:
        return model._unit._fsdp2_record.unit.options.pack_below

    assert threshold(unit(reduce_scatter_bucket_size_mb=1.5)) == 3 << 19
    assert threshold(unit(reduce_scatter_bucket_size_mb=None)) == threshold(unit()) == 128 << 10


def test_the_dim_that_is_cut() -> None:
    """One row of many columns: over 3 % and over 1 MiB of padding on dim 0."""
    dims = [
        FSDP(nn.Linear(1 << 18, 1, bias=False), shard_param_on_dim_0=on_dim_0).get_shard_metadata()[
            "shard_info"
        ]["weight"]["dim"]
        for on_dim_0 in (True, False)
    ]
    assert dims == [0, 1]
