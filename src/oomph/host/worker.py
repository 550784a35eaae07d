"""A thread for the host's share of the work: it waits for copies there, and computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from oomph.host.link import Copy


class HostWorker:
    """Does what it is given in order; the thread starts with the first work and ends by `close`."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, work: Callable[[], None], after: Sequence[Copy] = ()) -> ThreadWork:
        """Do `work` once `after` are done."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="oomph-host")
        return ThreadWork(self._pool.submit(_do, work, tuple(after)))

    def close(self) -> None:
        """Wait for what was begun; the thread ends. A later work starts another."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


class ThreadWork:
    """Work of that thread; see `oomph.host.link.HostWork`."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """The calling thread waits."""
        self._future.result()

    def finish(self) -> None:
        """The calling thread waits."""
        self._future.result()

    def is_done(self) -> bool:
        """Whether it ended, well or with an error."""
        return self._future.done()


def _do(work: Callable[[], None], after: Sequence[Copy]) -> None:
    for copy in after:
        copy.finish()
    with torch.no_grad():
        work()
