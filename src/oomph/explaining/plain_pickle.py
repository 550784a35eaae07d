"""Reads a pickle of plain values as a stream: runs nothing in it, and keeps little of it.

Only numbers, strings, bytes, lists, dicts, tuples, booleans and None are allowed in such a file;
anything else is refused by name before it takes effect. A file cannot reach any import or call in
this code.

Memory use is small because each dict that goes into a list is first offered to the caller, who may
take what it needs and drop the rest. Beyond that, the reader keeps four bytes for each object that
the file may refer to again, and at most `MOST_KEPT` values. A file that needs more is refused.

The result is also safe to walk, print or compare: keys are strings or numbers, nothing is nested
deeper than `DEEPEST`, and a value counts as often as it is referred to, so that none expands to
more than `MOST_KEPT`. A list or dict inside another can no longer change, so none can contain
itself.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol

from oomph.errors import BadInput

CHUNK = 1 << 20
#: Longest string, and most values, in a file that is worth reading.
LONGEST = 1 << 20
MOST_KEPT = 4_000_000
#: Most bytes of strings with a four-byte length; function names may be that long.
MOST_TEXT = 1 << 30
#: Levels of nested lists, dicts and tuples; a snapshot has eight.
DEEPEST = 100
#: No opcode with its argument is longer, except for strings.
_MARGIN = 300

_index = struct.Struct("<I").unpack_from

#: Returned by a caller for a dict that it no longer needs.
CONSUMED = object()


class List(list[Any]):
    """A list that knows its memo index in the file, and the size of its contents.

    Attributes that are not set have the values of a list of strings and numbers outside any other.
    """

    __slots__ = ("at", "depth", "inner", "within")
    at: int
    depth: int
    inner: int
    """Number of values inside its values."""
    within: bool
    """Whether it is already part of another value."""


class Map(dict[Any, Any]):
    """A dict with the same attributes."""

    __slots__ = ("at", "depth", "inner", "within")
    at: int
    depth: int
    inner: int
    within: bool


_CONTAINERS = frozenset({List, Map, tuple})
_KEYS = frozenset({str, int, float, bool, bytes, type(None)})


class Swap(Protocol):
    """Redirects the file's later references to a list to another value."""

    def __call__(self, old: List, new: Any) -> None: ...


#: Called with each dict that goes into a list; returns its replacement, or `CONSUMED`.
Take = Callable[[Map, Swap], Any]

#: Opcodes that would import, call or build something, with their names in the format.
_REFUSED = {
    b"c": "GLOBAL",
    b"\x93": "STACK_GLOBAL",
    b"R": "REDUCE",
    b"i": "INST",
    b"o": "OBJ",
    b"b": "BUILD",
    b"\x81": "NEWOBJ",
    b"\x92": "NEWOBJ_EX",
    b"P": "PERSID",
    b"Q": "BINPERSID",
    b"\x82": "EXT1",
    b"\x83": "EXT2",
    b"\x84": "EXT4",
}


def read_plain_pickle(file: BinaryIO, take: Take) -> Any:
    """What the pickle contains, without what `take` took."""
    try:
        return _Reader(file, take).read()
    except (IndexError, struct.error):
        raise BadInput("the file is cut short, or is no pickle") from None
    except (AttributeError, TypeError, KeyError, ValueError, OverflowError):
        raise BadInput("the file is no pickle of plain values: its parts do not fit") from None


class _Reader:
    """The stack machine that runs a pickle, without all harmful opcodes."""

    def __init__(self, file: BinaryIO, take: Take) -> None:
        self._file = file
        self._take = take
        #: For each object that the file may refer to: its index in `_kept`; 0 if it is gone.
        self._memo = array("I")
        self._kept: list[Any] = [None]
        self._free: list[int] = []
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._retained = 0
        self._text = 0
        #: By id, tuples that contain containers: the tuple (so that the id stays valid), its depth
        #: and its expanded size.
        self._tuples: dict[int, tuple[tuple[Any, ...], int, int]] = {}

    def read(self) -> Any:  # noqa: C901 - one loop without calls: snapshots have millions of ops
        """Run to the end; the remaining value is the result."""
        file, stack = self._file, self._stack
        memo, kept = self._memo, self._kept
        buffer, at = file.read(CHUNK), 0
        edge = len(buffer) - _MARGIN if len(buffer) == CHUNK else len(buffer)
        while True:
            if at >= edge:
                more = file.read(CHUNK)
                buffer, at = buffer[at:] + more, 0
                edge = len(buffer) - _MARGIN if more else len(buffer)
                self._check_size()
            op = buffer[at]
            at += 1
            # In order of frequency.
            if op == 0x68:  # h BINGET
                stack.append(self._get(buffer[at]))
                at += 1
            elif op == 0x6A:  # j LONG_BINGET
                slot = memo[_index(buffer, at)[0]]
                at += 4
                if not slot:
                    self._refuse_gone()
                stack.append(kept[slot])
                # A stack trace is a run of references, which make up most of a snapshot.
                while at < edge and buffer[at] == 0x6A:
                    slot = memo[_index(buffer, at + 1)[0]]
                    at += 5
                    if not slot:
                        self._refuse_gone()
                    stack.append(kept[slot])
            elif op == 0x94:  # MEMOIZE
                self._put(len(memo), stack[-1])
            elif op == 0x4B:  # K BININT1
                stack.append(buffer[at])
                at += 1
            elif op == 0x4D:  # M BININT2
                stack.append(buffer[at] | buffer[at + 1] << 8)
                at += 2
            elif op == 0x4A:  # J BININT
                stack.append(struct.unpack_from("<i", buffer, at)[0])
                at += 4
            elif op == 0x8A:  # LONG1
                size = buffer[at]
                stack.append(_number(buffer[at + 1 : at + 1 + size], size))
                at += 1 + size
            elif op == 0x7D:  # } EMPTY_DICT
                stack.append(Map())
            elif op == 0x5D:  # ] EMPTY_LIST
                stack.append(List())
            elif op == 0x28:  # ( MARK
                self._marks.append(stack)
                stack = self._stack = []
                if len(self._marks) > DEEPEST:
                    _refuse_deep()
            elif op == 0x75:  # u SETITEMS
                items, stack = stack, self._pop_mark()
                self._set(stack[-1], items)
            elif op == 0x65:  # e APPENDS
                items, stack = stack, self._pop_mark()
                self._extend(stack[-1], items)
            elif op == 0x8C:  # SHORT_BINUNICODE
                size = buffer[at]
                stack.append(_word(buffer[at + 1 : at + 1 + size], size))
                at += 1 + size
            elif op == 0x61:  # a APPEND
                item = stack.pop()
                self._extend(stack[-1], [item])
            elif op == 0x73:  # s SETITEM
                value, key = stack.pop(), stack.pop()
                self._set(stack[-1], [key, value])
            elif op == 0x2E:  # . STOP
                return stack.pop()
            else:
                grown, at = self._read_rare(op, buffer, at)
                stack = self._stack
                if grown is not buffer:
                    buffer = grown
                    edge = len(buffer) - _MARGIN

    def _read_rare(self, op: int, buffer: bytes, at: int) -> tuple[bytes, int]:
        """Run an opcode that is not frequent; returns the buffer, and where the next one begins."""
        stack = self._stack
        if op in _LENGTHS:  # strings and bytes with a length of four or eight bytes
            return self._read_long(*_LENGTHS[op], buffer, at)
        if op == 0x43:  # C SHORT_BINBYTES
            size = buffer[at]
            stack.append(_bytes(buffer[at + 1 : at + 1 + size], size))
            return buffer, at + 1 + size
        if op == 0x47:  # G BINFLOAT
            stack.append(struct.unpack_from(">d", buffer, at)[0])
            return buffer, at + 8
        if op == 0x71:  # q BINPUT
            self._put(buffer[at], stack[-1])
            return buffer, at + 1
        if op == 0x72:  # r LONG_BINPUT
            self._put(_index(buffer, at)[0], stack[-1])
            return buffer, at + 4
        if op in _SKIPPED:
            return buffer, at + _SKIPPED[op]
        if op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif 0x85 <= op <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
            items = [stack.pop() for _ in range(op - 0x84)][::-1]
            stack.append(self._tuple(items))
        elif op == 0x74:  # t TUPLE
            items = stack
            self._pop_mark().append(self._tuple(items))
        else:
            _refuse(op)
        return buffer, at

    def _read_long(self, width: int, is_word: bool, buffer: bytes, at: int) -> tuple[bytes, int]:
        size = int.from_bytes(buffer[at : at + width], "little")
        at += width
        if size > LONGEST:
            raise BadInput(f"the file holds a value of {size:,} bytes: no memory snapshot")
        self._text += size
        if self._text > MOST_TEXT:
            raise BadInput("the file holds too many long words: no memory snapshot")
        if len(buffer) - at < size:
            buffer, at = buffer[at:] + self._file.read(size), 0
        raw = buffer[at : at + size]
        self._stack.append(_word(raw, size) if is_word else _bytes(raw, size))
        return buffer, at + size

    # -- parts ------------------------------------------------------------------------------------

    def _pop_mark(self) -> list[Any]:
        self._stack = self._marks.pop()
        return self._stack

    def _set(self, target: Any, items: list[Any]) -> None:
        _check(target, Map)
        keys, values = items[::2], items[1::2]
        if not _KEYS.issuperset(map(type, keys)):
            raise BadInput("the file has a key that is no word or number: no memory snapshot")
        target.update(zip(keys, values, strict=True))
        self._retained += len(values)
        if not _CONTAINERS.isdisjoint(map(type, values)):
            self._count_in(target, values)
        elif getattr(target, "within", False):
            _refuse_change()

    def _extend(self, target: Any, items: list[Any]) -> None:
        _check(target, List)
        before = len(target)
        kinds = set(map(type, items))
        if Map in kinds:
            for item in items:
                taken = item
                if type(item) is Map:
                    taken = self._take(item, self._swap)
                    if taken is not item:
                        self._swap(item, taken)
                if taken is not CONSUMED:
                    target.append(taken)
            kinds = set(map(type, target[before:]))
        else:
            target.extend(items)
        self._retained += len(target) - before
        if not _CONTAINERS.isdisjoint(kinds):
            self._count_in(target, target[before:])
        elif getattr(target, "within", False):
            _refuse_change()

    def _count_in(self, target: List | Map, new: Sequence[Any]) -> None:
        """Update the depth and size of a list or dict after values were put into it."""
        deepest, unfolded = self._measure(new)
        target.depth = max(getattr(target, "depth", 1), deepest + 1)
        target.inner = getattr(target, "inner", 0) + unfolded - len(new)
        _check_measures(target.depth, target.inner)
        if getattr(target, "within", False):  # perhaps part of itself, by what was just added
            _refuse_change()

    def _measure(self, parts: Sequence[Any]) -> tuple[int, int]:
        """The depth of the deepest of these, and the number of values in all of them, expanded."""
        deepest = unfolded = 0
        for part in parts:
            unfolded += 1
            if type(part) is List or type(part) is Map:
                part.within = True
                deepest = max(deepest, getattr(part, "depth", 1))
                unfolded += len(part) + getattr(part, "inner", 0)
            elif type(part) is tuple:
                _, depth, size = self._tuples.get(id(part), (part, 1, len(part)))
                deepest, unfolded = max(deepest, depth), unfolded + size
        return deepest, unfolded

    def _tuple(self, items: list[Any]) -> tuple[Any, ...]:
        made = tuple(items)
        if not _CONTAINERS.isdisjoint(map(type, made)):
            deepest, unfolded = self._measure(made)
            _check_measures(deepest + 1, unfolded)
            self._tuples[id(made)] = made, deepest + 1, unfolded
            self._retained += len(made)
        return made

    def _put(self, index: int, value: Any) -> None:
        if index > len(self._memo):
            raise BadInput("the file is no pickle that Python wrote: it skips references")
        if self._free:
            slot = self._free.pop()
            self._kept[slot] = value
        else:
            slot = len(self._kept)
            self._kept.append(value)
        if index == len(self._memo):
            self._memo.append(slot)
        else:
            self._memo[index] = slot
        if type(value) is Map or type(value) is List:
            value.at = index

    def _get(self, index: int) -> Any:
        slot = self._memo[index]
        if not slot:
            self._refuse_gone()
        return self._kept[slot]

    def _swap(self, old: Any, new: Any) -> None:
        """Redirect references to `old` to `new` from here on; if consumed, they become invalid."""
        self._retained -= len(old)
        at = getattr(old, "at", None)
        if at is None or not self._memo[at]:
            return
        slot = self._memo[at]
        if new is CONSUMED:
            self._memo[at] = 0
            self._kept[slot] = None
            self._free.append(slot)
        else:
            self._kept[slot] = new

    def _refuse_gone(self) -> None:
        raise BadInput("the file refers to one event twice: no memory snapshot of PyTorch's does")

    def _check_size(self) -> None:
        values = len(self._kept) - len(self._free) + self._retained + len(self._stack)
        if values + sum(map(len, self._marks)) > MOST_KEPT:
            raise BadInput(
                f"the file holds more than {MOST_KEPT:,} values that belong to no memory event;"
                " is it a memory snapshot?"
            )


_CONSTANTS: dict[int, Any] = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
#: PROTO and FRAME: the bytes of their arguments, which say nothing about values.
_SKIPPED = {0x80: 1, 0x95: 8}
#: BINUNICODE, BINUNICODE8, BINBYTES, BINBYTES8: width of the length, and whether it is a string.
_LENGTHS = {0x58: (4, True), 0x8D: (8, True), 0x42: (4, False), 0x8E: (8, False)}


def _check_measures(depth: int, unfolded: int) -> None:
    if depth > DEEPEST:
        _refuse_deep()
    if unfolded > MOST_KEPT:
        raise BadInput(
            f"the file holds a value that unfolds into more than {MOST_KEPT:,}: no memory snapshot"
        )


def _refuse_change() -> None:
    raise BadInput("the file changes a value that is part of another: no memory snapshot")


def _refuse_deep() -> None:
    raise BadInput(f"the file is nested more than {DEEPEST} levels deep: no memory snapshot")


def _check(target: Any, kind: type) -> None:
    if type(target) is not kind:
        raise BadInput("the file is no pickle of plain values: its parts do not fit")


def _number(raw: bytes, size: int) -> int:
    return int.from_bytes(_bytes(raw, size), "little", signed=True)


def _word(raw: bytes, size: int) -> str:
    return _bytes(raw, size).decode("utf-8", "replace")


def _bytes(raw: bytes, size: int) -> bytes:
    if len(raw) != size:
        raise IndexError
    return raw


def _refuse(op: int) -> None:
    name = _REFUSED.get(bytes([op]))
    if name is not None:
        raise BadInput(
            f"the file wants to run code ({name}): refused, and nothing of it was run; a memory"
            " snapshot holds only plain values"
        )
    raise BadInput(f"the file is no pickle of plain values: it holds opcode {op:#04x}")
