"""A way to write a training: a function that makes its model, loss, optimizer and batches.

It is called afresh for each cell, right after `torch.manual_seed(0)`, and must give the same
training each time. The five batches differ: three are trained on with a technique, two after undo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.courses import Training


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """A way to write a training, and what may be refused of it."""

    make: Callable[[], Training]
    refusals: Mapping[str, str]
    """By a technique's name, or `fit`: a pattern of the reason that its user would accept."""
    draws: bool
    """Whether a step draws random numbers: parts of a batch draw others than the whole."""

    @property
    def name(self) -> str:
        """The function's."""
        return self.make.__name__


#: By name.
WAYS: dict[str, Way] = {}


def way(
    *, refusals: Mapping[str, str] | None = None, draws: bool = False
) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    """Enter a function into the matrix."""

    def enter(make: Callable[[], Training]) -> Callable[[], Training]:
        assert make.__name__ not in WAYS, f"two ways are called {make.__name__}"
        WAYS[make.__name__] = Way(make=make, refusals=refusals or {}, draws=draws)
        return make

    return enter
