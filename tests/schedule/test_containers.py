"""Walks through what modules take and return."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

from fsdp2.core.modules.containers import grad_tensors, map_tensors

pytestmark = pytest.mark.alone


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Plain:
    first: Any
    second: Any = None


@dataclass(frozen=True)
class Frozen:
    first: Any
    second: Any = None


@dataclass
class Checked:
    """One whose ``__init__`` must not run again: it counts and it computes."""

    first: Any
    doubled: Any = field(init=False)
    made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.doubled = self.first * 2
        self.made += 1


@dataclass
class Slotted:
    __slots__ = ("first", "second")
    first: Any
    second: Any


@dataclass
class Partial:
    """One of whose fields may never be set."""

    first: Any
    late: Any = field(init=False)


@dataclass(slots=True)
class SlottedPartial:
    """As `Partial`, with slots."""

    first: Any
    late: Any = field(init=False)


@dataclass(slots=True)
class SlottedBase:
    first: Any


@dataclass
class HalfSlotted(SlottedBase):
    """The base's field is in a slot, its own in ``__dict__``."""

    second: Any = None


class Locked(dict[str, Any]):
    """A dict that refuses to be updated as a whole, as some models' outputs do."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("use item assignment")


class Point(tuple[Any, ...]):
    """A tuple of another class, without fields."""


def _tensor(value: float = 1.0) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.float32, requires_grad=True)


class Registered:
    def __init__(self, value: Any) -> None:
        self.value = value


pytree.register_pytree_node(
    Registered, lambda each: ([each.value], None), lambda items, _: Registered(next(iter(items)))
)

CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda a, b: (a, b),
    "tuple subclass": lambda a, b: Point((a, b)),
    "named tuple": Pair,
    "list": lambda a, b: [a, b],
    "set": lambda a, b: {a, b, "text"},
    "frozenset": lambda a, b: frozenset([a, b, "text"]),
    "deque": lambda a, b: deque([a, b]),
    "dict": lambda a, b: {"a": a, "b": b},
    "ordered dict": lambda a, b: OrderedDict([("b", a), ("a", b)]),
    "default dict": lambda a, b: defaultdict(list, {1: a, 2: b}),
    "locked dict": lambda a, b: Locked(a=a, b=b),
    "user dict": lambda a, b: UserDict(first=a, second=b),
    "namespace": lambda a, b: SimpleNamespace(first=a, second=b),
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "slotted dataclass": Slotted,
    "half slotted dataclass": HalfSlotted,
    "registered": lambda a, b: Registered((a, b)),
    "nested": lambda a, b: [Pair(({"x": a},), 3), Frozen(None, Plain([b]))],
    "nested, of others": lambda a, b: SimpleNamespace(first=[Registered(UserDict(value=(a, b)))]),
}


def found_in(value: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors with and without gradient, in order."""
    found: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    grad_tensors(value, found, others)
    return found, others


def values(tensors: list[torch.Tensor]) -> list[float]:
    return sorted(tensor.item() for tensor in tensors)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_walk_and_replacement_agree(make: Callable[[Any, Any], Any], grad: bool) -> None:
    value = make(*(_tensor(number).detach().requires_grad_(grad) for number in (1, 2)))
    found = found_in(value)[not grad]
    assert not found_in(value)[grad]
    assert values(found) == [1, 2]
    if not isinstance(value, (set, frozenset)):  # which have an order of their own
        assert [tensor.item() for tensor in found] == [1, 2]

    seen: list[torch.Tensor] = []

    def double(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor * 2

    mapped = map_tensors(double, value)
    assert [*map(id, seen)] == [*map(id, found)]
    assert type(mapped) is type(value)
    assert values(found_in(mapped)[not grad]) == [2, 4]
    # The original is what it was.
    assert [*map(id, found_in(value)[not grad])] == [*map(id, found)]
    assert map_tensors(lambda tensor: tensor, value) is value


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_container_without_tensors_is_the_same_object(make: Callable[[Any, Any], Any]) -> None:
    value = make("text", None)
    assert map_tensors(lambda tensor: tensor * 2, value) is value
    assert found_in(value) == ([], [])


def test_only_the_changed_branch_is_rebuilt() -> None:
    kept, changed = [_tensor()], [torch.ones(1)]
    value = {"kept": kept, "changed": changed}
    mapped = map_tensors(lambda t: t if t.requires_grad else t * 2, value)
    assert mapped is not value
    assert mapped["kept"] is kept
    assert mapped["changed"] is not changed
    assert changed[0].item() == 1


def test_tensors_without_grad_need_not_be_found() -> None:
    found: list[torch.Tensor] = []
    grad_tensors((torch.ones(1), torch.ones(1, dtype=torch.long)), found)
    assert found == []


def test_packed_sequence() -> None:
    packed = pack_padded_sequence(torch.randn(2, 2, 1, requires_grad=True), torch.tensor([2, 1]))
    assert [*map(id, found_in(packed)[0])] == [id(packed.data)]
    mapped = map_tensors(lambda t: t * 2 if t.requires_grad else t, packed)
    assert type(mapped) is PackedSequence
    assert torch.equal(mapped.data, packed.data * 2)
    assert mapped.batch_sizes is packed.batch_sizes
    assert map_tensors(lambda t: t, packed) is packed


def test_dataclass_is_not_initialised_again() -> None:
    value = Checked(_tensor(3))
    value.extra = "kept"  # type: ignore[attr-defined]  # as any object may
    mapped = map_tensors(lambda t: t + 1, value)
    assert (mapped.first.item(), mapped.doubled.item(), mapped.made) == (4, 7, 1)
    assert mapped.extra == "kept"


@pytest.mark.parametrize("kind", [Partial, SlottedPartial])
def test_field_that_was_never_set(kind: Callable[[Any], Any]) -> None:
    value = kind(_tensor(3))
    assert len(found_in(value)[0]) == 1
    mapped = map_tensors(lambda t: t + 1, value)
    assert mapped.first.item() == 4
    assert not hasattr(mapped, "late")


def test_dataclass_keeps_what_did_not_change() -> None:
    kept = object()
    mapped = map_tensors(lambda t: t + 1, HalfSlotted(kept, _tensor(3)))
    assert mapped.first is kept
    assert mapped.second.item() == 4
