"""Keeps track of rehearsing threads, and replaces functions only for them (rule 13).

A rehearsal changes the meaning of parts of Python and PyTorch, in a process that may have other
threads. So every replacement is made here: another thread that calls a replaced function gets the
original, and so does code that kept a reference from a rehearsal that is over. A second thread that
rehearses waits for the first.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from oomph.errors import CannotRehearse
from oomph.torch_compat import threads
from oomph.torch_compat.compiler import mark_constant


class Rehearsal:
    """One rehearsal with those nested in it; `stand_ins` holds its first replacements, by name."""

    def __init__(self) -> None:
        self.is_over = False
        #: Errors that killed threads of a rehearsed script, as text.
        self.died_of: list[str] = []
        self.stand_ins: dict[tuple[int, str], Callable[..., Any]] = {}


class _Part:
    """The part that a thread has in a rehearsal."""

    def __init__(self, rehearsal: Rehearsal, *, began: bool) -> None:
        self.rehearsal = rehearsal
        #: Whether this thread began it; a rehearsed script started the other participating threads.
        self.began = began


class _Here(threading.local):
    part: _Part | None = None


_here = _Here()
_lock = threading.RLock()

#: This thread's part is also stored with PyTorch: a deeply nested backward continues in a thread of
#: autograd's own, which is given PyTorch's state of this one.
_KEY = "oomph rehearsal"


def _part_here() -> _Part | None:
    part = _here.part
    if part is None and threads.is_kept(_KEY):
        part = threads.kept(_KEY)
    return part if part is not None and not part.rehearsal.is_over else None


def _set_part(part: _Part | None) -> None:
    _here.part = part
    threads.keep(_KEY, part)


@contextlib.contextmanager
def rehearsing() -> Iterator[Rehearsal]:
    """While active, this thread rehearses; others wait until it is done. May be nested."""
    part = _part_here()
    if part is not None:
        if not part.began:
            raise CannotRehearse(
                "a thread of a script that is rehearsed cannot rehearse: call oomph from the"
                " script's main thread"
            )
        yield part.rehearsal
        return
    with _lock:
        rehearsal = Rehearsal()
        _set_part(_Part(rehearsal, began=True))
        try:
            yield rehearsal
        finally:
            rehearsal.is_over = True
            _set_part(None)


@contextlib.contextmanager
def between_rehearsals() -> Iterator[None]:
    """While active, no other thread rehearses; for code that replaces the same functions."""
    with _lock:
        yield


def current_rehearsal() -> Rehearsal | None:
    """The rehearsal that this thread takes part in; None in all other threads."""
    part = _part_here()
    return None if part is None else part.rehearsal


def rehearses_here() -> bool:
    """Whether this thread takes part in a rehearsal."""
    return _part_here() is not None


# Another thread compiling beside a rehearsal evaluates this while tracing, not in compiled code.
mark_constant(rehearses_here)


def take_part(rehearsal: Rehearsal | None) -> None:
    """From now on this thread takes part in a rehearsal that another one began."""
    _set_part(None if rehearsal is None else _Part(rehearsal, began=False))


@contextlib.contextmanager
def replaced_here(owner: Any, name: str, stand_in: Callable[..., Any]) -> Iterator[None]:
    """While active, a function of a module or a class is `stand_in` for rehearsing threads.

    This thread is then one of them. If the owner has no such name, only they see one.
    """
    with rehearsing() as rehearsal:
        by_thread = _by_thread(rehearsal, owner, name, stand_in)
        with mock.patch.object(owner, name, by_thread, create=True):
            yield


def _by_thread(
    rehearsal: Rehearsal, owner: Any, name: str, stand_in: Callable[..., Any]
) -> Callable[..., Any]:
    key, original = (id(owner), name), getattr(owner, name, None) or _missing(owner, name)
    rehearsal.stand_ins.setdefault(key, stand_in)

    def by_thread(*args: Any, **kwargs: Any) -> Any:
        here = current_rehearsal() if rehearses_here() else None
        if here is None:
            return original(*args, **kwargs)
        # Code that kept this from an earlier rehearsal gets a later one's replacement.
        call = stand_in if here is rehearsal else here.stand_ins.get(key, original)
        return call(*args, **kwargs)

    return functools.update_wrapper(by_thread, original, updated=())


def _missing(owner: Any, name: str) -> Callable[..., Any]:
    def missing(*_: Any, **__: Any) -> Any:
        raise AttributeError(f"{owner!r} has no attribute {name!r}")

    return missing


@contextlib.contextmanager
def shown_here(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """While active, rehearsing threads read `value` from a module, and others its own.

    For names that are not functions. The module's own code still reads the module's value.
    """
    plain = type(module)

    def read(this: ModuleType) -> Any:
        return value if rehearses_here() else vars(this)[name]

    def write(this: ModuleType, new: Any) -> None:
        vars(this)[name] = new

    module.__class__ = type(plain.__name__, (plain,), {name: property(read, write)})
    try:
        yield
    finally:
        module.__class__ = plain


class StandInClass(type):
    """Metaclass of a class that stands in for `real` in a rehearsal.

    Other threads construct real objects with it, and those are instances of it as well.
    """

    real: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) if rehearses_here() else cls.real(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, cls.real)


class _WhereRehearsed(type):
    """Metaclass of a class that has all warnings in rehearsing threads, and none elsewhere."""

    def __subclasscheck__(cls, category: type) -> bool:
        return rehearses_here()


class _RehearsedWarning(Warning, metaclass=_WhereRehearsed):
    """Any warning given in a rehearsal."""


_IGNORE_REHEARSED = ("ignore", None, _RehearsedWarning, None, 0)


@contextlib.contextmanager
def no_warnings_here() -> Iterator[None]:
    """While active, rehearsing threads give no warnings; others do.

    `warnings.catch_warnings` would silence all threads, and at its end undo filters that another
    thread added meanwhile. The change of filters is not announced, either: PyTorch and Python would
    then forget which warnings were already given, and repeat them.
    """
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    is_new = _IGNORE_REHEARSED not in filters
    if is_new:
        filters.insert(0, _IGNORE_REHEARSED)
    try:
        yield
    finally:
        now: list[Any] = warnings.filters  # type: ignore[assignment]
        for known in (filters, now) if is_new else ():
            with contextlib.suppress(ValueError):  # another thread restored its own filters
                known.remove(_IGNORE_REHEARSED)
