"""Values that are known although tensors are on ``meta``: those that follow from constants.

    torch.linspace(0, 0.1, 12).tolist()          in a model's ``__init__``
    (positions.diff() != 1).any()                positions are an ``arange``

The result of such an operator is also computed on the CPU, if it is small: integers and masks of
`LARGEST` bytes, floating point of `LARGEST_FLOAT`. A model may therefore ask for values that do not
depend on parameters, activations or random numbers. A value is known for a whole storage, and with
it for all its views.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence, ValuesView
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

LARGEST = 2**24
LARGEST_FLOAT = 2**16

_CPU = torch.device("cpu")
_META = torch.device("meta")

_CONSTANTS = {
    *("arange", "ones", "zeros", "full", "linspace", "logspace", "eye", "scalar_tensor"),
    *("tril_indices", "triu_indices"),
}
_CONSTANTS_LIKE = {"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"}
"""Operators that take only the shape of another tensor."""

_OVERWRITES = {"fill_", "zero_", "copy_"}
"""They leave nothing of what was there."""


class Values:
    """The known values, by storage; a value is forgotten with its storage."""

    def __init__(self) -> None:
        self._known = weakref.WeakKeyDictionary[torch.UntypedStorage, torch.UntypedStorage]()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor's values, on the CPU; ``None``: they are not known."""
        if not tensor.is_meta:
            return tensor if tensor.device == _CPU else None
        found = self._known.get(tensor.untyped_storage())
        if found is None:
            return None
        bare = torch.empty(0, dtype=tensor.dtype)
        return bare.set_(found, tensor.storage_offset(), tensor.shape, tensor.stride())

    def answer(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[object] | None:
        """The result of an operator that asks for values, in a tuple; ``None``: it is not known."""
        if not _asks(func):
            return None
        name = func._schema.name.removeprefix("aten::")
        if name == "_to_copy" and kwargs.get("device") != _CPU:
            return None
        if name == "copy_" and args[0].is_meta:
            return None
        known = self._real(args, kwargs)
        if known is None:
            return None
        if name == "copy_":
            return (args[0].copy_(known[0][1]),)
        result = func(*known[0], **known[1])
        return (result if name == "_to_copy" else tree_map_only(torch.Tensor, self.put, result),)

    def put(self, real: torch.Tensor) -> torch.Tensor:
        """The same on ``meta``."""
        made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META)
        self._learn(made, real)
        return made

    def follow(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
    ) -> None:
        """An operator has run on ``meta``: know what it gave, or forget what it wrote."""
        if func.is_view:
            return
        name = func._schema.name.removeprefix("aten::")
        if name not in _CONSTANTS and name not in _CONSTANTS_LIKE:
            inputs = [each for each in tensors_in((args, kwargs.values())) if each.is_meta]
            if func._schema.is_mutable:
                self._follow_write(func, name, args, kwargs, inputs)
                return
            if not all(each.untyped_storage() in self._known for each in inputs):
                return  # most operators
        results = tensors_in(result)
        if results and all(each.is_meta and _is_small(each) for each in results):
            made = tensors_in(self._computed(func, name, args, kwargs))
            if len(made) == len(results):
                for meta, value in zip(results, made, strict=True):
                    self._learn(meta, value)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """They change without this knowing of it, as parameters do."""
        for tensor in tensors:
            self._known.pop(tensor.untyped_storage(), None)

    def _follow_write(
        self,
        func: OpOverload,
        name: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        written = inputs[0] if name in _OVERWRITES and inputs else None
        whole = written is not None and _is_small(written) and _is_whole(written)
        if written is not None and whole and self.of(written) is None:
            self._learn(written, torch.zeros_like(written, device=_CPU))
        if not any(each.untyped_storage() in self._known for each in inputs):
            return
        if self._computed(func, name, args, kwargs) is None:
            for place, argument in enumerate(func._schema.arguments):
                if argument.is_write:
                    given = args[place] if place < len(args) else kwargs.get(argument.name)
                    self.forget(tensors_in(given))

    def _computed(
        self, func: OpOverload, name: str, args: tuple[Any, ...], kwargs: Mapping[str, object]
    ) -> object:
        """On the CPU; ``None`` where something is not known, or the CPU cannot."""
        if torch.Tag.nondeterministic_seeded in func.tags or name.startswith("empty"):
            return None
        if name in _CONSTANTS_LIKE:
            args = (args[0].new_empty(args[0].shape, device=_CPU), *args[1:])
        known = self._real(args, kwargs)
        if known is None:
            return None
        try:
            return func(*known[0], **known[1])
        except Exception:  # whatever it is, the model's own operator has run
            return None

    def _real(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        lost = False

        def real(each: Any) -> Any:
            nonlocal lost
            if isinstance(each, torch.device):
                return _CPU
            found = self.of(each)
            lost = lost or found is None
            return found

        kinds = (torch.Tensor, torch.device)
        known: tuple[Any, dict[str, object]] = tree_map_only(kinds, real, (args, dict(kwargs)))
        return None if lost else known

    def _learn(self, meta: torch.Tensor, real: torch.Tensor) -> None:
        storage = meta.untyped_storage()
        held = torch.empty(storage.nbytes(), dtype=torch.uint8)
        place = torch.empty(0, dtype=meta.dtype).set_(
            held.untyped_storage(), meta.storage_offset(), meta.shape, meta.stride()
        )
        place.copy_(real)
        self._known[storage] = held.untyped_storage()


@functools.cache
def _asks(func: OpOverload) -> bool:
    """Whether it may ask for values: by torch's tags, or as it may copy to the CPU."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return func._schema.name in ("aten::_to_copy", "aten::copy_") or any(
        tag in func.tags for tag in tags
    )


def tensors_in(values: object) -> list[torch.Tensor]:
    """The tensors among values, and in lists of them."""
    if isinstance(values, torch.Tensor):
        return [values]
    found: list[torch.Tensor] = []
    if isinstance(values, list | tuple | ValuesView):
        for value in values:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, list | tuple | ValuesView):
                found += tensors_in(value)
    return found


def _is_small(tensor: torch.Tensor) -> bool:
    integral = not (tensor.is_floating_point() or tensor.is_complex())
    return int(tensor.untyped_storage().nbytes()) <= (LARGEST if integral else LARGEST_FLOAT)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


class Following(TorchDispatchMode):
    """Knows values of what is made inside: a model, a batch."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values = values

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, of local tensors
        return self.run(func, args, kwargs or {})

    def run(
        self, func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Run an operator, or answer it."""
        answer = self.values.answer(func, args, kwargs)
        if answer is not None:
            return answer[0]
        result = func(*args, **kwargs)
        self.values.follow(func, args, kwargs, result)
        return result
