"""Element-wise optimizers over flat shards: a few long tensors instead of many short ones.

    param_groups[i]["params"]   [A, B, C, D]                DTensors, as in any optimizer
    a group's flat shard        [ a a a | b b | c | pad ]   rows of A, B and C on this rank
    runs                        [ a a a   b b   c ] [d]     what the inner optimizer steps
    state of a run              exp_avg: [ a a a b b c ]    `state` shows rows of it as DTensors

A *run* is a stretch of one flat shard whose parameters belong to one parameter group and have been
stepped alike. Gradients that a reduction delivered lie side by side in the same order, so that a
run's gradient is a view of them; otherwise they are copied side by side for that step. Where only
some parameters of a run have a gradient, it is cut in two for good: the others are not stepped.

Nothing but memory is shared out differently: state dicts are those of the plain optimizer
(decision 13).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any, NoReturn, TypeGuard, cast

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.tensor import DTensor

from fsdp2.core.device.buffers import FlatBuffer, separate
from fsdp2.core.layout.layout import Transport
from fsdp2.core.layout.mesh import local_of, with_dtype, wrap_local
from fsdp2.core.modules.registry import records_below

_address = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous
_dtype = attrgetter("dtype")

ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers of torch that treat every element by itself."""

ParamState = dict[str, Any]
"""What an optimizer keeps for one parameter: momenta, step counts, whatever its class knows."""


ParamGroupOptions = dict[str, object]
"""A parameter group: the parameters, and the options that they are stepped with."""


class FlatOptimizer(torch.optim.Optimizer):
    """An element-wise optimizer that steps the flat shards of a model's units.

    The results are those of the plain optimizer over ``model.parameters()``; a step costs the host
    about as much as one over a tensor a unit. `param_groups` holds the parameters themselves, so
    that learning-rate schedules, `clip_grad_norm_`, ``GradScaler`` and
    ``torch.distributed.checkpoint`` work, and state dicts may be exchanged with the plain
    optimizer in both directions. Parameters that no unit manages are stepped as they are.

    Args:
        model: the module that `fully_shard` was called on (or has units below it).
        optimizer_class: an element-wise class, such as ``torch.optim.AdamW``.
        params: parameters or parameter groups, as for the class itself. Default ``None``: all of
            ``model.parameters()``.
        elementwise: ``True`` asserts that a class that is none of torch's treats every element by
            itself: no norms, no shapes, nothing of the parameter but its values and gradients.
        **options: passed on to ``optimizer_class``: ``lr``, ``betas``, ``fused`` …

    Raises:
        TypeError: ``model`` is not a module, or ``optimizer_class`` not a class that is known to
            be element-wise.
        ValueError: there are no parameters.

    `state` is a picture of the runs: tensors are views that may be written to, but step counts and
    numbers are copies.

    Example::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, lr=3e-4, fused=True)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Iterable[torch.Tensor] | Iterable[ParamGroupOptions] | None = None,
        *,
        elementwise: bool = False,
        **options: object,
    ) -> None:
        _check(model, optimizer_class, params)
        if optimizer_class not in ELEMENTWISE and not elementwise:
            name = getattr(optimizer_class, "__name__", optimizer_class)
            raise TypeError(
                f"{name} is not known to treat every element by itself, so it "
                f"cannot step several parameters as one tensor; use it as it is, or pass "
                f"elementwise=True if it does"
            )
        self._model = model
        self._make_inner: Callable[..., torch.optim.Optimizer]
        self._make_inner = functools.partial(optimizer_class, **options)
        self._runs: list[_Run] = []
        self._loaded: dict[torch.Tensor, ParamState] = {}  # state that no run has yet
        self._stale = True
        # The base class takes all that the class itself would, and reads what can be read once.
        super().__init__(model.parameters() if params is None else params, {})
        devices = (param.device for group in self.param_groups for param in group["params"])
        device = next(devices, torch.device("cpu"))
        self._inner = self._make_inner([nn.Parameter(torch.empty(0, device=device))])
        self.defaults = self._inner.defaults
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it steps the shards of its "
            f"model's units; save its state_dict(), and load that into one made for the other model"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What ``load_state_dict`` ends with."""
        self.state = state.pop("state")
        super().__setstate__(state)

    # ---- what users see

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class whose steps these are."""
        return type(self._inner)

    @property
    def state(self) -> defaultdict[torch.Tensor, ParamState]:
        """State by parameter; tensors of the parameter's shape are DTensors sharded like it."""
        found: dict[torch.Tensor, ParamState] = {}
        for run in self._runs:
            inner = self._inner.state.get(run.flat, {})
            for param, start in zip(run.params, run.starts, strict=True) if inner else ():
                found[param] = {
                    key: _part_of(value, run, param, start) for key, value in inner.items()
                }
        for param, state in self._loaded.items():
            found[param] = {key: wrapped(value, param) for key, value in state.items()}
        ordered = (param for group in self.param_groups for param in group["params"])
        return defaultdict(dict, {param: found[param] for param in ordered if param in found})

    @state.setter
    def state(self, state: Mapping[torch.Tensor, ParamState]) -> None:
        self._loaded = {param: localized(kept) for param, kept in state.items()}
        self._runs = []
        self._stale = True

    def add_param_group(self, param_group: ParamGroupOptions) -> None:
        """As ``torch.optim.Optimizer.add_param_group``."""
        super().add_param_group(param_group)
        self._stale = True

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss; with gradients enabled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._stale or not self._set_gradients():
            self._cut()
            fits = self._set_gradients()
            assert fits
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(options_of(group))
        self._inner.step()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(options_of(inner))  # a class may keep count there
        for run in self._runs:
            run.drop_gradient()
        return loss

    # ---- runs

    def _set_gradients(self) -> bool:
        """Give every run its gradient; ``False`` if one does not fit its parameters any more."""
        with DisableTorchFunctionSubclass():  # which every look at a DTensor would ask for
            return all(run.set_gradient() for run in self._runs)

    def _cut(self) -> None:
        """Make the runs anew, from where parameters are, what state and whether gradients."""
        states = {param: localized(state) for param, state in self.state.items()}
        places = _places(self._model)
        cut = [list(_runs_of(group["params"], places, states)) for group in self.param_groups]
        self._inner = self._make_inner(
            [
                {"params": [run.flat for run in runs], **options_of(group)}
                for group, runs in zip(self.param_groups, cut, strict=True)
            ]
        )
        self._runs = [run for runs in cut for run in runs]
        for run in self._runs:
            kept = [states[param] for param in run.params if param in states]
            if kept:  # of all, or of none
                self._inner.state[run.flat] = _joined(run, kept)
        self._loaded = {}
        self._stale = False


@dataclass
class _Run:
    """Parameters whose rows lie side by side, and the one tensor over them.

    Attributes:
        params: as `param_groups` has them.
        rows: this rank's rows of each, as they were when the run was made.
        flat: 1-D over all rows; for a single parameter its rows, of their own shape.
        starts: where each one's rows begin in ``flat``.
        sharded: whether the parameters are DTensors; one that is not is stepped as it is.
    """

    params: Sequence[torch.Tensor]
    rows: list[torch.Tensor]
    flat: torch.Tensor
    starts: list[int] = field(default_factory=list)
    sharded: bool = False

    def __post_init__(self) -> None:
        start = 0
        for rows in self.rows:
            self.starts.append(start)
            start += rows.numel()
        self.sharded = isinstance(self.params[0], DTensor)

    def set_gradient(self) -> bool:
        """Set ``flat.grad`` from the parameters' gradients; ``False`` if the run must be cut."""
        if not self.sharded:
            return True
        params = cast(Sequence[DTensor], self.params)
        if not all(map(is_, [param._local_tensor for param in params], self.rows)):
            return False
        given = cast("list[DTensor | None]", [param.grad for param in params])
        grads = [grad._local_tensor for grad in given if grad is not None]
        if not grads:
            self.flat.grad = None
            return True
        if len(grads) != len(params):
            return False
        grad = grads[0] if len(grads) == 1 else self._side_by_side(grads)
        if grad.dtype != self.flat.dtype and grad.dtype != self.flat.grad_dtype:
            self.flat.grad_dtype = grad.dtype
        self.flat.grad = grad
        return True

    def drop_gradient(self) -> None:
        """Leave gradients to the parameters, who alone say when they end."""
        if self.flat is not self.params[0]:
            self.flat.grad = None

    def _side_by_side(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """All gradients as one tensor: a view, if that is how they lie."""
        first = grads[0]
        begin, itemsize = first.data_ptr(), first.itemsize
        if (
            list(map(_address, grads)) == [begin + start * itemsize for start in self.starts]
            and all(map(_is_contiguous, grads))
            and len(set(map(_dtype, grads))) == 1
            and first.untyped_storage().data_ptr() == grads[-1].untyped_storage().data_ptr()
        ):
            return first.as_strided((self.flat.numel(),), (1,))
        return torch.cat([grad.reshape(-1) for grad in grads])


def _check(model: object, optimizer_class: object, params: object) -> None:
    """What torch's optimizers take first is the parameters; here it is the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"FlatOptimizer takes the model first, whose shards it steps, not {_shown(model)}; "
            f"pass FlatOptimizer(model, torch.optim.AdamW, lr=…), with params=… for some of its "
            f"parameters or for groups of them"
        )
    if not callable(optimizer_class) or isinstance(optimizer_class, nn.Module):
        raise TypeError(
            f"FlatOptimizer takes an optimizer's class behind the model, not "
            f"{_shown(optimizer_class)}; pass FlatOptimizer(model, torch.optim.AdamW, lr=…)"
        )
    if params is not None and not isinstance(params, Iterable):
        raise TypeError(
            f"FlatOptimizer takes parameters behind the optimizer's class, not {_shown(params)}; "
            f"pass options such as lr by their names"
        )


def _shown(given: object) -> str:
    return repr(given) if isinstance(given, str | float | type) else f"a {type(given).__name__}"


def options_of(group: ParamGroupOptions) -> ParamGroupOptions:
    """What a parameter group says of how its parameters are stepped."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _places(model: nn.Module) -> dict[torch.Tensor, tuple[FlatBuffer, int]]:
    """The flat shard that holds a parameter's rows, and their start in it, in bytes."""
    found: dict[torch.Tensor, tuple[FlatBuffer, int]] = {}
    for group in (group for record in records_below(model) for group in record.unit.own_groups):
        for segment in group.layout.segments if group.layout is not None else ():
            if segment.transport is Transport.EXTENSION:
                continue  # tensor subclasses, with memory of their own
            for slot in segment.slots:
                if group.params[slot.index].order is not None:
                    continue  # its rows are not in the order of the shard
                param = group.params[slot.index].sharded
                start = segment.shard_byte_offset + slot.shard_offset * param.dtype.itemsize
                rows = local_of(param)
                # Not of one that was moved since.
                if rows.numel() and rows.data_ptr() == group.shard.storage.data_ptr() + start:
                    found[param] = group.shard, start
    return found


def _runs_of(
    params: Iterable[torch.Tensor],
    places: Mapping[torch.Tensor, tuple[FlatBuffer, int]],
    states: Mapping[torch.Tensor, ParamState],
) -> Iterator[_Run]:
    """Cut one parameter group into runs."""
    alone: list[torch.Tensor] = []
    managed: dict[FlatBuffer, list[tuple[int, torch.Tensor]]] = {}
    for param in params:
        if param in places:
            shard, start = places[param]
            managed.setdefault(shard, []).append((start, param))
        else:
            alone.append(param)
    for shard, members in managed.items():
        members.sort(key=lambda member: member[0])
        run: list[torch.Tensor] = []
        begin = end = 0
        for start, param in members:
            if run and not (start == end and _alike(run[-1], param, states)):
                yield _make_run(run, shard, begin)
                run = []
            if not run:
                begin = start
            run.append(param)
            end = start + local_of(param).numel() * param.dtype.itemsize
        yield _make_run(run, shard, begin)
    for param in alone:
        rows = local_of(param)
        yield _Run(
            [param], [rows], nn.Parameter(rows.detach()) if isinstance(param, DTensor) else param
        )


def _make_run(params: list[torch.Tensor], shard: FlatBuffer, begin: int) -> _Run:
    rows = [local_of(param) for param in params]
    if len(rows) == 1:
        return _Run(params, rows, nn.Parameter(rows[0].detach()))
    total = sum(each.numel() for each in rows)
    return _Run(params, rows, nn.Parameter(shard.view(params[0].dtype, begin, (total,))))


def _alike(
    before: torch.Tensor, param: torch.Tensor, states: Mapping[torch.Tensor, ParamState]
) -> bool:
    """Whether two neighbours are stepped by one call: same dtype, history, and now."""
    if before.dtype != param.dtype or (before.grad is None) != (param.grad is None):
        return False
    first, second = states.get(before), states.get(param)
    if first is None or second is None:
        return first is second
    return first.keys() == second.keys() and all(
        _same(first[key], second[key], before, param) for key in first
    )


def _same(first: object, second: object, before: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether two entries of state can become one: both a value an element, or equal."""
    if _is_elementwise(first, before) and _is_elementwise(second, param):
        return bool(first.dtype == second.dtype)
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def _is_elementwise(value: object, param: torch.Tensor) -> TypeGuard[torch.Tensor]:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    return value.shape == local_of(param).shape


def _joined(run: _Run, states: Sequence[ParamState]) -> ParamState:
    """One state for a run, of the states of its parameters."""
    if len(states) == 1:
        return dict(states[0])
    joined: ParamState = {}
    for key, value in states[0].items():
        if _is_elementwise(value, run.params[0]):
            joined[key] = torch.cat([state[key].reshape(-1) for state in states])
        else:
            joined[key] = value
    return joined


# ---- state by parameter


def _part_of(value: object, run: _Run, param: torch.Tensor, start: int) -> object:
    """What of a run's state belongs to one parameter."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != run.flat.shape or value.dim() == 0:
        return value.clone()  # a step count: each parameter has its own
    return wrapped(separate(value, start, tuple(local_of(param).shape)), param)


def wrapped(value: object, param: torch.Tensor) -> object:
    """State as users see it: what has a value for each of this rank's elements is a DTensor."""
    if _is_elementwise(value, param) and isinstance(param, DTensor):
        return wrap_local(value, with_dtype(param._spec, value.dtype))
    return value


def localized(state: ParamState) -> ParamState:
    """The way back: rows in place of DTensors."""
    return {key: local_of(value) for key, value in state.items()}
