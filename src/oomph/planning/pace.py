"""A pace: what a part of a step takes of the card, and of the host that drives it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

#: How sharply the longer of card and host decides. The card waits for the host in one part of a
#: step, and the host is ahead of it in another: 35 steps on an H200 took 12 % more than the longer
#: of both in the median, and by this no more; 34 of them are within a quarter of it.
SHARPNESS = 4


@dataclass(frozen=True)
class Pace:
    """Seconds of the kernels, and those in which the host launches them."""

    kernels: float
    launching: float = 0.0

    @property
    def seconds(self) -> float:
        """About whichever takes longer; where they are alike, a fifth more."""
        return float((self.kernels**SHARPNESS + self.launching**SHARPNESS) ** (1 / SHARPNESS))

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
