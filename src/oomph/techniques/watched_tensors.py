"""Watched tensors: their values are not in place yet, so uses of them are intercepted.

A weight may be on the host, or its step may have begun and not be complete. The user's code does
not know that: an average of the weights, a penalty in the loss, `model.state_dict()` and
`p.data.clamp_()` assume that a parameter holds its values. So such a parameter is *watched*: each
PyTorch function that is called with it goes to its `Watcher`, which provides the values before the
function runs.

A watched tensor stays the same object and gets its own class back when it is unwatched. Functions
that only describe it, such as its shape or its gradient, bypass the watcher. Reads through aliases
that were made earlier are not noticed; see `aliases`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oomph.torch_compat.function_modes import DisableTorchFunctionSubclass
from oomph.torch_compat.pytree import tree_leaves
from oomph.torch_compat.storages import cdata_of, storage_use_count
from oomph.torch_compat.tensors import (
    AFTER_ACCUMULATION,
    BACKWARD_HOOKS,
    BASE,
    CDATA,
    GRADIENT,
    VERSION,
)

#: Calls a PyTorch function with these positional and keyword arguments.
Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_WATCHER = "_oomph_watcher"
#: References to the storage of a tensor without aliases: by the tensor, and by the query itself.
_UNSHARED = 2

_thread = threading.local()


@contextlib.contextmanager
def own_work() -> Iterator[None]:
    """While active, this thread does oomph's own work: it uses tensors as they are, and neither
    watchers nor modes that observe a forward's ops react to it."""
    before = is_own_work()
    _thread.is_own_work = True
    try:
        with DisableTorchFunctionSubclass():
            yield
    finally:
        _thread.is_own_work = before


def is_own_work() -> bool:
    """Whether this thread is inside of `own_work`."""
    return getattr(_thread, "is_own_work", False)


class Watcher(Protocol):
    """Provides the values of watched tensors."""

    def around(self, tensors: Sequence[Tensor], func: Any, call: Call) -> Call:
        """The replacement of `call`, which calls `func` with these watched tensors."""


def watch(tensor: Tensor, watcher: Watcher) -> None:
    """From now on, send uses of the tensor through this watcher."""
    cls = type(tensor)
    if not issubclass(cls, _Watched):
        tensor.__class__ = _watched_class(cls)
    tensor.__dict__[_WATCHER] = watcher


def unwatch(tensor: Tensor) -> None:
    """Stop watching the tensor, which now holds its values."""
    cls = type(tensor)
    if issubclass(cls, _Watched):
        tensor.__class__ = cls.own_class
        del tensor.__dict__[_WATCHER]


def is_watched(tensor: Tensor) -> bool:
    """Whether uses of this tensor go through a watcher."""
    return isinstance(tensor, _Watched)


def aliases(tensor: Tensor) -> int:
    """The number of other references to the tensor's memory; reads through them are unwatched."""
    with own_work():
        return storage_use_count(cdata_of(tensor.untyped_storage())) - _UNSHARED


class _Watched:
    """The common base of watched tensors of all classes."""

    own_class: type[Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBES:
            with own_work():
                return func(*args, **kwargs)

        def call(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return func(*given, **named)

        around: Call = call
        for watcher, tensors in _by_watcher(tree_leaves((args, kwargs))):
            around = watcher.around(tensors, func, around)
        return around(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        return memo.setdefault(id(self), self._true_copy())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._true_copy().__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:
        shown: str = self._true_copy().__repr__(**kwargs)
        return shown

    def _true_copy(self) -> Tensor:
        """A copy with the values, in its own memory and of an ordinary class."""
        assert isinstance(self, Tensor)
        numbers = self.detach()
        if not is_watched(self):  # the watcher has put the values in place
            return copy.deepcopy(self)
        copied = numbers.clone()
        return nn.Parameter(copied, self.requires_grad) if _is_parameter(self) else copied


@functools.cache
def _watched_class(cls: type[Tensor]) -> type[Any]:
    """The class that tensors of `cls` have while they are watched; it has the name of `cls`."""
    members = {"own_class": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    make: Any = type(cls)
    made: type[Any] = make(cls.__name__, (_Watched, cls), members)
    return made


def _by_watcher(leaves: Iterable[Any]) -> list[tuple[Watcher, list[Tensor]]]:
    found: dict[int, tuple[Watcher, list[Tensor]]] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and is_watched(leaf):
            watcher = leaf.__dict__[_WATCHER]
            tensors = found.setdefault(id(watcher), (watcher, []))[1]
            if all(other is not leaf for other in tensors):
                tensors.append(leaf)
    return list(found.values())


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _getters(*names: str) -> list[Any]:
    """Functions that read these attributes, where this PyTorch version has them."""
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


def _setters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__set__ for name in names if hasattr(Tensor, name)]


def _deleters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__delete__ for name in names if hasattr(Tensor, name)]


#: Functions that depend neither on a tensor's values nor on its memory layout.
_DESCRIBES = {
    *_getters("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names"),
    *_getters("requires_grad", "is_leaf", "grad", GRADIENT, "grad_fn", "retains_grad", "output_nr"),
    *_getters("is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized"),
    *_getters("is_sparse_csr", "is_mkldnn", "is_nested", VERSION, "name", BACKWARD_HOOKS),
    *_getters(AFTER_ACCUMULATION, CDATA, BASE),
    *_setters("requires_grad", "grad", GRADIENT, BACKWARD_HOOKS, AFTER_ACCUMULATION),
    *_deleters("grad", GRADIENT),
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_signed,
    Tensor.is_inference,
    Tensor.is_conj,
    Tensor.is_neg,
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
    Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_conj,
    torch.is_neg,
    torch.is_inference,
    torch.is_same_size,
    torch.is_signed,
    torch.numel,
    torch.result_type,
    torch.autograd.grad,
    torch.autograd.backward,
}
