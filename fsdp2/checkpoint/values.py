"""Values other than tensors, with their types, as JSON, and their tensors separately by name.

    {"seen": 2, "at": (1, b"x"), "w": tensor}
        Packed    {"dict": {"seen": 2, "at": {"tuple": [1, {"bytes": "eA=="}]}, "w": {"tensor": 0}}}
        unpacked  the same types, dtypes and values

A type without an entry in this module is refused by name when it is saved, so that everything saved
can be loaded, and loading runs no code. DCP's own items lose types: keys become strings, mappings
dicts, and an empty one is lost.
"""

from __future__ import annotations

import base64
import collections
import io
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.archives import values_of
from fsdp2.checkpoint.folder import Json
from fsdp2.checkpoint.staging import is_plain
from fsdp2.core.facts import local_of

Value: TypeAlias = Any
"""None, bool, int, float, complex, str, bytes, tensors, the types of `_KINDS`, and numpy's."""

_PLAIN = (type(None), bool, int, float, str)

_FACTORIES: dict[str, type] = {
    each.__name__: each for each in (bool, dict, float, int, list, set, str, tuple)
}
"""Allowed factories of a defaultdict."""

Named = Callable[[Tensor, tuple[str, ...], bool], str]
"""Names a tensor of a value, by its path, and whether DCP's items have it under that path."""


class Packed:
    """A value, packed; nothing is copied."""

    def __init__(self, value: Value, named: Named | None = None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.shared: list[tuple[str, tuple[int, ...], torch.dtype]] = []  # DTensors
        self.wrong: list[str] = []  # what cannot be kept, each with its path
        self._name = named or self._numbered
        self._inside: set[int] = set()  # containers around
        self.content = self._pack(value, (), True)

    def _pack(self, value: Value, path: tuple[str, ...], reached: bool) -> Json:
        """``reached``: whether DCP would walk as far as here."""
        kind = type(value)
        if kind in _PLAIN:
            return cast("Json", value)
        if isinstance(value, Tensor):
            return self._tensor(value, path, reached)
        text = _text_of(value)
        if text is not None:
            return {text[0]: text[1]}
        numpy = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            return self._numpy(value, path)
        if kind not in _KINDS:
            return self._refuse(f"a {kind.__module__}.{kind.__qualname__}", path)
        if id(value) in self._inside:
            return self._refuse(f"a {kind.__qualname__} that holds itself", path)
        self._inside.add(id(value))
        try:
            return self._container(value, path, reached)
        finally:
            self._inside.discard(id(value))

    def _container(self, value: Value, path: tuple[str, ...], reached: bool) -> Json:
        if type(value) is list:
            return [self._pack(v, (*path, str(n)), reached) for n, v in enumerate(value)]
        if type(value) is dict and all(type(key) is str for key in value):
            return {"dict": {k: self._pack(v, (*path, k), reached) for k, v in value.items()}}
        name, parts = _KINDS[type(value)]
        if isinstance(value, dict):
            factory = getattr(value, "default_factory", None)
            if factory is not None and _FACTORIES.get(factory.__name__) is not factory:
                return self._refuse(f"a defaultdict of {factory.__qualname__}", path)
            pairs: list[Json] = [
                [self._pack(key, path, False), self._pack(held, (*path, str(key)), reached)]
                for key, held in value.items()
            ]
            return {name: [*parts(value), pairs]}
        return {name: [self._pack(v, (*path, str(n)), False) for n, v in enumerate(parts(value))]}

    def _tensor(self, value: Tensor, path: tuple[str, ...], reached: bool) -> Json:
        rows = local_of(value)
        if not is_plain(rows):
            about = type(rows).__qualname__ if rows.layout is torch.strided else str(rows.layout)
            return self._refuse(f"a tensor of {about}", path)
        if rows.is_quantized:
            return self._refuse(f"a tensor of {rows.dtype}", path)
        name = self._name(value, path, reached)
        self.tensors[name] = value.detach() if value.requires_grad else value
        if isinstance(value, DTensor):
            self.shared.append((".".join(path), tuple(value.shape), value.dtype))
        if isinstance(value, nn.Parameter):
            return {"parameter": [name, value.requires_grad]}
        return {"tensor": int(name) if name.isdigit() else name}

    # "d" for DTensors: ranks may have other tensors as well
    def _numbered(self, value: Tensor, path: tuple[str, ...], reached: bool) -> str:
        kind = "d" if isinstance(value, DTensor) else ""
        return f"{kind}{sum(name.startswith('d') == bool(kind) for name in self.tensors)}"

    def _numpy(self, value: Value, path: tuple[str, ...]) -> Json:
        """Bytes of an array as a tensor; of a number here."""
        if value.dtype.hasobject or value.dtype.kind == "V" or not value.dtype.itemsize:
            return self._refuse(f"a numpy value of {value.dtype}", path)
        data = value.tobytes()
        if not isinstance(value, sys.modules["numpy"].ndarray):
            return {"numpy": [base64.b64encode(data).decode(), value.dtype.str]}
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        name = self._name(rows, path, False)
        self.tensors[name] = rows.to(torch.uint8)
        return {"ndarray": [name, value.dtype.str, list(value.shape)]}

    def _refuse(self, what: str, path: tuple[str, ...]) -> Json:
        place = f" at '{'.'.join(path)}'" if path else ""
        self.wrong.append(f"{what.replace('builtins.', '')}{place}")
        return None


def is_kept_by_dcp(value: Value) -> bool:
    """Whether DCP's own item of a value loads as it was, without running code."""
    if type(value) in (list, tuple):
        return all(is_kept_by_dcp(held) for held in value)
    return type(value) in (*_PLAIN, bytes, complex)


def tensors_in(content: Json) -> list[str]:
    """Names of the tensors that a packed value needs."""
    if isinstance(content, list):
        return [name for held in content for name in tensors_in(held)]
    if not isinstance(content, dict):
        return []
    ((kind, held),) = content.items()
    if kind == "tensor":
        return [str(held)]
    if kind == "dict":
        return tensors_in(list(cast("dict[str, Json]", held).values()))
    if kind in ("parameter", "ndarray"):
        return [str(cast("list[Json]", held)[0])]
    return [] if kind in _TEXTS else tensors_in(held)


def unpacked(content: Json, tensors: Mapping[str, Any]) -> Value:
    """The value passed to `Packed`; tensors are those passed here, `archives.lazy` ones too."""
    if isinstance(content, list):
        return [unpacked(held, tensors) for held in content]
    if not isinstance(content, dict):
        return content
    ((kind, held),) = content.items()
    if kind == "dict":
        assert isinstance(held, dict)
        return {key: unpacked(value, tensors) for key, value in held.items()}
    if kind == "tensor":
        return tensors[str(held)]
    if kind == "parameter":
        name, trained = cast("list[Any]", held)
        value = tensors[str(name)]
        return value if value.is_meta else nn.Parameter(value, requires_grad=trained)
    if kind == "ndarray":
        name, dtype, shape = cast("list[Any]", held)
        rows = values_of(tensors[str(name)]).numpy()
        return _array(rows.tobytes(), dtype).reshape(shape).copy()
    if kind == "numpy":
        data, dtype = cast("list[str]", held)
        return _array(base64.b64decode(data), dtype)[0]
    if kind in _TEXTS:
        return _TEXTS[kind](cast("str", held))
    return _MADE[kind](unpacked(held, tensors))


def _array(data: bytes, dtype: str) -> Any:
    import numpy  # not needed by who saves none

    return numpy.frombuffer(data, dtype=numpy.dtype(dtype))


# ---- types: how a value is taken apart, and made again


def _text_of(value: Value) -> tuple[str, Json] | None:
    """The kind and the text of a textual value."""
    kind = type(value)
    if kind in (bytes, bytearray):
        return kind.__name__, base64.b64encode(value).decode()
    if kind is io.BytesIO:
        return "BytesIO", f"{value.tell()}:{base64.b64encode(value.getvalue()).decode()}"
    if kind is complex:
        return "complex", f"{value.real.hex()} {value.imag.hex()}"
    if kind in (torch.dtype, torch.layout):
        return kind.__name__, str(value).removeprefix("torch.")
    if kind is torch.device:
        return "device", str(value)
    if kind is type(pathlib.Path()):
        return "path", str(value)
    return None


def _bytes_io(text: str) -> io.BytesIO:
    at, _, data = text.partition(":")
    made = io.BytesIO(base64.b64decode(data))
    made.seek(int(at))
    return made


def _of_torch(kind: type) -> Callable[[str], object]:
    def made(text: str) -> object:
        found = getattr(torch, text)
        assert isinstance(found, kind)
        return found

    return made


def _complex(text: str) -> complex:
    real, imag = text.split()
    return complex(float.fromhex(real), float.fromhex(imag))


_TEXTS: dict[str, Callable[[str], object]] = {
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "BytesIO": _bytes_io,
    "complex": _complex,
    "dtype": _of_torch(torch.dtype),
    "layout": _of_torch(torch.layout),
    "device": torch.device,
    "path": pathlib.Path,
}


def _factory_of(value: collections.defaultdict[object, object]) -> list[Json]:
    return [None if value.default_factory is None else value.default_factory.__name__]


def _defaultdict(held: list[Any]) -> collections.defaultdict[object, object]:
    name, pairs = held
    return collections.defaultdict(None if name is None else _FACTORIES[name], pairs)


_KINDS: dict[type, tuple[str, Callable[[Any], Sequence[Any]]]] = {
    list: ("list", list),
    tuple: ("tuple", list),
    set: ("set", list),
    frozenset: ("frozenset", list),
    torch.Size: ("Size", list),
    range: ("range", lambda value: [value.start, value.stop, value.step]),
    slice: ("slice", lambda value: [value.start, value.stop, value.step]),
    collections.deque: ("deque", lambda value: [value.maxlen, *value]),
    dict: ("pairs", lambda _: []),
    collections.OrderedDict: ("OrderedDict", lambda _: []),
    collections.Counter: ("Counter", lambda _: []),
    collections.defaultdict: ("defaultdict", _factory_of),
}

_MADE: dict[str, Callable[[list[Any]], object]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
    "range": lambda held: range(*held),
    "slice": lambda held: slice(*held),
    "deque": lambda held: collections.deque(held[1:], held[0]),
    "pairs": lambda held: dict(held[0]),
    "OrderedDict": lambda held: collections.OrderedDict(held[0]),
    "Counter": lambda held: collections.Counter(dict(held[0])),
    "defaultdict": _defaultdict,
}
