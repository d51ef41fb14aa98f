"""Stretches of flat shards that are stepped as one tensor each, in sections.

    flat shard   [ a a a | b b | c | pad ]   rows of A, B and C on this rank
    runs         [ a a a   b b   c ]         tensors that the inner optimizer of a section steps
    state        exp_avg: [ a a a b b c ]    its rows are the states of A, B and C

A *run* is a stretch of one flat shard whose parameters belong to one parameter group and have had
the same steps. A *section* is the runs that are stepped at one time, by one inner optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.tensor import DTensor

from fsdp2.core.facts import (
    FlatBuffer,
    ParamGroup,
    Transport,
    all_groups,
    local_of,
    separate,
    with_dtype,
    wrap_local,
)

_address = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous
_dtype = attrgetter("dtype")

ParamState = dict[str, Any]
"""State that an optimizer keeps for one parameter: momenta, step counts and others."""


ParamGroupOptions = dict[str, object]
"""A parameter group: the parameters, and the options that they are stepped with."""

Params = Iterable[torch.Tensor] | Iterable[ParamGroupOptions] | Iterable[tuple[str, torch.Tensor]]
"""Parameters or groups, as torch's optimizers take them."""


class Section:
    """Runs that are stepped together: all of an optimizer's, or those of one unit's parameters."""

    def __init__(
        self,
        make_inner: Callable[..., torch.optim.Optimizer],
        members: Set[torch.Tensor] | None = None,
    ) -> None:
        self.members = members
        self.runs: list[FlatRun] = []
        self.stale = True
        self._make_inner = make_inner
        self._inner: torch.optim.Optimizer | None = None

    def states(self) -> dict[torch.Tensor, ParamState]:
        """The state of each parameter, as parts of its run's state."""
        found: dict[torch.Tensor, ParamState] = {}
        for run in self.runs:
            assert self._inner is not None
            inner = self._inner.state.get(run.stepped, {})
            for param, start in zip(run.params, run.starts, strict=True) if inner else ():
                found[param] = {
                    key: _part_of(value, run, param, start) for key, value in inner.items()
                }
        return found

    def drop(self) -> None:
        """Forget runs and their state."""
        self.runs = []
        self.stale = True

    def set_gradients(self) -> bool:
        """Give every run its gradient; ``False`` if one no longer fits its parameters."""
        with DisableTorchFunctionSubclass():  # faster access to DTensors
            return all(run.set_gradient() for run in self.runs)

    def cut(
        self,
        groups: Sequence[ParamGroupOptions],
        places: Mapping[torch.Tensor, tuple[FlatBuffer, int]],
        loaded: Mapping[torch.Tensor, ParamState],
    ) -> None:
        """Create the runs again, by the positions, states and gradients of parameters."""
        states = {param: localized(state) for param, state in self.states().items()}
        states.update(loaded)
        alike = functools.partial(_alike, states=states)
        cut = [list(map(self.placed, runs_of(self._own(group), places, alike))) for group in groups]
        self._inner = self._make_inner(
            [
                {"params": [run.stepped for run in runs], **options_of(group)}
                for group, runs in zip(groups, cut, strict=True)
            ]
        )
        self.runs = [run for runs in cut for run in runs]
        for run in self.runs:
            kept = [states[param] for param in run.params if param in states]
            if kept:  # for all, or for none
                self._inner.state[run.stepped] = self.kept(_joined(run, kept))
        self.stale = False

    def placed(self, run: FlatRun) -> FlatRun:
        """Prepare a new run: here it is stepped in place."""
        return run

    def kept(self, state: ParamState) -> ParamState:
        """Earlier state of a run, on the device where it is stepped."""
        return state

    def _own(self, group: ParamGroupOptions) -> list[torch.Tensor]:
        params = cast("list[torch.Tensor]", group["params"])
        members = self.members
        return params if members is None else [param for param in params if param in members]

    def step(self, groups: Sequence[ParamGroupOptions]) -> None:
        """Step runs with a gradient, with the present options of the groups."""
        assert self._inner is not None
        for group, inner in zip(groups, self._inner.param_groups, strict=True):
            inner.update(options_of(group))
        self._inner.step()
        for run in self.runs:
            run.drop_gradient()

    def written(self, groups: Sequence[ParamGroupOptions]) -> list[ParamGroupOptions]:
        """Options that the last step wrote into groups: a class may store counts there."""
        assert self._inner is not None
        return [
            {key: value for key, value in options_of(inner).items() if value is not group.get(key)}
            for group, inner in zip(groups, self._inner.param_groups, strict=True)
        ]


@dataclass
class FlatRun:
    """Parameters whose rows are adjacent in memory, and the one tensor over them."""

    params: Sequence[torch.Tensor]
    rows: list[torch.Tensor]
    flat: torch.Tensor
    starts: list[int] = field(default_factory=list)
    sharded: bool = False
    stepped: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        start = 0
        for rows in self.rows:
            self.starts.append(start)
            start += rows.numel()
        self.sharded = isinstance(self.params[0], DTensor)
        self.stepped = self.flat

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
        grad = grads[0] if len(grads) == 1 else self.side_by_side(grads)
        if grad.dtype != self.flat.dtype and grad.dtype != self.flat.grad_dtype:
            self.flat.grad_dtype = grad.dtype
        self.flat.grad = grad
        return True

    def drop_gradient(self) -> None:
        """Drop the view of gradients: only the parameters decide how long gradients exist."""
        if self.flat is not self.params[0]:
            self.flat.grad = None

    def side_by_side(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """All gradients as one tensor: a view, if they are adjacent."""
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


def options_of(group: ParamGroupOptions) -> ParamGroupOptions:
    """Options of a parameter group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def groups_with(params: Iterable[torch.Tensor]) -> list[ParamGroup]:
    """The groups that parameters belong to, in the order of the parameters."""
    owner: dict[torch.Tensor, ParamGroup] = {p.sharded: g for g in all_groups() for p in g.params}
    return list(dict.fromkeys(owner[param] for param in params if param in owner))


def places_of(params: Iterable[torch.Tensor]) -> dict[torch.Tensor, tuple[FlatBuffer, int]]:
    """The flat shard that holds a parameter's rows, and their start in it, in bytes."""
    found: dict[torch.Tensor, tuple[FlatBuffer, int]] = {}
    for group in groups_with(params):
        for segment in group.shard_layout.segments:
            if segment.transport is Transport.EXTENSION:
                continue  # tensor subclasses, which have their own memory
            for slot in segment.slots:
                if group.params[slot.index].order is not None:
                    continue  # its rows have another order than the shard
                param = group.params[slot.index].sharded
                start = segment.shard_byte_offset + slot.shard_offset * param.dtype.itemsize
                rows = local_of(param)
                # A parameter that has since moved has no position.
                if rows.numel() and rows.data_ptr() == group.shard.storage.data_ptr() + start:
                    found[param] = group.shard, start
    return found


def runs_of(
    params: Iterable[torch.Tensor],
    places: Mapping[torch.Tensor, tuple[FlatBuffer, int]],
    alike: Callable[[torch.Tensor, torch.Tensor], bool],
) -> Iterator[FlatRun]:
    """Cut parameters into runs."""
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
            if run and not (start == end and alike(run[-1], param)):
                yield _make_run(run, shard, begin)
                run = []
            if not run:
                begin = start
            run.append(param)
            end = start + local_of(param).numel() * param.dtype.itemsize
        yield _make_run(run, shard, begin)
    for param in alone:
        rows = local_of(param)
        yield FlatRun(
            [param], [rows], nn.Parameter(rows.detach()) if isinstance(param, DTensor) else param
        )


def _make_run(params: list[torch.Tensor], shard: FlatBuffer, begin: int) -> FlatRun:
    rows = [local_of(param) for param in params]
    if len(rows) == 1:
        return FlatRun(params, rows, nn.Parameter(rows[0].detach()))
    total = sum(each.numel() for each in rows)
    return FlatRun(params, rows, nn.Parameter(shard.view(params[0].dtype, begin, (total,))))


def _alike(
    before: torch.Tensor, param: torch.Tensor, states: Mapping[torch.Tensor, ParamState]
) -> bool:
    """Whether two neighbors can be in one run: same dtype, earlier steps, and gradients now."""
    if before.dtype != param.dtype or (before.grad is None) != (param.grad is None):
        return False
    first, second = states.get(before), states.get(param)
    if first is None or second is None:
        return first is second
    return first.keys() == second.keys() and all(
        _same(first[key], second[key], before, param) for key in first
    )


def _same(first: object, second: object, before: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether two entries of state can become one: both have a value per element, or are equal."""
    if _is_elementwise(first, before) and _is_elementwise(second, param):
        return bool(first.dtype == second.dtype)
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def _is_elementwise(value: object, param: torch.Tensor) -> TypeGuard[torch.Tensor]:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    return value.shape == local_of(param).shape


def _joined(run: FlatRun, states: Sequence[ParamState]) -> ParamState:
    """One state for a run, from the states of its parameters."""
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


def _part_of(value: object, run: FlatRun, param: torch.Tensor, start: int) -> object:
    """The part of a run's state that belongs to one parameter."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != run.flat.shape or value.dim() == 0:
        return value.clone()  # a step count: each parameter has its own
    return wrapped(separate(value, start, tuple(local_of(param).shape)), param)


def wrapped(value: object, param: torch.Tensor) -> object:
    if _is_elementwise(value, param) and isinstance(param, DTensor):
        return wrap_local(value, with_dtype(param._spec, value.dtype))
    return value


def localized(state: ParamState) -> ParamState:
    return {key: local_of(value) for key, value in state.items()}


def keep(kept: ParamState, state: ParamState, param: torch.Tensor) -> None:
    """Put entries of a state of rows that a step has made or replaced into the parameter's."""
    for key, value in state.items():
        if key not in kept or local_of(kept[key]) is not value:
            kept[key] = wrapped(value, param)
