"""Exact counts of what code does: operators, calls of Python functions, copied bytes.

    python, built_in = called(step)        # calls, by the function's name
    operators(step)["aten.copy_.default"]  # operators that torch dispatches
    collectives(step)["all_gather"]        # collectives of all process groups
    copied_bytes(step).total()             # what copies and casts read and write

Counts are the same on every machine, so a test can compare them. Run a step twice before you count
it: the first two steps allocate buffers and learn the order of units.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Counts operators while it is entered.

    Attributes:
        counts: how often each operator was dispatched, by its name.
        nbytes: sizes of the tensors that each read and wrote, by its name without the overload.
        on_dtensors: how many operators a DTensor took part in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.on_dtensors = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Count one operator and run it."""
        self.counts[str(func)] += 1
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.nbytes[str(func).rpartition(".")[0]] += sum(tensor.nbytes for tensor in tensors)
        self.on_dtensors += any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


def operators(run: Callable[[], object]) -> Counter[str]:
    """The operators that ``run`` dispatches, by name."""
    with Operators() as found:
        run()
    return found.counts


def called(run: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """How often ``run`` calls which functions on this thread: Python's by module and name, as
    ``fsdp2.core.device.buffers.acquire``, and built-in ones by qualified name.
    """
    python: Counter[str] = Counter()
    built_in: Counter[str] = Counter()

    def count(frame: FrameType, event: str, function: object) -> None:
        if event == "call":
            python[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            built_in[getattr(function, "__qualname__", "?")] += 1

    profile(run, count)
    return python, built_in


def profile(run: Callable[[], object], hook: Callable[[FrameType, str, object], None]) -> None:
    """Call ``hook`` for each event of ``run``, as `sys.setprofile` does.

    The garbage collector is off meanwhile: it would call functions of older objects.
    """
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(hook)
    try:
        run()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()


class CountCollectives:
    """Counts the collectives that this process starts while it is entered.

    They are counted where c10d dispatches them, whatever has called them, on whatever thread: a
    coalesced collective is one. Operators that are not c10d's take no longer.

    Attributes:
        counts: by kind: "all_gather", "reduce_scatter" and "all_reduce"; others by the name of
            c10d's operator.
        elements: of their inputs and outputs together.
    """

    _entered: ClassVar[list[CountCollectives]] = []
    _library: ClassVar[torch.library.Library | None] = None

    def __init__(self) -> None:
        self.counts = Counter(dict.fromkeys(_COLLECTIVES.values(), 0))
        self.elements: Counter[str] = Counter()

    def __enter__(self) -> CountCollectives:
        if not self._entered:
            CountCollectives._library = _observed(self._note)
        self._entered.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.remove(self)
        if not self._entered and CountCollectives._library is not None:
            CountCollectives._library._destroy()
            CountCollectives._library = None

    @classmethod
    def _note(cls, kind: str, args: tuple[object, ...]) -> None:
        elements = sum(leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        for each in cls._entered:
            each.counts[kind] += 1
            each.elements[kind] += elements

    @property
    def all_gathers(self) -> int:
        """Their number."""
        return self.counts["all_gather"]

    @property
    def reduce_scatters(self) -> int:
        """Their number."""
        return self.counts["reduce_scatter"]

    @property
    def total(self) -> int:
        """The number of collectives of all kinds."""
        return self.counts.total()


def _observed(note: Callable[[str, tuple[object, ...]], None]) -> torch.library.Library:
    """Have ``note`` called with the kind and the arguments of each collective of c10d.

    A kernel before those of devices, which calls them. A `TorchDispatchMode` would be called for
    every operator: tests that train spend a third of their time in one.
    """
    library = torch.library.Library("c10d", "IMPL")
    rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace != "c10d" or not operator.strip("_").startswith(_MANY_RANKS):
            continue
        kind = (known for part, known in _COLLECTIVES.items() if part in operator)
        kernel = partial(
            _count_and_run,
            getattr(torch.ops.c10d, operator).default,
            partial(note, next(kind, operator.strip("_"))),
            rest,
        )
        library.impl(operator, kernel, "BackendSelect", with_keyset=True)
    return library


def _count_and_run(
    operator: torch._ops.OpOverload[..., object],
    note: Callable[[tuple[object, ...]], None],
    rest: torch._C.DispatchKeySet,
    keys: torch._C.DispatchKeySet,
    *args: object,
    **kwargs: object,
) -> object:
    note(args)
    return operator.redispatch(keys & rest, *args, **kwargs)


_MANY_RANKS = ("allgather", "allreduce", "alltoall", "broadcast", "gather", "reduce", "scatter")
"""How names of operators begin that communicate among all ranks of a group."""

_COLLECTIVES = {
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
}
"""Kinds that have names of their own, by a part of the names of c10d's operators."""


def collectives(run: Callable[[], object]) -> Counter[str]:
    """The collectives that ``run`` starts, by kind; see `CountCollectives`."""
    with CountCollectives() as found:
        run()
    return +found.counts


COPIES = ("_foreach_copy_", "_chunk_cat", "split_with_sizes_copy", "copy_")
"""Operators that copy or cast from tensors to tensors that are there."""


def copied_bytes(run: Callable[[], object]) -> Counter[str]:
    """Bytes that copies and casts read and write in ``run``, by operator, by the tensors' sizes."""
    with Operators() as counted:
        run()
    found = {name: counted.nbytes[f"aten.{name}"] for name in COPIES}
    return Counter({name: nbytes for name, nbytes in found.items() if nbytes})
