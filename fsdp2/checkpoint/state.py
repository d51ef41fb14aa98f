"""The saved state of a model, an optimizer and a run, by name; and its differences from a step's.

model.<name>                              parameters and persistent buffers
buffers.<name>                            non-persistent buffers, on request
optimizer.state.<parameter>.<key>         the names of torch's get_optimizer_state_dict
optimizer.param_groups                    with names instead of parameters
states.<name>.<key>                       further tensors, such as averages of weights
wire.residuals.<name>                     errors that error feedback adds to the next gradients
wire.references.<name>                    the base of the next differences of weights
rng.<rank>.<device>                       states of random number generators
extra.<place>                             tensors of the user
rank_extra.<rank>.<place>                 the same, of each rank
values.<name>                             of a name above: its value with its types, see `values`
about                                     how it was saved: `Saved`

`held_by` returns which part of each tensor this rank has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.checkpoint.snapshots import (
    Nested,
    above,
    named_parameters,
    optimizer_state,
    snapshot,
    whole_state,
)
from fsdp2.checkpoint.staging import is_plain
from fsdp2.checkpoint.tensors import About
from fsdp2.checkpoint.values import Packed, is_kept_by_dcp
from fsdp2.core.errors import checkpoint_error
from fsdp2.core.facts import clean, local_of, part_of

# ---- what is there


Models: TypeAlias = nn.Module | Mapping[str, nn.Module]
"""A model, or several by name."""

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""An optimizer, or several that have no parameter in common."""

States: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""Tensors by name, by the name of the state."""


Names: TypeAlias = Callable[[str], str | None]
"""The model's name of a tensor to its name in a step or in files; ``None`` leaves it out."""


@dataclass(frozen=True)
class Saved:
    """How a step was saved. Steps of older versions, and DCP's, have none."""

    trainable: bool = False
    ties: Mapping[str, str] = field(default_factory=dict)  # to the first name of the same tensor
    optimizers: Sequence[str] = ()  # names of classes


def as_module(model: Models) -> nn.Module:
    """Several models as one, whose parameters are called by both names."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, Mapping) or not all(
        isinstance(name, str) and name and "." not in name and isinstance(each, nn.Module)
        for name, each in model.items()
    ):
        raise checkpoint_error(
            "ckpt-models",
            f"checkpoints take a module, or a dict from names without dots to modules, not "
            f"{_shown(model)}; pass the model",
        )
    return nn.ModuleDict(model)


def first_of(model: Models) -> nn.Module:
    """The one of several models that represents all in the record of continued steps."""
    return next(iter(model.values()), nn.Module()) if isinstance(model, Mapping) else model


def as_list(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    """Optimizers in their order; none for ``None``."""
    found: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    found = [each for each in found if each is not None]
    wrong = next((each for each in found if not hasattr(each, "param_groups")), None)
    if wrong is not None:
        raise checkpoint_error(
            "ckpt-optimizers",
            f"checkpoints take an optimizer, or a list of them, not {_shown(wrong)}; pass the "
            f"optimizer",
        )
    return found


def as_states(states: object) -> States:
    """States by name, each of tensors by name; none for ``None``."""
    given = {} if states is None else states
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str)
        and isinstance(held, Mapping)
        and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in held.items())
        for name, held in given.items()
    ):
        raise checkpoint_error(
            "ckpt-states",
            f"checkpoints take states as a dict of dicts of tensors, all by name, not "
            f"{_shown(given)}; pass for example states=dict(ema=averages), and other values in "
            f"extra",
        )
    return given


def check_step(caller: str, step: object) -> None:
    """Raise a `CheckpointError` unless ``step`` is the number of one."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise checkpoint_error(
            "ckpt-step", f"{caller}(step=…) takes an integer from 0, not {step!r}"
        )


def _shown(given: object) -> str:
    if isinstance(given, (Mapping, list, tuple)):
        return f"a {type(given).__qualname__} of {sorted(map(str, given))}"
    return f"a {type(given).__qualname__}"


def state_of(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    states: States,
    buffers: bool,
    trainable: bool,
) -> Nested:
    """All that is saved of a model and optimizers; tensors are theirs, not copies."""
    seen = snapshot(model)
    params = dict(named_parameters(model))
    frozen = {name for name, p in params.items() if trainable and not p.requires_grad}
    kept = {k: v for k, v in seen.model.items() if above(k, params) not in frozen}
    _check_below(kept, params)
    state: Nested = {"model": kept}
    if optimizers:
        state["optimizer"] = optimizer_state(optimizers, params)
    if buffers:
        state["buffers"] = dict(seen.buffers)
    if states:
        state["states"] = {name: dict(held) for name, held in states.items()}
    state["values"] = kept_values(state)
    kinds = [class_of(optimizer) for optimizer in optimizers]
    state["about"] = json.dumps(asdict(Saved(trainable, ties_of(kept), kinds)))
    return state


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer's class; of the inner one, where it only arranges memory."""
    kind = getattr(optimizer, "optimizer_class", type(optimizer))
    return f"{kind.__module__}.{kind.__qualname__}"


def ties_of(model: Mapping[str, object]) -> dict[str, str]:
    """Names of tensors that are the same memory as one before, and that one's name."""
    first: dict[object, str] = {}
    found = {}
    for name, value in model.items():
        if isinstance(value, Tensor) and (local := local_of(value)).numel() and not local.is_meta:
            kept = first.setdefault(memory_of(local), name)
            if kept != name:
                found[name] = kept
    return found


def memory_of(local: Tensor) -> object:
    """Which memory it is: the same for tied tensors, unless they are empty."""
    if local.layout is not torch.strided:
        return id(local)
    storage = local.untyped_storage()._cdata
    return storage, local.storage_offset(), tuple(local.shape), local.stride(), local.dtype


def _values_in(state: Nested) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """(path, value) of all that is saved of models, optimizers and states besides."""
    for kind in ("model", "buffers"):
        for name, value in state.get(kind, {}).items():
            yield (kind, name), value
    for name, held in state.get("states", {}).items():
        for key, value in held.items():
            yield ("states", name, key), value
    optimizer = state.get("optimizer", {"state": {}, "param_groups": []})
    for param, kept in optimizer["state"].items():
        for key, value in kept.items():
            yield ("optimizer", "state", param, _text(key, param)), value
    for place, group in enumerate(optimizer["param_groups"]):
        for key, value in group.items():
            yield ("optimizer", "param_groups", place, _text(key, f"group {place}")), value


def _text(key: object, of: str) -> str:
    if isinstance(key, str):
        return key
    raise checkpoint_error(
        "ckpt-state-key",
        f"the optimizer's state of '{of}' has the key {key!r}, which load() would return as a "
        f"string; use strings as keys of states",
    )


def _check_stored(path: tuple[str | int, ...], rows: Tensor) -> None:
    name = ".".join(map(str, path))
    # A load writes into the tensor that is there, which has other elements then, or scales.
    if rows.layout is not torch.strided or rows.is_quantized:
        what = f"of {rows.dtype}" if rows.is_quantized else f"of {rows.layout}"
        raise checkpoint_error(
            "ckpt-layout",
            f"save() cannot store '{name}', a tensor {what}, which load() could not restore in "
            f"place; make it dense, or a buffer that is not persistent",
        )
    # Low-precision states are codes in a subclass, and scales that depend on this rank's rows.
    if path[0] == "optimizer" and is_traceable_wrapper_subclass(rows):
        raise checkpoint_error(
            "ckpt-subclass",
            f"save() cannot store '{name}', whose shards are of the tensor subclass "
            f"{type(rows).__name__}; save this optimizer with torch.distributed.checkpoint",
        )


def _check_below(model: Mapping[str, object], params: Mapping[str, object]) -> None:
    """A module of bitsandbytes writes the scales of a weight as entries that no load reads."""
    for name in model:
        param = above(name, params)
        if param != name and param in model:
            raise checkpoint_error(
                "ckpt-beside",
                f"save() cannot store '{name}', which a module stores in addition to the "
                f"quantized parameter '{param}', and which load() could not restore; pass "
                f"trainable=True, which leaves out frozen parameters",
            )


def kept_values(state: Nested) -> Nested:
    """Values that DCP's items do not restore exactly, with their types; and tensors in them."""
    found: Nested = {}
    for path, value in _values_in(state):
        if isinstance(value, Tensor):
            _check_stored(path, local_of(value))
            continue
        if is_kept_by_dcp(value):
            continue
        name = ".".join(map(str, path))

        def named(tensor: Tensor, inside: tuple[str, ...], reached: bool, name: str = name) -> str:
            if isinstance(tensor, DTensor) and name.startswith("optimizer.state."):
                raise checkpoint_error(
                    "ckpt-contained",
                    f"save() cannot store '{name}', which has a DTensor in a container, because "
                    f"load() would return a plain tensor; save the model without this optimizer",
                )
            if reached:
                return ".".join((name, *inside))
            place = f"{name}#{len(found)}"
            found[place] = tensor.detach() if tensor.requires_grad else tensor
            return f"values.{place}"

        held = Packed(value, named)
        if held.wrong:
            raise checkpoint_error(
                "ckpt-value",
                f"save() cannot store '{name}', which has {held.wrong[0]} and cannot be loaded "
                f"without running code; build it from numbers, strings, bytes, tensors and "
                f"containers of them",
            )
        found[name] = json.dumps([path, held.content])
    return found


# ---- random numbers


def rng_states() -> dict[str, torch.Tensor]:
    """The CPU's, and the current accelerator's."""
    states = {"cpu": torch.get_rng_state()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if hasattr(module, "get_rng_state"):
            states[accelerator.type] = module.get_rng_state()
    return states


def set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    for kind, value in states.items():
        if kind == "cpu":
            torch.set_rng_state(value)
        else:
            torch.get_device_module(kind).set_rng_state(value)


# ---- what differs


@dataclass
class Differences:
    """Names that differ between a model or an optimizer and a step.

    Attributes:
        missing: the model or the optimizer has it, the step does not.
        unexpected: the step has it, the model and the optimizer do not.
        reshaped: both have it, with different shapes.
        retyped: both have it, with different dtypes.
        conflicting: one has several values and the other has one: a parameter that is tied now and
            was not; an option of groups that were merged or split.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    retyped: list[str] = field(default_factory=list)
    conflicting: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def left(self) -> set[str]:
        """Entries that exist but are not loaded."""
        return {*self.missing, *self.reshaped, *self.retyped, *self.conflicting}

    def compare(
        self, name: str, value: Tensor | Held, saved: About | None, cast: bool = False
    ) -> bool:
        """Return whether ``value`` has the saved shape and dtype, and this rank's part of it the
        shape of a part; if not, record it.

        Args:
            name: the name of ``value``.
            value: the tensor that would receive the saved one.
            saved: the saved one; ``None`` if it is no tensor.
            cast: whether another floating-point dtype is accepted.
        """
        if saved is None or tuple(value.shape) != saved.shape or not is_part(value):
            self.reshaped.append(name)
            return False
        both = value.dtype.is_floating_point and saved.dtype.is_floating_point
        if value.dtype != saved.dtype and not (cast and both):
            self.retyped.append(name)
            return False
        return True

    @classmethod
    def over_ranks(cls, parts: Sequence[Differences]) -> Differences:
        """Differences on any rank; unexpected names are those that no rank has."""
        unexpected = set(parts[0].unexpected).intersection(*(part.unexpected for part in parts))
        found = {key: sorted({n for part in parts for n in vars(part)[key]}) for key in vars(cls())}
        return cls(**found | {"unexpected": sorted(unexpected)})


def is_whole(saved: object, like: Tensor) -> bool:
    """Whether every element of such a tensor was saved: false if only one replica has saved it."""
    if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != tuple(like.shape):
        return False
    count = sum(prod(chunk.sizes) for chunk in saved.chunks)
    return saved.properties.dtype == like.dtype and count == like.numel()


# ---- where a rank's part of a tensor lies


@dataclass(frozen=True)
class Held:
    """A tensor of a model, and what this rank has of it."""

    shape: tuple[int, ...]
    local: Tensor
    offsets: tuple[int, ...]  # of its first element in the whole, in each dim
    sharded: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype


def held_by(model: nn.Module, names: Names) -> tuple[dict[str, Held], dict[str, str], list[str]]:
    """Parameters and persistent buffers by name; names tied to others; names of other values.

    Tensors of other classes are left out if `names` returns ``None`` for them.
    """
    found: dict[str, Held] = {}
    tied: dict[str, str] = {}
    others: list[str] = []
    first: dict[object, str] = {}
    state = whole_state(model)
    registered = {
        clean(name): id(each)
        for named in (model.named_parameters, model.named_buffers)
        for name, each in named(remove_duplicate=False)
    }
    for name, value in state.items():
        if not isinstance(value, Tensor):
            others.append(name)
            continue
        if not is_plain(local_of(value)) and names(name) is None:
            continue
        held = held_of(name, value.detach())
        # What has no memory is tied where it is the same object; its storage tells nothing: two
        # empty parts may be at one place of a buffer.
        empty = held.local.is_meta or not held.local.numel()
        same = registered.get(name, name) if empty else memory_of(held.local)
        kept = first.setdefault((same, held.shape), name)
        if kept == name:
            found[name] = held
        else:
            tied[name] = kept
    return found, tied, others


def held_of(name: str, value: Tensor) -> Held:
    """This rank's part of a tensor."""
    shape = tuple(value.shape)
    local = value.to_local() if isinstance(value, DTensor) else value
    if not is_plain(local):
        kind = type(local).__name__ if local.layout is torch.strided else str(local.layout)
        raise checkpoint_error(
            "export-class",
            f"'{name}' is a {kind}, not a plain tensor, so its bytes are not its values; convert "
            f"it, or let names= return None for it",
        )
    if not isinstance(value, DTensor):
        return Held(shape, local, (0,) * len(shape), False)
    offsets, lengths = part_of(value.device_mesh, value.placements, shape)
    if lengths != tuple(local.shape):
        raise checkpoint_error(
            "export-part",
            f"'{name}' has shape {tuple(local.shape)} on this rank, which does not follow from "
            f"its placements {value.placements}; redistribute it to Shard and Replicate",
        )
    return Held(shape, local, offsets, True)


def is_part(value: object) -> bool:
    """Whether this rank's part of a tensor has the shape that follows from its placements."""
    if not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is None:
        return True
    _, lengths = part_of(value.device_mesh, value.placements, tuple(value.shape))
    return -1 in lengths or lengths == tuple(local_of(value).shape)
