"""`ShardedGradScaler`: loss scaling where each rank sees only its shards of the gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from fsdp2.core.errors import coded
from fsdp2.core.facts import ProcessGroup, default_group, local_of, sum_over


class ShardedGradScaler(GradScaler):
    """As ``torch.amp.GradScaler``; all ranks skip a step if one has found infinity or NaN.

    Arguments, order and defaults match torch's ``ShardedGradScaler``.

    Args:
        device: type of the device of the losses. Default ``"cuda"``.
        init_scale: the first scale. Default 2**16.
        backoff_factor: factor of the scale after a skipped step. Default 0.5.
        growth_factor: factor of the scale after ``growth_interval`` steps. Default 2.
        growth_interval: required number of steps without infinity. Default 2000.
        enabled: ``False`` scales nothing and skips nothing. Default ``True``.
        process_group: ranks that decide together. ``None`` (default): all.

    Example::

        scaler = ShardedGradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.process_group = process_group

    def scale(self, outputs: object) -> Any:
        """Multiply a tensor, or tensors in lists, tuples and other iterables; dtypes stay.

        Args:
            outputs: losses, of any shape and floating-point dtype.

        Raises:
            TypeError: it contains anything else.
        """
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, list | tuple):
            return type(outputs)(self.scale(output) for output in outputs)
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise coded(
            TypeError,
            "fsdp1-scaler",
            f"ShardedGradScaler.scale takes a tensor or an iterable of tensors, not {outputs!r}",
        )

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's rows; a gradient may be float16."""
        found = {found_inf.device: found_inf}
        inverse = {inv_scale.device: inv_scale}
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rows = local_of(param.grad)
                    alike.setdefault((rows.device, rows.dtype), []).append(rows)
        with torch.no_grad():
            for (device, _), grads in alike.items():
                found.setdefault(device, found_inf.to(device, copy=True))
                inverse.setdefault(device, inv_scale.to(device))
                torch._amp_foreach_non_finite_check_and_unscale_(
                    grads, found[device], inverse[device]
                )
        return found

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the local shards of gradients by the scale; all ranks learn of infinity and NaN.

        All ranks must call it, or `step`, which calls it.

        Args:
            optimizer: the optimizer of the sharded parameters.

        Raises:
            RuntimeError: it was called since the last `update`, or after `step`.
        """
        if not self.is_enabled():
            return
        super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        assert state["stage"] is OptState.UNSCALED
        seen: dict[torch.device, torch.Tensor] = state["found_inf_per_device"]
        assert self._scale is not None
        total = torch.stack([flag.to(self._scale.device) for flag in seen.values()]).amax(0)
        sum_over(total, self.process_group or default_group())
        for flag in seen.values():
            flag.copy_(total)
