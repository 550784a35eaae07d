"""Activation offload: what a block saves for backward waits outside the GPU until it is needed.

While an offloaded block runs forward, each tensor that autograd saves starts to leave as soon as it
is saved, and autograd keeps a note instead. The model is seen as a sequence of *parts*: its blocks,
and whatever else it calls between them. When the part after the block ends, the copies are waited
for and the GPU's memory is given back; when that part's backward begins, they start to come back.
So a block's copies have the time of a part to hide behind, each way. Both moments are given by the
program, not by how fast the link happens to be: a rehearsal finds them where they are for real.
It waits in host memory, or on the disk behind it, which is told when forward ends what comes next.

Memory is told apart by storage. Views of one leave once and come back as the same views; what two
blocks save leaves once for both; what the model owns or was given stays, for it would not be freed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from oomph.host.link import Link
from oomph.host.parked import HostParking, Parked
from oomph.host.parked_on_disk import DiskParking
from oomph.host.slots import OpenSlots
from oomph.techniques.recompute import replace_forward
from oomph.techniques.technique import Undo

#: Weakly: weights that are streamed give their memory back, and an activation may then have it.
_Storages = weakref.WeakSet[torch.UntypedStorage]

#: Bytes below which a tensor stays: starting its copies takes longer than they do.
SMALLEST = 1 << 18


class ActivationOffload:
    """Moves what blocks of one model save to the host and back, or to the disk that it opens."""

    def __init__(
        self,
        link: Link,
        model: nn.Module,
        *,
        device_type: str = "cuda",
        smallest: int = SMALLEST,
        disk: OpenSlots | None = None,
    ) -> None:
        self._model = model
        self._device_type = device_type
        self._smallest = smallest
        self._parking = HostParking(link) if disk is None else DiskParking(disk)
        #: What is parked, for as long as somebody holds the memory that it was copied from.
        self._parked: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.ref[Parked]] = (
            weakref.WeakKeyDictionary()
        )
        #: Calls whose copies nobody has waited for yet.
        self._leaving: list[_Call] = []
        #: Those of the forward that runs, in their order; None while none does.
        self._calls: list[_Call] | None = None
        self._wrapped: dict[nn.Module, _Wrapped] = {}
        #: Storages that others hold while the model runs: its parameters, its buffers, its inputs.
        self._held: _Storages | None = None
        self._follows: list[Any] = []
        self._watches = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def wrap(self, block: nn.Module, which: Collection[int] | None = None, *, lag: int = 1) -> Undo:
        """Offload what `block` saves, or of that what `which` names by its order of saving.

        To be called after the block was made to recompute itself or was compiled: what is saved
        then is what such a block saves, which is its inputs where all of it is recomputed. `lag`
        is how many parts of the model its copies have time for, both ways.
        """
        assert lag >= 1, "copies need the time of at least one part"
        wrapped = _Wrapped(block, None if which is None else frozenset(which), lag)
        put_back = replace_forward(block, functools.partial(self._run, wrapped))
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
        """Bytes of each memory that `block` saved in its last forward, in the order of saving."""
        return tuple(self._wrapped[block].sizes)

    def undo(self) -> None:
        """Give every block its forward back and free the memory outside the GPU.

        A graph that is still to go backward keeps what it needs of it until then.
        """
        for wrapped in reversed(list(self._wrapped.values())):
            wrapped.undo()
        for watch in self._watches:
            watch.remove()
        self._leave(self._leaving)
        self._parking.clear()
        self._parked.clear()

    # -- forward ----------------------------------------------------------------------------------

    def _run(self, wrapped: _Wrapped, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return wrapped.forward(*args, **kwargs)
        args, kwargs = wrapped.arranged(args, kwargs)
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

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model's forward begins."""
        if torch.is_grad_enabled():
            self._calls = []
            self._parking.expect(())
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._held = _owned_by(model) | _storages(inputs)
        if not self._follows:
            # Found anew after each change: a block that is wrapped is no longer part of another.
            self._follows = [
                part.register_forward_hook(self._part_ended)
                for part in set(_parts(self._model, self._wrapped))
            ]

    def _part_ended(self, _: nn.Module, __: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            due = self._due()
            self._leave(due)
            _on_gradient(output, due)

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        """The model's forward ended, or failed: nothing may be left under way."""
        self._held = None
        due = list(self._leaving)
        self._leave(due)
        _on_gradient(output, due)
        calls, self._calls = self._calls, None
        if calls is not None:
            self._parking.expect(parked for call in reversed(calls) for parked in call.coming())

    def _due(self, *, but: _Call | None = None) -> list[_Call]:
        """The calls whose time for copying is over, now that another part ended."""
        others = [call for call in self._leaving if call is not but]
        for call in others:
            call.lag -= 1
        return [call for call in others if call.lag <= 0]

    def _leave(self, calls: Iterable[_Call]) -> None:
        for call in list(calls):
            self._leaving.remove(call)
            call.leave()

    def _unfollow(self) -> None:
        for follow in self._follows:
            follow.remove()
        self._follows = []

    # -- memory -----------------------------------------------------------------------------------

    def find_or_park(self, tensor: Tensor, position: object) -> tuple[Parked, bool]:
        """What is parked of this tensor's memory, and whether it was parked only now."""
        storage = tensor.untyped_storage()
        known = self._parked.get(storage)
        parked = known() if known is not None else None
        if parked is not None and parked.holds(tensor):
            return parked, False
        parked = self._parking.park(tensor, position)
        self._parked[storage] = weakref.ref(parked)
        return parked, True

    def may_leave(self, tensor: Tensor, owned_by_block: _Storages) -> bool:
        """Whether this is an activation on the GPU that can be copied as it is."""
        if (
            tensor.device.type != self._device_type
            or tensor.layout is not torch.strided
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
        if self._held is None:  # somebody calls the block without the model
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
        self._signature = _recomputed_signature(self.forward)

    def arranged(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The call's arguments, as many as possible by position.

        A recomputed block saves tensors that are given by position; one that is given by name is
        held by the function that recomputes, where nobody sees it.
        """
        if self._signature is None or not kwargs:
            return args, kwargs
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return args, kwargs  # the call itself will say what is wrong
        return bound.args, bound.kwargs


class _Call:
    """One forward of an offloaded block."""

    def __init__(self, offload: ActivationOffload, wrapped: _Wrapped) -> None:
        self.lag = wrapped.lag
        self.sizes: list[int] = []
        self._offload = offload
        self._wrapped = wrapped
        # Anew for each call: weights that are streamed are elsewhere each time.
        self._owned = _owned_by(wrapped.block)
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = (
            weakref.WeakKeyDictionary()
        )
        self._leaving: list[Parked] = []
        #: What was saved, without keeping it: the graph does.
        self._saved: list[weakref.ref[Parked]] = []

    def pack(self, tensor: Tensor) -> Tensor | _Note:
        """Called by autograd with each tensor that it saves."""
        if not self._offload.may_leave(tensor, self._owned):
            return tensor
        number, nbytes = self._number_of(tensor), tensor.untyped_storage().nbytes()
        which = self._wrapped.which
        if not self._offload.is_worth_it(nbytes) or (which is not None and number not in which):
            return tensor
        parked, is_new = self._offload.find_or_park(tensor, (self._wrapped.block, number))
        if is_new:
            self._leaving.append(parked)
        if not any(saved() is parked for saved in self._saved):
            self._saved.append(weakref.ref(parked))
        return _Note(parked, tensor)

    def leave(self) -> None:
        """Give the GPU's memory back."""
        for parked in self._leaving:
            parked.leave()
        self._leaving.clear()

    def fetch(self) -> None:
        """Start to bring everything back, what was saved last first."""
        for parked in self.coming():
            parked.fetch()

    def coming(self) -> Iterator[Parked]:
        """All that backward will want, in this order."""
        return (parked for saved in reversed(self._saved) if (parked := saved()) is not None)

    def _number_of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = len(self.sizes)
            self.sizes.append(storage.nbytes())
        return number


class _Note:
    """What autograd keeps instead of a tensor: where its memory is, and which view of it it is."""

    def __init__(self, parked: Parked, tensor: Tensor) -> None:
        self._parked = parked
        self._dtype = tensor.dtype
        self._view = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        self._is_wanted = True
        parked.want()

    def tensor(self) -> Tensor:
        first, self._is_wanted = self._is_wanted, False
        flat = self._parked.take(first=first)
        same = flat if flat.dtype is self._dtype else flat.view(self._dtype)
        return same.as_strided(*self._view)

    def __del__(self) -> None:
        if self._is_wanted:
            self._parked.unwant()


def _unpack(kept: Tensor | _Note) -> Tensor:
    return kept.tensor() if isinstance(kept, _Note) else kept


def _on_gradient(output: Any, calls: list[_Call]) -> None:
    """Have these calls' tensors fetched when the backward of what made `output` begins."""
    if not calls:
        return

    def fetch(_: Tensor) -> None:
        for call in calls:
            call.fetch()

    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and _is_plain(leaf) and leaf.grad_fn is not None:
            leaf.register_hook(fetch)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is no tensor of a kind that answers for itself, such as logits not yet there."""
    function = type(tensor).__torch_function__
    return (
        function is torch._C._disabled_torch_function_impl or function == Tensor.__torch_function__
    )


def _owned_by(module: nn.Module) -> _Storages:
    """The storages of a module's parameters and buffers."""
    return _storages(itertools.chain(module.parameters(), module.buffers()))


def _storages(tensors: Iterable[Tensor]) -> _Storages:
    return weakref.WeakSet(tensor.untyped_storage() for tensor in tensors if _is_plain(tensor))


def _parts(module: nn.Module, wrapped: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The largest modules inside that are called as one and have no wrapped module in them."""
    for child in module.children():
        if child in wrapped:
            continue
        is_called = type(child).forward is not nn.Module.forward
        if is_called and not any(inner in wrapped for inner in child.modules()):
            yield child
        else:
            yield from _parts(child, wrapped)


def _recomputed_signature(forward: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of what a recomputed block runs; None where it is not recomputed."""
    if not (isinstance(forward, functools.partial) and forward.func is checkpoint):
        return None
    with contextlib.suppress(TypeError, ValueError):
        return inspect.signature(forward.args[0])
    return None
