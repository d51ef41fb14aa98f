"""Parameters that exist only on paper, for a group, its transports and its reductions to run on.

    PaperParam      its gradients: as autograd left them, and as they were reduced
    PaperGradients  the gradients of several, taken and delivered together
    VirtualParam    a `PaperParam` on a `VirtualDevice`: rows, gathered view, the user's hook

They provide what the engine calls on a `ShardedParam` in a step, without a module or autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from fsdp2.core.layout.layout import ROWS, Cut, Slot
from fsdp2.testing.virtual import VirtualDevice, VirtualTensor


class PaperParam:
    """The gradients of what stands where a `ShardedParam` does; tensors of any kind."""

    requires_grad = True
    full_grad: Any = None
    gradient: Any = None

    def run_hooks(self) -> None:
        """Run the user's hooks on the gradient that was delivered."""


class PaperGradients:
    """As `fsdp2.core.params.gradients.Gradients`, of `PaperParam`."""

    def __init__(self, params: Sequence[PaperParam]) -> None:
        self.params = params

    def take(self, summed: bool) -> list[object]:
        """The full gradients, which the parameters then no longer have."""
        grads = []
        for param in self.params:
            grads.append(param.full_grad)
            param.full_grad = None
        return grads

    def waiting(self) -> bool:
        """Whether any has a full gradient."""
        return any(param.full_grad is not None for param in self.params)

    def delivered(self) -> bool:
        """Whether any has a reduced gradient."""
        return any(param.gradient is not None for param in self.params)

    def deliver(
        self, rows: Sequence[object], present: Sequence[bool], over: Sequence[object] | None = None
    ) -> list[tuple[Any, object, object]]:
        """Keep the reduced gradients; return those to add to one that is there."""
        waiting = []
        for param, new, there in zip(self.params, rows, present, strict=True):
            if not there:
                continue
            if param.gradient is None:
                param.gradient = new
                param.run_hooks()
            else:
                waiting.append((param, param.gradient, new))
        return waiting

    def objects_over(self, rows: Sequence[object]) -> list[object]:
        """The objects that can become the gradients, over ``rows``: the rows themselves."""
        return list(rows)

    def keep_apart(self) -> None:
        """Nothing is used again here."""


class VirtualParam(PaperParam):
    """Stands where a `ShardedParam` does."""

    is_meta = exact = is_extended = is_its_shard = False
    is_in_place = True
    dtype_override = None
    differs_over = ()

    def __init__(
        self,
        device: VirtualDevice,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        cut: Cut = ROWS,
    ) -> None:
        self._device = device
        self.name = name
        self.shape = shape
        self.cut = cut
        self.dtype = self.grad_dtype = dtype
        self.sharded = SimpleNamespace(requires_grad=True, _version=0)
        self.unsharded: SimpleNamespace | None = None
        self.rows: VirtualTensor | None = None
        self.gathered: VirtualTensor | None = None
        self.hook: Callable[[VirtualParam], None] | None = None

    def adopt(self, slot: Slot, target: VirtualTensor) -> None:
        """Move the rows into the flat shard."""
        self.rows = target
        self._device.run(f"adopt {self.name}", [], [target])

    def materialize(self, gathered: VirtualTensor) -> None:
        """Remember the gathered view."""
        self.gathered = gathered
        self.unsharded = SimpleNamespace(requires_grad=self.sharded.requires_grad, _version=0)

    def forms(self) -> list[SimpleNamespace]:
        """Those that were made."""
        return [form for form in (self.sharded, self.unsharded) if form is not None]

    def no_op(self, *_: object, **__: object) -> None:
        """No module has it, it is never frozen, and versions are not compared."""

    check_usable = make_smaller = follow_smaller = forbid_reading = no_op

    def nothing(self, *_: object) -> list[object]:
        """There is no module."""
        return []

    swaps = stores = nothing

    @property
    def has_grad_hooks(self) -> bool:
        """Whether there is a hook."""
        return self.hook is not None

    def drop_gradient(self) -> None:
        """Forget the full gradient."""
        self.full_grad = None

    def accumulate(self, dtype: torch.dtype) -> None:
        """Keep the full gradient, in ``dtype``."""
        if self.full_grad is not None and self.full_grad.dtype != dtype:
            total = self._device.empty(self.shape, dtype, f"accumulated {self.name}")
            self._device.run("copy", [self.full_grad], [total])
            self.full_grad = total

    def run_hooks(self) -> None:
        """Run the hook, if there is one."""
        if self.hook is not None:
            self.hook(self)
