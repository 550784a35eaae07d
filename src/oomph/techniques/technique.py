"""What all techniques share: how true they stay to the job, and how they are taken back."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

#: Takes a technique back; calling it again does nothing.
Undo = Callable[[], None]


class Fidelity(StrEnum):
    """How far results may be from the untouched job's, nearest first."""

    EXACT = "exact"
    """The same maths; only the order of floating-point sums may differ."""
    ROUNDING = "rounding"
    """Other number formats along the way, as autocast uses them."""
    LOSSY = "lossy"
    """Information is dropped, as 8-bit optimizer state does."""

    def allows(self, other: Fidelity) -> bool:
        """Whether somebody who accepts this accepts `other`."""
        order = list(Fidelity)
        return order.index(other) <= order.index(self)
