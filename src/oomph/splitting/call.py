"""One op in two forwards with different numbers of samples, as the op's rule sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from oomph.splitting.flow import Flow
from oomph.splitting.trace import Seen, Step
from oomph.torch_compat.operators import schema_of
from oomph.torch_compat.pytree import tree_leaves


class MixesSamples(Exception):
    """A rule raises this if samples are mixed; the text continues `the loss mixes samples: …`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The same op in both forwards."""

    step: Step
    other: Step
    samples: tuple[int, int]
    flow_of: Callable[[Seen], Flow]
    need: Callable[[str], int]
    """Registers a correction for the number that this op makes; returns the correction's number."""
    version_of: Callable[[Seen], object]
    """Distinguishes a tensor from the former contents of its memory, before a write."""

    @property
    def base(self) -> str:
        """The op's name without its overload, and without the underscore of an in-place op."""
        name: str = schema_of(self.step.func).name.partition("::")[2]
        return name[:-1] if name.endswith("_") and not name.endswith("__") else name

    def __getitem__(self, name: str) -> Any:
        return self.step.given.get(name)

    def flow(self, name: str) -> Flow | None:
        """The flow of an argument; None if it is not a tensor."""
        value = self.step.given.get(name)
        return self.flow_of(value) if isinstance(value, Seen) else None

    def tensors(self) -> Iterator[tuple[Seen, Flow]]:
        """The arguments that are tensors."""
        return ((seen, self.flow_of(seen)) for seen in self.step.tensors())

    @property
    def out(self) -> Seen:
        """The first result."""
        return next(self.step.made())

    def dim(self, seen: Seen, name: str = "dim", default: int = 0) -> int:
        """A dimension that an argument names, counted from the front."""
        value = self.step.given.get(name, default)
        return int(value) % max(len(seen.shape), 1)

    def dims(self, seen: Seen, name: str = "dim") -> tuple[int, ...]:
        """The dimensions that an argument names; all dimensions if it names none."""
        value = self.step.given.get(name)
        count = len(seen.shape)
        if value is None or value == []:
            return tuple(range(count))
        given = value if isinstance(value, (list, tuple)) else (value,)
        return tuple(int(one) % max(count, 1) for one in given)

    def numbers(self) -> Iterator[tuple[Any, Any]]:
        """The plain numbers among the arguments, as pairs from both forwards."""
        for name, value in self.step.given.items():
            theirs = self.other.given.get(name)
            for one, other in zip(tree_leaves(value), tree_leaves(theirs), strict=False):
                is_number = isinstance(one, (int, float)) and not isinstance(one, bool)
                if is_number and isinstance(other, (int, float)):
                    yield one, other

    def power_of(self, one: float, other: float) -> int | None:
        """How a number scales with the samples; see `power_of`."""
        return power_of(one, other, self.samples)


def power_of(one: float, other: float, samples: tuple[int, int]) -> int | None:
    """How a number scales with samples: -1 in proportion, 1 inversely, 0 not at all, else None."""
    mine, theirs = samples
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0
    if _close(one * theirs, other * mine):
        return -1
    return 1 if _close(one * mine, other * theirs) else None


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
