"""Delays exceptions from signal handlers, such as Ctrl-C, until a step can be rolled back.

Python runs a signal's handler between any two of its instructions. An exception raised there may
leave a lock taken, a hook off its tensor, or half of the weights stepped. So while a run works,
handlers are called as usual, but their exceptions wait for the next of a few safe points: between
the parts of a batch, and before the optimizer steps. After the last of these, the step is completed
first, and the exception is raised after it.

Only the main thread runs handlers; nothing is delayed in others.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_Handler = Callable[[int, Any], Any]

#: Signals for which Python may have a handler.
_SIGNALS = sorted(signal.valid_signals())


class Interrupts:
    """Exceptions that signal handlers raised and that are not raised again yet."""

    def __init__(self) -> None:
        self._raised: BaseException | None = None
        self._own: dict[int, Any] = {}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While active, handlers' exceptions wait for `let_through`, or for the block's end."""
        if not _is_main_thread() or self._own:
            yield
            return
        try:
            self._hold()
            yield
        finally:
            self._release()
            self.let_through()

    def let_through(self) -> None:
        """Raise a waiting exception; call this where the state is consistent."""
        if self._raised is not None and _is_main_thread():
            raised, self._raised = self._raised, None
            raise raised

    def add_note(self, note: str) -> None:
        """Add a note to the waiting exception, if there is one."""
        if self._raised is not None and _is_main_thread():
            self._raised.add_note(note)

    def _hold(self) -> None:
        for number in _SIGNALS:
            own = signal.getsignal(number)
            if callable(own):
                self._own[number] = own
                signal.signal(number, self._called)

    def _release(self) -> None:
        try:
            while self._own:
                number, own = self._own.popitem()
                # Another handler may have been installed in the meantime.
                if signal.getsignal(number) == self._called:
                    signal.signal(number, own)
        finally:
            if self._own:  # the first handler that is restored may raise at once
                self._release()

    def _called(self, number: int, frame: Any) -> Any:
        own = self._own.get(number)
        if own is None:
            return
        try:
            own(number, frame)
        except BaseException as error:
            error.__traceback__ = None  # it would keep all frames alive until it is raised
            error.__context__ = self._raised
            self._raised = error


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


#: One per process, since signals are, too.
interrupts = Interrupts()
