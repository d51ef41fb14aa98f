"""The state that a rank trains with, as one value, and how a rank that joins takes it over.

    value()   model      parameters, each once: this rank's rows
              buffers    all, copied: a forward writes them
              extra      extra states of modules
              optimizers states by name of the parameter, options by group
              states     of the user's objects: schedulers, scalers, averages of weights, …
    put(…)    the same, in place; state of this rank only is reset: see below

Nothing communicates and nothing of the model changes where the value is made, so that another
thread may make it during a forward or a backward (`fsdp2.checkpoint.snapshots`). It is of the step
that was committed last: optimizers, schedulers and averages write after a
commit. Buffers belong to a group, as they are not averaged: if the quorum runs during the forward,
they may be one forward ahead.

Random numbers stay this rank's, which draws other ones than its peers. So do what wire formats keep
between steps: residuals are of gradients of this rank's, and begin at zero; references are given
up, so that the next gather is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.checkpoint.optimizers import put_state
from fsdp2.checkpoint.snapshots import (
    Nested,
    extra_states,
    named_buffers,
    named_parameters,
    names_in,
    optimizer_state,
)
from fsdp2.checkpoint.values import Value
from fsdp2.core.facts import local_of, records_below, wrap_local
from fsdp2.elastic.image import Layout, MeshKey, described, meshes_of
from fsdp2.full.loading import require_writable, rewritten
from fsdp2.sharding.wire_states import WireState

_COPIED = 4096
"""Bytes up to which a tensor is copied when the value is made: step counts, scales."""


class Contents:
    """A model, optimizers over its parameters, and objects of the user's by name, of one rank."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        states: Mapping[str, Stateful],
    ) -> None:
        self.model = model
        self._optimizers = optimizers
        self._states = states

    def layout(self) -> Layout:
        """This rank's part of each parameter and buffer, and the other objects, in words."""
        found = {name: described(param) for name, param in _once(self.model)}
        found |= {name: described(buffer) for name, buffer in named_buffers(self.model)}
        names = {id(param): name for name, param in _once(self.model)}
        for at, optimizer in enumerate(self._optimizers):
            own = names_in(optimizer, names)
            found[f"optimizer {at}"] = f"{type(optimizer).__qualname__} of {', '.join(own)}"
        found |= {
            f"states['{name}']": type(each).__qualname__ for name, each in self._states.items()
        }
        return found

    def meshes(self) -> Mapping[MeshKey, DeviceMesh]:
        """The meshes of all parameters and buffers."""
        tensors = [*named_parameters(self.model), *named_buffers(self.model)]
        return meshes_of(tensor for _, tensor in tensors)

    @torch.no_grad()
    def value(self) -> Nested:
        """All contents; tensors are views, except buffers and small ones."""
        with torch.inference_mode(False):
            params = dict(named_parameters(self.model))
            return {
                "model": {name: rows.detach() for name, rows in _rows(_once(self.model))},
                "buffers": {
                    name: rows.detach().clone() for name, rows in _rows(named_buffers(self.model))
                },
                "extra": {name: each.get_extra_state() for name, each in extra_states(self.model)},
                "optimizers": [_of_optimizer(optimizer, params) for optimizer in self._optimizers],
                "states": {
                    name: _settled(each.state_dict()) for name, each in self._states.items()
                },
            }

    @torch.no_grad()
    def put(self, value: Nested) -> None:
        """Take over what a peer with this `layout` had; an interrupted iteration is given up."""
        for record in records_below(self.model):
            if record.scheduler is not None and record.scheduler.is_running:
                record.scheduler.reset()
        require_writable(self.model, "ShardTransport.load_state_dict")
        with torch.inference_mode(False):
            with rewritten(self.model):
                for name, rows in _rows(_once(self.model)):
                    rows.copy_(value["model"].pop(name))
                for name, rows in _rows(named_buffers(self.model)):
                    rows.copy_(value["buffers"][name])
            for name, module in extra_states(self.model):
                module.set_extra_state(value["extra"][name])
            for optimizer, state in zip(self._optimizers, value["optimizers"], strict=True):
                self._put_optimizer(optimizer, state)
            for name, each in self._states.items():
                each.load_state_dict(value["states"][name])
            WireState(self.model).take({}, "a peer", warn=False)

    def _put_optimizer(self, optimizer: torch.optim.Optimizer, state: Nested) -> None:
        """Names become numbers again, and tensors go to the device of their parameter."""
        names = {id(param): name for name, param in _once(self.model)}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        numbers = {name: at for at, name in enumerate(names_in(optimizer, names))}
        kept: dict[int, Nested] = {}
        for name, entries in state["state"].items():
            device, on_host = params[numbers[name]].device, state["on_host"][name]
            kept[numbers[name]] = {
                key: each if key in on_host else _moved(each, device)
                for key, each in entries.items()
            }
        groups = [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in state["param_groups"]
        ]
        put_state(optimizer, {"state": kept, "param_groups": groups})


def _once(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters; a tied one under its first name."""
    seen: set[int] = set()
    for name, param in named_parameters(model):
        if id(param) not in seen:
            seen.add(id(param))
            yield name, param


def _rows(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """This rank's rows of tensors; of a subclass, the tensors that it is made of."""
    for name, tensor in tensors:
        yield from _plain(name, local_of(tensor))


def _plain(name: str, local: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not is_traceable_wrapper_subclass(local):
        yield name, local
        return
    for inner in local.__tensor_flatten__()[0]:
        yield from _plain(f"{name}.{inner}", getattr(local, inner))


def _of_optimizer(optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> Nested:
    """States, options, and which states are in CPU memory: host memory is all that a peer has."""
    state = _settled(optimizer_state([optimizer], params))
    on_host = {
        name: [key for key, value in entries.items() if _is_on_host(value)]
        for name, entries in state["state"].items()
    }
    return {**state, "on_host": on_host}


def _is_on_host(value: object) -> bool:
    return isinstance(value, Tensor) and local_of(value).device.type == "cpu"


def _settled(value: Value) -> Value:
    """A value whose small tensors are copies: a later step writes them in place."""
    if isinstance(value, Tensor):
        return value.clone() if local_of(value).nbytes <= _COPIED else value
    if type(value) is dict:
        return {key: _settled(held) for key, held in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_settled, value))
    return value


def _moved(value: Value, device: torch.device) -> Value:
    """A value with its rows on a device."""
    if isinstance(value, DTensor):
        return wrap_local(local_of(value).to(device), value._spec)
    return value.to(device) if isinstance(value, Tensor) else value
