"""Calls of PyTorch functions during a forward: which results come from the batch alone, and how.

A loss may divide by a number that it counts in its batch, such as valid tokens or the sum of a
mask. While a part of the batch runs, that number must be the whole batch's. So `Derived` records
the calls that lead from the batch's tensors to such a number; they can then be repeated with the
tensors of the whole batch.

The same code watches the forward that is analysed and every part that really runs.
`BatchCalls.numbers` lets a caller check that both make the same calls: it lists the names of all
calls that reduced tensors to a single number, in order.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from oomph.techniques.watched_tensors import is_own_work
from oomph.torch_compat.function_modes import (
    DisableTorchFunction,
    current_function_mode,
    pop_function_mode,
)
from oomph.torch_compat.operators import OpOverload
from oomph.torch_compat.pytree import (
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from oomph.torch_compat.storages import cdata_of

#: Most Python frames between a dispatch mode and a function mode that sees its calls.
_FRAMES_BETWEEN = 6
#: The longest chain of calls that is recorded.
MOST_CALLS = 400
#: Functions that take sizes as arguments, some of which may depend on the batch size.
_TAKE_SIZES = frozenset(
    [
        "view",
        "reshape",
        "expand",
        "repeat",
        "broadcast_to",
        "unflatten",
        "new_zeros",
        "new_ones",
        "new_full",
        "narrow",
        "tile",
    ]
)
#: Functions that create a tensor whose first size may be the batch size.
_FACTORIES = frozenset(("ones", "zeros", "full"))
#: Methods that write to their first argument although their names do not end in an underscore.
_WRITERS = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__")
)

#: Calls that compute nothing. A branch that hangs on what they read has call sites of its own, and
#: a rehearsal answers them itself.
_NO_SITES = frozenset(
    ("__get__", "__set__", "__bool__", "__int__", "__float__", "__index__", "__len__", "__format__")
) | {"item", "tolist", "numpy", "__array__", "is_nonzero"}

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LAYERS = f"{Path(nn.modules.__file__).parent}{os.sep}"
_OOMPH = f"{Path(__file__).parents[1]}{os.sep}"
#: Files whose functions only forward calls.
_PASS_ON = {
    *(str(Path(module.__file__ or "")) for module in (torch.overrides, torch.functional, F)),
    f"{_TORCH}_tensor.py",
    __file__,
    str(Path(_OOMPH) / "splitting" / "prove.py"),
}


@dataclass(frozen=True, eq=False)
class Derived:
    """A tensor of the batch, or the result of one call on such tensors."""

    path: Any = None
    """Its path in the batch, if it is one of the batch's tensors."""
    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    item: int | None = None
    """Its index among the call's results, if there are several."""
    samples: int = 0
    """The number of samples in the part that it was made from."""
    grown: tuple[int, ...] = ()
    """Indices, among its flattened arguments, of numbers that grow with the number of samples."""
    calls: int = 0

    def of(self, batch: Any, samples: int) -> Tensor:
        """The result of the same calls on another batch with `samples` samples."""
        leaves = dict(tree_flatten_with_path(batch)[0])
        with torch.no_grad():
            made: Tensor = self._evaluate(leaves, samples, {})
        return made

    def others(self) -> Iterator[Tensor]:
        """The input tensors that neither belong to the batch nor derive from it alone."""
        seen: set[int] = set()
        waiting: list[Any] = [self]
        while waiting:
            one = waiting.pop()
            if isinstance(one, Tensor):
                yield one
            elif isinstance(one, Derived) and id(one) not in seen:
                seen.add(id(one))
                waiting += tree_leaves((one.args, dict(one.kwargs or {})), is_leaf=_is_derived)

    def _evaluate(self, leaves: dict[Any, Any], samples: int, done: dict[int, Any]) -> Any:
        if self.func is None:
            return leaves[self.path]
        if id(self) in done:
            return done[id(self)]

        def given(value: Any) -> Any:
            return value._evaluate(leaves, samples, done) if isinstance(value, Derived) else value

        args, kwargs = tree_map(given, (self.args, dict(self.kwargs or {})), is_leaf=_is_derived)
        out = self._call(args, kwargs, samples)
        done[id(self)] = out = out if self.item is None else out[self.item]
        return out

    def _call(self, args: Any, kwargs: Any, samples: int) -> Any:
        assert self.func is not None
        if self.grown:
            leaves, spec = tree_flatten(args)
            for at in self.grown:
                leaves[at] = leaves[at] * samples // self.samples
            args = tree_unflatten(leaves, spec)
        return self.func(*args, **kwargs)


def _is_derived(value: Any) -> bool:
    return isinstance(value, Derived)


def name_of(func: Any) -> str:
    """The name of a function or a property."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


@contextlib.contextmanager
def unwatched() -> Iterator[BatchCalls | None]:
    """Do not watch calls inside, which are not the loss's: oomph's own work, or a compiled block,
    which runs no Python to watch. Yields the outer watcher, if there is one."""
    watching = current_function_mode()
    if not isinstance(watching, BatchCalls):
        yield None
        return
    with pop_function_mode():
        yield watching


class BatchCalls(TorchFunctionMode):
    """Watches the calls of one forward over a batch, or over a part of one."""

    def __init__(self, batch: Any, samples: int) -> None:
        super().__init__()
        #: The names of the calls that returned a single number, in order.
        self.numbers: list[str] = []
        #: Where and how functions were called; a branch taken for the first time adds new ones.
        self.sites: set[Hashable] = set()
        #: The masks that selected elements, in order.
        self.picks: list[Derived | None] = []
        self._samples = samples
        self._known: dict[int, tuple[weakref.ref[Tensor], Derived]] = {}
        for path, leaf in tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, Tensor):
                self._know(leaf, Derived(path=path, samples=samples))

    def derived(self, tensor: Tensor) -> Derived | None:
        """How a tensor was made from the batch; None if it was not."""
        found = self._known.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # For example an optimizer step that runs alongside the forward.
        if is_own_work() or _runs_an_op(func):
            return func(*args, **kwargs)
        if (site := _site_of(func, args, kwargs)) is not None:
            self.sites.add(site)
        out = self.call(func, args, kwargs)
        if isinstance(out, Tensor):
            self._follow(func, args, kwargs, out)
            if out.dim() == 0 and not _is_constant(func, args, kwargs):
                self.numbers.append(name_of(func))
                given, derived = out, self.derived(out)
                out = self.number(len(self.numbers) - 1, out)
                if derived is not None and out is not given:
                    self._know(out, derived)
        elif isinstance(out, (tuple, list)) and out and isinstance(out[0], Tensor):
            self._follow(func, args, kwargs, out)
        elif out is None and name_of(func) in _WRITERS:
            self._follow_write(func, args, kwargs)
        return out

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a call; subclasses may change its result."""
        return func(*args, **kwargs)

    def number(self, at: int, out: Tensor) -> Tensor:
        """The value to use for the `at`-th single number; subclasses may replace it."""
        return out

    def growing(self, name: str, args: Sequence[Any]) -> tuple[int, ...]:
        """Which size arguments of a call grow with the number of samples; see `Derived.grown`."""
        return ()

    def _follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        known = self._known
        if name_of(func) in _FACTORIES and self._follow_factory(func, args, kwargs, out):
            return
        if not any(id(leaf) in known for leaf in _tensors(args, kwargs)):
            return
        name = name_of(func)
        if name in _WRITERS or (name.endswith("_") and not name.endswith("__")):
            self._follow_write(func, args, kwargs)
            return
        if kwargs.get("out") is not None:
            for written in tree_leaves(kwargs["out"]):
                self._forget(written)
            return
        if name in ("__getitem__", "masked_select") and _is_mask(args[1]):
            self.picks.append(self.derived(args[1]))
        given_args, given_kwargs = self._given(args, kwargs)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in _tensors(args, kwargs)):
            return  # made by the model
        ways = [one for one in tree_leaves((given_args, given_kwargs)) if isinstance(one, Derived)]
        if not ways:
            return
        grown = self.growing(name, args) if name in _TAKE_SIZES else ()
        calls = 1 + max(one.calls for one in ways)
        if calls > MOST_CALLS:
            return
        several = not isinstance(out, Tensor)
        for at, one in enumerate(out if several else [out]):
            if isinstance(one, Tensor):
                derived = Derived(
                    func=func,
                    args=given_args,
                    kwargs=given_kwargs,
                    item=at if several else None,
                    samples=self._samples,
                    grown=grown,
                    calls=calls,
                )
                self._know(one, derived)

    def _given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call's arguments, with a `Derived` in place of each tensor made from the batch."""

        def given(value: Any) -> Any:
            derived = self.derived(value) if isinstance(value, Tensor) else None
            return value if derived is None else derived

        return tree_map(given, (tuple(args), kwargs))

    def _follow_write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Record an in-place write as the same write to a copy of the tensor's former value."""
        written = self.derived(args[0])
        given_args, given_kwargs = self._given(args, kwargs)
        self._forget(args[0])
        if written is None or any(tensor.requires_grad for tensor in _tensors(args, kwargs)):
            return
        ways = [one for one in tree_leaves((given_args, given_kwargs)) if isinstance(one, Derived)]
        calls = 1 + max(one.calls for one in ways)
        if calls > MOST_CALLS:
            return

        def write(before: Tensor, *others: Any, **options: Any) -> Tensor:
            copy = before.clone()
            func(copy, *others, **options)
            return copy

        self._know(
            args[0],
            Derived(
                func=write,
                args=given_args,
                kwargs=given_kwargs,
                samples=self._samples,
                calls=calls,
            ),
        )

    def _follow_factory(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> bool:
        """If a call creates a tensor with an entry for each sample, record it and return True."""
        if not out.dim() or out.shape[0] != self._samples or not args:
            return False
        many = isinstance(args[0], (tuple, list))
        sizes = tuple(args[0]) if many else tuple(args)

        def make(samples: int) -> Tensor:
            grown = (samples, *sizes[1:])
            made: Tensor = func(grown, *args[1:], **kwargs) if many else func(*grown, **kwargs)
            return made

        self._know(
            out, Derived(func=make, args=(self._samples,), grown=(0,), samples=self._samples)
        )
        return True

    def _know(self, tensor: Tensor, derived: Derived) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), derived

    def _forget(self, tensor: Any) -> None:
        """Forget a tensor that was written to, and all tensors that share its memory."""
        self._known.pop(id(tensor), None)
        memory = _memory_of(tensor)
        if memory is None:
            return
        for key, (reference, _) in list(self._known.items()):
            other = reference()
            if other is not None and _memory_of(other) == memory:
                del self._known[key]


def _runs_an_op(func: Any) -> bool:
    """Whether a dispatch mode calls the op it was handed: part of a call, not a call of its own.

    Such an op is seen where the call itself is not: in a function that TorchScript compiled.
    """
    if not isinstance(func, OpOverload):
        return False
    frame = sys._getframe(1)
    for _ in range(_FRAMES_BETWEEN):
        if frame.f_back is None or frame.f_code.co_name == "__torch_dispatch__":
            break
        frame = frame.f_back
    return frame.f_code.co_name == "__torch_dispatch__"


def _is_constant(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call creates a tensor without reading another's values, so it counts nothing."""
    name = name_of(func)
    return not _tensors(args, kwargs) or name.startswith("new_") or name.endswith("_like")


def _site_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
    """Where the user's program or a PyTorch layer calls a function, with its string, bool and None
    arguments. None for calls from elsewhere, for properties, and where Python reads a number."""
    if getattr(func, "__name__", "") in _NO_SITES:
        return None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _PASS_ON:
        frame = frame.f_back
    if frame is None:
        return None
    file = frame.f_code.co_filename
    if file.startswith(_OOMPH) or (file.startswith(_TORCH) and not file.startswith(_LAYERS)):
        return None
    place = file, frame.f_code.co_firstlineno, frame.f_lasti
    named = ((name, _setting(value)) for name, value in kwargs.items())
    return place, name_of(func), tuple(map(_setting, args)), tuple(named)


def _setting(value: Any) -> bool | str | None:
    return value if value is None or isinstance(value, (bool, str)) else ""


def _memory_of(tensor: Any) -> int | None:
    """The storage of a tensor; None for tensors without one, such as sparse ones."""
    with DisableTorchFunction():
        try:
            return cdata_of(tensor.untyped_storage())
        except (AttributeError, NotImplementedError, RuntimeError):
            return None


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype is torch.bool


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among a call's arguments, including those in lists and tuples (not nested)."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found
