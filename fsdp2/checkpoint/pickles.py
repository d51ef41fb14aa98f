"""Pickles, read by a separate interpreter: new containers, and the results of makers.

Python's own interpreter runs BUILD on any object on its stack, including a class: a pickle that is
refused in the end may already have changed a class for the whole process. In this interpreter, a
name in the file becomes a `Maker`, which can only be called; BUILD fills an object that a maker has
created, by its ``build_from``, and all other opcodes reach only containers of this pickle. Memory
is bounded by the file's length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2.checkpoint.files import BrokenError

MAX_DEPTH = 100
"""Containers in one another: deeper ones would end in the interpreter's recursion limit."""

MAX_SIZE = 100_000_000
"""Values that a walk meets: ten containers of ten times the same would be more than memory has."""

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""By the names that pickles have for them; asking torch for other names would import modules."""

_PLAIN = (str, int, float, bytes, bool, complex, type(None))


@dataclass(frozen=True, slots=True)
class Maker:
    """Represents a name in the file: called with arguments from the file."""

    make: Callable[..., object]


Find = Callable[[str, str], object]
"""(module, name) -> a `Maker`, or an immutable value; it raises for all others."""


class Interpreter:
    """One pickle of protocol 2 to 5.

    Args:
        data: its bytes.
        find: what a name stands for.
        persistent: what a persistent id stands for. Default: none is known.
        hashable: classes with ``build_from`` that may be keys.
    """

    def __init__(
        self,
        data: bytes,
        find: Find,
        persistent: Callable[[object], object] | None = None,
        hashable: tuple[type, ...] = (),
    ) -> None:
        self._data = data
        self._find = find
        self._persistent = persistent
        self._keys = (*_PLAIN, *hashable)
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}

    def load(self) -> object:
        """The value.

        Raises:
            Exception: of any class, where it is broken.
        """
        data, stack, memo, at = self._data, self._stack, self._memo, 0
        while True:
            code = data[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x2E:  # STOP
                return stack.pop()
            else:
                at = _OPCODES[code](self, at)

    # ---- of the opcodes

    def _take(self, at: int, size: int) -> bytes:
        found = self._data[at : at + size]
        if len(found) != size:
            raise BrokenError()
        return found

    def _number(self, at: int, size: int) -> int:
        return int.from_bytes(self._take(at, size), "little")

    def _line(self, at: int) -> tuple[str, int]:
        end = self._data.index(b"\n", at)
        return self._data[at:end].decode(), end + 1

    def _since_mark(self) -> list[object]:
        start = self._marks.pop()
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def _key(self, key: object) -> object:
        """Only what is hashed without recursion, and compares without code."""
        parts = key if type(key) is tuple else (key,)
        if not all(type(part) in self._keys for part in parts):
            raise BrokenError()
        return key

    def _into(self, kind: type) -> Any:
        """The container on top, which is one of this pickle."""
        if type(self._stack[-1]) is not kind:
            raise BrokenError()
        return self._stack[-1]

    def _set_items(self, items: list[Any]) -> None:
        into = self._into(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            into[self._key(key)] = value

    def _call(self, made: object, given: object) -> object:
        if type(made) is not Maker or type(given) is not tuple:
            raise BrokenError()
        return made.make(*given)


Opcode = Callable[[Interpreter, int], int]


def _constant(value: object) -> Opcode:
    def run(it: Interpreter, at: int) -> int:
        it._stack.append(value)
        return at

    return run


def _new(kind: type) -> Opcode:
    def run(it: Interpreter, at: int) -> int:
        it._stack.append(kind())
        return at

    return run


def _integer(size: int, signed: bool = False) -> Opcode:
    def run(it: Interpreter, at: int) -> int:
        it._stack.append(int.from_bytes(it._take(at, size), "little", signed=signed))
        return at + size

    return run


def _sized(width: int, convert: Callable[[bytes], object]) -> Opcode:
    """Bytes after their number."""

    def run(it: Interpreter, at: int) -> int:
        size = it._number(at, width)
        it._stack.append(convert(it._take(at + width, size)))
        return at + width + size

    return run


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _tuple_of(count: int) -> Opcode:
    def run(it: Interpreter, at: int) -> int:
        if len(it._stack) < count:
            raise BrokenError()
        found = tuple(it._stack[len(it._stack) - count :])
        del it._stack[len(it._stack) - count :]
        it._stack.append(found)
        return at

    return run


def _skip(size: int) -> Opcode:
    def run(it: Interpreter, at: int) -> int:
        it._take(at, size)
        return at + size

    return run


def _put(width: int) -> Opcode:
    def run(it: Interpreter, at: int) -> int:
        it._memo[it._number(at, width)] = it._stack[-1]
        return at + width

    return run


def _float(it: Interpreter, at: int) -> int:
    it._stack.append(struct.unpack(">d", it._take(at, 8))[0])
    return at + 8


def _mark(it: Interpreter, at: int) -> int:
    it._marks.append(len(it._stack))
    return at


def _pop(it: Interpreter, at: int) -> int:
    it._stack.pop()
    return at


def _pop_mark(it: Interpreter, at: int) -> int:
    it._since_mark()
    return at


def _tuple(it: Interpreter, at: int) -> int:
    it._stack.append(tuple(it._since_mark()))
    return at


def _append(it: Interpreter, at: int) -> int:
    value = it._stack.pop()
    it._into(list).append(value)
    return at


def _appends(it: Interpreter, at: int) -> int:
    values = it._since_mark()
    it._into(list).extend(values)
    return at


def _set_item(it: Interpreter, at: int) -> int:
    value, key = it._stack.pop(), it._stack.pop()
    it._set_items([key, value])
    return at


def _set_items(it: Interpreter, at: int) -> int:
    it._set_items(it._since_mark())
    return at


def _add_items(it: Interpreter, at: int) -> int:
    values = [it._key(value) for value in it._since_mark()]
    it._into(set).update(values)
    return at


def _frozen(it: Interpreter, at: int) -> int:
    it._stack.append(frozenset(it._key(value) for value in it._since_mark()))
    return at


def _global(it: Interpreter, at: int) -> int:
    module, at = it._line(at)
    name, at = it._line(at)
    it._stack.append(it._find(module, name))
    return at


def _stack_global(it: Interpreter, at: int) -> int:
    name, module = it._stack.pop(), it._stack.pop()
    if type(name) is not str or type(module) is not str:
        raise BrokenError()
    it._stack.append(it._find(module, name))
    return at


def _reduce(it: Interpreter, at: int) -> int:
    given, made = it._stack.pop(), it._stack.pop()
    it._stack.append(it._call(made, given))
    return at


def _build(it: Interpreter, at: int) -> int:
    state, made = it._stack.pop(), it._stack[-1]
    if type(made) is dict:  # an OrderedDict of torch's: attributes of its own, as versions
        return at
    build = getattr(type(made), "build_from", None)
    if build is None:
        raise BrokenError()
    build(made, state)
    return at


def _persistent(it: Interpreter, at: int) -> int:
    if it._persistent is None:
        raise BrokenError()
    it._stack.append(it._persistent(it._stack.pop()))
    return at


_KNOWN: dict[str, Opcode] = {
    "(": _mark,
    "0": _pop,
    "1": _pop_mark,
    "N": _constant(None),
    "\x88": _constant(True),
    "\x89": _constant(False),
    "K": _integer(1),
    "M": _integer(2),
    "J": _integer(4, signed=True),
    "\x8a": _sized(1, _long),
    "\x8b": _sized(4, _long),
    "G": _float,
    "\x8c": _sized(1, _text),
    "X": _sized(4, _text),
    "\x8d": _sized(8, _text),
    "C": _sized(1, bytes),
    "B": _sized(4, bytes),
    "\x8e": _sized(8, bytes),
    "\x96": _sized(8, bytearray),
    "U": _sized(1, _text),
    "T": _sized(4, _text),
    ")": _constant(()),
    "\x85": _tuple_of(1),
    "\x86": _tuple_of(2),
    "\x87": _tuple_of(3),
    "t": _tuple,
    "]": _new(list),
    "}": _new(dict),
    "\x8f": _new(set),
    "a": _append,
    "e": _appends,
    "s": _set_item,
    "u": _set_items,
    "\x90": _add_items,
    "\x91": _frozen,
    "c": _global,
    "\x93": _stack_global,
    "R": _reduce,
    "\x81": _reduce,  # NEWOBJ: of a maker the same
    "b": _build,
    "Q": _persistent,
    "q": _put(1),
    "r": _put(4),
    "\x80": _skip(1),  # PROTO
    "\x95": _skip(8),  # FRAME
}


def _unknown(it: Interpreter, at: int) -> int:
    raise BrokenError()


_OPCODES: list[Opcode] = [_KNOWN.get(chr(code), _unknown) for code in range(256)]


def check_tree(tree: object) -> None:
    """Raise unless a walk through all containers ends soon.

    They lie in one another at most `MAX_DEPTH` deep, never in themselves, and one that lies in
    several counts in each.

    Raises:
        BrokenError: else.
    """
    depths: dict[int, int] = {}  # of containers that have been looked through
    sizes: dict[int, int] = {}
    open_: set[int] = set()
    pending: list[tuple[object, bool]] = [(tree, False)]
    while pending:
        value, is_done = pending.pop()
        inside = _inside(value)
        if inside is None or id(value) in depths:
            continue
        if is_done:
            open_.discard(id(value))
            depth = 1 + max((depths.get(id(each), 0) for each in inside), default=0)
            depths[id(value)] = depth
            size = sizes[id(value)] = 1 + sum(sizes.get(id(each), 1) for each in inside)
            if depth > MAX_DEPTH or size > MAX_SIZE:
                raise BrokenError()
        elif id(value) in open_:
            raise BrokenError()
        else:
            open_.add(id(value))
            pending.append((value, True))
            pending += [(each, False) for each in inside]


def _inside(value: Any) -> list[object] | None:
    if type(value) is dict:
        return list(value.values())
    if type(value) in (list, tuple):
        return list(value)
    return None
