"""Activation offload: keep what a block saves for backward outside the GPU until it is needed.

While an offloaded block runs forward, the copy of each tensor to the host starts as soon as
autograd saves it, and autograd keeps a note instead. The model is seen as a sequence of *parts*:
its blocks, and the modules that it calls between them. When the part after the block ends, the
copies are waited for and the GPU memory is freed; when that part's backward begins, the copies back
start. So a block's copies can overlap with one part, each way. The program determines both moments,
not the speed of the link, so a rehearsal sees them where they really are. The data is kept in host
memory or on disk; when forward ends, the disk store is told the order in which it will be fetched.

Memory is identified by storage. Views of one storage are offloaded once and come back as the same
views; a tensor that two blocks save is offloaded once for both; what the model owns or was given
stays, because offloading it would free nothing.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from oomph.memory.evicted import Evicted, HostEvictionStore
from oomph.memory.evicted_to_disk import DiskEvictionStore
from oomph.memory.link import Link
from oomph.memory.numbered_store import OpenStore
from oomph.techniques.batch_calls import unwatched
from oomph.techniques.recompute import replace_forward
from oomph.techniques.surroundings import is_transformed
from oomph.techniques.technique import Undo
from oomph.torch_compat.dispatch import is_traceable_wrapper_subclass
from oomph.torch_compat.function_modes import disabled_torch_function
from oomph.torch_compat.functorch import is_wrapped
from oomph.torch_compat.pytree import tree_leaves

#: Weak references: streamed weights free their memory, and an activation may then get it.
_Storages = weakref.WeakSet[torch.UntypedStorage]

#: Smaller tensors (in bytes) stay: launching their copies takes longer than the copies.
SMALLEST = 1 << 18


class ActivationOffload:
    """Offloads what the blocks of one model save: to the host, or to the disk store it opens."""

    def __init__(
        self,
        link: Link,
        model: nn.Module,
        *,
        device_type: str = "cuda",
        smallest: int = SMALLEST,
        disk: OpenStore | None = None,
    ) -> None:
        self._model = model
        self._device_type = device_type
        self._smallest = smallest
        self._eviction_store = HostEvictionStore(link) if disk is None else DiskEvictionStore(disk)
        #: Evicted memory by the storage that it was copied from, as long as that is alive.
        self._evicted: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.ref[Evicted]] = (
            weakref.WeakKeyDictionary()
        )
        #: Calls whose copies have not been waited for yet.
        self._leaving: list[_Call] = []
        #: The calls of the running forward, in order; None while no forward runs.
        self._calls: list[_Call] | None = None
        self._wrapped: dict[nn.Module, _Wrapped] = {}
        #: Storages that stay alive while the model runs: its parameters, buffers and inputs.
        self._held: _Storages | None = None
        self._follows: list[Any] = []
        self._watches = [
            model.register_forward_pre_hook(_Watch(self._begin), with_kwargs=True),
            model.register_forward_hook(_Watch(self._end), always_call=True),
        ]

    def wrap(self, block: nn.Module, which: Collection[int] | None = None, *, lag: int = 1) -> Undo:
        """Offload what `block` saves; with `which`, only those storages, by their order of saving.

        Call it after the block was set up to be recomputed or was compiled, because that changes
        what it saves (only its inputs if all of it is recomputed). `lag` is the number of model
        parts that its copies may overlap with, each way.
        """
        assert lag >= 1, "copies need the time of at least one part"
        wrapped = _Wrapped(block, None if which is None else frozenset(which), lag)
        put_back = replace_forward(block, _OffloadedForward(self, wrapped))
        self._wrapped[block] = wrapped
        self._unfollow()

        def undo() -> None:
            if self._wrapped.get(block) is wrapped:
                del self._wrapped[block]
                put_back()
                self._unfollow()

        wrapped.undo = undo
        return undo

    def sizes(self, block: nn.Module) -> tuple[int, ...]:
        """Bytes of each storage that `block` saved in its last forward, in the order of saving."""
        return tuple(self._wrapped[block].sizes)

    def undo(self) -> None:
        """Restore every block's forward and free the memory outside the GPU.

        A graph whose backward is still to run keeps the memory that it needs until then.
        """
        for wrapped in reversed(list(self._wrapped.values())):
            wrapped.undo()
        for watch in self._watches:
            watch.remove()
        self._leave(self._leaving)
        self._eviction_store.clear()
        self._evicted.clear()

    # -- forward ----------------------------------------------------------------------------------

    def run(self, wrapped: _Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Run a block's forward and start offloading what it saves."""
        if not torch.is_grad_enabled() or is_transformed():
            return wrapped.forward(*args, **kwargs)
        call = _Call(self, wrapped)
        try:
            with saved_tensors_hooks(call.pack, _unpack):
                output = wrapped.forward(*args, **kwargs)
        finally:
            self._leaving.append(call)
            if self._calls is not None:
                self._calls.append(call)
            wrapped.sizes = call.sizes
        due = self._due(but=call)
        self._leave(due)
        _on_gradient(output, [call, *due])
        return output

    @unwatched()
    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Prepare for the model's forward, which begins."""
        if is_transformed():
            return
        if torch.is_grad_enabled():
            self._calls = []
            self._eviction_store.expect(())
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._held = _owned_by(model) | _storages(inputs)
        if not self._follows:
            # Found again after each change: a wrapped block is no longer inside another part.
            self._follows = [
                part.register_forward_hook(_Watch(self._part_ended))
                for part in set(_parts(self._model, self._wrapped))
            ]

    @unwatched()
    def _part_ended(self, _: nn.Module, __: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not is_transformed():
            due = self._due()
            self._leave(due)
            _on_gradient(output, due)

    @unwatched()
    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        """Finish all copies after the model's forward ended or failed."""
        if is_transformed():
            return
        self._held = None
        due = list(self._leaving)
        self._leave(due)
        _on_gradient(output, due)
        calls, self._calls = self._calls, None
        if calls is not None:
            self._eviction_store.expect(
                evicted for call in reversed(calls) for evicted in call.coming()
            )

    def _due(self, *, but: _Call | None = None) -> list[_Call]:
        """The calls whose lag is used up, now that another part ended."""
        others = [call for call in self._leaving if call is not but]
        for call in others:
            call.lag -= 1
        return [call for call in others if call.lag <= 0]

    @unwatched()
    def _leave(self, calls: Iterable[_Call]) -> None:
        for call in list(calls):
            self._leaving.remove(call)
            call.leave()

    def _unfollow(self) -> None:
        for follow in self._follows:
            follow.remove()
        self._follows = []

    # -- memory -----------------------------------------------------------------------------------

    def find_or_evict(self, tensor: Tensor, position: object) -> tuple[Evicted, bool]:
        """The evicted copy of this tensor's memory, and whether it was made only now."""
        storage = tensor.untyped_storage()
        known = self._evicted.get(storage)
        evicted = known() if known is not None else None
        if evicted is not None and evicted.holds(tensor):
            return evicted, False
        evicted = self._eviction_store.evict(tensor, position)
        self._evicted[storage] = weakref.ref(evicted)
        return evicted, True

    def may_leave(self, tensor: Tensor, owned_by_block: _Storages) -> bool:
        """Whether this is an activation on the GPU that can be copied byte by byte."""
        if (
            tensor.device.type != self._device_type
            or not _is_plain(tensor)
            or is_traceable_wrapper_subclass(tensor)
            or tensor.is_inference()
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        storage = tensor.untyped_storage()
        if not storage.nbytes() or storage.nbytes() % tensor.element_size():
            return False
        if self._held is None:  # the block was called without the model
            self._held = _owned_by(self._model)
        return storage not in self._held and storage not in owned_by_block

    def is_worth_it(self, nbytes: int) -> bool:
        """Whether memory of this size is large enough to be moved."""
        return nbytes >= self._smallest


class _Wrapped:
    """One offloaded block."""

    undo: Undo

    def __init__(self, block: nn.Module, which: frozenset[int] | None, lag: int) -> None:
        self.block = block
        self.which = which
        self.lag = lag
        self.forward: Callable[..., Any] = block.forward
        self.sizes: list[int] = []


class _OffloadedForward:
    """The forward of an offloaded block."""

    def __init__(self, offload: ActivationOffload, wrapped: _Wrapped) -> None:
        self._offload, self._wrapped = offload, wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._offload.run(self._wrapped, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Give a copied block the copy of its own forward."""
        copied: Callable[..., Any] = copy.deepcopy(self._wrapped.forward, memo)
        return copied


class _Watch:
    """A hook on a module; in a copy of the module it does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._call(*args, **kwargs)

    def __deepcopy__(self, _: dict[int, Any]) -> Callable[..., None]:
        return _see_nothing


def _see_nothing(*_: Any, **__: Any) -> None:
    """The hook that a copied module has in place of a `_Watch`."""


class _Call:
    """One forward of an offloaded block."""

    def __init__(self, offload: ActivationOffload, wrapped: _Wrapped) -> None:
        self.lag = wrapped.lag
        self.sizes: list[int] = []
        self._offload = offload
        self._wrapped = wrapped
        # Looked up in each call: streamed weights have new memory each time.
        self._owned = _owned_by(wrapped.block)
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = (
            weakref.WeakKeyDictionary()
        )
        self._leaving: list[Evicted] = []
        #: Weak references to what was saved; the graph keeps it alive.
        self._saved: list[weakref.ref[Evicted]] = []

    def pack(self, tensor: Tensor) -> Tensor | _Note:
        """Replace an offloaded tensor by a note; autograd calls this with each tensor it saves."""
        if not self._offload.may_leave(tensor, self._owned):
            return tensor
        number, nbytes = self._number_of(tensor), tensor.untyped_storage().nbytes()
        which = self._wrapped.which
        if not self._offload.is_worth_it(nbytes) or (which is not None and number not in which):
            return tensor
        evicted, is_new = self._offload.find_or_evict(tensor, (self._wrapped.block, number))
        if is_new:
            self._leaving.append(evicted)
        if not any(saved() is evicted for saved in self._saved):
            self._saved.append(weakref.ref(evicted))
        return _Note(evicted, tensor)

    def leave(self) -> None:
        """Wait for the copies and free the GPU memory."""
        for evicted in self._leaving:
            evicted.leave()
        self._leaving.clear()

    def fetch(self) -> None:
        """Start all copies back to the GPU, last saved first."""
        for evicted in self.coming():
            evicted.fetch()

    def coming(self) -> Iterator[Evicted]:
        """The evicted memory that backward will need, in that order."""
        return (evicted for saved in reversed(self._saved) if (evicted := saved()) is not None)

    def _number_of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = len(self.sizes)
            self.sizes.append(storage.nbytes())
        return number


class _Note:
    """What autograd keeps in place of a tensor: its evicted memory, and the view it had of it."""

    def __init__(self, evicted: Evicted, tensor: Tensor) -> None:
        self._evicted = evicted
        self._dtype = tensor.dtype
        self._view = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        self._is_wanted = True
        evicted.want()

    def tensor(self) -> Tensor:
        first, self._is_wanted = self._is_wanted, False
        flat = self._evicted.take(first=first)
        same = flat if flat.dtype is self._dtype else flat.view(self._dtype)
        return same.as_strided(*self._view)

    def __del__(self) -> None:
        if self._is_wanted:
            self._evicted.unwant()


def _unpack(kept: Tensor | _Note) -> Tensor:
    return kept.tensor() if isinstance(kept, _Note) else kept


def _on_gradient(output: Any, calls: list[_Call]) -> None:
    """Fetch these calls' tensors when the backward of the part that made `output` begins."""
    if not calls:
        return

    def fetch(_: Tensor) -> None:
        for call in calls:
            call.fetch()

    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and _is_plain(leaf) and leaf.grad_fn is not None:
            leaf.register_hook(fetch)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a view of one storage: not sparse, not a `torch.func` wrapper, and not of a
    subclass with its own `__torch_function__`, such as logits that are not computed yet."""
    if tensor.layout is not torch.strided or is_wrapped(tensor):
        return False
    function = type(tensor).__torch_function__
    return function is disabled_torch_function or function == Tensor.__torch_function__


def _owned_by(module: nn.Module) -> _Storages:
    """The storages of a module's parameters and buffers."""
    return _storages(itertools.chain(module.parameters(), module.buffers()))


def _storages(tensors: Iterable[Tensor]) -> _Storages:
    return weakref.WeakSet(tensor.untyped_storage() for tensor in tensors if _is_plain(tensor))


def _parts(module: nn.Module, wrapped: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The largest submodules that are called as a whole and contain no wrapped module."""
    for child in module.children():
        if child in wrapped:
            continue
        is_called = type(child).forward is not nn.Module.forward
        if is_called and not any(inner in wrapped for inner in child.modules()):
            yield child
        else:
            yield from _parts(child, wrapped)
