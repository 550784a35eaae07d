"""A worker thread for the host's work: it waits for copies, then computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from oomph.memory.link import Copy

#: Cores left to the threads that launch the kernels of forward and backward. A parallel loop ends
#: with its slowest part, which would be the one that shares a core with them. Beside an H200, the
#: host's part of a step of 3 B parameters took a fifth less time on 14 of 16 cores.
LEFT_FREE = 2


class HostWorker:
    """Runs work in order; the thread starts with the first item and ends in `close`."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, work: Callable[[], None], after: Sequence[Copy] = ()) -> ThreadWork:
        """Do `work` once `after` are done."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                max_workers=1, thread_name_prefix="oomph-host", initializer=_leave_cores_free
            )
        return ThreadWork(self._pool.submit(_do, work, tuple(after)))

    def close(self) -> None:
        """Wait for pending work and end the thread; later work starts another."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


class ThreadWork:
    """Work on that thread; see `oomph.memory.link.HostWork`."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Block the calling thread until it is done."""
        self._future.result()

    def finish(self) -> None:
        """Block the calling thread until it is done."""
        self._future.result()

    def is_done(self) -> bool:
        """Whether it ended, successfully or with an error."""
        return self._future.done()


def _do(work: Callable[[], None], after: Sequence[Copy]) -> None:
    for copy in after:
        copy.finish()
    with torch.no_grad():
        work()


def _leave_cores_free() -> None:
    """Make this thread's parallel loops use fewer cores than there are."""
    usual = torch.get_num_threads()
    fewer = min(usual, max(1, _cores() - LEFT_FREE))
    if fewer == usual:
        return
    torch.set_num_threads(fewer)
    # This also applies to threads started later: a short-lived thread restores the default.
    passing = threading.Thread(target=torch.set_num_threads, args=(usual,))
    passing.start()
    passing.join()


def _cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
