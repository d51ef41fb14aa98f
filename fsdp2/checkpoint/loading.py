"""`load`: all ranks compare everything before anything is written.

1. rank 0       which step, its manifest               ─> all ranks
2. every rank   files and lengths, DCP's index, names, shapes of wholes and parts, dtypes; ``extra``
3. all          differences on any rank                ─> raised on all, or reported
4. every rank   reads its own shards, into the parameters; new memory for an optimizer's state

With ``transforms``, functions make tensors of the step's, before anything of the model is written:

    step   q [4, 4] ┐
           k [4, 4] ├─ whole, on the CPU ─> function ─> qkv [12, 4] ─> this rank's rows
           v [4, 4] ┘
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fsdp2.checkpoint.consensus import Call
from fsdp2.checkpoint.converting import kind_of
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
from fsdp2.checkpoint.optimizers import OptimizerMatch
from fsdp2.checkpoint.reading import Step
from fsdp2.checkpoint.retention import note_load
from fsdp2.checkpoint.saving import end_saves
from fsdp2.checkpoint.snapshots import Nested, above, named_parameters, snapshot, whole_state
from fsdp2.checkpoint.staging import is_plain
from fsdp2.checkpoint.state import (
    Differences,
    Models,
    Names,
    Optimizers,
    States,
    as_list,
    as_module,
    as_states,
    check_step,
    first_of,
    held_of,
    is_part,
    is_whole,
    rng_states,
    set_rng_states,
    ties_of,
)
from fsdp2.checkpoint.stores import STEP, PathLike, Store, is_url, local_path
from fsdp2.checkpoint.values import Value, unpacked
from fsdp2.core.errors import CheckpointError, checkpoint_error
from fsdp2.core.facts import ProcessGroup, local_of
from fsdp2.sharding.module import FSDPModule
from fsdp2.sharding.wire_states import WireState

Sources: TypeAlias = Callable[[str], str | Sequence[str] | None]
"""The model's name of a tensor to the step's, or to several; ``None`` leaves it out."""

Transform: TypeAlias = Callable[..., Tensor]
"""Makes a whole tensor of the step's whole tensors, in the order of their names."""


@dataclass
class Loaded:
    """The result of `load`.

    Attributes:
        step: the step.
        extra: the value passed to `save`, with its types; tensors are plain, full and on the CPU.
        rank_extra: the value passed to `save` as ``rank_extra`` on the rank of this number;
            ``None`` if there was no such rank.
        left: the entries that differed and were not loaded. With ``strict=True`` it is empty,
            except for random states that ``rng="if_saved"`` has not found.
    """

    step: int
    extra: Value = None
    rank_extra: Value = None
    left: Differences = field(default_factory=Differences)


def load(
    folder: PathLike,
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    rng: bool | Literal["if_saved"] = False,
    verify: bool = False,
    buffers: bool = False,
    cast: bool = False,
    names: Sources | None = None,
    transforms: Mapping[str, Transform] | None = None,
    states: States | None = None,
    fallback: bool = False,
    process_group: ProcessGroup | None = None,
) -> Loaded:
    """Load a complete step, saved by any number of ranks, with any mesh or strategy.

    Every rank of the process group calls it, with the same arguments. No code from a file runs.

    Args:
        folder: as for `save`; or the path of a step, which `save` returns.
        model: receives parameters and persistent buffers; or several models by name, as for `save`.
        optimizer: receives the saved optimizer's state and options, by the names of parameters:
            groups may differ, and several optimizers may become one. States come back in the dtype
            in which they were saved. A parameter that had no state when it was saved has none after
            loading. Default ``None``: none is loaded.
        step: the step. Default ``None``: the newest complete one. The next save of this model
            continues from it, and replaces the later steps: see `replaced`.
        strict: raise if names, shapes or dtypes differ. ``False``: load the others, and return the
            differences.
        rng: set this rank's random number generators to the states that ``save(rng=True)`` saved on
            the rank of the same number. ``"if_saved"``: only if there was such a rank; others keep
            theirs, and list it in ``left``. Default ``False``.
        verify: first read every byte of the step, each rank its part of the files, and raise if one
            differs from what was saved. This takes about as long as reading the step once more,
            divided by the number of ranks. Default ``False``: check only that files exist and have
            their lengths.
        buffers: also load non-persistent buffers, if saved with ``save(buffers=True)``. Default
            ``False``.
        cast: allow other dtypes of floating-point tensors, as fp32 weights in a bf16 model: they
            are rounded to the model's. So are states of the optimizer that had the parameter's
            dtype. Default ``False``.
        names: maps the model's name of a parameter or buffer to its name in the step, also for the
            optimizer's parameters. ``None`` leaves the tensor unchanged; several names are the
            arguments of a function in ``transforms``. Default ``None``: the names are equal.
        transforms: functions by names of the model's parameters and buffers, or by `fnmatch`
            patterns of them; the first match counts. Each receives the tensors that ``names``
            selects from the step: full tensors, on the CPU, in their saved dtype; and returns a
            full tensor of the model's shape. Each rank reads these tensors in full, for one
            function at a time, and keeps its local shards of all results until it writes them.
            Optimizer states of such a parameter are not loaded, and are ``missing``. Default
            ``None``: none.
        states: tensors that receive those passed to ``save(states=…)``. Default ``None``: none.
        fallback: without ``step``, load the newest readable step, and warn about each newer one;
            the next save replaces these. With ``verify=True``, a step with a flipped bit is not
            readable. Default ``False``: raise if the newest is not readable.
        process_group: as for `save`; other ranks of the model's meshes keep their values.

    Returns:
        The step, ``extra``, and the differences.

    Raises:
        CheckpointError: on all ranks, before anything has changed; unless a file proves broken
            while it is read, which leaves the model partly loaded.

    Example::

        step = fsdp2.checkpoint.load("run", model, optimizer).step
        fsdp2.checkpoint.load(  # q, k and v become one
            "run",
            model,
            names=lambda name: [name.replace("qkv", x) for x in "qkv"] if "qkv" in name else name,
            transforms={"*.qkv.weight": lambda q, k, v: torch.cat([q, k, v])},
        )
    """
    call = Call(f"load('{folder}')", process_group)
    end_saves()

    def look() -> tuple[tuple[object, ...], PathLike, Manifest | None]:
        """The facts on which ranks must agree, this rank's folder, and rank 0's manifest."""
        place, number = _place_of(folder, step)
        store = store_of(place)
        as_module(model)  # which raises on all ranks, as do these
        kept = sorted(map(str, as_states(states)))
        if number is not None:
            check_step("load", number)
        options = (fallback, verify, strict, rng, buffers, cast, names is None)
        asked = (str(store), number, options, kept, list(transforms or {}), len(as_list(optimizer)))
        if not call.is_first:
            return asked, place, None
        _check_kind(store, folder)
        if fallback and number is None:
            return asked, place, newest_readable(store, verify)
        return asked, place, read_manifest(store, number)

    told = call.together(look)
    asked, _, manifest = told[0]
    if any(other != asked for other, _, _ in told):
        raise checkpoint_error(
            "ckpt-load-ranks-differ",
            f"load() got different folders, steps, optimizers or options on different ranks "
            f"({[asked for asked, _, _ in told]}); pass the same on all ranks",
        )
    assert manifest is not None
    job = _Load(
        call,
        store_of(told[call.rank][1]),
        manifest,
        as_module(model),
        as_list(optimizer),
        _Transforms(transforms or {}, names or (lambda name: name)),
        as_states(states),
        cast,
    )
    left = Differences.over_ranks(call.together(lambda: job.compare(bool(rng), verify, buffers)))
    refused = left
    if rng == "if_saved":  # random states that were never saved are no difference then
        refused = replace(left, missing=[n for n in left.missing if not n.startswith("rng.")])
    if strict and refused:
        raise checkpoint_error(
            "ckpt-differs",
            f"step {manifest.step} of '{folder}' does not fit this model: missing {left.missing}, "
            f"unexpected {left.unexpected}, of other shapes {left.reshaped}, of other dtypes "
            f"{left.retyped}, with several values for one {left.conflicting}; pass strict=False "
            f"to load what fits",
        )
    call.together(lambda: job.read(left))
    job.take_wire()
    note_load(first_of(model), job.store, manifest.step)
    return Loaded(manifest.step, job.extra, job.rank_extra, left)


def read_extra(folder: PathLike, step: int | None = None, *, rank: int | None = None) -> Value:
    """Return the ``extra`` of a step without a model, for a run that needs it before it starts.

    Local: call it on one rank, or without a job.

    Args:
        folder: as for `save`.
        step: the step. Default ``None``: the newest complete one.
        rank: return the ``rank_extra`` of this rank instead; ``None`` is returned if there was no
            such rank. Default ``None``: return ``extra``.

    Raises:
        CheckpointError: there is no such step, or a file of it is missing or truncated.

    Example::

        >>> fsdp2.checkpoint.read_extra("run")
        {'epoch': 3}
    """
    place, step = _place_of(folder, step)
    store = store_of(place)
    _check_kind(store, folder)
    manifest = read_manifest(store, step)
    check_files(store, manifest)
    path = items_of(store, manifest)
    with broken_values(path):
        found = Step(path, typed=False)
        if rank is not None:
            return found.rank_extra(rank)
        return unpacked(manifest.extra, found.below("extra"))


def _place_of(folder: PathLike, step: int | None) -> tuple[PathLike, int | None]:
    """The folder of steps and the step, where the path of a step is given; else what is given."""
    above, name = os.path.split(os.fspath(folder).rstrip("/"))
    number = name.removeprefix(STEP)
    if name == number or not number.isdecimal() or step not in (None, int(number)):
        return folder, step
    if not store_of(above or ".").has(int(number)):  # a folder of steps that is called so
        return folder, step
    return above or ".", int(number)


def _check_kind(store: Store, given: PathLike) -> None:
    """If the folder holds a checkpoint of another kind instead of steps, raise with that kind."""
    kind = None
    if not is_url(given) and not store.steps() and (path := local_path(given)).exists():
        with suppress(CheckpointError):
            kind = kind_of(path)
    if kind not in (None, "steps"):
        raise checkpoint_error(
            "ckpt-other-kind",
            f"'{given}' is a checkpoint of kind '{kind}', but load() takes a folder of steps; "
            f"call fsdp2.checkpoint.convert('{given}', FOLDER, to_kind='steps', step=0) once, and "
            f"load FOLDER",
        )


@dataclass
class _Taken:
    """A tensor that is loaded."""

    own: str
    value: Tensor
    theirs: str = ""  # "" where a function has made the tensor
    rows: Tensor | None = None  # this rank's, where a function has made them


@dataclass
class _Load:
    """One load, on one rank."""

    call: Call
    store: Store
    manifest: Manifest
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    transforms: _Transforms
    states: States
    cast: bool

    def __post_init__(self) -> None:
        self._step: Step
        self._optimizer: OptimizerMatch | None = None
        self._tensors: list[_Taken] = []
        self._values: Nested = {}  # of modules, by their name
        self._rng: dict[str, Tensor] = {}
        self._wire: dict[str, Tensor] = {}
        self.extra: Value = None
        self.rank_extra: Value = None

    # ---- comparing

    def compare(self, rng: bool, verify: bool, buffers: bool) -> Differences:
        """Find the differences; changes nothing."""
        if not self.store.has(self.manifest.step):
            place = self.store.folder(self.manifest.step)
            raise checkpoint_error(
                "ckpt-not-shared",
                f"rank {self.call.rank} does not see '{place}', which rank 0 sees; pass a "
                f"folder on a file system that all ranks share",
            )
        check_files(self.store, self.manifest)
        if verify:
            rank, size = self.call.rank, self.call.size
            check_hashes(self.store, self.manifest, sorted(self.manifest.files)[rank::size])
        self._step = Step(items_of(self.store, self.manifest))
        found = Differences()
        self._compare_model(found)
        beside = {f"states.{name}": held for name, held in self.states.items()}
        if buffers:
            beside["buffers"] = snapshot(self.model).buffers
        for name, held in beside.items():
            self._compare_beside(name, held, found)
        if self.optimizers and not self.manifest.has_optimizer:
            raise checkpoint_error(
                "ckpt-no-optimizer",
                f"step {self.manifest.step} of '{self.store}' was saved without an optimizer; "
                f"load it without one",
            )
        if self.optimizers:
            plain = self.transforms.plain()
            self._optimizer = OptimizerMatch(
                self._step, self.model, self.optimizers, plain, self.cast
            )
            self._optimizer.compare(found)
        if rng:
            self._compare_rng(found)
        wire = WireState(self.model).state_dict()
        found.reshaped += [f"wire.{name}" for name, own in wire.items() if not is_part(own)]
        self.extra = unpacked(self.manifest.extra, self._step.below("extra"))
        self.rank_extra = self._step.rank_extra(self.call.rank)
        return found

    def _compare_rng(self, found: Differences) -> None:
        step, prefix = self._step, f"rng.{self.call.rank}"
        saved = step.below(prefix)
        for kind, value in rng_states().items():
            name = f"{prefix}.{kind}"
            if name not in step.saved:
                found.missing.append(name)
            elif found.compare(name, value, step.abouts.get(name)):
                self._rng[kind] = saved[kind]

    def _compare_model(self, found: Differences) -> None:
        """Tensors are read in place later; values now, so that a class in them changes nothing."""
        step, taken, units, here = self._step, set[str](), dict[str, str](), dict[str, Tensor]()
        state = whole_state(self.model)
        params = named_parameters(self.model) if step.about.trainable else ()
        frozen = {name for name, param in params if not param.requires_grad}
        tensors = {  # a tensor that is an extra state is a value
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and not name.endswith("_extra_state")
        }
        transforms = self.transforms
        transforms.check(tensors)
        for name, value in state.items():
            sources = transforms.sources(name)
            taken.update(sources)
            if not sources:
                continue
            (theirs, *_), tensor, transform = sources, tensors.get(name), transforms.of(name)
            if not set(sources) <= step.model.keys():
                if above(name, frozen) not in frozen:
                    found.missing.append(f"model.{name}")
            elif tensor is not None and transform is not None:
                self._make(name, tensor, transform, sources, found)
            elif tensor is not None:
                about = step.abouts.get(f"model.{theirs}")
                if found.compare(f"model.{name}", tensor, about, self.cast):
                    self._tensors.append(_Taken(f"model.{name}", tensor, f"model.{theirs}"))
            else:
                units[name] = theirs
                flat, _ = flatten_state_dict({f"model.{theirs}": value})  # as DCP's items are
                here.update((n, each) for n, each in flat.items() if isinstance(each, Tensor))
        values = step.values({f"model.{each}": step.model[each] for each in units.values()}, here)
        self._values = {name: values[f"model.{theirs}"] for name, theirs in units.items()}
        found.unexpected += [f"model.{name}" for name in step.model if name not in taken]
        self._compare_ties(state, found)

    def _make(
        self,
        name: str,
        value: Tensor,
        transform: Transform,
        sources: Sequence[str],
        found: Differences,
    ) -> None:
        """Let a function make a tensor; this rank's rows of it stay."""
        units = {f"model.{each}": self._step.model[each] for each in sources}
        wholes = self._step.values(units, {})
        rows = _rows_of(name, value, transform, [wholes[f"model.{each}"] for each in sources])
        both = rows.is_floating_point() and value.is_floating_point()
        if rows.dtype != value.dtype and not (self.cast and both):
            found.retyped.append(f"model.{name}")
        else:
            self._tensors.append(_Taken(f"model.{name}", value, rows=rows))

    def _compare_ties(self, state: Nested, found: Differences) -> None:
        """Tensors with several names here must have one value in the step."""
        ties = {f"model.{name}": f"model.{first}" for name, first in ties_of(state).items()}
        saved = self._step.about.ties
        read = {each.own: each for each in self._tensors}
        for name, first in ties.items():
            if name not in read or first not in read:
                continue
            each, other = read[name], read[first]
            one, two = (saved.get(it.theirs[6:], it.theirs[6:]) for it in (each, other))
            if one != two or not one:
                a, b = self._rows(each), self._rows(other)
                if not ((a == b) | ((a != a) & (b != b))).all():
                    found.conflicting.append(name)
        self._tensors = [each for each in self._tensors if ties.get(each.own) not in read]

    def _rows(self, taken: _Taken) -> Tensor:
        """This rank's rows of a tensor that is loaded."""
        if taken.rows is not None:
            return taken.rows.to(taken.value.device, taken.value.dtype)
        copy = torch.empty_like(taken.value)
        self._step.read([(taken.theirs, copy)])
        return local_of(copy)

    def _compare_beside(self, name: str, held: Mapping[str, Tensor], found: Differences) -> None:
        """Compare tensors that are not part of the model's state dict."""
        for key, value in held.items():
            own = f"{name}.{key}"
            if own not in self._step.saved:
                found.missing.append(own)
            elif found.compare(own, value, self._step.abouts.get(own), self.cast):
                self._tensors.append(_Taken(own, value, own))
        if name.startswith("states."):
            found.unexpected += [
                each
                for each in self._step.saved
                if each.startswith(f"{name}.") and each[len(name) + 1 :] not in held
            ]

    # ---- loading

    def read(self, left: Differences) -> None:
        """Read everything except the differences into place."""
        out, model = left.left(), self.model
        tensors = [each for each in self._tensors if each.own not in out]
        with torch.inference_mode(False), torch.no_grad():
            self._step.read((each.theirs, each.value) for each in tensors if each.rows is None)
            for each in tensors:
                if each.rows is not None:
                    local_of(each.value).copy_(each.rows)
            for module in model.modules():  # torch finds parameters only while shards are there
                if isinstance(module, FSDPModule):
                    module.reshard()
            chosen = {each.own[6:]: each.value for each in tensors if each.own.startswith("model.")}
            set_model_state_dict(
                model, {**chosen, **self._values}, options=StateDictOptions(strict=False)
            )
            if self._optimizer is not None:
                self._optimizer.load(out)
            saved = self._step.saved
            self._wire = {
                name: value
                for name, value in WireState(self.model).state_dict().items()
                if f"wire.{name}" not in out and is_whole(saved.get(f"wire.{name}"), value)
            }
            self._step.read((f"wire.{name}", value) for name, value in self._wire.items())
        set_rng_states(self._rng)

    def take_wire(self) -> None:
        """Put the wire formats' state in place, which may communicate, when all have read it."""
        step = f"step {self.manifest.step} of '{self.store}'"
        with torch.inference_mode(False), torch.no_grad():
            WireState(self.model).take(self._wire, step, self.call.is_first, self.call.size)


# ---- tensors that functions make


class _Transforms:
    """Functions by names, or patterns of names, of the model's tensors."""

    def __init__(self, given: Mapping[str, Transform], names: Sources) -> None:
        self._given = given
        self._names = names

    def check(self, names: Iterable[str]) -> None:
        """Raise unless each pattern fits one of the model's names."""
        known = list(names)
        for pattern in self._given:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise checkpoint_error(
                    "ckpt-transform-unused",
                    f"transforms= has '{pattern}', which matches no tensor of the model; pass "
                    f"names of its state dict, or patterns",
                )

    def sources(self, name: str) -> tuple[str, ...]:
        """The step's names of what a tensor is made of; none: it is left out."""
        found = self._names(name)
        if found is None:
            return ()
        return (found,) if isinstance(found, str) else tuple(found)

    def of(self, name: str) -> Transform | None:
        """The function for a tensor of the model; ``None`` where it is read as it is."""
        for pattern, function in self._given.items():
            if fnmatchcase(name, pattern):
                return function
        sources = self.sources(name)
        if len(sources) > 1:
            raise checkpoint_error(
                "ckpt-transform-several",
                f"names= maps several tensors of the step to '{name}', {list(sources)}; pass "
                f"transforms= with a function that combines them",
            )
        return None

    def plain(self) -> Names:
        """The step's name of what is read as it is, for states of optimizers; else ``None``."""

        def name_of(name: str) -> str | None:
            sources = self.sources(name)
            return sources[0] if sources and self.of(name) is None else None

        return name_of


@torch.no_grad()
def _rows_of(name: str, value: Tensor, function: Transform, sources: Sequence[Tensor]) -> Tensor:
    """This rank's rows of what a function makes, in new memory, of the dtype that it returned."""
    held = held_of(name, value.detach())
    shapes = [tuple(source.shape) for source in sources]
    try:
        made = function(*sources)
    except Exception as error:  # of the user's function
        raise checkpoint_error(
            "ckpt-transform-raised",
            f"transforms= of '{name}' raised {type(error).__name__} for tensors of shapes "
            f"{shapes} ({error}); correct the function",
        ) from error
    known = isinstance(made, Tensor) and is_plain(made)
    if not known or tuple(made.shape) != held.shape:
        found = f"a tensor of shape {tuple(made.shape)}" if known else f"a {type(made).__name__}"
        raise checkpoint_error(
            "ckpt-transform-shape",
            f"transforms= of '{name}' returned {found} for tensors of shapes {shapes}, but the "
            f"model has one of shape {held.shape}; return a tensor of that shape",
        )
    rows = made.detach()
    for dim, (start, length) in enumerate(zip(held.offsets, held.local.shape, strict=True)):
        rows = rows.narrow(dim, start, length)
    return rows.clone()
