"""Classes of the user's that a plain ``type("FSDP…", (FSDPModule, Original), {})`` fails on."""

from __future__ import annotations

import copy
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import FSDPModule, fully_shard
from fsdp2.fsdp1 import FullyShardedDataParallel
from fsdp2.testing.null_group import init_null_group, null_mesh
from fsdp2.xla import XlaFullyShardedDataParallel
from tests.common.errors import raises

pytestmark = pytest.mark.alone

T = TypeVar("T")


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    init_null_group(4)
    yield null_mesh(4)
    dist.destroy_process_group()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


class Abstract(ABC):
    @abstractmethod
    def name(self) -> str: ...


class AbstractFirst(Abstract, Layer):
    def name(self) -> str:
        return "first"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Named(Protocol):
    def name(self) -> str: ...


class ProtocolFirst(Named, Layer):
    def __init__(self) -> None:
        Layer.__init__(self)


class GenericFirst(Generic[T], Layer):
    pass


class GenericAndAbstract(Generic[T], Abstract, Layer):
    name = AbstractFirst.name


class Slotted:
    __slots__ = ("note",)


class SlotsFirst(Slotted, Layer):
    def __init__(self) -> None:
        super().__init__()
        self.note = 3


class WithSlots(Layer):
    __slots__ = ("note",)

    def __init__(self) -> None:
        super().__init__()
        self.note = 3


class EmptySlots:
    __slots__ = ()


class EmptySlotsFirst(EmptySlots, Layer):
    pass


class Registry(Layer):
    kinds: list[str] = []  # noqa: RUF012  # written by all subclasses, on purpose

    def __init_subclass__(cls, *, key: str, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        Registry.kinds.append(key)


class Registered(Registry, key="one"):
    pass


class AbstractAndRegistered(Abstract, Registry, key="two"):
    name = AbstractFirst.name


class Final(Layer):
    def __init_subclass__(cls) -> None:
        raise TypeError("Final has no subclasses")


class Tagging(type):
    def __new__(cls, name: str, bases: Any, attributes: Any, *, tag: str) -> Any:
        return super().__new__(cls, name, bases, {**attributes, "tag": tag})

    def __init__(cls, name: str, bases: Any, attributes: Any, *, tag: str) -> None:
        super().__init__(name, bases, attributes)


class Tagged(Layer, metaclass=Tagging, tag="a tag"):
    pass


class TaggingAbstract(Tagging, ABCMeta):
    pass


class TaggedAbstract(Abstract, Layer, metaclass=TaggingAbstract, tag="a tag"):
    name = AbstractFirst.name


class Frozen(Layer):
    def __setattr__(self, name: str, value: Any) -> None:
        if "linear" in self.__dict__.get("_modules", ()):
            raise AttributeError("frozen")
        super().__setattr__(name, value)


RESISTING: list[Callable[[], nn.Module]] = [
    AbstractFirst,
    ProtocolFirst,
    GenericFirst[int],
    GenericAndAbstract[int],
    SlotsFirst,
    WithSlots,
    EmptySlotsFirst,
    Registered,
    AbstractAndRegistered,
    Final,
    Tagged,
    TaggedAbstract,
    Frozen,
]


@pytest.mark.parametrize("build", RESISTING)
def test_classes_that_resist(build: Callable[[], nn.Module]) -> None:
    registered = list(Registry.kinds)
    model = nn.Sequential(build(), nn.Linear(4, 2))
    original, layer = type(model[0]), model[0]
    x = torch.ones(3, 4)
    fully_shard(layer)
    fully_shard(model)
    kind = type(layer)
    assert kind.__name__ == f"FSDP{original.__name__}"
    assert repr(layer).startswith(f"FSDP{original.__name__}(")
    order = kind.__mro__
    assert order[:2] == (kind, FSDPModule)
    assert [each for each in order if each in original.__mro__] == list(original.__mro__)
    assert isinstance(layer, original)
    assert isinstance(layer, torchs.FSDPModule)
    assert isinstance(layer.linear.weight, DTensor)
    model(x).sum().backward()  # the units' own methods are found first, the user's behind them
    layer.zero_grad()
    layer.unshard()
    layer.reshard()
    with pytest.raises(TypeError, match="cannot be deep-copied"):
        copy.deepcopy(layer)
    assert Registry.kinds == registered
    other = build()
    fully_shard(other)
    assert type(other) is kind


def test_supers_and_registrations_of_abstract_classes() -> None:
    layer = AbstractFirst()
    Abstract.register(dict)
    x, weight = torch.ones(3, 4), layer.linear.weight.detach().clone()
    bias = layer.linear.bias.detach().clone()
    fully_shard(layer, mesh=null_mesh(1))
    assert torch.equal(layer(x), nn.functional.linear(x, weight, bias) * 2)
    assert isinstance(layer, Abstract)
    assert isinstance({}, Abstract)
    assert not isinstance({}, type(layer))  # it has registrations of its own
    assert layer.name() == "first"

    class Below(type(layer)):  # type: ignore[misc]
        pass

    assert Below.__mro__[1:] == type(layer).__mro__


class Sealed(type):
    def mro(cls) -> list[type]:
        order = super().mro()
        if any(type(base) is Sealed for base in order[1:]):
            raise TypeError("sealed")
        return order


class SealedLayer(Layer, metaclass=Sealed):
    pass


def _wrap_below(layer: nn.Module) -> None:
    policy = fsdp2.wrap.ModuleWrapPolicy({nn.Linear, SealedLayer})
    FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), layer), auto_wrap_policy=policy)


@pytest.mark.parametrize(
    "shard",
    [
        fully_shard,
        lambda layer: fully_shard([nn.Linear(2, 2), layer]),
        FullyShardedDataParallel,
        _wrap_below,
        XlaFullyShardedDataParallel,
        lambda layer: fsdp2.shard_model(nn.Sequential(nn.Linear(2, 2), layer), {SealedLayer}),
    ],
)
def test_no_class_can_be_made(shard: Callable[[nn.Module], Any]) -> None:
    """Found before anything is changed."""
    layer = SealedLayer()
    params = list(layer.parameters())
    with raises("class-resists"):
        shard(layer)
    assert type(layer) is SealedLayer
    assert type(layer.linear) is nn.Linear
    assert all(a is b for a, b in zip(layer.parameters(), params, strict=True))
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize("shard", [fully_shard, FullyShardedDataParallel])
def test_no_class_and_no_process_group(shard: Callable[[nn.Module], Any]) -> None:
    dist.destroy_process_group()
    try:
        with raises("class-resists"):
            shard(SealedLayer())
        assert not dist.is_initialized()
    finally:
        init_null_group(4)
