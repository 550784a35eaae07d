"""`torch.cuda.FloatTensor` and the like, which old code calls, queries and sets as the default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from oomph.process.rehearsal_threads import replaced_here, shown_here
from oomph.rehearsal.destinations import OLD_TYPES, destination_of_type
from oomph.rehearsal.recorder import Recorder, Side


class OldType:
    """Stands for one of the types, which PyTorch has only in builds with CUDA."""

    __module__ = "torch.cuda"
    is_cuda = True
    is_sparse = False
    layout = torch.strided

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.dtype = OLD_TYPES[name]

    def __call__(self, *args: Any, **_: Any) -> Tensor:
        """A new tensor: uninitialised if given sizes, otherwise filled with the given data."""
        first = args[0] if args else 0
        if isinstance(first, Tensor):
            if first.type() != repr(self):
                raise TypeError(f"expected {self!r} (got {first.type()})")
            return first.view_as(first)
        if isinstance(first, (int, torch.Size)):
            sizes = first if isinstance(first, torch.Size) else args or (0,)
            return torch.empty(sizes, dtype=self.dtype, device="cuda")
        return torch.tensor(first, dtype=self.dtype, device="cuda")

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.type() == repr(self)

    def __repr__(self) -> str:
        return f"torch.cuda.{self.__name__}"


@contextlib.contextmanager
def old_types(recorder: Recorder) -> Iterator[None]:
    """While active, the types exist, and each can be made the default tensor type."""
    set_real = torch.set_default_tensor_type

    def set_default(wanted: Any) -> None:
        found = destination_of_type(wanted)
        if found is None or found.dtype is None or not found.dtype.is_floating_point:
            set_real(wanted)  # raises an error
            return
        recorder.side_of_new = found.side or recorder.side_of_new
        torch.set_default_dtype(found.dtype)
        torch.set_default_device("cuda" if found.side is Side.GPU else None)

    with contextlib.ExitStack() as stack:
        for name in OLD_TYPES:
            stack.enter_context(shown_here(torch.cuda, name, OldType(name)))
        stack.enter_context(replaced_here(torch, "set_default_tensor_type", set_default))
        yield
