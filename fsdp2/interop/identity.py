"""How clients of torch's FSDP2 recognize a module that fsdp2 sharded, and the state they can read.

    pipelining and others ask for                      and find
    isinstance(m, torch.distributed.fsdp.FSDPModule)   TorchIdentity, a base of our FSDPModule
    m._get_fsdp_state(), fully_shard.state(m),         StateStandIn: what torch's state has, read
    _get_module_fsdp_state(m)                          from ours, or refused by name
    m in the registry of composable APIs               entries: torch's fully_shard(), replicate()
                                                       refuse m, and leave it out below a parent
    isinstance(policy, torch's or our class)           ours are subclasses of torch's, and recognize
                                                       torch's objects; both functions take both

This module imports torch's FSDP, as `wrapped` does, only for its classes: fsdp2's modules override
every method of torch's class. A method that a newer torch adds and fsdp2 lacks raises an error.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed.fsdp as fsdp
import torch.distributed.fsdp._fully_shard._fsdp_common as _common
import torch.distributed.fsdp._fully_shard._fsdp_param as _param
import torch.distributed.fsdp._fully_shard._fsdp_state as _fsdp_state
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import Shard

from fsdp2.core import config
from fsdp2.core.errors import coded
from fsdp2.core.modules.hooks import UnitHooks
from fsdp2.core.modules.registry import UnitRecord, modules_below, record_of, start
from fsdp2.core.params.param import ShardedParam, compute_dtype
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.states import GroupState
from fsdp2.core.schedule.unit import Phase, Unit

_state: Any = _fsdp_state
TORCHS: Any = fsdp.FSDPModule
"""torch's class: ``super(TORCHS, self)`` is the class after it, the original class."""

TORCHS_NAMES: dict[str, object] = {name: getattr(fsdp, name) for name in fsdp._fully_shard.__all__}
"""torch's FSDP2 exports, by name, at the import of fsdp2."""

_API: object = getattr(fsdp.fully_shard, "__wrapped__", fsdp.fully_shard)  # the key of its states


def _of(
    read: str | Callable[[Any], object], write: bool | Callable[[Any, Any], None] = False
) -> Any:
    """A property of a stand-in: a path below it or a function of it; writable, or by a function."""
    if callable(read):
        return property(read, write if callable(write) else None)
    owner, _, name = read.rpartition(".")

    def put(self: object, value: object) -> None:
        setattr(operator.attrgetter(owner)(self), name, value)

    return property(operator.attrgetter(read), put if write else None)


class _StandIn:
    """Represents an object of torch's FSDP: computes supported attributes, and raises for the rest.

    Attributes that may be set are properties with a setter. Any other write raises, too: torch
    would act on it, and a client would assume that fsdp2 did.
    """

    _stands_for = ""
    _held: frozenset[str] = frozenset()  # the values in its own attributes
    _title = _of(lambda self: "the model")  # the sharded object, for messages

    def __getattr__(self, name: str) -> NoReturn:
        raise coded(
            AttributeError,
            "torchs-state",
            f"'{self._title}' is sharded by fsdp2, which has no '{name}' of torch's "
            f"{self._stands_for}; use the public methods of fsdp2.FSDPModule",
        )

    def __setattr__(self, name: str, value: object) -> None:
        known = getattr(type(self), name, None)
        if name not in self._held and not (isinstance(known, property) and known.fset is not None):
            raise self._wrong(name, value)
        super().__setattr__(name, value)

    def _wrong(self, name: str, value: object) -> AttributeError:
        return coded(
            AttributeError,
            "torchs-state-set",
            f"'{self._title}' is sharded by fsdp2, where '{name}' of torch's {self._stands_for} "
            f"cannot be set to {value!r}; use the public methods of fsdp2.FSDPModule",
        )


class ParamStandIn(_StandIn):
    """Represents torch's ``FSDPParam``: a parameter, read only."""

    _stands_for = "FSDPParam"
    _held = frozenset({"_group", "_param"})

    def __init__(self, group: GroupStandIn, param: ShardedParam) -> None:
        self._group = group
        self._param = param

    def _init_extensions(self) -> None:
        """Let the group look for all-gather hooks."""
        self._group._group.rebind()

    def _unsharded(self) -> nn.Parameter:
        if self._param.unsharded is None:  # while it is not gathered
            self.__getattr__("unsharded_param")
        assert self._param.unsharded is not None
        return self._param.unsharded

    def _places(self) -> object:
        (module, name), *shared = self._param.entries
        modules, names = [member for member, _ in shared], [other for _, other in shared]
        return _param.ParamModuleInfo(module, name, modules, names)

    def _computed_in(self) -> torch.dtype | None:
        chosen = compute_dtype(self._group._group.options, self._param)
        return None if chosen == self._param.dtype else chosen

    def _seen_size(self) -> torch.Size:
        return self._param.as_seen(torch.empty(self._param.shape, device="meta")).shape

    _title = _param_fqn = _of("_param.name")
    sharded_param = _of("_param.sharded")
    unsharded_param = _of(_unsharded)
    _module_info = _of(_places)  # the entries in which it is registered, and those tied to it
    _sharded_local_tensor = _of("_param.local")  # clients put all-gather hooks on it
    _orig_size = _of(_seen_size)
    sharded_size = _of(lambda self: self._param.local.size())
    orig_dtype = _of("_param.dtype")
    param_dtype = _of(_computed_in)
    reduce_dtype = _of("_group.mp_policy.reduce_dtype")
    fsdp_placement = _of(lambda self: Shard(self._param.cut.dim))
    is_dtensor = _of(lambda self: self._param.parallel is not None)
    mesh_info = _of("_group.mesh_info")
    post_forward_mesh_info = _of("_group.post_forward_mesh_info")
    sharded_state = _of("_group._sharded_state")
    offload_to_cpu = _of(lambda self: self._group._group.offload is not None)
    pin_memory = _of(lambda self: getattr(self._group._group.offload, "pin_memory", False))


class GroupStandIn(_StandIn):
    """Represents torch's ``FSDPParamGroup``: parameters of a unit that share a mesh."""

    _stands_for = "FSDPParamGroup"
    _held = frozenset({"_group", "_state", "_mesh_info", "comm_ctx"})

    def __init__(self, state: StateStandIn, group: ParamGroup) -> None:
        self._group = group
        # It owns this one.
        self._state: StateStandIn = weakref.proxy(state)  # type: ignore[assignment]  # for all uses
        self._mesh_info: object = None
        self.comm_ctx = state._comm_ctx

    # ---- what may be called

    def lazy_init(self) -> None:
        """Nothing to do: a group binds at its first use."""

    def _init_mp_dtypes(self) -> None:
        """Nothing to do: a group follows dtypes and ``requires_grad`` itself."""

    def post_backward(self, *unused: object) -> None:
        """Reduce waiting gradients and free, by the unit's flags; for other schedules."""
        record = self._record
        if record.scheduler is not None:
            record.scheduler.finalize_unit(record.unit)

    # ---- what may be read

    def _mesh(self) -> object:
        if self._mesh_info is None:
            axes = self._group.params[0].axes
            if axes.levels:  # torch knows no such kind: the dim that is gathered over
                self._mesh_info = _common.FSDPMeshInfo(axes.mesh, shard_mesh_dim=1)
            elif axes.replicas is None:
                self._mesh_info = _common.FSDPMeshInfo(axes.mesh, shard_mesh_dim=0)
            elif axes.group is None:
                self._mesh_info = _common.DDPMeshInfo(axes.mesh, replicate_mesh_dim=0)
            else:
                self._mesh_info = _common.HSDPMeshInfo(axes.mesh, 1, 0)
        return self._mesh_info

    def _state_of_shards(self) -> object:
        states = _param.ShardedState
        if self._group.is_unsharded:
            return states.UNSHARDED
        between = self._group.state is GroupState.RESHARDED
        return states.SHARDED_POST_FORWARD if between else states.SHARDED

    def _gathered_over(self) -> object:
        """The ranks of the next all-gather: those of the smaller group after a forward."""
        smaller = self._group.smaller_group if self.is_sharded_post_forward else None
        return (self._group if smaller is None else smaller).collectives.group

    def _mesh_between(self) -> object:
        """The mesh on which forward leaves the parameters: ``None`` if it keeps them unsharded."""
        if not self._record.unit.frees_after_forward:
            return None
        smaller = self._group.smaller_group
        return self.mesh_info if smaller is None else _common.HSDPMeshInfo(smaller.mesh, 1, 0)

    def _choose_mesh_between(self, value: object) -> None:
        size = getattr(value, "shard_mesh_size", None)
        module: Any = self._record.modules[0]  # an `FSDPModule`, which stands on this room
        if value is None or size == self._group.collectives.size:
            module._choose_reshard(value is not None)
        elif isinstance(size, int):
            module._choose_reshard(size)
        else:
            raise self._wrong("post_forward_mesh_info", value)

    def _choose_reduction(self, value: bool) -> None:
        self._record.unit.sync = value
        if not value:
            self._group.accumulate()

    _title = _of(lambda self: self._group.name or "(root)")
    _record = _of("_state._record")
    fsdp_params = _of(lambda self: [ParamStandIn(self, param) for param in self._group.params])
    modules = _of("_record.modules")
    device = _of("_group.device")
    mp_policy = _of("_record.unit.options.precision")
    offload_policy = _of(lambda self: self._record.arguments.offload or OffloadPolicy())
    _module_fqn = _of(  # known from the first forward on
        lambda self: None if self._record.scheduler is None else self._record.unit.name
    )
    mesh_info = _of(_mesh)
    _is_hsdp = _of(lambda self: self._group.replicas is not None)
    _all_gather_process_group = _of(_gathered_over)
    _reduce_scatter_process_group = _of("_group.reducers.group")
    _all_reduce_process_group = _of(lambda self: getattr(self._group.replicas, "group", None))
    _training_state = _of("_state._training_state", write=True)
    _sharded_state = _of(_state_of_shards)
    is_sharded = _of(lambda self: self._sharded_state is _param.ShardedState.SHARDED)
    is_sharded_post_forward = _of(
        lambda self: self._sharded_state is _param.ShardedState.SHARDED_POST_FORWARD
    )
    is_unsharded = _of("_group.is_unsharded")
    post_forward_mesh_info = _of(_mesh_between, write=_choose_mesh_between)
    _reshard_after_forward = _of("_record.unit.frees_after_forward")
    _use_post_forward_mesh = _of(
        lambda self: self._reshard_after_forward and self._group.smaller_group is not None
    )
    reshard_after_backward = _of("_record.unit.reshard_after_backward", write=True)
    unshard_in_backward = _of("_record.unit.unshard_in_backward", write=True)
    reduce_grads = _of(lambda self: self._record.unit.sync, write=_choose_reduction)
    all_reduce_grads = _of("_record.unit.all_reduce", write=True)
    gradient_divide_factor = _of("_group.options.divide_factor")
    reduce_scatter_unused_params = _of("_group.options.reduce_unused")
    force_sum_reduction_for_comms = _of("_group.options.sum_only")
    # All-gathers are always issued ahead; nothing else may be chosen.
    unshard_async_op = _of(lambda self: True, write=lambda self, value: None)


class CommContext(_StandIn):
    """Represents torch's ``FSDPCommContext``: several roots that share streams have one."""

    _stands_for = "FSDPCommContext"


class StateStandIn(_StandIn, _state.FSDPState):  # typed as Any
    """Represents the state of a sharded module for torch's clients.

    It is an ``FSDPState``, so that torch's ``_get_module_fsdp_state`` finds it. It inherits no
    behavior: none of torch's ``__init__`` runs, and its methods raise.

    Up to torch 2.13, `torch.distributed.pipelining` ends a schedule by calling ``post_backward`` of
    every parameter group below the root and then the root's final callback. Newer versions call
    ``finalize_backward`` of the module, and compare ``_comm_ctx``. torch's
    ``register_fsdp_forward_method`` calls ``_pre_forward`` and ``_post_forward``.

    A torch root above an fsdp2 module records that it is its root. From then on it finds no
    parameter groups here, which it would otherwise drive.
    """

    _stands_for = "FSDP state"
    _held = frozenset(
        ("_record", "_pre_forward", "_post_forward", "_comm_ctx", "_adopted_by", "_groups")
    )

    _record: UnitRecord
    _comm_ctx: object  # torch's share_comm_ctx gives several roots the same
    _adopted_by: object
    _groups: dict[ParamGroup, GroupStandIn]

    def __init__(self, record: UnitHooks) -> None:
        # At once, past `__setattr__`, which every call of fully_shard would run six times.
        self.__dict__.update(
            _record=record,
            _pre_forward=record.pre_forward,
            _post_forward=record.post_forward,
            _comm_ctx=CommContext(),
            _adopted_by=None,
            _groups={},
        )

    # ---- what may be called

    def _lazy_init(self) -> None:
        """Make the module the root of the units below it, as its first forward would."""
        if self._record.scheduler is None:
            start(self._record)

    def _root_post_backward_final_callback(self) -> None:
        scheduler = self._record.scheduler
        if scheduler is not None:
            scheduler.finalize(wait=True)

    # ---- what may be read

    def _stand_ins_of_groups(self) -> list[GroupStandIn]:
        if self._adopted_by is not None:
            return []
        groups = self._record.unit.own_groups
        self._groups = {g: self._groups.get(g) or GroupStandIn(self, g) for g in groups}
        return list(self._groups.values())

    def _only_group(self) -> GroupStandIn | None:
        groups = self._stand_ins_of_groups()
        if len(groups) > 1:
            raise coded(
                ValueError,
                "several-torch-groups",
                f"'{self._title}' has parameters on several meshes, so it has no single "
                f"_fsdp_param_group; use _fsdp_param_groups ({len(groups)} groups)",
            )
        return groups[0] if groups else None

    def _root(self) -> bool | None:
        """``None`` until the first forward."""
        if self._adopted_by is not None:
            return False
        return None if self._record.scheduler is None else self._record.unit.is_root

    def _be_adopted(self, root: bool) -> None:
        if root:
            raise self._wrong("_is_root", root)
        self._adopted_by = self._adopted_by or self

    def _phase(self) -> object:
        states, phase = _common.TrainingState, self._record.unit.phase
        if phase is Phase.FORWARD:
            return states.FORWARD
        if phase is Phase.BACKWARD:
            return states.PRE_BACKWARD
        return states.POST_BACKWARD if phase is Phase.REDUCED else states.IDLE

    def _accept_phase(self, value: object) -> None:
        """Accept IDLE if the unit is idle: clients set it before they move a model."""
        scheduler = self._record.scheduler
        busy = scheduler is not None and scheduler.is_running
        if self._adopted_by is None and (busy or value is not _common.TrainingState.IDLE):
            raise self._wrong("_training_state", value)

    def _choose_auto(self, value: bool) -> None:
        unit = self._record.unit
        unit.reshard_after_forward = None if value else unit.frees_after_forward

    def _root_of_forward(self) -> StateStandIn | None:
        scheduler = self._record.scheduler
        root = None if scheduler is None else scheduler.iteration.forward_root
        return None if root is None else _STAND_INS[id(root)]

    def _finalizer(self) -> Callable[[], None]:
        """A root of torch 2.11 calls this on each state: there is nothing to do."""
        if self._adopted_by is None:
            self.__getattr__("_finalize_backward")
        return lambda: None

    _title = _of("_record.unit.title")
    _fsdp_param_groups = _of(_stand_ins_of_groups)
    _fsdp_param_group = _of(_only_group)
    _modules = _of("_record.modules")
    _device = _of("_record.arguments.axes.device")
    _mp_policy = _of("_record.unit.options.precision")
    _is_root = _of(_root, write=_be_adopted)
    _training_state = _of(_phase, write=_accept_phase)
    _modules_to_run_forward = _of(lambda self: set())  # that a torch root would complete: none
    _auto_reshard_after_forward = _of(
        lambda self: self._record.unit.reshard_after_forward is None, write=_choose_auto
    )
    _states_to_forward_prefetch = _of(lambda self: _of_units(self._record.unit.forward_prefetch))
    _states_to_backward_prefetch = _of(lambda self: _of_units(self._record.unit.backward_prefetch))
    _state_ctx = _of(
        lambda self: self if self._adopted_by in (None, self) else self._adopted_by,
        write=lambda self, value: setattr(self, "_adopted_by", value),
    )
    _finalize_backward = _of(_finalizer)
    # The root's; before the first forward there are no states.
    all_states = _of(lambda self: list(_of_units(getattr(self._record.scheduler, "units", ()))))
    iter_forward_root = _of(_root_of_forward)
    is_last_backward = _of(lambda self: getattr(self._record.scheduler, "is_last_backward", True))
    manual_backward_finalization = _of(
        lambda self: getattr(self._record.scheduler, "manual", False)
    )


_STAND_INS: weakref.WeakValueDictionary[int, StateStandIn] = weakref.WeakValueDictionary()
"""By ``id`` of the unit, which lives as long."""


def _of_units(units: Iterable[Unit]) -> tuple[StateStandIn, ...]:
    return tuple(_STAND_INS[id(unit)] for unit in units)


def _refused_method(name: str) -> property:
    def refuse(self: StateStandIn) -> NoReturn:
        _StandIn.__getattr__(self, name)

    return property(refuse)


for _name in vars(_state.FSDPState):
    if not _name.startswith("__") and _name not in {*vars(StateStandIn), *StateStandIn._held}:
        setattr(StateStandIn, _name, _refused_method(_name))


class TorchIdentity(TORCHS):  # typed as Any: our methods need not match the types of torch's
    """Makes ``isinstance(module, torch.distributed.fsdp.FSDPModule)`` true, and does no more."""

    def _get_fsdp_state(self) -> StateStandIn:
        state: StateStandIn = self.__dict__[STATE_KEY][_API]
        return state

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing to choose: all-gathers are always issued ahead, into memory of one stream."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise coded(
            NotImplementedError,
            "newer-method",
            f"{name}() is a method of FSDPModule in torch {torch.__version__} that fsdp2 does not "
            f"have; update fsdp2, or leave the call out",
        )

    return refuse


for _name, _value in vars(TORCHS).items():
    if callable(_value) and not _name.startswith("__") and _name not in vars(TorchIdentity):
        setattr(TorchIdentity, _name, _refusal(_name))


class _TorchsToo(type):
    """Makes ``isinstance(policy, cls)`` hold for objects of the torch class that ``cls`` is of."""

    def __instancecheck__(cls, instance: object) -> bool:
        torchs = tuple(base for base in cls.__bases__ if base in TORCHS_NAMES.values())
        return super().__instancecheck__(instance) or isinstance(instance, torchs)


# Not every torch has every class; object is a base of any.
_MixedPrecision: Any = TORCHS_NAMES.get("MixedPrecisionPolicy", object)
_Offload: Any = TORCHS_NAMES.get("OffloadPolicy", object)
_CPUOffload: Any = TORCHS_NAMES.get("CPUOffloadPolicy", object)
_MeshDims: Any = TORCHS_NAMES.get("DataParallelMeshDims", object)


class MixedPrecisionPolicy(config.MixedPrecisionPolicy, _MixedPrecision, metaclass=_TorchsToo):
    __doc__ = config.MixedPrecisionPolicy.__doc__


class OffloadPolicy(config.OffloadPolicy, _Offload, metaclass=_TorchsToo):
    __doc__ = config.OffloadPolicy.__doc__


class CPUOffloadPolicy(OffloadPolicy, config.CPUOffloadPolicy, _CPUOffload, metaclass=_TorchsToo):
    __doc__ = config.CPUOffloadPolicy.__doc__


class DataParallelMeshDims(config.DataParallelMeshDims, _MeshDims, metaclass=_TorchsToo):
    __doc__ = config.DataParallelMeshDims.__doc__


def state_of(module: nn.Module) -> object:
    """The result of ``fully_shard.state(module)``: a `StateStandIn`, torch's own, or ``None``."""
    return module.__dict__.get(STATE_KEY, {}).get(_API)


def register_with_torch(modules: Sequence[nn.Module], record: UnitHooks) -> None:
    """Let torch's look-ups find ``modules``, which fsdp2 has sharded as one unit."""
    state = _STAND_INS[id(record.unit)] = StateStandIn(record)
    for module in modules:
        module.__dict__.setdefault(STATE_KEY, {})[_API] = state
        _module_state_mapping[module] = weakref.ref(state)  # for torch's _get_module_fsdp_state
        registry = module.__dict__.setdefault(REGISTRY_KEY, {})
        # torch's fully_shard leaves out what replicate() has, and the other way round.
        registry["fully_shard"] = registry["replicate"] = RegistryItem()


def check_untouched(module: nn.Module, inside: Sequence[nn.Module]) -> None:
    """Raise if torch's ``fully_shard`` was applied to or below a module, or ``replicate`` to it."""
    if not [below for below in inside if below.__dict__.get(REGISTRY_KEY)]:
        return
    for name, below in module.named_modules():
        registry = below.__dict__.get(REGISTRY_KEY)
        if not registry or record_of(below) is not None:
            continue
        refused = ("fully_shard", "replicate") if below is module else ("fully_shard",)
        found = [api for api in refused if api in registry]
        if found:
            raise coded(
                ValueError,
                "torchs-own",
                f"torch's {found[0]}() was already applied to '{name or type(below).__name__}'; "
                f"use one implementation for the whole model",
            )


def replicated_parameters(modules: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Parameters that torch's ``replicate`` sees to, below ``modules``: it reduces them itself."""
    return {
        param
        for module in modules
        for below in modules_below(module)
        if "replicate" in below.__dict__.get(REGISTRY_KEY, ()) and record_of(below) is None
        for param in below.parameters()
    }
