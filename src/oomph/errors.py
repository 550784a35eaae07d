"""Everything oomph refuses, with what to do about it (rule 7).

All errors a user can cause derive from `OomphError`; the command line turns them into one line and
exit code 2, never a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OomphError(Exception):
    """An error whose message tells the user what to do."""


class UnknownName(OomphError):
    """A model, GPU or option that is not in its catalogue; offers the nearest names."""

    def __init__(self, kind: str, name: str, known: Iterable[str], advice: str) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}{hint} ({advice})")
        self.near = near


class BadInput(OomphError):
    """A value that cannot be meant: a negative batch, a budget of NaN bytes, a malformed file."""


class CannotRehearse(OomphError):
    """The step depends on something only real data can tell; names the op and the module."""


class DoesNotFit(OomphError):
    """No plan fits the budget; `smallest` is the least device memory for which there is one."""

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


class HostTooSmall(DoesNotFit):
    """No plan fits the host's memory; `missing` is how many bytes too little.

    With `smallest` bytes of device memory there is a plan in which nothing has to leave the GPU.
    """

    def __init__(self, message: str, smallest: int, missing: int) -> None:
        super().__init__(message, smallest)
        self.missing = missing


class OutOfMemory(OomphError):
    """A step ran out of memory under every plan there is; nothing of it was kept."""


class StalePlan(OomphError):
    """A plan for another model, batch, card or PyTorch; names the difference."""


class BadCheckpoint(OomphError):
    """A checkpoint that is missing, damaged, cut short, or of a newer oomph."""


class WrongCheckpoint(BadCheckpoint):
    """A whole checkpoint of another model or optimizer; names the first difference."""


class DiskFull(OomphError):
    """The disk has too little room; `missing` is how many bytes too little, at least."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


class HostMemoryFull(OomphError):
    """The host has too little memory; `missing` is how many bytes too little."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


class DiskDamaged(OomphError):
    """The disk refuses a slot or gives back other bytes than were written; `slot` is its number."""

    def __init__(self, message: str, slot: int) -> None:
        super().__init__(message)
        self.slot = slot


class MissingExtra(OomphError):
    """A feature whose optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is needed for this: pip install 'oomph[{extra}]'")
