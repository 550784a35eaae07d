"""A model of the zoo: a function that makes a small training of it, as its users write it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.courses import Training


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One training, and the library whose model it is."""

    name: str
    library: str
    make: Callable[[], Training]
    draws: bool = False
    """Whether a step draws random numbers: parts of a batch draw others than the whole."""

    @property
    def is_installed(self) -> bool:
        """Whether the library is there."""
        return self.library == "hand" or importlib.util.find_spec(self.library) is not None


#: By name.
ZOO: dict[str, Entry] = {}


def enter(name: str, library: str, make: Callable[[], Training], *, draws: bool = False) -> None:
    """Put a training into the zoo."""
    assert name not in ZOO, f"two models are called {name}"
    ZOO[name] = Entry(name=name, library=library, make=make, draws=draws)


def entry(
    library: str = "hand", *, draws: bool = False
) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    """Put a function that makes a training into the zoo, under its own name."""

    def decorate(make: Callable[[], Training]) -> Callable[[], Training]:
        enter(make.__name__.replace("_", "-"), library, make, draws=draws)
        return make

    return decorate
