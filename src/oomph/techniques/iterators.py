"""Iterators that something of a job holds: how far they got, and others that go on from there.

One of Python's own can be copied together with those that it is made of. A generator cannot, nor
can what a data loader gives out; where those go on, nobody can take it back.
"""

from __future__ import annotations

import io
import itertools
import operator
import types
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from oomph.errors import CannotRehearse
from oomph.process.rehearsal_threads import rehearses_here

_PYTHONS = ("builtins", "itertools", "collections")
#: A copy of these would take from what the original takes from.
_NOT_COPIED: tuple[type, ...] = (
    types.GeneratorType,
    type(iter(int, 1)),
    type(itertools.tee(())[0]),
    itertools.groupby,
)


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator that no attribute tells the place of; a file is none."""
    kind = type(value)
    if not hasattr(kind, "__next__") or isinstance(value, (io.IOBase, NotCopied)):
        return False
    return not hasattr(value, "__dict__") or kind.__module__.partition(".")[0] == "torch"


def place_of(iterator: Any) -> Any:
    """What is another once the iterator went on; always the same where nobody can tell."""
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    if hasattr(iterator, "__length_hint__"):
        return operator.length_hint(iterator)
    try:
        return _described(_taken_apart(iterator))
    except TypeError:
        return None


def _described(value: Any) -> Any:
    if hasattr(type(value), "__next__"):
        return place_of(value)
    if isinstance(value, tuple):
        return tuple(map(_described, value))
    if isinstance(value, (int, float, str)):
        return value
    return len(value) if isinstance(value, (list, dict, set)) else id(value)


def copy_of(iterator: Any) -> Any:
    """An iterator that gives the same entries from here on; None where there can be none."""
    try:
        make, args, *state = _taken_apart(iterator)
        made = make(*_copied(args))
        if state and state[0] is not None:
            made.__setstate__(_copied(state[0]))
    except TypeError:
        return None
    return made


def _taken_apart(iterator: Any) -> tuple[Any, ...]:
    """What makes it, of what, and where it then is."""
    if type(iterator).__module__ not in _PYTHONS or isinstance(iterator, _NOT_COPIED):
        raise TypeError("it cannot be copied")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 copies fewer
        parts: tuple[Any, ...] = iterator.__reduce__()
    return parts


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    if hasattr(type(value), "__next__"):
        if (made := copy_of(value)) is None:
            raise TypeError("what it is made of cannot be copied")
        return made
    # `cycle` writes down what it has seen.
    return value.copy() if isinstance(value, list) else value


class NotCopied:
    """Stands for an iterator that cannot be copied; a rehearsal that asks for an entry is refused.

    Other threads have the iterator itself.
    """

    def __init__(self, place: str, iterator: Any) -> None:
        self._place, self._iterator = place, iterator

    def _refuse(self) -> NoReturn:
        kind = type(self._iterator).__name__
        raise CannotRehearse(
            f"the step takes the next entry of {self._place}, a {kind}, which cannot be copied, and"
            " to rehearse the step would use it up: put what it gives into the batch; an iterator"
            " of Python's own over a list, as itertools.cycle, can be copied"
        )

    def __iter__(self) -> Iterator[Any]:
        return self if rehearses_here() else iter(self._iterator)

    def __next__(self) -> Any:
        return self._refuse() if rehearses_here() else next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_iterator" not in vars(self):
            raise AttributeError(name)
        return self._refuse() if rehearses_here() else getattr(self._iterator, name)

    def __deepcopy__(self, _: Any) -> NotCopied:
        return self
