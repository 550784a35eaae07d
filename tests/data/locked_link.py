"""The link that copies as late as it may, for two threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from deferred_link import DeferredLink
from torch import Tensor

from oomph.memory.link import Copy


class LockedLink(DeferredLink):
    """One thread at a time; counts the pieces of host memory it is asked for."""

    def __init__(self, *, eager: float = 0.0, seed: int = 0) -> None:
        super().__init__(eager=eager, seed=seed)
        self.lock = threading.RLock()
        self.pieces = 0
        self.closed = False

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        with self.lock:
            return _LockedCopy(self.lock, super().to_gpu(source, target, after))

    def host_memory(self, nbytes: int) -> Tensor:
        with self.lock:
            self.pieces += 1
            return super().host_memory(nbytes)

    def close(self) -> None:
        self.closed = True
        super().close()


class _LockedCopy:
    def __init__(self, lock: threading.RLock, copy: Copy) -> None:  # type: ignore[valid-type]
        self._lock, self._copy = lock, copy

    def wait(self) -> None:
        with self._lock:
            self._copy.wait()

    def finish(self) -> None:
        with self._lock:
            self._copy.finish()
