"""The contents of a checkpoint of any kind: a model, an optimizer by name, and the rest.

model.safetensors.index.json     name -> file     ┐  `TensorFolder`: shapes and dtypes by name; each
model-00001-of-00002.safetensors safetensors      ├─ rank reads its own slices of mapped files
pytorch_model-00001-of-2.bin     files of         │
                                 torch.save       ┘

{"app": {"model": …, "optim": numbered}}   ┐
{"model": …, "optimizer": by name}         ├── contents_of ──> Contents ── tree ──> {"model": …,
{name: tensor, …}                          ┘                                "optimizer": …, …}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp2.checkpoint.archives import read_file
from fsdp2.checkpoint.files import BrokenError
from fsdp2.checkpoint.snapshots import Nested, renamed
from fsdp2.checkpoint.stores import is_inside
from fsdp2.checkpoint.tensors import DTYPES, INDEX, SUFFIX, About, blocks
from fsdp2.core.errors import checkpoint_error
from fsdp2.core.facts import clean

BINARY_INDEX = "pytorch_model.bin.index.json"

_MODEL = ("model", "state_dict", "model_state_dict", "model_state")
_OPTIMIZER = (
    *("optimizer", "optim", "optimizer_state_dict", "optim_state_dict"),
    *("optimizer_state", "optim_state"),
)


@dataclass
class Contents:
    """A checkpoint without its kind."""

    model: Nested
    optimizer: Nested | None = None  # parameters by name
    rng: Nested = field(default_factory=dict)  # by rank and device
    extra: object = None
    beside: Nested = field(default_factory=dict)  # of a step: "states", "rank_extra"

    def strip(self, prefix: str, source: Path) -> None:
        """Remove a prefix from the names that begin with it."""
        if not any(name.startswith(prefix) for name in self.model):
            raise checkpoint_error(
                "ckpt-no-prefix",
                f"no tensor of '{source}' has a name that begins with '{prefix}': "
                f"'{next(iter(self.model))}' does not; pass another strip_prefix, or none",
            )
        self.model = _renamed(self.model, lambda name: name.removeprefix(prefix), source)
        if self.optimizer is not None:
            groups = self.optimizer["param_groups"]
            names = [name for group in groups for name in group["params"]]
            self.optimizer = renamed(
                self.optimizer, {name: name.removeprefix(prefix) for name in names}
            )

    def tree(self, numbered: bool = False) -> Nested:
        """Nested as state dicts are, the optimizer by name or by number."""
        found: Nested = {"model": self.model}
        if self.optimizer is not None:
            found["optimizer"] = _numbered(self.optimizer) if numbered else self.optimizer
        if self.rng:
            found["rng"] = self.rng
        if self.extra is not None:
            found["extra"] = self.extra
        return {**found, **self.beside}


def contents_of(tree: object, source: Path) -> Contents:
    """Find model and optimizer in the contents of a file or a folder."""
    while isinstance(tree, dict) and len(tree) == 1:  # {"app": {"model": …}}
        (inner,) = tree.values()
        if not isinstance(inner, dict) or not any(key in inner for key in _MODEL):
            break
        tree = inner
    if not isinstance(tree, dict):
        tree = {}
    models = [key for key in _MODEL if isinstance(tree.get(key), dict)]
    optimizers = [key for key in _OPTIMIZER if isinstance(tree.get(key), dict)]
    if not models and _is_model(tree):
        return Contents(_renamed(tree, clean, source))
    if len(models) != 1 or len(optimizers) > 1 or not _is_model(tree[models[0]]):
        raise checkpoint_error(
            "ckpt-no-model",
            f"convert() cannot tell which entry of '{source}' is the model, among "
            f"{sorted(map(str, tree))}; save a dict with model.state_dict() as 'model' and "
            f"optimizer.state_dict() as 'optimizer'",
        )
    found = Contents(_renamed(tree[models[0]], clean, source))
    if optimizers:
        found.optimizer = _by_name(tree[optimizers[0]], found.model, source)
    rest = {key: value for key, value in tree.items() if key not in (*models, *optimizers)}
    if isinstance(rest.get("rng"), dict):
        found.rng = rest.pop("rng")
    if rest:
        found.extra = rest["extra"] if list(rest) == ["extra"] else rest
    return found


def contents_of_step(tree: Nested, source: Path) -> Contents:
    """The same of a step, whose places are known, and whose modules may have values of any kind."""
    found = Contents(_renamed(tree.get("model", {}), clean, source), rng=tree.get("rng", {}))
    if "optimizer" in tree:
        found.optimizer = _by_name(tree["optimizer"], found.model, source)
    found.beside = {name: tree[name] for name in ("states", "rank_extra", "about") if name in tree}
    return found


def _is_model(tree: Nested) -> bool:
    """Whether it is a state dict of tensors by name, possibly with other values of modules."""
    return any(isinstance(v, Tensor) for v in tree.values()) and not any(
        not isinstance(key, str) or (isinstance(value, dict) and not key.endswith("_extra_state"))
        for key, value in tree.items()
    )


def _renamed(model: Mapping[str, object], change: Callable[[str], str], source: Path) -> Nested:
    found: Nested = {}
    for name, value in model.items():
        new = change(name)
        if new in found:
            raise checkpoint_error(
                "ckpt-names-clash",
                f"'{source}' has several tensors that are called '{new}' after the parts that "
                f"wrappers add to names are removed; rename all but one",
            )
        found[new] = value
    return found


def _by_name(optimizer: Nested, model: Nested, source: Path) -> Nested:
    """An optimizer's state dict with names, whatever its parameters are called by."""
    state, groups = optimizer.get("state", {}), optimizer.get("param_groups", [])
    keys = [key for group in groups for key in group["params"]]
    names = {key: clean(key) for key in keys if isinstance(key, str)}
    if len(names) != len(keys):
        names = _names_of(groups, model)
    known = all(key in names for key in state)
    if not known or len({*names.values()}) != len(keys) or not _fits(state, names, model):
        raise checkpoint_error(
            "ckpt-optimizer-numbers",
            f"'{source}' has an optimizer of {len(keys)} parameters without names, and a model of "
            f"{len(model)} tensors, so they cannot be matched; save the result of "
            f"torch.distributed.checkpoint.state_dict.get_state_dict(), or create the optimizer "
            f"with named_parameters()",
        )
    for key, kept in state.items():
        first: dict[Tensor, object] = {}
        for kind, value in kept.items():
            if (
                isinstance(value, Tensor)
                and value.numel()
                and first.setdefault(value, kind) != kind
            ):
                raise checkpoint_error(
                    "ckpt-states-aliased",
                    f"'{source}' has one tensor as '{first[value]}' and '{kind}' of "
                    f"'{names[key]}', so one of them is lost, as torch's FSDP1 writes it on a CPU "
                    f"with offload_to_cpu=True; save it again with offload_to_cpu=False, or remove "
                    f"the optimizer from the file",
                )
    return renamed({"state": state, "param_groups": groups}, names)


def _names_of(groups: Sequence[Nested], model: Nested) -> dict[Any, str]:
    """Names by number: said by the groups, or one group over all of the model in its order."""
    if all("param_names" in group for group in groups):
        pairs = [
            pair
            for group in groups
            for pair in zip(group["params"], group["param_names"], strict=True)
        ]
        return {key: clean(name) for key, name in pairs}
    once: dict[object, str] = {}
    for name, value in model.items():  # tied ones are one parameter, called by the first name
        once.setdefault(value if isinstance(value, Tensor) else name, name)
    keys = [key for group in groups for key in group["params"]]
    if len(groups) != 1 or len(once) != len(keys):
        return {}
    return dict(zip(keys, once.values(), strict=True))


def _fits(state: Mapping[object, Nested], names: Mapping[Any, str], model: Nested) -> bool:
    """Whether averages have the shapes of their parameters."""
    for key, kept in state.items():
        param, like = model.get(names[key]), kept.get("exp_avg", kept.get("momentum_buffer"))
        if not isinstance(param, Tensor):
            return False
        if isinstance(like, Tensor) and like.shape != param.shape:
            return False
    return True


def _numbered(optimizer: Nested) -> Nested:
    """The form of an unsharded model's optimizer, with names in addition to numbers."""
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    number = {name: place for place, name in enumerate(names)}
    return {
        "state": {number[name]: kept for name, kept in optimizer["state"].items()},
        "param_groups": [
            group
            | {"params": [number[name] for name in group["params"]], "param_names": group["params"]}
            for group in optimizer["param_groups"]
        ],
    }


# ---- folders of Hugging Face's libraries


class TensorFolder:
    """The tensors of a folder, of one file, or of the files that an index names.

    For a folder: the files of its index; otherwise ``model.safetensors``; otherwise all with that
    suffix; otherwise ``pytorch_model*.bin``.
    """

    def __init__(self, path: Path) -> None:
        self.path, names, wanted = _files_of(path)
        self.abouts: dict[str, About] = {}
        self.tied: dict[str, str] = {}
        self._slices: dict[str, Any] = {}  # of safetensors, or mapped tensors
        for file in names:
            if not (self.path / file).is_file():
                raise checkpoint_error(
                    "tensors-missing",
                    f"'{self.path / file}' is missing; copy all files that the index names",
                )
            tensors = file.endswith(SUFFIX) or is_safetensors(self.path / file)
            add = self._add_safetensors if tensors else self._add_binary
            for name, about, part in add(self.path / file):
                if wanted.get(name, file) != file:
                    continue
                if name in self.abouts:
                    raise checkpoint_error(
                        "tensors-twice",
                        f"'{name}' is in several files of '{self.path}', and no index says which "
                        f"one to read; pass one file instead of the folder",
                    )
                self.abouts[name], self._slices[name] = about, part
        for name, file in wanted.items():
            if name not in self.abouts:
                raise checkpoint_error(
                    "tensors-not-there",
                    f"the index of '{self.path}' says that '{name}' is in '{file}', but it is not "
                    f"there; copy the file again",
                )
        self.tied = {
            other: name
            for other, name in self.tied.items()
            if name in self.abouts and other not in self.abouts
        }

    def _add_safetensors(self, path: Path) -> Iterator[tuple[str, About, Any]]:
        with _readable(path) as file:
            self.tied |= file.metadata() or {}
            for name in file.offset_keys():
                part = file.get_slice(name)
                kind = part.get_dtype()
                if kind not in DTYPES:
                    raise checkpoint_error(
                        "tensors-unknown-dtype",
                        f"'{path}' has '{name}' in dtype {kind}, which this version does not "
                        f"read; write it in another dtype",
                    )
                yield name, About(tuple(part.get_shape()), DTYPES[kind]), part

    def _add_binary(self, path: Path) -> Iterator[tuple[str, About, Any]]:
        for name, value in contents_of(read_file(path), path).model.items():
            if isinstance(value, Tensor):
                yield name, About(tuple(value.shape), value.dtype), value

    def values(self, name: str) -> Tensor:
        """A whole tensor, mapped from its file."""
        found: Tensor = self._slices[name][...]
        return found

    def pieces(
        self, name: str, shape: Sequence[int], offsets: Sequence[int]
    ) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Each place in the box of ``shape`` that begins there, with its values, by 8 MiB."""
        part = self._slices[name]
        for block in blocks(self.abouts[name], tuple(shape)):
            pairs = zip(block, offsets, strict=True)
            box = tuple(slice(each.start + at, each.stop + at) for each, at in pairs)
            yield block, part[box] if box else part[...]

    def read(self, name: str, out: Tensor, offsets: Sequence[int]) -> None:
        """Fill ``out``, of any device and dtype, with the box that begins there."""
        for block, values in self.pieces(name, out.shape, offsets):
            out[block].copy_(values)


def _readable(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise checkpoint_error(
            "tensors-package",
            f"'{path}' is a safetensors file, which the package safetensors reads; run "
            f"pip install safetensors",
        ) from error
    try:
        return safe_open(path, "pt")
    except Exception as error:  # of its own class
        raise checkpoint_error(
            "tensors-header",
            f"'{path}' is not a complete safetensors file ({error}); copy it again",
        ) from error


def _files_of(path: Path) -> tuple[Path, list[str], dict[str, str]]:
    """The folder, its files, and the file of each tensor if an index says it."""
    if path.is_file() and path.suffix != ".json":
        return path.parent, [path.name], {}
    indexes = [path] if path.is_file() else [path / INDEX, path / BINARY_INDEX]
    single = path / f"model{SUFFIX}"
    several = sorted(file.name for file in path.glob(f"*{SUFFIX}"))
    for index in indexes:
        if index.is_file():
            return _files_of_index(index)
        if several:
            return path, [single.name] if single.is_file() else several, {}
    found = sorted(file.name for file in path.glob("pytorch_model*.bin"))
    if not found:
        raise checkpoint_error(
            "tensors-none",
            f"'{path}' has no safetensors and no pytorch_model*.bin; pass a folder that export() "
            f"or save_pretrained() has written",
        )
    return path, found, {}


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as one, whatever its name is: with the header's length and ``{``."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _files_of_index(index: Path) -> tuple[Path, list[str], dict[str, str]]:
    try:
        wanted = dict(json.loads(index.read_bytes())["weight_map"])
        names = sorted(set(wanted.values()))
        if any("/" in name or not is_inside(name) for name in names):
            raise BrokenError()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise checkpoint_error(
            "tensors-index",
            f"'{index}' is not an index of files of tensors; pass the folder of save_pretrained, "
            f"or one of its files",
        ) from error
    return index.parent, names, wanted
