"""The user's choices, as frozen values (decision 11).

    MixedPrecisionPolicy ──┐
    OffloadPolicy ─────────┼──> fully_shard ──> a unit keeps frozen GroupOptions for its groups;
    setters of FSDPModule ─┘                    a setter replaces them as a whole

Nothing in this module communicates, and nothing knows about streams or modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from fsdp2.core.custom_collectives import AllGather, ReduceScatter
from fsdp2.core.errors import coded

EXACT_BELOW = 16384
"""Elements below which parameters are sent without a format: norms, biases, routers of a few
experts.
"""

PACK_BELOW = 128 << 10
"""Bytes of a rank's piece below which parameters are packed while others are coalesced.

NCCL chooses an algorithm for operations of a group whose sizes differ by less than 4 times, and
counts each as at least 16 KiB of a channel's traffic (enqueue.cc: ncclPrepareTasks,
scheduleCollTasksToPlan; 32 KiB in some versions). Users found many small ones slow: 980 grouped
reduce-scatters 116 s, concatenated 1.6 s (nvidia/nccl#725).
"""


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a unit computes, reduces and returns.

    The sharded parameters keep their own dtype (the optimizer's). Mixed precision applies at module
    boundaries, so backward saves low-precision activations.

    Args:
        param_dtype: dtype of the unsharded parameters, and therefore of the all-gather, forward and
            backward. ``None`` (default) keeps each parameter's own dtype.
        reduce_dtype: dtype of the gradient reduction. ``None`` (default) reduces in the sharded
            parameter's own dtype, as torch does since 2.15: fp32 for fp32 parameters that compute
            in bf16 (decision 5). Pass ``reduce_dtype=param_dtype`` for torch's earlier behavior:
            half the bytes, sums with fewer bits. Without gradient sync, gradients accumulate in
            this dtype.
        output_dtype: dtype to which floating-point outputs of the unit's forward are cast. ``None``
            (default) does not cast them.
        cast_forward_inputs: whether floating-point inputs of the unit's forward are cast to
            ``param_dtype``. Default ``True``.
        param_dtype_override_fn: called once with each parameter when it is sharded; returns
            ``None`` or ``param_dtype`` for the policy's dtype, or the parameter's own dtype to
            leave that parameter uncast. It must return the same on every rank. Inputs are cast to
            ``param_dtype`` in any case. Default ``None``: no exceptions.

    Raises:
        TypeError: a dtype is not a ``torch.dtype``, or the function is not callable.
        ValueError: a dtype is not a floating-point one.

    Example::

        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        override = self.param_dtype_override_fn
        if override is not None and not callable(override):
            raise coded(
                TypeError,
                "policy-override-type",
                f"MixedPrecisionPolicy(param_dtype_override_fn={override!r}) is not callable; pass "
                f"a function of a parameter that returns a torch.dtype or None",
            )
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise coded(
                    TypeError,
                    "policy-value",
                    f"MixedPrecisionPolicy({name}={dtype!r}) is not a torch.dtype; pass for "
                    f"example {name}=torch.bfloat16",
                )
            if not dtype.is_floating_point:
                raise coded(
                    ValueError,
                    "policy-integer",
                    f"MixedPrecisionPolicy({name}={dtype}) is not a floating-point dtype; pass "
                    f"for example {name}=torch.bfloat16",
                )

    def overridden_dtype(self, name: str, param: torch.Tensor) -> torch.dtype | None:
        """The dtype that ``param_dtype_override_fn`` chose for a parameter, if any."""
        choose = self.param_dtype_override_fn
        chosen = choose(param) if choose else None  # type: ignore[arg-type]  # an nn.Parameter
        if chosen is None or chosen == self.param_dtype:
            return None
        if chosen != param.dtype:
            raise coded(
                ValueError,
                "policy-override-value",
                f"param_dtype_override_fn returned {chosen!r} for parameter '{name}'; return None, "
                f"the policy's {self.param_dtype} or the parameter's own {param.dtype}",
            )
        return param.dtype


@dataclass(frozen=True)
class OffloadPolicy:
    """No offload: shards, gradients and optimizer states stay on the mesh's device.

    Example::

        fully_shard(block, offload_policy=OffloadPolicy())  # as without the argument
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keeps shards, gradients and optimizer states in CPU memory.

    Shards are copied to the device on the copy-in stream before each all-gather. Reduced gradients
    are copied back during backward, and are in CPU memory when backward returns. The optimizer
    steps on the CPU. On a CPU mesh the policy has no effect.

    Copies may still read shards when a training forward returns. Optimizers, ``load_state_dict``
    and ``.to()`` wait for them, and so do backward and a forward without gradients at their end. If
    you write parameters by hand between a forward and its backward, call ``reshard()`` first.

    Args:
        pin_memory: whether the CPU memory is pinned, so that copies overlap with compute. Default
            ``True``; ignored without an accelerator. Use ``False`` on machines with little memory.

    Example::

        fully_shard(block, offload_policy=CPUOffloadPolicy())
    """

    pin_memory: bool = True


@dataclass
class DataParallelMeshDims:
    """The data-parallel dims of a full SPMD mesh.

    Use it for `fully_shard` on parameters that are already DTensors on that whole mesh, replicated
    on these dims.

    Args:
        shard: name of the mesh dim over which parameters are sharded, or several names, which are
            flattened into one axis. ``None``: not sharded, only replicated.
        replicate: name or names of the dims over which parameters are replicated (HSDP). ``None``
            (default): none.

    Raises:
        ValueError: neither is given, or a name occurs twice.

    Example::

        mesh = init_device_mesh("cuda", (2, 4, 2), mesh_dim_names=("replicate", "shard", "tp"))
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("shard", "replicate"))
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise coded(
                ValueError,
                "dims-none",
                "DataParallelMeshDims names no mesh dim; pass shard=, replicate= or both",
            )
        names = (*self.shard_names, *self.replicate_names)
        if len(set(names)) < len(names):
            raise coded(
                ValueError,
                "dims-twice",
                f"DataParallelMeshDims names a mesh dim twice in {names}; name each once, in "
                f"shard= or in replicate=",
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The shard dims, as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The replicate dims, as a tuple."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


@dataclass(frozen=True, eq=False)
class Wire:
    """Wire formats of a group's parameters and gradients, except for those that stay exact.

    Exactness is a fact of each parameter (`ShardedParam.exact`): a new `Wire` comes with new facts,
    so two are never equal. ``gather`` and ``reduce`` name entries of `GATHERED` and `REDUCED` in
    `core.codecs.codec`, or are ``None``. The ``between_`` ones are for nodes of two levels.

    Attributes:
        differences: whether messages hold differences to the values gathered last, which are kept.
        rotate: whether gradients are rotated before encoding (`core.codecs.codec`).
        feedback: whether rounding errors are added to the next gradients (`core.reduce.feedback`).
    """

    gather: str | None = None
    reduce: str | None = None
    differences: bool = False
    rotate: bool = False
    feedback: bool = False
    between_gather: str | None = None
    between_reduce: str | None = None


Level = Literal["all", "inside", "between"]
"""The level of a mesh to which formats apply."""

WHOLE = Wire()
"""All parameters and gradients are sent exactly."""


@dataclass(frozen=True)
class GroupOptions:
    """A group's options, which a user may change; replaced as a whole, bound before the next use.

    Attributes:
        divide_factor: the divisor of gradients; ``None`` averages over all data-parallel ranks.
        sum_only: whether collectives only sum, and divisions are separate kernels.
        reduce_unused: whether parameters without a gradient are reduced as zeros, and get them.
        pack_below: bytes of a rank's piece below which a backend that coalesces gets it packed.
        keep_storage: whether resharding leaves the gathered memory allocated.
        keep_gradients: whether the memory of reduced gradients stays allocated between steps.
        keep_rows: whether gathered rows stay until an optimizer steps: a node's, a smaller group's,
            or all; ``None``: only those of nodes.
        all_reduce_hook: called with each reduced flat gradient before it is delivered, on
            ``all_reduce_hook_stream``; ``None`` for the all-reduce lane.
        average: averages each reduced flat gradient over more copies of the model than the mesh
            has; says whether this copy's own gradient is in the average.
    """

    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    divide_factor: float | None = None
    sum_only: bool = False
    reduce_unused: bool = False
    pack_below: int = PACK_BELOW
    keep_storage: bool = False
    keep_gradients: bool = False
    keep_rows: bool | None = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    wire: Wire = WHOLE
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: torch.Stream | None = None
    average: Callable[[torch.Tensor], bool] | None = None
