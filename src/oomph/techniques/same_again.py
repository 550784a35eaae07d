"""Check that a recomputed forward computes the same again: op by op, by the sums of their results.

State that a forward reads from elsewhere, such as a global variable or a file, cannot be restored.
If that changes what the forward computes, the second run is stopped before its results are used.

A second run may leave out ops of the first, such as those that filled a table which is there by
then. PyTorch stops a second run early, after which nothing shows whether an op that was left out
had changed what backward takes. So the forward runs once more then, to its end.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from oomph.techniques.watched_tensors import is_own_work
from oomph.torch_compat.autograd import top_saved_tensors_hooks
from oomph.torch_compat.dispatch import TorchDispatchMode, disable_current_modes
from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.operators import schema_of

#: Allowed difference of two sums, relative to the sum of all magnitudes: kernels may add in another
#: order.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.complex128: 1e-12}
_HALF_TOLERANCE = 1e-2

#: Ops whose results are uninitialised.
_EMPTY = ("empty", "resize", "_unsafe_masked")


#: An op, and the sums of its result.
_Op = tuple[Any, tuple[float, float] | None]


class SameAgain:
    """Compares the second run of a forward, and each later one, with the first."""

    def __init__(self, error: Callable[[str], Exception]) -> None:
        self._error = error
        self._first: list[_Op] = []
        self._again: list[_Op] = []
        #: For each tensor that the first run and the last saved for backward: the ops before.
        self._saved_after: list[int] = []
        self._again_after: list[int] = []
        self._has_run = False
        #: What the last run did otherwise than the first, which `to_the_end` looks into.
        self.difference = ""

    def run(self) -> AbstractContextManager[Any]:
        """The context in which to run the forward."""
        if not self._has_run:
            self._has_run = True

            def note(func: Any, out: Any) -> None:
                self._first.append((func, _sums_of(out)))

            return self._watching(note, lambda: self._saved_after.append(len(self._first)))
        self._again, self._again_after, self.difference = [], [], ""

        def compare(func: Any, out: Any) -> None:
            expected = self._expected
            self._again.append((func, _sums_of(out)))
            if self.difference or _is_same(expected, self._again[-1], out):
                return
            self.difference = f"it runs {func} where it ran {expected[0]} before"
            if func is expected[0]:
                self.difference = f"{func} gives other numbers when it runs again"

        def compare_place() -> None:
            at = len(self._again_after)
            self._again_after.append(len(self._again))
            if self.difference or self._saved_after[at : at + 1] == self._again_after[-1:]:
                return
            self.difference = f"it does not run {self._expected[0]}, which it ran before"

        return self._watching(compare, compare_place)

    @property
    def _expected(self) -> _Op:
        at = len(self._again)
        return self._first[at] if at < len(self._first) else ("nothing", None)

    def to_the_end(self) -> AbstractContextManager[Any]:
        """The context in which to run the forward once more, to its end; backward gets nothing.

        It must do what the last run did, and may only leave out ops of the first.
        """
        count = saved = place = 0

        def compare(func: Any, out: Any) -> None:
            nonlocal count, place
            op = func, _sums_of(out)
            if count < len(self._again) and not _is_same(self._again[count], op, out):
                raise self._error(self.difference)
            count += 1
            rest = range(place, len(self._first))
            found = next((at for at in rest if _is_same(self._first[at], op, out)), None)
            if found is None:
                raise self._error(self.difference)
            place = found + 1

        def compare_place() -> None:
            nonlocal saved
            if self._again_after[saved : saved + 1] not in ([], [count]):
                raise self._error(self.difference)
            saved += 1

        return self._watching(compare, compare_place, (_forget, _forget))

    @contextlib.contextmanager
    def _watching(
        self,
        see: Callable[[Any, Any], None],
        see_saved: Callable[[], None],
        hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Any]] | None = None,
    ) -> Iterator[None]:
        """Pass each op to `see`, and call `see_saved` before autograd saves a tensor."""
        pack, unpack = hooks or top_saved_tensors_hooks(False) or (_as_it_is, _as_it_is)

        def pack_seen(tensor: Tensor) -> Any:
            see_saved()
            return pack(tensor)

        with _EachOp(see), saved_tensors_hooks(pack_seen, unpack):
            yield


def _as_it_is(value: Any) -> Any:
    return value


def _forget(_: Any) -> None:
    """For tensors that are saved for a backward that never comes."""


def _is_same(before: _Op, now: _Op, out: Any) -> bool:
    if before[0] is not now[0]:
        return False
    return before[1] is None or _is_near(before[1], now[1], _first_tensor(out))


class _EachOp(TorchDispatchMode):
    """Passes each op that computes something, and its result, to `see`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, see: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_own_work():  # such as fetching an offloaded weight, which may be here the next time
            return out
        # Views compute nothing, and the recomputation makes other views of its arguments.
        if func.namespace == "aten" and not func.is_view and not _is_empty(func):
            # Modes that watch the forward's calls must not take these for the forward's.
            with disable_current_modes(), DisableTorchFunction():
                self._see(func, out)
        return out


def _is_empty(func: Any) -> bool:
    name: str = schema_of(func).name.removeprefix("aten::")
    return name.startswith(_EMPTY) or "empty" in name or name in ("detach", "lift_fresh", "alias")


def _first_tensor(out: Any) -> Tensor | None:
    """The first result, which is always filled: others may be buffers that a kernel left unused."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return first if isinstance(first, Tensor) else None


def _sums_of(out: Any) -> tuple[float, float] | None:
    """The sums of the result's elements and of their magnitudes; None if there are no such sums."""
    tensor = _first_tensor(out)
    if tensor is None or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    if not tensor.numel() or tensor.is_meta:
        return None
    with torch.no_grad():
        seen = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
        wide = (
            torch.float64 if seen.dtype is torch.float64 or not _is_float(seen) else torch.float32
        )
        if not _is_float(seen):
            seen = seen.to(torch.float64)
        elif seen.element_size() == 1:
            seen = seen.to(torch.float32)
        total = torch.sum(seen, dtype=wide)
        magnitude = torch.linalg.vector_norm(seen, 1, dtype=wide)
        return float(total), float(magnitude)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _is_near(
    before: tuple[float, float], now: tuple[float, float] | None, tensor: Tensor | None
) -> bool:
    if now is None or tensor is None:
        return False
    if not all(map(math.isfinite, (*before, *now))):
        return [math.isfinite(one) for one in before] == [math.isfinite(one) for one in now]
    share = _TOLERANCE.get(tensor.dtype, _HALF_TOLERANCE if _is_float(tensor) else 0.0)
    room = share * max(before[1], now[1])
    return all(abs(one - other) <= room for one, other in zip(before, now, strict=True))
