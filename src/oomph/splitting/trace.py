"""Records the ops of one forward, with their tensors' shapes and memory locations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oomph.rehearsal.recorder import Recorder
from oomph.torch_compat.dispatch import TorchDispatchMode, disable_current_modes
from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.operators import schema_of
from oomph.torch_compat.pytree import tree_flatten, tree_leaves
from oomph.torch_compat.storages import cdata_of

aten = torch.ops.aten

#: Constants of up to this many numbers are compared between two forwards.
MOST_CONSTANTS = 64
#: By type: the factor by which an unknown number that Python reads is changed in the second
#: forward. If both forwards then do the same, the number decided nothing.
OTHERWISE = {float: 2.375, int: 3}

#: The location of a tensor's numbers: storage, offset, shape, strides.
Place = tuple[int, int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor as an op saw it."""

    place: Place
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.place[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One op of a forward."""

    func: Any
    given: dict[str, Any]
    """The op's arguments by name, defaults included, with `Seen` for tensors."""
    results: tuple[Any, ...]
    module: str
    """The module that ran the op."""

    def tensors(self) -> Iterator[Seen]:
        """The tensors among the arguments."""
        return (leaf for leaf in tree_leaves(list(self.given.values())) if isinstance(leaf, Seen))

    def made(self) -> Iterator[Seen]:
        """The tensors among the results."""
        return (leaf for leaf in self.results if isinstance(leaf, Seen))


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A tensor that no op of the forward made."""

    is_parameter: bool
    numbers: tuple[float, ...] | None
    """The tensor's contents, if it is a small constant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWise:
    """A call of a module that processes each token independently."""

    end: int
    """The index of the step after the call's last one."""
    given: tuple[Seen, ...]
    made: Seen


@dataclass(kw_only=True)
class Trace:
    """All that one forward did."""

    samples: int
    steps: list[Step] = field(default_factory=list)
    origins: dict[Place, Origin] = field(default_factory=dict)
    leaves: dict[Place, Any] = field(default_factory=dict)
    """The paths, in the batch, of its tensors."""
    read: list[tuple[int, Seen, bool]] = field(default_factory=list)
    """Each read of a tensor by Python: the number of steps before it, the tensor, and whether a
    boolean was requested."""
    loss: Seen | None = None
    token_wise: dict[int, TokenWise] = field(default_factory=dict)
    """Calls of modules that process each token independently, by their first step."""
    custom_functions: list[str] = field(default_factory=list)
    """Names of `torch.autograd.Function`s with a backward of their own."""


class Tracing(TorchDispatchMode):
    """Records the ops of everything that runs inside."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: a rehearsal compiles nothing for real."""
        return False

    def __init__(
        self, trace: Trace, recorder: Recorder, numbers: Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        self.trace = trace
        #: Numbers that Python read in this forward; a second forward gets them as `numbers`.
        self.numbers: list[Any] = []
        self._told = numbers
        self._recorder = recorder
        #: Keeps storages alive, so that no two of them share an address.
        self._kept: dict[int, Any] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))  # which device a tensor is on tells no number
        with DisableTorchFunction():
            given = _by_name(func, args, kwargs or {})
            seen = {name: self._see_all(value) for name, value in given.items()}
            out = func(*args, **(kwargs or {}))
            if func in (aten._local_scalar_dense.default, aten.item.default):
                out = self._number(given["self"], out)
            results = tuple(self._result(leaf) for leaf in tree_flatten(out)[0])
            self.trace.steps.append(
                Step(
                    func=func,
                    given=seen,
                    results=results,
                    module=self._recorder.current_module,
                )
            )
            return out

    def see(self, tensor: Tensor) -> Seen:
        """The record of a tensor."""
        with DisableTorchFunction():
            storage = tensor.untyped_storage()
            key = cdata_of(storage)
            self._kept.setdefault(key, storage)
            place = (key, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
            if key not in self._made and place not in self.trace.origins:
                self.trace.origins[place] = Origin(
                    is_parameter=isinstance(tensor, nn.Parameter),
                    numbers=self._numbers_of(tensor),
                )
            return Seen(place, tensor.dtype)

    def _see_all(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.see(value)
        if isinstance(value, (list, tuple)):
            return [self._see_all(item) for item in value]
        return value

    def _result(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        key = cdata_of(leaf.untyped_storage())
        if key not in self._kept:
            self._made.add(key)
        return self.see(leaf)

    def _numbers_of(self, tensor: Tensor) -> tuple[float, ...] | None:
        if tensor.numel() > MOST_CONSTANTS or isinstance(tensor, nn.Parameter):
            return None
        real = self._recorder.values.of(tensor)
        if real is None:
            return None
        with disable_current_modes():
            return tuple(real.flatten().tolist()) if not real.is_complex() else None

    def _number(self, tensor: Tensor, number: Any) -> Any:
        """Choose the number that Python reads.

        In the second forward it is the number read in the first if the value is known, else a
        changed one.
        """
        at = len(self.numbers)
        is_known = self._recorder.values.of(tensor) is not None
        if self._told is not None and at < len(self._told):
            told = self._told[at]
            number = told if is_known else told * OTHERWISE.get(type(told), 1)
        self.numbers.append(number)
        return number


def _by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = {}
    for at, argument in enumerate(schema_of(func).arguments):
        if at < len(args):
            given[argument.name] = args[at]
        elif argument.name in kwargs:
            given[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            given[argument.name] = argument.default_value
    return given
