"""Fake tensors that a rehearsal left in a package's tables, which are taken out again (rule 13).

What the user's own functions name is put back by `shared_state`. An installed package may keep
tensors as well: in a dictionary of its module, in a function's memory. Only where fake tensors are
alive when a rehearsal is over, all modules are gone through.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn

from oomph.errors import CannotRehearse
from oomph.torch_compat.fake_tensors import FakeTensor

#: Whose modules keep no tensor that a forward makes.
_NOT_LOOKED_INTO = ("oomph", "torch", "numpy", "scipy", "builtins", "gc", "sys", "_pytest")
#: These and no classes made of them, which may do more than give what they hold.
_CONTAINERS = (dict, list, set, deque, OrderedDict, defaultdict)
#: Of what a container holds: how deep, and how many objects, it is looked into.
_MOST_DEPTH = 6
_MOST_OBJECTS = 4096


_is_inside = False


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Whatever rehearses inside, at the end of the outermost one its tensors are taken out.

    Raises `CannotRehearse` where a variable holds one: what that held before, nobody knows. What
    Python's collector is told to leave alone is taken for older without looking.
    """
    global _is_inside
    if _is_inside:
        yield
        return
    older = {id(one) for one in gc.get_objects()}
    _is_inside = True
    try:
        yield
        _take_out(older)
    except BaseException:
        with contextlib.suppress(CannotRehearse):
            _take_out(older)
        raise
    finally:
        _is_inside = False


def _take_out(older: set[int]) -> None:
    if not any(map(_is_fake, gc.get_objects())):
        return
    gc.collect()
    now = gc.get_objects()
    if not any(map(_is_fake, now)):
        return
    search = _Search({id(one) for one in now} - older)
    del now
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] not in _NOT_LOOKED_INTO:
            search.look_at(name, vars(module))
    if search.variables:
        raise CannotRehearse(
            f"{search.variables[0]} keeps a tensor that is made when it is first used, and in a"
            " rehearsal none is real: run one batch through the model before, so that it is there"
        )


def _is_fake(one: Any) -> bool:
    if not issubclass(type(one), FakeTensor) or isinstance(one, nn.Parameter):
        return False  # no table keeps a copied model's weights
    return type(one.fake_mode).__module__.partition(".")[0] == "oomph"


class _Search:
    """What is older than the rehearsal, gone through from the modules down."""

    def __init__(self, new: set[int]) -> None:
        self._new = new
        self._seen: set[int] = set()
        #: Variables that held a fake tensor, and hold None now.
        self.variables: list[str] = []

    def look_at(self, place: str, variables: dict[str, Any]) -> None:
        """Go through the variables of a module, class or object."""
        self._look(place, variables, variables.__setitem__)

    def _look(
        self, place: str, variables: Mapping[str, Any], put: Callable[[str, Any], Any]
    ) -> None:
        for name, value in list(variables.items()):
            if _is(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            where = f"{place}.{name}"
            if type(value) in _CONTAINERS:
                self._clean(where, value)
            elif not self._go_on(where, value) and _leads_to_fake(value):
                put(name, None)
                self.variables.append(where)

    def _go_on(self, place: str, value: Any) -> bool:
        """Look at what something holds itself; says no where that was not there before."""
        if _is(value, (ModuleType, _LruCache)):
            if _is(value, _LruCache) and _leads_to_fake(value):
                value.cache_clear()
            return True
        if _is(value, (staticmethod, classmethod)):
            value = value.__func__
        if _is(value, FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # a variable without a value
                    held = {name: cell.cell_contents}
                    self._look(place, held, functools.partial(_set_in_cell, cell))
            self.look_at(place, vars(value))
            return True
        if _is(value, type):
            if _home_of(value) not in _NOT_LOOKED_INTO:
                self._look(place, vars(value), functools.partial(setattr, value))
            return True
        if id(value) in self._new or _is(value, (tuple, FakeTensor)):
            return False
        if _home_of(type(value)) not in _NOT_LOOKED_INTO:
            with contextlib.suppress(AttributeError):
                self.look_at(place, object.__getattribute__(value, "__dict__"))
        return True

    def _clean(self, place: str, container: Any) -> None:
        """Take out the entries that lead to fake tensors; older ones are looked at themselves."""
        entries = list(container.items() if isinstance(container, dict) else enumerate(container))
        gone = []
        for key, value in entries:
            if _is(value, _PLAIN):
                continue
            if type(value) in _CONTAINERS and id(value) not in self._new:
                if id(value) not in self._seen:
                    self._seen.add(id(value))
                    self._clean(place, value)
            elif not self._go_on_once(place, value) and _leads_to_fake(value):
                gone.append((key, value))
        for key, value in reversed(gone):
            if isinstance(container, set):
                container.discard(value)
            else:
                del container[key]

    def _go_on_once(self, place: str, value: Any) -> bool:
        if id(value) in self._seen:
            return True
        is_older = self._go_on(place, value)
        if is_older:
            self._seen.add(id(value))
        return is_older


def _is(value: Any, kinds: Any) -> bool:
    """By its type alone: asked for its class, a stand-in of a library's may load what it is for."""
    return issubclass(type(value), kinds)


def _leads_to_fake(value: Any) -> bool:
    """Whether it is, or holds, a fake tensor."""
    level, seen = [value], {id(value)}
    for _ in range(_MOST_DEPTH):
        if any(map(_is_fake, level)):
            return True
        below = [
            one
            for one in gc.get_referents(*level)
            if not _is(one, (type, ModuleType, FunctionType, *_PLAIN))
        ]
        level = [one for one in below if id(one) not in seen]
        seen.update(map(id, level))
        if not level or len(seen) > _MOST_OBJECTS:
            return False
    return False


def _home_of(kind: type) -> str:
    home = kind.__module__
    return home.partition(".")[0] if isinstance(home, str) else ""


def _set_in_cell(cell: CellType, _: str, value: Any) -> None:
    cell.cell_contents = value


_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_LruCache = functools._lru_cache_wrapper
