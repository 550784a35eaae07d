"""A pace: what a part of a step takes of the card, and of the host that drives it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Seconds of the kernels, and those in which the host launches them."""

    kernels: float
    launching: float = 0.0

    @property
    def seconds(self) -> float:
        """Whichever takes longer: the host runs ahead of the card, or the card waits for it."""
        return max(self.kernels, self.launching)

    def scaled(self, by: Pace) -> Pace:
        """Each by its own factor."""
        return Pace(self.kernels * by.kernels, self.launching * by.launching)

    def __add__(self, other: Pace) -> Pace:
        return Pace(self.kernels + other.kernels, self.launching + other.launching)

    def __mul__(self, times: int) -> Pace:
        return Pace(self.kernels * times, self.launching * times)

    def __sub__(self, other: Pace) -> Pace:
        """What is more in this one; none where it is less."""
        return Pace(
            max(self.kernels - other.kernels, 0.0), max(self.launching - other.launching, 0.0)
        )


NONE = Pace(0.0)


def ratio(pairs: Iterable[tuple[Pace, Pace]]) -> Pace:
    """How much longer the first ones take than the second, in the median; 1 where none tells."""
    both = list(pairs)
    kernels = [one.kernels / other.kernels for one, other in both if other.kernels]
    launching = [one.launching / other.launching for one, other in both if other.launching]
    return Pace(
        statistics.median(kernels) if kernels else 1.0,
        statistics.median(launching) if launching else 1.0,
    )
