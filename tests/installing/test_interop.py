"""What clients of torch's own FSDP2 see of a module that fsdp2 has sharded."""

from __future__ import annotations

import subprocess
import sys
import weakref
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
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.interop import StateStandIn, TorchIdentity
from fsdp2.testing.null_group import init_null_group, null_mesh
from tests.common.errors import raises

pytestmark = pytest.mark.alone


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


def test_torchs_class_is_recognized() -> None:
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
    with raises("torchs-state"):
        model._get_fsdp_state()._reset_iter_state()


def test_torchs_look_up_finds_it() -> None:
    """VeOmni, TransformerEngine and others ask it whether a module is sharded."""
    model = _pair()
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    for module in (model, model[0]):
        state = _get_module_fsdp_state(module)
        assert state is module._get_fsdp_state()
        assert module in _module_state_mapping
    assert _get_module_fsdp_state(model[1]) is None
    reference = weakref.ref(model)
    del model, module, state
    assert reference() is None, "freed without the garbage collector"


def test_no_method_of_torchs_state_is_left() -> None:
    ours = vars(StateStandIn)
    for name in vars(torchs._fully_shard._fsdp_state.FSDPState):
        assert name in ours or name in StateStandIn._held or name.startswith("__"), name


def _policy_of(policy: Any) -> Any:
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    return [getattr(policy, name) for name in names]


ANSWERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "groups": lambda state, group, model: state._fsdp_param_groups == [group],
    "modules": lambda state, group, model: (state._modules == (model,), group.modules == (model,)),
    "policy": lambda state, group, model: _policy_of(state._mp_policy),
    "group's": lambda state, group, model: _policy_of(group.mp_policy),
    "device": lambda state, group, model: (state._device, group.device),
    "root": lambda state, group, model: (state._is_root, state._auto_reshard_after_forward),
    "states": lambda state, group, model: [x is state for x in state._state_ctx.all_states],
    "last": lambda state, group, model: state._state_ctx.is_last_backward,
    "forward": lambda state, group, model: state._state_ctx.iter_forward_root,
    "manual": lambda state, group, model: state._state_ctx.manual_backward_finalization,
    "training": lambda state, group, model: (state._training_state, group._training_state),
    "prefetch": lambda state, group, model: [*state._states_to_backward_prefetch],
    "mesh": lambda state, group, model: group.mesh_info,
    "size": lambda state, group, model: group.mesh_info.shard_mesh_size,
    "group": lambda state, group, model: group.mesh_info.shard_process_group,
    "name": lambda state, group, model: group._module_fqn,
    "leaves": lambda state, group, model: group.post_forward_mesh_info,
    "reshards": lambda state, group, model: group._reshard_after_forward,
    "smaller": lambda state, group, model: group._use_post_forward_mesh,
    "where": lambda state, group, model: (group._sharded_state, group.is_unsharded),
    "sharded": lambda state, group, model: (group.is_sharded, group.is_sharded_post_forward),
    "after": lambda state, group, model: (group.reshard_after_backward, group.unshard_in_backward),
    "sync": lambda state, group, model: (group.reduce_grads, group.all_reduce_grads),
    "factor": lambda state, group, model: group.gradient_divide_factor,
    "unused": lambda state, group, model: group.reduce_scatter_unused_params,
    "sum": lambda state, group, model: group.force_sum_reduction_for_comms,
    "hsdp": lambda state, group, model: group._is_hsdp,
    "gathers": lambda state, group, model: group._all_gather_process_group,
    "reduces": lambda state, group, model: group._reduce_scatter_process_group,
    "fqn": lambda state, group, model: [p._param_fqn for p in group.fsdp_params],
    "orig": lambda state, group, model: [p._orig_size for p in group.fsdp_params],
    "local": lambda state, group, model: [p.sharded_size for p in group.fsdp_params],
    "dtype": lambda state, group, model: [p.orig_dtype for p in group.fsdp_params],
    "compute": lambda state, group, model: [p.param_dtype for p in group.fsdp_params],
    "reduce": lambda state, group, model: [p.reduce_dtype for p in group.fsdp_params],
    "placed": lambda state, group, model: [p.fsdp_placement for p in group.fsdp_params],
    "parallel": lambda state, group, model: [p.is_dtensor for p in group.fsdp_params],
    "offload": lambda state, group, model: [p.offload_to_cpu for p in group.fsdp_params],
    "state": lambda state, group, model: [p.sharded_state for p in group.fsdp_params],
    "param": lambda state, group, model: [
        p.sharded_param.placements for p in group.fsdp_params if p.sharded_param.grad is None
    ],
    "whole": lambda state, group, model: [p.unsharded_param.shape for p in group.fsdp_params],
    "one mesh": lambda state, group, model: all(
        p.mesh_info is group.mesh_info for p in group.fsdp_params
    ),
}
"""What clients read of torch's state, its groups and their parameters; docs/compat.md has them."""

NOT_IN_EVERY_TORCH = {"groups", "group's", "manual", "unused", "sum", "dtype", "placed"}


@pytest.mark.parametrize("reshard", [None, True])
def test_stand_ins_answer_as_torchs_objects_do(reshard: bool | None) -> None:
    found = []
    for shard in (torchs.fully_shard, fsdp2.fully_shard):
        torch.manual_seed(0)
        policy = torchs.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        shard(model, mp_policy=policy, reshard_after_forward=reshard)
        model(torch.ones(2, 4))
        state = model._get_fsdp_state()
        found.append((state, state._fsdp_param_group, model))
    for name, read in ANSWERS.items():
        try:
            theirs = read(*found[0])
        except AttributeError:
            assert name in NOT_IN_EVERY_TORCH, name
        else:
            assert read(*found[1]) == theirs, name


def test_a_plain_module_has_no_group() -> None:
    model = _pair()
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    state: Any = model._get_fsdp_state()
    assert state._fsdp_param_group is None
    assert state._fsdp_param_groups == []


def _set_as_verl(module: Any, value: bool) -> None:
    """The calls of verl's `set_reshard_after_forward` (verl/utils/fsdp_utils.py)."""
    for below in module.modules():
        if isinstance(below, torchs.FSDPModule):
            state: Any = below._get_fsdp_state()
            state._auto_reshard_after_forward = False
            if group := state._fsdp_param_group:
                group.post_forward_mesh_info = _get_post_forward_mesh_info(value, group.mesh_info)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("value", [True, False])
def test_a_root_that_is_to_reshard_by_way_of_torchs_state(value: bool, when: str) -> None:
    model: Any = _pair()
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    if when == "after":
        model(torch.ones(2, 4)).sum().backward()
    _set_as_verl(model, value)
    model(torch.ones(2, 4))
    for module, group in zip((model, model[0]), fsdp2.report(model).groups, strict=True):
        assert group.reshard_after_forward is value
        assert module._get_fsdp_state()._fsdp_param_group.is_sharded is value
    assert isinstance(model[1].weight, DTensor) is value


def test_what_was_saved_is_put_back() -> None:
    """As a client does around generation: flags off, generate, and what was there again."""
    model: Any = _pair()
    fsdp2.fully_shard(model[0], reshard_after_forward=True)
    fsdp2.fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    saved = []
    for module in (model, model[0]):
        state = module._get_fsdp_state()
        group = state._fsdp_param_group
        saved.append((state, state._auto_reshard_after_forward, group.post_forward_mesh_info))
        module.set_reshard_after_forward(False, recurse=False)
    for state, automatic, info in saved:
        state._auto_reshard_after_forward = automatic
        state._fsdp_param_group.post_forward_mesh_info = info
    assert [group.reshard_after_forward for group in fsdp2.report(model).groups] == [False, True]


def test_idle_may_be_said_of_what_is_idle() -> None:
    """VeOmni does before it moves a model to the CPU."""
    model: Any = fsdp2.fully_shard(_pair())
    idle = torchs._fully_shard._fsdp_common.TrainingState.IDLE
    model(torch.ones(2, 4))
    model._get_fsdp_state()._fsdp_param_group._training_state = idle
    model.reshard()

    def during(*_: Any) -> None:
        with raises("torchs-state-set"):
            model._get_fsdp_state()._training_state = idle

    model[0].register_forward_hook(during)
    model(torch.ones(2, 4))


def test_lazy_init_makes_a_root() -> None:
    """Called before units are gathered one by one, so that none of them becomes a root."""
    model: Any = _pair()
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    assert model._get_fsdp_state()._is_root is None
    model._get_fsdp_state()._lazy_init()
    model[0].unshard()
    assert model._get_fsdp_state()._is_root is True
    assert model[0]._get_fsdp_state()._is_root is False
    model(torch.ones(2, 4)).sum().backward()


def test_gradients_that_wait_are_reduced_by_a_groups_post_backward() -> None:
    model: Any = _pair()
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is None
    model.set_requires_gradient_sync(True)
    for state in model._get_fsdp_state()._state_ctx.all_states:
        state._fsdp_param_group.post_backward()
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())
    model._get_fsdp_state()._root_post_backward_final_callback()
    model(torch.ones(2, 4)).sum().backward()


def test_calls_that_change_nothing() -> None:
    model: Any = fsdp2.fully_shard(_pair())
    group = model._get_fsdp_state()._fsdp_param_group
    group.lazy_init()
    group._init_mp_dtypes()
    group.unshard_async_op = False
    assert group.unshard_async_op
    model(torch.ones(2, 4)).sum().backward()


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


def test_torchs_setters_on_a_parent_reach_our_unit() -> None:
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
    # NeMo takes the first class that torch's is no base of for the model's own.
    others = [cls for cls in type(model).__mro__ if not issubclass(cls, torchs.FSDPModule)]
    assert others[0] is Model
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
