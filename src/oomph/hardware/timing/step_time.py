"""Step time: what a part of a step takes on the GPU, and on the host that drives it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

#: How sharply the longer of GPU and host time decides. The GPU waits for the host in one part of a
#: step, and the host is ahead in another: 35 steps on an H200 took 12 % more than the longer of
#: both in the median, and no more than this formula gives; 34 of them are within a quarter of it.
SHARPNESS = 4


@dataclass(frozen=True)
class StepTime:
    """GPU seconds of the kernels, and host seconds to launch them."""

    kernels: float
    launching: float = 0.0

    @property
    def seconds(self) -> float:
        """About the longer of the two; if they are equal, a fifth more."""
        return float((self.kernels**SHARPNESS + self.launching**SHARPNESS) ** (1 / SHARPNESS))

    def scaled(self, by: StepTime) -> StepTime:
        """Each part multiplied by its own factor."""
        return StepTime(self.kernels * by.kernels, self.launching * by.launching)

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(self.kernels + other.kernels, self.launching + other.launching)

    def __mul__(self, times: int) -> StepTime:
        return StepTime(self.kernels * times, self.launching * times)

    def __sub__(self, other: StepTime) -> StepTime:
        """The difference, at least zero."""
        return StepTime(
            max(self.kernels - other.kernels, 0.0), max(self.launching - other.launching, 0.0)
        )


NONE = StepTime(0.0)


def ratio(pairs: Iterable[tuple[StepTime, StepTime]]) -> StepTime:
    """The median ratio of the first to the second times; 1 if there is none."""
    both = list(pairs)
    kernels = [one.kernels / other.kernels for one, other in both if other.kernels]
    launching = [one.launching / other.launching for one, other in both if other.launching]
    return StepTime(
        statistics.median(kernels) if kernels else 1.0,
        statistics.median(launching) if launching else 1.0,
    )
