"""Detect writes to tensors op by op, and copy the memory before its first write.

Version counters are not enough: a write through `.data` does not change them, and neither do the
kernels of batch norm. So the schema of every op is checked for the arguments that it writes to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.techniques.watched_tensors import is_own_work
from oomph.torch_compat.dispatch import TorchDispatchMode, disable_current_modes
from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.operators import schema_of
from oomph.torch_compat.pytree import tree_leaves
from oomph.torch_compat.storages import cdata_of

#: Arguments that batch norm kernels write to although their schemas do not say so.
_STATISTICS = ("running_mean", "running_var")


def storage_of(tensor: Tensor) -> int:
    """A key that is the same for all views of one storage, while the storage lives."""
    with DisableTorchFunction():
        key: int = cdata_of(tensor.untyped_storage())
        return key


def stream_of(generator: torch.Generator) -> int:
    """A key that is the same for all Python objects of one generator."""
    key: int = cdata_of(generator)
    return key


def state_of(generator: torch.Generator) -> Tensor:
    """A generator's state, as a real tensor even in a rehearsal."""
    with disable_current_modes():
        return generator.get_state()


def written_by(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among an op's arguments that it writes to."""
    arguments = schema_of(func).arguments
    given = {**dict(zip((one.name for one in arguments), args, strict=False)), **kwargs}
    updates = bool(given.get("training", given.get("train")))
    for one in arguments:
        declared = one.alias_info is not None and one.alias_info.is_write
        if declared or (updates and one.name in _STATISTICS):
            value = given.get(one.name)
            for leaf in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(leaf, Tensor):
                    yield leaf


class TensorWrites(TorchDispatchMode):
    """While active, records writes to `known` tensors and to other tensors that existed before.

    The contents of a known tensor's memory are copied before its first write; if `kept` has them
    already, writes to it are not recorded.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: what is compiled inside stays compiled."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Yes: compiled code counts as one op, and the kernels inside are not seen."""
        return True

    def __init__(self, known: Iterable[Tensor], *, kept: dict[int, Kept] | None = None) -> None:
        super().__init__()
        #: By storage: a known tensor that lies there.
        self._known: dict[int, Tensor] = {}
        for tensor in known:
            self._known.setdefault(storage_of(tensor), tensor)
        #: The storages of known tensors that were written to.
        self.written: set[int] = set()
        #: By storage: its contents before the first write.
        self.kept: dict[int, Kept] = {} if kept is None else kept
        #: Ops that wrote to memory that existed before but is not known.
        self.elsewhere: list[str] = []
        #: Generators that were given to an op, by stream, and their state before.
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        #: Unknown weights that were read. A dict, as a set would compare tensors of equal hashes.
        self._foreign: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        #: By storage: what stands for a known tensor in a rehearsal, and that tensor's storage. A
        #: view of a real tensor is a fake one there, and so is what an op in place returns.
        self._stand_ins: dict[int, tuple[int, torch.UntypedStorage]] = {}
        #: Memory that was allocated while this is active, as long as it lives.
        self._own: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )

    @property
    def foreign(self) -> list[Tensor]:
        """Unknown weights that were read."""
        return list(self._foreign.values())

    def put_back(self) -> None:
        """Restore the contents of all memory that was written to."""
        for key, kept in self.kept.items():
            kept.put_back(self._known[key])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_own_work():
            out = func(*args, **kwargs)
            self._remember(func, args, kwargs, out)
            return out
        if schema_of(func).is_mutable or "batch_norm" in schema_of(func).name:
            for tensor in written_by(func, args, kwargs):
                self._before_write(func, tensor)
        generator = kwargs.get("generator")
        if generator is not None and stream_of(generator) not in self.generators:
            self.generators[stream_of(generator)] = generator, state_of(generator)
        for leaf in args:
            if isinstance(leaf, torch.nn.Parameter) and storage_of(leaf) not in self._known:
                self._foreign[id(leaf)] = leaf
        out = func(*args, **kwargs)
        self._remember(func, args, kwargs, out)
        return out

    def _before_write(self, func: Any, tensor: Tensor) -> None:
        key = self._key_of(tensor)
        if key not in self._known:
            if key not in self._own and tensor.numel():
                self.elsewhere.append(str(func))
            return
        if key not in self.kept:
            self.written.add(key)
            self.kept[key] = Kept(self._known[key])

    def _key_of(self, tensor: Tensor) -> int:
        """The storage that a write to this tensor is one to."""
        key = storage_of(tensor)
        return self._stand_ins[key][0] if key in self._stand_ins else key

    def _remember(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record memory that an op allocated: writes to it do not matter."""
        shown = _shown_by(func, args, kwargs)
        source = self._key_of(shown) if shown is not None else None
        fresh = func is torch.ops.aten.lift_fresh.default
        given: set[int] | None = None
        for leaf in tree_leaves(out):
            if not isinstance(leaf, Tensor):
                continue
            key = storage_of(leaf)
            if key in self._own or key in self._known:
                continue
            if source in self._known:
                self._stand_ins[key] = source, leaf.untyped_storage()
            if source is not None and source not in self._own and not fresh:
                continue
            if given is None:
                leaves = tree_leaves((args, kwargs))
                given = {storage_of(one) for one in leaves if isinstance(one, Tensor)}
            if fresh or key not in given:
                self._own[key] = leaf.untyped_storage()


def _shown_by(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor whose memory an op's result is: what it views, or what it wrote to."""
    if schema_of(func).is_mutable:
        return next(written_by(func, args, kwargs), None)
    shown = args[0] if func.is_view and args else None
    return shown if isinstance(shown, Tensor) else None


class Kept:
    """A copy of the memory of a tensor at one moment."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = _whole(tensor).clone()

    def put_back(self, tensor: Tensor) -> None:
        """Write the copy back to a tensor's memory, without a new version."""
        _whole(tensor).copy_(self._copy)

    def renewed(self) -> Tensor:
        """A fresh copy of that memory, as a flat tensor."""
        return self._copy.clone()


@dataclass(frozen=True, kw_only=True)
class View:
    """How a tensor views its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    wants_gradient: bool
    is_parameter: bool

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """The view of this tensor."""
        return cls(
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            wants_gradient=tensor.requires_grad,
            is_parameter=isinstance(tensor, torch.nn.Parameter),
        )

    def on(self, memory: Tensor, *, may_be_written: bool = False) -> Tensor:
        """The same view of other memory; `may_be_written` allows in-place writes under autograd."""
        same = memory if memory.dtype is self.dtype else memory.view(self.dtype)
        shown = same.as_strided(self.shape, self.stride, self.offset)
        if self.is_parameter:
            return torch.nn.Parameter(shown, requires_grad=self.wants_gradient)
        if not may_be_written or not self.wants_gradient:
            return shown.requires_grad_(self.wants_gradient)
        # Not a leaf: leaves must not be written in place. Adding -0.0 changes no value.
        nothing = torch.tensor(-0.0, dtype=self.dtype, device=memory.device, requires_grad=True)
        return shown.add_(nothing)


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's memory, as a flat tensor."""
    flat = tensor.detach()
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    # Through .data: graphs that saved the tensor for backward saved the contents that are restored.
    return flat.data.as_strided((elements,), (1,), 0)
