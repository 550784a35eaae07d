"""Numbers that a forward reads on the host, as `if mask.all():` does.

Reading waits for the GPU, which is forbidden during a capture. Many of these numbers are always the
same: transformers checks whether the positions it just counted are consecutive. Those are read
once, in a separate forward, and replayed in the capture. A number that depends on the batch or on a
weight may change, so a forward that reads one cannot be captured.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from oomph.errors import OomphError
from oomph.torch_compat.dispatch import TorchDispatchMode
from oomph.torch_compat.pytree import tree_leaves
from oomph.torch_compat.storages import cdata_of

#: Tensor methods that return its value to Python.
_READS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")


class ReadsData(OomphError):
    """A forward reads a number that is not always the same."""


class HostReads:
    """The constants that a forward reads, in order."""

    def __init__(self) -> None:
        self._values: list[Any] = []

    @classmethod
    def of(cls, forward: Callable[[], Any], varying: Sequence[Tensor]) -> HostReads:
        """Run `forward` and record its reads; raises `ReadsData` if one depends on `varying`."""
        reads = cls()
        derived = _Derived(varying)

        def note(method: Callable[[Tensor], Any], tensor: Tensor) -> Any:
            if derived.has(tensor):
                raise ReadsData("its forward reads a number that depends on the batch or a weight")
            reads._values.append(method(tensor))
            return reads._values[-1]

        with reading_by(note), derived:
            forward()
        return reads

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """While active, reads return the recorded values and do not wait for the GPU."""
        left = iter(self._values)

        def tell(method: Callable[[Tensor], Any], tensor: Tensor) -> Any:
            try:
                return next(left)
            except StopIteration:
                raise ReadsData("it reads more numbers than it did before") from None

        with reading_by(tell):
            yield
        if next(left, self) is not self:
            raise ReadsData("it reads fewer numbers than it did before")


class _Derived(TorchDispatchMode):
    """Tracks which tensors were computed from given ones."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in given:
            self._add(tensor)

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is tracked."""
        return cdata_of(tensor.untyped_storage()) in self._storages

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = cdata_of(storage)
        # Forgotten when freed: a new storage may reuse the key.
        forget = functools.partial(self._forget, key)
        self._storages[key] = weakref.ref(storage, forget)

    def _forget(self, key: int, _: Any) -> None:
        self._storages.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and self.has(x) for x in tree_leaves((args, kwargs))):
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._add(leaf)
        return out


@contextlib.contextmanager
def reading_by(read: Callable[[Callable[[Tensor], Any], Tensor], Any]) -> Iterator[None]:
    """While active, reading a tensor's value calls `read(method, tensor)`."""
    inside = False

    def replacement(method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def reading(tensor: Tensor) -> Any:
            nonlocal inside
            if inside:  # one of these methods calls another
                return method(tensor)
            inside = True
            try:
                return read(method, tensor)
            finally:
                inside = False

        return reading

    with contextlib.ExitStack() as patches:
        for name in _READS:
            patch = mock.patch.object(Tensor, name, replacement(getattr(Tensor, name)))
            patches.enter_context(patch)
        yield
