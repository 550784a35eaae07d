"""A card's link for tests that is late where it may be, and forgives nobody who did not wait."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.memory.cuda_link import CudaLink
from oomph.memory.link import Copy, Pairs

CUDA = torch.device("cuda", 0)
PLACES = ("computing before", "computing after", "copying before", "copying after", "waiting")
#: Clock cycles of the card, about half a millisecond: many times what a copy in a test takes.
_LATE = 1_000_000


class LateLink(CudaLink):
    """Sleeps at chosen places; what was not copied yet, or was freed too early, holds nonsense."""

    def __init__(self, late: Collection[str] = ()) -> None:
        super().__init__(CUDA)
        self._late = late
        self._nonsense: list[Tensor] = []
        self.memory: list[weakref.ref[Any]] = []
        """Storages of the host memory that was asked for."""

    def host_memory(self, nbytes: int) -> Tensor:
        memory = super().host_memory(nbytes)
        self.memory.append(weakref.ref(memory.untyped_storage()))
        return memory

    def close(self) -> None:
        super().close()
        self.forget_nonsense()

    def forget_nonsense(self) -> None:
        """Give back the card's memory that is the link's own; its copies must be done."""
        self._nonsense.clear()

    def sleep(self, place: str, stream: torch.cuda.Stream | None = None) -> None:
        if place in self._late:
            with torch.cuda.stream(stream or torch.cuda.current_stream()):
                torch.cuda._sleep(_LATE)

    def _copy(self, stream: torch.cuda.Stream, pairs: Pairs, after: Sequence[Copy]) -> Copy:
        after = [copy.inner if isinstance(copy, LateCopy) else copy for copy in after]
        self.sleep("computing before")
        for source, target in pairs:
            if target.is_cuda or not source.is_cuda:
                # What goes from host to host is there at once: a stream's nonsense comes after.
                poison(target)
            else:
                self._nonsense.append(torch.empty_like(target, device=CUDA))
                poison(self._nonsense[-1])
                super()._copy(stream, [(self._nonsense[-1], target)], after)
        self.sleep("copying before", stream)
        copy = super()._copy(stream, pairs, after)
        self.sleep("copying after", stream)
        self.sleep("computing after")
        # The allocator hands out first what was freed last.
        for source, _ in pairs:
            poison(torch.empty_like(source, device=CUDA))
        return LateCopy(self, copy)


class LateCopy:
    def __init__(self, link: LateLink, inner: Copy) -> None:
        self.inner = inner
        self._link = link

    def wait(self) -> None:
        self._link.sleep("waiting")
        self.inner.wait()
        self._link.sleep("waiting")

    def finish(self) -> None:
        self.inner.finish()


def poison(tensor: Tensor) -> None:
    """Make every number wrong, though no index leads out of a tensor."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(77 if tensor.dtype is torch.uint8 else 1)
