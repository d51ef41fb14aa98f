"""How clients of torch's own FSDP2 recognise a module that fsdp2 sharded, and what they may ask.

    pipelining and others ask for                      and find
    isinstance(m, torch.distributed.fsdp.FSDPModule)   TorchIdentity, a base of our FSDPModule
    m._get_fsdp_state(), fully_shard.state(m)          StateFacade, which calls our scheduler
    m in the registry of composable APIs               entries: torch's fully_shard(), replicate()
                                                       refuse m, and leave it out below a parent
    isinstance(policy, torch's or our class)           ours are subclasses of torch's, and recognise
                                                       torch's objects; both functions take both

The only module that imports torch's FSDP, and for identity alone: no method of torch's class is
left for a module of ours to run. One that a newer torch has and fsdp2 has not, raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

from fsdp2.core import config
from fsdp2.core.hooks import UnitHooks, hooks_of

TORCHS: Any = fsdp.FSDPModule
"""torch's class: ``super(TORCHS, self)`` is what comes behind it, the original class."""

TORCHS_NAMES: dict[str, Any] = {name: getattr(fsdp, name) for name in fsdp._fully_shard.__all__}
"""What torch exports of its FSDP2, by name, as it was when fsdp2 was imported."""

_API: Any = getattr(fsdp.fully_shard, "__wrapped__", fsdp.fully_shard)  # the key of its states


class StateFacade:
    """What stands where torch's clients look for the state of a sharded module.

    `torch.distributed.pipelining` ends a schedule, up to torch 2.13, by calling ``post_backward``
    of every parameter group below the root and then the root's final callback. There are no groups
    to call here; the final callback does it all. Newer ones call ``finalize_backward`` of the
    module, and compare ``_comm_ctx``. torch's ``register_fsdp_forward_method`` calls
    ``_pre_forward`` and ``_post_forward``.

    Args:
        hooks: those of the module's unit.
    """

    _fsdp_param_groups: tuple[Any, ...] = ()
    _fsdp_param_group = None

    def __init__(self, hooks: UnitHooks) -> None:
        self._hooks = hooks
        self._pre_forward = hooks.pre_forward
        self._post_forward = hooks.post_forward
        self._comm_ctx = object()  # torch's share_comm_ctx gives several roots the same one

    @property
    def _state_ctx(self) -> StateFacade:
        return self

    @property
    def all_states(self) -> list[StateFacade]:
        """States below the root: this one speaks for all."""
        return [self]

    def _root_post_backward_final_callback(self) -> None:
        scheduler = self._hooks.scheduler
        if scheduler is not None:
            scheduler.finalize(wait=True)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"'{self._hooks.unit.title}' is sharded by fsdp2, which has no '{name}' of torch's "
            f"FSDP state; use the public methods of fsdp2.FSDPModule"
        )


class TorchIdentity(TORCHS):  # typed as Any: our methods need not match the types of torch's
    """Makes ``isinstance(module, torch.distributed.fsdp.FSDPModule)`` true, and does no more."""

    def _get_fsdp_state(self) -> StateFacade:
        state: StateFacade = self.__dict__[STATE_KEY][_API]
        return state

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing to choose: all-gathers are always issued ahead, into memory of one stream."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name}() is a method of FSDPModule in torch {torch.__version__} that fsdp2 does not "
            f"have; update fsdp2, or leave the call out"
        )

    return refuse


for _name, _value in vars(TORCHS).items():
    if callable(_value) and not _name.startswith("__") and _name not in vars(TorchIdentity):
        setattr(TorchIdentity, _name, _refusal(_name))


class _TorchsToo(type):
    """Makes ``isinstance(policy, cls)`` hold for objects of the torch class that ``cls`` is of."""

    def __instancecheck__(cls, instance: Any) -> bool:
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


def state_of(module: nn.Module) -> Any:
    """What ``fully_shard.state(module)`` returns: `StateFacade`, torch's own state, or ``None``."""
    return module.__dict__.get(STATE_KEY, {}).get(_API)


def announce(modules: Sequence[nn.Module], hooks: UnitHooks) -> None:
    """Let torch's look-ups find ``modules``, which fsdp2 has sharded as one unit."""
    facade = StateFacade(hooks)
    for module in modules:
        module.__dict__.setdefault(STATE_KEY, {})[_API] = facade
        registry = module.__dict__.setdefault(REGISTRY_KEY, {})
        # torch's fully_shard leaves out what replicate() has, and the other way round.
        registry["fully_shard"] = registry["replicate"] = RegistryItem()


def check_untouched(module: nn.Module) -> None:
    """Raise if torch's ``fully_shard`` was applied to or below ``module``, or ``replicate`` to it.

    Raises:
        ValueError: it was; the message names the module and the function.
    """
    for name, below in module.named_modules():
        registry = below.__dict__.get(REGISTRY_KEY)
        if not registry or hooks_of(below) is not None:
            continue
        refused = ("fully_shard", "replicate") if below is module else ("fully_shard",)
        found = [api for api in refused if api in registry]
        if found:
            raise ValueError(
                f"torch's {found[0]}() was already applied to '{name or type(below).__name__}'; "
                f"use one implementation for the whole model"
            )


def replicated_parameters(modules: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Parameters that torch's ``replicate`` sees to, below ``modules``: it reduces them itself."""
    return {
        param
        for module in modules
        for below in module.modules()
        if "replicate" in below.__dict__.get(REGISTRY_KEY, ()) and hooks_of(below) is None
        for param in below.parameters()
    }
