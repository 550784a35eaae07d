"""What autograd saves of streamed weights: notes of their places instead of their values.

Backward finds a weight, a view of it or autocast's copy of it in the memory that its block has by
then, so that saved tensors keep no weight on the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from oomph.errors import BadInput
from oomph.techniques.weight_blocks import Unit, numbers_in
from oomph.torch_compat.autograd import top_saved_tensors_hooks
from oomph.torch_compat.dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.storages import cdata_of
from oomph.torch_compat.tensors import version_of


@dataclass(frozen=True, kw_only=True)
class _Cast:
    """Autocast's copy of a weight."""

    unit: Unit
    parameter: nn.Parameter
    version: int
    """The version of the copy; if it changed, the copy was written to."""
    storage: weakref.ref[Any]


@dataclass(frozen=True, kw_only=True)
class _Note:
    """What autograd keeps instead of a weight."""

    unit: Unit
    parameter: nn.Parameter
    version: int
    """The version of the host's values in forward."""
    is_cast: bool
    """Whether the tensor was a copy of the weight in another dtype, not a view of it."""
    dtype: torch.dtype
    view: tuple[tuple[int, ...], tuple[int, ...], int]


class SavedWeights:
    """Notes what a block's forward saves; `need` brings a block's weights for backward."""

    def __init__(self, need: Callable[[Unit], None]) -> None:
        self._need = need
        #: By storage: the block whose memory it is; and autocast's copies of weights.
        self._memories: dict[int, Unit] = {}
        self._casts: dict[int, _Cast] = {}

    def came(self, unit: Unit, memory: Tensor) -> None:
        """A block has this memory on the GPU from now on."""
        self._memories[storage_key(memory)] = unit

    def left(self, memory: Tensor) -> None:
        """The memory is no block's any more."""
        del self._memories[storage_key(memory)]

    def noting_casts(self) -> contextlib.AbstractContextManager[Any]:
        """While active, autocast's copies of weights are noted."""
        return _WatchedCasts(self._note_cast)

    @contextlib.contextmanager
    def noting(self, unit: Unit) -> Iterator[None]:
        """While active, saved weights become notes; other tensors go to the outer saving hooks."""
        outer = top_saved_tensors_hooks(False)
        pack_rest, unpack_rest = outer or (_as_it_is, _as_it_is)

        def pack(tensor: Tensor) -> Any:
            return self._note(tensor) or pack_rest(tensor)

        def unpack(kept: Any) -> Any:
            # For any tensor: a recomputed block unpacks its inputs, and then needs its weights.
            self._need(unit)
            return self._tensor(kept) if isinstance(kept, _Note) else unpack_rest(kept)

        with saved_tensors_hooks(pack, unpack):
            yield

    def _note(self, tensor: Tensor) -> _Note | None:
        """A note of the weight that a tensor shows, if it shows one."""
        if is_traceable_wrapper_subclass(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        key = storage_key(tensor)
        unit, cast = self._memories.get(key), self._casts.get(key)
        if unit is not None:
            parameter = unit.parameter_at(int(tensor.storage_offset()) * tensor.element_size())
        elif cast is not None and version_of(tensor) == cast.version:
            unit, parameter = cast.unit, cast.parameter
        else:
            return None
        return _Note(
            unit=unit,
            parameter=parameter,
            version=unit.versions[parameter],
            is_cast=unit is not self._memories.get(key),
            dtype=tensor.dtype,
            view=(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())),
        )

    def _tensor(self, note: _Note) -> Tensor:
        """The tensor that a note stands for."""
        if not note.unit.is_here:
            self._need(note.unit)
        unit, parameter = note.unit, note.parameter
        if unit.versions[parameter] != note.version:
            raise BadInput(
                f"a weight {list(parameter.shape)} of {unit.path} was changed after the forward"
                " whose backward needs it: go backward before the optimizer steps"
            )
        assert unit.memory is not None
        with torch.no_grad():
            if note.is_cast:
                again = unit.places[parameter].view(unit.memory).to(note.dtype)
            else:
                again = numbers_in(unit.memory, note.dtype, unit.numbers)
            return again.as_strided(*note.view)

    def _note_cast(self, source: Tensor, cast: Tensor) -> None:
        """Remember that a tensor is a copy of a weight in another dtype."""
        unit = self._memories.get(storage_key(source))
        if unit is None or cast.stride() != source.stride():
            return
        start = int(source.storage_offset()) * source.element_size()
        parameter = unit.parameter_at(start)
        place = unit.places[parameter]
        if place.offset == start and place.shape == source.shape and place.dtype == source.dtype:
            storage = cast.untyped_storage()
            key = cdata_of(storage)
            # The entry is removed with the storage, because another one may reuse its address.
            forget = functools.partial(_forget, weakref.ref(self), key)
            self._casts[key] = _Cast(
                unit=unit,
                parameter=parameter,
                version=version_of(cast),
                storage=weakref.ref(storage, forget),
            )


class _WatchedCasts(TorchDispatchMode):
    """Reports every tensor that is a copy of another one in another dtype."""

    def __init__(self, tell: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype != args[0].dtype:
            self._tell(args[0], out)
        return out


def _forget(saved: weakref.ref[SavedWeights], key: int, _: Any) -> None:
    if (alive := saved()) is not None:
        alive._casts.pop(key, None)


def storage_key(tensor: Tensor) -> int:
    """A key that is the same for all views of one storage, while the storage lives."""
    with DisableTorchFunction():
        key: int = cdata_of(tensor.untyped_storage())
        return key


def _as_it_is(kept: Any) -> Any:
    return kept
