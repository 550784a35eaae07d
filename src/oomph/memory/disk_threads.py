"""The threads behind a disk store: each piece of a copy starts once its dependencies are done."""

from __future__ import annotations

import contextlib
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from oomph.memory.link import Copy
from oomph.memory.scratch_file import Bytes

#: Bytes per call to the disk: enough to keep it busy, few enough to split a slot among threads.
PIECE = 8 << 20
#: Pieces under way at a time.
THREADS = 4

_of_this_thread = threading.local()


class DiskCopy(ABC):
    """A disk write or read under way, as host work; see `oomph.memory.link.HostWork`.

    It holds its memory until it is done.
    """

    def __init__(self, data: Bytes) -> None:
        self.pieces = max(-(-data.nbytes // PIECE), 1)
        self.error: Exception | None = None
        self._data: Bytes | None = data
        self._left = self.pieces
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []
        self._done = threading.Event()

    def is_done(self) -> bool:
        """Whether it ended, successfully or with an error."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block the host until it is done."""
        self.finish()

    def finish(self) -> None:
        """Block the host until it is done, and raise its error, if any."""
        self._done.wait()
        if self.error is not None:
            raise _twin(self.error)

    @abstractmethod
    def move(self, piece: Bytes, index: int) -> None:
        """Copy one piece."""

    @abstractmethod
    def in_words(self, error: Exception) -> Exception:
        """Convert a system error into one of ours."""

    def run(self, index: int) -> None:
        """Copy one piece; the last piece starts the copies that waited for this one."""
        error = None
        try:
            if self.error is None and self._data is not None:
                self.move(self._data[index * PIECE : (index + 1) * PIECE], index)
        except Exception as caught:
            error = caught.with_traceback(None)  # a traceback would hold this frame and its memory
        self.piece_done(error)

    def piece_done(self, error: Exception | None) -> None:
        """Count one piece as done."""
        with self._lock:
            if error is not None and self.error is None:
                self.error = self.in_words(error)
            self._left -= 1
            if self._left:
                return
            self._data = None
            then, self._then = self._then, []
            self._done.set()
        for begin in then:
            begin()

    def when_done(self, begin: Callable[[], None]) -> None:
        """Call `begin` when this copy is over: now, or on one of its threads."""
        with self._lock:
            if not self._done.is_set():
                self._then.append(begin)
                return
        begin()


def _twin(error: Exception) -> Exception:
    """A copy of the error to raise: its own traceback would hold frames, and those hold tensors."""
    twin = type(error).__new__(type(error), *error.args)
    vars(twin).update(vars(error))
    return twin


class DiskThreads:
    """A few threads that copy pieces, and one that waits for the GPU so that they need not."""

    def __init__(self) -> None:
        self._movers = ThreadPoolExecutor(THREADS, thread_name_prefix="oomph-disk")
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="oomph-disk-wait")
        self._closing = False

    def start(self, copy: DiskCopy, earlier: Sequence[DiskCopy], after: Sequence[Copy]) -> None:
        """Begin a copy as soon as all of `earlier` are over and all of `after` are done."""
        on_disk = [*earlier, *(other for other in after if isinstance(other, DiskCopy))]
        on_link = [other for other in after if not isinstance(other, DiskCopy)]
        countdown = _Countdown(len(on_disk) + 1, lambda: self._begin(copy))
        for other in on_disk:
            other.when_done(countdown)
        if on_link:
            self._waiter.submit(self._wait_for, on_link, copy, countdown)
        else:
            countdown()

    def drop(self) -> None:
        """Drop copies that have not begun; the threads end once they are unreferenced.

        It waits for nothing and takes no lock, so a garbage collector may call it anywhere, even
        inside `threading` while it holds locks that ending threads need.
        """
        self._closing = True

    def close(self) -> None:
        """Drop copies that have not begun, wait for the others, and end the threads."""
        self.drop()
        self._waiter.shutdown()
        self._movers.shutdown()

    def _wait_for(
        self, after: Sequence[Copy], copy: DiskCopy, countdown: Callable[[], None]
    ) -> None:
        try:
            for other in after:
                other.finish()
        except Exception as error:
            copy.error = error.with_traceback(None)
        countdown()

    def _begin(self, copy: DiskCopy) -> None:
        for index in range(copy.pieces):
            try:
                self._movers.submit(self._run, copy, index)
            except RuntimeError as error:  # the threads or Python are shutting down
                copy.piece_done(error.with_traceback(None))

    def _run(self, copy: DiskCopy, index: int) -> None:
        if self._closing:
            copy.piece_done(RuntimeError("the store was closed"))
        else:
            copy.run(index)


class _Countdown:
    """Calls a function once it has itself been called `count` times, from any thread."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._count = count
        self._then = then
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._then()


def staging_buffer() -> Bytes:
    """This thread's own page-aligned staging buffer."""
    with contextlib.suppress(AttributeError):
        found: Bytes = _of_this_thread.staging
        return found
    _of_this_thread.staging = np.frombuffer(mmap.mmap(-1, PIECE), dtype=np.uint8)
    return staging_buffer()
