"""An unfinished optimizer step: its weights and its state are completed when they are used.

Between steps, user code may read and write weights and optimizer state as if the last step were
over. Usually it does not, and the step runs alongside the next forward. So only code that uses them
waits for the step: weights are watched (`watched_tensors`), and the optimizer's state is a
`WatchedState`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from oomph.techniques.tensor_writes import storage_of
from oomph.techniques.watched_tensors import (
    Call,
    is_own_work,
    is_watched,
    unwatch,
    watch,
)
from oomph.torch_compat.pytree import tree_leaves

#: Completes the steps of some parameters.
HaveStepped = Callable[[Collection[Tensor]], None]
#: Called with a parameter that may have been written to, and whether that was in a forward.
Changed = Callable[[Tensor, bool], None]


class BegunStep:
    """The model's parameters that are not stepped yet; using one completes its step first."""

    def __init__(self, have_stepped: HaveStepped, may_have_changed: Changed) -> None:
        # Watched tensors reference this object, so it references the callbacks' owner weakly.
        self._have_stepped = weakref.WeakMethod(have_stepped)
        self._may_have_changed = weakref.WeakMethod(may_have_changed)
        #: Parameters of which the host has a copy: writes to them must be noticed.
        self._copied: frozenset[Tensor] = frozenset()
        #: Whether parameters are watched during forwards.
        self._in_forward = False

    def watch(self, leaves: Collection[Tensor], copied: Collection[Tensor] = ()) -> None:
        """Complete the step of each of these parameters right before its first use.

        The `copied` ones stay watched afterwards: writes through `.data` bump no version counter.
        """
        self._copied, self._in_forward = frozenset(copied), False
        for leaf in (*leaves, *copied):
            if not is_watched(leaf):
                watch(leaf, self)

    def stepped(self, leaves: Iterable[Tensor]) -> None:
        """Stop watching parameters whose step is complete, except the copied ones."""
        for leaf in leaves:
            if is_watched(leaf) and leaf not in self._copied:
                unwatch(leaf)

    def forward(self, leaves: Iterable[Tensor]) -> None:
        """Stop watching parameters that the model's forward is about to use."""
        for leaf in leaves:
            if is_watched(leaf):
                unwatch(leaf)

    def look_at_forward(self, leaves: Iterable[Tensor]) -> None:
        """Watch the copied ones among these, to notice writes by a module's forward."""
        self._in_forward = True
        for leaf in leaves:
            if leaf in self._copied and not is_watched(leaf):
                watch(leaf, self)

    def around(self, tensors: Sequence[Tensor], _: Any, call: Call) -> Call:
        """Complete the steps of these; for copied ones, report results that allow hidden writes."""
        self.complete(tensors)
        copied = [tensor for tensor in tensors if tensor in self._copied]

        def used(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.forward(tensors)
            try:
                result = call(args, kwargs)
                shown = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
                for tensor in copied:
                    may_have_changed = self._may_have_changed()
                    if may_have_changed is not None and _is_lent(tensor, shown):
                        may_have_changed(tensor, self._in_forward)
            finally:
                for tensor in copied:
                    watch(tensor, self)
            return result

        return used

    def complete(self, leaves: Collection[Tensor]) -> None:
        if (have_stepped := self._have_stepped()) is not None:
            have_stepped(leaves)


def _is_lent(tensor: Tensor, results: Iterable[Tensor]) -> bool:
    """Whether a function's result shares a tensor's memory so that writes may go uncounted."""
    key = storage_of(tensor)
    return any(storage_of(one) == key and not one.requires_grad for one in results)


class WatchedState(defaultdict[Tensor, Any]):
    """An optimizer's state, which is brought up to date before each use."""

    def __init__(self, state: dict[Tensor, Any], before_use: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._before_use = weakref.WeakMethod(before_use)

    def plain(self) -> defaultdict[Tensor, Any]:
        """The same state as a plain dictionary, as the optimizer had it before."""
        return defaultdict(dict, super().items())

    def _used(self) -> None:
        before_use = self._before_use()
        if before_use is not None and not is_own_work():
            before_use()

    def __getitem__(self, key: Tensor) -> Any:
        self._used()
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._used()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Tensor]:
        self._used()
        return super().__iter__()

    def __len__(self) -> int:
        self._used()
        return super().__len__()

    def __setitem__(self, key: Tensor, value: Any) -> None:
        self._used()
        super().__setitem__(key, value)

    def __delitem__(self, key: Tensor) -> None:
        self._used()
        super().__delitem__(key)

    def clear(self) -> None:
        """As a dictionary's."""
        self._used()
        super().clear()

    def get(self, key: Tensor, default: Any = None) -> Any:
        """As a dictionary's."""
        self._used()
        return super().get(key, default)

    def pop(self, key: Tensor, *default: Any) -> Any:
        """As a dictionary's."""
        self._used()
        return super().pop(key, *default)

    def keys(self) -> Any:
        """As a dictionary's."""
        self._used()
        return super().keys()

    def values(self) -> Any:
        """As a dictionary's."""
        self._used()
        return super().values()

    def items(self) -> Any:
        """As a dictionary's."""
        self._used()
        return super().items()

    def copy(self) -> Any:
        """A plain copy of the up-to-date state, which later steps leave as it is."""
        self._used()
        return self.plain()

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        return self.copy().__reduce__()
