"""Allows one call of a run at a time; refuses overlapping ones before anything changes.

A step, a save and an undo each assume that nothing else changes the model meanwhile. Overlapping
calls would mix their weights, or free memory that the other still uses.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from oomph.errors import RunBusy


class OneAtATime:
    """Lets one call of a run through at a time, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The call in progress, and its thread, if any.
        self._doing = ""
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """While active, refuses other calls; `what` is the call as the user writes it."""
        if not self._lock.acquire(blocking=False):
            raise self._busy(what)
        try:
            self._doing, self._thread = what, threading.current_thread()
            yield
        finally:
            self._doing, self._thread = "", None
            self._lock.release()

    def check_reader(self, what: str) -> None:
        """Refuse to read what another thread is changing; the calling thread itself may read it."""
        if self._lock.locked() and self._thread is not threading.current_thread():
            raise self._busy(what)

    def _busy(self, what: str) -> RunBusy:
        if self._thread is threading.current_thread():
            return RunBusy(f"{what} was called inside of {self._doing}: call it when that is over")
        return RunBusy(
            f"{what} was called while another thread is inside of {self._doing or 'a call'}: a run"
            " does one thing at a time; call it from one thread, or hold a lock around each call"
        )
