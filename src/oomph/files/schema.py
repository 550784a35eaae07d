"""Converts plain values from JSON or TOML to dataclasses, with validation.

A dataclass is its own schema: the types of its fields say what a file must contain, and `Annotated`
says which numbers are valid. The first value that does not fit raises a `Mismatch` whose message
names the field and what belongs there: `predicted.peak.device cannot be 'many': a whole number
belongs there`. Only types that JSON lacks are converted: lists to tuples, strings to enum members,
integers to floats, where the field needs them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from oomph.files.plain_json import join_path
from oomph.quoting import brief


@dataclasses.dataclass(frozen=True, kw_only=True)
class Within:
    """The numbers that are valid in a field."""

    least: float = -math.inf
    most: float = math.inf
    words: str


#: Bytes, events, counts of anything.
Count = Annotated[int, Within(least=0, most=1 << 60, words="a whole number that is not negative")]
#: The difference of two counts.
Difference = Annotated[int, Within(least=-(1 << 60), most=1 << 60, words="a whole number")]
PositiveCount = Annotated[int, Within(least=1, most=1 << 60, words="a positive whole number")]
#: A time, or a rate.
Positive = Annotated[float, Within(least=1e-30, most=1e30, words="a positive number")]
#: A time that may be zero.
Seconds = Annotated[float, Within(least=0, most=1e30, words="a number that is not negative")]
#: Any number that is safe to calculate with.
Number = Annotated[float, Within(least=-1e30, most=1e30, words="a number")]


class Mismatch(ValueError):
    """What does not fit, and where; the message is composed once the whole place is known."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.place: list[str | int] = []
        self._problem = problem

    def __str__(self) -> str:
        if not self.place:
            return f"it {self._problem}"
        return f"{join_path(self.place)} {self._problem}"


_Data = TypeVar("_Data")
_Read = Callable[[Any], Any]


def read_as(kind: type[_Data], value: Any, *, open_ended: bool = False) -> _Data:
    """Convert the value to a `kind`, or raise a `Mismatch`.

    With `open_ended`, objects may have more than the fields of their dataclass, as in files of a
    later version; otherwise that is a mismatch, too.
    """
    schema: Any = kind
    read: _Data = _reader(schema, open_ended)(value)
    return read


@functools.cache
def _reader(kind: Any, open_ended: bool) -> _Read:
    """A function that reads values of this type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if origin is Annotated:
        return _within(_reader(arguments[0], open_ended), arguments[1])
    if origin is Literal:
        return _one_of(arguments)
    if origin in (Union, types.UnionType):
        (inner,) = (one for one in arguments if one is not type(None))
        return _or_nothing(_reader(inner, open_ended))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _row([_reader(one, open_ended) for one in arguments])
    if origin in (tuple, list, Sequence):
        return _list(_reader(arguments[0], open_ended), list if origin is list else tuple)
    if origin in (dict, Mapping):
        assert arguments[0] is str
        return _table(_reader(arguments[1], open_ended))
    if dataclasses.is_dataclass(kind):
        return _object(kind, open_ended)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind)
    return _PLAIN[kind]


def _wrong(value: Any, wanted: str) -> Mismatch:
    return Mismatch(f"cannot be {brief(value)}: {wanted} belongs there")


def _exactly(kind: type, words: str) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _wrong(value, words)
        return value

    return read


def _float(value: Any) -> float:
    if type(value) not in (int, float):
        raise _wrong(value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(value, "a finite number")
    return number


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise _wrong(value, "text")
    return value


_PLAIN: Mapping[Any, _Read] = {
    int: _exactly(int, "a whole number"),
    float: _float,
    bool: _exactly(bool, "true or false"),
    str: _text,
    dict: _exactly(dict, "an object"),
}


def _within(inner: _Read, limits: Within) -> _Read:
    def read(value: Any) -> Any:
        try:
            number = inner(value)
        except Mismatch:
            raise _wrong(value, limits.words) from None
        if not limits.least <= number <= limits.most:
            raise _wrong(value, limits.words)
        return number

    return read


def _one_of(words: tuple[Any, ...]) -> _Read:
    def read(value: Any) -> Any:
        if isinstance(value, str) and value in words:
            return value
        raise _wrong(value, _either(words))

    return read


def _member(kind: type[Enum]) -> _Read:
    members = {one.value: one for one in kind}

    def read(value: Any) -> Any:
        if isinstance(value, str) and value in members:
            return members[value]
        raise _wrong(value, _either(tuple(members)))

    return read


def _either(words: tuple[Any, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else str(words[0])


def _or_nothing(inner: _Read) -> _Read:
    return lambda value: None if value is None else inner(value)


def _list(inner: _Read, kind: type) -> _Read:
    def read(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _wrong(value, "a list")
        found = [_at(place, inner, one) for place, one in enumerate(value)]
        return found if kind is list else tuple(found)

    return read


def _row(parts: list[_Read]) -> _Read:
    def read(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            raise _wrong(value, f"a list of {len(parts)}")
        pairs = zip(parts, value, strict=True)
        return tuple(_at(place, part, one) for place, (part, one) in enumerate(pairs))

    return read


def _table(inner: _Read) -> _Read:
    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(value, "an object")
        for key in value:
            _text(key)
        return {key: _at(key, inner, one) for key, one in value.items()}

    return read


def _object(kind: Any, open_ended: bool) -> _Read:
    hints = get_type_hints(kind, include_extras=True)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    needed = [field.name for field in fields if _is_needed(field)]
    readers: dict[str, _Read] = {}

    def read(value: Any) -> Any:
        if isinstance(value, kind):
            return value  # already converted
        if not isinstance(value, Mapping):
            raise _wrong(value, "an object")
        if not readers:  # created late: a class may contain itself
            readers.update({one.name: _reader(hints[one.name], open_ended) for one in fields})
        for name in needed:
            if name not in value:
                raise Mismatch(f"lacks {name!r}")
        found = {}
        for name, one in value.items():
            if name in readers:
                found[name] = _at(name, readers[name], one)
            elif not open_ended:
                raise Mismatch(f"has {brief(name)}, which is unknown")
        return kind(**found)

    return read


def _at(place: str | int, read: _Read, value: Any) -> Any:
    try:
        return read(value)
    except Mismatch as problem:
        problem.place.insert(0, place)
        raise


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
