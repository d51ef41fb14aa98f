"""`load`: all is compared, on all ranks, before anything is written.

1. rank 0       which step, its manifest               ─> all ranks
2. every rank   files and lengths, DCP's index, names, shapes, dtypes
3. all          what differs on any rank               ─> raised on all, or reported
4. every rank   reads its own shards, into the parameters; new memory for an optimizer's state
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.folder import (
    Manifest,
    broken_values,
    check_files,
    check_hashes,
    items_of,
    newest_readable,
    read_manifest,
    store_of,
)
from fsdp2.checkpoint.saving import end_saves, note_load
from fsdp2.checkpoint.snapshot import Nested, snapshot
from fsdp2.checkpoint.state import (
    Differences,
    Extra,
    Reader,
    named_optimizer_state,
    params_by_place,
    read_below,
    read_into,
    rng_states,
    set_rng_states,
    unpacked,
)
from fsdp2.checkpoint.stores import AnyPath, PathLike, Store
from fsdp2.checkpoint.together import is_first, together
from fsdp2.core.config import CheckpointError
from fsdp2.core.device.collectives import rank_and_size
from fsdp2.module import FSDPModule

_STATE, _GROUPS = "optimizer.state", "optimizer.param_groups"


@dataclass
class Loaded:
    """What `load` has found.

    Attributes:
        step: the step.
        extra: what `save` was given, tensors on the CPU, tuples as lists.
        left: what differed and was left as it was; with ``strict=True`` it is empty.
    """

    step: int
    extra: Extra = None
    left: Differences = field(default_factory=Differences)


def load(
    folder: PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    rng: bool = False,
    verify: bool = False,
    buffers: bool = False,
    fallback: bool = False,
) -> Loaded:
    """Load a complete step, which any number of ranks, mesh or strategy may have saved.

    Every rank of the default process group calls it, with the same arguments. No code that a file
    holds is run.

    Args:
        folder: as of `save`.
        model: takes parameters and persistent buffers.
        optimizer: takes the saved optimizer's state and options. A parameter that had no state when
            it was saved has none then. Default ``None``: none is loaded.
        step: the step. Default ``None``: the newest complete one. The next save of this model goes
            on from it, and replaces the steps behind it: see `replaced`.
        strict: raise if names, shapes or dtypes differ. ``False``: load the others, and return what
            was left.
        rng: set this rank's random number generators, as ``save(rng=True)`` has found them on the
            rank of the same number. Default ``False``.
        verify: read every byte of the step before, each rank its part of the files, and raise if
            one is not what was saved. Default ``False``: files are there, and of their lengths. It
            costs about as long as reading the step once more, divided by the ranks.
        buffers: load buffers that are not persistent, too, as ``save(buffers=True)`` has saved
            them. Default ``False``.
        fallback: without ``step``, load the newest step that can be read, and warn of each newer
            one; the next save replaces these. With ``verify=True`` one with a flipped bit is none
            that can be read. Default ``False``: raise if the newest cannot be.

    Returns:
        The step, ``extra``, and what was left.

    Raises:
        CheckpointError: on all ranks alike, before anything is changed; unless a file turns out to
            be broken while it is read, which leaves the model partly loaded.

    Example::

        step = fsdp2.checkpoint.load("run", model, optimizer).step
    """
    what = f"load('{folder}')"
    end_saves()
    has = optimizer is not None
    asked = (str(folder), step, strict, rng, verify, buffers, fallback, has)
    told = together(what, lambda: _told(folder, asked, fallback and step is None, verify))
    if any(asked != told[0][0] for asked, _ in told):
        raise CheckpointError(
            f"load() got other folders, steps, optimizers or options on other ranks "
            f"({[asked for asked, _ in told]}); pass the same on all"
        )
    manifest = told[0][1]
    assert manifest is not None
    job = _Job(store_of(folder), manifest, model, optimizer, rng, verify, buffers)
    left = Differences.over_ranks(together(what, job.compare))
    if left and strict:
        raise CheckpointError(
            f"step {manifest.step} of '{folder}' is not of this model: missing {left.missing}, "
            f"unexpected {left.unexpected}, of other shapes {left.reshaped}, of other dtypes "
            f"{left.retyped}; pass strict=False to load what is alike"
        )
    together(what, lambda: job.read(left))
    note_load(model, job.store, manifest.step)
    return Loaded(manifest.step, job.extra, left)


def read_extra(folder: PathLike, step: int | None = None) -> Extra:
    """What `save` was given as ``extra``, without a model: what a run looks at before it begins.

    Local: call it on one rank, or in no job at all.

    Args:
        folder: as of `save`.
        step: the step. Default ``None``: the newest complete one.

    Raises:
        CheckpointError: there is no such step, or a file of it is missing or cut short.

    Example::

        >>> fsdp2.checkpoint.read_extra("run")
        {'epoch': 3}
    """
    store = store_of(folder)
    manifest = read_manifest(store, step)
    check_files(store, manifest)
    path = items_of(store, manifest)
    metadata = Reader(path).read_metadata()
    with broken_values(path):
        return unpacked(manifest.extra, read_below(path, metadata, "extra"))


def _told(
    folder: PathLike, asked: tuple[object, ...], fallback: bool, verify: bool
) -> tuple[tuple[object, ...], Manifest | None]:
    """What ranks must agree on, and rank 0's manifest."""
    store = store_of(folder)
    if not is_first():
        return asked, None
    step = asked[1]
    assert step is None or isinstance(step, int)
    return asked, newest_readable(store, verify) if fallback else read_manifest(store, step)


class _Job:
    """One load, on one rank."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        rng: bool,
        verify: bool,
        buffers: bool,
    ) -> None:
        self.store = store
        self._manifest = manifest
        self._path: AnyPath = items_of(store, manifest)
        self._model = model
        self._optimizer = optimizer
        self._rng = rng
        self._verify = verify
        self.extra: Extra = None
        self._buffers = dict(snapshot(model).buffers) if buffers else {}
        self._metadata = Metadata({})
        self._model_state: Nested = {}
        self._groups: list[Nested] = []  # the saved options, by place
        self._states: dict[str, dict[str, str]] = {}  # parameter -> key -> saved name

    def compare(self) -> Differences:
        """What differs; changes nothing.

        Raises:
            CheckpointError: the step cannot be loaded by anybody, or the groups are others.
        """
        if not self.store.has(self._manifest.step):
            place = self.store.folder(self._manifest.step)
            raise CheckpointError(
                f"rank {rank_and_size()[0]} does not see '{place}', which rank 0 has listed; "
                f"pass a folder on a file system that all ranks share"
            )
        check_files(self.store, self._manifest)
        if self._verify:
            rank, size = rank_and_size()
            check_hashes(self.store, self._manifest, sorted(self._manifest.files)[rank::size])
        self._metadata = Reader(self._path).read_metadata()
        found = Differences()
        saved = self._metadata.state_dict_metadata
        self._model_state, _ = flatten_state_dict({"model": get_model_state_dict(self._model)})
        for name, value in {**self._model_state, **self._own_buffers()}.items():
            if name not in saved:
                found.missing.append(name)
            else:
                found.compare(name, value, saved[name])
        found.unexpected += [
            name for name in saved if name.startswith("model.") and name not in self._model_state
        ]
        if self._optimizer is not None:
            self._compare_optimizer(self._optimizer, found)
        if self._rng:
            own = [f"rng.{rank_and_size()[0]}.{kind}" for kind in rng_states()]
            found.missing += [name for name in own if name not in saved]
        return found

    def _own_buffers(self) -> Nested:
        return {f"buffers.{name}": value for name, value in self._buffers.items()}

    def _compare_optimizer(self, optimizer: torch.optim.Optimizer, found: Differences) -> None:
        if not self._manifest.has_optimizer:
            raise CheckpointError(
                f"step {self._manifest.step} of '{self.store}' was saved without an optimizer; "
                f"load it without one"
            )
        saved = self._metadata.state_dict_metadata
        here = named_optimizer_state(self._model, optimizer)
        self._groups = list(read_below(self._path, self._metadata, _GROUPS))
        theirs = [group["params"] for group in self._groups]
        ours = [group["params"] for group in here["param_groups"]]
        if [set(names) for names in theirs] != [set(names) for names in ours]:
            different = sorted({n for g in theirs for n in g} ^ {n for g in ours for n in g})
            raise CheckpointError(
                f"step {self._manifest.step} of '{self.store}' has {len(theirs)} parameter "
                f"groups, and the optimizer {len(ours)}, over other parameters ({different} in one "
                f"alone); make the optimizer as it was, or load without it"
            )
        for place, (kept, group) in enumerate(zip(self._groups, here["param_groups"], strict=True)):
            name = f"{_GROUPS}.{place}"
            found.missing += [f"{name}.{key}" for key in group if key not in kept]
            found.unexpected += [f"{name}.{key}" for key in kept if key not in group]
        for name in saved:
            if name.startswith(_STATE + "."):
                path = self._metadata.planner_data[name]
                self._states.setdefault(path[2], {})[path[3]] = name
        self._compare_states(here["state"], found)

    def _compare_states(self, here: dict[str, Nested], found: Differences) -> None:
        """Of parameters that have a state in both; one in the step alone is taken as it is."""
        saved = self._metadata.state_dict_metadata
        for param, state in here.items():
            keys = self._states.get(param)
            if keys is None:
                continue
            for key, value in state.items():
                if key not in keys:
                    found.missing.append(f"{_STATE}.{param}.{key}")
                else:
                    found.compare(keys[key], value, saved[keys[key]])
            found.unexpected += [keys[key] for key in keys if key not in state]

    def read(self, left: Differences) -> None:
        """Read and put in place all but what is left; and ``extra``."""
        out = left.left()
        flat = {name: value for name, value in self._model_state.items() if name not in out}
        with torch.no_grad():
            read_into(self._path, self._metadata, flat)
            own = self._own_buffers()
            read_into(self._path, self._metadata, {k: own[k] for k in own if k not in out})
            _reshard(self._model)
            whole = get_model_state_dict(self._model)
            chosen = {key: value for key, value in whole.items() if f"model.{key}" in flat}
            for key in chosen:
                chosen[key] = flat[f"model.{key}"]
            options = StateDictOptions(strict=False)
            set_model_state_dict(self._model, chosen, options=options)
            if self._optimizer is not None:
                self._read_optimizer(self._optimizer, out, set(left.unexpected))
        if self._rng:
            states = read_below(self._path, self._metadata, f"rng.{rank_and_size()[0]}")
            set_rng_states(states)
        tensors = read_below(self._path, self._metadata, "extra")
        self.extra = unpacked(self._manifest.extra, tensors)

    def _read_optimizer(
        self, optimizer: torch.optim.Optimizer, out: set[str], unexpected: set[str]
    ) -> None:
        """Make a state dict of new memory, read into it, and let the optimizer take it."""
        places = params_by_place(self._model, optimizer)
        plain = optimizer.state_dict()
        flat: Nested = {}
        slots = list(self._slots(places, plain["state"], out | unexpected))
        for _, _, name, value in slots:
            flat[name] = value
        read_into(self._path, self._metadata, flat)
        state: dict[int, Nested] = {}
        for place, key, name, value in slots:
            state.setdefault(place, {})[key] = flat.get(name, value)
        for place, kept in plain["state"].items():
            for key, value in kept.items():  # what was left stays
                if f"{_STATE}.{places[place][0]}.{key}" in out:
                    state.setdefault(place, {})[key] = value
        for kept, group in zip(self._groups, plain["param_groups"], strict=True):
            group.update({k: v for k, v in kept.items() if k in group and k != "params"})
        optimizer.load_state_dict({"state": state, "param_groups": plain["param_groups"]})

    def _slots(
        self, places: list[tuple[str, Any]], here: dict[int, Nested], out: set[str]
    ) -> Iterator[tuple[int, str, str, Any]]:
        """(place, key, saved name, memory) of all that is read of an optimizer's state."""
        saved = self._metadata.state_dict_metadata
        for place, (param_name, param) in enumerate(places):
            for key, name in self._states.get(param_name, {}).items():
                if name in out:
                    continue
                about = saved[name]
                if not isinstance(about, TensorStorageMetadata):
                    yield place, key, name, None
                    continue
                dtype, like = about.properties.dtype, here.get(place, {}).get(key)
                if like is None and tuple(about.size) == tuple(param.shape) and param.dim():
                    like = param
                if like is None or (not isinstance(like, DTensor) and like.dim() == 0):
                    device = "cpu" if like is None else like.device
                    yield place, key, name, torch.empty(about.size, dtype=dtype, device=device)
                else:
                    yield place, key, name, torch.empty_like(like, dtype=dtype)


def _reshard(model: nn.Module) -> None:
    """Parameters are found by torch's functions where shards are registered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
