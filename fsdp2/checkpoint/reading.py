"""The contents of a step, by owner: tensors read in place, and values with their types.

model.norm.weight             a tensor of the model          ┐
model.norm._extra_state.seen  ┐ one value, of several items  ├─ by `Step.model`
model.norm._extra_state.w     ┘                              ┘
values.model.norm._extra_state    the same with its types, if the step has it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.folder import Json
from fsdp2.checkpoint.items import read_index
from fsdp2.checkpoint.snapshots import Nested
from fsdp2.checkpoint.state import Saved, read_into
from fsdp2.checkpoint.stores import AnyPath
from fsdp2.checkpoint.values import Value, tensors_in, unpacked

GROUPS = "optimizer.param_groups"

Path = tuple[Any, ...]
"""The position of a value in the nested state dict: strings, and indices of lists."""

Units = dict[str, list[str]]
"""By name, the items of a value; a tensor is one item of that name."""


class Step:
    """The items of a step."""

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self.metadata = read_index(path)
        self.saved = self.metadata.state_dict_metadata
        self.model: Units = {}
        self.states: dict[str, Units] = {}
        self._options: dict[tuple[int, str], list[str]] = {}
        self._paths: Mapping[str, Path] = self.metadata.planner_data or {}
        for name in self.saved:
            self._note(self._paths.get(name, ()), name)
        self.about = Saved()
        self._typed: dict[str, Json] = {}
        self._read_texts()

    def _note(self, path: Path, name: str | None) -> None:
        """An item, or (``None``) a value that may have none: an empty dict."""
        if path[:1] == ("model",) and len(path) > 1:
            items = self.model.setdefault(path[1], [])
        elif path[:2] == ("optimizer", "state") and len(path) > 3:
            items = self.states.setdefault(path[2], {}).setdefault(path[3], [])
        elif path[:2] == ("optimizer", "param_groups") and len(path) > 3:
            items = self._options.setdefault((path[2], path[3]), [])
        else:
            return
        if name is not None:
            items.append(name)

    def _read_texts(self) -> None:
        texts: Nested = {
            name: None
            for name in self.saved
            if (name == "about" or name.startswith("values.")) and not self.is_tensor(name)
        }
        read_into(self.path, self.metadata, texts)
        if "about" in texts:
            self.about = Saved(**json.loads(texts.pop("about")))
        for name, text in texts.items():
            path, self._typed[name.removeprefix("values.")] = json.loads(text)
            self._note(tuple(path), None)

    def is_tensor(self, unit: str) -> bool:
        """Whether it is one tensor, which can be read in place."""
        return isinstance(self.saved.get(unit), TensorStorageMetadata)

    def read(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Read tensors in place, by name; each rank its own rows. A name may come twice."""
        batches: list[Nested] = []
        for name, tensor in pairs:
            batch = next((each for each in batches if name not in each), None)
            if batch is None:
                batches.append(batch := {})
            batch[name] = tensor
        for batch in batches:
            read_into(self.path, self.metadata, batch)

    def values(self, units: Mapping[str, Sequence[str]], like: Mapping[str, Tensor]) -> Nested:
        """Values as they were saved."""
        items = {
            unit: tensors_in(self._typed[unit]) if unit in self._typed else list(names)
            for unit, names in units.items()
        }
        flat = {
            name: self._memory(name, like.get(name)) for each in items.values() for name in each
        }
        read_into(self.path, self.metadata, flat)
        return {unit: self._value(unit, names, flat) for unit, names in items.items()}

    def _value(self, unit: str, names: Iterable[str], flat: Nested) -> Value:
        if unit in self._typed:
            return unpacked(self._typed[unit], flat)
        made: Nested = {}
        for name in names:
            path = self._paths[name]
            inside = path[2:] if path[0] == "model" else path[4:]
            set_element(made, ("it", *inside), flat[name])
        return made.get("it", {})

    def _memory(self, name: str, like: Tensor | None) -> Tensor | None:
        about = self.saved[name]
        if not isinstance(about, TensorStorageMetadata):
            return None
        dtype = about.properties.dtype
        if isinstance(like, DTensor) and like.shape == about.size:
            return torch.empty_like(like, dtype=dtype)
        device = "cpu" if like is None else like.device
        return torch.empty(about.size, dtype=dtype, device=device)

    def groups(self) -> list[Nested]:
        """Options of the saved optimizers' groups, with names in the place of parameters."""
        units = {f"{GROUPS}.{at}.{key}": items for (at, key), items in self._options.items()}
        values = self.values(units, {})
        found: list[Nested] = [{} for _ in {at for at, _ in self._options}]
        for at, key in self._options:
            found[at][key] = values[f"{GROUPS}.{at}.{key}"]
        return found
