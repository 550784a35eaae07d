"""Detects, in a module's hooks, whether an error passes through the module.

Always-called hooks also run when an error passes, and an unrelated error may be in handling at the
same time: a caller that plans again after a plan did not fit does so inside `except`.
"""

from __future__ import annotations

import sys


class PassingErrors:
    """Has to be called for every module that is entered and left, in order."""

    def __init__(self) -> None:
        #: By entered module: the error that was being handled at that time.
        self._handled: list[BaseException | None] = []

    def enter(self) -> None:
        """A module begins to run."""
        self._handled.append(sys.exc_info()[1])

    def leave(self) -> bool:
        """A module has ended; returns whether because of an error."""
        return sys.exc_info()[1] is not self._handled.pop()
