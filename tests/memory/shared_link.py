"""A deferred link that a thread of the disk may wait for, too."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from deferred_link import DeferredCopy, DeferredLink
from torch import Tensor

from oomph.memory.link import Copy


class SharedLink(DeferredLink):
    """A deferred link that a thread of the disk may wait for, too."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.lock = threading.RLock()

    def run_until(self, job: object) -> None:
        with self.lock:
            super().run_until(job)  # type: ignore[arg-type]

    def _enqueue(
        self, queue: str, source: Tensor, target: Tensor, after: Sequence[Copy]
    ) -> DeferredCopy:
        with self.lock:
            return super()._enqueue(queue, source, target, after)
