"""oomph's errors; their messages say what to do (rule 7).

All errors a user can cause derive from `OomphError`; the command line turns them into one line and
exit code 2, never a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from oomph.quoting import printable

#: Longest message, in characters: a name from an untrusted file may be longer.
_LONGEST = 4_000


class OomphError(Exception):
    """An error whose message tells the user what to do."""

    def __str__(self) -> str:
        text = printable(super().__str__())
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 503]} … {text[-500:]}"


class UnknownName(OomphError):
    """A model, GPU or option that is not in its catalogue; suggests the nearest names."""

    def __init__(self, kind: str, name: str, known: Iterable[str], advice: str) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}{hint} ({advice})")
        self.near = near


class BadInput(OomphError):
    """An invalid value: a negative batch, a budget of NaN bytes, a malformed file."""


class CannotRehearse(OomphError):
    """The step depends on values that only real data has; names the op and the module."""


class NotRepeatable(OomphError):
    """A block cannot be recomputed, because its second forward differs; names it and the reason."""


class SteppedTooEarly(OomphError):
    """Backward used a weight after it was stepped in that backward; the next attempt will not."""


class DoesNotFit(OomphError):
    """No plan fits the budget; `smallest` is the least device memory for which a plan exists."""

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


class HostTooSmall(DoesNotFit):
    """No plan fits the host's memory, which lacks `missing` bytes.

    With `smallest` bytes of device memory there is a plan that offloads nothing.
    """

    def __init__(self, message: str, smallest: int, missing: int) -> None:
        super().__init__(message, smallest)
        self.missing = missing


class OutOfMemory(OomphError):
    """A step ran out of memory under every available plan; none of its results were kept."""


class RunBusy(OomphError):
    """A run was called while it was busy; the new call did not start anything."""


class StepBroken(BadInput):
    """A step failed when some weights were stepped and others were not, with no copy of them.

    The weights are partly those of the next step: load a checkpoint, or undo and go on with them.
    """


class StalePlan(OomphError):
    """A plan for another model, batch, GPU or PyTorch version; names the difference."""


class BadCheckpoint(OomphError):
    """A checkpoint that is missing, damaged, truncated, or from a newer oomph."""


class WrongCheckpoint(BadCheckpoint):
    """An intact checkpoint of another model or optimizer; names the first difference."""


class DiskFull(OomphError):
    """The disk has too little room; at least `missing` bytes are lacking."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


class HostMemoryFull(OomphError):
    """The host has too little memory; `missing` bytes are lacking."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


class DiskDamaged(OomphError):
    """The disk refuses a slot or returns other bytes than were written; `slot` is its number."""

    def __init__(self, message: str, slot: int) -> None:
        super().__init__(message)
        self.slot = slot


class MissingExtra(OomphError):
    """A feature whose optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is needed for this: pip install 'oomph[{extra}]'")
