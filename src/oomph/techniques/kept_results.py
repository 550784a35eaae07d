"""Results of chosen ops, kept from the first run of a forward and reused in each later one.

A graph may go backward more than once: with gradients of gradients (a gradient penalty, second
derivatives by hand), or if the user retains it. The forward runs again each time and needs the kept
results each time, so a result is freed only in the last backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from oomph.torch_compat.autograd import keeps_graph
from oomph.torch_compat.dispatch import DispatchKey, SetExcludeDispatchKeyGuard, TorchDispatchMode
from oomph.torch_compat.pytree import tree_map
from oomph.torch_compat.tensors import version_of


class KeptResults:
    """Keeps the results of some ops, named by op kind and how often that kind ran before."""

    def __init__(
        self, names: frozenset[str], kinds: Mapping[Any, str], error: Callable[[str], Exception]
    ) -> None:
        self._names, self._kinds, self._error = names, kinds, error
        self._kept: dict[str, Any] = {}

    def first(self) -> TorchDispatchMode:
        """The mode for the first run."""
        return _EachOfKind(self._kinds, self._keep)

    def again(self) -> TorchDispatchMode:
        """The mode for each later run."""
        return _EachOfKind(self._kinds, self._give)

    def _keep(self, name: str, run: Callable[[], Any]) -> Any:
        out = run()
        if name in self._names:
            self._kept[name] = tree_map(_Kept.of, out)
        return out

    def _give(self, name: str, run: Callable[[], Any]) -> Any:
        if name not in self._names:
            return run()
        if name not in self._kept:
            raise self._error(f"it runs {name}, which it did not before, or backward was over")
        goes_on = keeps_graph()
        kept = self._kept[name] if goes_on else self._kept.pop(name)
        return tree_map(self._value, kept)

    def _value(self, kept: Any) -> Any:
        if not isinstance(kept, _Kept):
            return kept
        if version_of(kept.tensor) != kept.version:
            raise self._error("a result that was kept was written to in the meantime")
        # A new alias each time, since autograd attaches what is returned to its graph.
        return _alias(kept.tensor)


@dataclass(frozen=True, kw_only=True)
class _Kept:
    tensor: Tensor
    version: int

    @classmethod
    def of(cls, value: Any) -> Any:
        """Wrap a tensor with its current version; return other values as they are."""
        if not isinstance(value, Tensor):
            return value
        tensor = _alias(value)
        return cls(tensor=tensor, version=version_of(tensor))


def _alias(tensor: Tensor) -> Tensor:
    """The same tensor outside of any graph, sharing the original's version counter."""
    with SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _EachOfKind(TorchDispatchMode):
    """Passes each op of a known kind, with its name, to a function that runs it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(
        self, kinds: Mapping[Any, str], see: Callable[[str, Callable[[], Any]], Any]
    ) -> None:
        super().__init__()
        self._kinds, self._see = kinds, see
        self._counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = self._kinds.get(func)
        if kind is None:
            return func(*args, **(kwargs or {}))
        name = f"{kind}#{self._counted[kind]}"
        self._counted[kind] += 1
        return self._see(name, lambda: func(*args, **(kwargs or {})))
