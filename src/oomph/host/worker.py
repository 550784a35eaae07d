"""A thread for the host's share of the work: it waits for copies there, and computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from oomph.host.link import Copy

#: Cores that this work leaves to the threads that launch kernels, forward's and backward's: a loop
#: over all cores ends when its last part does, and that one would share its core with them. Beside
#: an H200 the host's share of a step of 3 B parameters took a fifth less time on 14 of 16 cores.
LEFT_FREE = 2


class HostWorker:
    """Does what it is given in order; the thread starts with the first work and ends by `close`."""

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


def _leave_cores_free() -> None:
    """Have this thread's loops take fewer cores than there are."""
    usual = torch.get_num_threads()
    fewer = min(usual, max(1, _cores() - LEFT_FREE))
    if fewer == usual:
        return
    torch.set_num_threads(fewer)
    # It holds for this thread, and for all that start later: one that ends here takes that back.
    passing = threading.Thread(target=torch.set_num_threads, args=(usual,))
    passing.start()
    passing.join()


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
