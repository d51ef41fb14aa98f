"""Averages of weights over steps, sharded like the weights: one tensor per parameter's rows.

    update()     averages ── one foreach lerp per dtype ──> averages
    swapped()    average <── exchanged ──> this rank's rows

No rank needs the rows of another, so an update communicates nothing and gathers nothing. Replicas
average the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import (
    ShardedParam,
    clean,
    is_extended,
    local_of,
    uncompiled,
    with_dtype,
    wrap_local,
)
from fsdp2.full.loading import require_writable, rewritten
from fsdp2.full.selection import SelectedParam, selected_params

Decay = float | Callable[[int], float] | None
"""The decay, a function of the number of updates that returns it, or the plain mean."""

CHUNK = 1 << 20
"""Elements that are exchanged at a time, through a buffer of this size."""


class EMA:
    """An exponential moving average of a sharded model's weights, or their plain mean (SWA).

    The first update copies the weights, as ``torch.optim.swa_utils.AveragedModel`` does. Each later
    one makes ``average = decay * average + (1 - decay) * weight``, in one kernel of many tensors
    per dtype. Nothing is gathered or sent. A rank averages its local shards: one
    more shard, in ``dtype`` on ``device``.

    Args:
        model: a module, with or without sharded modules; its parameters must have memory.
        decay: from 0 to 1; or a function of the number of updates so far, which returns that;
            ``None``: the plain mean of all weights (SWA). Default 0.999.
        every: calls of `update` per average: with 10, the first call averages, and then the 11th;
            the others cost nothing. To average over the same number of steps as ``decay`` with
            ``every=1``, pass ``decay ** every``. Default 1.
        dtype: of the averages of floating-point weights. ``None`` (default): that of the weights.
            If ``decay`` is near 1, a bf16 average changes by less than half of its last bit, so
            that it stays the same: pass ``torch.float32`` then.
        device: of the averages, for example "cpu". ``None`` (default): that of the shards.
        buffers: whether floating-point buffers are averaged too. Default ``False``: the model
            keeps its own buffers, also in `swapped`.

    Attributes:
        model: the module.
        steps: the number of calls of `update`; set it to resume a run.

    Raises:
        ValueError: ``decay`` or ``every`` is not as above, or a parameter has no memory or is of a
            tensor subclass with all-gather hooks.

    Example::

        ema = fsdp2.optim.EMA(model, 0.999)
        for batch in batches:
            loss(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
        with ema.swapped():
            evaluate(model)
    """

    def __init__(
        self,
        model: nn.Module,
        decay: Decay = 0.999,
        *,
        every: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        buffers: bool = False,
    ) -> None:
        if decay is not None and not callable(decay):
            _checked(decay)
        if not isinstance(every, int) or every < 1:
            raise coded(
                ValueError,
                "ema-every",
                f"EMA(every=…) takes a number of update() calls from 1, not {every!r}; pass for "
                f"example every=10",
            )
        self.model = model
        self.steps = 0
        self._decay, self._every = decay, every
        self._dtype, self._buffers = dtype, buffers
        self._device = None if device is None else torch.device(device)
        self._swapped = False
        self._managed: list[tuple[ShardedParam, torch.Tensor]] = []
        self._averages: dict[str, _Average] = {}
        self._cut()

    @torch.no_grad()
    @uncompiled
    def update(self) -> None:
        """Add the current weights to the average: call it after ``optimizer.step()``.

        Raises:
            ValueError: ``decay`` is a function, and did not return a number from 0 to 1.
            ShardingStateError: the averages are swapped in.
        """
        self._require_apart("update")
        if self.steps % self._every == 0:
            self._average(self._weight())
        self.steps += 1

    def _average(self, weight: float) -> None:
        """Add the weights to the average, with this share."""
        self._follow()
        together: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], ...]] = {}
        for each in self._averages.values():
            weights, average = each.rows, each.average
            if weight == 1 or not (weights.is_floating_point() or weights.is_complex()):
                average.copy_(weights)  # integers are copies of the last values
            elif each.is_beside:
                averages, rows = together.setdefault((average.dtype, average.device), ([], []))
                averages.append(average)
                rows.append(weights)
            else:
                average.lerp_(weights.to(average), weight)
        for averages, rows in together.values():
            torch._foreach_lerp_(averages, rows, weight)

    @property
    def updates(self) -> int:
        """The number of times weights were averaged: once per ``every`` calls of `update`."""
        return -(-self.steps // self._every)

    @contextmanager
    @uncompiled
    def swapped(self) -> Iterator[nn.Module]:
        """The model with the averages as its weights, for evaluation and export; a context manager.

        Shards and averages are exchanged in place, piece by piece. If they differ in dtype or
        device, the weights are copied to the device of the averages meanwhile, which takes one more
        shard there. Writes to parameters inside the context are lost. When the context ends, also
        by an exception, the model has its weights again. If ranks gather parameters inside, all of
        them must enter and leave the context together.

        Raises:
            ShardingStateError: a forward, a backward or `gathered` has not ended, or the averages
                are already swapped in.
        """
        self._require_apart("swapped")
        require_writable(self.model, "EMA.swapped")
        self._follow()
        with rewritten(self.model), torch.no_grad():
            for each in self._averages.values():
                each.swap_in()
        self._swapped = True
        try:
            yield self.model
        finally:
            with rewritten(self.model), torch.no_grad():
                for each in self._averages.values():
                    each.swap_out()
            self._swapped = False

    # ---- by name

    def averages(self) -> dict[str, torch.Tensor]:
        """The averages by the names of parameters, and of buffers if they are averaged.

        They are DTensors sharded like the parameters, which share memory with the averages: pass
        them to ``fsdp2.checkpoint.save(states={"ema": …})``, and to `load`, which fills them. A
        tied parameter is listed under its first name only.

        Raises:
            ShardingStateError: the averages are swapped in.
        """
        self._require_apart("averages")
        self._follow()
        found: dict[str, torch.Tensor] = {}
        for name, each in self._averages.items():
            average, param = each.average, each.param
            if isinstance(param, DTensor):
                average = wrap_local(average, with_dtype(param._spec, average.dtype))
            found[name] = average
        return found

    def state_dict(self) -> dict[str, object]:
        """The averages by name, and the number of steps; for ``torch.distributed.checkpoint``.

        Raises:
            ShardingStateError: the averages are swapped in.
        """
        return {"steps": self.steps, "averages": self.averages()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the result of `state_dict`, of this run or of another one with as many ranks.

        Args:
            state: of a model with the same names and shapes, sharded in the same way.

        Raises:
            ValueError: names, shapes or placements differ; nothing has changed then.
            ShardingStateError: the averages are swapped in.
        """
        given = cast("Mapping[str, torch.Tensor]", state["averages"])
        own = self.averages()
        wrong = sorted(own.keys() ^ given.keys())
        wrong += [name for name in own if name in given and not _alike(own[name], given[name])]
        if wrong:
            raise coded(
                ValueError,
                "ema-load",
                f"EMA.load_state_dict got averages that do not fit this model: "
                f"{wrong[0]}{f' and {len(wrong) - 1} more' if len(wrong) > 1 else ''}; to load "
                f"averages that were sharded in another way, use fsdp2.checkpoint or "
                f"torch.distributed.checkpoint",
            )
        for name, tensor in own.items():
            local_of(tensor).copy_(local_of(given[name]))
        self.steps = int(cast(int, state["steps"]))

    # ---- where they are

    def _weight(self) -> float:
        """The share of the weights in this update."""
        before = self.updates
        if not before:
            return 1.0
        if self._decay is None:
            return 1 / (before + 1)
        decay = self._decay(before) if callable(self._decay) else self._decay
        return 1 - _checked(decay)

    def _require_apart(self, method: str) -> None:
        if self._swapped:
            raise coded(
                ShardingStateError,
                "ema-swapped",
                f"EMA.{method}() was called while the averages are the model's weights; call it "
                f"after the end of `with ema.swapped()`",
            )

    def _follow(self) -> None:
        """Follow parameters that have moved or were replaced."""
        replaced = any(param.sharded is not known for param, known in self._managed)
        if replaced or any(local_of(e.param) is not e.rows for e in self._averages.values()):
            self._cut()

    @torch.no_grad()
    def _cut(self) -> None:
        """Create the averages for the parameters as they are now, with their contents."""
        selection = selected_params(self.model, recurse=True)
        self._managed = [(selected.param, selected.param.sharded) for selected in selection]
        tensors = _tensors_of(self.model, selection, self._buffers)
        for name, tensor in tensors.items():
            _check_averaged(name, tensor)
        former, self._averages = self._averages, {}
        for name, tensor in tensors.items():
            rows = local_of(tensor)
            with torch.inference_mode(False):
                made = torch.empty_like(
                    rows,
                    dtype=self._dtype if rows.is_floating_point() else None,
                    device=self._device,
                    requires_grad=False,
                )
            made.copy_(former[name].average if name in former else rows)
            self._averages[name] = _Average(tensor, rows, made)


@dataclass
class _Average:
    """The average of one parameter's rows on this rank, or of a buffer."""

    param: torch.Tensor
    rows: torch.Tensor
    average: torch.Tensor
    _kept: torch.Tensor | None = None  # the weights, while the average is in their place

    @property
    def is_beside(self) -> bool:
        """Whether weights and average have the same dtype and device."""
        rows, average = self.rows, self.average
        return rows.dtype == average.dtype and rows.device == average.device

    def swap_in(self) -> None:
        """Put the averages into the weights."""
        if self.is_beside:
            _exchange(self.rows, self.average)
            return
        self._kept = self.rows.to(self.average.device, copy=True)
        self.rows.copy_(self.average)

    def swap_out(self) -> None:
        """Put the weights back."""
        if self._kept is None:
            _exchange(self.rows, self.average)
            return
        self.rows.copy_(self._kept)
        self._kept = None


def _exchange(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange the contents of two tensors of the same shape, piece by piece."""
    if not (first.is_contiguous() and second.is_contiguous()):
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
        return
    pieces = zip(first.view(-1).split(CHUNK), second.view(-1).split(CHUNK), strict=True)
    for one, other in pieces:
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def _tensors_of(
    model: nn.Module, selection: list[SelectedParam], buffers: bool
) -> dict[str, torch.Tensor]:
    """Sharded parameters, others, and buffers if requested: each once, by its first name."""
    managed = {id(form) for selected in selection for form in selected.param.forms()}
    found = {selected.names[0]: selected.param.sharded for selected in selection}
    tensors: dict[str, torch.Tensor] = dict(found)
    for name, param in model.named_parameters():
        if id(param) not in managed:
            tensors[clean(name)] = param
    for name, buffer in model.named_buffers() if buffers else ():
        if buffer.is_floating_point():
            tensors[clean(name)] = buffer
    return tensors


def _check_averaged(name: str, tensor: torch.Tensor) -> None:
    local = local_of(tensor)
    if local.is_meta:
        raise coded(
            ValueError,
            "ema-meta",
            f"EMA cannot average '{name}', which is on the meta device; create the EMA after the "
            f"model's parameters have memory",
        )
    if is_extended(local):
        raise coded(
            ValueError,
            "ema-extension",
            f"EMA cannot average '{name}', whose tensor subclass has all-gather hooks "
            f"({type(local).__name__}); average the model before its conversion",
        )


def _checked(decay: float) -> float:
    if not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
        raise coded(
            ValueError,
            "ema-decay",
            f"EMA takes a decay from 0 to 1, or a function of the number of updates that returns "
            f"one, or None for the plain mean, not {decay!r}; pass for example 0.999",
        )
    return decay


def _alike(own: torch.Tensor, given: object) -> bool:
    """Whether a tensor can be copied into another, row by row."""
    if not isinstance(given, torch.Tensor) or isinstance(own, DTensor) != isinstance(
        given, DTensor
    ):
        return False
    placed = getattr(own, "placements", None)
    if placed != getattr(given, "placements", None):
        return False
    return own.shape == given.shape and local_of(own).shape == local_of(given).shape
