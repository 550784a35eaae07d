"""How far a technique may take results from the untouched job's."""

from __future__ import annotations

from enum import StrEnum


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


def of_fused_kernels(precision: str) -> Fidelity:
    """Fused kernels do not round between the ops they fuse, which shows in half precision."""
    return Fidelity.EXACT if precision in ("fp32", "tf32") else Fidelity.ROUNDING
