"""Offloaded weights used outside of their block: each use gets a temporary copy on the GPU.

A loss may add the norms of all parameters, a block may read another's weights, a training loop may
average or clip weights between steps. Each PyTorch function that is called with an offloaded weight
gets a copy of it on the GPU, whose gradient flows to the weight. Autograd saves a note instead of
the copy, and backward fetches the weight again. So only one such weight at a time is on the GPU.

Writes to the copy are written back to the weight. A result that shares memory with the copy, such
as `p.data` or `p.detach()`, becomes an alias that holds no data itself: it is watched like the
weight, and each use of it reads or writes the weight.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from oomph.errors import BadInput
from oomph.techniques.host_tensors import no_number
from oomph.techniques.users_line import users_line
from oomph.techniques.watched_tensors import Call, is_watched, own_work, unwatch, watch
from oomph.torch_compat.autograd import hooks_are_allowed, top_saved_tensors_hooks
from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.pytree import tree_map
from oomph.torch_compat.storages import cdata_of
from oomph.torch_compat.tensors import set_versions, version_of

_ALIAS = "_oomph_alias"
#: Functions that need a tensor's own memory, which an offloaded weight does not have.
_NEEDS_MEMORY = {
    Tensor.data_ptr: "data_ptr",
    Tensor.untyped_storage: "untyped_storage",
    Tensor.storage: "storage",
    Tensor.set_: "set_",
    Tensor.resize_: "resize_",
    Tensor.share_memory_: "share_memory_",
    torch.utils.swap_tensors: "swap_tensors",
}


class AwayWeights(Protocol):
    """The owner of offloaded weights."""

    def holds(self, parameter: Tensor) -> bool:
        """Whether a parameter is offloaded."""

    def brought(self, parameter: nn.Parameter, version: int | None = None) -> Tensor:
        """A copy of the weight on the GPU; raises if it is no longer at the given version."""

    def version(self, parameter: nn.Parameter) -> int:
        """How often the weight was changed."""

    def write(self, parameter: nn.Parameter, numbers: Tensor) -> None:
        """Overwrite a parameter's values."""

    def name(self, parameter: nn.Parameter) -> str:
        """The parameter's name in the model."""


@dataclass(frozen=True, kw_only=True)
class _View:
    """A tensor's layout in the memory of a copy."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        return cls(
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def on(self, numbers: Tensor) -> Tensor:
        """The same view of another copy with the same memory layout."""
        if numbers.dtype != self.dtype:
            flat = numbers.as_strided((numbers.numel(),), (1,), 0)
            numbers = flat.view(self.dtype)
        return numbers.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, kw_only=True)
class _Alias:
    """Another tensor that shares memory with a weight."""

    parameter: nn.Parameter
    view: _View


@dataclass(frozen=True, kw_only=True, eq=False, weakref_slot=True, slots=True)
class _Note:
    """The note that autograd saves instead of a copy."""

    parameter: nn.Parameter
    version: int
    view: _View


@dataclass(kw_only=True, eq=False)
class _Visit:
    """A copy of a weight on the GPU, while a function uses it."""

    parameter: nn.Parameter
    numbers: Tensor
    storage: int
    at_first: int
    """The version of the copy before the function ran."""
    version: int
    """How often the weight had been changed by then."""
    with_history: Tensor | None = None
    """The same copy, attached to autograd: its gradient flows to the weight."""

    @property
    def was_written(self) -> bool:
        shown = self.with_history if self.with_history is not None else self.numbers
        replaced = _storage(self.numbers) != self.storage or _storage(shown) != self.storage
        return version_of(self.numbers) != self.at_first or replaced

    @property
    def result(self) -> Tensor:
        """The weight's new values."""
        shown = self.with_history if self.with_history is not None else self.numbers
        return shown if _storage(shown) != self.storage else self.numbers


class AwayReads:
    """Serves uses of offloaded weights."""

    def __init__(self, weights: AwayWeights) -> None:
        # Watched tensors reference this object, so it references their owner only weakly.
        self._weights: weakref.ref[AwayWeights] = weakref.ref(weights)
        #: The notes that backward may still read.
        self._notes: defaultdict[Tensor, weakref.WeakSet[_Note]] = defaultdict(weakref.WeakSet)

    def is_noted(self, parameter: Tensor) -> bool:
        """Whether backward may still read a weight that was used outside of its block."""
        return parameter in self._notes and len(self._notes[parameter]) > 0

    def around(self, tensors: Sequence[Tensor], func: Any, call: Call) -> Call:
        """Wrap a call so that it runs on copies of these weights and writes go back to them."""
        weights = self._weights()
        away = [t for t in tensors if weights is not None and weights.holds(_parameter_of(t))]
        for tensor in tensors:
            if all(tensor is not one for one in away):
                _give_back(tensor)
        if weights is None or not away:
            return call
        if func in _NEEDS_MEMORY:
            self._refuse(weights, away[0], f"its {_NEEDS_MEMORY[func]} was asked for")
        alive = weights

        def used(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            visits = {id(p): _visit(alive, p) for p in dict.fromkeys(map(_parameter_of, away))}
            given = {id(tensor): _stand_in(tensor, visits) for tensor in away}

            def replaced(leaf: Any) -> Any:
                return given.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

            with self._saving(list(visits.values()), alive):
                result = call(*tree_map(replaced, (args, kwargs)))
            for visit in visits.values():
                if visit.was_written:
                    self._take_back(alive, visit)
            originals = {id(given[id(tensor)]): tensor for tensor in away}
            by_storage = {visit.storage: visit for visit in visits.values()}
            return tree_map(lambda leaf: self._seen(leaf, originals, by_storage), result)

        return used

    @contextlib.contextmanager
    def _saving(self, visits: Sequence[_Visit], weights: AwayWeights) -> Iterator[None]:
        """Autograd saves notes instead of copies; outer saved-tensor hooks handle the rest."""
        if not torch.is_grad_enabled() or not _hooks_are_allowed():
            yield
            return
        outer = top_saved_tensors_hooks(False)
        pack_rest, unpack_rest = outer or (_as_it_is, _as_it_is)
        by_storage = {visit.storage: visit for visit in visits}

        def pack(tensor: Tensor) -> Any:
            visit = by_storage.get(_storage(tensor))
            if visit is None or tensor.is_conj() or tensor.is_neg():
                return pack_rest(tensor)
            view = _View.of(tensor)
            note = _Note(parameter=visit.parameter, version=visit.version, view=view)
            self._notes[visit.parameter].add(note)
            return note

        def unpack(kept: Any) -> Any:
            if not isinstance(kept, _Note):
                return unpack_rest(kept)
            with own_work(), torch.no_grad():
                return kept.view.on(weights.brought(kept.parameter, kept.version))

        with saved_tensors_hooks(pack, unpack):
            yield

    def _seen(self, leaf: Any, originals: dict[int, Tensor], visits: dict[int, _Visit]) -> Any:
        """What the caller gets for a result: an alias if the result shares memory with a copy."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in originals and not leaf.requires_grad:
            return originals[id(leaf)]
        visit = visits.get(_storage(leaf))
        if visit is None or leaf.requires_grad:
            return leaf
        view = _View.of(leaf)
        with torch.no_grad(), torch.inference_mode(False):
            alias = no_number(leaf.dtype, leaf.device).expand(leaf.shape).detach()
        alias.__dict__[_ALIAS] = _Alias(parameter=visit.parameter, view=view)
        watch(alias, self)
        return alias

    def _take_back(self, weights: AwayWeights, visit: _Visit) -> None:
        """Write the copy's new values back to the weight."""
        parameter, shown, result = visit.parameter, visit.with_history, visit.result
        if shown is not None and result is visit.numbers:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation."
            )
        if result.shape != parameter.shape or result.dtype != parameter.dtype:
            self._refuse(
                weights, parameter, f"it was given data of {result.dtype}{[*result.shape]}"
            )
        if result.device != parameter.device:
            self._refuse(weights, parameter, f"it was given data on {result.device}")
        with own_work(), torch.no_grad():
            weights.write(parameter, result.detach())
            # The version tells holders of derived values, such as a master, of the write.
            set_versions((parameter,), (version_of(parameter) + 1,))

    def _refuse(self, weights: AwayWeights, tensor: Tensor, why: str) -> None:
        parameter = _parameter_of(tensor)
        raise BadInput(
            f"the weight {weights.name(parameter)} is off the GPU, which its memory cannot be for"
            f" this: {why}, by {users_line()}; undo the run before, or plan without weights away"
        )


class _Brought(torch.autograd.Function):
    """A copy of an offloaded weight, whose gradient flows to the weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(parameter: Tensor, bring: Callable[[], Tensor]) -> Tensor:
        return bring()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _visit(weights: AwayWeights, parameter: nn.Parameter) -> _Visit:
    with own_work(), torch.no_grad(), torch.inference_mode(False):
        numbers = weights.brought(parameter)
    version = weights.version(parameter)  # bringing it may complete its step
    return _Visit(
        parameter=parameter,
        numbers=numbers,
        storage=_storage(numbers),
        at_first=version_of(numbers),
        version=version,
    )


def _stand_in(tensor: Tensor, visits: dict[int, _Visit]) -> Tensor:
    """The tensor that a function gets in place of a weight or an alias."""
    visit = visits[id(_parameter_of(tensor))]
    alias: _Alias | None = tensor.__dict__.get(_ALIAS)
    if alias is not None:
        with torch.no_grad():
            return alias.view.on(visit.numbers)
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return visit.numbers
    if visit.with_history is None:
        numbers = visit.numbers.detach()
        with own_work():
            visit.with_history = _Brought.apply(tensor, lambda: numbers)
    assert visit.with_history is not None
    return visit.with_history


def _hooks_are_allowed() -> bool:
    """Whether saved-tensor hooks are allowed; some `torch.func` transforms forbid them."""
    return bool(hooks_are_allowed())


def _give_back(tensor: Tensor) -> None:
    """Stop watching a tensor whose weight is back; an alias shares the weight's memory again."""
    alias: _Alias | None = tensor.__dict__.pop(_ALIAS, None)
    unwatch(tensor)
    if alias is not None:
        parameter = alias.parameter
        # The weight has the same memory layout as its copies, at any offset.
        with torch.no_grad():
            flat = alias.view.on(parameter.detach()) if not is_watched(parameter) else parameter
            tensor.data = flat


def _parameter_of(tensor: Tensor) -> nn.Parameter:
    alias: _Alias | None = tensor.__dict__.get(_ALIAS)
    found = alias.parameter if alias is not None else tensor
    assert isinstance(found, nn.Parameter)
    return found


def _storage(tensor: Tensor) -> int:
    with DisableTorchFunction():
        key: int = cdata_of(tensor.untyped_storage())
        return key


def _as_it_is(kept: Any) -> Any:
    return kept
