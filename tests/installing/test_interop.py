"""What clients of torch's own FSDP2 see of a module that fsdp2 has sharded."""

from __future__ import annotations

import runpy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
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
from fsdp2.interop import StateStandIn, TorchIdentity, identity
from fsdp2.testing.null_group import init_null_group, null_mesh
from tests.common.errors import raises

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    init_null_group(4)
    yield null_mesh(4)
    dist.destroy_process_group()


def _pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _nested() -> Any:
    """A unit in a unit."""
    model = _pair()
    fsdp2.fully_shard(model[0])
    return fsdp2.fully_shard(model)


# -- identity -------------------------------------------------------------------------------------


def test_torchs_class_is_recognized() -> None:
    model = fsdp2.fully_shard(_pair())
    assert isinstance(model, torchs.FSDPModule)
    assert not isinstance(model[0], torchs.FSDPModule)
    assert type(model[:1]) is nn.Sequential
    assert not torchs.FullyShardedDataParallel.fsdp_modules(model)  # the older one, FSDP1


def test_no_method_of_torchs_class_is_left() -> None:
    """Dunder methods included; nor one that has no counterpart here, on the installed version."""
    mro = type(fsdp2.fully_shard(_pair())).__mro__
    torchs_class, refusals = mro.index(torchs.FSDPModule), vars(TorchIdentity)
    for name, value in vars(torchs.FSDPModule).items():
        if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
            owner = next(i for i, cls in enumerate(mro) if name in vars(cls))
            assert owner < torchs_class, f"{name} is inherited from torch's FSDPModule"
            found = vars(mro[owner])[name]
            assert name.startswith("_") or found is not refusals.get(name), f"{name} only raises"


def test_a_method_that_only_torch_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchs.FSDPModule, "set_something_new", print, raising=False)
    again = runpy.run_path(str(identity.__file__))  # as if fsdp2 were imported only now
    with raises("newer-method") as caught:
        again["TorchIdentity"].set_something_new(object())
    assert "set_something_new()" in str(caught.value)


# -- state ----------------------------------------------------------------------------------------


def test_state_is_found() -> None:
    model = _nested()
    states = [model._get_fsdp_state(), model[0]._get_fsdp_state()]
    assert torchs.fully_shard.state(model) is states[0] is not states[1]
    assert states[0]._comm_ctx is not states[1]._comm_ctx
    torchs.share_comm_ctx([model, model[0]])
    assert states[0]._comm_ctx is states[1]._comm_ctx
    with raises("torchs-state"):
        states[0]._reset_iter_state()
    listed = _pair()
    fsdp2.fully_shard([listed[0], listed[1]])
    assert listed[0]._get_fsdp_state() is listed[1]._get_fsdp_state()


def test_torchs_look_up_finds_it() -> None:
    """VeOmni, TransformerEngine and others ask it whether a module is sharded."""
    model = _nested()
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


def _ranks_of(info: Any) -> Any:
    """Ours has names for the dims of a smaller group's mesh."""
    return info and (type(info), info.mesh.mesh.tolist(), info.shard_mesh_size)


OF_STATE = (
    *("_device", "_is_root", "_auto_reshard_after_forward", "_training_state"),
    *("_state_ctx.is_last_backward", "_state_ctx.iter_forward_root"),
    "_state_ctx.manual_backward_finalization",
)
OF_GROUP = (
    *("device", "_training_state", "mesh_info", "mesh_info.shard_mesh_size", "_module_fqn"),
    *("mesh_info.shard_process_group", "_reshard_after_forward"),
    *("_use_post_forward_mesh", "_sharded_state", "is_unsharded", "is_sharded"),
    *("is_sharded_post_forward", "reshard_after_backward", "unshard_in_backward"),
    *("reduce_grads", "all_reduce_grads", "gradient_divide_factor", "_is_hsdp"),
    *("reduce_scatter_unused_params", "force_sum_reduction_for_comms"),
    "_reduce_scatter_process_group",
)
OF_PARAM = (
    *("_param_fqn", "_orig_size", "sharded_size", "orig_dtype", "param_dtype", "reduce_dtype"),
    *("fsdp_placement", "is_dtensor", "offload_to_cpu", "sharded_state"),
    *("sharded_param.placements", "sharded_param.grad", "unsharded_param.shape"),
)
OTHERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "groups": lambda state, group, model: state._fsdp_param_groups == [group],
    "modules": lambda state, group, model: (state._modules == (model,), group.modules == (model,)),
    "policy": lambda state, group, model: _policy_of(state._mp_policy),
    "group's": lambda state, group, model: _policy_of(group.mp_policy),
    "states": lambda state, group, model: [x is state for x in state._state_ctx.all_states],
    "prefetch": lambda state, group, model: [*state._states_to_backward_prefetch],
    "after forward": lambda state, group, model: _ranks_of(group.post_forward_mesh_info),
    "gathers over": lambda state, group, model: dist.get_process_group_ranks(
        group._all_gather_process_group
    ),
    "one mesh": lambda state, group, model: [
        p.mesh_info is group.mesh_info for p in group.fsdp_params
    ],
}
"""What clients read of torch's state, its groups and their parameters; docs/compat.md has them."""

NOT_IN_EVERY_TORCH = {
    *("groups", "group's", "param_dtype", "fsdp_placement", "reduce_scatter_unused_params"),
    *("force_sum_reduction_for_comms", "_state_ctx.manual_backward_finalization"),
}


def _answers(state: Any, group: Any, model: Any) -> dict[str, Callable[[], Any]]:
    found = {name: partial(read, state, group, model) for name, read in OTHERS.items()}
    found |= {f"state {name}": partial(attrgetter(name), state) for name in OF_STATE}
    found |= {f"group {name}": partial(attrgetter(name), group) for name in OF_GROUP}
    return found | {
        f"param {at} {name}": partial(attrgetter(name), param)
        for at, param in enumerate(group.fsdp_params)
        for name in OF_PARAM
    }


@pytest.mark.parametrize("reshard", [None, True, 2])
def test_stand_ins_answer_as_torchs_objects_do(reshard: bool | int | None) -> None:
    theirs, ours = [], []
    for shard, found in ((torchs.fully_shard, theirs), (fsdp2.fully_shard, ours)):
        torch.manual_seed(0)
        policy = torchs.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        shard(model, mp_policy=policy, reshard_after_forward=reshard)
        model(torch.ones(2, 4))
        state = model._get_fsdp_state()
        found += [state, state._fsdp_param_group, model]
    expected, answers = _answers(*theirs), _answers(*ours)
    assert expected.keys() == answers.keys()
    for name, read in expected.items():
        try:
            wanted = read()
        except AttributeError:
            assert name in NOT_IN_EVERY_TORCH or name.split()[-1] in NOT_IN_EVERY_TORCH, name
        else:
            assert answers[name]() == wanted, name


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
    model = _nested()
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
    group = model._get_fsdp_state()._fsdp_param_group
    group._training_state = idle
    with raises("torchs-state-set"):
        group.device = torch.device("cpu")
    model.reshard()

    def during(*_: Any) -> None:
        with raises("torchs-state-set"):
            model._get_fsdp_state()._training_state = idle

    model[0].register_forward_hook(during)
    model(torch.ones(2, 4))


def test_lazy_init_makes_a_root() -> None:
    """Called before units are gathered one by one, so that none of them becomes a root."""
    model = _nested()
    assert model._get_fsdp_state()._is_root is None
    model._get_fsdp_state()._lazy_init()
    model[0].unshard()
    assert model._get_fsdp_state()._is_root is True
    assert model[0]._get_fsdp_state()._is_root is False
    model(torch.ones(2, 4)).sum().backward()


def test_gradients_that_wait_are_reduced_by_a_groups_post_backward() -> None:
    model = _nested()
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
    model = _nested()
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
