"""The configuration of `FullyShardedDataParallel`: torch's names, fields, order and defaults.

Objects of torch's own classes are accepted, too. Enum members of both with the same name are equal,
so that a script may mix them. The documentation of torch's FSDP1 is the source of names and
meanings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsdp2.core.errors import coded
from fsdp2.interop import CPUOffloadPolicy, MixedPrecisionPolicy

E = TypeVar("E", bound=Enum)


class TwinOfTorchs(Enum):
    """An enum that is equal to torch's of the same name, member by member."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Enum) or type(other).__name__ != type(self).__name__:
            return NotImplemented
        return self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)  # as torch's


class ShardingStrategy(TwinOfTorchs):
    """The parameters that a wrapper shards, and the ranks over which it does so.

    - ``FULL_SHARD``: parameters, gradients and optimizer states. Forward reshards parameters.
    - ``SHARD_GRAD_OP``: the same, but parameters stay unsharded from forward to backward.
    - ``NO_SHARD``: nothing. Gradients are all-reduced.
    - ``HYBRID_SHARD``: as ``FULL_SHARD`` inside a node, replicated across nodes.
    - ``_HYBRID_SHARD_ZERO2``: as ``SHARD_GRAD_OP`` inside a node, replicated across nodes.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
KEEPS_GATHERED = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
"""Strategies that keep parameters unsharded between forward and backward."""


class BackwardPrefetch(TwinOfTorchs):
    """When backward gathers the next wrapper's parameters.

    - ``BACKWARD_PRE``: before the current one computes: most overlap, most memory.
    - ``BACKWARD_POST``: when the current one is resharded, before its gradients are reduced.

    ``None`` instead of a member gathers each when it is needed.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """Dtypes of parameters, reductions and buffers, and which inputs are cast.

    Args:
        param_dtype: dtype of unsharded parameters, and of compute. ``None`` (default): their own.
        reduce_dtype: dtype of the gradient reduction. ``None`` (default): ``param_dtype``.
        buffer_dtype: dtype to which floating-point buffers are cast. ``None`` (default): their own.
            State dicts hold them in their own dtype.
        keep_low_precision_grads: whether ``.grad`` stays in ``param_dtype``. Default ``False``: it
            has the dtype of the sharded parameter.
        cast_forward_inputs: whether floating-point inputs of the wrapper's forward are cast to
            ``param_dtype``. Default ``False``.
        cast_root_forward_inputs: the same, only for the outermost wrapper. Default ``True``.
        _module_classes_to_ignore: with an ``auto_wrap_policy``, modules of these classes become
            separate wrappers that compute in full precision: their inputs are cast to float32,
            their outputs back. Default: batch norms.

    Example::

        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: tuple[type[nn.Module], ...] = (_BatchNorm,)


@dataclass
class CPUOffload:
    """Whether shards, gradients and optimizer states are in CPU memory.

    Args:
        offload_params: ``True`` keeps them there. Default ``False``.
    """

    offload_params: bool = False


# ---- state dicts


class StateDictType(TwinOfTorchs):
    """The contents of ``state_dict()``.

    - ``FULL_STATE_DICT``: full plain tensors, as for an unsharded model.
    - ``LOCAL_STATE_DICT``: torch's flat layout, which fsdp2 does not have: raises.
    - ``SHARDED_STATE_DICT``: DTensors, of which each rank has its local shard.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(TwinOfTorchs):
    """The keys of the states in an optimizer's state dict.

    - ``PARAM_NAME``: full names of parameters.
    - ``PARAM_ID``: their positions in the optimizer.
    """

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class StateDictConfig:
    """Options of a model's state dicts; use one of the subclasses.

    Args:
        offload_to_cpu: whether tensors are in CPU memory. Default ``False``: on the device.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Options of full state dicts.

    Args:
        offload_to_cpu: whether tensors are in CPU memory. Default ``False``: on the device.
        rank0_only: whether ranks other than the first get an empty one, and never hold more than
            their shards. Default ``False``.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of torch's flat layout, which fsdp2 does not have."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options of sharded state dicts.

    Args:
        offload_to_cpu: whether shards are in CPU memory. Default ``False``: on their device.
        _use_dtensor: torch's private field; no effect: values are always DTensors.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Options of an optimizer's state dicts; use one of the subclasses.

    Args:
        offload_to_cpu: whether tensors are in CPU memory. Default ``True``.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's full state dicts.

    Args:
        offload_to_cpu: whether tensors are in CPU memory. Default ``True``.
        rank0_only: whether ranks other than the first get an empty one, and need none to load.
            Default ``False``.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of torch's flat layout, which fsdp2 does not have."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's sharded state dicts.

    Args:
        offload_to_cpu: whether shards are in CPU memory. Default ``True``.
        _use_dtensor: torch's private field; no effect: values are always DTensors.
    """

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The settings of a model's and its optimizer's state dicts.

    Args:
        state_dict_type: full or sharded.
        state_dict_config: the options of the model's.
        optim_state_dict_config: the options of the optimizer's.
    """

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


# ---- what the units are given


def checked_member(kind: type[E], value: object, argument: str) -> E:
    """A member of fsdp2's enum for one of fsdp2's or torch's."""
    for member in kind:
        if member == value:
            return member
    raise coded(
        TypeError,
        "fsdp1-member",
        f"FullyShardedDataParallel({argument}=…) takes a member of {kind.__name__}, not {value!r}",
    )


def checked_precision(value: Any) -> MixedPrecision:
    """A `MixedPrecision` for one of ours or torch's, or for ``None``."""
    if value is None:
        return MixedPrecision()
    if type(value).__name__ != "MixedPrecision" or not hasattr(value, "cast_root_forward_inputs"):
        raise coded(
            TypeError,
            "fsdp1-precision",
            f"FullyShardedDataParallel(mixed_precision=…) takes a MixedPrecision, not {value!r}; "
            f"import it from fsdp2.fsdp1",
        )
    found: MixedPrecision = value  # or of torch's class, with the same fields
    return found


def policy_of(precision: MixedPrecision) -> MixedPrecisionPolicy:
    """The unit's policy: FSDP1 reduces in the parameters' dtype by default."""
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype or precision.param_dtype,
        cast_forward_inputs=bool(precision.cast_forward_inputs),
    )


def offload_of(value: object) -> CPUOffloadPolicy | None:
    """A unit's offload policy for a `CPUOffload` of ours or torch's."""
    if value is None:
        return None
    if not hasattr(value, "offload_params"):
        raise coded(
            TypeError,
            "fsdp1-offload",
            f"FullyShardedDataParallel(cpu_offload=…) takes a CPUOffload, not {value!r}; import it "
            f"from fsdp2.fsdp1",
        )
    return CPUOffloadPolicy() if value.offload_params else None
