"""`load_pretrained`: a folder of Hugging Face's libraries into a model, each rank its own slices.

1. every rank   names, shapes, dtypes; tied names that differ
2. all          differences on any rank                ─> raised on all, or reported
3. every rank   memory for meta tensors; its slices, into it

Buffers on the meta device that no file has get the values that the modules' own code computes:

    rotary.inv_freq, persistent=False
      rotary.reset_parameters()      if it sets the buffer; that of `nn.Embedding` sets no scale
                                     of a subclass
      model._init_weights(rotary)    of the nearest module around it, as transformers' models have
    neither sets it                  it would have no values: refused

Both run on a copy of the module with memory only for buffers: no parameter is initialized or
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp2.checkpoint.consensus import Call
from fsdp2.checkpoint.contents import TensorFolder
from fsdp2.checkpoint.state import Differences, Held, Names, held_by
from fsdp2.checkpoint.stores import PathLike, local_path
from fsdp2.core.errors import checkpoint_error
from fsdp2.core.facts import ProcessGroup
from fsdp2.full.loading import require_writable, rewritten


def load_pretrained(
    model: nn.Module,
    folder: PathLike,
    *,
    names: Names | None = None,
    strict: bool = True,
    process_group: ProcessGroup | None = None,
) -> Differences:
    """Load a folder of safetensors or ``pytorch_model*.bin``, or one file, into a model.

    Every rank of the process group calls it, with the same arguments, between steps; without a
    process group, a single process does. Each rank reads only the bytes of its own slices into its
    shards; files are mapped. No code from a file runs. Reading safetensors needs the package
    (``pip install safetensors``).

    Floating-point tensors are cast to the dtype of the model's, as in ``load_state_dict``; all
    others must have that dtype. A tied tensor may be in the files under any of its names, or under
    several with equal values. Names that the files' metadata tie to another are resolved.

    Meta tensors first get memory, and stay tied. If no file has a buffer (``persistent=False``),
    ``reset_parameters()`` of its module sets it, or the ``_init_weights(module)`` of an enclosing
    module, which transformers' models have. If neither sets it, create it on a real device, or
    build the model in `fsdp2.wrap.deferred`.

    Args:
        model: receives parameters and persistent buffers.
        folder: as for `export` or ``save_pretrained``; or a ``.safetensors`` or ``.bin`` file, or
            an index, on a disk. In a folder with both, safetensors are used.
        names: maps the model's name of a tensor to its name in the files; ``None``: the files do
            not have it, and it stays unchanged. Default: the same.
        strict: raise if names, shapes or dtypes differ. ``False``: load the others.
        process_group: as for `load`.

    Returns:
        The differences; with ``strict=True`` it is empty. ``unexpected`` are names of the files,
        all others the model's.

    Raises:
        CheckpointError: on all ranks, before anything has changed; unless a file proves broken
            while it is read, which leaves the model partly loaded.

    Example::

        with torch.device("meta"):
            model = Transformer()
        shard(model)
        fsdp2.checkpoint.load_pretrained(model, "llama", names=lambda name: "model." + name)
    """
    call = Call(f"load_pretrained('{folder}')", process_group)
    job = _PretrainedLoad(model, folder, names or (lambda name: name))
    left = Differences.over_ranks(call.together(job.compare))
    if left and strict:
        raise checkpoint_error(
            "pretrained-differs",
            f"'{folder}' does not fit this model: missing {left.missing}, unexpected "
            f"{left.unexpected}, of other shapes {left.reshaped}, of other dtypes {left.retyped}; "
            f"pass names= that maps them, or strict=False to load what fits",
        )
    call.together(lambda: job.check(left.left()))
    call.together(lambda: job.read(left.left()))
    return left


class _PretrainedLoad:
    """One load, on one rank."""

    def __init__(self, model: nn.Module, folder: PathLike, names: Names) -> None:
        self._model = model
        self._folder = folder
        self._found: TensorFolder
        self._names = names
        self._sources: dict[str, list[str]] = {}  # the model's name -> tensors of the files
        self._values: dict[str, Tensor] = {}  # of buffers that no file has

    def compare(self) -> Differences:
        """Find the differences; changes nothing."""
        require_writable(self._model, "load_pretrained")
        self._found = TensorFolder(local_path(self._folder))
        held, tied, others = held_by(self._model, self._names)
        known: dict[str, list[str]] = {name: [name] for name in held}
        for other, name in tied.items():
            known[name].append(other)
        differences, used = Differences(), set()
        for name, alike in known.items():
            wanted = [file for file in map(self._names, alike) if file is not None]
            there = [self._found.tied.get(file, file) for file in wanted]
            sources = [file for file in dict.fromkeys(there) if file in self._found.abouts]
            used |= set(sources)
            if not sources:
                if wanted:
                    differences.missing.append(name)
            elif all(
                differences.compare(name, held[name], self._found.abouts[source], cast=True)
                for source in sources
            ):
                self._sources[name] = sources
        differences.missing += [name for name in others if self._names(name) is not None]
        differences.unexpected += [name for name in self._found.abouts if name not in used]
        return differences

    def check(self, left: set[str]) -> None:
        """Raise if tied names have different values, or something would have none."""
        held, _, _ = held_by(self._model, self._names)
        loaded = {name for name in self._sources if name not in left}
        for name in sorted(loaded):
            first, *others = self._sources[name]
            for other in others:
                if not _equal(self._found, first, other, held[name]):
                    raise checkpoint_error(
                        "pretrained-tied",
                        f"'{first}' and '{other}' are tied in the model, but differ in "
                        f"'{self._found.path}'; let names= return None for one of them",
                    )
        for name, part in held.items():
            if part.local.is_meta and name not in loaded:
                owner = self._model.get_submodule(name.rpartition(".")[0])
                if not callable(getattr(owner, "reset_parameters", None)):
                    self._refuse_unset(name)
        for name in _unsaved(self._model):
            value = _recomputed(self._model, name)
            if value is None:
                self._refuse_unset(name)
            self._values[name] = value

    def _refuse_unset(self, name: str) -> NoReturn:
        raise checkpoint_error(
            "pretrained-no-values",
            f"'{name}' is on the meta device and not in '{self._found.path}', so it would have "
            f"no values; give its module a reset_parameters(), or a module around it an "
            f"_init_weights(module), that sets it, or build the model in fsdp2.wrap.deferred(…)",
        )

    @torch.no_grad()
    def read(self, left: set[str]) -> None:
        """Read all but what is left into this rank's shards."""
        held, _, _ = held_by(self._model, self._names)
        loaded = {name for name in self._sources if name not in left}
        unset = [name for name, part in held.items() if part.local.is_meta and name not in loaded]
        owners = {self._model.get_submodule(name.rpartition(".")[0]): None for name in unset}
        with rewritten(self._model):
            for owner in owners:
                owner.reset_parameters()  # type: ignore[operator]  # `check` has found it
            for name, value in self._values.items():
                self._model.get_buffer(name).copy_(value)
            held, _, _ = held_by(self._model, self._names)
            order = {name: number for number, name in enumerate(self._found.abouts)}
            for name in sorted(loaded, key=lambda name: order[self._sources[name][0]]):
                part = held[name]
                if part.local.numel():
                    self._found.read(self._sources[name][0], part.local.detach(), part.offsets)


def _equal(found: TensorFolder, one: str, other: str, held: Held) -> bool:
    """Whether two tensors of the files have the same bits in this rank's part, piece by piece."""
    if found.abouts[one] != found.abouts[other]:
        return False
    both = (found.pieces(name, held.local.shape, held.offsets) for name in (one, other))
    return all(
        torch.equal(*(values.contiguous().view(-1).view(torch.uint8) for _, values in pair))
        for pair in zip(*both, strict=True)
    )


# ---- buffers that no file has


def _unsaved(model: nn.Module) -> list[str]:
    """Names of buffers on the meta device that no state dict has."""
    return [
        f"{prefix}.{key}" if prefix else key
        for prefix, member in model.named_modules()
        for key in sorted(member._non_persistent_buffers_set)
        if (buffer := member._buffers.get(key)) is not None and buffer.is_meta
    ]


def _recomputed(model: nn.Module, name: str) -> Tensor | None:
    """The value that its module's initialization gives a buffer; changes nothing."""
    prefix, _, key = name.rpartition(".")
    owner = model.get_submodule(prefix)
    for initialise in _initialisers(model, prefix):
        twin = _twin(owner)
        before = twin._buffers[key]
        assert before is not None
        version = before._version
        with torch.no_grad():
            initialise(twin)
        value = twin._buffers[key]
        # `.data` counts no version, but leaves other numbers than the zeros that were there.
        if value is not None and (
            value is not before or value._version != version or bool(value.any())
        ):
            return value
    return None


def _initialisers(model: nn.Module, prefix: str) -> Iterator[Callable[[Any], object]]:
    """A module's own initializer, then ``_init_weights`` of modules around it, from inside."""
    if callable(getattr(model.get_submodule(prefix), "reset_parameters", None)):
        yield lambda twin: twin.reset_parameters()
    parts = prefix.split(".") if prefix else []
    for depth in range(len(parts), -1, -1):
        found = getattr(model.get_submodule(".".join(parts[:depth])), "_init_weights", None)
        if callable(found):
            yield found


def _twin(module: nn.Module) -> nn.Module:
    """A module of the same class and attributes: its buffers have memory, its parameters none."""
    kind = getattr(type(module), "_fsdp2_original", type(module))
    twin: Any = object.__new__(kind)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = {
        key: param if param is None else nn.Parameter(_meta(param), param.requires_grad)
        for key, param in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        key: buffer if buffer is None else torch.zeros_like(buffer, device="cpu")
        for key, buffer in module._buffers.items()
    }
    found: nn.Module = twin
    return found


def _meta(param: Tensor) -> Tensor:
    return torch.empty(param.shape, dtype=param.dtype, device="meta")
