"""The threads behind a disk store: pieces of copies, each begun when what it waits for is done."""

from __future__ import annotations

import contextlib
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from oomph.host.link import Copy
from oomph.host.scratch_file import Bytes

#: Bytes of one call to the disk: enough to keep it busy, few enough to share a slot out.
PIECE = 8 << 20
#: Pieces that are under way at a time.
THREADS = 4

_of_this_thread = threading.local()


class DiskCopy(ABC):
    """A write or a read under way, as work of the host; see `oomph.host.link.HostWork`.

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
        """Whether it ended, well or with an error."""
        return self._done.is_set()

    def wait(self) -> None:
        """The host waits."""
        self.finish()

    def finish(self) -> None:
        """The host waits, and hears what went wrong."""
        self._done.wait()
        if self.error is not None:
            raise _twin(self.error)

    @abstractmethod
    def move(self, piece: Bytes, index: int) -> None:
        """Do one piece."""

    @abstractmethod
    def in_words(self, error: Exception) -> Exception:
        """An error of the system as one of ours."""

    def run(self, index: int) -> None:
        """Do one piece, and with the last one let those begin that waited for this copy."""
        error = None
        try:
            if self.error is None and self._data is not None:
                self.move(self._data[index * PIECE : (index + 1) * PIECE], index)
        except Exception as caught:
            error = caught.with_traceback(None)  # it would hold this frame, and with it the memory
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
        """Call `begin` when this copy is over: now, or in one of its threads."""
        with self._lock:
            if not self._done.is_set():
                self._then.append(begin)
                return
        begin()


def _twin(error: Exception) -> Exception:
    """The same error to raise: its traceback holds frames, and those hold tensors."""
    twin = type(error).__new__(type(error), *error.args)
    vars(twin).update(vars(error))
    return twin


class DiskThreads:
    """A few threads that do pieces, and one that waits for the GPU so that they need not."""

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
        """Drop what has not begun; the threads end by themselves once nobody knows them.

        It waits for nothing and takes no lock, so that a garbage collector may call it wherever it
        runs: that may be inside of `threading`, with locks held that ending threads need.
        """
        self._closing = True

    def close(self) -> None:
        """Drop what has not begun and wait for what has; no thread is left."""
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
            except RuntimeError as error:  # the threads are closing, or Python is
                copy.piece_done(error.with_traceback(None))

    def _run(self, copy: DiskCopy, index: int) -> None:
        if self._closing:
            copy.piece_done(RuntimeError("the store was closed"))
        else:
            copy.run(index)


class _Countdown:
    """Calls a function when it was called itself so many times, from whatever threads."""

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
    """This thread's own piece of memory, which begins at a page."""
    with contextlib.suppress(AttributeError):
        found: Bytes = _of_this_thread.staging
        return found
    _of_this_thread.staging = np.frombuffer(mmap.mmap(-1, PIECE), dtype=np.uint8)
    return staging_buffer()
