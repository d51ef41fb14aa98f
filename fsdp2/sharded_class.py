"""The class that `fully_shard` gives a module: ``FSDP<Original>``.

    FSDP<Original> ── FSDPModule ── … ── Original     order in which methods are looked up
    FSDP<Original> ── Original                        base that memory is laid out by, where needed

Python gives an object another class only if both lay out their instances alike, which it tells by
the chain of each class's first base. That chain differs where a base without ``nn.Module`` comes
first: ``class Block(Mixin, nn.Module)`` with ``class Mixin(ABC)``. `Original` is then the first
base, and a metaclass moves `FSDPModule` to the front of the lookup.

No class of the user's is changed, and no object is until all of this has succeeded.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fsdp2.core.errors import coded
from fsdp2.module import FSDPModule

_made: dict[type, type] = {}

_set_class: Callable[[object, type], None] = vars(object)["__class__"].__set__
"""Changes an object's class, whatever its own class makes of attributes."""


def sharded_class(module: nn.Module) -> type:
    """``FSDP<Original>`` for a module's class: created once, and checked to fit; changes nothing.

    Args:
        module: any module; for a sharded one, its class is returned unchanged.

    Raises:
        TypeError: Python cannot create the class, or ``module`` cannot be assigned it.
    """
    original = type(module)
    if issubclass(original, FSDPModule):
        return original  # sharded already, which others refuse
    if original not in _made:
        _made[original] = _parametrized(module) or _fitting(module, original)
    return _made[original]


def set_sharded_class(module: nn.Module) -> None:
    """Give a module its ``FSDP<Original>``."""
    _set_class(module, sharded_class(module))


def _parametrized(module: nn.Module) -> type | None:
    """The class of a module that torch has parametrized; ``None`` for another one."""
    original = type(module)
    own = vars(original)
    names = list(dict(module.named_children()).get("parametrizations", nn.Module())._modules)
    if not is_parametrized(module) or any(name not in own for name in names):
        return None
    unparametrized = original.__bases__[0]
    if unparametrized not in _made:
        _made[unparametrized] = _fitting(module, unparametrized)
    attributes = {name: own[name] for name in names}
    attributes["_fsdp2_original"] = original
    sharded = _made[unparametrized]
    return type(sharded)(f"FSDP{original.__name__}", (sharded,), attributes)


def _fitting(module: nn.Module, original: type) -> type:
    before = type(module)
    refused: Exception | None = None
    for attempt in _attempts(original):
        try:
            kind = attempt()
            _set_class(module, kind)
        except Exception as error:  # of Python, or of any code of the user's that makes classes
            refused = refused or error
        else:
            _set_class(module, before)
            return kind
    assert refused is not None
    raise coded(
        TypeError,
        "class-resists",
        f"fully_shard cannot give a {original.__name__} the subclass that it needs ({refused}); "
        f"call fully_shard on a module around it, or on the modules inside it",
    ) from refused


def _attempts(original: type) -> Iterator[Callable[[], type]]:
    """Ways to make the class, the plainest first."""
    for bases, metaclass in (
        ((FSDPModule, original), type(original)),
        ((original, FSDPModule), _ControlsFirst.over(type(original))),
    ):
        # As a class statement does; then without what the user's metaclass asks for besides.
        for make in (metaclass, _plain_maker(metaclass, type(original))):
            attributes = {"_fsdp2_original": original}
            yield functools.partial(make, f"FSDP{original.__name__}", bases, attributes)


def _plain_maker(metaclass: type, of_user: type) -> Callable[..., type]:
    """Creates classes of a metaclass with only Python's own code."""
    own: object = abc.ABCMeta if issubclass(of_user, abc.ABCMeta) else type
    made: Callable[..., type] = functools.partial(own.__new__, metaclass)
    return made


class _ControlsFirst(type):
    """A metaclass: methods of `FSDPModule` are found before those of the base in front of it."""

    @staticmethod
    def over(metaclass: type) -> type:
        """It, on top of the metaclass of a user's class."""
        if issubclass(_ControlsFirst, metaclass):
            return _ControlsFirst
        name = f"{_ControlsFirst.__name__}{metaclass.__name__}"
        return type.__new__(type, name, (_ControlsFirst, metaclass), {})

    def mro(cls) -> list[type]:
        order = super().mro()
        if FSDPModule not in cls.__bases__:
            return order  # a subclass has its base's order
        front = [kind for kind in FSDPModule.__mro__ if kind is not object]
        return [cls, *front, *(kind for kind in order[1:] if kind not in front)]
