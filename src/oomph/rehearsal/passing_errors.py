"""Whether an error passes through a module, told in its hooks.

Hooks that are always called are also called by errors, and Python knows of an error that is being
handled as well: somebody who plans again since a plan did not fit does so inside of `except`.
"""

from __future__ import annotations

import sys


class PassingErrors:
    """Told of every module that is entered and left, in order."""

    def __init__(self) -> None:
        #: By module that was entered: the error that was being handled by then.
        self._handled: list[BaseException | None] = []

    def enter(self) -> None:
        """A module begins to run."""
        self._handled.append(sys.exc_info()[1])

    def leave(self) -> bool:
        """It is over; whether that is because of an error."""
        return sys.exc_info()[1] is not self._handled.pop()
