"""torch's flat parameter, as clients read and write it: here, the parameters of a wrapper's unit.

wrapper._has_params                     whether its unit has parameters
wrapper._flat_param.data = ….float()    all of them, and this rank's rows, in that dtype
wrapper._handle._orig_param_dtype = …   taken: the unit looks by itself

accelerate does so in mixed precision, where a model was loaded in a low one.
"""

from __future__ import annotations

import torch
from torch import nn

from fsdp2.core.facts import ShardedParam, require_record


class FlatParameter:
    """A unit's own parameters as one flat parameter."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._orig_param_dtype: torch.dtype | None = None  # of torch's handle, which this is too

    @property
    def params(self) -> list[ShardedParam]:
        """The parameters, in the order of the unit."""
        groups = require_record(self._module).unit.own_groups
        return [param for group in groups for param in group.params]

    @property
    def flat_param(self) -> FlatParameter:
        """Itself: torch's handle has one, and no more of it is read."""
        return self

    @property
    def _fqns(self) -> tuple[str, ...]:
        return tuple(param.name for param in self.params)

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype; if they differ, which torch does not support, that of the first
        lower one.
        """
        dtypes = [param.dtype for param in self.params]
        return next((dtype for dtype in dtypes if dtype != torch.float32), torch.float32)

    @property
    def device(self) -> torch.device:
        """The device of the shards."""
        return self.params[0].local.device

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter is trained."""
        return any(param.sharded.requires_grad for param in self.params)

    @property
    def data(self) -> torch.Tensor:
        """A copy of this rank's rows: 1-D, all parameters one after another."""
        return torch.cat([param.local.detach().reshape(-1) for param in self.params])

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Give floating-point parameters ``value``'s dtype, and this rank's rows its numbers."""
        own = {id(param.sharded) for param in self.params if param.dtype.is_floating_point}
        own |= {id(param.sharded.grad) for param in self.params if param.sharded.grad is not None}
        self._module._apply(lambda held: held.to(value.dtype) if id(held) in own else held)
        pieces = value.split([param.local.numel() for param in self.params])
        with torch.no_grad():
            for param, piece in zip(self.params, pieces, strict=True):
                param.local.copy_(piece.view(param.local.shape))
