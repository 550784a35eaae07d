"""The end of a recomputation, which PyTorch announces by an error inside the block's forward.

PyTorch raises it when the last tensor that backward needs is there. A forward that catches errors,
to say them in its own words or to compute something in another way, must not keep it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from oomph.torch_compat.autograd import top_saved_tensors_hooks


class RecomputeStop:
    """A context for a forward's second run; at its end it raises what PyTorch's hook raised."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._hooks: Any = None

    def __enter__(self) -> None:
        outer, unpack = top_saved_tensors_hooks(False)

        def pack(tensor: Tensor) -> Any:
            if self._error is not None:
                raise self._error  # the forward caught it, and went on
            try:
                return outer(tensor)
            except Exception as error:
                self._error = error
                raise

        self._hooks = saved_tensors_hooks(pack, unpack)
        self._hooks.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(kind, raised, traceback)
        error, self._error = self._error, None
        try:
            is_interrupt = raised is not None and not isinstance(raised, Exception)
            if error is not None and raised is not error and not is_interrupt:
                raise error from None
        finally:
            del error  # its traceback holds this frame
