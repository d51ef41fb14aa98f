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


def _packed() -> PackedSequence:
    return pack_padded_sequence(torch.randn(2, 2, 1, requires_grad=True), torch.tensor([2, 1]))


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda a, b: (a, b),
    "tuple subclass": lambda a, b: Point((a, b)),
    "named tuple": Pair,
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"a": a, "b": b},
    "ordered dict": lambda a, b: OrderedDict([("b", a), ("a", b)]),
    "default dict": lambda a, b: defaultdict(list, {1: a, 2: b}),
    "locked dict": lambda a, b: Locked(a=a, b=b),
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "slotted dataclass": Slotted,
    "half slotted dataclass": HalfSlotted,
    "nested": lambda a, b: [Pair(({"x": a},), 3), Frozen(None, Plain([b]))],
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_walk_and_replacement_agree(make: Callable[[Any, Any], Any]) -> None:
    a, b = _tensor(1), _tensor(2)
    value = make(a, b)
    found: list[torch.Tensor] = []
    grad_tensors(value, found)
    assert [id(t) for t in found] == [id(a), id(b)]

    seen: list[torch.Tensor] = []

    def double(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor * 2

    mapped = map_tensors(double, value)
    assert [id(t) for t in seen] == [id(a), id(b)]
    assert type(mapped) is type(value)
    after: list[torch.Tensor] = []
    grad_tensors(mapped, after)
    assert [t.item() for t in after] == [2, 4]
    before: list[torch.Tensor] = []
    grad_tensors(value, before)
    assert [id(t) for t in before] == [id(a), id(b)]  # the original is what it was


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_container_without_tensors_is_the_same_object(make: Callable[[Any, Any], Any]) -> None:
    value = make("text", None)
    assert map_tensors(lambda tensor: tensor * 2, value) is value
    found: list[torch.Tensor] = []
    grad_tensors(value, found)
    assert found == []


def test_only_the_changed_branch_is_rebuilt() -> None:
    kept, changed = [_tensor()], [torch.ones(1)]
    value = {"kept": kept, "changed": changed}
    mapped = map_tensors(lambda t: t if t.requires_grad else t * 2, value)
    assert mapped is not value
    assert mapped["kept"] is kept
    assert mapped["changed"] is not changed
    assert changed[0].item() == 1


def test_tensors_without_grad_are_not_found_but_mapped() -> None:
    found: list[torch.Tensor] = []
    grad_tensors((torch.ones(1), torch.ones(1, dtype=torch.long)), found)
    assert found == []
    assert map_tensors(lambda t: t * 2, (torch.ones(1),))[0].item() == 2


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets(kind: Callable[[Any], Any]) -> None:
    a, b = _tensor(1), _tensor(2)
    value = kind([a, b, "text"])
    found: list[torch.Tensor] = []
    grad_tensors(value, found)
    order = [id(item) for item in value if isinstance(item, torch.Tensor)]
    assert [id(t) for t in found] == order
    mapped = map_tensors(lambda t: t * 2, value)
    assert type(mapped) is kind
    assert sorted(t.item() for t in mapped if isinstance(t, torch.Tensor)) == [2, 4]
    assert map_tensors(lambda t: t, value) is value


def test_packed_sequence() -> None:
    packed = _packed()
    found: list[torch.Tensor] = []
    grad_tensors(packed, found)
    assert [id(t) for t in found] == [id(packed.data)]
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
    found: list[torch.Tensor] = []
    grad_tensors(value, found)
    assert len(found) == 1
    mapped = map_tensors(lambda t: t + 1, value)
    assert mapped.first.item() == 4
    assert not hasattr(mapped, "late")


def test_dataclass_keeps_what_did_not_change() -> None:
    kept = object()
    mapped = map_tensors(lambda t: t + 1, HalfSlotted(kept, _tensor(3)))
    assert mapped.first is kept
    assert mapped.second.item() == 4


class Registered:
    def __init__(self, value: Any) -> None:
        self.value = value


pytree.register_pytree_node(
    Registered, lambda each: ([each.value], None), lambda items, _: Registered(next(iter(items)))
)


@pytest.mark.parametrize(
    "make",
    [
        lambda value: UserDict(first=value, second=None),
        lambda value: SimpleNamespace(first=value, second=None),
        lambda value: deque([value, None]),
        Registered,
        lambda value: SimpleNamespace(first=[Registered(UserDict(value=(value,)))]),
    ],
)
def test_other_containers(make: Callable[[Any], Any]) -> None:
    marked, plain = torch.ones(2, requires_grad=True), torch.ones(2)
    for tensor in (marked, plain):
        found: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        box = make(tensor)
        grad_tensors(box, found, others)
        assert [*map(id, found + others)] == [id(tensor)]
        assert bool(found) is tensor.requires_grad
        assert map_tensors(lambda each: each, box) is box
        new = map_tensors(lambda each: each + 1, box)
        assert type(new) is type(box)
        found.clear()
        others.clear()
        grad_tensors(new, found, others)
        assert torch.equal((found + others)[0], tensor + 1)
        found.clear()
        others.clear()
        grad_tensors(box, found, others)
        assert (found + others)[0] is tensor  # the caller's is as it was
