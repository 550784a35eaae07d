"""Reads a pickle of plain values as a stream: nothing in it is ever run, and little of it is kept.

Only numbers, words, bytes, lists, dicts, tuples, booleans and None can be in such a file; anything
else is refused by name, before it means anything. There is no import and no call in here that a
file could reach.

Memory stays small because each dict that goes into a list is first offered to the caller, who may
take what it needs and let go of it. What is kept beside that: four bytes for each object a file may
refer to again, and at most `MOST_KEPT` values. A file that needs more is refused.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from oomph.errors import BadInput

CHUNK = 1 << 20
#: The longest word, and the most values, of a file that is worth reading.
LONGEST = 1 << 20
MOST_KEPT = 4_000_000
#: No opcode with its argument is longer, but for words.
_MARGIN = 300

_index = struct.Struct("<I").unpack_from

#: What a caller returns for a dict it has no more use for.
CONSUMED = object()


class List(list[Any]):
    """A list that knows where the file may refer to it."""

    __slots__ = ("at",)
    at: int


class Map(dict[Any, Any]):
    """A dict that knows where the file may refer to it."""

    __slots__ = ("at",)
    at: int


class Swap(Protocol):
    """From now on, the file's references to a list mean something else."""

    def __call__(self, old: List, new: Any) -> None: ...


#: Given each dict that goes into a list; returns what goes there in its place, or `CONSUMED`.
Take = Callable[[Map, Swap], Any]

#: Opcodes that would import, call or build something, as the format names them.
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
    """What the pickle holds, less what `take` took."""
    try:
        return _Reader(file, take).read()
    except (IndexError, struct.error):
        raise BadInput("the file is cut short, or is no pickle") from None
    except (AttributeError, TypeError, KeyError):
        raise BadInput("the file is no pickle of plain values: its parts do not fit") from None


class _Reader:
    """The stack machine that a pickle is a program for, with all that could do harm left out."""

    def __init__(self, file: BinaryIO, take: Take) -> None:
        self._file = file
        self._take = take
        #: For each object the file may refer to: where in `_kept` it is; 0 is gone.
        self._memo = array("I")
        self._kept: list[Any] = [None]
        self._free: list[int] = []
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._retained = 0

    def read(self) -> Any:
        """Run to the end; the value that is left is the answer."""
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
            # In the order of how often they come.
            if op == 0x68:  # h BINGET
                stack.append(self._get(buffer[at]))
                at += 1
            elif op == 0x6A:  # j LONG_BINGET
                slot = memo[_index(buffer, at)[0]]
                at += 4
                if not slot:
                    self._refuse_gone()
                stack.append(kept[slot])
                # A stack is a run of references: most of a snapshot is these.
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
            elif op == 0x71:  # q BINPUT
                self._put(buffer[at], stack[-1])
                at += 1
            elif op == 0x72:  # r LONG_BINPUT
                self._put(_index(buffer, at)[0], stack[-1])
                at += 4
            elif op in _LENGTHS:  # words and bytes whose length takes four or eight bytes
                width, is_word = _LENGTHS[op]
                size = int.from_bytes(buffer[at : at + width], "little")
                at += width
                if size > LONGEST:
                    raise BadInput(f"the file holds a value of {size:,} bytes: no memory snapshot")
                if len(buffer) - at < size:
                    buffer, at = buffer[at:] + file.read(size), 0
                    edge = len(buffer) - _MARGIN
                raw = buffer[at : at + size]
                stack.append(_word(raw, size) if is_word else _bytes(raw, size))
                at += size
            elif op == 0x43:  # C SHORT_BINBYTES
                size = buffer[at]
                stack.append(_bytes(buffer[at + 1 : at + 1 + size], size))
                at += 1 + size
            elif op == 0x47:  # G BINFLOAT
                stack.append(struct.unpack_from(">d", buffer, at)[0])
                at += 8
            elif op == 0x95:  # FRAME
                at += 8
            elif op in _CONSTANTS:
                stack.append(_CONSTANTS[op])
            elif op == 0x29:  # ) EMPTY_TUPLE
                stack.append(())
            elif 0x85 <= op <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                size = op - 0x84
                items = [stack.pop() for _ in range(size)][::-1]
                stack.append(tuple(items))
            elif op == 0x74:  # t TUPLE
                items, stack = stack, self._pop_mark()
                stack.append(tuple(items))
            elif op == 0x80:  # PROTO
                at += 1
            elif op == 0x2E:  # . STOP
                return stack.pop()
            else:
                _refuse(op)

    # -- parts ------------------------------------------------------------------------------------

    def _pop_mark(self) -> list[Any]:
        self._stack = self._marks.pop()
        return self._stack

    def _set(self, target: Any, items: list[Any]) -> None:
        _check(target, Map)
        target.update(zip(items[::2], items[1::2], strict=True))
        self._retained += len(items) // 2

    def _extend(self, target: Any, items: list[Any]) -> None:
        _check(target, List)
        if Map not in set(map(type, items)):
            target.extend(items)
            self._retained += len(items)
            return
        for item in items:
            if type(item) is not Map:
                target.append(item)
                self._retained += 1
                continue
            taken = self._take(item, self._swap)
            if taken is not item:
                self._swap(item, taken)
            if taken is not CONSUMED:
                target.append(taken)
                self._retained += 1

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
        """References to `old` mean `new` from here on, or nothing where it was consumed."""
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


_CONSTANTS: dict[int, Any] = {0x4E: None, 0x88: True, 0x89: False}
#: BINUNICODE, BINUNICODE8, BINBYTES, BINBYTES8: bytes of the length, and whether it is a word.
_LENGTHS = {0x58: (4, True), 0x8D: (8, True), 0x42: (4, False), 0x8E: (8, False)}


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
