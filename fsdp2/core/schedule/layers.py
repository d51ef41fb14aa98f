"""What is put around a group's operations while somebody asks for it: ranges, checks.

    nothing is asked    ParamGroup
    a profiler runs     ProfiledGroup ──> ParamGroup
    checks are on too   ProfiledGroup ──> CheckedGroup ──> ParamGroup

A layer is a subclass of `ParamGroup` that overrides operations and calls what is below it by
``super()``. A group gets a layer by its class, as a module becomes an `FSDPModule`, and loses it in
the same way. A step without layers asks nothing and calls nothing. Layers do not know each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import ClassVar

from fsdp2.core.config import GroupOptions
from fsdp2.core.params.param import PlannedParam
from fsdp2.core.schedule.group import ParamGroup


class Watchers:
    """What rooms above core want to be told of; each adds itself when it is imported.

    Attributes:
        plans: called before anything is changed, with the name of a unit's modules, what is to
            become of their parameters, and the options of its groups. They may raise.
        groups: called with each new group, around which they may put a layer.
    """

    plans: ClassVar[list[Callable[[str, list[PlannedParam], GroupOptions], None]]] = []
    groups: ClassVar[list[Callable[[ParamGroup], None]]] = []


class Layer(ParamGroup):
    """A layer around a group's operations.

    Layers share the group's memory: each has empty ``__slots__`` and keeps elsewhere what it must
    remember of a group.

    Attributes:
        height: where it is among other layers; the highest is called first.
    """

    __slots__ = ()

    height: ClassVar[int]


def put_around(groups: Iterable[ParamGroup], layer: type[Layer], wanted: bool) -> None:
    """Put a layer around the operations of groups, or take it off.

    Args:
        groups: the groups.
        layer: the layer.
        wanted: whether they are to have it.
    """
    for group in groups:
        present = layers_around(group)
        if (layer in present) is not wanted:
            layers = present ^ {layer}
            group.__class__ = (
                _composed(layers) if len(layers) > 1 else next(iter(layers), ParamGroup)
            )


def layers_around(group: ParamGroup) -> frozenset[type[Layer]]:
    """The layers that a group has now."""
    return frozenset(kind for kind in type(group).__mro__ if Layer in kind.__bases__)


@functools.cache
def _composed(layers: frozenset[type[Layer]]) -> type[ParamGroup]:
    """The class of groups with several layers; always the same object."""
    ordered = sorted(layers, key=lambda layer: layer.height, reverse=True)
    return type("".join(layer.__name__ for layer in ordered), tuple(ordered), {"__slots__": ()})
