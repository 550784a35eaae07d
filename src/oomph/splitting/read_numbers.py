"""Numbers that Python read from tensors, which report whether they are compared with others.

A number that the model computes differs between parts of a batch. If Python computes with it, the
ops of two forwards show that. If Python compares it, as in `if loss.item() > 10`, they may not: the
numbers of a rehearsal lie on one side, those of a training on either.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

Compared = Callable[[], None]

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_ALONE = ("neg", "pos", "abs")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def watched(number: float, compared: Compared) -> Any:
    """The same number; calls `compared` when Python compares it, or a number computed from it."""
    if type(number) not in _KINDS:
        return number
    watching = _KINDS[type(number)](number)
    watching.compared = compared
    return watching


class _Watching:
    """The common part of both kinds of numbers."""

    compared: Compared

    def __bool__(self) -> bool:
        self.compared()
        return bool(_plain(self))


class _Float(_Watching, float):
    __hash__ = float.__hash__


class _Int(_Watching, int):
    __hash__ = int.__hash__


_KINDS: dict[type, Any] = {float: _Float, int: _Int}


def _plain(number: Any) -> Any:
    if isinstance(number, _Float):
        return float.__add__(number, 0.0)
    return int.__add__(number, 0) if isinstance(number, _Int) else number


def _arithmetic(name: str, *, reflected: bool) -> Callable[[Any, Any], Any]:
    compute = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        pair = (other, self) if reflected else (self, other)
        return watched(compute(*map(_plain, pair)), self.compared)

    return method


def _alone(name: str) -> Callable[[Any], Any]:
    compute = getattr(operator, name)
    return lambda self: watched(compute(_plain(self)), self.compared)


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        answer = compare(_plain(self), _plain(other))
        if other is not self and isinstance(answer, bool):  # compared with itself: a check for NaN
            self.compared()
        return answer

    return method


for _name in _ARITHMETIC:
    setattr(_Watching, f"__{_name}__", _arithmetic(_name, reflected=False))
    setattr(_Watching, f"__r{_name}__", _arithmetic(_name, reflected=True))
for _name in _ALONE:
    setattr(_Watching, f"__{_name}__", _alone(_name))
for _name in _COMPARISONS:
    setattr(_Watching, f"__{_name}__", _comparison(_name))
