"""What a user may choose, as frozen values, and the exceptions that fsdp2 raises.

    MixedPrecisionPolicy ──┐
    OffloadPolicy ─────────┴──> fully_shard ──> every group keeps the frozen value it was given

Nothing in this module knows about process groups, streams or modules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


class ShardingStateError(RuntimeError):
    """A call came at a moment in which its module cannot honour it.

    For example a parameter group that is asked to free parameters that are still on their way.
    The message names the module, the state it is in and the call that leads out of it.
    """


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a unit computes, reduces and returns.

    The sharded parameters keep their own dtype (the optimizer's); mixed precision is applied at
    module boundaries, so low-precision activations are what backward saves.

    Args:
        param_dtype: dtype of the gathered parameters, hence of the all-gather and of forward and
            backward. ``None`` (default) keeps each parameter's own dtype.
        reduce_dtype: dtype of the gradient reduction. ``None`` (default) reduces in the dtype the
            gradients were computed in. Without gradient sync, gradients accumulate in this dtype.
        output_dtype: dtype that floating-point outputs of the unit's forward are cast to.
            ``None`` (default) leaves them alone.
        cast_forward_inputs: whether floating-point inputs of the unit's forward are cast to
            ``param_dtype``. Default ``True``.

    Example::

        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(
                    f"MixedPrecisionPolicy({name}={dtype!r}) is not a torch.dtype; pass for "
                    f"example {name}=torch.bfloat16"
                )
            if not dtype.is_floating_point:
                raise ValueError(
                    f"MixedPrecisionPolicy({name}={dtype}) is not a floating-point dtype; pass "
                    f"for example {name}=torch.bfloat16"
                )


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: shards, gradients and optimizer states stay on the mesh's device."""
