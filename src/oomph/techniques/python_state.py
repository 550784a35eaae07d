"""What Python objects hold at one moment: compared later, and put back.

Modules keep more than tensors that PyTorch knows of: counters, lists that grow, losses that
somebody reads later, generators. `PythonState` looks at everything that can be reached from some
objects: attributes, containers, what hooks and functions close over. It keeps who holds what, and
copies no tensor; those are found by the way.

Of the classes of modules, and of objects that are called, it is what they hold themselves, and what
their functions see. Where a forward calls other functions, classes and objects of the user's own
program by a global name, as a helper that keeps tables, or a meter, those are looked at as well.
Not looked at are other classes, what installed packages share among their functions, the callbacks
of their own that their objects hold, objects of PyTorch and of this package, and containers too
large for a forward to go through each time.
"""

from __future__ import annotations

import array
import functools
import random
import sys
import sysconfig
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oomph.techniques.iterators import is_iterator, place_of
from oomph.techniques.tensor_writes import state_of
from oomph.torch_compat.dispatch import disable_current_modes
from oomph.torch_compat.modules import BUFFERS, CHILDREN, HOOK_REGISTERS, PARAMETERS

#: Entries of a container that is looked at; data sets and vocabularies have more.
MOST_ENTRIES = 4096

#: Bytes of an array that is looked at, with all its numbers; data sets have more.
MOST_BYTES = 1 << 20

#: Whose objects and functions are left alone: they belong to no user.
_NOT_LOOKED_INTO = ("torch", "oomph", "numpy", "logging", "threading", "weakref", "builtins")
_PLAIN = (int, float, complex, str, bytes, bool, type(None))

#: Gives a value, or what is to stand in its place.
Replace = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A place that holds something else than it did."""

    place: str
    """As `blocks.0.calls`, or `blocks.0.losses[]` for a container's entries."""
    holder: Any
    """The module, object or container."""
    name: str
    """Of the attribute; empty for an entry of a container."""
    before: Any
    now: Any

    @property
    def is_the_same(self) -> bool:
        """Whether it was only made anew: an equal number, or a word."""
        one, other = self.before, self.now
        return type(one) is type(other) and isinstance(one, _PLAIN) and one == other


class _Missing:
    """What an attribute held that was not there."""


MISSING = _Missing()


class PythonState:
    """What is held by everything that can be reached from `roots`.

    Where a root is a module, that is what is `inside` of its children, too.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], *, inside: bool = True) -> None:
        self._roots = tuple(roots)
        self._inside = inside
        self._holders: list[_Holder] = []
        self._streams: list[_Stream] = []
        #: Tensors that are held, each once, and the place where it was found first.
        self.tensors: list[tuple[str, Tensor]] = []
        #: Functions that remember what they returned.
        self.caches: list[Any] = []
        self._seen: set[int] = set()
        self._held: set[tuple[type, int]] = set()
        self._tensors_seen: set[int] = set()
        self._globals_seen: set[tuple[int, str]] = set()
        #: How many functions the one that is looked at is inside of: what they see is not copied
        #: with a module.
        self._functions = 0
        #: How many objects of installed packages lie between the roots and what is looked at.
        self._foreign = 0
        #: Streams that only such objects hold, as a trainer holds those of its loops.
        self._far_streams: dict[int, _Stream] = {}
        #: The user's own classes that were looked at, and the names that functions call things by.
        self._classes: list[type] = []
        self._called = {"forward", "__call__"}
        self._followed: set[types.FunctionType] = set()
        for place, root in self._roots:
            self._visit(place, root, is_own=inside)
        self._follow_methods()

    @property
    def is_current(self) -> bool:
        """Whether everything is still held as it was."""
        return all(holder.is_current() for holder in self._holders) and all(
            stream.is_current() for stream in self._streams
        )

    def changes(self) -> Iterator[Change]:
        """The places that hold something else by now."""
        for holder in self._holders:
            if not holder.is_current():
                yield from holder.changes()
        for stream in self._streams:
            if not stream.is_current():
                yield Change(
                    place=stream.place,
                    holder=stream.stream,
                    name="",
                    before=stream.state,
                    now=MISSING,
                )

    @property
    def generators(self) -> list[tuple[str, torch.Generator]]:
        """PyTorch's generators of random numbers that are held, and where."""
        found = ((stream.place, stream.stream) for stream in self._streams)
        return [(place, one) for place, one in found if isinstance(one, torch.Generator)]

    def lost(self) -> list[str]:
        """Where iterators are held that went on since, which cannot be put back."""
        return [
            stream.place
            for stream in self._streams
            if is_iterator(stream.stream) and not stream.is_current()
        ]

    def iterators(self, *, only_shared: bool = False) -> list[tuple[str, Any]]:
        """Iterators that are held, and where; those alone that a copy of the roots would share.

        Those inside of an installed package's objects, as of a trainer, are its own business.
        """
        return [
            (stream.place, stream.stream)
            for stream in self._streams
            if stream.is_near
            and is_iterator(stream.stream)
            and (stream.is_shared or not only_shared)
        ]

    def from_roots(self) -> PythonState:
        """What can be reached by now."""
        return PythonState(self._roots, inside=self._inside)

    def again(self) -> PythonState:
        """What is held now, by all that was looked at and all that can be reached by now."""
        now = self.from_roots()
        for holder in self._holders:
            if isinstance(holder, _Global):
                now._hold_global(holder.place, holder.object, holder.name)
            elif (type(holder), id(holder.object)) not in now._held:
                now._hold(type(holder)(holder.place, holder.object))
        for stream in self._streams:
            now._visit(stream.place, stream.stream, is_own=False)
        return now

    def put_back(self, replace: Replace | None = None) -> None:
        """Everything is held as it was; of tensors what `replace` gives for each."""
        for holder in self._holders:
            if replace is not None or not holder.is_current():
                holder.put_back(replace)
        for stream in self._streams:
            stream.put_back()

    def put_back_shared(self) -> None:
        """What a copy of the roots would share with them is held as it was."""
        for holder in self._holders:
            if holder.is_shared and not holder.is_current():
                holder.put_back(None)
        for stream in self._streams:
            if stream.is_shared:
                stream.put_back()

    def hold_instead(self, stand_ins: dict[int, Any], *, only_shared: bool = False) -> None:
        """In the place of what has these ids the stand-ins are held, until all is put back."""

        def replace(value: Any) -> Any:
            return stand_ins.get(id(value), value)

        for holder in self._holders:
            if (holder.is_shared or not only_shared) and holder.held_any(replace):
                holder.put_back(replace)

    # -- looking ----------------------------------------------------------------------------------

    def _visit(self, place: str, value: Any, *, is_own: bool) -> None:
        """Look at a value; `is_own` says of a module that its children belong to the roots."""
        kind = type(value)
        if kind in _IGNORED:
            return
        if isinstance(value, Tensor):
            if id(value) not in self._tensors_seen:
                self._tensors_seen.add(id(value))
                self.tensors.append((place, value))
            return
        if id(value) in self._seen:
            if not self._foreign and (known := self._far_streams.pop(id(value), None)) is not None:
                known.is_near = True
            return
        if kind is tuple or isinstance(value, tuple):
            for at, entry in enumerate(value[:MOST_ENTRIES]):
                self._visit(f"{place}[{at}]", entry, is_own=False)
            return
        if isinstance(value, _NOT_PYTHONS):
            return
        if isinstance(value, nn.Module):
            self._visit_module(place, value, is_own=is_own)
        elif (stream := _stream_of(place, value)) is not None:
            self._keep_stream(stream)
        elif isinstance(value, _HOLDERS):
            self._visit_holder(place, value)
        elif not self._visit_callable(place, value) and not _belongs_to_others(kind):
            self._visit_object(place, value)

    def _keep_stream(self, stream: _Stream) -> None:
        self._seen.add(id(stream.stream))
        stream.is_shared = self._functions > 0
        stream.is_near = not self._foreign
        if not stream.is_near:
            self._far_streams[id(stream.stream)] = stream
        self._streams.append(stream)

    def _visit_holder(self, place: str, value: Any) -> None:
        if isinstance(value, _ARRAYS):
            if _is_looked_at(value):
                self._hold(_Array(place, value))
            return
        if isinstance(value, ContextVar):
            self._hold(_Variable(place, value))
            self._visit(place, value.get(None), is_own=False)
            return
        if len(value) <= MOST_ENTRIES:
            self._hold(_Container(place, value))
            for entry in list(value.values() if isinstance(value, dict) else value):
                self._visit(f"{place}[]", entry, is_own=False)
        if hasattr(value, "__dict__") and not _belongs_to_others(type(value)):
            self._hold(_Attributes(place, value))

    def _visit_callable(self, place: str, value: Any) -> bool:
        """Look at a function or method, and at what it is bound to; False if it is neither."""
        if isinstance(value, _OF_PYTHON) and self._foreign and not _is_users_own(value):
            pass  # a callback of a package's, as a signal handler that a trainer is to put back
        elif isinstance(value, functools._lru_cache_wrapper):
            self._seen.add(id(value))
            self.caches.append(value)
        elif isinstance(value, types.FunctionType):
            self._visit_function(place, value)
        elif isinstance(value, types.MethodType):
            self._visit(place, value.__self__, is_own=False)
            self._visit(place, value.__func__, is_own=False)
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            self._visit(place, value.__self__, is_own=False)
        elif isinstance(value, functools.partial):
            for inside in (value.func, value.args, value.keywords):
                self._visit(place, inside, is_own=False)
        else:
            return False
        return True

    def _visit_module(self, place: str, module: nn.Module, *, is_own: bool) -> None:
        self._hold(_Attributes(place, module))
        self._visit_class(type(module))
        dot = f"{place}." if place else ""
        for name, value in list(vars(module).items()):
            if type(value) in _IGNORED or (name in HOOK_REGISTERS and not value):
                continue
            if name == CHILDREN:
                if is_own:
                    self._hold(_Container(place, value))
                    for child, inside in list(value.items()):
                        self._visit(f"{dot}{child}", inside, is_own=True)
            elif name in (PARAMETERS, BUFFERS):
                if id(value) not in self._seen:
                    self._hold(_Container(place, value, names=True))
                for own, tensor in list(value.items()):
                    self._visit(f"{dot}{own}", tensor, is_own=False)
            else:
                self._visit(f"{dot}{name}", value, is_own=False)

    def _visit_class(self, kind: type) -> None:
        """What a user's class holds for all its objects, and what its functions see."""
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        self._functions += 1
        for one in kind.__mro__:
            if one is object or _belongs_to_others(one):
                continue
            self._hold(_OfClass(one.__qualname__, one))
            for name, value in _data_of(one).items():
                if not isinstance(value, _PLAIN):
                    self._visit(f"{one.__qualname__}.{name}", value, is_own=False)
        for _, function in _own_functions(kind):
            if id(function) not in self._seen:
                self._visit_function(function.__qualname__, function, is_method=True)
        if _is_users_own(kind):
            self._classes.append(kind)
        self._functions -= 1

    def _visit_function(
        self, place: str, function: types.FunctionType, *, is_method: bool = False
    ) -> None:
        self._seen.add(id(function))
        if not _belongs_to_others(function):
            self._functions += 1
            self._visit_inside(place, function)
            if not is_method:
                self._follow(function)
            self._functions -= 1

    def _visit_inside(self, place: str, function: types.FunctionType) -> None:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if id(cell) in self._seen:
                continue
            self._hold(_Cell(f"{place}.{name}", cell))
            value = _contents(cell)
            if value is not MISSING:
                self._visit(f"{place}.{name}", value, is_own=False)
        self._visit_globals(function)
        if function.__defaults__:
            self._hold(_Defaults(place, function))
        for value in (
            *(function.__defaults__ or ()),
            function.__kwdefaults__,
            *vars(function).values(),
        ):
            self._visit(place, value, is_own=False)

    def _visit_globals(self, function: types.FunctionType) -> None:
        """Global variables that a function names itself: numbers and plain containers."""
        for name in _names_in(function.__code__):
            self._visit_global(function.__module__, function.__globals__, name)

    def _visit_global(self, home: str, variables: dict[str, Any], name: str) -> None:
        value = variables.get(name, MISSING)
        if type(value) in (int, float, bool, str, type(None)):
            self._hold_global(f"{home}.{name}", variables, name)
        elif is_iterator(value) or isinstance(value, Tensor):
            self._hold_global(f"{home}.{name}", variables, name)
            self._functions += 1
            self._visit(f"{home}.{name}", value, is_own=False)
            self._functions -= 1
        elif isinstance(value, functools._lru_cache_wrapper):
            self._visit(f"{home}.{name}", value, is_own=False)
        elif type(value) in _CONTAINERS or isinstance(value, (*_ARRAYS, ContextVar)):
            self._functions += 1
            self._visit(f"{home}.{name}", value, is_own=False)
            self._functions -= 1

    def _follow_methods(self) -> None:
        """Follow those functions of classes that a forward may call: by their names."""
        self._functions += 1
        while due := [
            function
            for kind in self._classes
            for name, function in _own_functions(kind)
            if name in self._called and function not in self._followed
        ]:
            for function in due:
                self._follow(function)
        self._functions -= 1

    def _follow(self, function: types.FunctionType) -> None:
        """Look at what one of the user's own functions calls by global names."""
        self._followed.add(function)
        if not _is_users_own(function):
            return
        names = _names_in(function.__code__)
        self._called.update(names)
        for name in names:
            value = function.__globals__.get(name, MISSING)
            if isinstance(value, types.ModuleType) and _is_users_own(value):
                for inside in names:
                    self._visit_global(value.__name__, vars(value), inside)
                    self._follow_value(f"{value.__name__}.{inside}", vars(value).get(inside))
            else:
                self._follow_value(f"{function.__module__}.{name}", value)

    def _follow_value(self, place: str, value: Any) -> None:
        """Look at a function, class or object of the user's own that is a global variable."""
        if isinstance(value, types.FunctionType | functools.partial):
            self._visit(place, value, is_own=False)
        elif isinstance(value, types.MethodType):
            self._follow_value(place, value.__self__)
        elif isinstance(value, type):
            # Modules made by a forward are new each time.
            if _is_users_own(value) and not issubclass(value, nn.Module):
                self._visit_class(value)
        elif _is_users_own(type(value)) and not isinstance(value, (nn.Module, types.ModuleType)):
            self._visit(place, value, is_own=False)

    def _visit_object(self, place: str, value: Any) -> None:
        kind: type = type(value)
        slots = _slots_of(kind)
        if not hasattr(value, "__dict__") and not slots:
            return
        held = dict(getattr(value, "__dict__", {}))
        if hasattr(value, "__dict__"):
            self._hold(_Attributes(place, value))
        if slots:
            self._hold(_Slots(place, value))
            held.update(_in_slots(value, slots))
        self._visit_class(kind)
        is_foreign = not _is_users_own(kind)
        self._foreign += is_foreign
        for name, inside in held.items():
            self._visit(f"{place}.{name}", inside, is_own=False)
        self._foreign -= is_foreign

    def _hold_global(self, place: str, variables: dict[str, Any], name: str) -> None:
        if (id(variables), name) not in self._globals_seen:
            self._globals_seen.add((id(variables), name))
            self._holders.append(_Global(place, variables, name))

    def _hold(self, holder: _Holder) -> None:
        holder.is_shared = self._functions > 0
        self._seen.add(id(holder.object))
        self._held.add((type(holder), id(holder.object)))
        self._holders.append(holder)


#: What holds nothing that is Python's, or is looked at only where it is called.
_NOT_PYTHONS = (torch.jit.ScriptModule, type, types.ModuleType)
_OF_PYTHON = (types.FunctionType, types.MethodType)
_CONTAINERS = (dict, list, set, deque, Counter, defaultdict)
#: Numbers that can be written in place.
_ARRAYS = (np.ndarray, array.array, bytearray)
#: Containers, and what else holds values by itself.
_HOLDERS = (dict, list, set, deque, *_ARRAYS, ContextVar)
_IGNORED = frozenset({*_PLAIN, torch.dtype, torch.device, torch.Size, torch.layout, range, slice})


@functools.cache
def _own_functions(kind: type) -> tuple[tuple[str, types.FunctionType], ...]:
    """The functions of a class and of those it is made of, by name, but for PyTorch's."""
    return tuple(
        (name, unwrapped)
        for one in kind.__mro__
        if not _belongs_to_others(one)
        for name, value in vars(one).items()
        for function in _functions_of(value)
        for unwrapped in _unwrapped(function)
    )


def _unwrapped(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """What a function wraps, down to the last one written in Python, and the user's wrappers."""
    while isinstance(inside := getattr(function, "__wrapped__", None), types.FunctionType):
        # A wrapper goes by the module of what it wraps.
        if _is_from_program(str(function.__globals__.get("__name__"))):
            yield function
        function = inside
    yield function


def _functions_of(value: Any) -> tuple[types.FunctionType, ...]:
    """What is called for an attribute of a class."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    found = (value.fget, value.fset) if isinstance(value, property) else (value,)
    return tuple(one for one in found if isinstance(one, types.FunctionType))


@functools.cache
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function uses, and those that functions and loops inside of it do."""
    inside = (one for one in code.co_consts if isinstance(one, types.CodeType))
    names = (name for one in inside for name in _names_in(one))
    return tuple(dict.fromkeys((*code.co_names, *names)))


#: What a class may hold that changes as it is used.
_DATA = (*_PLAIN, Tensor, dict, list, set, deque, *_ARRAYS)


def _data_of(kind: type) -> dict[str, Any]:
    """The numbers, tensors, containers and iterators that a class holds itself."""
    return {
        name: value
        for name, value in vars(kind).items()
        if (isinstance(value, _DATA) or is_iterator(value)) and not name.startswith(("__", "_abc"))
    }


#: Where packages are installed, as this machine and others have it.
_INSTALLED = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
_PACKAGES = ("site-packages", "dist-packages")


def _is_users_own(thing: Any) -> bool:
    """Whether a function, class or module is of the user's own program, not of a package."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    if not isinstance(name, str) or name.partition(".")[0] in _NOT_LOOKED_INTO:
        return False
    return _is_from_program(name)


@functools.cache
def _is_from_program(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str):
        return module not in sys.builtin_module_names  # a notebook's cells, a prompt
    return not file.startswith(_INSTALLED) and not any(one in file for one in _PACKAGES)


def _belongs_to_others(thing: Any) -> bool:
    home = getattr(thing, "__module__", None) or ""
    return not isinstance(home, str) or home.partition(".")[0] in _NOT_LOOKED_INTO


# -- who holds something ---------------------------------------------------------------------------


class _Holder:
    """One object, and what it held."""

    #: Whether a copy of the roots would have the same one.
    is_shared = False
    _before: Any

    def __init__(self, place: str, holder: Any) -> None:
        self.place, self.object = place, holder

    def is_current(self) -> bool:
        """Whether it holds the same."""
        raise NotImplementedError

    def changes(self) -> Iterator[Change]:
        """What it holds that is not the same."""
        raise NotImplementedError

    def put_back(self, replace: Replace | None) -> None:
        """Have it hold what it held."""
        raise NotImplementedError

    def held_any(self, replace: Replace) -> bool:
        """Whether it held something in whose place another is to stand."""
        before = self._before
        if isinstance(before, dict):
            before = before.values()
        elif not isinstance(before, (list, set, deque)):
            before = (before,)
        return any(_replaced(one, replace) is not one for one in before)


class _OfClass(_Holder):
    """A class, with what it holds for all its objects."""

    def __init__(self, place: str, holder: Any) -> None:
        super().__init__(place, holder)
        self._before = _data_of(holder)

    def is_current(self) -> bool:
        return _is_same_dict(_data_of(self.object), self._before)

    def changes(self) -> Iterator[Change]:
        now = _data_of(self.object)
        yield from _changed_entries(self.object, f"{self.place}.", self._before, now, named=True)

    def put_back(self, replace: Replace | None) -> None:
        now = _data_of(self.object)
        for name in now.keys() - self._before.keys():
            delattr(self.object, name)
        for name, value in self._before.items():
            wanted = value if replace is None else replace(value)
            if now.get(name, MISSING) is not wanted:
                setattr(self.object, name, wanted)


class _Attributes(_Holder):
    """A module, or an object with attributes."""

    def __init__(self, place: str, holder: Any) -> None:
        self.place, self.object = place, holder
        self._now = vars(holder)
        self._before = dict(self._now)

    def is_current(self) -> bool:
        return _is_same_dict(self._now, self._before)

    def changes(self) -> Iterator[Change]:
        dot = f"{self.place}." if self.place else ""
        yield from _changed_entries(self.object, dot, self._before, self._now, named=True)

    def put_back(self, replace: Replace | None) -> None:
        _refill(self._now, self._before, replace)


class _Container(_Holder):
    """A dict, list, set or deque."""

    def __init__(self, place: str, container: Any, *, names: bool = False) -> None:
        self.place, self.object = place, container
        self._before = container.copy()
        self._names = names

    def is_current(self) -> bool:
        now, before = self.object, self._before
        if isinstance(now, dict):
            return _is_same_dict(now, before)
        if isinstance(now, set):
            return len(now) == len(before) and {*map(id, now)} == {*map(id, before)}
        return len(now) == len(before) and all(map(is_, now, before))

    def changes(self) -> Iterator[Change]:
        if self._names:
            dot = f"{self.place}." if self.place else ""
            yield from _changed_entries(self.object, dot, self._before, self.object, named=True)
            return
        yield Change(
            place=f"{self.place}[]",
            holder=self.object,
            name="",
            before=self._before,
            now=self.object,
        )

    def put_back(self, replace: Replace | None) -> None:
        now, before = self.object, self._before
        if isinstance(now, dict):
            _refill(now, before, replace)
            return
        entries = list(before) if replace is None else [_replaced(one, replace) for one in before]
        if isinstance(now, list):
            now[:] = entries
            return
        now.clear()
        (now.update if isinstance(now, set) else now.extend)(entries)


class _Slots(_Holder):
    """An object whose class says by `__slots__` what its objects hold."""

    def __init__(self, place: str, holder: Any) -> None:
        super().__init__(place, holder)
        kind: type = type(holder)
        self._names = _slots_of(kind)
        self._before = _in_slots(holder, self._names)

    def is_current(self) -> bool:
        return _is_same_dict(_in_slots(self.object, self._names), self._before)

    def changes(self) -> Iterator[Change]:
        now = _in_slots(self.object, self._names)
        yield from _changed_entries(self.object, f"{self.place}.", self._before, now, named=True)

    def put_back(self, replace: Replace | None) -> None:
        now = _in_slots(self.object, self._names)
        for name in now.keys() - self._before.keys():
            object.__delattr__(self.object, name)
        for name, value in self._before.items():
            wanted = value if replace is None else _replaced(value, replace)
            if now.get(name, MISSING) is not wanted:
                object.__setattr__(self.object, name, wanted)  # frozen dataclasses have slots, too


class _Array(_Holder):
    """An array of numbers, of numpy or of Python itself, and a copy of them."""

    def __init__(self, place: str, holder: Any) -> None:
        super().__init__(place, holder)
        self._before = _numbers_in(holder)

    def is_current(self) -> bool:
        return bool(_numbers_in(self.object) == self._before)

    def changes(self) -> Iterator[Change]:
        now = _numbers_in(self.object)
        yield Change(
            place=f"{self.place}[]", holder=self.object, name="", before=self._before, now=now
        )

    def put_back(self, replace: Replace | None) -> None:
        if self.is_current():
            return
        if isinstance(self.object, np.ndarray):
            plain = np.asarray(self.object)
            np.copyto(plain, np.frombuffer(self._before, plain.dtype).reshape(plain.shape))
        elif isinstance(self.object, bytearray):
            self.object[:] = self._before
        else:
            self.object[:] = array.array(self.object.typecode, self._before)


class _Variable(_Holder):
    """A variable of the context that the thread runs in."""

    def __init__(self, place: str, holder: Any) -> None:
        super().__init__(place, holder)
        self._before = holder.get(MISSING)

    def is_current(self) -> bool:
        return self.object.get(MISSING) is self._before

    def changes(self) -> Iterator[Change]:
        now = self.object.get(MISSING)
        yield Change(place=self.place, holder=self.object, name="", before=self._before, now=now)

    def put_back(self, replace: Replace | None) -> None:
        # Python has no way to take back the first value of a variable without a default.
        if self._before is not MISSING:
            value = self._before
            self.object.set(value if replace is None else _replaced(value, replace))


class _Cell(_Holder):
    """A variable that a function closes over."""

    def __init__(self, place: str, cell: types.CellType) -> None:
        self.place, self.object = place, cell
        self._before = _contents(cell)

    def is_current(self) -> bool:
        return _contents(self.object) is self._before

    def changes(self) -> Iterator[Change]:
        yield Change(
            place=self.place,
            holder=self.object,
            name="",
            before=self._before,
            now=_contents(self.object),
        )

    def put_back(self, replace: Replace | None) -> None:
        if self._before is MISSING:
            del self.object.cell_contents
        else:
            value = self._before
            self.object.cell_contents = value if replace is None else _replaced(value, replace)


class _Defaults(_Holder):
    """A function's arguments that need not be given."""

    def __init__(self, place: str, function: types.FunctionType) -> None:
        super().__init__(place, function)
        self._before = function.__defaults__

    def is_current(self) -> bool:
        return self.object.__defaults__ is self._before

    def changes(self) -> Iterator[Change]:
        now = self.object.__defaults__
        yield Change(place=self.place, holder=self.object, name="", before=self._before, now=now)

    def put_back(self, replace: Replace | None) -> None:
        wanted = self._before if replace is None else _replaced(self._before, replace)
        if self.object.__defaults__ is not wanted:
            self.object.__defaults__ = wanted


class _Global(_Holder):
    """A global variable."""

    is_shared = True

    def __init__(self, place: str, variables: dict[str, Any], name: str) -> None:
        self.place, self.object, self.name = place, variables, name
        self._before = variables.get(name, MISSING)

    def is_current(self) -> bool:
        return self.object.get(self.name, MISSING) is self._before

    def changes(self) -> Iterator[Change]:
        now = self.object.get(self.name, MISSING)
        yield Change(
            place=self.place, holder=self.object, name=self.name, before=self._before, now=now
        )

    def put_back(self, replace: Replace | None) -> None:
        if self._before is MISSING:
            self.object.pop(self.name, None)
        else:
            value = self._before
            self.object[self.name] = value if replace is None else _replaced(value, replace)


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    """The names of what objects of a class hold in slots, as attributes are called there."""
    return tuple(
        name
        for one in kind.__mro__
        if "__slots__" in vars(one) and not _belongs_to_others(one)
        for name, value in vars(one).items()
        if isinstance(value, types.MemberDescriptorType)
    )


def _in_slots(holder: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(holder, name) for name in names if hasattr(holder, name)}


def _is_looked_at(value: Any) -> bool:
    """Whether an array can be copied, and is small enough for that."""
    if isinstance(value, np.ndarray):
        writable = value.flags.writeable and not value.dtype.hasobject
        return writable and value.nbytes <= MOST_BYTES
    return len(value) * getattr(value, "itemsize", 1) <= MOST_BYTES


def _numbers_in(value: Any) -> bytes:
    return np.asarray(value).tobytes() if isinstance(value, np.ndarray) else bytes(value)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return MISSING


def _is_same_dict(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    if len(now) != len(before):
        return False
    return all(map(is_, now.values(), before.values())) and all(map(is_, now, before))


def _changed_entries(
    holder: Any, dot: str, before: dict[Any, Any], now: dict[Any, Any], *, named: bool
) -> Iterator[Change]:
    for name in {**before, **now}:
        was, became = before.get(name, MISSING), now.get(name, MISSING)
        if was is not became:
            yield Change(
                place=f"{dot}{name}",
                holder=holder,
                name=str(name) if named else "",
                before=was,
                now=became,
            )


def _refill(now: dict[Any, Any], before: dict[Any, Any], replace: Replace | None) -> None:
    for name in [name for name in now if name not in before]:
        del now[name]
    for name, value in before.items():
        wanted = value if replace is None else _replaced(value, replace)
        if name not in now or now[name] is not wanted:
            now[name] = wanted


def _replaced(value: Any, replace: Replace) -> Any:
    """The value, or one with other tensors in it; what is changed in place is put back there."""
    if isinstance(value, Tensor) or is_iterator(value):
        return replace(value)
    if type(value) is tuple:
        entries = tuple(_replaced(entry, replace) for entry in value)
        return entries if not all(map(is_, entries, value)) else value
    return value


# -- random numbers --------------------------------------------------------------------------------


class _Stream:
    """A generator of random numbers, or an iterator, and where it was."""

    #: Whether a copy of the roots would have the same one.
    is_shared = False
    #: Whether the user's own objects hold it.
    is_near = True

    def __init__(
        self, place: str, stream: Any, get: Callable[[], Any], put: Callable[[Any], Any]
    ) -> None:
        self.place, self.stream = place, stream
        self.state = get()
        self._get, self._put = get, put

    def is_current(self) -> bool:
        """Whether nothing was drawn from it."""
        return same_state(self._get(), self.state)

    def put_back(self) -> None:
        """It goes on from where it was."""
        self._put(self.state)


def same_state(one: Any, other: Any) -> bool:
    """Whether two states of a generator are the same."""
    if isinstance(one, Tensor):
        with disable_current_modes():  # a state is real in a rehearsal, too
            return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)


def _stream_of(place: str, value: Any) -> _Stream | None:
    if isinstance(value, torch.Generator):
        return _Stream(place, value, functools.partial(state_of, value), value.set_state)
    if isinstance(value, random.Random):
        return _Stream(place, value, value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return _Stream(place, value, value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator

        def put(state: Any) -> None:
            bits.state = state

        return _Stream(place, value, lambda: bits.state, put)
    if is_iterator(value):
        # How far it got; that nobody can take back, see `PythonState.lost`.
        return _Stream(place, value, functools.partial(place_of, value), lambda _: None)
    return None
