"""Every misuse that one process can show raises what docs/errors.md says, and changes nothing.

    @at_fully_shard("id")   returns a module and arguments that `fully_shard` must refuse
    @misuse("id")           does something that must raise

Those of one expression are in two tables.

They run as the first and as the last of four ranks: what is refused on one is refused on all.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import fsdp2
from fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPMeshInfo,
    FSDPModule,
    Levels,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
)
from fsdp2.core.device.collectives import GroupCollectives
from fsdp2.core.modules.registry import record_of
from fsdp2.core.schedule.states import GroupState
from fsdp2.testing.null_group import init_null_group, null_mesh
from tests.common import errors, tensors
from tests.common.models import ReadsKept

pytestmark = pytest.mark.alone

Refused = Callable[[], tuple[Any, dict[str, Any]]]

AT_FULLY_SHARD: dict[str, Refused] = {}
MISUSES: dict[str, Callable[[], Any]] = {}


def at_fully_shard(entry: str) -> Callable[[Refused], Refused]:
    assert entry not in AT_FULLY_SHARD
    return lambda build: AT_FULLY_SHARD.setdefault(entry, build)


def misuse(entry: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    assert entry not in MISUSES
    return lambda run: MISUSES.setdefault(entry, run)


BEFORE_ANY_COLLECTIVE = {
    "added-parameter",
    "in-backward-optimizers",
    "list-has-no-root",
    "made-of-sharded",
    "manual-below",
    "moved-away",
    "moved-though-offloaded",
    "replaced-parameter",
    "still-on-meta",
    "tied-unregistered",
    "tied-to-another-model",
}
"""Misuses that the first forward finds, which must not have sent anything by then."""


@pytest.fixture(params=[0, 3], ids="rank{}".format)
def sent(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The collectives that were launched."""
    sent: list[str] = []
    init_null_group(4, request.param, observer=lambda _, name, *__: sent.append(name))
    yield sent
    dist.destroy_process_group()


@pytest.mark.parametrize("entry", AT_FULLY_SHARD)
def test_at_fully_shard(entry: str, sent: list[str]) -> None:
    target, arguments = AT_FULLY_SHARD[entry]()
    modules = [m for m in (target if isinstance(target, list) else [target]) if _is_module(m)]
    before = [_state(module) for module in modules]
    with errors.raises(entry):
        fully_shard(target, **arguments)
    assert [_state(module) for module in modules] == before
    assert sent == []


@pytest.mark.parametrize("entry", MISUSES)
def test_misuse(entry: str, sent: list[str]) -> None:
    run = MISUSES[entry]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with errors.raises(entry):
            run()
    assert sent == [] or entry not in BEFORE_ANY_COLLECTIVE


ORDERS: dict[str, tuple[list[Any], Callable[[DeviceMesh], Any]]] = {
    "another rank's line": ([[0, 3], [2, 1]], lambda mesh: (linear(), mesh)),
    "another rank's line, sliced": ([[0, 3], [2, 1]], lambda mesh: (linear(), mesh["tp"])),
    "levels, between": ([[1, 2], [0, 3]], lambda mesh: (linear(), Levels(mesh))),
    "hsdp": ([[3, 2, 1, 0]], lambda mesh: (linear(), mesh)),
    "flattened": ([[0, 2], [1, 3]], lambda mesh: (linear(), mesh["dp", "tp"]._flatten("all"))),
    "of another parallelism": (
        [[0, 3], [2, 1]],
        lambda mesh: (on(mesh["tp"], Shard(0)), mesh["dp"]),
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_meshes_in_another_order(order: str, sent: list[str]) -> None:
    """All ranks of the mesh raise, those of an ascending line too."""
    ranks, made = ORDERS[order]
    target, mesh = made(DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")))
    with errors.raises("mesh-order"):
        fully_shard(target, mesh=mesh)
    assert sent == []


def test_subclasses_that_wrap_others_need_hooks(sent: list[str]) -> None:
    """Without, of all that they wrap one plain tensor would be left."""
    layer = tensors.extend(linear(), tensors.Wrapped)
    with errors.raises("hooks-missing"):
        fully_shard(layer)
    assert type(layer) is nn.Linear
    assert isinstance(layer.weight, tensors.Wrapped)
    assert sent == []


def _is_module(module: Any) -> bool:
    return isinstance(module, nn.Module)


def _state(module: nn.Module) -> list[Any]:
    """All that `fully_shard` changes: classes, parameters, hooks, what modules keep."""
    return [
        (
            type(below),
            [(key, id(param)) for key, param in below._parameters.items()],
            list(below._forward_hooks),
            list(below._forward_pre_hooks),
            sorted(below.__dict__),
        )
        for below in module.modules()
    ]


def linear() -> Any:
    return nn.Linear(4, 4)


def sharded(**arguments: Any) -> Any:
    return fully_shard(nn.Linear(4, 4), **arguments)


def x() -> torch.Tensor:
    return torch.ones(2, 4)


def pair() -> Any:
    """A root with a unit below it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    return fully_shard(model)


def on(mesh: DeviceMesh, *placements: Placement) -> Any:
    """A linear layer whose weight is a DTensor."""
    layer = nn.Linear(8, 8)
    local = torch.zeros(8, 8)
    layer.weight = nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))
    return layer


def run(model: Any) -> Any:
    """The model, after a forward."""
    model(x())
    return model


def after(change: Callable[[Any], object]) -> Any:
    """A root and a unit below it that run after a change."""
    model = pair()
    change(model)
    return run(model)


def of_weight(weight: torch.Tensor) -> Any:
    layer = linear()
    layer.weight = nn.Parameter(weight)
    return layer


def parallel(dim: str, placement: Placement) -> tuple[Any, dict[str, Any]]:
    """A weight on one dim of a mesh, which the other is to shard."""
    mesh = full()
    return on(mesh[dim], placement), {"mesh": mesh["dp"]}


def on_two_meshes() -> Any:
    """Its bias is on ranks of its own."""
    info = FSDPMeshInfo(full()["tp"], shard_mesh_dim=0)

    def choose(param: nn.Parameter) -> Any:
        return ShardPlacementResult(None, info) if param.ndim == 1 else None

    return sharded(shard_placement_fn=choose)


class Gather(fsdp2.AllGather):
    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def allocate(self, size: Any, **_: Any) -> torch.Tensor:
        return torch.empty(*size, dtype=self.dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def full() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


# ---- in one expression


AT_FULLY_SHARD |= {
    "not-a-module": lambda: ([linear(), 3], {}),
    "not-a-module-or-list": lambda: (3, {}),
    "empty-list": lambda: ([], {}),
    "applied-twice": lambda: (sharded(), {}),
    "container": lambda: (nn.ModuleList([linear()]), {}),
    "wrapped": lambda: (nn.Sequential(nn.DataParallel(linear())), {}),
    "scripted": lambda: (nn.Sequential(torch.jit.script(linear())), {}),
    "mesh-type": lambda: (linear(), {"mesh": (4,)}),
    "mesh-without-this-rank": lambda: (linear(), {"mesh": DeviceMesh("cpu", [1, 2])}),
    "mesh-order": lambda: (linear(), {"mesh": DeviceMesh("cpu", [3, 1, 0, 2])}),
    "mesh-dims": lambda: (linear(), {"mesh": null_mesh((1, 2, 2))}),
    "dims-type": lambda: (linear(), {"mesh": full(), "dp_mesh_dims": "dp"}),
    "dims-unknown": lambda: (
        linear(),
        {"mesh": full(), "dp_mesh_dims": DataParallelMeshDims("fsdp")},
    ),
    "reshard-type": lambda: (linear(), {"reshard_after_forward": "yes"}),
    "reshard-size": lambda: (linear(), {"reshard_after_forward": 3}),
    "reshard-smaller-group": lambda: (
        tensors.extend(linear(), tensors.Aliased),
        {"reshard_after_forward": 2},
    ),
    "policy-type": lambda: (linear(), {"mp_policy": torch.bfloat16}),
    "policy-override-value": lambda: (
        linear(),
        {
            "mp_policy": MixedPrecisionPolicy(
                torch.bfloat16, param_dtype_override_fn=lambda _: torch.float16
            )
        },
    ),
    "offload-type": lambda: (linear(), {"offload_policy": "cpu"}),
    "ignored-type": lambda: (linear(), {"ignored_params": {"weight"}}),
    "placement-function": lambda: (linear(), {"shard_placement_fn": Shard(1)}),
    "placement-type": lambda: (linear(), {"shard_placement_fn": lambda _: Partial()}),
    "placement-empty": lambda: (linear(), {"shard_placement_fn": lambda _: ()}),
    "placement-dim": lambda: (linear(), {"shard_placement_fn": lambda _: Shard(2)}),
    "placement-whole-extension": lambda: (
        tensors.extend(linear(), tensors.Aliased),
        {"shard_placement_fn": lambda _: Replicate()},
    ),
    "lazy-parameter": lambda: (nn.LazyLinear(4), {}),
    "scalar-parameter": lambda: (of_weight(torch.tensor(1.0)), {}),
    "sparse-parameter": lambda: (of_weight(torch.eye(4).to_sparse()), {}),
    "non-contiguous-parameter": lambda: (of_weight(torch.randn(4, 6).t()), {}),
    "meta-and-real": lambda: (of_weight(torch.empty(4, 4, device="meta")), {}),
    "partial-parameter": lambda: parallel("tp", Partial()),
    "meshes-not-joined": lambda: parallel("dp", Replicate()),
    "renormalised": lambda: (nn.Sequential(nn.EmbeddingBag(8, 4, max_norm=1.0), linear()), {}),
    "plain-on-full-mesh": lambda: (
        linear(),
        {"mesh": full(), "dp_mesh_dims": DataParallelMeshDims("dp")},
    ),
    "hooks-missing": lambda: (tensors.extend(linear(), NoPost), {}),
    "hooks-arguments": lambda: (tensors.extend(linear(), TwoArguments), {}),
    "hooks-uneven": lambda: (
        tensors.extend(nn.Linear(7, 8), tensors.Aliased),
        {"shard_placement_fn": lambda param: Shard(param.ndim - 1)},
    ),
    "hooks-unnamed-mesh": lambda: (
        tensors.extend(linear(), tensors.Aliased),
        {"mesh": init_device_mesh("cpu", (2, 2))},
    ),
}
"""What `fully_shard` must refuse: a module and arguments."""

MISUSES |= {
    "dims-none": lambda: DataParallelMeshDims(),
    "dims-twice": lambda: DataParallelMeshDims("dp", "dp"),
    "whole-below": lambda: fsdp2.whole_below(-1),
    "policy-value": lambda: MixedPrecisionPolicy(param_dtype="bf16"),  # type: ignore[arg-type]  # what is tested
    "policy-integer": lambda: MixedPrecisionPolicy(reduce_dtype=torch.int8),
    "policy-override-type": lambda: MixedPrecisionPolicy(param_dtype_override_fn=torch.float32),  # type: ignore[arg-type]  # the same
    "integer-requires-grad": lambda: nn.Parameter(torch.zeros(4, dtype=torch.int8)),
    "wrong-state": lambda: record_of(sharded()).unit.own_groups[0].finish_unshard(),
    "while-running": lambda: fully_shard(
        Calls(lambda model: model.set_manual_backward_finalization(True))
    )(x()),
    "manual-below": lambda: after(lambda model: model[0].set_manual_backward_finalization(True)),
    "added-parameter": lambda: after(lambda model: setattr(model[1], "adapter", linear())),
    "replaced-parameter": lambda: after(
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(4, 4)))
    ),
    "made-of-sharded": lambda: after(lambda model: nn.utils.parametrizations.weight_norm(model[1])),
    "in-backward-optimizers": lambda: after(
        lambda model: _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ),
    "hooks-result": lambda: fully_shard(tensors.extend(linear(), NoTuple))(x()),
    "not-root": lambda: run(pair())[0].finalize_backward(),
    "reset-not-root": lambda: run(pair())[0].reset_iter_state(),
    "not-manual": lambda: run(pair()).finalize_backward(),
    "finalized-twice": lambda: _unawaited()[0].finalize_backward(),
    "forward-before-wait": lambda: run(_unawaited()[0]),
    "sparse-gradient": lambda: (
        fully_shard(nn.Sequential(nn.Embedding(8, 4, sparse=True)))(torch.tensor([1, 2]))
        .sum()
        .backward()
    ),
    "deep-copy": lambda: copy.deepcopy(sharded()),
    "pickle": lambda: torch.save(sharded(), io.BytesIO()),
    "repoint-type": lambda: fsdp2.optim.repoint_optimizer(linear()),
    "norm-of-module": lambda: fsdp2.clip_grad_norm_(sharded(), 1.0),  # type: ignore[arg-type]  # what is tested
    "norm-type": lambda: fsdp2.clip_grad_norm_(sharded().parameters(), 1.0, 0),
    "norm-plain-parameter": lambda: _clip(
        torch.ones(4), DTensor.from_local(torch.ones(1), null_mesh(4), [Shard(0)])
    ),
    "norm-plain-gradient": lambda: _clip(
        DTensor.from_local(torch.ones(1), null_mesh(4), [Shard(0)]), torch.ones(4)
    ),
    "assigned-does-not-fit": lambda: sharded().load_state_dict(linear().state_dict(), assign=True),
    "plain-state-dict": lambda: sharded().load_state_dict(linear().state_dict()),
    "other-shapes": lambda: sharded().load_state_dict(fully_shard(nn.Linear(4, 8)).state_dict()),
    "other-names": lambda: pair().load_state_dict(sharded().state_dict()),
    "not-sharded": lambda: FSDPModule.reshard(linear()),
    "set-reshard-type": lambda: sharded().set_reshard_after_forward(2),
    "divide-factor": lambda: sharded().set_gradient_divide_factor(0),
    "input-buffers-type": lambda: sharded().set_reduce_scatter_max_input_buffers(1.5),
    "input-buffers-value": lambda: sharded().set_reduce_scatter_max_input_buffers(0),
    "tuning-type": lambda: sharded().set_tuning(pack_below=1.5),
    "tuning-value": lambda: sharded().set_tuning(prefetch_window=0),
    "prefetch-type": lambda: after(lambda model: model.set_modules_to_forward_prefetch(model[0])),
    "prefetch-plain": lambda: sharded().set_modules_to_backward_prefetch([linear()]),
    "forward-method": lambda: fsdp2.register_fsdp_forward_method(sharded(), "generate"),
    "share-plain": lambda: fsdp2.share_comm_ctx([linear()]),
    "reduce-hook-type": lambda: sharded().set_all_reduce_hook("mean"),
    "reduce-hook-stream": lambda: sharded(mesh=full()).set_all_reduce_hook(print, stream=object()),
    "custom-allocation": lambda: after(
        lambda model: model.set_custom_all_gather(Gather(torch.float64))
    ),
    "memory-beside-custom": lambda: after(
        lambda model: (
            model.set_custom_all_gather(Gather())
            or model.set_allocate_memory_from_process_group_for_comm(True)
        )
    ),
    "custom-type": lambda: sharded().set_custom_all_gather(print),
    "several-meshes": lambda: on_two_meshes().set_custom_all_gather(Gather()),
    "symmetric-backend": lambda: sharded().set_symm_mem_for_comm("NVSHMEM"),
    "symmetric-needs-nccl": lambda: sharded().set_symm_mem_for_comm(),
    "torchs-state": lambda: sharded()._get_fsdp_state()._reset_iter_state(),
    "flat-optimizer-params": lambda: fsdp2.optim.FlatOptimizer(torch.optim.AdamW, sharded()),  # type: ignore[arg-type]
}
"""What must raise."""


# ---- at fully_shard: modules


@at_fully_shard("listed-twice")
def _() -> Any:
    layer = linear()
    return [layer, nn.ReLU(), layer], {}


@at_fully_shard("torchs-own")
def _() -> Any:
    model = nn.Sequential(linear(), linear())
    torchs.fully_shard(model[0], mesh=null_mesh(4))
    return model, {}


# ---- at fully_shard: arguments


@at_fully_shard("placement-mesh")
def _() -> Any:
    info = FSDPMeshInfo(full(), shard_mesh_dim=0, replicate_mesh_dim=1)
    return linear(), {"shard_placement_fn": lambda _: ShardPlacementResult(None, info)}


# ---- at fully_shard: parameters


@at_fully_shard("child-after-parent")
def _() -> Any:
    model = fully_shard(nn.Sequential(linear()))
    return model[0], {}


@at_fully_shard("owner-gone")
def _() -> Any:
    model = nn.Sequential(linear(), linear())
    model[1].weight = model[0].weight
    fully_shard(model.pop(0))
    return model, {}


@at_fully_shard("shared-memory")
def _() -> Any:
    model = nn.Sequential(linear(), linear())
    model[1].weight.data = model[0].weight.data
    return model, {}


@at_fully_shard("other-device-mesh")
def _() -> Any:
    mesh = full()
    layer = on(mesh["tp"], Replicate())
    layer.weight._spec.mesh._device_type = "cuda"
    return layer, {"mesh": mesh["dp"]}


@at_fully_shard("other-full-mesh")
def _() -> Any:
    mesh = full()
    arguments = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims("dp")}
    return nn.Sequential(on(mesh["tp"], Replicate())), arguments


@at_fully_shard("not-replicated")
def _() -> Any:
    mesh = full()
    arguments = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims("dp")}
    return on(mesh, Shard(0), Replicate()), arguments


# ---- at fully_shard: all-gather hooks


class NoPost(tensors.Aliased):
    fsdp_post_all_gather = property()  # type: ignore[assignment]  # as if it were not there


class NoTuple(tensors.Aliased):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return self._data


class TwoArguments(tensors.Aliased):
    def fsdp_pre_all_gather(self, mesh: Any, other: Any) -> Any:  # type: ignore[override]  # wrong
        return (self._data,), None


# ---- at the first forward


@misuse("list-has-no-root")
def _() -> None:
    members = [linear(), linear()]
    fully_shard(members)
    members[0](x())


@misuse("still-on-meta")
def _() -> None:
    with torch.device("meta"):
        model = linear()
    fully_shard(model)(x())


class _Elsewhere:
    """A local tensor on a device that this machine does not have."""

    device = torch.device("cuda", 0)
    is_meta = False


@misuse("moved-away")
def _() -> None:
    model = sharded()
    param = record_of(model).unit.own_groups[0].params[0]
    with mock.patch.object(type(param), "local", _Elsewhere()):
        model(x())


@misuse("moved-though-offloaded")
def _() -> None:
    with mock.patch("fsdp2.sharding.assembly._effective_offload", lambda policy, device: policy):
        model = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    param = record_of(model).unit.own_groups[0].params[0]
    with mock.patch.object(type(param), "local", _Elsewhere()):
        model(x())


@misuse("running-below")
def _() -> None:
    model = nn.Sequential(linear(), linear())
    fully_shard(model[0])
    fully_shard(model)
    model[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model[0](x())
    model(x())


@misuse("smaller-group-of-hooks")
def _() -> None:
    model = nn.Sequential(linear(), linear())
    fully_shard(model[0], reshard_after_forward=2)
    fully_shard(model)
    weight = model[0].weight
    weight._local_tensor = tensors.Aliased(
        weight._local_tensor
    )  # as quantisation after sharding does
    model(x())


@misuse("no-collectives")
def _() -> None:
    class Group:
        size = rank = staticmethod(lambda: 2)

    GroupCollectives(Group(), torch.device("cpu"), False)  # type: ignore[arg-type]  # a stand-in


# ---- what is registered after fully_shard


@misuse("tied-unregistered")
def _() -> None:
    model = pair()
    torch.func.functional_call(model, {"1.weight": model[0].weight}, (x(),))


@misuse("tied-to-another-model")
def _() -> None:
    model = pair()
    other = sharded()
    model[1].extra = other.weight
    model(x())


# ---- in forward


class Reads(nn.Module):
    """Reads the weight of another unit's module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.inner(x), self.head.weight)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.head.weight)


@misuse("used-outside")
def _() -> None:
    model = Reads()
    fully_shard(model.inner)
    fully_shard(model.head)
    fully_shard(model)(x())


@misuse("used-freed")
def _() -> None:
    model = ReadsKept(4)
    for part in model.children():
        fully_shard(part)
    fully_shard(model)(x())


@misuse("not-sharded-state")
def _() -> None:
    group = record_of(sharded()).unit.own_groups[0]
    group.state = GroupState.UNSHARDED
    group.adopt()


# ---- in backward


@misuse("reads-after-opting-out")
def _() -> None:
    model = nn.Sequential(linear(), linear(), linear())
    fully_shard(model[1])
    fully_shard(model)
    model[1].set_unshard_in_backward(False)
    model(x()).sum().backward()


@misuse("backward-twice")
def _() -> None:
    loss = pair()(x()).sum()
    loss.backward()
    loss.backward()


@misuse("plain-gradient")
def _() -> None:
    mesh = full()
    model = fully_shard(nn.Sequential(on(mesh["tp"], Replicate())), mesh=mesh["dp"])
    model.unshard()
    model[0].weight.grad = None
    param = record_of(model).unit.own_groups[0].params[0]
    param.localize(torch.zeros(8, 8))


# ---- between iterations


class Calls(nn.Module):
    """Calls something in its forward."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.call = linear(), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.call(self)
        return self.linear(x)


def _unawaited() -> tuple[Any, Any]:
    model = pair()
    model.set_manual_backward_finalization(True)
    model(x()).sum().backward()
    return model, model.finalize_backward(async_op=True)


@misuse("captured-in-moving-memory")
def _() -> None:
    model = pair()
    model.set_keep_unsharded_storage(True)
    model(x())
    scheduler = record_of(model).scheduler
    with mock.patch.object(scheduler.streams, "captures", return_value=True):
        with torch.no_grad():
            model(x())  # replayed, it makes no gradients
        model(x())


@misuse("handle-outlived")
def _() -> None:
    model, handle = _unawaited()
    model.reset_iter_state()
    handle.wait()


# ---- optimizers, norms


@misuse("stale-optimizer")
def _() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    model(x()).sum().backward()
    optimizer.step()


@misuse("optimizer-of-gathered")
def _() -> None:
    model = sharded()
    loss = model(x()).sum()  # a root stays gathered
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    optimizer.step()


@misuse("clip-gathered")
def _() -> None:
    model = sharded()
    model.unshard()
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)


@misuse("norm-nonfinite")
def _() -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.full((2,), float("nan"))
    fsdp2.clip_grad_norm_(param, 1.0, error_if_nonfinite=True)


@misuse("norm-foreach")
def _() -> None:
    param = nn.Parameter(torch.ones(2, device="meta"))
    param.grad = torch.ones(2, device="meta")
    fsdp2.clip_grad_norm_(param, 1.0, foreach=True)


@misuse("norm-not-on-mesh")
def _() -> None:
    others = [rank for rank in (1, 2) if rank != dist.get_rank()]
    mesh = DeviceMesh("cpu", others)
    tensor = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
    fsdp2.optim.get_total_norm([tensor])


@misuse("norm-partial")
def _() -> None:
    tensor = DTensor.from_local(torch.ones(2), null_mesh(4), [Partial()], run_check=False)
    fsdp2.optim.get_total_norm([tensor])


def _clip(param: torch.Tensor, grad: torch.Tensor) -> None:
    with mock.patch.object(nn.Parameter, "grad", grad):
        owner = nn.Parameter(param)
        with mock.patch.object(type(owner), "grad", grad, create=True):
            fsdp2.clip_grad_norm_(owner, 1.0)


@misuse("norm-gradient-placements")
def _() -> None:
    names = ("dp", f"of rank {dist.get_rank()}")  # torch caches meshes over worlds, by their names
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    param = nn.Parameter(
        DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Replicate()], run_check=False)
    )
    param.grad = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)], run_check=False)
    fsdp2.clip_grad_norm_(param, 1.0)


# ---- interop


@misuse("torchs-state-set")
def _() -> None:
    sharded()._get_fsdp_state()._fsdp_param_group.gradient_divide_factor = 2.0


@misuse("several-torch-groups")
def _() -> None:
    state: Any = on_two_meshes()._get_fsdp_state()
    assert len(state._fsdp_param_groups) == 2
    assert not state._fsdp_param_group


@misuse("newer-method")
def _() -> None:
    from fsdp2.interop.identity import _refusal

    with mock.patch.object(FSDPModule, "set_something_new", _refusal("x"), create=True):
        sharded().set_something_new(True)


@misuse("flat-optimizer-class")
def _() -> None:
    model = sharded()
    with errors.raises("flat-optimizer-class"):
        fsdp2.optim.FlatOptimizer(model, model.parameters())  # type: ignore[arg-type]
    with errors.raises("flat-optimizer-class"):
        fsdp2.optim.FlatOptimizer(model, "AdamW")  # type: ignore[arg-type]
    fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
