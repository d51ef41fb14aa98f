"""The gradients of parameters that are reduced together: taken unsharded, delivered sharded.

    autograd ──> unsharded.grad of A, B, C
                   take ──> [full A, full B, full C]      the input of a reduction
                deliver <── [rows of A, of B, of C]       its output on this rank
    sharded.grad of A, B, C ──> the optimizer

One call serves all parameters, because a call each would cost as much as its work.

Unreferenced DTensors that were ``.grad`` become the next gradients (decision 16), because creating
and freeing a DTensor takes longer than all other work per parameter in a step:

    rows of A   rows of B   rows of C       of this step; freed with the gradients, as before
      └ lent      └ lent      └ the last    DTensors: ``.grad`` of A, B and C
         │           │            └─ dropped: are the others referenced?
         └─ free     └─ free   <─ no: they lose their rows, and wait for the next step's

The DTensor that is dropped last is new each time, and when its rows are freed, the others are
checked (invariant I14). One that is referenced at that time, by its parameter's ``.grad``, a
variable, or an autograd graph, is never reused. The rows are watched, not the DTensor: `.to()`
swaps gradients with converted ones, which torch refuses for tensors with weak references.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.tensor import DTensor

from fsdp2.core.params.param import ShardedParam, may_have_hooks, run_tensor_hooks
from fsdp2.core.progress import Counts

T = TypeVar("T")

Sum = tuple[object, torch.Tensor, torch.Tensor]
"""A parameter that has a gradient, that gradient's rows, and the rows to add to them."""


class Gradients:
    """The gradients of a reduction's parameters, in their order."""

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self.params = params
        self._edited = False  # whether any parameter may have hooks on its gradient …
        self._watched = False  # … or post-accumulate-grad hooks, as was seen …
        self._hooks_seen = -1  # … when so many were registered
        reuses = COUNTS_ARE_TRUE and len(params) >= FEWEST
        self._reuse = GradientReuse(len(params)) if reuses else None

    def keep_apart(self) -> None:
        """Use no DTensor again: rows have separate memory, which must not wait for others."""
        self._reuse = None

    def take(self, summed: bool) -> list[torch.Tensor | None]:
        """Take the full gradients; ``None`` for a parameter without one, or frozen since its
        forward, unless ``summed`` gradients of earlier backwards would be lost.
        """
        grads: list[torch.Tensor | None] = []
        with DisableTorchFunctionSubclass():
            for param in self.params:
                unsharded = param.unsharded
                grad = None
                if unsharded is not None:
                    grad = unsharded.grad
                    if grad is not None:
                        unsharded.grad = None
                        if not (param.sharded.requires_grad or summed) and param.requires_grad:
                            grad = None
                if param.accumulated is not None:
                    total, param.accumulated = param.accumulated, None
                    if grad is not None:
                        total += grad
                    grad = total
                if param.parallel is not None and grad is not None:
                    grad = param.localize(grad)
                grads.append(grad)
        return grads

    def waiting(self) -> bool:
        """Whether any parameter has a full gradient."""
        for param in self.params:
            full = param.unsharded
            if param.accumulated is not None or (full is not None and full.grad is not None):
                return True
        return False

    def delivered(self) -> bool:
        """Whether any parameter has a reduced gradient."""
        with DisableTorchFunctionSubclass():
            for param in self.params:
                if param.sharded.grad is not None:
                    return True
        return False

    def deliver(
        self,
        rows: Sequence[torch.Tensor],
        present: Sequence[bool],
        over: Sequence[torch.Tensor] | None = None,
    ) -> list[Sum]:
        """Give each parameter that is ``present`` its rows as ``.grad``; run users' hooks.

        ``over`` is the result of `objects_over`, where ``rows`` are what those are over. Returns
        those that have a ``.grad`` already: the caller adds, and runs the hooks.
        """
        if self._hooks_seen != Counts.hooks:
            self._look_for_hooks()
        if self._edited:
            return self._deliver_to_hooks(rows, present, over)
        params, reuse = self.params, self._reuse
        if False in present:
            params, rows, reuse = _chosen(params, present), _chosen(rows, present), None
            over = None if over is None else _chosen(over, present)
        objects: Sequence[Any]
        if over is not None:
            objects, reuse = over, None
        else:
            objects = [None] * len(params) if reuse is None else reuse.take(len(params))
        make = DTensor.__new__  # `wrap_local`, without its call for each
        waiting: list[Sum] = []
        given = []
        with DisableTorchFunctionSubclass():  # which every look at a DTensor would ask for
            for param, new, gradient in zip(params, rows, objects, strict=True):
                sharded = param.sharded
                before = sharded.grad
                if before is not None:
                    waiting.append((param, before._local_tensor, new))  # type: ignore[attr-defined]  # a DTensor
                    continue
                if gradient is None:
                    gradient = make(DTensor, new, param.grad_spec, requires_grad=False)
                elif over is None:
                    gradient._local_tensor = new
                sharded.grad = gradient
                given.append(gradient)
        if reuse is not None and not waiting:
            reuse.lend(given)
        if self._watched:
            del objects, gradient  # a hook may drop gradients
            _run_hooks(params, waiting)
        return waiting

    def may_call_hooks(self) -> bool:
        """Whether somebody's hooks see these gradients."""
        if self._hooks_seen != Counts.hooks:
            self._look_for_hooks()
        return self._edited or self._watched

    def _look_for_hooks(self) -> None:
        self._hooks_seen = Counts.hooks
        found = [may_have_hooks(param.sharded) for param in self.params]
        self._edited = True in [edited for edited, _ in found]
        self._watched = True in [watched for _, watched in found]

    def _deliver_to_hooks(
        self,
        rows: Sequence[torch.Tensor],
        present: Sequence[bool],
        over: Sequence[torch.Tensor] | None,
    ) -> list[Sum]:
        """As `deliver`, where hooks see each gradient before it is one, and run when it is."""
        waiting: list[Sum] = []
        objects: Sequence[torch.Tensor | None] = over or [None] * len(rows)
        for param, new, there, known in zip(self.params, rows, present, objects, strict=True):
            if not there:
                continue
            sharded: Any = param.sharded
            own: Any = param.gradient_over(new) if known is None else known
            gradient: Any = run_tensor_hooks(sharded, own, param.name)
            if known is not None and gradient is not own:  # which stays in memory that is kept
                own._local_tensor.copy_(gradient._local_tensor)
                gradient = own
            if sharded.grad is not None:
                waiting.append((param, sharded.grad._local_tensor, gradient._local_tensor))
                continue
            sharded.grad = gradient
        _run_hooks(_chosen(self.params, present), waiting)
        return waiting

    def objects_over(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Objects that can become ``.grad`` of each parameter, over its rows."""
        pairs = zip(self.params, rows, strict=True)
        return [param.gradient_over(own) for param, own in pairs]


class PermutedGradients(Gradients):
    """Gradients of parameters whose memory order differs from their dims' (``channels_last``):
    reductions see tensors in memory order, users the original one.
    """

    def take(self, summed: bool) -> list[torch.Tensor | None]:
        pairs = zip(self.params, super().take(summed), strict=True)
        return [None if grad is None else param.laid_out(grad) for param, grad in pairs]

    def deliver(
        self,
        rows: Sequence[torch.Tensor],
        present: Sequence[bool],
        over: Sequence[torch.Tensor] | None = None,
    ) -> list[Sum]:
        return super().deliver(self._as_seen(rows), present, over)

    def objects_over(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return super().objects_over(self._as_seen(rows))

    def _as_seen(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [param.as_seen(own) for param, own in zip(self.params, rows, strict=True)]


def gradients_of(params: Sequence[ShardedParam]) -> Gradients:
    """The gradients of parameters that are reduced alike."""
    permuted = [param for param in params if param.order is not None]
    return PermutedGradients(params) if permuted else Gradients(params)


def _run_hooks(params: Sequence[ShardedParam], waiting: Sequence[Sum]) -> None:
    """Run post-accumulate-grad hooks, but of those that ``waiting`` are still to be added to."""
    later = [param for param, _, _ in waiting]
    for param in params:
        if not any(param is other for other in later):
            param.run_hooks()


def _chosen(items: Sequence[T], present: Sequence[bool]) -> list[T]:
    return [item for item, there in zip(items, present, strict=True) if there]


# ---- DTensors of old gradients

FEWEST = 3
"""Members from which on it pays: looking at the others takes as long as making one of them."""

_refcount = sys.getrefcount
_ALONE = next(map(_refcount, [object()]))
"""References to an object in a list, as ``map`` counts them, if there are no others.

For a tensor these are all, including C++'s: torch's C++ objects, such as autograd's graph, hold its
Python object by one more as long as there are any (torch 2.11 to 2.15).
"""


def counts_are_true() -> bool:
    """Whether a reference count shows that an object has no other reference.

    False on a free-threaded interpreter: its counts are split by thread, and another thread may
    take a reference at any moment. On others, one more reference must increase the count by one.
    """
    enabled = getattr(sys, "_is_gil_enabled", None)
    if enabled is not None and not enabled():
        return False
    held = object()
    return next(map(_refcount, [held])) == _ALONE + 1


COUNTS_ARE_TRUE = counts_are_true()
"""Whether DTensors are used again at all: without, each gradient is a new one, at its cost."""


class GradientReuse:
    """The DTensors of a reduction's gradients, between two steps.

    The member whose gradient is dropped last depends on who drops them: a module walks to those in
    nested modules last, an optimizer to those of its last group. A look that comes too early tells.
    """

    def __init__(self, count: int) -> None:
        self._free: list[object] = []
        # The member that is taken for the last to be dropped; watches have the list, too.
        self._last = [count - 1]
        self._watch: weakref.ref[object] | None = None

    def take(self, count: int) -> list[object]:
        """DTensors for ``count`` gradients, whose rows are to be set; ``None``: make one."""
        if not self._free:
            return [None] * count
        taken = [*self._free]
        taken.insert(self._last[0], None)
        self._free.clear()
        return taken

    def lend(self, gradients: list[Any]) -> None:
        """These are gradients now, of all members; no other code needs the list."""
        last = gradients.pop(self._last[0])
        self._free = []  # without what an older watch left since `take`
        look = partial(_look, gradients, self._free, self._last)
        self._watch = weakref.ref(last._local_tensor, look)


def _watch_later(last: list[int], counts: list[int]) -> None:
    """Watch another member from the next step on: the last of those that are still held."""
    held = max(index for index, count in enumerate(counts) if count != _ALONE)
    last[0] = held if held < last[0] else held + 1  # the watched one is not among them


def _look(held: list[Any], free: list[object], last: list[int], _: object) -> None:
    """The rows of the gradient of member ``last[0]`` were freed: ``free`` receives the others if
    all are unreferenced, or none.
    """
    lent = [*held]
    held.clear()
    counts = list(map(_refcount, lent))
    if set(counts) != {_ALONE}:
        _watch_later(last, counts)
        return
    for gradient in lent:
        if gradient.__dict__ or gradient.requires_grad:
            return  # somebody made something of it
        gradient._local_tensor = None
    free += lent
