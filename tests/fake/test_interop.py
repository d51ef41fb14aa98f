"""What clients of torch's own FSDP2 see of a module that fsdp2 has sharded."""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp2
from benchmarks.null_group import init_null_group, null_mesh
from fsdp2.interop import TorchIdentity


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    init_null_group(2)
    yield null_mesh(2)
    dist.destroy_process_group()


def _pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _methods(cls: type) -> dict[str, Any]:
    return {n: v for n, v in vars(cls).items() if callable(v) and not n.startswith("__")}


# -- identity -------------------------------------------------------------------------------------


def test_torchs_class_is_recognised() -> None:
    model = fsdp2.fully_shard(_pair())
    assert isinstance(model, torchs.FSDPModule)
    assert not isinstance(model[0], torchs.FSDPModule)
    assert not torchs.FullyShardedDataParallel.fsdp_modules(model)  # the older one, FSDP1


def test_no_method_of_torchs_class_is_left() -> None:
    """Nor one that has no counterpart here, on the installed version."""
    refusals = _methods(TorchIdentity)
    for name, method in _methods(torchs.FSDPModule).items():
        found = getattr(fsdp2.FSDPModule, name)
        assert found is not method, f"{name} is torch's"
        assert name.startswith("_") or found is not refusals.get(name), f"{name} only raises"
    assert fsdp2.FSDPModule.__new__ is not torchs.FSDPModule.__new__


def test_a_method_that_only_torch_has_is_refused() -> None:
    source = """if True:
        import torch.distributed.fsdp as torchs
        torchs.FSDPModule.set_something_new = lambda self: print("torch's ran")
        import fsdp2
        try:
            fsdp2.FSDPModule.set_something_new(object())
        except NotImplementedError as error:
            assert "set_something_new()" in str(error), error
        else:
            raise SystemExit("not refused")
    """
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)


def test_slices_are_plain() -> None:
    assert type(fsdp2.fully_shard(_pair())[:1]) is nn.Sequential


# -- state ----------------------------------------------------------------------------------------


def test_state_is_found() -> None:
    model = _pair()
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    states = [model._get_fsdp_state(), model[0]._get_fsdp_state()]
    assert torchs.fully_shard.state(model) is states[0] is not states[1]
    assert states[0]._comm_ctx is not states[1]._comm_ctx
    torchs.share_comm_ctx([model, model[0]])
    assert states[0]._comm_ctx is states[1]._comm_ctx


def test_members_of_a_list_share_a_state() -> None:
    model = _pair()
    fsdp2.fully_shard([model[0], model[1]])
    assert model[0]._get_fsdp_state() is model[1]._get_fsdp_state()


def test_what_the_state_does_not_have_is_named() -> None:
    model = fsdp2.fully_shard(_pair())
    with pytest.raises(AttributeError, match="sharded by fsdp2, which has no '_lazy_init'"):
        model._get_fsdp_state()._lazy_init()


def test_private_setter_changes_nothing() -> None:
    model = fsdp2.fully_shard(_pair())
    model._set_unshard_async_op(True)
    model(torch.ones(2, 4)).sum().backward()
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())


def test_torchs_register_fsdp_forward_method() -> None:
    class Embedder(nn.Linear):
        def embed(self, x: torch.Tensor) -> torch.Tensor:
            assert not isinstance(self.weight, DTensor)
            return self.forward(x)

    model = fsdp2.fully_shard(Embedder(4, 4), reshard_after_forward=True)
    torchs.register_fsdp_forward_method(model, "embed")
    model.embed(torch.ones(2, 4)).sum().backward()
    assert isinstance(model.weight, DTensor)
    assert isinstance(model.weight.grad, DTensor)


def test_torchs_setters_on_a_parent_pass_by() -> None:
    model = _pair()
    fsdp2.fully_shard(model[0], mesh=null_mesh(2))
    torchs.fully_shard(model, mesh=null_mesh(2))
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None


# -- one implementation a module ------------------------------------------------------------------


@pytest.mark.parametrize(
    "apply",
    [torchs.fully_shard, replicate, replicate_with_fsdp],
    ids=["fully_shard", "replicate", "replicate_with_fsdp"],
)
def test_torch_refuses_a_sharded_module(apply: Callable[..., Any], mesh: DeviceMesh) -> None:
    model = fsdp2.fully_shard(_pair())
    with pytest.raises((AssertionError, RuntimeError), match="already"):
        apply(model, mesh=mesh) if apply is not replicate else apply(model)


@pytest.mark.parametrize("apply", [torchs.fully_shard, replicate_with_fsdp])
def test_torch_leaves_out_a_sharded_child(apply: Callable[..., Any], mesh: DeviceMesh) -> None:
    model = _pair()
    fsdp2.fully_shard(model[0], mesh=mesh)
    ours = list(model[0].parameters())
    apply(model, mesh=mesh)
    assert [id(param) for param in model[0].parameters()] == [id(param) for param in ours]
    model(torch.ones(2, 4)).sum().backward()
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())


@pytest.mark.parametrize(
    ("name", "below"), [("fully_shard", False), ("fully_shard", True), ("replicate", False)]
)
def test_we_refuse_what_torch_has(name: str, below: bool, mesh: DeviceMesh) -> None:
    model = _pair()
    target = model[0] if below else model
    if name == "fully_shard":
        torchs.fully_shard(target, mesh=mesh)
    else:
        replicate(target)
    before = {key: type(param) for key, param in model.named_parameters()}
    with pytest.raises(ValueError, match=rf"torch's {name}\(\) was already applied to '"):
        fsdp2.fully_shard(model, mesh=mesh)
    assert {key: type(param) for key, param in model.named_parameters()} == before


@pytest.mark.parametrize("apply", [replicate, replicate_with_fsdp])
def test_we_leave_out_a_replicated_child(apply: Callable[..., Any], mesh: DeviceMesh) -> None:
    """As torch's fully_shard does; its own hooks reduce its gradients."""
    model = _pair()
    apply(model[0], mesh=mesh) if apply is not replicate else apply(model[0])
    theirs = list(model[0].parameters())
    fsdp2.fully_shard(model, mesh=mesh)
    assert [id(param) for param in model[0].parameters()] == [id(param) for param in theirs]
    assert all(isinstance(param, DTensor) for param in model[1].parameters())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
        model.zero_grad()


def test_a_replicated_module_that_is_added_is_left_out(mesh: DeviceMesh) -> None:
    model = fsdp2.fully_shard(_pair(), mesh=mesh)
    added = nn.Linear(4, 4)
    replicate(added)
    model.append(added)
    model.shard_new_parameters()
    assert not any(isinstance(param, DTensor) for param in added.parameters())
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


# -- classes of users -----------------------------------------------------------------------------


def test_models_with_a_metaclass(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's models are abstract base classes; it gives torch's module such a class for a while."""

    class Abstract(nn.Linear, ABC):
        @abstractmethod
        def act(self) -> None: ...

    class Model(Abstract):
        def act(self) -> None: ...

    class FSDPModuleABC(ABC, torchs.FSDPModule): ...

    monkeypatch.setattr(torchs._fully_shard._fully_shard, "FSDPModule", FSDPModuleABC)
    model = fsdp2.fully_shard(Model(4, 4))
    assert isinstance(model, (Abstract, fsdp2.FSDPModule))
    assert isinstance(model, torchs.FSDPModule)
    assert [cls.__name__ for cls in type(model).__mro__[:2]] == ["FSDPModel", "FSDPModule"]
    assert type(model).__bases__ == (fsdp2.FSDPModule, Model)
    model(torch.ones(2, 4)).sum().backward()
    assert isinstance(model.weight.grad, DTensor)


# -- others ---------------------------------------------------------------------------------------


def test_state_dict_of_checkpoints() -> None:
    model = _pair()
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    model(torch.ones(2, 4))
    state = get_model_state_dict(model)
    assert {key: type(value) for key, value in state.items()} == dict.fromkeys(state, DTensor)
    assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_apply_reaches_the_modules_own() -> None:
    class Counting(nn.Linear):
        applied = 0

        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            self.applied += 1
            return super()._apply(*args, **kwargs)

    model = fsdp2.fully_shard(Counting(4, 4))
    assert model.to(torch.float64) is model
    assert model.applied == 1
    assert model.weight.dtype == torch.float64
