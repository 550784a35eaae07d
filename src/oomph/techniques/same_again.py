"""Check that a recomputed forward computes the same again: op by op, by the sums of their results.

State that a forward reads from elsewhere, such as a global variable or a file, cannot be restored.
If that changes what the forward computes, the second run is stopped before its results are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oomph.techniques.watched_tensors import is_own_work
from oomph.torch_compat.dispatch import TorchDispatchMode, disable_current_modes
from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.operators import schema_of

#: Allowed difference of two sums, relative to the sum of all magnitudes: kernels may add in another
#: order.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.complex128: 1e-12}
_HALF_TOLERANCE = 1e-2

#: Ops whose results are uninitialised.
_EMPTY = ("empty", "resize", "_unsafe_masked")


class SameAgain:
    """Compares the second run of a forward, and each later one, with the first."""

    def __init__(self, error: Callable[[str], Exception]) -> None:
        self._error = error
        self._ops: list[tuple[Any, tuple[float, float] | None]] = []
        self._has_run = False

    def run(self) -> TorchDispatchMode:
        """The mode in which to run the forward."""
        if not self._has_run:
            self._has_run = True
            return _EachOp(self._first)
        left = iter(self._ops)

        def compare(func: Any, out: Any) -> None:
            then, sums = next(left, (None, None))
            if then is not func:
                raise self._error(f"it runs {func} where it ran {then or 'nothing'} before")
            if sums is not None and not _is_near(sums, _sums_of(out), _first_tensor(out)):
                raise self._error(f"{func} gives other numbers when it runs again")

        return _EachOp(compare)

    def _first(self, func: Any, out: Any) -> None:
        self._ops.append((func, _sums_of(out)))


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
